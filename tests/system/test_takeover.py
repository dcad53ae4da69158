"""What becomes of work in the hands of a process that dies, freezes, stops, or loses Postgres under its feet."""

import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from tests.receiver import Answer, Gate, Receiver
from tests.servers import OwnPostgres
from tests.system import crash
from tests.system.conftest import Launch
from tests.system.harness import Madeira, Process, wait_until
from tests.system.poison import POISON

#: Leases of a second and a half, so that a takeover is a matter of seconds; and no reconcile that could do it instead.
SHORT = {"MADEIRA_BEAT_S": "0.2", "MADEIRA_SILENCE_S": "0.8", "MADEIRA_LEASE_MARGIN_S": "1", "MADEIRA_RECONCILE_S": "600"}
TIMEOUT_S = 0.5
MARGIN_S = 1.0

#: When an interrupted delivery is called again at the latest: its lease, the spread of a first loss, two beats, and a look.
#: In production: 30 s + 30 s + 30 s + two beats of 5 s.
BOUND_S = TIMEOUT_S + 2 * MARGIN_S + 2 * 0.2 + 1.0


def outcomes(madeira: Madeira, event_id: str) -> list[str]:
    return [row["outcome"] for row in madeira.attempts(event_id)]


def one_endpoint(receiver: Receiver, **more: Any) -> dict[str, dict[str, Any]]:
    return {"a": {"url": receiver.url("/a"), "timeout": TIMEOUT_S, **more}}


def held(receiver: Receiver, gate: Gate, calls: int = 1) -> None:
    """Have the next calls wait until the gate is opened."""
    receiver.queue("/a", *[Answer(hold=gate)] * calls)


# -- killed and frozen ----------------------------------------------------------------------------------------------


def test_a_killed_workers_delivery_is_taken_over_in_time_and_burns_no_retry(launch: Launch, receiver: Receiver) -> None:
    """On a quiet system, whatever the policy: the second call comes within the bound, and the log says that one was lost."""
    held(receiver, Gate())
    madeira = launch(one_endpoint(receiver, retry={"max_attempts": 1}), env=SHORT)
    madeira.api()
    workers = [madeira.worker(), madeira.worker()]
    event = madeira.post()
    receiver.wait_for(1)

    (holder,) = crash.holders(madeira, madeira.delivery(event)["id"])
    os.kill(holder, signal.SIGKILL)

    first, second = receiver.wait_for(2, 30)
    assert (first.webhook_id, first.body) == (second.webhook_id, second.body)
    madeira.wait_status(event, "succeeded")
    lost, succeeded = madeira.attempts(event)
    assert (lost["outcome"], lost["error_code"], lost["attempt"]) == ("lost", "platform", 1)
    assert (succeeded["outcome"], succeeded["attempt"]) == ("succeeded", 2)
    assert lost["token"] != succeeded["token"]
    # The lease counts from the claim, which the log tells of what was lost; its call came later by whatever was in between.
    assert TIMEOUT_S + MARGIN_S <= second.wall - lost["started_at"].timestamp() <= BOUND_S
    delivery = madeira.delivery(event)
    assert (delivery["failures"], delivery["retries"], delivery["lost"]) == (0, 0, 0)
    assert madeira.event(event)["retry_count"] == 0
    assert receiver.overlaps == {}
    (stopped,) = wait_until(lambda: [w for w in workers if w.popen.poll() is not None], what="the end of the killed one's master")
    assert stopped.popen.returncode != 0, "a supervisor must see that something was wrong"


