"""The parts of ``delivery_log``, one a day: made ahead, and removed as a whole when they are old.

Dropping a part unlinks its files: the disk has them back at once, and no row is touched. What a part holds of deliveries that are
not over, and of dead letters, is still needed: it is copied first, into a small table that takes the part's place. So a part may
go although an endpoint has been paused for a year.

All that needs a lock on the whole log is tried with a short wait: settles come every moment, and nobody may queue behind us. What
does not get its lock is done by a later run. A part is called after its last day (UTC), and ``_kept`` where it is a rest.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

import psycopg
from psycopg import sql

from madeira.store import erase
from madeira.store.database import unhurried

#: Days for which parts are there ahead: the scheduler may be away for as long.
AHEAD: Final = 7

#: Deliveries whose attempts one step copies.
PAGE: Final = 1_000

#: Attempts that are copied at most; a part that holds more of them stays as it is.
KEPT_MOST: Final = 200_000

#: Milliseconds that a lock on the log is waited for. Whoever comes after us waits as long.
LOCK_MS: Final = 300

#: Rows that one step removes of those that have no part of their own.
REST_PAGE: Final = 2_000

_NAME: Final = re.compile(r"delivery_log_([0-9]{8})(_kept)?")

#: The parts, with their bounds as Postgres writes them, and their size in bytes with indexes and TOAST.
_PARTS: Final = """
    SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), pg_total_relation_size(c.oid)
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'delivery_log'::regclass
    ORDER BY c.relname
"""

#: Of today and tomorrow, the days of which the log has no part: what comes then lies where it cannot go as a whole.
_UNCOVERED: Final = """
    WITH part AS (
        SELECT regexp_match(pg_get_expr(c.relpartbound, c.oid), 'FROM \\((?:''(.*)''|MINVALUE)\\) TO \\(''(.*)''\\)') AS bounds
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'delivery_log'::regclass)
    SELECT (wanted.at AT TIME ZONE 'UTC')::date
    FROM (VALUES (clock_timestamp()), (clock_timestamp() + interval '1 day')) AS wanted (at)
    WHERE NOT EXISTS (SELECT FROM part WHERE coalesce(bounds[1], '-infinity')::timestamptz <= wanted.at
                      AND wanted.at < bounds[2]::timestamptz)
"""

#: The last day of which a row lies where no part was made for it.
_LAST_OF_REST: Final = "SELECT max(recorded_at) FROM delivery_log_rest"

#: A table like the log. LIKE takes neither the identity nor the index of verdicts, which the log as a whole cannot have.
_CREATE: Final = """
    CREATE TABLE {part} (LIKE delivery_log INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING INDEXES);
    CREATE UNIQUE INDEX {index} ON {part} (delivery_id, token, (outcome = 'late'))
"""

_ATTACH_DAY: Final = "ALTER TABLE delivery_log ATTACH PARTITION {part} FOR VALUES FROM ({since}) TO ({until})"

#: Copy what a page of unfinished deliveries has in a part.
_KEEP_UNFINISHED: Final = """
    WITH page AS MATERIALIZED (
        SELECT id, created_at FROM delivery WHERE finished_at IS NULL AND id > %(after)s ORDER BY id LIMIT (SELECT %(limit)s)),
    kept AS (
        INSERT INTO {kept}
        SELECT l.* FROM page p CROSS JOIN LATERAL (SELECT * FROM {part} WHERE delivery_id = p.id OFFSET 0) l
        ON CONFLICT DO NOTHING
        RETURNING 1)
    SELECT max(id), min(created_at), (SELECT count(*) FROM kept) FROM page
"""

#: The same of dead ones, by the time of their death.
_KEEP_DEAD: Final = """
    WITH page AS MATERIALIZED (
        SELECT id, died_at FROM delivery
        WHERE died_at IS NOT NULL AND (died_at, id) > (%(since)s, %(after)s)
        ORDER BY died_at, id LIMIT (SELECT %(limit)s)),
    kept AS (
        INSERT INTO {kept}
        SELECT l.* FROM page p CROSS JOIN LATERAL (SELECT * FROM {part} WHERE delivery_id = p.id OFFSET 0) l
        ON CONFLICT DO NOTHING
        RETURNING 1),
    last AS (SELECT id, died_at FROM page ORDER BY died_at DESC, id DESC LIMIT 1)
    SELECT (SELECT id FROM last), (SELECT died_at FROM last), (SELECT count(*) FROM kept)
