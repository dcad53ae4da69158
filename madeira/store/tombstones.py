"""What is known of events that are gone: their ids are duplicates still. `madeira.store.retention` leaves them behind."""

from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from madeira.store.columns import texts

#: Ids of events that are gone.
_FIND: Final = """
    SELECT t.source, t.event_id, t.seq, t.trace_id, t.status, t.body_sha256, t.created_at, t.ended_at, t.buried_at
    FROM unnest(%(event_id)s::text[], %(source)s::text[]) AS a (event_id, source)
    CROSS JOIN LATERAL (SELECT * FROM tombstone
                        WHERE event_id = a.event_id COLLATE "C" AND source = a.source COLLATE "C" OFFSET 0) t
"""

#: The same by trace or id alone.
_FIND_TRACE: Final = """
    SELECT source, event_id, trace_id, status, created_at, ended_at, buried_at AS removed_at FROM tombstone
    WHERE (trace_id = %(id)s OR event_id = %(id)s)
          AND NOT EXISTS (SELECT FROM event e WHERE e.event_id = tombstone.event_id AND e.source = tombstone.source)
    ORDER BY created_at LIMIT %(limit)s
"""


def find(conn: psycopg.Connection[Any], ids: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """What is known of ids (source, event id) whose events are gone."""
    params = {"source": texts(source for source, _ in ids), "event_id": texts(event_id for _, event_id in ids)}
    with conn.cursor(binary=True, row_factory=dict_row) as cursor:
        return {(row["source"], row["event_id"]): row for row in cursor.execute(_FIND, params)}


def find_trace(conn: psycopg.Connection[Any], identifier: str, limit: int = 100) -> list[dict[str, Any]]:
    """Events that are gone and whose trace id or event id is `identifier`; ``removed_at`` says since when."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_FIND_TRACE, {"id": identifier, "limit": limit}).fetchall()
