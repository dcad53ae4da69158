"""What happened lately, for a person who watches: events as they come and end, and every attempt."""

from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

#: Database time now, where a watcher begins.
_NOW: Final = "SELECT clock_timestamp()"

#: Events accepted since then, among the newest; looking no further keeps it quick when there is nothing new.
_EVENTS: Final = """
    SELECT *
    FROM (SELECT seq, source, event_id, event_type, status, reason, retry_count, created_at, updated_at
          FROM event ORDER BY seq DESC LIMIT %(limit)s) newest
    WHERE created_at >= %(since)s
    ORDER BY seq DESC
"""

#: Attempts of those events.
_ATTEMPTS: Final = """
    SELECT l.id, e.seq, d.endpoint, l.attempt, l.outcome, l.status_code, l.error_code, l.reason, l.settled_as, l.recorded_at,
           extract(epoch FROM d.next_attempt_at - l.recorded_at)::float8 AS next_in_s, d.attempt = l.attempt AS is_latest
    FROM event e JOIN delivery d ON d.event_seq = e.seq JOIN delivery_log l ON l.delivery_id = d.id
    WHERE e.seq = ANY(%(seqs)s::bigint[])
    ORDER BY l.recorded_at, l.id
"""


def now(conn: psycopg.Connection[Any]) -> Any:
    """The database's time."""
    row = conn.execute(_NOW).fetchone()
    assert row is not None
    return row[0]


def recent(conn: psycopg.Connection[Any], since: Any, limit: int = 100) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events accepted at or after `since` (the latest `limit`, earliest first), and all attempts of theirs."""
    with conn.cursor(row_factory=dict_row) as cursor:
        events = cursor.execute(_EVENTS, {"since": since, "limit": limit}).fetchall()[::-1]
        attempts = cursor.execute(_ATTEMPTS, {"seqs": [e["seq"] for e in events]}).fetchall()
    return events, attempts
