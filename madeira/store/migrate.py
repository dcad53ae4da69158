"""Brings the tables up to date: numbered files, applied once each, in order, each in a transaction of its own.

Any number of hosts may do it at once: whoever holds an advisory lock does it, the others look again until there is nothing left
to do. The lock belongs to a transaction, since one of a session would not survive a pooler, and nobody waits for it inside a
statement: what waits there has a snapshot, for which an index that is built concurrently would wait in turn.

The service goes on meanwhile. Whoever waits for a lock on a table makes everybody wait who comes after him, so a migration waits
for two seconds only, lets the others pass, and tries again. And an index on what may be large is built concurrently, in a file
whose name ends with ``.concurrently.sql``, of which every statement is a transaction; one that was broken off is taken away and
built anew.
"""

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg

from madeira.errors import StoreError, StoreUnavailable
from madeira.store import inventory, schema, search_path
from madeira.store.schema import FOLDER

#: Seconds that a statement of a migration may wait for a lock, and with it everybody who comes after it.
LOCK_S: Final = 2.0

#: Seconds for which a migration is tried again when somebody else holds what it needs, or migrates.
PATIENCE_S: Final = 600.0

#: Seconds between two tries.
_PAUSE_S: Final = 0.5

#: The key of the advisory lock: any number, as long as it stays the same.
_LOCK: Final = 6_233_715_590_102

#: Become the one that migrates this database, until the end of the transaction.
_TAKE_LOCK: Final = "SELECT pg_try_advisory_xact_lock(%s)"

#: What the settings of a role may say of statements in general does not hold for migrations.
_UNBOUNDED: Final = "SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0"

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

#: Note one file as applied.
_RECORD: Final = "INSERT INTO schema_migration (name) VALUES (%s)"

#: What this role lacks, and what to do about it. Who owns the database may make tables in a schema of `pg_database_owner`, as
#: `public` is since Postgres 15; before, and in one that somebody made or restored, only whom its owner lets.
_REMEDY: Final = """
    SELECT CASE
        WHEN NOT pg_has_role(t.relowner, 'USAGE')
        THEN format('the tables belong to another role; migrate as %I', pg_get_userbyid(t.relowner))
        WHEN s.nspowner = 'pg_database_owner'::regrole
        THEN format('the role must own its database; ALTER DATABASE %I OWNER TO %I', current_database(), current_user)
        ELSE format('the role must be let make tables there; GRANT CREATE ON SCHEMA %I TO %I', s.nspname, current_user)
    END
    FROM pg_namespace s LEFT JOIN pg_class t ON t.oid = to_regclass('schema_migration')
    WHERE s.nspname = current_schema()
"""

#: Whether an index is there and whole; no row when it is not there.
_IS_WHOLE: Final = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"

_CONCURRENTLY: Final = ".concurrently.sql"

_STATEMENT: Final = re.compile(r"(CREATE (?:UNIQUE )?INDEX|DROP INDEX) CONCURRENTLY ([a-z_0-9]+)\b[^;]*")


def migrate(url: str, *, folder: Path = FOLDER, lock_s: float = LOCK_S, patience_s: float = PATIENCE_S) -> list[str]:
    """Apply what is missing; returns the names of the files applied now, in order.

    `lock_s` is how long a statement waits for a lock, `patience_s` how long one is tried again, in seconds.

    Raises:
        StoreUnavailable: Postgres is away.
        StoreError: the database is not in UTF-8; the role may not make tables in it, or looks in no schema; somebody else
            migrates, or holds a table, for longer than `patience_s`.
    """
    try:
        with _connect(url) as holder:
            _take_lock(holder, patience_s)
            with _connect(url, autocommit=True) as conn:
                _require_utf8(conn)
                _create(conn)
                names = _missing(conn, folder)
                for name in names:
                    _patiently(partial(_apply, conn, folder / name, lock_s), name, patience_s)
            return names
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"Postgres is not available: {e}") from e
    except psycopg.errors.InsufficientPrivilege as e:
        raise StoreError(f"{e.diag.message_primary}: {_remedy(url)}") from e


def _remedy(url: str) -> str:
    """What a role lacks that may not migrate, and what whoever administers the server types."""
    with _connect(url) as conn:
        found = conn.execute(_REMEDY).fetchone()
    return str(found and found[0])


def pending(url: str, *, folder: Path = FOLDER) -> list[str]:
    """The names of the files that `migrate` would apply.

    Raises:
        StoreUnavailable: Postgres is away.
    """
    try:
        with _connect(url, connect_timeout=2) as conn:
            is_new = conn.execute(_IS_NEW).fetchone()
            return schema.files(folder) if is_new == (True,) else _missing(conn, folder)
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"Postgres is not available: {e}") from e


