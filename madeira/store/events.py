"""Events in Postgres: accepted, found, routed.

Acceptance is one atomic decision, the unique (source, event_id): whatever races, exactly one row is inserted. Rows that
were not inserted are read by a second statement, since an insert-or-select in one statement sees nothing of a racing
duplicate that commits meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import dict_row

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, DeliveryRef, NewEvent, PlannedDelivery, RoutableEvent
from madeira.states import MAX_ROUTE_FAILURES, EventStatus
from madeira.store import configuration, retention
from madeira.store.columns import binaries, numbers, quoted, texts
from madeira.store.same import same_value

#: The number of an event, and what it is to become.
Plan = tuple[int, Sequence[PlannedDelivery]]

#: Times that an insert is tried again when the row in its way is gone before it could be read.
_INSERT_ROUNDS: Final = 3

#: Accept a group. The place in the order of acceptance is drawn first, in arrival order; the rows are then inserted in
#: the order of their keys, as in every group, so that two groups with the same ids cannot deadlock. Ids of events that are gone
#: are looked up one by one: a join might read all of them, by a plan that was made when there were few.
_INSERT: Final = """
    WITH arrived AS MATERIALIZED (
        SELECT nextval('event_seq_seq') AS seq, a.*
        FROM unnest(%(source)s::text[], %(event_id)s::text[], %(event_type)s::text[], %(routing_key)s::text[],
                    %(target_uri)s::text[], %(payload)s::text[], %(parameters)s::text[], %(body_sha256)s::bytea[],
                    %(trace_id)s::text[], %(traceparent)s::text[], %(deliver_at)s::timestamptz[])
             AS a (source, event_id, event_type, routing_key, target_uri, payload, parameters, body_sha256,
                   trace_id, traceparent, deliver_at))
    INSERT INTO event (seq, source, event_id, event_type, routing_key, target_uri, payload, parameters, body_sha256,
                       trace_id, traceparent, deliver_at, route_at)
    SELECT seq, source, event_id, event_type, routing_key, target_uri, payload, parameters, body_sha256,
           trace_id, traceparent, deliver_at, coalesce(deliver_at, clock_timestamp())
    FROM arrived a
    WHERE (SELECT true FROM tombstone t WHERE t.event_id = a.event_id COLLATE "C" AND t.source = a.source COLLATE "C" LIMIT 1)
          IS NULL
    ORDER BY event_id COLLATE "C", source COLLATE "C", seq
    ON CONFLICT (event_id, source) DO NOTHING
    RETURNING source, event_id, seq, created_at,
              greatest(0, extract(epoch FROM route_at - clock_timestamp()))::float8
"""

#: What is stored under ids that were not inserted.
_KNOWN: Final = """
    SELECT source, event_id, seq, created_at,
           greatest(0, extract(epoch FROM coalesce(route_at, now()) - clock_timestamp()))::float8 AS delay_s,
           status, trace_id, body_sha256, event_type, routing_key, target_uri, payload, parameters, deliver_at
    FROM event
    WHERE (event_id, source) IN (SELECT * FROM unnest(%(event_id)s::text[], %(source)s::text[]))
"""

#: What is shown of an event.
_SHOWN: Final = """
    event_id, event_type, source, target_uri, payload, parameters, routing_key, created_at, updated_at,
    trace_id, retry_count, status, reason, seq, deliver_at, routed_at, route_failures, traceparent,
    deliveries AS delivery_count, unfinished, dead, cancelled, erased_at, erased_by
"""

#: One event, as it is shown.
_FIND: Final = f"""
    SELECT {_SHOWN}
    FROM event
    WHERE event_id = %(event_id)s AND source = %(source)s
"""  # noqa: S608

#: The events of one trace, or of one id whatever its source; the earliest first. By an array of their numbers: a join with them
#: that was planned while the table was empty would read the whole of it ever after.
_FIND_TRACE: Final = f"""
    SELECT {_SHOWN}
    FROM event
    WHERE seq = ANY (ARRAY(
        SELECT seq FROM event WHERE trace_id = %(id)s UNION SELECT seq FROM event WHERE event_id = %(id)s))
    ORDER BY seq
    LIMIT %(limit)s
"""  # noqa: S608

#: The deliveries of some events.
_DELIVERIES: Final = """
    SELECT event_seq, id, endpoint, lane, routes, line, job_id, ordering_key, status, attempt, failures, lost, retries,
           claimed_at, lease_until, budget_from, next_attempt_at, cancel_requested_at, finished_at, died_at, notified_at,
           failure_class, last_error, last_error_code, created_at, updated_at
    FROM delivery
    WHERE event_seq = ANY(%(seqs)s::bigint[])
    ORDER BY id
"""

#: The attempts of the deliveries of some events, in the order of time. The log's parts from before a delivery was made are left
#: out; with a day's doubt, since clocks are set back now and then. OFFSET 0 has each delivery looked up: a join that was planned
#: while the log was empty would read the whole of it ever after.
_ATTEMPTS: Final = """
    SELECT l.delivery_id, l.attempt, l.started_at, l.duration_s, l.url, l.status_code, l.outcome, l.error_code,
           l.reason, l.settled_as, l.excerpt, l.length, l.sha256, l.worker, l.exchange, l.recorded_at
    FROM delivery d CROSS JOIN LATERAL (
        SELECT * FROM delivery_log
        WHERE delivery_id = d.id AND recorded_at > d.created_at - interval '1 day'
        OFFSET 0) l
    WHERE d.event_seq = ANY(%(seqs)s::bigint[])
    ORDER BY l.started_at, l.id
