"""Who may do what only one may do at a time (reconcile, a rebuild of the broker).

A row with a time of expiry instead of a session lock: it survives a pooler, and a holder that is frozen loses it.
"""

from typing import Any, Final

import psycopg

#: Take a lease that is free, run out, or one's own.
_TAKE: Final = """
    INSERT INTO lease AS l (name, holder, until)
    VALUES (%(name)s, %(holder)s, clock_timestamp() + %(ttl_s)s * interval '1 s')
    ON CONFLICT (name) DO UPDATE
    SET holder = excluded.holder,
        until = clock_timestamp() + %(ttl_s)s * interval '1 s',
        taken_at = CASE WHEN l.holder = excluded.holder THEN l.taken_at ELSE clock_timestamp() END
    WHERE l.holder = excluded.holder OR l.until < clock_timestamp()
    RETURNING true
"""

#: For how many seconds a lease that has not run out has been held by whoever holds it.
_HELD: Final = """
    SELECT extract(epoch FROM clock_timestamp() - taken_at)::float8 FROM lease
    WHERE name = %(name)s AND until >= clock_timestamp()
"""

#: Give one's own lease back.
_RELEASE: Final = "DELETE FROM lease WHERE name = %(name)s AND holder = %(holder)s"


def take(conn: psycopg.Connection[Any], name: str, holder: str, ttl_s: float) -> bool:
    """Take or renew the lease `name` for `ttl_s` seconds; False when another holds it."""
    params = {"name": name, "holder": holder, "ttl_s": ttl_s}
    return conn.execute(_TAKE, params).fetchone() is not None


def held_s(conn: psycopg.Connection[Any], name: str) -> float | None:
    """For how many seconds somebody has held the lease `name` through all its renewals; None when nobody does."""
    row = conn.execute(_HELD, {"name": name}).fetchone()
    return row and float(row[0])


def release(conn: psycopg.Connection[Any], name: str, holder: str) -> None:
    """Give the lease back; does nothing when another has it by now."""
    conn.execute(_RELEASE, {"name": name, "holder": holder})
