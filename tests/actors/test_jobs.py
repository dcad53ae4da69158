"""Jobs in a worker: woken, carried through to the end, handed on when a process stops or dies, each delivery called once."""

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from madeira.broker.queues import DELIVER, ROUTE, Ensure
from madeira.broker.waking import JOBS, wake_jobs
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.store import events, job_steps, leases, routing
from madeira.store import jobs as store
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Call, Gate, Receiver
from tests.store import making
from tests.system.harness import wait_until


def dead(process: InProcess, number: int, endpoint: str = "a", ordering_key: str | None = None) -> list[DeliveryRef]:
    """So many dead deliveries, in the order of their events."""
    plan = [PlannedDelivery(endpoint, endpoint, ("r",), ordering_key=ordering_key)]
    refs = []
    for _ in range(number):
        [ref] = routing.route(process.conn, [(making.accept(process.conn), plan)])[0].refs
        making.settled(process.conn, making.claimed(process.conn, ref), making.GIVE_UP)
        refs.append(ref)
    return refs


def made(process: InProcess, action: Any = "replay", *, wake: bool = True, **fields: Any) -> int:
    job, _ = store.create(process.conn, NewJob(action, fields.pop("selection", Selection()), "a test", **fields), "the test")
    if wake:
        wake_jobs(process.queues)
    return int(job["id"])


def shown(process: InProcess, job_id: int) -> dict[str, Any]:
    found = store.find(process.conn, job_id)
    assert found is not None
    return found


def wait_end(process: InProcess, job_id: int, timeout: float = 20.0) -> dict[str, Any]:
    """Wait until a job is finished; it."""
    found: dict[str, Any] = wait_until(
        lambda: (job := shown(process, job_id))["finished_at"] and job, timeout, what=f"the end of job {job_id}"
    )
    return found


def seqs(process: InProcess, calls: Sequence[Call]) -> list[int]:
    """The places of the events as they were called."""
    rows = dict(process.conn.execute("SELECT event_id, seq FROM event").fetchall())
    return [rows[call.json()["event_id"]] for call in calls]


def test_a_job_is_carried_through_as_soon_as_it_is_made(process: InProcess, receiver: Receiver) -> None:
    refs = dead(process, 30)
    job = wait_end(process, made(process, ordered=False))
    assert (job["state"], job["done"], job["failed"], job["skipped"]) == ("done", 30, 0, 0)
    assert sorted(seqs(process, receiver.calls)) == [ref.seq for ref in refs]
    assert {process.delivery(ref)["attempt"] for ref in refs} == {2}


def test_an_ordered_replay_keeps_the_order_whatever_the_receiver_does(make: Make, receiver: Receiver) -> None:
    """Each endpoint by itself: some take longer, some fail at first, some for good."""
    process = make({"retry": {"initial": 0.05, "max": 0.05, "max_attempts": 2}, "breaker": {"enabled": False}})
    refs = dead(process, 40)
    dice = random.Random(7)
    for _ in refs:
        receiver.queue("/a", Answer(status=503 if dice.random() < 0.3 else 200, delay_s=dice.random() * 0.02))
    process.start()
    job = wait_end(process, made(process))
    called = seqs(process, receiver.calls)
    assert called == sorted(called)
    assert receiver.max_overlap == 1
    assert job["done"] + job["failed"] == 40
    assert len(called) > 40


def test_a_rate_slower_than_the_endpoints_own_is_kept(process: InProcess, receiver: Receiver) -> None:
    """The next one is due in a hundred seconds, however soon the first has ended."""
    dead(process, 5)
    job = made(process, ordered=False, rate=0.01)
    wait_until(lambda: shown(process, job)["done"] == 1, what="the end of the first")
    assert (shown(process, job)["begun"], shown(process, job)["left"]) == (0, 4)
    assert receiver.count() == 1


