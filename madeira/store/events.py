"""How events get into Postgres. They are routed in `madeira.store.routing`, and read in `madeira.store.story`.

Acceptance is one atomic decision, the unique (source, event_id): whatever races, exactly one row is inserted. Rows that
were not inserted are read by a second statement, since an insert-or-select in one statement sees nothing of a racing
duplicate that commits meanwhile.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, NewEvent
from madeira.states import EventStatus
from madeira.store import tombstones
from madeira.store.columns import binaries, texts
from madeira.store.same import same_value

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
        gone = tombstones.find(conn, [_identity(events[i]) for i in unknown])
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
