"""What a person does with an event that has ended: send dead deliveries again, or have the event routed again.

Both are one transaction that locks the event first and then its deliveries, as settle does, and that counts the deliveries
anew before it ends. So of two who do the same at once the second finds nothing left to do and is told so. The broker is
for the caller to tell after the commit; should he not get to it, reconcile does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg

from madeira.errors import IllegalTransition
from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus, EventStatus, FailureClass
from madeira.store import audit, configuration
from madeira.store.columns import numbers

#: Take hold of an event.
_LOCK_EVENT: Final = """
    SELECT seq, status, reason, erased_at IS NOT NULL FROM event
    WHERE event_id = %(event_id)s AND source = %(source)s
    FOR NO KEY UPDATE
"""

#: Take hold of the deliveries of an event. A statement of its own: it must see what was done until the lock was got.
_LOCK_DELIVERIES: Final = """
    SELECT id, endpoint, lane, status, attempt, failure_class FROM delivery
    WHERE event_seq = %(seq)s
    ORDER BY id
    FOR NO KEY UPDATE
"""

#: Let deliveries begin again with a fresh budget. Their attempts are numbered on.
REPLAY: Final = """
    UPDATE delivery
    SET status = 'pending', line = 'replay', job_id = %(job_id)s::bigint, failures = 0, lost = 0, budget_from = NULL,
        next_attempt_at = clock_timestamp(), cancel_requested_at = NULL, finished_at = NULL, died_at = NULL,
        notified_at = NULL, failure_class = NULL, updated_at = clock_timestamp()
    WHERE id = ANY(%(ids)s::bigint[]) AND status IN ('dead', 'succeeded')
"""

#: What events are by their deliveries, counted anew; the events are locked, so nobody moves them meanwhile.
RECOUNT: Final = """
    UPDATE event e
    SET deliveries = s.total, unfinished = s.unfinished, dead = s.dead, cancelled = s.cancelled,
        status = event_status_of(s.unfinished, s.dead, s.cancelled), reason = NULL, updated_at = clock_timestamp()
    FROM (SELECT event_seq,
                 count(*)::integer AS total,
                 count(*) FILTER (WHERE status IN ('pending', 'delivering'))::integer AS unfinished,
                 count(*) FILTER (WHERE status = 'dead')::integer AS dead,
                 count(*) FILTER (WHERE status = 'cancelled')::integer AS cancelled
          FROM delivery WHERE event_seq = ANY(%(seqs)s::bigint[]) GROUP BY event_seq) s
    WHERE e.seq = s.event_seq
    RETURNING e.status
"""

#: Take deliveries away that were never attempted and never will be.
UNBEAR: Final = "DELETE FROM delivery WHERE id = ANY(%(ids)s::bigint[]) AND status = 'dead' AND attempt = 0"

#: Let events be routed again; of each, `gone` deliveries were taken away, all of them dead.
REROUTE: Final = """
    UPDATE event e
    SET status = 'pending', reason = NULL, routed_at = NULL, route_at = clock_timestamp(), route_failures = 0,
        deliveries = e.deliveries - g.gone, dead = e.dead - g.gone, updated_at = clock_timestamp()
    FROM unnest(%(seqs)s::bigint[], %(gone)s::integer[]) AS g (seq, gone)
    WHERE e.seq = g.seq AND e.status = 'dead'
"""


#: Classes of failure by which routing makes a delivery dead before any attempt: there is nothing that could be sent.
UNSENDABLE: Final = (FailureClass.TEMPLATE, FailureClass.POLICY)


class _Event(NamedTuple):
    seq: int
    status: EventStatus
    reason: str | None
    erased: bool


class _Delivery(NamedTuple):
    id: int
    endpoint: str
    lane: str
    status: DeliveryStatus
    attempt: int
    failure_class: str | None

    @property
    def born_dead(self) -> bool:
        """Whether routing made it dead, so that there is nothing that could be sent."""
        return self.status is DeliveryStatus.DEAD and self.attempt == 0 and self.failure_class in UNSENDABLE


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did."""

    seq: int
    #: The event's state now.
    status: EventStatus
    #: Deliveries that are due now; the broker must know them once it is committed.
    refs: list[DeliveryRef]
    #: Their endpoints.
    endpoints: list[str]
    #: Those of them that were removed: what goes there waits until one of that name is made.
    missing: list[str]


