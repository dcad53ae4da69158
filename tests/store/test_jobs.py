"""Jobs: each delivery exactly once whatever overlaps, stops or breaks, in order where that is asked, and counts that add up."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.errors import AlreadyThere, IllegalTransition
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import FailureClass
from madeira.store import audit, cancelling, configuration, events, job_steps, job_work, jobs
from madeira.store.database import Database
from madeira.store.job_steps import Step, step
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.store import making

Connection = psycopg.Connection[Any]

REPLAY = NewJob("replay", Selection(), "the partner is back")
UNORDERED = replace(REPLAY, ordered=False)
CANCEL = NewJob("cancel", Selection(), "nobody wants them", among="unfinished")
REROUTE = NewJob("reroute", Selection(), "the route was missing")


def dead(conn: Connection, number: int = 1, endpoint: str = "a", **fields: Any) -> list[DeliveryRef]:
    """So many dead deliveries, each of an event of its own, in the order of their events."""
    refs = [making.routed(conn, (endpoint,), **fields)[0] for _ in range(number)]
    for ref in refs:
        kill(conn, ref)
    return refs


def kill(conn: Connection, ref: DeliveryRef) -> None:
    making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)


def succeed(conn: Connection, ref: DeliveryRef) -> None:
    making.settled(conn, making.claimed(conn, ref))


def born_dead(conn: Connection, endpoint: str = "a") -> DeliveryRef:
    seq = making.accept(conn)
    plan = PlannedDelivery(endpoint, endpoint, failure_class=FailureClass.TEMPLATE, last_error="template: no")
    return events.route(conn, [(seq, [plan])])[0].dead[0]


def unrouted(conn: Connection) -> int:
    seq = making.accept(conn)
    events.route(conn, [(seq, [])])
    return seq


def made(conn: Connection, job: NewJob, who: str = "admin") -> int:
    return int(jobs.create(conn, job, who)[0]["id"])


def shown(conn: Connection, job_id: int) -> dict[str, Any]:
    found = jobs.find(conn, job_id)
    assert found is not None
    return found


def numbers(conn: Connection, job_id: int) -> tuple[int, ...]:
    """Total, done, failed, skipped, begun, left."""
    found = shown(conn, job_id)
    return tuple(found[name] for name in ("total", "done", "failed", "skipped", "begun", "left"))


def steps(conn: Connection, job_id: int, after: Callable[[Step], object] = lambda _step: None) -> list[DeliveryRef]:
    """Step until nothing moves; all that was begun, in its order."""
    begun: list[DeliveryRef] = []
    for _ in range(10_000):
        done = step(conn, job_id)
        begun += done.begun
        after(done)
        if done.is_over or not (done.moved or done.begun):
            return begun
    raise AssertionError("the job goes on for ever")


def delivers(conn: Connection, failing: frozenset[DeliveryRef] = frozenset()) -> Callable[[Step], None]:
    """What workers do after a step: deliver what it has begun; those in `failing` die again."""

    def work(done: Step) -> None:
        for ref in done.begun:
            (kill if ref in failing else succeed)(conn, ref)

    return work


def records(conn: Connection, job_id: int) -> list[tuple[str, str]]:
    """Who did what to a job, in the order of time."""
    return [(row["who"], row["action"]) for row in reversed(audit.page(conn, limit=100, what=f"job {job_id}"))]


def attempts(conn: Connection, ref: DeliveryRef) -> int:
    return int(making.delivery(conn, ref.delivery_id)["attempt"])


# -- replay -------------------------------------------------------------------------------------------------------


def test_a_replay_delivers_each_dead_letter_once_and_its_counts_add_up(conn: Connection) -> None:
    refs = dead(conn, 7)
    job = made(conn, UNORDERED)
    assert numbers(conn, job) == (7, 0, 0, 0, 0, 7)
    begun = steps(conn, job, delivers(conn, frozenset(refs[2:4])))
    assert begun == refs
    assert [attempts(conn, ref) for ref in refs] == [2] * 7
    assert numbers(conn, job) == (7, 5, 2, 0, 0, 0)
    assert shown(conn, job)["state"] == "done"
    assert making.counts_agree(conn)


def test_what_a_replay_begins_is_in_its_line_with_a_fresh_budget_and_says_by_which_job(conn: Connection) -> None:
    [ref] = dead(conn)
    job = made(conn, REPLAY)
    step(conn, job)
    row = making.delivery(conn, ref.delivery_id)
    assert (row["line"], row["failures"], row["attempt"], row["job_id"]) == ("replay", 0, 1, job)


def test_a_replay_begins_no_more_than_its_window(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_work, "WINDOW", 3)
    refs = dead(conn, 5)
    job = made(conn, UNORDERED)
    assert steps(conn, job) == refs[:3]
    assert numbers(conn, job) == (5, 0, 0, 0, 3, 2)
    succeed(conn, refs[1])
    assert steps(conn, job) == refs[3:4]
    assert making.delivery(conn, refs[4].delivery_id)["status"] == "dead"


def test_an_endpoint_that_takes_nothing_leaves_room_for_the_others(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_work, "WINDOW", 4)
    stuck, fine = dead(conn, 6, "stuck"), dead(conn, 6, "fine")
    job = made(conn, UNORDERED)

    def work(done: Step) -> None:
        for ref in done.begun:
            if ref.lane == "fine":
                succeed(conn, ref)

    begun = steps(conn, job, work)
    assert set(fine) <= set(begun)
    assert len(set(begun) & set(stuck)) < len(stuck)


def test_an_ordered_replay_begins_one_of_each_endpoint_in_the_order_of_the_events(conn: Connection) -> None:
    mine = [making.routed(conn, ("a",))[0] for _ in range(4)]
    theirs = [making.routed(conn, ("b",))[0] for _ in range(3)]
    # They die in another order than they were accepted in.
    for ref in [mine[2], mine[0], theirs[1], mine[3], mine[1], theirs[0], theirs[2]]:
        kill(conn, ref)
    job = made(conn, REPLAY)
    assert steps(conn, job) == [mine[0], theirs[0]]
    making.settled(conn, making.claimed(conn, mine[0]), making.RETRY)
    assert steps(conn, job) == [], "one that is to be tried again has not ended"
    making.make_due(conn, mine[0].delivery_id)
    kill(conn, mine[0])
    assert steps(conn, job) == [mine[1]]
    succeed(conn, theirs[0])
    assert steps(conn, job) == [theirs[1]]
    succeed(conn, mine[1])
    succeed(conn, theirs[1])
    assert steps(conn, job, delivers(conn)) == [mine[2], theirs[2], mine[3]]
    assert numbers(conn, job) == (7, 6, 1, 0, 0, 0)


def test_what_died_after_the_job_was_made_is_none_of_its(conn: Connection) -> None:
    before = dead(conn, 2)
    job = made(conn, UNORDERED)
    after = dead(conn, 2)
    assert steps(conn, job, delivers(conn, frozenset(before))) == before, "nor what died again by it"
    assert [attempts(conn, ref) for ref in after] == [1, 1]
    assert numbers(conn, job) == (2, 0, 2, 0, 0, 0)


def test_a_replay_passes_over_what_cannot_be_sent_and_says_why(conn: Connection) -> None:
    never = born_dead(conn)
    [gone, fine] = dead(conn, 2)
    conn.execute("UPDATE event SET erased_at = now(), erased_by = 'person' WHERE seq = %s", (gone.seq,))
    job = made(conn, REPLAY)
    assert steps(conn, job, delivers(conn)) == [fine]
    assert making.delivery(conn, never.delivery_id)["status"] == "dead"
    assert numbers(conn, job) == (3, 1, 0, 2, 0, 0)
    assert shown(conn, job)["skips"] == {"born_dead": 1, "erased": 1}


@pytest.mark.parametrize("job", [REPLAY, replace(CANCEL, among="dead")], ids=["replay", "cancel"])
def test_what_is_dead_of_an_event_that_is_being_routed_again_is_left_alone(conn: Connection, job: NewJob) -> None:
    """Its state is for its routing to say."""
    seq = making.accept(conn)
    born = PlannedDelivery("b", "b", failure_class=FailureClass.TEMPLATE, last_error="template: no")
    [ref] = events.route(conn, [(seq, [PlannedDelivery("a", "a"), born])])[0].refs
    kill(conn, ref)
    steps(conn, made(conn, REROUTE))
    assert making.event(conn, seq)["status"] == "pending"
    job_id = made(conn, job)
    assert steps(conn, job_id) == []
    assert shown(conn, job_id)["skips"] == {"not_routed": 1}
    assert making.delivery(conn, ref.delivery_id)["status"] == "dead"


def test_many_that_cannot_be_sent_do_not_hold_an_ordered_replay_up(conn: Connection) -> None:
    for _ in range(60):
        born_dead(conn)
    [fine] = dead(conn)
    job = made(conn, REPLAY)
    assert steps(conn, job, delivers(conn)) == [fine]
    assert numbers(conn, job) == (61, 1, 0, 60, 0, 0)


def test_a_replay_is_narrowed_by_its_selection(conn: Connection) -> None:
    [other] = dead(conn, event_type="order.refused")
    [mine] = dead(conn, event_type="order.paid")
    job = made(conn, replace(REPLAY, selection=Selection(event_type="order.p*", endpoint="a")))
    assert steps(conn, job, delivers(conn)) == [mine]
    assert attempts(conn, other) == 1


def test_pages_go_on_where_few_of_many_are_wanted(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("madeira.store.job_walks.LOOK", 4)
    wanted = []
    for _ in range(3):
        dead(conn, 5, event_type="other")
        wanted += dead(conn, 1, event_type="wanted")
    job = made(conn, replace(REPLAY, selection=Selection(event_type="wanted")))
    assert steps(conn, job, delivers(conn)) == wanted
    assert numbers(conn, job) == (3, 3, 0, 0, 0, 0)


def test_a_rate_is_how_many_go_in_a_second(conn: Connection) -> None:
    refs = dead(conn, 4)
    job = made(conn, replace(UNORDERED, rate=2.0))
    first = step(conn, job)
    assert first.begun == refs[:1]
    waiting = step(conn, job)
    assert (waiting.begun, 0.3 < waiting.wait_s <= 0.5) == ([], True)
    conn.execute("UPDATE job SET next_at = clock_timestamp() - interval '0.6 s'")
    assert step(conn, job).begun == refs[1:3], "what was missed in the last second is made up for"
    conn.execute("UPDATE job SET next_at = clock_timestamp() - interval '1 h'")
    assert step(conn, job).begun == refs[3:], "no more than that"
    ((ahead,),) = conn.execute("SELECT extract(epoch FROM next_at - clock_timestamp())::float8 FROM job")
    assert 0.3 < ahead <= 0.5


# -- exactly once -------------------------------------------------------------------------------------------------


def test_of_overlapping_jobs_each_delivery_is_replayed_by_one_and_the_others_say_so(database: Database, conn: Connection) -> None:
    refs = dead(conn, 40)
    ids = [made(conn, UNORDERED, f"operator {n}") for n in range(4)]
    start = threading.Barrier(4)
    begun: list[DeliveryRef] = []

    def run(job_id: int) -> None:
        with database.connect() as own:
            start.wait()
            begun.extend(steps(own, job_id))

    threads = [threading.Thread(target=run, args=(job_id,)) for job_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun, key=lambda ref: ref.delivery_id) == refs
    for ref in refs:
        kill(conn, ref)
    for job_id in ids:
        assert steps(conn, job_id) == [], "what died by one job is dead since after all of them were made"
    found = [shown(conn, job_id) for job_id in ids]
    assert [job["state"] for job in found] == ["done"] * 4
    assert sum(job["failed"] for job in found) == 40
    assert [job["failed"] + job["skipped"] for job in found] == [40] * 4
    assert [job["skips"].get("no_longer", 0) for job in found] == [job["skipped"] for job in found]


def test_two_that_go_on_with_one_job_at_once_begin_each_delivery_once(database: Database, conn: Connection) -> None:
    refs = dead(conn, 30)
    job = made(conn, replace(UNORDERED, rate=1000))
    start = threading.Barrier(3)
    begun: list[DeliveryRef] = []

    def run() -> None:
        with database.connect() as own:
            start.wait()
            while len(found := step(own, job).begun) or numbers(own, job)[5]:
                begun.extend(found)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun, key=lambda ref: ref.delivery_id) == refs
    assert numbers(conn, job) == (30, 0, 0, 0, 30, 0)


@pytest.mark.parametrize("job", [REPLAY, UNORDERED, CANCEL, replace(CANCEL, among="dead"), REROUTE])
def test_a_step_that_is_lost_before_its_commit_has_done_nothing(conn: Connection, job: NewJob) -> None:
    dead(conn, 3)
    born_dead(conn)
    unrouted(conn)
    making.accept(conn)
    making.claimed(conn, making.routed(conn)[0])
    making.routed(conn)
    job_id = made(conn, job)
    tables = ("event", "delivery", "delivery_log", "job", "job_part", "job_begun", "audit")

    def everything() -> list[Any]:
        return [conn.execute(f"SELECT * FROM {table} ORDER BY 1, 2".encode()).fetchall() for table in tables]

    before = everything()
    with conn.transaction(force_rollback=True):
        assert step(conn, job_id).moved
    assert everything() == before
    steps(conn, job_id, delivers(conn))
    total, done, failed, skipped, begun, left = numbers(conn, job_id)
    assert total == done + failed + skipped + begun
    assert left == 0


def test_a_request_that_is_sent_twice_makes_one_job(database: Database, conn: Connection) -> None:
    dead(conn, 2)
    asked = replace(REPLAY, key="click-1")
    start = threading.Barrier(20)
    found: list[tuple[int, bool]] = []

    def ask() -> None:
        with database.connect() as own:
            start.wait()
            job, is_new = jobs.create(own, asked, "admin")
            found.append((job["id"], is_new))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job_id for job_id, _ in found}) == 1
    assert sum(is_new for _, is_new in found) == 1
    assert records(conn, found[0][0]) == [("admin", "replay")]
    with pytest.raises(AlreadyThere, match="click-1"):
        jobs.create(conn, replace(asked, reason="another one"), "admin")


# -- pause, resume, cancel ----------------------------------------------------------------------------------------


def test_a_paused_job_begins_nothing_counts_what_it_began_and_goes_on_where_it_was(conn: Connection) -> None:
    refs = dead(conn, 3)
    job = made(conn, REPLAY)
    step(conn, job)
    jobs.steer(conn, job, "pause", "admin", "wait")
    succeed(conn, refs[0])
    assert jobs.runnable(conn) == [job]
    assert steps(conn, job) == []
    assert numbers(conn, job) == (3, 1, 0, 0, 0, 2)
    assert jobs.runnable(conn) == []
    jobs.steer(conn, job, "resume", "admin", None)
    assert jobs.runnable(conn) == [job]
    assert steps(conn, job, delivers(conn)) == refs[1:]
    assert records(conn, job) == [("admin", "replay"), ("admin", "pause"), ("admin", "resume"), ("madeira", "end")]


def test_a_cancelled_job_begins_nothing_more_and_ends_with_what_it_began(conn: Connection) -> None:
    refs = dead(conn, 3)
    job = made(conn, REPLAY)
    step(conn, job)
    assert shown(conn, job)["begun"] == 1
    jobs.steer(conn, job, "cancel", "admin", "enough")
    assert steps(conn, job) == []
    assert shown(conn, job)["finished_at"] is None
    kill(conn, refs[0])
    assert step(conn, job).is_over
    assert numbers(conn, job) == (3, 0, 1, 0, 0, 2)
    assert shown(conn, job)["state"] == "cancelled"
    assert [making.delivery(conn, ref.delivery_id)["status"] for ref in refs[1:]] == ["dead", "dead"]
    assert records(conn, job) == [("admin", "replay"), ("admin", "cancel"), ("madeira", "end")]
    assert jobs.runnable(conn) == []


def test_a_job_is_steered_twice_as_once_and_not_after_its_end(conn: Connection) -> None:
    dead(conn, 1)
    job = made(conn, REPLAY)
    jobs.steer(conn, job, "pause", "admin", "wait")
    again = jobs.steer(conn, job, "pause", "ben", "wait")
    assert again is not None
    paused = conn.execute("SELECT at FROM audit WHERE action = 'pause'").fetchone()
    assert (again.job["state"], again.already, (again.since,), again.by) == ("paused", True, paused, "admin")
    first = jobs.steer(conn, job, "resume", "ben", None)
    assert first is not None
    assert (first.already, first.by) == (False, "ben")
    steps(conn, job, delivers(conn))
    assert records(conn, job) == [("admin", "replay"), ("admin", "pause"), ("ben", "resume"), ("madeira", "end")]
    for word in ("pause", "resume", "cancel"):
        with pytest.raises(IllegalTransition, match="done already"):
            jobs.steer(conn, job, word, "admin", "late")
    assert jobs.steer(conn, job + 1, "pause", "admin", "wait") is None


def test_the_record_of_a_jobs_end_says_what_came_of_it(conn: Connection) -> None:
    [_, second] = dead(conn, 2)
    job = made(conn, replace(REPLAY, selection=Selection(endpoint="a")))
    steps(conn, job, delivers(conn, frozenset([second])))
    end, start = audit.page(conn, limit=2, what=f"job {job}")
    assert start["detail"] == {"filter": {"endpoint": "a"}, "total": 2, "among": "dead", "ordered": True, "rate": None}
    assert end["detail"] == {"state": "done", "total": 2, "done": 1, "failed": 1, "skipped": 0, "begun": 0, "skips": {}}
    assert (start["why"], end["why"]) == (REPLAY.reason, REPLAY.reason)


def test_a_job_whose_pages_fail_again_and_again_fails_and_says_why(conn: Connection) -> None:
    dead(conn)
    job = made(conn, REPLAY)
    for _ in range(job_steps.MAX_STUMBLES):
        assert shown(conn, job)["state"] == "running"
        assert not job_steps.stumble(conn, job, "ValueError: no")
    assert step(conn, job).is_over
    found = shown(conn, job)
    assert (found["state"], found["error"]) == ("failed", "ValueError: no")
    assert records(conn, job) == [("admin", "replay"), ("madeira", "end")]
    with pytest.raises(IllegalTransition, match="failed already"):
        jobs.steer(conn, job, "resume", "admin", None)


def test_a_job_that_fails_still_counts_what_it_has_begun(conn: Connection) -> None:
    [ref, _] = dead(conn, 2)
    job = made(conn, REPLAY)
    step(conn, job)
    for _ in range(job_steps.MAX_STUMBLES):
        job_steps.stumble(conn, job, "ValueError: no")
    assert steps(conn, job) == []
    assert shown(conn, job)["finished_at"] is None
    succeed(conn, ref)
    assert step(conn, job).is_over
    assert numbers(conn, job) == (2, 1, 0, 0, 0, 1)
    assert shown(conn, job)["error"] == "ValueError: no"


def test_a_job_of_which_not_even_the_beginnings_can_be_counted_ends_all_the_same(conn: Connection) -> None:
    dead(conn)
    job = made(conn, REPLAY)
    answers = [job_steps.stumble(conn, job, "ValueError: no") for _ in range(2 * job_steps.MAX_STUMBLES)]
    assert answers == [False] * (2 * job_steps.MAX_STUMBLES - 1) + [True]
    assert step(conn, job).is_over


def test_a_page_that_succeeds_makes_up_for_those_that_failed(conn: Connection) -> None:
    dead(conn, 3)
    job = made(conn, REPLAY)
    for _ in range(3):
        for _ in range(job_steps.MAX_STUMBLES - 1):
            assert not job_steps.stumble(conn, job, "once")
        [ref] = step(conn, job).begun
        succeed(conn, ref)
    assert (shown(conn, job)["state"], shown(conn, job)["error"]) == ("running", None)


# -- cancel and reroute -------------------------------------------------------------------------------------------


def test_a_cancel_ends_what_waits_and_asks_for_the_end_of_what_is_called(conn: Connection) -> None:
    waiting = making.routed(conn)[0]
    called, lucky = making.routed(conn)[0], making.routed(conn)[0]
    held, held_lucky = making.claimed(conn, called), making.claimed(conn, lucky)
    early = making.accept(conn)
    [over] = dead(conn)
    job = made(conn, CANCEL)
    assert numbers(conn, job) == (4, 0, 0, 0, 0, 4)
    ended: list[DeliveryRef] = []
    unrouted: list[int] = []

    def note(done: Step) -> None:
        ended.extend(done.ended)
        unrouted.extend(done.unrouted)

    steps(conn, job, note)
    assert (ended, unrouted) == ([waiting], [early])
    assert numbers(conn, job) == (4, 2, 0, 0, 2, 0)
    making.settled(conn, held, making.RETRY)
    making.settled(conn, held_lucky)
    steps(conn, job)
    assert numbers(conn, job) == (4, 3, 0, 1, 0, 0)
    assert shown(conn, job)["skips"] == {"succeeded": 1}
    assert making.delivery(conn, over.delivery_id)["status"] == "dead"
    assert making.event(conn, early)["status"] == "cancelled"
    assert making.delivery(conn, waiting.delivery_id)["job_id"] == job
    assert making.counts_agree(conn)


def test_a_cancel_leaves_alone_what_was_accepted_after_it_was_made(conn: Connection) -> None:
    making.accept(conn)
    making.routed(conn)
    job = made(conn, CANCEL)
    later, ref = making.accept(conn), making.routed(conn)[0]
    steps(conn, job)
    assert numbers(conn, job) == (2, 2, 0, 0, 0, 0)
    assert making.event(conn, later)["status"] == "pending"
    assert making.delivery(conn, ref.delivery_id)["status"] == "pending"


def test_a_cancel_meets_what_is_routed_before_it_comes_to_it(conn: Connection) -> None:
    seq = making.accept(conn)
    job = made(conn, CANCEL)
    [ref] = events.route(conn, [(seq, [PlannedDelivery("a", "a")])])[0].refs
    steps(conn, job)
    assert making.delivery(conn, ref.delivery_id)["status"] == "cancelled"
    assert numbers(conn, job) == (1, 1, 0, 0, 0, 0)


def test_a_cancel_of_the_dead_ends_them_and_nothing_else(conn: Connection) -> None:
    refs = dead(conn, 2)
    both = making.routed(conn, ("a", "b"))
    kill(conn, both[0])
    job = made(conn, replace(CANCEL, among="dead"))
    steps(conn, job)
    assert [making.delivery(conn, ref.delivery_id)["status"] for ref in (*refs, *both)] == ["cancelled"] * 3 + ["pending"]
    assert making.event(conn, refs[0].seq)["status"] == "cancelled"
    assert making.event(conn, both[0].seq)["status"] == "delivering"
    assert numbers(conn, job) == (3, 3, 0, 0, 0, 0)
    assert making.counts_agree(conn)


def test_a_reroute_takes_what_found_no_route_and_what_was_born_dead(conn: Connection) -> None:
    seq, born, [attempted] = unrouted(conn), born_dead(conn), dead(conn)
    job = made(conn, REROUTE)
    to_route: list[int] = []
    steps(conn, job, lambda done: to_route.extend(done.to_route))
    assert sorted(to_route) == [seq, born.seq]
    assert making.event(conn, seq)["status"] == making.event(conn, born.seq)["status"] == "pending"
    assert making.event(conn, attempted.seq)["status"] == "dead"
    assert numbers(conn, job) == (2, 2, 0, 0, 0, 0)
    assert events.route(conn, [(born.seq, [PlannedDelivery("a", "a")])])[0].refs
    assert making.counts_agree(conn)


def test_a_reroute_leaves_alone_what_another_one_took(conn: Connection) -> None:
    unrouted(conn)
    first, second = made(conn, REROUTE), made(conn, REROUTE)
    steps(conn, first)
    steps(conn, second)
    assert numbers(conn, first) == (1, 1, 0, 0, 0, 0)
    assert numbers(conn, second) == (1, 0, 0, 1, 0, 0)


def test_a_replay_leaves_alone_what_was_cancelled_or_replayed_before_its_turn(conn: Connection) -> None:
    refs = dead(conn, 3)
    job = made(conn, REPLAY)
    steps(conn, made(conn, replace(CANCEL, among="dead", selection=Selection(event_ids=(event_id(conn, refs[1]),)))))
    assert steps(conn, job, delivers(conn)) == [refs[0], refs[2]]
    assert numbers(conn, job) == (3, 2, 0, 1, 0, 0)


def test_what_a_person_cancels_of_a_replay_is_counted_as_such(conn: Connection) -> None:
    [ref] = dead(conn)
    job = made(conn, REPLAY)
    step(conn, job)
    cancelling.cancel(conn, "shop", event_id(conn, ref), "admin", "no")
    assert step(conn, job).is_over
    assert shown(conn, job)["skips"] == {"cancelled": 1}


def event_id(conn: Connection, ref: DeliveryRef) -> str:
    return str(making.event(conn, ref.seq)["event_id"])


# -- previews and lists -------------------------------------------------------------------------------------------


def test_a_preview_counts_shows_a_few_and_changes_nothing(conn: Connection) -> None:
    refs = dead(conn, 4)
    preview = jobs.preview(conn, replace(REPLAY, selection=Selection(endpoint="a")))
    assert preview.total == 4
    assert [found["event_id"] for found in preview.sample] == [event_id(conn, ref) for ref in refs[:3]]
    assert preview.sample[0]["last_error"] == "400"
    assert jobs.page(conn, limit=10) == []


def configured(conn: Connection, name: str) -> None:
    """An endpoint of this name is made."""
    configuration.insert(conn, "endpoint", {name: {"url": "http://receiver.test/"}})


def test_a_replay_names_the_endpoints_that_were_removed_in_its_preview_and_while_it_waits_for_them(conn: Connection) -> None:
    configured(conn, "here")
    for endpoint in ("here", "gone", "callback"):
        dead(conn, 2, endpoint)
    assert jobs.preview(conn, REPLAY).missing == ["gone"]
    job, is_new = jobs.create(conn, REPLAY, "admin")
    assert (job["missing"], is_new) == (["gone"], True)
    steps(conn, job["id"], lambda done: [succeed(conn, ref) for ref in done.begun if ref.lane != "gone"])
    assert (numbers(conn, job["id"]), shown(conn, job["id"])["missing"]) == ((6, 4, 0, 0, 1, 1), ["gone"])
    jobs.steer(conn, job["id"], "cancel", "admin", "nobody makes it again")
    assert shown(conn, job["id"])["missing"] == ["gone"], "what it has begun waits still"
    configured(conn, "gone")
    assert shown(conn, job["id"])["missing"] == []


def test_only_of_a_replay_that_goes_on_it_is_told_which_endpoints_were_removed(conn: Connection) -> None:
    dead(conn, 1, "gone")
    assert jobs.preview(conn, replace(CANCEL, among="dead")).missing == []
    job = made(conn, REPLAY)
    steps(conn, job, delivers(conn))
    assert (shown(conn, job)["state"], shown(conn, job)["missing"]) == ("done", [])


@pytest.mark.parametrize("job", [CANCEL, replace(CANCEL, among="dead"), REROUTE], ids=["unfinished", "dead", "reroute"])
def test_every_kind_of_job_can_be_previewed(conn: Connection, job: NewJob) -> None:
    making.accept(conn)
    making.routed(conn)
    dead(conn, 2)
    unrouted(conn)
    born_dead(conn)
    preview = jobs.preview(conn, job)
    assert preview.total == {"unfinished": 2, "dead": 3}.get(job.among if job.action == "cancel" else "", 2)
    assert len(preview.sample) == min(3, preview.total)


def test_jobs_are_listed_page_by_page_the_latest_first(conn: Connection) -> None:
    dead(conn, 1)
    making.routed(conn)
    ids = [made(conn, job) for job in (REPLAY, CANCEL, REPLAY)]
    steps(conn, ids[0], delivers(conn))
    assert [job["id"] for job in jobs.page(conn, limit=2)] == [ids[2], ids[1]]
    assert [job["id"] for job in jobs.page(conn, limit=2, before=ids[1])] == [ids[0]]
    assert [job["id"] for job in jobs.page(conn, limit=9, state="done")] == [ids[0]]
    assert [job["id"] for job in jobs.page(conn, limit=9, action="cancel")] == [ids[1]]