def ahead(url: str) -> str | None:
    """Why this version cannot work on tables that a later one has brought up to date; None when it can.

    Raises:
        StoreUnavailable: Postgres is away.
    """
    try:
        with _connect(url, connect_timeout=2) as conn:
            return schema.misfit({name for (name,) in conn.execute(schema.APPLIED)}, schema.known())
    except psycopg.OperationalError as e:
        raise StoreUnavailable(f"Postgres is not available: {e}") from e


def is_ahead(conn: "psycopg.Connection[Any]") -> bool:
    """Whether migrations of a later version were applied."""
    return not {name for (name,) in conn.execute(schema.APPLIED)} <= set(schema.known())


def _connect(url: str, *, autocommit: bool = False, connect_timeout: int = 5) -> "psycopg.Connection[Any]":
    # Without prepared statements, which a pooler may not know.
    conn = psycopg.connect(
        url,
        autocommit=autocommit,
        connect_timeout=connect_timeout,
        application_name="madeira migrate",
        prepare_threshold=None,
    )
    conn.execute(search_path.MEND)
    return conn


def _take_lock(holder: "psycopg.Connection[Any]", patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while holder.execute(_TAKE_LOCK, (_LOCK,)).fetchone() != (True,):
        holder.rollback()
        if time.monotonic() > deadline:
            raise StoreError(f"another host has been migrating this database for {patience_s:g} s; wait until it is done")
        time.sleep(_PAUSE_S)
    holder.execute(_UNBOUNDED)


def _missing(conn: "psycopg.Connection[Any]", folder: Path) -> list[str]:
    return schema.missing({name for (name,) in conn.execute(schema.APPLIED)}, schema.files(folder))


def _patiently(apply: Callable[[], None], name: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return apply()
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as e:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{name} got no lock on its tables within {patience_s:g} s: a transaction is open there, see "
                    "pg_stat_activity; end it and run `madeira migrate` again"
                ) from e
            time.sleep(_PAUSE_S)
        except psycopg.OperationalError:
            raise
        except psycopg.Error as e:
            raise StoreError(f"{name} cannot be applied: {' '.join(str(e).split())}") from e


def _apply(conn: "psycopg.Connection[Any]", file: Path, lock_s: float) -> None:
    if file.name.endswith(_CONCURRENTLY):
        for kind, index, statement in _statements(file):
            _change_index(conn, kind, index, statement)
        conn.execute(_RECORD, (file.name,))
        return
    with conn.transaction():
        conn.execute(_UNBOUNDED)
        conn.execute(f"SET LOCAL lock_timeout = {int(lock_s * 1000)}")
        conn.execute(file.read_bytes())
        conn.execute(_RECORD, (file.name,))


def _statements(file: Path) -> Iterator[tuple[str, str, str]]:
    """What each statement of a file does, to which index, and its text.

    Raises:
        StoreError: one does anything else, which would not be undone if it were broken off.
    """
    text = re.sub(r"--[^\n]*", "", file.read_text())
    for statement in filter(None, (part.strip() for part in text.split(";"))):
        found = _STATEMENT.fullmatch(statement)
        if found is None:
            raise StoreError(
                f"{file.name}: only CREATE INDEX CONCURRENTLY and DROP INDEX CONCURRENTLY may stand here: {statement}"
            )
        yield found.group(1), found.group(2), statement


def _change_index(conn: "psycopg.Connection[Any]", kind: str, index: str, statement: str) -> None:
    is_whole = conn.execute(_IS_WHOLE, (index,)).fetchone()
    is_there = is_whole is not None
    if kind == "DROP INDEX":
        if is_there:
            conn.execute(statement.encode())
        return
    if is_whole == (True,):
        return
    if is_there:
        conn.execute(f"DROP INDEX CONCURRENTLY {index}".encode())
    conn.execute(statement.encode())


def _create(conn: "psycopg.Connection[Any]") -> None:
    try:
        conn.execute(_CREATE)
    except psycopg.errors.InvalidSchemaName as e:
        for fault in inventory.elsewhere(conn):
            raise StoreError(f"{fault.what}; {fault.remedy}") from e
        raise


def _require_utf8(conn: "psycopg.Connection[Any]") -> None:
    row = conn.execute(_ENCODING).fetchone()
    if row != ("UTF8",):
        raise StoreError(f"the database's encoding is {row and row[0]}; create it with ENCODING 'UTF8'")
