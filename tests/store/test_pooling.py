"""Behind a PgBouncer in transaction mode: what a session was told is gone, or belongs to somebody else."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from madeira.errors import StoreUnavailable
from madeira.store import deliveries, leases
from madeira.store.database import Database, is_direct, session_settings
from madeira.store.migrate import migrate, pending
from madeira.store.schema import NO_TABLES
from madeira.store.search_path import SPOILT
from tests.pooling import PROGRAM, Pooler
from tests.store import making
from tests.store.waiting import at_once, good

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(PROGRAM is None, reason="the program pgbouncer is missing; on Debian: apt-get install pgbouncer"),
]


@pytest.fixture(params=[True, False], ids=["drops", "refuses"])
def through(postgres_url: str, tmp_path_factory: pytest.TempPathFactory, servers_folder: Path, request: Any) -> Iterator[Pooler]:
    """A pooler that drops, or refuses, what a session is told at its start; two sessions for all."""
    folder = servers_folder / f"pgbouncer-{request.param}"
    pooler = Pooler(url=postgres_url, folder=folder, drops=request.param, sessions=2)
    yield pooler
    pooler.stop()


@pytest.fixture
def make(through: Pooler, database_url: str, request: pytest.FixtureRequest) -> Callable[[], Database]:
    """The connections of one process, through the pooler."""

    def made() -> Database:
        database = Database(url=through.through(database_url), application="tests", pool_max=4)
        database.open()
        request.addfinalizer(database.close)
        return database

    return made


@pytest.mark.new_database
def test_many_processes_share_few_sessions_and_each_delivery_is_claimed_and_settled_once(make: Callable[[], Database]) -> None:
    """Eight connections that repeat their statements by turns on two sessions: no statement is taken for another's."""
    databases = [make() for _ in range(4)]
    with databases[0].connect() as conn:
        refs = [making.routed(conn)[0] for _ in range(40)]

    def work(database: Database, part: int) -> None:
        with database.connect() as conn:
            assert conn.prepare_threshold is None
            for ref in refs[part::8]:
                held = making.claimed(conn, ref)
                deliveries.settle(conn, [making.verdict(held, making.SUCCESS)])

    good(at_once(*(lambda d=databases[n % 4], n=n: work(d, n) for n in range(8))))
    with databases[0].connection() as conn:
        rows = conn.execute("SELECT status, count(*) FROM delivery GROUP BY 1").fetchall()
        assert rows == [("succeeded", 40)]
        assert not is_direct(conn)


@pytest.mark.new_database
def test_what_only_one_may_do_only_one_does(make: Callable[[], Database]) -> None:
    """A lease is a row: it holds whichever session asks."""
    one, other = make(), make()
    with one.connection() as a, other.connection() as b:
        assert leases.take(a, "reconcile", "one", 60)
        a.commit()
        assert not leases.take(b, "reconcile", "other", 60)


def test_hosts_that_migrate_through_a_pooler_apply_each_file_once(through: Pooler, empty_database_url: str) -> None:
    """Also when both of its sessions are theirs."""
    url = through.through(empty_database_url)
    files = pending(url)
    assert sorted(good(at_once(*(lambda: migrate(url) for _ in range(2)))), key=len) == [[], files]
    assert pending(url) == []


@pytest.mark.new_database
def test_a_role_that_has_the_settings_of_a_session_bounds_its_statements(
    make: Callable[[], Database], postgres_url: str, database_url: str
) -> None:
    """What the pooler drops comes from the server: the remedy that `madeira doctor` names."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        name = database_url.rsplit("/", 1)[1]
        for setting, value in session_settings(0.2).items():
            admin.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {name} SET {setting} = {value}".encode())
    with make().connect() as conn, pytest.raises(psycopg.errors.QueryCanceled):
        conn.execute("SELECT pg_sleep(5)")


def tried(work: Callable[[], object]) -> str | None:
    """Why it failed, if it did."""
    try:
        work()
    except StoreUnavailable as e:
        return str(e)
    return None


@pytest.fixture
def spoil(through: Pooler, database_url: str) -> Callable[[], None]:
    """Leaves both sessions of the pooler as `pg_dump` leaves one."""

    def spoilt() -> None:
        with psycopg.connect(through.through(database_url)) as a, psycopg.connect(through.through(database_url)) as b:
            for conn in (a, b):
                conn.execute("SELECT set_config('search_path', '', false)")

    return spoilt


@pytest.mark.new_database
@pytest.mark.parametrize("road", ["pooled", "in a transaction", "dedicated"])
def test_a_session_that_pg_dump_has_left_is_told_as_such_and_mended(
    make: Callable[[], Database], spoil: Callable[[], None], road: str
) -> None:
    """Each of them is met once; nobody is told that there were no tables."""
    database = make()

    def work() -> int:
        if road == "dedicated":
            with database._mapped():
                return len(kept.execute("SELECT FROM configuration").fetchall())
        with database.connection() as conn:
            if road == "pooled":
                return len(conn.execute("SELECT FROM configuration").fetchall())
            with conn.transaction():
                return len(conn.execute("SELECT FROM configuration").fetchall())

    with database.connect() as kept:
        assert work() == 1
        spoil()
        told = [word for _ in range(6) if (word := tried(work)) is not None]
        assert told in ([SPOILT], [SPOILT, SPOILT])
        assert work() == 1
        assert database.trouble() is None


@pytest.mark.new_database
def test_a_new_connection_through_sessions_that_pg_dump_has_left_is_greeted(
    make: Callable[[], Database], spoil: Callable[[], None], through: Pooler, database_url: str
) -> None:
    """They are mended on the way; so they are before a migration is looked for."""
    make().connect().close()
    spoil()
    with make().connect() as conn:
        assert conn.execute("SELECT count(*) FROM configuration").fetchone() == (1,)
    spoil()
    assert pending(through.through(database_url)) == []


def test_where_there_are_no_tables_behind_a_pooler_that_is_told(through: Pooler, empty_database_url: str) -> None:
    """Also within a transaction, which can be followed by another one."""
    database = Database(url=through.through(empty_database_url), application="tests", pool_max=1)
    database.open()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"^{re.escape(NO_TABLES)}$"), database.connection() as conn:
            conn.execute("SELECT FROM configuration")
    with database.connection() as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    database.close()