@dataclass(frozen=True, slots=True)
class RerouteResult:
    """What a reroute did; the event is pending, and due for its routing at once."""

    seq: int
    #: Endpoints whose deliveries, born dead, were taken away.
    endpoints: list[str]


def replay(
    conn: psycopg.Connection[Any],
    source: str,
    event_id: str,
    who: str,
    why: str,
    *,
    endpoint: str | None = None,
    force: bool = False,
) -> ReplayResult | None:
    """Send the dead deliveries of an event again, or only the one to `endpoint`; with `force` those that succeeded too.

    None when there is no such event or delivery. Writes the audit row too.

    Raises:
        IllegalTransition: there is nothing to replay; its `code` is ``erased``, ``unfinished``, ``cancelled``,
            ``not-routed`` (route it again), or ``nothing-to-replay``.
    """
    with conn.transaction():
        event = _locked(conn, source, event_id)
        if event is None:
            return None
        deliveries = _deliveries(conn, event.seq)
        if endpoint is not None:
            deliveries = [d for d in deliveries if d.endpoint == endpoint]
            if not deliveries and event.status is not EventStatus.PENDING and not event.erased:
                return None
        wanted = _to_replay(event, event_id, deliveries, force)
        conn.execute(REPLAY, {"ids": numbers(d.id for d in wanted), "job_id": None})
        ((status,),) = conn.execute(RECOUNT, {"seqs": numbers([event.seq])})
        endpoints = [d.endpoint for d in wanted]
        detail = {"replayed": len(wanted), "endpoints": endpoints, "force": force, "status": status}
        audit.record(conn, who, "replay", f"event {source}/{event_id}", why, detail)
        refs = [DeliveryRef(d.id, event.seq, d.lane, line="replay") for d in wanted]
        missing = configuration.missing_among(conn, endpoints)
        return ReplayResult(event.seq, EventStatus(status), refs, endpoints, missing)


def replayable(found: Mapping[str, Any], *, force: bool = False) -> list[str]:
    """The endpoints to which a replay would send an event again, which is as `events.find` gives it. Nothing is locked: it may
    be another thing a moment later.

    Raises:
        IllegalTransition: as `replay`.
    """
    event, deliveries = _as_found(found)
    return [d.endpoint for d in _to_replay(event, found["event_id"], deliveries, force)]


def reroutable(found: Mapping[str, Any]) -> list[str]:
    """The endpoints whose deliveries, born dead, a reroute would take away; otherwise as `replayable`.

    Raises:
        IllegalTransition: as `reroute`.
    """
    event, deliveries = _as_found(found)
    return [d.endpoint for d in _to_unbear(event, found["event_id"], deliveries)]


def _as_found(found: Mapping[str, Any]) -> tuple[_Event, list[_Delivery]]:
    event = _Event(found["seq"], EventStatus(found["status"]), found["reason"], found["erased_at"] is not None)
    return event, [
        _Delivery(d["id"], d["endpoint"], d["lane"], DeliveryStatus(d["status"]), d["attempt"], d["failure_class"])
        for d in found["deliveries"]
    ]


def _locked(conn: psycopg.Connection[Any], source: str, event_id: str) -> _Event | None:
    row = conn.execute(_LOCK_EVENT, {"source": source, "event_id": event_id}).fetchone()
    return None if row is None else _Event(row[0], EventStatus(row[1]), row[2], row[3])


def _deliveries(conn: psycopg.Connection[Any], seq: int) -> list[_Delivery]:
    rows = conn.execute(_LOCK_DELIVERIES, {"seq": seq})
    return [_Delivery(i, endpoint, lane, DeliveryStatus(status), *rest) for i, endpoint, lane, status, *rest in rows]


