"""Settle: an outcome is recorded once, by the token of its claim, in one transaction."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from madeira.records import Decision, Settled
from madeira.states import MAX_LOST, DeliveryStatus, EventStatus, FailureClass, Outcome
from madeira.store import cancelling
from madeira.store.deliveries import mark_notified, settle, unnotified
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    claimed,
    counts_agree,
    delivery,
    event,
    expire,
    log_of,
    make_due,
    routed,
    settled,
    verdict,
)


def test_a_success_ends_delivery_and_event(conn: Connection) -> None:
    """State, log, counts and the event's state change together; the answer tells the age of the event."""
    [ref] = routed(conn)
    answer = settled(conn, claimed(conn, ref))
    assert (answer.status, answer.event_status, answer.delay_s) == (
        DeliveryStatus.SUCCEEDED,
        EventStatus.SUCCEEDED,
        0.0,
    )
    assert 0 < answer.latency_s < 60
    row = delivery(conn, ref.delivery_id)
    assert (row["status"], row["claim_token"], row["lease_until"]) == ("succeeded", None, None)
    assert row["finished_at"] is not None
    assert log_of(conn, ref.delivery_id) == [(1, "succeeded", "succeeded")]
    assert event(conn, ref.seq)["status"] == "succeeded"


def test_a_retry_waits_for_its_delay(conn: Connection) -> None:
    """The failure counts, the line changes, and the answered delay is what remains until `next_attempt_at`."""
    [ref] = routed(conn)
    held = claimed(conn, ref)
    answer = settled(conn, held, RETRY)
    left = conn.execute(
        "SELECT extract(epoch FROM next_attempt_at - clock_timestamp())::float8 FROM delivery WHERE id = %s",
        (ref.delivery_id,),
    ).fetchone()
    assert left is not None
    assert answer.status == DeliveryStatus.PENDING
    assert left[0] <= answer.delay_s <= 60.0
    assert answer.delay_s - left[0] < 1.0
    row = delivery(conn, ref.delivery_id)
    assert (row["failures"], row["retries"], row["line"], row["last_error"]) == (1, 1, "retry", "503")
    assert row["failure_class"] == "receiver"
    assert event(conn, ref.seq)["retry_count"] == 1


def test_a_failure_that_does_not_count_is_a_retry_all_the_same(conn: Connection) -> None:
    """A 429 leaves `failures` alone; `retry_count` tells that it was tried again."""
    [ref] = routed(conn)
    throttled = replace(RETRY, counts=False, failure_class=FailureClass.THROTTLED)
    settled(conn, claimed(conn, ref), throttled)
    row = delivery(conn, ref.delivery_id)
    assert (row["failures"], row["retries"], row["failure_class"]) == (0, 1, "throttled")


def test_retry_count_is_the_largest_of_the_deliveries(conn: Connection) -> None:
    """Not the sum, not the last one."""
    often, once = routed(conn, ["a", "b"])
    for ref, times in ((often, 3), (once, 1)):
        for _ in range(times):
            settled(conn, claimed(conn, ref), RETRY)
            make_due(conn, ref.delivery_id)
    assert event(conn, often.seq)["retry_count"] == 3


def test_giving_up_makes_a_dead_letter(conn: Connection) -> None:
    """Dead, with class and reason; it is told of once."""
    [ref] = routed(conn, event_id="one")
    answer = settled(conn, claimed(conn, ref), GIVE_UP)
    assert (answer.status, answer.event_status) == (DeliveryStatus.DEAD, EventStatus.DEAD)
    [letter] = unnotified(conn, [ref.delivery_id, 10**12])
    assert (letter.delivery_id, letter.endpoint, letter.failure_class) == (ref.delivery_id, "a", "receiver")
    assert (letter.last_error, letter.source, letter.event_id) == ("400", "shop", "one")
    assert mark_notified(conn, [ref.delivery_id]) == [ref.delivery_id]
    assert mark_notified(conn, [ref.delivery_id]) == []
    assert unnotified(conn, [ref.delivery_id]) == []


