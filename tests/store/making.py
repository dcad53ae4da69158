"""Makes rows in each state of their life by the ways that the program itself takes."""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg

from madeira.records import Attempt, Claimed, Decision, DeliveryRef, NewEvent, PlannedDelivery, Settled
from madeira.states import DeliveryStatus, ErrorCode, FailureClass, Outcome
from madeira.store import events, routing
from madeira.store.claims import ClaimRequest, claim
from madeira.store.deliveries import SettleRequest, settle

Connection = psycopg.Connection[Any]

SUCCESS = Decision(DeliveryStatus.SUCCEEDED)
RETRY = Decision(DeliveryStatus.PENDING, delay_s=60.0, counts=True, failure_class=FailureClass.RECEIVER, last_error="503")
GIVE_UP = Decision(DeliveryStatus.DEAD, counts=True, failure_class=FailureClass.RECEIVER, last_error="400")


def new_event(**fields: Any) -> NewEvent:
    """An event that is like no other, but for `fields`."""
    event_id = fields.pop("event_id", uuid.uuid4().hex)
    payload = fields.pop("payload", '{"n": 1}')
    event = NewEvent(
        source="shop",
        event_id=event_id,
        event_type="order.paid",
        payload=payload,
        body_sha256=hashlib.sha256(f"{event_id} {payload}".encode()).digest(),
        trace_id=f"trace-{event_id}",
    )
    return replace(event, **fields)


def accept(conn: Connection, **fields: Any) -> int:
    """Accept one event; its seq."""
    return events.insert(conn, [new_event(**fields)])[0].seq


def routed(conn: Connection, endpoints: Sequence[str] = ("a",), **fields: Any) -> list[DeliveryRef]:
    """Accept and route one event; its deliveries."""
    seq = accept(conn, **fields)
    plan = [PlannedDelivery(endpoint, endpoint, ("some route",)) for endpoint in endpoints]
    return routing.route(conn, [(seq, plan)])[0].refs


def token() -> str:
    return str(uuid.uuid4())


def claimed(conn: Connection, ref: DeliveryRef, lease_s: float = 40.0) -> Claimed:
    """Claim a delivery that may be claimed."""
    [answer] = claim(conn, [ClaimRequest(ref.delivery_id, token(), lease_s)])
    assert isinstance(answer, Claimed), answer
    return answer


def attempt(outcome: Outcome = Outcome.SUCCEEDED, **fields: Any) -> Attempt:
    made = Attempt(outcome, datetime.now(UTC), 0.25, "http://receiver.test/hook", 200, excerpt=b"ok", length=2)
    if outcome is not Outcome.SUCCEEDED:
        made = replace(made, status_code=503, error_code="http_503", reason="503 Service Unavailable")
    if outcome is Outcome.LOST:
        made = replace(made, status_code=None, error_code=ErrorCode.PLATFORM)
    return replace(made, **fields)


def verdict(held: Claimed, decision: Decision = SUCCESS, outcome: Outcome | None = None) -> SettleRequest:
    """The request that settles a claim by `decision`."""
    if outcome is None:
        outcome = {DeliveryStatus.SUCCEEDED: Outcome.SUCCEEDED, DeliveryStatus.DEAD: Outcome.PERMANENT}.get(
            decision.status, Outcome.RETRYABLE
        )
    return SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, attempt(outcome), decision, worker="worker:1")


def settled(conn: Connection, held: Claimed, decision: Decision = SUCCESS, outcome: Outcome | None = None) -> Settled:
    return settle(conn, [verdict(held, decision, outcome)])[0]


def died(conn: Connection, event_id: str, endpoint: str, code: str, words: str, **fields: Any) -> int:
    """A delivery that died of `code` at its first attempt; its id."""
    [ref] = routed(conn, (endpoint,), event_id=event_id, **fields)
    held = claimed(conn, ref)
    failed = attempt(Outcome.PERMANENT, error_code=code)
    decision = replace(GIVE_UP, last_error=words)
    settle(conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, decision, worker="worker:1")])
    return ref.delivery_id


def expire(conn: Connection, delivery_id: int, by_s: float = 1.0) -> None:
    """Let a lease run out `by_s` seconds ago."""
    conn.execute("UPDATE delivery SET lease_until = clock_timestamp() - %s * interval '1 s' WHERE id = %s", (by_s, delivery_id))


def make_due(conn: Connection, delivery_id: int) -> None:
    """Let a delivery be due now."""
    conn.execute("UPDATE delivery SET next_attempt_at = clock_timestamp() WHERE id = %s", (delivery_id,))


def delivery(conn: Connection, delivery_id: int) -> dict[str, Any]:
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        row = cursor.execute("SELECT * FROM delivery WHERE id = %s", (delivery_id,)).fetchone()
    assert row is not None
    return row


def event(conn: Connection, seq: int) -> dict[str, Any]:
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        row = cursor.execute("SELECT * FROM event WHERE seq = %s", (seq,)).fetchone()
    assert row is not None
    return row


def log_of(conn: Connection, delivery_id: int) -> list[tuple[int, str, str | None]]:
    """The log of a delivery: (attempt, outcome, what it became)."""
    rows = conn.execute(
        "SELECT attempt, outcome, settled_as FROM delivery_log WHERE delivery_id = %s ORDER BY id", (delivery_id,)
    )
    return rows.fetchall()


def counts_agree(conn: Connection) -> bool:
    """Whether every event's counts and state are what its deliveries say."""
    wrong = conn.execute("""
        SELECT e.seq FROM event e
        JOIN (SELECT event_seq, count(*) AS total,
                     count(*) FILTER (WHERE finished_at IS NULL)::integer AS unfinished,
                     count(*) FILTER (WHERE status = 'dead')::integer AS dead,
                     count(*) FILTER (WHERE status = 'cancelled')::integer AS cancelled
              FROM delivery GROUP BY event_seq) d ON d.event_seq = e.seq
        WHERE (e.deliveries, e.unfinished, e.dead, e.cancelled) IS DISTINCT FROM
              (d.total, d.unfinished, d.dead, d.cancelled)
              OR e.status <> event_status_of(d.unfinished, d.dead, d.cancelled) AND e.status <> 'pending'
    """)
    return wrong.fetchall() == []