def test_the_outcome_of_a_worker_frozen_past_its_lease_comes_late_and_changes_nothing(launch: Launch, receiver: Receiver) -> None:
    """Its settle is refused by the token: the row keeps what the other worker recorded."""
    gate = Gate()
    receiver.queue("/a", Answer(status=400, hold=gate))
    madeira = launch(one_endpoint(receiver), env=SHORT)
    madeira.api()
    sleeper = madeira.worker()
    event = madeira.post()
    receiver.wait_for(1)
    sleeper.freeze()
    madeira.worker()

    receiver.wait_for(2, 30)
    before = madeira.wait_status(event, "succeeded")
    gate.set()
    receiver.wait_idle()
    sleeper.thaw()

    wait_until(lambda: "late" in outcomes(madeira, event), what="the late outcome")
    lost, succeeded, late = madeira.attempts(event)
    assert (lost["outcome"], succeeded["outcome"], late["outcome"]) == ("lost", "succeeded", "late")
    assert late["token"] == lost["token"]
    assert late["worker"] != succeeded["worker"]
    assert madeira.event(event) == before, "a 400 that comes too late kills nothing"
    assert receiver.count() == 2


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_delivery_and_an_event_that_kill_their_worker_each_time_die_and_take_nobody_with_them(
    launch: Launch, receiver: Receiver
) -> None:
    """Ten losses end a delivery, ten failures an event, both as `platform`; what is beside them passes all the while.

    The event is one of sixteen that are handed out together. Workers for routing and for delivering are separate masters,
    so that each kind dies without the other.
    """
    madeira = launch(
        {name: {"url": receiver.url(f"/{name}"), "timeout": TIMEOUT_S} for name in ("poison", "good")},
        env={"MADEIRA_BEAT_S": "0.15", "MADEIRA_SILENCE_S": "0.5", "MADEIRA_LEASE_MARGIN_S": "0.5"},
    )
    receiver.answer("/poison", crash.killing(madeira))
    receiver.answer("/good", Answer(delay_s=0.15))
    madeira.api()
    beside = [madeira.post("good.routed") for _ in range(8)]
    event = madeira.post(POISON)
    beside += [madeira.post("good.routed") for _ in range(7)]
    routing = crash.dramatiq("-Q", "route", modules=("madeira.actors", "tests.system.poison"))
    delivering = crash.dramatiq("-Q", "deliver", "dead_letter", "reconcile")
    workers = crash.Kept(madeira, route_a=routing, route_b=routing, deliver_a=delivering, deliver_b=delivering)
    delivery = ""
    good: list[str] = []

    def both_died() -> bool:
        nonlocal delivery
        workers.tend()
        if not delivery and receiver.count("/good") >= 15:
            delivery = madeira.post("poison.delivery")
        if delivery and len(good) < 4 * receiver.count("/poison"):
            good.append(madeira.post("good.beside"))
        return bool(delivery) and madeira.event(event)["status"] == madeira.event(delivery)["status"] == "dead"

    wait_until(both_died, 180, what="the end of both")
    wait_until(lambda: workers.tend() or madeira.unfinished() == 0, 30, what="the end of those beside them")

    assert (madeira.event(event)["reason"], madeira.event(event)["route_failures"]) == ("platform", 10)
    row = madeira.delivery(delivery)
    assert (row["status"], row["failure_class"], row["lost"], row["failures"]) == ("dead", "platform", 10, 0)
    assert outcomes(madeira, delivery) == ["lost"] * 10
    assert len(receiver.calls_to("/poison")) == workers.restarts["deliver_a"] + workers.restarts["deliver_b"] <= 10
    assert workers.restarts["route_a"] + workers.restarts["route_b"] == 10
    wait_until(lambda: madeira.delivery(delivery)["notified_at"], what="the word to a person")
    assert {madeira.event(e)["status"] for e in beside + good} == {"succeeded"}
    together = madeira.value("SELECT count(*) FROM event WHERE event_id = ANY(%s) AND route_failures > 0", beside)
    assert together == 15, "all sixteen were in the hands of the worker that died first"


@pytest.mark.crash
def test_the_place_of_a_killed_worker_in_its_lane_comes_back_and_the_cap_holds(
    launch: Launch, receiver: Receiver, rounds: int
) -> None:
    """Cap 2, both places held by a worker that is killed, under steady traffic: soon two calls overlap again, never three."""
    madeira = launch(one_endpoint(receiver, concurrency=2), env=SHORT)
    receiver.answer("/a", Answer(delay_s=0.1))
    madeira.api()
    workers = crash.Kept(madeira, worker=crash.dramatiq(threads=6))
    for _ in range(3 if rounds == 1 else 5):
        held(receiver, Gate(), 2)
        madeira.post_many(2)
        receiver.wait_until(lambda: receiver.in_progress == 2, 20, what="both places taken")
        workers.processes["worker"].kill()
        killed_at = time.monotonic()
        receiver.wait_idle()
        wait_until(lambda: overlap_again(madeira, receiver, workers), 20, what="two overlapping calls")
        since = [call for call in receiver.calls if call.at > killed_at]
        assert min(call.at for call in since if call.overlap == 2) - killed_at > TIMEOUT_S + MARGIN_S - 0.5, "places outlive it"
        madeira.wait_all()
    assert receiver.max_overlap == 2
    assert receiver.overlaps == {}


