"""Connections: bounded waits, no dead ones handed out, nothing that a fork or a pooler spoils."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import conninfo

from madeira.errors import StoreUnavailable
from madeira.store import events, story
from madeira.store.database import Database
from madeira.store.group_commit import GroupCommit
from madeira.store.schema import NO_TABLES
from tests.servers import OwnPostgres
from tests.store.making import new_event
from tests.store.waiting import at_once, good, terminate
from tests.system.harness import wait_until

#: Seconds within which a caller must learn that Postgres is away.
LIMIT_S = 2.5


def one(database: Database) -> int:
    with database.connection() as conn:
        row = conn.execute("SELECT 1").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def away() -> Iterator[Database]:
    """A database whose server refuses connections."""
    database = Database(url="postgresql://nobody@127.0.0.1:1/none", application="tests", pool_max=2)
    database.open()
    yield database
    database.close()


def test_a_block_is_one_transaction(database: Database) -> None:
    """Committed at its end, rolled back by an error."""
    event, other = new_event(), new_event()
    with database.connection() as conn:
        events.insert(conn, [event])

    def fail() -> None:
        with database.connection() as conn:
            events.insert(conn, [other])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with database.connection() as conn:
        assert story.find(conn, "shop", event.event_id) is not None
        assert story.find(conn, "shop", other.event_id) is None


def test_a_server_that_is_away_is_told_in_time(away: Database) -> None:
    """StoreUnavailable within the limit from the pool, at once from a dedicated connection; the probe says no."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        one(away)
    assert away.trouble(0.5) is not None
    assert time.monotonic() - start < LIMIT_S
    with pytest.raises(StoreUnavailable):
        away.connect()


def test_why_connecting_failed_is_told(away: Database, database_url: str) -> None:
    """Not only that no connection came in time; once connecting works it is forgotten."""
    with pytest.raises(StoreUnavailable, match="Connection refused"):
        one(away)
    assert "Connection refused" in (away.trouble(0.2) or "")
    database = Database(url=database_url, application="tests", pool_max=1, connect_timeout_s=0.2)
    database._note("from before")
    database.open()
    with database.connection(), pytest.raises(StoreUnavailable, match="in time"):
        one(database)
    database.close()


@pytest.mark.direct
def test_a_role_that_may_not_read_the_tables_is_told_so(database_url: str) -> None:
    """On every road, and with what says the remedy."""
    with psycopg.connect(database_url, autocommit=True) as administrator:
        administrator.execute("CREATE ROLE stranger LOGIN PASSWORD 'x'")
        url = conninfo.make_conninfo(database_url, user="stranger", password="x")
        database = Database(url=url, application="tests", pool_max=1, connect_timeout_s=0.2)
        database.open()
        told = "permission denied for table schema_migration .*madeira doctor"
        with pytest.raises(StoreUnavailable, match=told):
            one(database)
        with pytest.raises(StoreUnavailable, match=told):
            database.connect()
        assert "permission denied" in (database.trouble(0.2) or "")
        database.close()
        administrator.execute("DROP ROLE stranger")


def test_the_probe_asks_now(own_postgres: OwnPostgres) -> None:
    """Yes while Postgres answers, no while it is away, yes again soon after it is back."""
    database = Database(url=own_postgres.url, application="tests", pool_max=1)
    database.open()
    assert database.trouble() is None
    own_postgres.kill()
    assert database.trouble(0.2) is not None
    own_postgres.start()
    wait_until(lambda: database.trouble() is None)
    database.close()


def test_an_exhausted_pool_is_told_in_time(database_url: str) -> None:
    """All connections in use: the next caller waits its time and is told; afterwards all is well."""
    database = Database(url=database_url, application="tests", pool_max=2, connect_timeout_s=0.2)
    database.open()
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(database.connection())
        with pytest.raises(StoreUnavailable, match="in time"):
            one(database)
    assert one(database) == 1
    assert database.stats()["pool_size"] == 2
    database.close()


@pytest.mark.direct
def test_ended_sessions_are_not_handed_out(database: Database, database_url: str) -> None:
    """An administrator ends every pooled session: the next callers notice nothing."""
    assert good(at_once(*[partial(one, database)] * 8)) == [1] * 8
    assert terminate(database_url, "tests") >= 1
    assert good(at_once(*[partial(one, database)] * 8)) == [1] * 8


