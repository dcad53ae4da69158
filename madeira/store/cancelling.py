"""Cancelling what has not ended: an event, one delivery of it, or all that waits for an endpoint.

What waits ends at once. What is being called now is only asked to end: no retry follows, but a success that is on its way
is told as success. Every transaction locks the events first and then their deliveries, each in ascending order, as settle
does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from madeira.errors import IllegalTransition
from madeira.records import DeliveryRef
from madeira.states import EventStatus
from madeira.store import audit
from madeira.store.columns import numbers
from madeira.store.counts import COUNTED

#: Unfinished deliveries, of whatever endpoint, that one page of `cancel_endpoint` looks at.
LOOK: Final = 5000

#: Take hold of an event that is to be cancelled.
_LOCK_EVENT: Final = """
    SELECT seq, status FROM event WHERE event_id = %(event_id)s AND source = %(source)s FOR NO KEY UPDATE
"""

#: End events that wait for their routing. One that is routed again may have deliveries, which then say what it is.
CANCEL_UNROUTED: Final = """
    UPDATE event
    SET status = CASE WHEN deliveries = 0 THEN 'cancelled' ELSE event_status_of(unfinished, dead, cancelled) END,
        reason = 'cancelled', route_at = NULL, updated_at = clock_timestamp()
    WHERE seq = ANY(%(seqs)s::bigint[]) AND status = 'pending'
    RETURNING seq, status
"""

#: Take hold of what an event has unfinished. A statement of its own: the next one must see what claims did meanwhile.
_LOCK_DELIVERIES: Final = """
    SELECT id FROM delivery
    WHERE event_seq = %(seq)s AND status IN ('pending', 'delivering')
          AND (%(endpoint)s::text IS NULL OR endpoint = %(endpoint)s)
    ORDER BY id
    FOR NO KEY UPDATE
"""

#: The state of the delivery of an event to one endpoint.
_STATUS_AT: Final = "SELECT status FROM delivery WHERE event_seq = %(seq)s AND endpoint = %(endpoint)s"

#: Ask for the end of what is being called now; what waits, or whose lease has run out, ends at once. A claim that
#: ends like this gets its row in the log. The rows are locked already, and so are their events.
_CANCEL_DELIVERIES: Final = f"""
    WITH held AS MATERIALIZED (
        SELECT id, event_seq, status, attempt, claim_token, claimed_at
        FROM delivery
        WHERE id = ANY(%(ids)s::bigint[])
              AND (status = 'pending' OR status = 'delivering' AND lease_until < clock_timestamp())
        ORDER BY id
        FOR NO KEY UPDATE),
    asked AS (
        UPDATE delivery d
        SET cancel_requested_at = coalesce(d.cancel_requested_at, clock_timestamp()), updated_at = clock_timestamp()
        WHERE d.id = ANY(%(ids)s::bigint[]) AND d.status = 'delivering' AND d.id NOT IN (SELECT id FROM held)
        RETURNING d.id),
    moved AS (
        UPDATE delivery d
        SET status = 'cancelled', claim_token = NULL, lease_until = NULL, finished_at = clock_timestamp(),
            updated_at = clock_timestamp(), last_error = %(why)s
        FROM held h
        WHERE d.id = h.id
        RETURNING d.id, d.event_seq, d.lane, d.status, d.retries),
    lost AS (
        INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, reason, settled_as)
        SELECT id, attempt, claim_token, claimed_at, 'lost', 'platform',
               'the claim ended without a verdict; then the delivery was cancelled', 'cancelled'
        FROM held WHERE status = 'delivering'),
    {COUNTED}
    SELECT m.id, m.event_seq, m.lane, (SELECT count(*) FROM asked)
    FROM (SELECT) one LEFT JOIN moved m ON true
    ORDER BY m.id
"""  # noqa: S608

#: The state of an event after its deliveries were moved.
_STATUS: Final = "SELECT status FROM event WHERE seq = %(seq)s"

#: The unfinished deliveries of an endpoint among those that come next, whatever their endpoint; and how far that goes.
_PAGE: Final = """
    WITH next AS MATERIALIZED (
        SELECT id, event_seq, endpoint FROM delivery
        WHERE finished_at IS NULL AND id > %(after)s
        ORDER BY id
        LIMIT (SELECT %(look)s)),
    wanted AS (SELECT id, event_seq FROM next WHERE endpoint = %(endpoint)s ORDER BY id LIMIT %(limit)s)
    SELECT coalesce((SELECT array_agg(id ORDER BY id) FROM wanted), '{}'),
           coalesce((SELECT array_agg(DISTINCT event_seq) FROM wanted), '{}'),
           CASE WHEN (SELECT count(*) FROM wanted) = %(limit)s THEN (SELECT max(id) FROM wanted)
                WHEN (SELECT count(*) FROM next) = %(look)s THEN (SELECT max(id) FROM next) END