"""

#: Erase in a copy what a person erased while it was made.
_ERASE_AGAIN: Final = f"""
    UPDATE {{kept}} l SET {erase.OF_ATTEMPT}
    FROM delivery d JOIN event e ON e.seq = d.event_seq
    WHERE d.id = l.delivery_id AND e.erased_by = 'person' AND e.erased_at >= %(since)s
"""  # noqa: S608

#: Whether anything in a part is still needed.
_IS_NEEDED: Final = """
    SELECT EXISTS (SELECT FROM {part} l JOIN delivery d ON d.id = l.delivery_id
                   WHERE d.finished_at IS NULL OR d.died_at IS NOT NULL)
"""

#: Remove a page of what is old and lies where no part was made for it.
_REMOVE_REST: Final = """
    DELETE FROM delivery_log_rest
    WHERE ctid = ANY (ARRAY(
        SELECT l.ctid FROM delivery_log_rest l LEFT JOIN delivery d ON d.id = l.delivery_id
        WHERE l.recorded_at < %(before)s AND (d.id IS NULL OR d.finished_at IS NOT NULL AND d.died_at IS NULL)
        LIMIT %(limit)s))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the log."""

    name: str
    #: Its bounds, as Postgres writes them.
    bounds: str
    #: With indexes and TOAST.
    size: int
    last_day: date
    #: Whether it holds only what was still needed when the rest went.
    is_kept: bool

    @property
    def until(self) -> datetime:
        """What it holds was recorded before."""
        return _midnight(self.last_day + timedelta(days=1))


class Busy(Exception):
    """Raised when the log could not be locked in time; nothing was changed."""


def parts(conn: psycopg.Connection[Any]) -> list[Part]:
    """All parts, the earliest first, but for the one that takes what has no part."""
    found = [
        Part(name, bounds, size, datetime.strptime(match[1], "%Y%m%d").replace(tzinfo=UTC).date(), match[2] is not None)
        for name, bounds, size in conn.execute(_PARTS)
        if (match := _NAME.fullmatch(name))
    ]
    return sorted(found, key=lambda part: part.last_day)


def uncovered(conn: psycopg.Connection[Any]) -> list[date]:
    """Of today and tomorrow (UTC), the days of which there is no part."""
    return [day for (day,) in conn.execute(_UNCOVERED)]


def make_ahead(conn: psycopg.Connection[Any], *, today: date | None = None, days: int = AHEAD) -> list[str]:
    """Make the parts of the coming `days` that are not there yet; returns their names. `conn` is in autocommit mode.

    Days of which rows lie in the rest already get no part: they would have to be moved while everybody waits.

    Raises:
        Busy: the log could not be locked in time.
    """
    (now,) = conn.execute("SELECT clock_timestamp()").fetchone() or (None,)
    assert now is not None
    today = today or now.astimezone(UTC).date()
    ((rest,),) = conn.execute(_LAST_OF_REST).fetchall()
    latest = max(today - timedelta(days=1), *(part.last_day for part in parts(conn)))
    if rest is not None:
        latest = max(latest, rest.astimezone(UTC).date(), today)
    missing = (today + timedelta(days=days) - latest).days
    return [_make(conn, latest + timedelta(days=n)) for n in range(1, missing + 1)]


def _make(conn: psycopg.Connection[Any], day: date) -> str:
    name = f"delivery_log_{day:%Y%m%d}"
    with _locking(conn):
        _create(conn, name)
        bounds = {"since": sql.Literal(_midnight(day)), "until": sql.Literal(_midnight(day + timedelta(days=1)))}
        conn.execute(sql.SQL(_ATTACH_DAY).format(part=sql.Identifier(name), **bounds))
    return name


def _create(conn: psycopg.Connection[Any], name: str) -> None:
    conn.execute(sql.SQL(_CREATE).format(part=sql.Identifier(name), index=sql.Identifier(f"{name}_one_verdict")))


def remove_rest(conn: psycopg.Connection[Any], before: datetime, limit: int = REST_PAGE) -> int:
    """Remove attempts older than `before` that lie where no part was made for them; at most `limit`, returns how many."""
    with unhurried(conn):
        return conn.execute(_REMOVE_REST, {"before": before, "limit": limit}).rowcount


def drop_if_needless(conn: psycopg.Connection[Any], part: Part) -> bool:
    """Drop a part in which nothing is needed any more, if that is so.

    Raises:
        Busy: the log could not be locked in time.
    """
    ((needed,),) = conn.execute(_of(_IS_NEEDED, part=part.name))
    if needed:
        return False
    with _locking(conn):
        _detach(conn, part)
    return True


class Removal:
    """The removal of one part, in steps: what is needed of it is copied page by page, then the copy takes its place.

    One that is given up half-way has changed nothing but for a table that the next one removes. `conn` is in autocommit mode.
    """

    def __init__(self, conn: psycopg.Connection[Any], part: Part) -> None:
        self.part = part
        #: Attempts that are still needed.
        self.kept = 0
        self._name = f"{part.name.removesuffix('_kept')}_kept"
        self._after = 0
        self._dead: tuple[datetime, int] | None = (_midnight(date(1970, 1, 1)), 0)
        self._is_unfinished_done = False
        ((self._began_at,),) = conn.execute("SELECT clock_timestamp()").fetchall()
        with conn.transaction():
            conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(self._name)))
            _create(conn, self._name)

    def step(self, conn: psycopg.Connection[Any], limit: int = PAGE) -> bool:
        """Copy a page; whether there is more to copy."""
        with unhurried(conn):
            if not self._is_unfinished_done:
                self._copy_unfinished(conn, limit)
            elif self._dead is not None:
                self._copy_dead(conn, limit)
        return self._dead is not None and self.kept <= KEPT_MOST

    def _copy_unfinished(self, conn: psycopg.Connection[Any], limit: int) -> None:
        statement = _of(_KEEP_UNFINISHED, part=self.part.name, kept=self._name)
        ((last, earliest, kept),) = conn.execute(statement, {"after": self._after, "limit": limit})
        self.kept += kept
        # Ids rise with time: a page that was made after the part's time, but for a day's doubt, has nothing behind it.
        self._is_unfinished_done = last is None or earliest > self.part.until + timedelta(days=1)
        self._after = last or self._after

    def _copy_dead(self, conn: psycopg.Connection[Any], limit: int) -> None:
        assert self._dead is not None
        statement = _of(_KEEP_DEAD, part=self.part.name, kept=self._name)
        params = {"since": self._dead[0], "after": self._dead[1], "limit": limit}
        ((last, died_at, kept),) = conn.execute(statement, params)
        self.kept += kept
        self._dead = None if last is None else (died_at, last)

    def finish(self, conn: psycopg.Connection[Any]) -> bool:
        """Put the copy in the part's place; False when too much of it is needed, so that it stays as it is.

        Raises:
            Busy: the log could not be locked in time.
        """
        if self.kept > KEPT_MOST:
            conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._name)))
            return False
        with _locking(conn):
            _detach(conn, self.part)
            if self.kept:
                conn.execute(_of(_ERASE_AGAIN, kept=self._name), {"since": self._began_at})
                attach = sql.SQL("ALTER TABLE delivery_log ATTACH PARTITION {} {}")
                conn.execute(attach.format(sql.Identifier(self._name), sql.SQL(self.part.bounds)))
            else:
                conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(self._name)))
        return True


def _detach(conn: psycopg.Connection[Any], part: Part) -> None:
    conn.execute(sql.SQL("ALTER TABLE delivery_log DETACH PARTITION {}").format(sql.Identifier(part.name)))
    conn.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(part.name)))


@contextmanager
def _locking(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """A transaction that gives up when it does not get its locks soon."""
    try:
        with conn.transaction():
            conn.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(sql.Literal(LOCK_MS)))
            yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as e:
        raise Busy(str(e)) from None


def _of(statement: str, **tables: str) -> sql.Composed:
    return sql.SQL(statement).format(**{key: sql.Identifier(name) for key, name in tables.items()})


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)