@pytest.mark.parametrize(
    ("decisions", "state"),
    [
        ((SUCCESS, SUCCESS), "succeeded"),
        ((SUCCESS, GIVE_UP), "dead"),
        ((GIVE_UP, SUCCESS), "dead"),
        ((SUCCESS, RETRY), "delivering"),
        ((GIVE_UP, RETRY), "delivering"),
    ],
)
def test_the_event_follows_its_deliveries(conn: Connection, decisions: tuple[Decision, ...], state: str) -> None:
    """Delivering while any is unfinished, then dead if any is dead, else succeeded; in one group or one after another."""
    for at_once in (True, False):
        requests = [verdict(claimed(conn, ref), d) for ref, d in zip(routed(conn, ["a", "b"]), decisions, strict=True)]
        answers = settle(conn, requests) if at_once else [settle(conn, [r])[0] for r in requests]
        assert answers[-1].event_status == state
        assert event(conn, requests[0].seq)["status"] == state
    assert counts_agree(conn)


def test_settling_again_with_the_same_token_changes_nothing(conn: Connection) -> None:
    """The reply to the commit was lost: the second settle is answered like the first, whatever it was."""
    for decision in (SUCCESS, RETRY, GIVE_UP):
        [ref] = routed(conn)
        request = verdict(claimed(conn, ref), decision)
        [first] = settle(conn, [request])
        before = delivery(conn, ref.delivery_id)
        [second] = settle(conn, [request])
        assert (second.status, second.event_status) == (first.status, first.event_status)
        assert second.delay_s == pytest.approx(first.delay_s, abs=5)
        assert delivery(conn, ref.delivery_id) == before
        assert len(log_of(conn, ref.delivery_id)) == 1


def test_a_settle_asked_twice_in_one_group_counts_once(conn: Connection) -> None:
    """A caller that gave up and came again may stand in the same group as its first try."""
    [ref] = routed(conn)
    request = verdict(claimed(conn, ref), RETRY)
    first, second = settle(conn, [request, request])
    assert first == second
    assert delivery(conn, ref.delivery_id)["failures"] == 1


def test_settling_again_after_the_next_claim_is_answered_as_then(conn: Connection) -> None:
    """The retry is being called by another worker already: the old settle still stands, nothing is late."""
    [ref] = routed(conn)
    request = verdict(claimed(conn, ref), RETRY)
    settle(conn, [request])
    make_due(conn, ref.delivery_id)
    claimed(conn, ref)
    [answer] = settle(conn, [request])
    assert (answer.status, answer.delay_s) == (DeliveryStatus.PENDING, 0.0)
    assert log_of(conn, ref.delivery_id) == [(1, "retryable", "pending")]


@pytest.mark.parametrize("decision", [SUCCESS, RETRY, GIVE_UP])
def test_a_late_settle_changes_nothing_and_is_recorded(conn: Connection, decision: Decision) -> None:
    """A worker froze past its lease and another took over: its verdict is noted once, with what it was."""
    [ref] = routed(conn)
    frozen = claimed(conn, ref)
    expire(conn, ref.delivery_id)
    other = claimed(conn, ref)
    before = delivery(conn, ref.delivery_id), event(conn, ref.seq)
    request = verdict(frozen, decision)
    for _ in range(2):
        assert settle(conn, [request]) == [Settled(status=None)]
    assert (delivery(conn, ref.delivery_id), event(conn, ref.seq)) == before
    assert log_of(conn, ref.delivery_id) == [(1, "lost", "delivering"), (1, "late", None)]
    reason = conn.execute("SELECT reason FROM delivery_log WHERE outcome = 'late'").fetchone()
    assert reason is not None
    assert f"as {request.attempt.outcome}" in reason[0]
    assert settled(conn, other).status == DeliveryStatus.SUCCEEDED
    assert settle(conn, [request]) == [Settled(status=None)]