"""

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


def insert(conn: psycopg.Connection[Any], events: Sequence[NewEvent]) -> list[Accepted]:
    """Accept a group of events; one answer per event, in their order.

    Raises:
        StoreUnavailable: rows in the way vanished again and again before they could be read.
    """
    answers: dict[int, Accepted] = {}
    open_places = list(range(len(events)))
    for _ in range(_INSERT_ROUNDS):
        _insert_once(conn, events, open_places, answers)
        open_places = [i for i in open_places if i not in answers]
        if not open_places:
            return [answers[i] for i in range(len(events))]
    raise StoreUnavailable(f"events {[events[i].event_id for i in open_places]} come and go; try again")


def _insert_once(
    conn: psycopg.Connection[Any], events: Sequence[NewEvent], places: list[int], answers: dict[int, Accepted]
) -> None:
    rows = conn.execute(_INSERT, _event_columns([events[i] for i in places]), binary=True).fetchall()
    inserted = {(row[0], row[1]): row for row in rows}
    for i in places:
        event = events[i]
        row = inserted.pop((event.source, event.event_id), None)
        if row is not None:
            answers[i] = Accepted(
                seq=row[2],
                event_id=event.event_id,
                source=event.source,
                trace_id=event.trace_id,
                status=EventStatus.PENDING,
                created_at=row[3],
                delay_s=row[4],
            )
    others = [i for i in places if i not in answers]
    if others:
        known = _known(conn, [events[i] for i in others])
        answers.update((i, _answer(events[i], row)) for i in others if (row := known.get(_identity(events[i]))))
    unknown = [i for i in others if i not in answers]
    if unknown:
        gone = retention.tombstones(conn, [_identity(events[i]) for i in unknown])
        answers.update((i, _answer_of_gone(events[i], row)) for i in unknown if (row := gone.get(_identity(events[i]))))


def _event_columns(events: list[NewEvent]) -> dict[str, str]:
    return {
        "source": texts([e.source for e in events]),
        "event_id": texts([e.event_id for e in events]),
        "event_type": texts([e.event_type for e in events]),
        "routing_key": texts([e.routing_key for e in events]),
        "target_uri": texts([e.target_uri for e in events]),
        "payload": texts([e.payload for e in events]),
        "parameters": texts([e.parameters for e in events]),
        "body_sha256": binaries([e.body_sha256 for e in events]),
        "trace_id": texts([e.trace_id for e in events]),
        "traceparent": texts([e.traceparent for e in events]),
        "deliver_at": texts([None if e.deliver_at is None else e.deliver_at.isoformat() for e in events]),
    }


def _identity(event: NewEvent) -> tuple[str, str]:
    return event.source, event.event_id


def _known(conn: psycopg.Connection[Any], events: list[NewEvent]) -> dict[tuple[str, str], dict[str, Any]]:
    params = {"source": texts([e.source for e in events]), "event_id": texts([e.event_id for e in events])}
    with conn.cursor(binary=True, row_factory=dict_row) as cursor:
        return {(row["source"], row["event_id"]): row for row in cursor.execute(_KNOWN, params)}


def _answer(event: NewEvent, row: Mapping[str, Any]) -> Accepted:
    same = _is_same(event, row)
    return Accepted(
        seq=row["seq"],
        event_id=event.event_id,
        source=event.source,
        trace_id=row["trace_id"],
        status=EventStatus(row["status"]),
        created_at=row["created_at"],
        delay_s=row["delay_s"],
        duplicate=same,
        conflict=not same,
    )


def _answer_of_gone(event: NewEvent, row: Mapping[str, Any]) -> Accepted:
    """Of an event that is gone only the digest of its body is left to compare with."""
    return _answer(event, {"delay_s": 0.0, **row})


def _is_same(event: NewEvent, row: Mapping[str, Any]) -> bool:
    """Whether a post says what is stored; the trace id does not count, since many senders make a new one per try."""
    if event.body_sha256 == row["body_sha256"]:
        return True
    if "payload" not in row:
        return False
    plain = ("event_type", "routing_key", "target_uri", "deliver_at")
    return (
        all(getattr(event, name) == row[name] for name in plain)
        and same_value(event.payload, row["payload"])
        and same_value(event.parameters, row["parameters"])
    )


def find(conn: psycopg.Connection[Any], source: str, event_id: str) -> dict[str, Any] | None:
    """One event with its ``deliveries``, each with its ``attempts``; None when there is none.

    Texts (``payload``, ``parameters``) are the JSON as received, times are aware datetimes, ``excerpt`` and ``sha256``
    are bytes.
    """
    found = _read(conn, _FIND, {"source": source, "event_id": event_id})
    return found[0] if found else None


def find_trace(conn: psycopg.Connection[Any], identifier: str, limit: int = 100) -> list[dict[str, Any]]:
    """The events whose trace id or event id is `identifier`, in the shape of `find`, the earliest first."""
    return _read(conn, _FIND_TRACE, {"id": identifier, "limit": limit})


def _read(conn: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(statement, params).fetchall()
        events = {event["seq"]: event | {"deliveries": []} for event in found}
        if not events:
            return []
        seqs = {"seqs": numbers(events)}
        deliveries = {row["id"]: row | {"attempts": []} for row in cursor.execute(_DELIVERIES, seqs)}
        for attempt in cursor.execute(_ATTEMPTS, seqs):
            if attempt["delivery_id"] in deliveries:
                deliveries[attempt["delivery_id"]]["attempts"].append(attempt)
    for delivery in deliveries.values():
        events[delivery["event_seq"]]["deliveries"].append(delivery)
    return list(events.values())


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