def test_a_restart_costs_no_error_once_the_server_is_back(own_postgres: OwnPostgres) -> None:
    """Twenty warm connections, a restart, fifty requests: all of them work, without a restart of ours."""
    database = Database(url=own_postgres.url, application="tests", pool_max=20)
    database.open()
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(database.connection())
    own_postgres.stop()
    with pytest.raises(StoreUnavailable):
        one(database)
    own_postgres.start()
    assert good(at_once(*[partial(one, database)] * 50)) == [1] * 50
    database.close()


def test_a_session_that_is_ended_inside_a_block_is_told(database: Database, database_url: str) -> None:
    """What was lost in the middle of a transaction is StoreUnavailable, and the pool goes on."""

    def lose() -> None:
        with database.connection() as conn:
            assert terminate(database_url, "tests") >= 1
            conn.execute("SELECT 1")

    with pytest.raises(StoreUnavailable):
        lose()
    assert one(database) == 1


def test_a_frozen_server_holds_a_caller_no_longer_than_its_limit(own_postgres: OwnPostgres) -> None:
    """Frozen, it goes on acknowledging packets: only a limit on our side ends the wait, in a check and in a statement."""
    database = Database(url=own_postgres.url, application="tests", pool_max=4, statement_timeout_s=0.5)
    database.open()
    one(database)
    dedicated = database.connect()
    own_postgres.stall()
    start = time.monotonic()
    with pytest.raises(StoreUnavailable):
        one(database)
    assert time.monotonic() - start < LIMIT_S
    assert database.trouble() is not None
    with pytest.raises(psycopg.OperationalError, match="did not answer"):
        dedicated.execute("SELECT 1")
    assert dedicated.closed
    own_postgres.resume()
    database.close()


@pytest.mark.direct
def test_a_session_has_its_limits(database_url: str) -> None:
    """Timeouts on the server's side too, our name in its list of sessions, and what the URL itself asks for."""
    database = Database(
        url=f"{database_url}?options=-c%20work_mem%3D7MB", application="madeira tests", pool_max=1, statement_timeout_s=7
    )
    shown = ["statement_timeout", "idle_in_transaction_session_timeout", "application_name", "jit", "enable_seqscan", "work_mem"]
    with database.connect() as conn:
        values = [conn.execute(f"SHOW {name}".encode()).fetchone() for name in shown]
    assert values == [("7s",), ("7s",), ("madeira tests",), ("off",), ("off",), ("7MB",)]


def test_a_table_that_is_not_there_is_told_with_its_remedy(empty_database_url: str) -> None:
    """On every road: a pooled connection, a dedicated one, and the probe; the server's own words are the cause."""
    database = Database(url=empty_database_url, application="tests", pool_max=1)
    database.open()
    with database.connect() as conn, pytest.raises(psycopg.errors.UndefinedTable, match=f"^{re.escape(NO_TABLES)}$") as told:
        conn.execute("SELECT FROM configuration")
    assert 'relation "configuration" does not exist' in str(told.value.__cause__)
    with pytest.raises(StoreUnavailable, match=f"^{re.escape(NO_TABLES)}$"), database.connection() as conn:
        conn.execute("SELECT FROM configuration")
    assert database.trouble() == NO_TABLES
    database.close()


@pytest.mark.direct
def test_a_slow_statement_is_ended_by_the_server(database_url: str) -> None:
    """A statement past its time is cancelled, and is StoreUnavailable to whoever used the pool."""
    database = Database(url=database_url, application="tests", pool_max=1, statement_timeout_s=0.1)
    database.open()

    def dawdle() -> None:
        with database.connection() as conn:
            conn.execute("SELECT pg_sleep(60)")

    with pytest.raises(StoreUnavailable, match="statement timeout"):
        dawdle()
    assert one(database) == 1
    database.close()


def make_small(conn: psycopg.Connection[Any]) -> None:
    """A table of this session, with one row."""
    conn.execute("SET enable_seqscan = on")
    conn.execute("CREATE TEMPORARY TABLE small AS SELECT 0 AS id, '' AS text")
    conn.execute("CREATE INDEX ON small (id)")
    conn.execute("ANALYZE small")


def grow_small(conn: psycopg.Connection[Any]) -> None:
    """It grows after a plan was made that is kept."""
    for _ in range(12):
        look_up(conn)
    conn.execute("INSERT INTO small SELECT n, repeat('x', 100) FROM generate_series(1, 5000) n")


def look_up(conn: psycopg.Connection[Any]) -> int:
    """Find one row of it; how many were read to that end."""
    read = "SELECT seq_tup_read FROM pg_stat_xact_all_tables WHERE relid = 'small'::regclass"
    with conn.transaction():
        before = conn.execute(read).fetchone()
        conn.execute("SELECT text FROM small WHERE id = %s", [7], prepare=True)
        after = conn.execute(read).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])


