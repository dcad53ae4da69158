"""What meets a delivery while a worker finishes it, a replay or a reconcile: nothing is lost, and nothing is called twice."""

import contextlib
from collections.abc import Iterator, Sequence
from threading import Event, Thread

import dramatiq

from madeira.broker.queues import DEAD_LETTER, DELIVER, ROUTE, Ensure, Queues, delivery_key
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.actors.interleaving import BROKEN, GOOD, REFUSED, in_the_middle, replay, settled_but_not_finished
from tests.receiver import Answer, Gate, Receiver
from tests.store import making
from tests.system.harness import wait_until

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
def halted_before(process: InProcess, method: str, queue: str = DELIVER) -> Iterator[dict[str, int]]:
    """Within the block a reconcile run stands still before `method`; afterwards the yielded dict holds what it found."""
    queues, found = Halting(process, method, queue), {}
    thread = Thread(target=lambda: found.update(process.reconcile(queues)))
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
        assert process.reconcile() == {}
        assert process.place(ref).kind == "held"
    assert process.wait_place(ref, "delayed").delay_s > 25
    assert receiver.count() == 1


def test_reconcile_spares_a_death_of_which_redis_has_not_heard_yet(process: InProcess, receiver: Receiver) -> None:
    with settled_but_not_finished(process, receiver, REFUSED, becomes="dead") as ref:
        assert process.reconcile(grace_s=60) == {}
    wait_until(lambda: process.delivery(ref)["notified_at"], what="the notice")


def test_a_death_that_is_told_of_between_two_looks_of_reconcile_is_not_missing(process: InProcess, receiver: Receiver) -> None:
    with contextlib.ExitStack() as reconcile:
        with settled_but_not_finished(process, receiver, REFUSED, becomes="dead") as ref:
            found = reconcile.enter_context(halted_before(process, "unknown", DEAD_LETTER))
        wait_until(lambda: process.delivery(ref)["notified_at"], what="the notice")
        process.wait_place_of(DEAD_LETTER, str(ref.delivery_id), "nowhere")
    assert found == {}
    assert process.queues.where(DEAD_LETTER, [str(ref.delivery_id)])[0].kind == "nowhere"


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
    assert process.reconcile() == {"event_not_queued": 1, "delivery_not_queued": 1, "deliver_finished_but_queued": 1}
    assert (process.place(lost).kind, process.place(ended).kind) == ("waiting", "nowhere")
    assert process.queues.where(ROUTE, [str(seq)])[0].kind == "waiting"
    assert process.reconcile() == {}
