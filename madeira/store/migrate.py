"""Brings the tables up to date: numbered files, applied once each, in order, in one transaction.

Any number of hosts may do it at once: a transaction-scoped advisory lock lets them in one by one (a session-scoped one
would not survive a pooler), and whoever comes second finds nothing left to do.
"""

from pathlib import Path
from typing import Any, Final

import psycopg

from madeira.errors import StoreError, StoreUnavailable

FOLDER: Final = Path(__file__).parent.parent / "migrations"

#: The key of the advisory lock: any number, as long as it stays the same.
_LOCK: Final = 6_233_715_590_102

#: Wait until no other host migrates this database; released at the end of the transaction.
_TAKE_LOCK: Final = "SELECT pg_advisory_xact_lock(%s)"

#: Payloads are kept as text, byte for byte, which only UTF-8 allows.
_ENCODING: Final = "SHOW server_encoding"

#: Whether this database was ever migrated.
_IS_NEW: Final = "SELECT to_regclass('schema_migration') IS NULL"

#: The record of what was applied.
_CREATE: Final = """
    CREATE TABLE IF NOT EXISTS schema_migration (
        name text PRIMARY KEY,
        applied_at timestamptz NOT NULL DEFAULT clock_timestamp())
"""

#: What was applied.
_APPLIED: Final = "SELECT name FROM schema_migration"

#: Note one file as applied.
_RECORD: Final = "INSERT INTO schema_migration (name) VALUES (%s)"


def migrate(url: str) -> list[str]:
    """Apply what is missing; returns the names of the files applied now, in order.

    Raises:
        StoreUnavailable: Postgres is away.
        StoreError: the database is not in UTF-8.
    """
    try:
        with psycopg.connect(url, connect_timeout=5, application_name="madeira migrate") as conn:
            conn.execute(_TAKE_LOCK, (_LOCK,))
            _require_utf8(conn)
            conn.execute(_CREATE)
            missing = _missing(conn)
            for name in missing:
                conn.execute((FOLDER / name).read_bytes())
                conn.execute(_RECORD, (name,))
            return missing
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"Postgres is not available: {e}") from e


def pending(url: str) -> list[str]:
    """The names of the files that `migrate` would apply.

    Raises:
        StoreUnavailable: Postgres is away.
    """
    try:
        with psycopg.connect(url, connect_timeout=2, application_name="madeira migrate") as conn:
            is_new = conn.execute(_IS_NEW).fetchone()
            return _files() if is_new == (True,) else _missing(conn)
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"Postgres is not available: {e}") from e


def _files() -> list[str]:
    names = sorted(path.name for path in FOLDER.glob("[0-9]*.sql"))
    if not names:
        raise StoreError(f"there are no migrations in {FOLDER}: the package is not complete; install it again")
    return names


def _missing(conn: psycopg.Connection[Any]) -> list[str]:
    applied = {name for (name,) in conn.execute(_APPLIED)}
    return [name for name in _files() if name not in applied]


def _require_utf8(conn: psycopg.Connection[Any]) -> None:
    row = conn.execute(_ENCODING).fetchone()
    if row != ("UTF8",):
        raise StoreError(f"the database's encoding is {row and row[0]}; create it with ENCODING 'UTF8'")
