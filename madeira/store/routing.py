"""Routing in Postgres: which events are to be routed, and the birth of their deliveries.

One statement makes all that an event becomes, and names the state that it starts from. Where an earlier run came as far, it
changes nothing and tells what that one left. What follows in the life of a delivery is its claim (`madeira.store.claims`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psycopg

from madeira.records import DeliveryRef, PlannedDelivery, RoutableEvent
from madeira.states import MAX_ROUTE_FAILURES, EventStatus
from madeira.store import configuration
from madeira.store.columns import numbers, quoted, texts

#: The number of an event, and what it is to become.
Plan = tuple[int, Sequence[PlannedDelivery]]

#: What routing needs to know of some events.
_ROUTABLE: Final = """
    SELECT seq, source, event_id, event_type, routing_key, target_uri, trace_id, created_at,
           payload, parameters, traceparent, status,
           greatest(0, extract(epoch FROM coalesce(route_at, now()) - clock_timestamp()))::float8
    FROM event
    WHERE seq = ANY(%(seqs)s::bigint[])
    ORDER BY seq
"""

#: Route pending events: insert their deliveries and count them. An event without any is dead as unrouted. One that was
#: routed before, and is routed again, keeps the deliveries that it has. No endpoint goes until this has ended; plans that were
#: made for another configuration than this one do nothing, and the first column says which one there is.
_ROUTE: Final = """
    WITH standing AS MATERIALIZED (SELECT version FROM configuration WHERE single FOR KEY SHARE),
    planned AS MATERIALIZED (
        SELECT *
        FROM unnest(%(seq)s::bigint[], %(endpoint)s::text[], %(lane)s::text[], %(routes)s::text[],
                    %(failure_class)s::text[], %(last_error)s::text[], %(error_code)s::text[], %(body)s::text[],
                    %(ordering_key)s::text[])
             AS p (seq, endpoint, lane, routes, failure_class, last_error, error_code, body, ordering_key)),
    locked AS MATERIALIZED (
        SELECT seq, trace_id FROM event
        WHERE seq = ANY(%(seqs)s::bigint[]) AND status = 'pending' AND routed_at IS NULL
              AND (SELECT version = coalesce(%(made_for)s::bigint, version) FROM standing)
        ORDER BY seq
        FOR NO KEY UPDATE),
    born AS (
        INSERT INTO delivery (event_seq, endpoint, lane, routes, status, finished_at, died_at,
                              failure_class, last_error, last_error_code, body, ordering_key, trace_id)
        SELECT l.seq, p.endpoint, p.lane, p.routes::text[],
               CASE WHEN p.failure_class IS NULL THEN 'pending' ELSE 'dead' END,
               CASE WHEN p.failure_class IS NOT NULL THEN clock_timestamp() END,
               CASE WHEN p.failure_class IS NOT NULL THEN clock_timestamp() END,
               p.failure_class, p.last_error, p.error_code, p.body, p.ordering_key, l.trace_id
        FROM locked l JOIN planned p ON p.seq = l.seq
        ORDER BY l.seq, p.endpoint COLLATE "C"
        ON CONFLICT (event_seq, endpoint) DO NOTHING
        RETURNING id, event_seq, lane, status),
    routed AS (
        UPDATE event e
        SET routed_at = clock_timestamp(),
            route_at = NULL,
            deliveries = e.deliveries + s.total,
            unfinished = e.unfinished + s.total - s.dead,
            dead = e.dead + s.dead,
            status = CASE WHEN e.deliveries + s.total = 0 THEN 'dead'
                          ELSE event_status_of(e.unfinished + s.total - s.dead, e.dead + s.dead, e.cancelled) END,
            reason = CASE WHEN e.deliveries + s.total = 0 THEN 'unrouted' END,
            updated_at = clock_timestamp()
        FROM (SELECT l.seq, count(b.id)::integer AS total,
                     count(b.id) FILTER (WHERE b.status = 'dead')::integer AS dead
              FROM locked l LEFT JOIN born b ON b.event_seq = l.seq
              GROUP BY l.seq) s
        WHERE e.seq = s.seq
        RETURNING e.seq, e.status)
    SELECT s.version, r.seq, r.status, b.id, b.lane, b.status
    FROM standing s LEFT JOIN (routed r LEFT JOIN born b ON b.event_seq = r.seq) ON true
    ORDER BY r.seq, b.id
"""

#: The unfinished deliveries of events that were routed before. By status, and not by finished_at as the index of all
#: unfinished ones has it: a plan made while that index was small would read the whole of it ever after.
_UNFINISHED_OF: Final = """
    SELECT event_seq, id, lane,
           greatest(0, extract(epoch FROM coalesce(lease_until, next_attempt_at) - clock_timestamp()))::float8
    FROM delivery
    WHERE event_seq = ANY(%(seqs)s::bigint[]) AND status IN ('pending', 'delivering')
    ORDER BY id
"""

#: Count one failure of routing; the last one that is allowed ends the event.
_ROUTE_FAILED: Final = """
    UPDATE event
    SET route_failures = route_failures + 1,
        status = CASE WHEN route_failures + 1 >= %(max)s THEN 'dead' ELSE status END,
        reason = CASE WHEN route_failures + 1 >= %(max)s THEN 'platform' ELSE reason END,
        route_at = CASE WHEN route_failures + 1 >= %(max)s THEN NULL ELSE route_at END,
        updated_at = clock_timestamp()
    WHERE seq = %(seq)s AND status = 'pending'
    RETURNING status = 'dead'