@pytest.mark.direct
def test_plans_are_made_anew_from_time_to_time(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pooled connection and on that of group commits: one that was made for a table of a row reads it all, until then."""
    database = Database(url=database_url, application="tests", pool_max=1)
    database.open()

    def run(conn: psycopg.Connection[Any], items: list[Callable[[psycopg.Connection[Any]], Any]]) -> list[Any]:
        return [item(conn) for item in items]

    commits = GroupCommit(name="tests", database=database, run=run, rerun_unknown=False)
    read = []
    for step in (make_small, grow_small):
        with database.connection() as conn:
            step(conn)
        commits.submit(step, 10)
    for plans_s in (60.0, 0.0):
        monkeypatch.setattr("madeira.store.database.PLANS_S", plans_s)
        with database.connection() as conn:
            read.append(look_up(conn))
            assert not conn.autocommit
        read.append(commits.submit(look_up, 10))
    commits.stop(5)
    database.close()
    assert read == [5001, 5001, 0, 0]


def test_a_pool_that_is_not_open_says_so(database_url: str) -> None:
    """Before `open` and after `close`: StoreUnavailable that names the reason."""
    database = Database(url=database_url, application="tests", pool_max=1)
    with pytest.raises(StoreUnavailable, match="not open yet"):
        one(database)
    database.open()
    database.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        one(database)


def test_made_before_a_fork_and_opened_after_it(database_url: str) -> None:
    """The object may be inherited: four children open it and use it at once, as a pre-forking server does."""
    script = """
import os, sys
from madeira.store.database import Database
database = Database(url=sys.argv[1], application="forked", pool_max=2)
children = []
for _ in range(4):
    pid = os.fork()
    if not pid:
        database.open()
        for _ in range(20):
            with database.connection() as conn:
                assert conn.execute("SELECT 1").fetchone() == (1,)
        database.close()
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
"""
    subprocess.run([sys.executable, "-c", script, database_url], check=True, timeout=60, env={**os.environ})


class Pooler(threading.Thread):
    """Stands before a real server and, like PgBouncer, refuses a startup packet with ``options``; all else goes through."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        parts = urlsplit(url)
        self._server = parts.hostname, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{self._listener.getsockname()[1]}")
        self.refused = 0
        self.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._serve(client)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, client: socket.socket) -> None:
        packet = client.recv(65536)
        if packet[4:8] == b"\x04\xd2\x16/":  # SSLRequest
            client.sendall(b"N")
            packet = client.recv(65536)
        if b"\x00options\x00" in packet:
            self.refused += 1
            body = b"SFATAL\x00VFATAL\x00C08P01\x00Munsupported startup parameter: options\x00\x00"
            client.sendall(b"E" + (len(body) + 4).to_bytes(4, "big") + body)
            client.close()
            return
        server = socket.create_connection(self._server)
        server.sendall(packet)
        for a, b in ((client, server), (server, client)):
            threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()


def test_a_pooler_that_refuses_options_is_lived_with(database_url: str) -> None:
    """Without session settings and prepared statements everything works; the limits on our side remain."""
    pooler = Pooler(database_url)
    database = Database(url=pooler.url, application="tests", pool_max=1)
    database.open()
    assert one(database) == 1
    with database.connect() as conn:
        assert conn.prepare_threshold is None
        assert conn.limit_s == 12.0
        for _ in range(8):
            events.insert(conn, [new_event()])
        assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
    assert pooler.refused == 2
    database.close()
    pooler.close()


def test_a_session_that_was_ended_since_we_were_slow_is_a_store_that_is_away(database_url: str) -> None:
    """A process that stands still in the middle of a transaction, too: its caller is told to come again."""
    slow = Database(url=database_url, application="tests", pool_max=1, statement_timeout_s=0.1)

    def stand_still() -> None:
        with slow.connection() as conn:
            # As our settings have it; behind a pooler they are the role's.
            conn.execute("SET LOCAL idle_in_transaction_session_timeout = 100")
            # The connection itself has only the pooler's word for it.
            pid = conn.execute("SELECT pg_backend_pid()").fetchone()
            ended = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
            with psycopg.connect(database_url, autocommit=True) as other:
                wait_until(lambda: other.execute(ended, pid).fetchone() == (True,), what="the session's end")
            conn.execute("SELECT 1")

    slow.open()
    try:
        with pytest.raises(StoreUnavailable, match="idle-in-transaction"):
            stand_still()
        assert one(slow) == 1
    finally:
        slow.close()
