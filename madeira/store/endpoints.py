"""What Postgres knows about an endpoint beside its configuration."""

from typing import Any, Final

import psycopg

#: Unfinished deliveries that are looked at to count those of one endpoint.
LOOK: Final = 10_000

#: How many of the unfinished deliveries are an endpoint's, and how many were looked at.
_UNFINISHED: Final = """
    SELECT count(*) FILTER (WHERE endpoint = %(endpoint)s), count(*)
    FROM (SELECT endpoint FROM delivery WHERE finished_at IS NULL ORDER BY id LIMIT (SELECT %(limit)s)) d
"""


def unfinished(conn: psycopg.Connection[Any], endpoint: str, look: int = LOOK) -> int | None:
    """How many deliveries of an endpoint are unfinished; None when all endpoints together have too many to look at."""
    ((of_it, of_all),) = conn.execute(_UNFINISHED, {"endpoint": endpoint, "limit": look + 1})
    return int(of_it) if of_all <= look else None
