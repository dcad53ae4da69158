"""The story of an event, as it is shown: the event, its deliveries, and every attempt of each."""

from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from madeira.store.columns import numbers

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
