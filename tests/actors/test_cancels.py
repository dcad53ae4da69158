"""A cancel that meets a worker: whatever it meets, nothing is called afterwards, and what was called is told as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import DEAD_LETTER, DELIVER, ROUTE, Ensure, delivery_key
from madeira.store import cancelling
from tests.actors.inprocess import InProcess
from tests.actors.interleaving import BROKEN, GOOD, REFUSED, cancel, in_the_middle, settled_but_not_finished
from tests.receiver import Answer, Receiver
from tests.store import making
from tests.system.harness import wait_until


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