"""

#: Whether an endpoint is configured, or built in.
_IS_KNOWN: Final = "SELECT %(endpoint)s = 'callback' OR EXISTS (SELECT FROM endpoint WHERE name = %(endpoint)s)"

#: Take hold of events.
LOCK_EVENTS: Final = "SELECT seq FROM event WHERE seq = ANY(%(seqs)s::bigint[]) ORDER BY seq FOR NO KEY UPDATE"

#: Take hold of those deliveries that are still unfinished.
LOCK_THESE: Final = """
    SELECT id FROM delivery
    WHERE id = ANY(%(ids)s::bigint[]) AND status IN ('pending', 'delivering')
    ORDER BY id
    FOR NO KEY UPDATE
"""


#: What was asked to end while it was called, by a worker that never told: its lease has run out. Few at any time; has an index.
_ABANDONED: Final = """
    SELECT id, event_seq FROM delivery
    WHERE cancel_requested_at IS NOT NULL AND finished_at IS NULL AND lease_until < clock_timestamp()
    ORDER BY id
    LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What a cancel did."""

    seq: int
    #: The event's state now.
    status: EventStatus
    #: Deliveries that ended by it; the broker may forget them.
    cancelled: list[DeliveryRef]
    #: Deliveries that are being called now: no retry will follow, but a success will be told as success.
    requested: int


@dataclass(frozen=True, slots=True)
class EndpointPage:
    """What one page of `cancel_endpoint` did."""

    #: Deliveries that ended by it; the broker may forget them once it is committed.
    cancelled: list[DeliveryRef] = field(default_factory=list)
    #: Deliveries that are being called now and were asked to end.
    requested: int = 0
    #: Where the next page begins; None when this was the last one.
    after_id: int | None = None


def cancel(
    conn: psycopg.Connection[Any], source: str, event_id: str, who: str, why: str | None, endpoint: str | None = None
) -> CancelResult | None:
    """Cancel what is unfinished of an event, or only its delivery to `endpoint`; None when there is no such event or
    delivery. Writes the audit row too.

    Raises:
        IllegalTransition: there is nothing (any more) that could be cancelled.
    """
    with conn.transaction():
        row = conn.execute(_LOCK_EVENT, {"source": source, "event_id": event_id}).fetchone()
        if row is None:
            return None
        seq, status = row
        if status not in (EventStatus.PENDING, EventStatus.DELIVERING):
            raise IllegalTransition(f"event {event_id} of {source} is {status} already; only an unfinished one can be cancelled")
        pending = status == EventStatus.PENDING
        result = _cancel_unrouted(conn, seq, event_id, endpoint) if pending else _cancel_routed(conn, seq, endpoint, why)
        if result is None:
            return None
        detail = {"cancelled": len(result.cancelled), "requested": result.requested, "status": result.status}
        if endpoint is not None:
            detail["endpoint"] = endpoint
        audit.record(conn, who, "cancel", f"event {source}/{event_id}", why, detail)
        return result


def _cancel_unrouted(conn: psycopg.Connection[Any], seq: int, event_id: str, endpoint: str | None) -> CancelResult:
    if endpoint is not None:
        raise IllegalTransition(f"event {event_id} is not routed yet: it has no delivery to {endpoint} that could be cancelled")
    ((_, status),) = conn.execute(CANCEL_UNROUTED, {"seqs": numbers([seq])})
    return CancelResult(seq, EventStatus(status), [], 0)


def _cancel_routed(conn: psycopg.Connection[Any], seq: int, endpoint: str | None, why: str | None) -> CancelResult | None:
    ids = [row[0] for row in conn.execute(_LOCK_DELIVERIES, {"seq": seq, "endpoint": endpoint})]
    if not ids and endpoint is not None:
        row = conn.execute(_STATUS_AT, {"seq": seq, "endpoint": endpoint}).fetchone()
        if row is None:
            return None
        raise IllegalTransition(f"the delivery to {endpoint} is {row[0]} already; only an unfinished one can be cancelled")
    cancelled, requested = end(conn, ids, f"cancelled: {why}" if why else "cancelled")
    ((status,),) = conn.execute(_STATUS, {"seq": seq})
    return CancelResult(seq, EventStatus(status), cancelled, requested)


def end(conn: psycopg.Connection[Any], ids: Sequence[int], why: str) -> tuple[list[DeliveryRef], int]:
    """End unfinished deliveries that are locked, with their events; those that ended, and how many were asked to."""
    rows = conn.execute(_CANCEL_DELIVERIES, {"ids": numbers(ids), "why": why}).fetchall()
    return [DeliveryRef(i, seq, lane) for i, seq, lane, _ in rows if i is not None], rows[0][3]


def end_abandoned(conn: psycopg.Connection[Any], limit: int) -> list[DeliveryRef]:
    """End (at most `limit`) deliveries that were asked to end and whose worker is gone; those that ended.

    Mostly the next claim does so. But there is none where the endpoint has been removed meanwhile.
    """
    with conn.transaction():
        found = conn.execute(_ABANDONED, {"limit": limit}).fetchall()
        if not found:
            return []
        conn.execute(LOCK_EVENTS, {"seqs": numbers({seq for _, seq in found})})
        still = [row[0] for row in conn.execute(LOCK_THESE, {"ids": numbers(i for i, _ in found)})]
        return end(conn, still, "cancelled: asked for while it was called, and its worker is gone")[0]


def cancel_endpoint(
    conn: psycopg.Connection[Any], endpoint: str, after_id: int, limit: int, who: str, why: str | None
) -> EndpointPage:
    """Cancel the next (at most `limit`) unfinished deliveries of an endpoint whose ids are above `after_id`; 0 at first.

    A page is one transaction and bounded work, so it may find few of many or none: go on from `EndpointPage.after_id`
    until that is None. What is routed meanwhile comes behind and is met too. Events that are not routed yet are left alone.
    The audit row is for the caller to write, since only he knows how many there were in all.
    """
    with conn.transaction():
        params = {"endpoint": endpoint, "after": after_id, "limit": limit, "look": LOOK}
        # Planned anew each time: a plan from before the table was analysed may walk all that has ended.
        ((ids, seqs, goes_on),) = conn.execute(_PAGE, params, prepare=False)
        if not ids:
            return EndpointPage(after_id=goes_on)
        conn.execute(LOCK_EVENTS, {"seqs": numbers(seqs)})
        still = [row[0] for row in conn.execute(LOCK_THESE, {"ids": numbers(ids)})]
        reason = f"cancelled with all of {endpoint} by {who}"
        cancelled, requested = end(conn, still, f"{reason}: {why}" if why else reason)
        return EndpointPage(cancelled, requested, goes_on)


class Sweep:
    """Cancels all that is unfinished of an endpoint, page by page, each in a transaction of the caller, with one audit row.

    The row is written with the first deliveries that are cancelled, or at the end, and says from then on how many there were:
    what was done is on record even if the process dies in between. An endpoint that nobody knows gets none.
    """

    def __init__(self, endpoint: str, who: str, why: str) -> None:
        self._endpoint = endpoint
        self._who = who
        self._why = why
        self._after: int | None = 0
        self._entry: int | None = None
        self.known = True
        self.cancelled = 0
        self.requested = 0

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to be looked at."""
        return self._after is None

    def go_on(self, conn: psycopg.Connection[Any], limit: int) -> list[DeliveryRef]:
        """Cancel the next `limit`; the broker may forget what ended, once it is committed."""
        if self._after is None:
            return []
        with conn.transaction():
            page = cancel_endpoint(conn, self._endpoint, self._after, limit, self._who, self._why)
            cancelled, requested = self.cancelled + len(page.cancelled), self.requested + page.requested
            detail = {"cancelled": cancelled, "requested": requested, "complete": page.after_id is None}
            entry = self._record(conn, detail)
        self._after, self._entry, self.cancelled, self.requested = page.after_id, entry, cancelled, requested
        return page.cancelled

    def _record(self, conn: psycopg.Connection[Any], detail: Mapping[str, Any]) -> int | None:
        if self._entry is not None:
            audit.amend(conn, self._entry, detail)
            return self._entry
        if not (detail["cancelled"] or detail["requested"]):
            if not detail["complete"]:
                return None
            ((self.known,),) = conn.execute(_IS_KNOWN, {"endpoint": self._endpoint})
            if not self.known:
                return None
        return audit.record(conn, self._who, "cancel", f"endpoint {self._endpoint}", self._why, detail)