def test_an_expired_lease_alone_does_not_undo_a_claim(conn: Connection) -> None:
    """The worker was slow, but nobody took over: its verdict counts."""
    [ref] = routed(conn)
    held = claimed(conn, ref)
    expire(conn, ref.delivery_id)
    assert settled(conn, held).status == DeliveryStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("decision", "becomes"),
    [(SUCCESS, "succeeded"), (RETRY, "cancelled"), (GIVE_UP, "cancelled")],
)
def test_a_cancel_that_met_a_call_decides_what_follows_a_failure(conn: Connection, decision: Decision, becomes: str) -> None:
    """A success that was on its way is told as success; a failure ends cancelled, without a retry or a dead letter."""
    [ref] = routed(conn, event_id="one")
    held = claimed(conn, ref)
    cancelling.cancel(conn, "shop", "one", "ann", None)
    answer = settled(conn, held, decision)
    assert (answer.status, answer.event_status, answer.delay_s) == (becomes, becomes, 0.0)
    assert log_of(conn, ref.delivery_id)[0][2] == becomes
    assert unnotified(conn, [ref.delivery_id]) == []
    assert counts_agree(conn)


def test_a_verdict_without_a_call_counts_as_a_loss(conn: Connection) -> None:
    """A worker that could not call at all says `lost`: no failure, but ten in a row end it as `platform`."""
    [ref] = routed(conn)
    again = Decision(DeliveryStatus.PENDING, last_error="no worker could call")
    for n in range(1, MAX_LOST + 1):
        answer = settled(conn, claimed(conn, ref), again, Outcome.LOST)
        assert answer.status == ("dead" if n == MAX_LOST else "pending")
    row = delivery(conn, ref.delivery_id)
    assert (row["lost"], row["failures"], row["failure_class"]) == (MAX_LOST, 0, "platform")
    assert counts_agree(conn)


def test_a_lost_verdict_of_ones_own_is_no_takeover(conn: Connection) -> None:
    """Asked again, a `lost` verdict that the worker itself gave is found again, not taken for a takeover."""
    [ref] = routed(conn)
    request = verdict(claimed(conn, ref), Decision(DeliveryStatus.PENDING), Outcome.LOST)
    settle(conn, [request])
    assert settle(conn, [request])[0].status == DeliveryStatus.PENDING
    assert log_of(conn, ref.delivery_id) == [(1, "lost", "pending")]


def test_the_attempt_is_logged_in_full(conn: Connection) -> None:
    """Times, URL, status, error, the first bytes of the answer with length and digest, the worker."""
    [ref] = routed(conn)
    held = claimed(conn, ref)
    request = verdict(held, RETRY)
    started = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
    request = replace(
        request,
        attempt=replace(
            request.attempt,
            started_at=started,
            duration_s=0.123456789,
            url='http://x.test/"a",\\{}',
            excerpt=bytes(range(256)),
            length=70_000,
            sha256=b"\x00\xff" * 16,
            exchange='{"b": "\\"{}\\\\", "a": 1.0}',
        ),
    )
    settle(conn, [request])
    row = conn.execute("""
        SELECT attempt, token::text, started_at, duration_s, url, status_code, outcome, error_code, reason,
               excerpt, length, sha256, worker, exchange::text
        FROM delivery_log
    """).fetchone()
    assert row == (
        1,
        held.token,
        started,
        0.123456789,
        'http://x.test/"a",\\{}',
        503,
        "retryable",
        "http_503",
        "503 Service Unavailable",
        bytes(range(256)),
        70_000,
        b"\x00\xff" * 16,
        "worker:1",
        '{"b": "\\"{}\\\\", "a": 1.0}',
    )


def test_a_settle_for_a_delivery_that_is_gone_hurts_nobody(conn: Connection) -> None:
    """The row was removed meanwhile: that verdict is lost, its neighbour's is recorded."""
    gone, there = routed(conn, ["a", "b"])
    requests = [verdict(claimed(conn, ref)) for ref in (gone, there)]
    conn.execute("DELETE FROM delivery WHERE id = %s", (gone.delivery_id,))
    assert [answer.status for answer in settle(conn, requests)] == [None, DeliveryStatus.SUCCEEDED]
