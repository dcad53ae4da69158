"""What meets a delivery while a worker finishes it: nothing is lost, nothing is called twice, nothing is burnt.

The interleavings are made, not hoped for: the receiver holds an answer back, and the lock of the consumer keeps the
finish of a settled delivery from reaching Redis for as long as the test wants.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread
from typing import Any

import dramatiq
import psycopg
import pytest

from madeira.broker.queues import DEAD_LETTER, DELIVER, ROUTE, Ensure, Queues, delivery_key
from madeira.records import DeliveryRef
from madeira.store import cancelling
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Gate, Receiver
from tests.servers import OwnPostgres
from tests.store import making
from tests.system.harness import wait_until


def in_the_middle(process: InProcess, receiver: Receiver, *answers: Answer) -> tuple[DeliveryRef, Gate]:
    """A delivery whose call is unanswered; the gate lets its answer go, and further calls get the other answers."""
    first, *others = answers
    gate = Gate()
    receiver.queue("/a", Answer(status=first.status, body=first.body, hold=gate), *others)
    ref = process.routed()
    receiver.wait_for(1)
    wait_until(lambda: process.delivery(ref)["status"] == "delivering", what="the claim")
    return ref, gate


@contextlib.contextmanager
def settled_but_not_finished(process: InProcess, receiver: Receiver, *answers: Answer, becomes: str) -> Iterator[DeliveryRef]:
    """Within the block a delivery is settled in Postgres, while Redis still has it in the hands of its worker."""
    ref, gate = in_the_middle(process, receiver, *answers)
    with process.nothing_reaches_redis():
        gate.set()
        process.wait_status(ref, becomes)
        wait_until(lambda: not process.broker.hands.of(DELIVER), what="the acknowledgement")
        assert process.place(ref).kind == "held"
        yield ref


def replay(process: InProcess, ref: DeliveryRef) -> None:
    """Move a dead delivery back to pending as the state table allows, then have it queued."""
    with process.conn.transaction():
        process.conn.execute(
            "UPDATE delivery SET status = 'pending', line = 'replay', failures = 0, lost = 0, budget_from = NULL, "
            "finished_at = NULL, died_at = NULL, notified_at = NULL, next_attempt_at = clock_timestamp() WHERE id = %s",
            (ref.delivery_id,),
        )
        process.conn.execute(
            "UPDATE event SET status = 'delivering', unfinished = unfinished + 1, dead = dead - 1 WHERE seq = %s", (ref.seq,)
        )
    process.queue(ref)


def reconcile_now(process: InProcess, queues: Queues | None = None) -> dict[str, int]:
    """One reconcile run that spares no young row; what it found."""
    # Imported when the actors have a broker.
    from actors import reconcile

    return dict(reconcile.run(queues or process.queues, process.tools.database, period_s=60, grace_s=0.0, force=True))


def cancel(process: InProcess, ref: DeliveryRef) -> cancelling.CancelResult:
    """Cancel an event as the API does: first Postgres, then the broker."""
    row = process.event(ref)
    result = cancelling.cancel(process.conn, row["source"], row["event_id"], "the test", None)
    assert result is not None
    process.queues.forget(DELIVER, [delivery_key(r) for r in result.cancelled])
    return result


REFUSED = Answer(status=400)
BROKEN = Answer(status=503)
GOOD = Answer()


# -- a worker that finishes, and a replay --------------------------------------------------------------------------------


def test_a_replay_that_meets_a_finishing_worker_is_delivered_without_reconcile(process: InProcess, receiver: Receiver) -> None:
    with settled_but_not_finished(process, receiver, REFUSED, GOOD, becomes="dead") as ref:
        replay(process, ref)
    row = process.wait_status(ref, "succeeded")
    assert process.outcomes(ref) == ["permanent", "succeeded"]
    assert (row["attempt"], receiver.count("/a"), receiver.overlaps) == (2, 2, {})
    process.wait_place(ref, "nowhere")


def test_a_replay_before_its_worker_has_told_of_the_death_is_not_told_of(process: InProcess, receiver: Receiver) -> None:
    with settled_but_not_finished(process, receiver, REFUSED, GOOD, becomes="dead") as ref:
        replay(process, ref)
    process.wait_status(ref, "succeeded")
    process.wait_place_of(DEAD_LETTER, str(ref.delivery_id), "nowhere")
    assert process.delivery(ref)["notified_at"] is None


def test_the_dead_letter_of_a_death_is_told_once_however_often_it_is_queued(process: InProcess, receiver: Receiver) -> None:
    receiver.answer("/a", REFUSED)
    ref = process.routed()
    row = wait_until(lambda: (row := process.delivery(ref))["notified_at"] and row, what="the notice")
    process.queues.ensure([Ensure(DEAD_LETTER, str(ref.delivery_id))])
    process.wait_place_of(DEAD_LETTER, str(ref.delivery_id), "nowhere")
    assert process.delivery(ref)["notified_at"] == row["notified_at"]


def test_ensuring_a_key_in_hand_makes_no_second_call(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    for _ in range(3):
        process.queue(ref)
    dramatiq.get_broker().get_actor("deliver").send(ref.delivery_id, ref.seq, ref.lane)
    assert process.place(ref).kind == "held"
    gate.set()
    process.wait_status(ref, "succeeded")
    process.wait_place(ref, "nowhere")
    assert (process.outcomes(ref), receiver.count()) == (["succeeded"], 1)


def test_copies_of_a_key_put_there_by_hand_make_no_second_call(process: InProcess, receiver: Receiver) -> None:
    gate = Gate()
    receiver.answer("/a", Answer(hold=gate))
    ref = process.routed(queued=False)
    key = delivery_key(ref)
    process.redis.zadd("m:deliver:delayed", {key: 1})
    process.redis.zadd("m:deliver:lane:a", {key: 1})
    process.redis.zadd("m:deliver:active", {"a": 1})
    other = process.routed()
    receiver.wait_for(2)
    process.redis.zadd("m:deliver:delayed", {key: 1})
    process.redis.zadd("m:deliver:lane:a", {key: 1, delivery_key(other): 1})
    process.queues.beat("another process", silence_s=60, spread_s=0, queues=[DELIVER], held=[])
    third = process.routed()
    receiver.wait_for(3)
    gate.set()
    for one in (ref, other, third):
        process.wait_status(one, "succeeded")
        process.wait_place(one, "nowhere")
    assert (receiver.count(), receiver.overlaps) == (3, {})


def test_a_key_that_is_ensured_while_its_worker_puts_it_off_waits_for_its_row(process: InProcess, receiver: Receiver) -> None:
    """The note says "now", the row says "in 30 s": the claim asks the row, and the key waits for it."""
    with settled_but_not_finished(process, receiver, BROKEN, becomes="pending") as ref:
        process.queue(ref)
    wait_until(lambda: (p := process.place(ref)).kind == "delayed" and p.delay_s > 5, what="the delay")
    assert abs(process.due_later_in_redis_s(ref)) < 0.25
    assert (process.outcomes(ref), receiver.count()) == (["retryable"], 1)


# -- a worker that finishes, and reconcile -------------------------------------------------------------------------------


class Halting(Queues):
    """Queues at which reconcile halts before one of its questions, so that something can happen in between."""

    def __init__(self, process: InProcess, method: str, queue: str = DELIVER) -> None:
        super().__init__(redis_url=process.settings.redis_url, namespace="m")
        self._method, self._queue = method, queue
        self.reached, self.go = Event(), Event()

    def _halt(self, method: str, queue: str) -> None:
        if (method, queue) == (self._method, self._queue) and not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(10)

    def unknown(self, queue: str, items: Sequence[tuple[str, float]]) -> set[str]:
        self._halt("unknown", queue)
        return super().unknown(queue, items)

    def ensure(self, items: Sequence[Ensure]) -> int:
        for item in items[:1]:
            self._halt("ensure", item.queue)
        return super().ensure(items)

    def forget(self, queue: str, keys: Sequence[str]) -> int:
        self._halt("forget", queue)
        return super().forget(queue, keys)


@contextlib.contextmanager
def halted_before(process: InProcess, method: str) -> Iterator[dict[str, int]]:
    """Within the block a reconcile run stands still before `method`; afterwards the yielded dict holds what it found."""
    queues, found = Halting(process, method), {}
    thread = Thread(target=lambda: found.update(reconcile_now(process, queues)))
    thread.start()
    try:
        assert queues.reached.wait(10), f"reconcile did not come to {method}"
        yield found
    finally:
        queues.go.set()
        thread.join(10)
        queues.close()


def test_reconcile_finds_nothing_wrong_with_what_is_settled_but_not_finished(process: InProcess, receiver: Receiver) -> None:
    with settled_but_not_finished(process, receiver, BROKEN, becomes="pending") as ref:
        assert reconcile_now(process) == {}
        assert process.place(ref).kind == "held"
    assert process.wait_place(ref, "delayed").delay_s > 25
    assert receiver.count() == 1


def test_what_is_finished_between_two_looks_of_reconcile_is_not_queued_again(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    with halted_before(process, "unknown") as found:
        gate.set()
        process.wait_status(ref, "succeeded")
        process.wait_place(ref, "nowhere")
    assert found == {}, "unknown keys are read again before they count"
    assert process.place(ref).kind == "nowhere"


def test_what_is_finished_just_before_reconcile_queues_it_is_taken_out_again(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    process.redis.hdel("m:deliver:held", delivery_key(ref))
    with process.nothing_reaches_redis(), halted_before(process, "ensure") as found:
        gate.set()
        process.wait_status(ref, "succeeded")
    assert found == {"delivery_not_queued": 1, "deliver_finished_but_queued": 1}
    process.wait_place(ref, "nowhere")
    assert (process.outcomes(ref), receiver.count()) == (["succeeded"], 1)


def test_a_replay_between_two_looks_of_reconcile_is_not_forgotten(make: Make, receiver: Receiver) -> None:
    """Reconcile saw the delivery dead and its key delayed; the replay comes before it takes the key out."""
    process = make()
    process.tools.database.open()
    ref = process.routed(queued=False)
    making.settled(process.conn, making.claimed(process.conn, ref), making.GIVE_UP)
    process.queues.ensure([Ensure(DELIVER, delivery_key(ref), 600.0)])
    with halted_before(process, "forget"):
        replay(process, ref)
        assert process.place(ref).kind == "waiting"
    assert process.place(ref).kind == "waiting", "read again, and queued again"
    process.start()
    process.wait_status(ref, "succeeded")


def test_reconcile_queues_what_a_worker_died_with_and_takes_out_what_is_finished(make: Make, receiver: Receiver) -> None:
    process = make()
    process.tools.database.open()
    lost, ended = process.routed(queued=False), process.routed(queued=False)
    making.settled(process.conn, making.claimed(process.conn, ended))
    process.queues.ensure([Ensure(DELIVER, delivery_key(ended), 600.0)])
    seq = making.accept(process.conn, source="test", event_type="a.b")
    assert reconcile_now(process) == {"event_not_queued": 1, "delivery_not_queued": 1, "deliver_finished_but_queued": 1}
    assert (process.place(lost).kind, process.place(ended).kind) == ("waiting", "nowhere")
    assert process.queues.where(ROUTE, [str(seq)])[0].kind == "waiting"
    assert reconcile_now(process) == {}


# -- a cancel ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_transaction(process: InProcess) -> Iterator["psycopg.Connection[Any]"]:
    """A connection whose transaction goes on until it is told to end."""
    with psycopg.connect(process.settings.database_url) as conn:
        conn.execute("SELECT 1")
        yield conn


def test_a_success_on_its_way_when_the_cancel_comes_is_told_as_success(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    assert cancel(process, ref).requested == 1
    gate.set()
    process.wait_status(ref, "succeeded")
    assert process.event(ref)["status"] == "succeeded"
    process.wait_place(ref, "nowhere")


@pytest.mark.parametrize("answer", [BROKEN, REFUSED], ids=["retryable", "permanent"])
def test_a_failure_on_its_way_when_the_cancel_comes_ends_as_cancelled_without_a_retry(
    process: InProcess, receiver: Receiver, answer: Answer
) -> None:
    ref, gate = in_the_middle(process, receiver, answer)
    cancel(process, ref)
    gate.set()
    process.wait_status(ref, "cancelled")
    process.wait_place(ref, "nowhere")
    assert (process.event(ref)["status"], receiver.count()) == ("cancelled", 1)
    assert process.queues.where(DEAD_LETTER, [str(ref.delivery_id)])[0].kind == "nowhere", "nobody is told of a death"


def test_a_cancel_between_settle_and_finish_leaves_a_key_that_ends_by_itself(process: InProcess, receiver: Receiver) -> None:
    with settled_but_not_finished(process, receiver, BROKEN, becomes="pending") as ref:
        result = cancel(process, ref)
        assert [r.delivery_id for r in result.cancelled] == [ref.delivery_id]
        assert process.place(ref).kind == "held", "forget leaves it to its holder"
    assert process.wait_place(ref, "delayed").delay_s > 25
    process.queues.ensure([Ensure(DELIVER, delivery_key(ref))])
    process.wait_place(ref, "nowhere")
    assert (process.delivery(ref)["status"], receiver.count()) == ("cancelled", 1)


def test_a_cancel_after_the_hand_out_and_before_the_claim_calls_nobody(process: InProcess, receiver: Receiver) -> None:
    ref = process.routed(queued=False)
    with open_transaction(process) as other:
        # The claim meets the cancel's locks, and goes away; the cancel commits; the claim comes again.
        row = process.event(ref)
        cancelling.cancel(other, row["source"], row["event_id"], "the test", None)
        process.queue(ref)
        wait_until(lambda: process.place(ref).kind == "delayed", what="a claim that met the cancel")
        other.commit()
    process.wait_place(ref, "nowhere")
    assert (process.delivery(ref)["status"], process.delivery(ref)["attempt"], receiver.count()) == ("cancelled", 0, 0)


def test_an_event_that_is_cancelled_before_its_routing_gets_no_deliveries(process: InProcess, receiver: Receiver) -> None:
    seq = making.accept(process.conn, source="test", event_type="a.b", event_id="early")
    cancelling.cancel(process.conn, "test", "early", "the test", None)
    process.queues.ensure([Ensure(ROUTE, str(seq))])
    process.wait_place_of(ROUTE, str(seq), "nowhere")
    row = making.event(process.conn, seq)
    assert (row["status"], row["deliveries"], receiver.count()) == ("cancelled", 0, 0)


def test_a_cancel_and_a_routing_at_the_same_moment_leave_nothing_to_call(process: InProcess, receiver: Receiver) -> None:
    seq = making.accept(process.conn, source="test", event_type="a.b", event_id="early")
    with open_transaction(process) as other:
        cancelling.cancel(other, "test", "early", "the test", None)
        process.queues.ensure([Ensure(ROUTE, str(seq))])
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: process.conn.execute(waits).fetchone() == (1,), what="routing that waits for the cancel")
        other.commit()
    process.wait_place_of(ROUTE, str(seq), "nowhere")
    row = making.event(process.conn, seq)
    assert (row["status"], row["deliveries"], receiver.count()) == ("cancelled", 0, 0)


# -- claims that are refused ---------------------------------------------------------------------------------------------


def finished(process: InProcess, ref: DeliveryRef) -> None:
    making.settled(process.conn, making.claimed(process.conn, ref))


def not_due(process: InProcess, ref: DeliveryRef) -> None:
    process.conn.execute("UPDATE delivery SET next_attempt_at = now() + interval '40 s' WHERE id = %s", (ref.delivery_id,))


def leased(process: InProcess, ref: DeliveryRef) -> None:
    making.claimed(process.conn, ref, lease_s=40.0)


def cancelled(process: InProcess, ref: DeliveryRef) -> None:
    row = process.event(ref)
    cancelling.cancel(process.conn, row["source"], row["event_id"], "the test", None)


def lost_once_too_often(process: InProcess, ref: DeliveryRef) -> None:
    making.claimed(process.conn, ref)
    making.expire(process.conn, ref.delivery_id)
    process.conn.execute("UPDATE delivery SET lost = 9 WHERE id = %s", (ref.delivery_id,))


@pytest.mark.parametrize(
    ("state", "place", "delay_s"),
    [
        (finished, "nowhere", 0.0),
        (cancelled, "nowhere", 0.0),
        (lost_once_too_often, "nowhere", 0.0),
        (not_due, "delayed", 40.0),
        (leased, "delayed", 40.0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_refused_claim_costs_no_rate_token_and_puts_the_key_where_it_belongs(
    make: Make, receiver: Receiver, state: Callable[[InProcess, DeliveryRef], None], place: str, delay_s: float
) -> None:
    process = make({"rate": 0.05})
    ref = process.routed(queued=False)
    state(process, ref)
    before = process.delivery(ref)
    other = process.routed(queued=False)
    process.queue(ref, other)
    process.start()
    process.wait_status(other, "succeeded")
    found = process.wait_place(ref, place)
    assert found.delay_s == pytest.approx(delay_s, abs=3)
    assert receiver.count() == 1, "the next token would have been 20 s away"
    row = process.delivery(ref)
    assert (row["attempt"], row["failures"]) == (before["attempt"], before["failures"])
    # The mark of a whole list stays.
    wait_until(lambda: process.redis.zcard("m:lane:a:places") <= 1, what="the end of its place")


def test_a_delivery_lost_once_too_often_is_told_as_dead(process: InProcess, receiver: Receiver) -> None:
    ref = process.routed(queued=False)
    lost_once_too_often(process, ref)
    process.queue(ref)
    row = wait_until(lambda: (row := process.delivery(ref))["notified_at"] and row, what="the notice")
    assert (row["status"], row["failure_class"], row["lost"]) == ("dead", "platform", 10)
    assert (process.outcomes(ref), receiver.count()) == (["lost"], 0)


def test_a_claim_that_meets_another_one_comes_again_at_once(make: Make, receiver: Receiver) -> None:
    process = make({"rate": 0.05})
    process.start()
    ref = process.routed(queued=False)
    with psycopg.connect(process.settings.database_url) as other:
        other.execute("SELECT FROM delivery WHERE id = %s FOR UPDATE", (ref.delivery_id,))
        process.queue(ref)
        assert process.wait_place(ref, "delayed").delay_s <= 0.5
        other.rollback()
    process.wait_status(ref, "succeeded")
    assert receiver.count() == 1


def test_a_key_without_a_row_is_asked_for_again_for_a_minute_and_then_dropped(make: Make, receiver: Receiver) -> None:
    process = make({"rate": 0.05})
    ghost = DeliveryRef(999_999, 1, "a")
    process.queue(ghost)
    process.start()
    waits = []
    while (place := process.wait_place(ghost, "delayed", "nowhere")).kind == "delayed":
        # A look comes a moment after the try.
        waits.append(5 * round(place.delay_s / 5))
        process.queue(ghost)
        wait_until(lambda: (p := process.place(ghost)).delay_s > waits[-1] + 1 or p.kind == "nowhere", what="the next try")
    assert waits == [5, 10, 20, 40]
    assert process.redis.hlen("m:deliver:stumbles") == 0
    process.wait_status(process.routed(), "succeeded")


# -- Postgres goes away, the worker is stopped ---------------------------------------------------------------------------


def test_while_postgres_is_away_nothing_is_handed_out_nor_burnt(
    make: Make, receiver: Receiver, own_postgres: OwnPostgres
) -> None:
    process = make(database_url=own_postgres.url)
    process.start()
    ref, gate = in_the_middle(process, receiver, GOOD)
    waiting = process.routed(queued=False)
    seq = making.accept(process.conn, source="test", event_type="a.b")
    process.conn.close()
    own_postgres.kill()
    gate.set()
    process.queues.ensure([Ensure(ROUTE, str(seq))])
    wait_until(lambda: not process.broker.gate.is_open(), what="the closed gate")
    process.queue(waiting)
    process.wait_place_of(ROUTE, str(seq), "waiting")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert process.place(waiting).kind == "waiting", "nothing is handed out"
        assert process.place(ref).kind == "held", "its outcome is in hand"
        Event().wait(0.05)
    own_postgres.start()
    process.wait_status(ref, "succeeded")
    process.wait_status(waiting, "succeeded")
    row = wait_until(lambda: (row := making.event(process.conn, seq))["status"] == "succeeded" and row, what="the routed event")
    assert row["route_failures"] == 0
    for one in (ref, waiting):
        assert process.outcomes(one) == ["succeeded"]
        assert (process.delivery(one)["failures"], process.delivery(one)["lost"]) == (0, 0)
    assert receiver.count() == 3
    assert process.redis.hlen("m:route:stumbles") == process.redis.hlen("m:deliver:stumbles") == 0


def test_a_worker_that_is_stopped_gives_back_to_the_front_what_it_has_not_started(make: Make, receiver: Receiver) -> None:
    process = make({"rate": 0.05, "burst": 2}, threads=6)
    go, started = Event(), [Event() for _ in range(6)]

    def hold(n: int) -> None:
        started[n].set()
        go.wait(20)

    # The lane was idle for long: its burst is there.
    process.redis.set("m:lane:a:tat", "1")
    actor = dramatiq.actor(hold, actor_name="hold", queue_name="holding", broker=process.broker)
    for n in range(6):
        actor.send(n)
    process.start()
    assert all(event.wait(5) for event in started)
    refs = [process.routed() for _ in range(3)]
    wait_until(lambda: len(process.broker.hands.of(DELIVER)) == 2, what="two deliveries in memory")
    stopping = Thread(target=process.stop)
    stopping.start()
    wait_until(lambda: all(process.place(ref).kind == "waiting" for ref in refs), 5, what="all given back while jobs run on")
    assert [process.place(ref).ahead for ref in refs] == [0, 1, 2], "in their old order"
    assert process.queues.sizes([DELIVER])[DELIVER].held == 0
    go.set()
    stopping.join(10)
    assert receiver.count() == 0
    assert all(process.delivery(ref)["attempt"] == 0 for ref in refs)
    again = make({"rate": 0.05, "burst": 2}, threads=6)
    again.start()
    for ref in refs[:2]:
        again.wait_status(ref, "succeeded")
    assert again.place(refs[2]).kind == "waiting", "their rate tokens came back too, and no more than theirs"


def test_messages_of_two_queues_never_share_a_hand(make: Make) -> None:
    """Each consumer counts its own calls: the third of one must not be taken for the third of the other."""
    process = make()
    process.tools.rules.start()
    assert process.tools.rules.wait(10)
    taken: dict[str, str] = {}
    for queue in (DELIVER, ROUTE):
        consumer = process.broker.consume(queue, prefetch=9, timeout=100)
        for n in range(1, 4):
            if queue == DELIVER:
                process.routed()
            else:
                process.queues.ensure([Ensure(ROUTE, str(n))])
            message = wait_until(lambda of=consumer: next(of), what="a message")
            taken[message.options["redis_message_id"]] = queue
    assert {name: process.broker.hands.get(name).queue for name in taken} == taken  # type: ignore[union-attr]
    assert len(taken) == 6


def test_a_call_under_way_is_finished_before_its_worker_ends(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    stopping = Thread(target=process.stop)
    stopping.start()
    wait_until(lambda: process.broker.stopping, what="the end of fetching")
    late = process.routed()
    gate.set()
    stopping.join(10)
    assert process.delivery(ref)["status"] == "succeeded"
    assert (process.place(ref).kind, process.place(late).kind) == ("nowhere", "waiting")
    assert receiver.count() == 1