def test_a_paused_job_lets_what_it_began_go_on_and_calls_nothing_more(process: InProcess, receiver: Receiver) -> None:
    gate = Gate()
    receiver.queue("/a", Answer(hold=gate))
    dead(process, 3)
    job = made(process)
    receiver.wait_for(1)
    store.steer(process.conn, job, "pause", "the test", "wait")
    gate.set()
    wait_until(lambda: shown(process, job)["done"] == 1, what="the count of what it began")
    assert (shown(process, job)["begun"], shown(process, job)["left"]) == (0, 2)
    assert receiver.count() == 1
    store.steer(process.conn, job, "resume", "the test", None)
    wake_jobs(process.queues)
    assert wait_end(process, job)["done"] == 3
    assert receiver.count() == 3


def test_what_a_dead_process_began_and_did_not_queue_is_queued_by_the_next(process: InProcess, receiver: Receiver) -> None:
    """The page is committed, and the process is killed before it tells the broker."""
    refs = dead(process, 2)
    job = made(process, wake=False)
    assert job_steps.step(process.conn, job).begun == refs[:1]
    assert process.place(refs[0]).kind == "nowhere"
    wake_jobs(process.queues)
    assert wait_end(process, job)["done"] == 2
    assert seqs(process, receiver.calls) == [ref.seq for ref in refs]


def test_only_one_process_goes_on_with_jobs_until_its_lease_has_run_out(make: Make) -> None:
    process = make()
    from actors import jobs

    process.tools.database.open()
    [ref] = dead(process, 1)
    job = made(process)
    assert leases.take(process.conn, store.LEASE, "another", 60)
    assert not jobs.Turn(process.queues, process.tools.database).run()
    assert shown(process, job)["begun"] == 0
    process.conn.execute("UPDATE lease SET until = now() - interval '1 s' WHERE name = %s", (store.LEASE,))
    assert jobs.Turn(process.queues, process.tools.database, turn_s=0.1).run(), "there is something left to do"
    assert process.place(ref).kind == "waiting"
    wait_until(lambda: leases.take(process.conn, store.LEASE, "another", 60), 2, what="the lease, free again")


def test_a_turn_ends_when_its_process_is_to_stop(make: Make) -> None:
    process = make()
    from actors import jobs

    process.tools.database.open()
    dead(process, 1)
    job = made(process)
    began = time.monotonic()
    assert jobs.Turn(process.queues, process.tools.database, is_stopping=lambda: shown(process, job)["begun"] == 1).run()
    assert time.monotonic() - began < jobs.TURN_S / 2


def test_a_turn_in_which_nothing_moves_keeps_no_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a receiver: another one looks a little later."""
    process = make()
    from actors import jobs

    process.tools.database.open()
    dead(process, 1)
    job = made(process, wake=False)
    monkeypatch.setattr(jobs, "IDLE_S", 0.1)
    turn = jobs.Turn(process.queues, process.tools.database)
    assert turn.run()
    assert turn.is_idle
    assert shown(process, job)["begun"] == 1


def test_between_two_turns_nobody_else_goes_on(make: Make) -> None:
    """Or each tick during a job would begin turns of its own, which send themselves on as the first ones do."""
    process = make()
    from actors import jobs

    process.tools.database.open()
    dead(process, 1)
    made(process, wake=False)
    turn = jobs.Turn(process.queues, process.tools.database, turn_s=0.0)
    assert turn.run()
    assert not jobs.Turn(process.queues, process.tools.database, turn_s=0.0).run()
    wait_until(lambda: jobs.Turn(process.queues, process.tools.database, turn_s=0.0).run(), what="a turn after the pause")


def test_one_thread_is_enough_for_a_job_and_its_deliveries(make: Make, receiver: Receiver) -> None:
    process = make(threads=1)
    dead(process, 2)
    process.start()
    assert wait_end(process, made(process))["done"] == 2


def test_one_thread_is_enough_also_where_a_job_is_woken_again_while_it_goes_on(make: Make, receiver: Receiver) -> None:
    """A minute's tick, or reconcile, comes while the job waits for a delivery that only its own thread could call."""
    process = make(threads=1)
    dead(process, 2)
    job = made(process)
    for _ in range(3):
        wake_jobs(process.queues)
    process.start()
    assert wait_end(process, job)["done"] == 2