def overlap_again(madeira: Madeira, receiver: Receiver, workers: crash.Kept) -> bool:
    """Keep the lane busy until two calls are under way."""
    workers.tend()
    if madeira.unfinished() < 6:
        madeira.post()
    return receiver.in_progress == 2


# -- the way of a retry ---------------------------------------------------------------------------------------------


def test_a_failed_call_does_not_bar_its_own_retry(launch: Launch, receiver: Receiver) -> None:
    """Claim and marker go with the outcome: after 503, timeout and reset, retries come at their time, not at a lease's end."""
    failures = {"status": Answer(status=503), "timeout": Answer(hold=Gate()), "reset": Answer(reset=True)}
    for name, failure in failures.items():
        receiver.queue(f"/{name}", failure, failure)
    retry = {"initial": 1, "max": 10, "max_attempts": 3}
    madeira = launch(
        {name: {"url": receiver.url(f"/{name}"), "timeout": 1, "retry": retry} for name in failures},
        # Neither the end of a lease nor a reconcile may help.
        env={"MADEIRA_LEASE_MARGIN_S": "60", "MADEIRA_RECONCILE_S": "600"},
    )
    madeira.api()
    madeira.worker()
    events = {name: madeira.post(f"{name}.x") for name in failures}
    madeira.wait_all()
    for name, event in events.items():
        assert outcomes(madeira, event) == ["retryable", "retryable", "succeeded"], name
        waits = [later.at - (earlier.ended or 0) for earlier, later in pairwise(receiver.calls_to(f"/{name}"))]
        for wait, planned in zip(waits, (1.0, 2.0), strict=True):
            # How late a busy machine makes it is not the claim; the end of a lease would be a minute away.
            assert planned - 0.1 <= wait < 15, (name, waits)
    assert receiver.overlaps == {}


# -- stopped --------------------------------------------------------------------------------------------------------


def test_sigterm_lets_calls_finish_and_leaves_the_rest_to_others_at_once(launch: Launch, receiver: Receiver) -> None:
    """What is under way is settled by its own worker; what waits, and what comes, starts elsewhere within 5 s; none twice.

    Workers for routing and for delivering are separate, and each kind is restarted without touching the other.
    """
    gate = Gate()
    held(receiver, gate, 4)
    madeira = launch(
        {name: {"url": receiver.url(f"/{name}"), "timeout": 30 if name != "c" else 1} for name in ("a", "b", "c")},
        env={"MADEIRA_LEASE_MARGIN_S": "1", "MADEIRA_RECONCILE_S": "600"},
    )
    madeira.api()
    routing, old = madeira.worker(queues=["route"]), madeira.worker(queues=["deliver"])
    events = madeira.post_many(15)
    # One lane may hold half of the threads; the rest waits.
    receiver.wait_for(4)
    assert routing.stop() == 0
    events += madeira.post_many(15)
    routing = madeira.worker(queues=["route"])
    wait_until(lambda: madeira.value("SELECT count(*) FROM delivery") == 30, what="routing")
    assert receiver.in_progress == 4

    child = old.children()[0]
    before = threads_of(child)
    old.popen.terminate()
    wait_until(lambda: threads_of(child) <= before - 4, what="the end of the four threads that have no call")
    events += madeira.post_many(9, "b.x")
    new = madeira.worker(queues=["deliver"])
    ready_at = time.monotonic()
    receiver.wait_for(39)
    assert receiver.calls[-1].at - ready_at < 5
    assert old.popen.poll() is None, "it waits for its calls"
    gate.set()
    assert old.popen.wait(10) == 0
    madeira.wait_all()

    assert routing.popen.poll() is None
    assert [outcomes(madeira, event) for event in events] == [["succeeded"]] * 39
    assert receiver.count() == 39
    told_twice(madeira, receiver, new)


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def told_twice(madeira: Madeira, receiver: Receiver, worker: Process) -> None:
    """A second SIGTERM ends a worker in the middle of its call, which is taken over like any other."""
    receiver.forget()
    receiver.queue("/c", Answer(hold=Gate()))
    event = madeira.post("c.x")
    receiver.wait_for(1)
    worker.popen.terminate()
    wait_until(lambda: "Stopping worker process" in worker.tail(), what="the beginning of the end")
    worker.popen.terminate()
    worker.popen.wait(5)
    madeira.worker(queues=["deliver"])
    madeira.wait_status(event, "succeeded")
    assert outcomes(madeira, event) == ["lost", "succeeded"]
    assert receiver.count() == 2


