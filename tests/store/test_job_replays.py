"""Jobs that replay: what is dead goes again, in its order and at its pace, and nothing that is no matter of the job."""

from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.records import PlannedDelivery
from madeira.states import FailureClass
from madeira.store import cancelling, configuration, job_work, jobs, routing
from madeira.store.job_steps import Step, step
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.store import making
from tests.store.stepping import (
    CANCEL,
    REPLAY,
    REROUTE,
    UNORDERED,
    attempts,
    born_dead,
    dead,
    delivers,
    event_id,
    kill,
    made,
    numbers,
    shown,
    steps,
    succeed,
)

Connection = psycopg.Connection[Any]


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
    [ref] = routing.route(conn, [(seq, [PlannedDelivery("a", "a"), born])])[0].refs
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