def test_a_job_longer_than_a_turn_goes_on_in_the_next(
    process: InProcess, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors import jobs

    turns: list[bool] = []
    run = jobs.Turn.run

    def short(self: Any) -> bool:
        self._until = time.monotonic() + 0.05
        turns.append(run(self))
        return turns[-1]

    monkeypatch.setattr(jobs.Turn, "run", short)
    dead(process, 20)
    assert wait_end(process, made(process))["done"] == 20
    assert turns.count(True) > 1


def test_a_job_that_cannot_be_read_fails_and_keeps_no_other_from_going_on(process: InProcess, receiver: Receiver) -> None:
    dead(process, 3)
    broken, fine = made(process, wake=False), made(process, wake=False)
    process.conn.execute("""UPDATE job SET selection = '{"colour": "red"}' WHERE id = %s""", (broken,))
    wake_jobs(process.queues)
    assert wait_end(process, fine)["done"] == 3
    failed = wait_end(process, broken)
    assert failed["state"] == "failed"
    assert "colour" in failed["error"]


def test_what_postgres_quotes_of_a_row_is_not_told(process: InProcess) -> None:
    """A page that the database refuses: the job says why, without the rows."""
    [ref] = dead(process, 1)
    process.conn.execute("ALTER TABLE delivery ADD CONSTRAINT no_replay CHECK (line <> 'replay')")
    failed = wait_end(process, made(process))
    assert "no_replay" in failed["error"]
    assert str(process.event(ref)["trace_id"]) not in failed["error"]
    assert process.delivery(ref)["status"] == "dead"


def test_what_is_cancelled_is_forgotten_and_never_called(make: Make, receiver: Receiver) -> None:
    process = make()
    waiting = [process.routed() for _ in range(5)]
    [routing] = [making.accept(process.conn)]
    process.queues.ensure([Ensure(ROUTE, str(routing), 3600.0)])
    process.tools.database.open()
    job = made(process, "cancel", among="unfinished", wake=False)
    from actors import jobs

    assert not jobs.Turn(process.queues, process.tools.database).run()
    assert shown(process, job)["done"] == 6
    assert [process.place(ref).kind for ref in waiting] == ["nowhere"] * 5
    assert process.queues.where(ROUTE, [str(routing)])[0].kind == "nowhere"
    process.start()
    later = process.routed()
    process.wait_status(later, "succeeded")
    assert receiver.count() == 1


def test_after_a_cancel_the_next_of_a_key_goes(make: Make, receiver: Receiver) -> None:
    """The first of a key is cancelled by a job: the second was behind it and in nobody's queue."""
    process = make({"ordering": "endpoint"})
    plan = [PlannedDelivery("a", "a", ("a",), ordering_key="k")]
    first, second = (routing.route(process.conn, [(making.accept(process.conn), plan)])[0].refs[0] for _ in range(2))
    process.start()
    name = process.event(first)["event_id"]
    # Not due, so that it is the job that ends it.
    process.conn.execute("UPDATE delivery SET next_attempt_at = now() + interval '1 h' WHERE id = %s", (first.delivery_id,))
    job = made(process, "cancel", among="unfinished", selection=Selection(event_ids=(name,)))
    assert wait_end(process, job)["done"] == 1
    process.wait_status(second, "succeeded")
    assert process.delivery(first)["status"] == "cancelled"
    assert receiver.count() == 1


def test_what_is_rerouted_is_routed_and_delivered(process: InProcess, receiver: Receiver) -> None:
    seq = making.accept(process.conn, event_type="a.b")
    routing.route(process.conn, [(seq, [])])
    job = wait_end(process, made(process, "reroute"))
    assert job["done"] == 1
    receiver.wait_for(1)
    assert seqs(process, receiver.calls) == [seq]


def test_replays_of_an_ordering_key_go_in_its_order(make: Make, receiver: Receiver) -> None:
    """Even without the job's own order: of a key one at a time is queued."""
    process = make({"ordering": "endpoint"})
    refs = dead(process, 10, ordering_key="k")
    process.start()
    assert wait_end(process, made(process, ordered=False))["done"] == 10
    assert seqs(process, receiver.calls) == [ref.seq for ref in refs]


def test_of_an_ordering_key_only_the_first_that_was_begun_is_queued(make: Make) -> None:
    process = make({"ordering": "endpoint"})
    from actors import jobs

    process.tools.database.open()
    refs = dead(process, 3, ordering_key="k")
    job = made(process, ordered=False, wake=False)
    jobs.Turn(process.queues, process.tools.database, is_stopping=lambda: shown(process, job)["begun"] == 3).run()
    assert [process.place(ref).kind for ref in refs] == ["waiting", "nowhere", "nowhere"]


def test_ticks_and_wakes_beside_a_running_turn_do_nothing(process: InProcess, receiver: Receiver) -> None:
    dead(process, 20)
    job = made(process)
    for _ in range(10):
        wake_jobs(process.queues)
    assert wait_end(process, job)["done"] == 20
    wait_until(lambda: process.queues.sizes([JOBS])[JOBS] == (0, 0, 0, 0), what="an empty queue of jobs")
    assert receiver.count() == 20
    assert process.queues.sizes([DELIVER])[DELIVER].rejected == 0


def test_reconcile_wakes_whoever_goes_on_with_jobs_where_nobody_does(make: Make) -> None:
    """Not while somebody has the lease, and not for a job that a person holds."""
    process = make()
    from actors import reconcile

    process.tools.database.open()
    dead(process, 1)
    job = made(process, wake=False)
    assert leases.take(process.conn, store.LEASE, "another", 60)

    def woken() -> int:
        reconcile.run(process.queues, process.tools.database, period_s=60, force=True)
        return process.queues.sizes([JOBS])[JOBS].ready

    assert woken() == 0
    leases.release(process.conn, store.LEASE, "another")
    assert woken() == 1
    process.queues.flush(JOBS)
    store.steer(process.conn, job, "pause", "the test", "wait")
    assert woken() == 0


@pytest.mark.long
def test_a_thousand_are_cancelled_while_fifty_are_called_and_none_of_them_is_called_afterwards(
    make: Make, receiver: Receiver
) -> None:
    """Redis loses everything meanwhile, and another process goes on: the counts add up all the same."""
    gate = Gate()
    for n in range(50):
        receiver.queue("/a", Answer(status=200 if n % 2 else 503, hold=gate))
    # A lane gets half of the threads.
    process = make({"concurrency": 50, "timeout": 60}, threads=104)
    refs = many(process, 1000)
    process.queue(*refs)
    process.start()
    receiver.wait_for(50)
    job = made(process, "cancel", among="unfinished")
    wait_until(lambda: shown(process, job)["left"] == 0, 30, what="the last page")
    assert [shown(process, job)[name] for name in ("total", "done", "begun")] == [1000, 950, 50]
    process.redis.flushall()
    gate.set()
    found = wait_end(process, job, 60)
    assert [found[name] for name in ("done", "failed", "skipped")] == [975, 0, 25]
    assert found["skips"] == {"succeeded": 25}
    process.stop()
    another = make()
    another.queue(*refs)
    another.start()
    another.wait_status(another.routed(), "succeeded", 20)
    wait_until(lambda: another.queues.sizes([DELIVER])[DELIVER][:3] == (0, 0, 0), 30, what="an empty queue")
    assert receiver.count() == 51
    statuses = another.conn.execute("SELECT status, count(*) FROM delivery GROUP BY 1 ORDER BY 1").fetchall()
    assert statuses == [("cancelled", 975), ("succeeded", 26)]
    assert making.counts_agree(another.conn)


def many(process: InProcess, number: int) -> list[DeliveryRef]:
    """So many deliveries, made in groups as in a batch."""
    refs = []
    for _ in range(0, number, 100):
        accepted = events.insert(process.conn, [making.new_event() for _ in range(100)])
        plan = [PlannedDelivery("a", "a", ("r",))]
        refs += [ref for result in routing.route(process.conn, [(a.seq, plan) for a in accepted]) for ref in result.refs]
    return refs
