"""Interleavings that are made, not hoped for.

The receiver holds an answer back, and the lock of the consumer keeps the finish of a settled delivery from reaching Redis, for
as long as the test wants.
"""

import contextlib
from collections.abc import Iterator

from madeira.broker.queues import DELIVER, delivery_key
from madeira.records import DeliveryRef
from madeira.store import cancelling
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Gate, Receiver
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
