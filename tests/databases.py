"""A fresh database for each test, at a tenth of the price of a new one.

Copying a database costs the server some three hundred files. So one that a test leaves is emptied for the next, unless there
is anything about it that emptying does not undo: a changed schema, statistics, an open connection, a lock, or much bloat.
"""

import uuid

import psycopg
from psycopg import sql

from tests.servers import with_database

#: What a schema consists of: changes whenever something is added, removed or replaced, and not with the rows.
_SCHEMA = """
SELECT (SELECT string_agg(concat(oid, relname, relkind), ',' ORDER BY oid) FROM pg_class
         WHERE relnamespace = 'public'::regnamespace),
       (SELECT string_agg(concat(attrelid, attname, atttypid), ',' ORDER BY attrelid, attnum) FROM pg_attribute
         WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace)),
       (SELECT string_agg(oid::text, ',' ORDER BY oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace),
       (SELECT string_agg(concat(oid, tgenabled), ',' ORDER BY oid) FROM pg_trigger),
       (SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace),
       (SELECT count(*) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'),
       (SELECT count(*) FROM pg_db_role_setting),
       (SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database())
"""

_TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY relname"
_SEQUENCES = "SELECT relname FROM pg_class WHERE relkind = 'S' AND relnamespace = 'public'::regnamespace"
_COUNTED = "SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND reltuples <> -1"
_LARGEST = (
    "SELECT coalesce(max(pg_table_size(oid)), 0) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace"
)
_OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


#: Bytes of a table from which on dropping is cheaper than emptying.
_BLOATED = 2_000_000


class Databases:
    """Copies of the database `template` on the server at `url`, each for one test at a time."""

    def __init__(self, url: str, template: str) -> None:
        self._url = url
        self._template = template
        self._free: list[str] = []
        #: To each database that is emptied again and again, since most of an emptying is what a new connection has to learn.
        self._sweepers: dict[str, psycopg.Connection] = {}
        with psycopg.connect(with_database(url, template)) as c:
            #: Copied as files is half as dear; older servers know no other way.
            self._copy = "CREATE DATABASE {} TEMPLATE {}" + (" STRATEGY file_copy" if c.info.server_version >= 150_000 else "")
            self._tables = [name for (name,) in c.execute(_TABLES)]
            self._sequences = [name for (name,) in c.execute(_SEQUENCES)]
            #: What migrations put into tables.
            self._rows = {
                name: c.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(name))).fetchall() for name in self._tables
            }
            self._schema = c.execute(_SCHEMA).fetchone()

    def take(self) -> str:
        """URL of a database as the migrations leave it."""
        return self._free.pop() if self._free else self.new()

    def new(self) -> str:
        """URL of a database that was never used."""
        name = f"madeira_test_{uuid.uuid4().hex[:12]}"
        self._administer(self._copy, name, self._template)
        return with_database(self._url, name)

    def give_back(self, url: str) -> None:
        """Empty the database for the next test, or drop it."""
        try:
            emptied = self._emptied(url)
        except psycopg.Error:
            emptied = False
        if emptied:
            self._free.append(url)
        else:
            self.drop(url)

    def close(self) -> None:
        """Drop what is left."""
        while self._free:
            self.drop(self._free.pop())

    def _emptied(self, url: str) -> bool:
        if url not in self._sweepers:
            self._sweepers[url] = psycopg.connect(
                url, options="-c lock_timeout=200ms -c statement_timeout=5s", prepare_threshold=0
            )
        with self._sweepers[url].transaction(), self._sweepers[url].cursor() as c:
            if c.execute(_OTHERS).fetchone() != (0,) or c.execute(_SCHEMA).fetchone() != self._schema:
                return False
            if c.execute(_COUNTED).fetchone() != (0,):
                return False
            if (found := c.execute(_LARGEST).fetchone()) is None or found[0] > _BLOATED:
                return False
            with self._sweepers[url].pipeline():
                self._empty(c)
        return True

    def _empty(self, c: psycopg.Cursor) -> None:
        # Foreign keys do not mind in which order.
        c.execute("SET LOCAL session_replication_role = replica")
        for name in self._tables:
            c.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name)))
            for row in self._rows.get(name, ()):
                values = sql.SQL(", ").join(sql.Placeholder() * len(row))
                c.execute(sql.SQL("INSERT INTO {} VALUES ({})").format(sql.Identifier(name), values), row)
        for name in self._sequences:
            c.execute("SELECT setval(%s::regclass, 1, false)", [name])

    def drop(self, url: str) -> None:
        """Take the database away."""
        if sweeper := self._sweepers.pop(url, None):
            sweeper.close()
        self._administer("DROP DATABASE {} WITH (FORCE)", url.rsplit("/", 1)[1])

    def _administer(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._url, autocommit=True) as c:
            c.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