"""


class Unroutable(NamedTuple):
    """Why an event is not to be routed (now): ``finished``, ``not_due`` (then `delay_s` seconds) or ``missing``."""

    reason: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RouteResult:
    """What routing did with one event."""

    seq: int
    #: Deliveries that the broker must know: the new ones, or those that an earlier run left unfinished.
    refs: list[DeliveryRef] = field(default_factory=list)
    #: Deliveries that were born dead.
    dead: list[DeliveryRef] = field(default_factory=list)
    #: The event's state now; None when it had been routed or ended before, and nothing was changed.
    status: EventStatus | None = None


def routable(conn: psycopg.Connection[Any], seqs: Sequence[int]) -> tuple[list[RoutableEvent], dict[int, Unroutable]]:
    """Which of the events `seqs` are to be routed now, and why the others are not."""
    events: list[RoutableEvent] = []
    others = {seq: Unroutable("missing") for seq in seqs}
    for *row, status, delay_s in conn.execute(_ROUTABLE, {"seqs": numbers(seqs)}, binary=True):
        if status != EventStatus.PENDING:
            others[row[0]] = Unroutable("finished")
        elif delay_s > 0:
            others[row[0]] = Unroutable("not_due", delay_s)
        else:
            del others[row[0]]
            events.append(RoutableEvent(*row))
    return events, others


def route(conn: psycopg.Connection[Any], plans: Sequence[Plan], *, made_for: int | None = None) -> list[RouteResult]:
    """Insert the planned deliveries of events that are still to be routed; one result per plan, in their order.

    An empty plan makes the event dead as ``unrouted``. An event that was routed before is left as it is, and the result
    names the deliveries that it has unfinished, since the earlier run may have died before it told the broker.

    `made_for` is the version of the configuration that the plans were made by. If it is another one by now, what is planned
    for an endpoint that is there no more is left out, as if no route had led there. None: nobody asks.
    """
    results = {seq: RouteResult(seq) for seq, _ in plans}
    for seq, event_status, delivery_id, lane, status in _routed(conn, plans, made_for):
        if results[seq].status is None:
            results[seq] = RouteResult(seq, status=EventStatus(event_status))
        if delivery_id is not None:
            refs = results[seq].dead if status == EventStatus.DEAD else results[seq].refs
            refs.append(DeliveryRef(delivery_id, seq, lane))
    before = [seq for seq, result in results.items() if result.status is None]
    if before:
        for seq, delivery_id, lane, delay_s in conn.execute(_UNFINISHED_OF, {"seqs": numbers(before)}, binary=True):
            results[seq].refs.append(DeliveryRef(delivery_id, seq, lane, delay_s))
    return [results[seq] for seq, _ in plans]


def _routed(conn: psycopg.Connection[Any], plans: Sequence[Plan], made_for: int | None) -> list[tuple[Any, ...]]:
    """What was routed: seq and state of each event, with id, lane and state of each delivery."""
    version, rows = _route_now(conn, plans, made_for)
    if made_for in (None, version):
        return rows
    with conn.transaction():
        configuration.keep_endpoints(conn)
        there = configuration.endpoints_among(conn, {p.endpoint for _, planned in plans for p in planned})
        left = [(seq, [p for p in planned if p.endpoint in there]) for seq, planned in plans]
        return _route_now(conn, left, None)[1]


def _route_now(conn: psycopg.Connection[Any], plans: Sequence[Plan], made_for: int | None) -> tuple[int, list[tuple[Any, ...]]]:
    """The version of the configuration, and what was routed; nothing, if `made_for` is another one."""
    rows = conn.execute(_ROUTE, _plan_columns(plans) | {"made_for": made_for}, binary=True).fetchall()
    return rows[0][0], [row[1:] for row in rows if row[1] is not None]


def _plan_columns(plans: Sequence[Plan]) -> dict[str, str]:
    rows = [(seq, delivery) for seq, planned in plans for delivery in planned]
    return {
        "seqs": numbers(seq for seq, _ in plans),
        "seq": numbers(seq for seq, _ in rows),
        "endpoint": texts(p.endpoint for _, p in rows),
        "lane": texts(p.lane for _, p in rows),
        "routes": texts("{" + ",".join(map(quoted, p.routes)) + "}" for _, p in rows),
        "failure_class": texts(p.failure_class for _, p in rows),
        "last_error": texts(p.last_error for _, p in rows),
        "error_code": texts(p.error_code for _, p in rows),
        "body": texts(p.body for _, p in rows),
        "ordering_key": texts(p.ordering_key for _, p in rows),
    }


def count_route_failure(conn: psycopg.Connection[Any], seq: int) -> bool:
    """Count one failure of routing the event `seq`; True when it was the last one allowed and the event is dead now."""
    row = conn.execute(_ROUTE_FAILED, {"seq": seq, "max": MAX_ROUTE_FAILURES}).fetchone()
    return row == (True,)
