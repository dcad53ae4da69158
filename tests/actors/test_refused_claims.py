"""A claim that is refused: it costs no rate token and no retry, and its key goes where it belongs."""

from collections.abc import Callable

import psycopg
import pytest

from madeira.records import DeliveryRef
from madeira.store import cancelling
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Receiver
from tests.store import making
from tests.system.harness import wait_until


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