# -- Postgres goes away during a call ---------------------------------------------------------------------------------


@pytest.mark.long
def test_an_outcome_outlives_a_restart_a_crash_and_a_freeze_of_postgres(
    launch: Launch, receiver: Receiver, own_postgres: OwnPostgres
) -> None:
    """It is kept, the marker with it, and written once Postgres is back, past the lease's end too; nobody calls again."""
    madeira = launch({"a": {"url": receiver.url("/a"), "timeout": 2}}, env=SHORT, database_url=own_postgres.url)
    madeira.api()
    workers = [madeira.worker(), madeira.worker()]
    breaks: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "restart": (own_postgres.stop, own_postgres.start),
        "crash": (own_postgres.kill, own_postgres.start),
        "freeze": (own_postgres.stall, own_postgres.resume),
    }
    for how, (go, come) in breaks.items():
        gate = Gate()
        held(receiver, gate)
        receiver.forget()
        event = madeira.post()
        receiver.wait_for(1)
        go()
        gate.set()
        receiver.wait_idle()
        if how != "restart":
            # Until past the lease's end: Postgres alone would permit a takeover.
            before = sum(waits(worker) for worker in workers)
            wait_until(lambda b=before: sum(waits(worker) for worker in workers) > b, 10, what="a settle that waits")
        come()
        wait_until(lambda e=event: succeeded(madeira, e), 20, what=f"the outcome after a {how}")
        assert [row["outcome"] for row in crash.attempts(madeira, event)] == ["succeeded"], how
        assert receiver.count() == 1, how


def waits(worker: Process) -> int:
    """How often a settle has found Postgres away."""
    return worker.tail(10**7).count("delivery.settle_waits")


def succeeded(madeira: Madeira, event: str) -> bool:
    (row,) = crash.rows(madeira, "SELECT status FROM event WHERE event_id = %s", event)
    return bool(row["status"] == "succeeded")


def test_no_connection_and_no_transaction_is_held_while_the_receiver_thinks(launch: Launch, receiver: Receiver) -> None:
    """Eight calls under way in one process: at most four connections, all idle; intake goes on, a table may be altered."""
    gate = Gate()
    held(receiver, gate, 8)
    madeira = launch({"a": {"url": receiver.url("/a"), "timeout": 30}})
    madeira.api()
    madeira.worker(threads=18)
    events = madeira.post_many(8)
    receiver.wait_until(lambda: receiver.in_progress == 8, what="all calls under way")

    statement = "SELECT state, xact_start FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    assert len(madeira.rows(statement, "madeira-worker")) <= 4
    # What the process does besides (rules, reconcile) has a connection for a moment; what a call held would stay.
    at_rest = {("idle", None)}
    wait_until(
        lambda: {(row["state"], row["xact_start"]) for row in madeira.rows(statement, "madeira-worker")} == at_rest,
        what="connections that are all idle",
    )
    with psycopg.connect(madeira.database_url, autocommit=True) as conn:
        conn.execute("SET lock_timeout = '2s'")
        conn.execute("ALTER TABLE delivery ADD COLUMN meanwhile integer")
    events.append(madeira.post())
    gate.set()
    madeira.wait_all()
    assert [outcomes(madeira, event) for event in events] == [["succeeded"]] * 9