def _to_replay(event: _Event, event_id: str, deliveries: Sequence[_Delivery], force: bool) -> list[_Delivery]:
    """What of an event can be sent again."""
    if event.erased:
        raise IllegalTransition(f"the payload of event {event_id} was erased: there is nothing to send", code="erased")
    wanted = [d for d in deliveries if _may_be_replayed(d, force)]
    if not wanted or event.status is EventStatus.PENDING:
        raise _not_replayable(event, event_id, deliveries)
    return wanted


def _may_be_replayed(delivery: _Delivery, force: bool) -> bool:
    if delivery.status is DeliveryStatus.SUCCEEDED:
        return force
    return delivery.status is DeliveryStatus.DEAD and not delivery.born_dead


def _not_replayable(event: _Event, event_id: str, deliveries: Sequence[_Delivery]) -> IllegalTransition:
    """Why nothing of an event can be replayed, and what can be done instead."""
    states = {d.status for d in deliveries}
    if event.status is EventStatus.PENDING:
        return IllegalTransition(
            f"event {event_id} is not routed yet: nothing was sent that could be sent again", code="unfinished"
        )
    if any(d.born_dead for d in deliveries):
        return IllegalTransition(
            f"what is dead of event {event_id} never had a body or an address that could be used: mend the endpoint and reroute",
            code="not-routed",
        )
    if states == {DeliveryStatus.CANCELLED} or (not states and event.status is EventStatus.CANCELLED):
        return IllegalTransition(f"event {event_id} was cancelled: post it again under another id", code="cancelled")
    if not states:
        return IllegalTransition(
            f"event {event_id} has no delivery ({event.reason}): mend the rules and reroute", code="not-routed"
        )
    if states & {DeliveryStatus.PENDING, DeliveryStatus.DELIVERING}:
        return IllegalTransition(f"event {event_id} is on its way still: cancel it first, or wait for its end", code="unfinished")
    return IllegalTransition(
        f"event {event_id} has no dead delivery: ask with force to send again what succeeded", code="nothing-to-replay"
    )


def reroute(conn: psycopg.Connection[Any], source: str, event_id: str, who: str, why: str) -> RerouteResult | None:
    """Have a dead event routed again that found no route, could not be routed, or has deliveries that were born dead; the
    latter are taken away, all others stay as they are. None when there is no such event. Writes the audit row too.

    Raises:
        IllegalTransition: there is nothing to route again; its `code` is ``erased``, ``unfinished``, ``cancelled``, or
            ``nothing-to-reroute``.
    """
    with conn.transaction():
        event = _locked(conn, source, event_id)
        if event is None:
            return None
        gone = _to_unbear(event, event_id, _deliveries(conn, event.seq))
        conn.execute(UNBEAR, {"ids": numbers(d.id for d in gone)})
        conn.execute(REROUTE, {"seqs": numbers([event.seq]), "gone": numbers([len(gone)])})
        endpoints = [d.endpoint for d in gone]
        detail = {"removed": endpoints, "was": event.reason}
        audit.record(conn, who, "reroute", f"event {source}/{event_id}", why, detail)
        return RerouteResult(event.seq, endpoints)


def _to_unbear(event: _Event, event_id: str, deliveries: Sequence[_Delivery]) -> list[_Delivery]:
    """What is taken away of an event that can be routed again."""
    if event.erased:
        raise IllegalTransition(f"the payload of event {event_id} was erased: there is nothing to route", code="erased")
    gone = [d for d in deliveries if d.born_dead]
    if event.status is not EventStatus.DEAD or not (gone or not deliveries or event.reason == FailureClass.PLATFORM):
        raise _not_routable(event, event_id)
    return gone


def _not_routable(event: _Event, event_id: str) -> IllegalTransition:
    match event.status:
        case EventStatus.PENDING | EventStatus.DELIVERING:
            return IllegalTransition(f"event {event_id} is {event.status}: wait for its end", code="unfinished")
        case EventStatus.CANCELLED:
            return IllegalTransition(f"event {event_id} was cancelled: post it again under another id", code="cancelled")
        case EventStatus.SUCCEEDED:
            return IllegalTransition(f"event {event_id} was delivered to all whom its routes name", code="nothing-to-reroute")
        case _:
            return IllegalTransition(
                f"all dead deliveries of event {event_id} were attempted: replay them instead", code="nothing-to-reroute"
            )
