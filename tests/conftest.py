"""What every test may ask for: real servers and a fresh database, nothing imitated.

The servers come from wheels unless MADEIRA_DATABASE_URL / MADEIRA_REDIS_URL name others, for example Debian's. A missing
server is a failure, never a skip.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from madeira.embedded import EmbeddedPostgres, EmbeddedValkey
from tests.databases import Databases
from tests.pooling import PROGRAM, Pooler
from tests.servers import OwnPostgres, OwnRedis, Standby, with_database


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pgbouncer", action="store_true", help="reach Postgres through a PgBouncer in transaction mode")
    parser.addoption("--rounds", type=int, default=1, help="rounds of each crash test (make test-crash: 20)")


#: Bytes that must be free there; the servers of a run need a tenth of it.
_ROOM = 8 * 1024**3


def pytest_configure() -> None:
    """Folders of the tests in memory, where there is plenty: the servers' thousands of small files cost a disk much."""
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK):
        return
    found = os.statvfs(memory)
    if found.f_bavail * found.f_frsize >= _ROOM and not found.f_flag & os.ST_NOEXEC:
        # Processes that tests start shall find it, too.
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole systems first: their tests mostly wait, and what needs the processor fills that time instead of following it."""
    items.sort(key=lambda item: "tests/system" not in item.nodeid and "tests/cli" not in item.nodeid)


@pytest.fixture(scope="session")
def rounds(pytestconfig: pytest.Config) -> int:
    """How often a crash test repeats itself."""
    return int(pytestconfig.getoption("--rounds"))


@pytest.fixture(scope="session")
def servers_folder() -> Iterator[Path]:
    """A folder with a short path for the servers of this session."""
    folder = Path(tempfile.mkdtemp(prefix="madeira-"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(servers_folder: Path) -> Iterator[str]:
    """A superuser's URL of a server that all tests share; it does without fsync, since it need not survive the machine."""
    given = os.environ.get("MADEIRA_DATABASE_URL")
    if given:
        yield given
        return
    server = EmbeddedPostgres(
        folder=servers_folder / "postgres",
        options={"fsync": "off", "full_page_writes": "off", "max_connections": "400", "max_prepared_transactions": "10"},
    )
    server.start()
    with psycopg.connect(server.url, autocommit=True) as c:
        # Half of the time that a connection costs goes into these.
        c.execute("SET scram_iterations = 1")
        c.execute(sql.SQL("ALTER ROLE CURRENT_USER PASSWORD {}").format(str(urlsplit(server.url).password)))
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> Iterator[str]:
    """Name of a database with all migrations, to be copied."""
    from madeira.store.migrate import migrate

    name = f"madeira_template_{uuid.uuid4().hex[:12]}"
    _administer(postgres_url, f"CREATE DATABASE {name}")
    migrate(with_database(postgres_url, name))
    yield name
    _administer(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def databases(postgres_url: str, template_database: str) -> Iterator[Databases]:
    """Fresh, migrated databases."""
    databases = Databases(postgres_url, template_database)
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def pooler(pytestconfig: pytest.Config, postgres_url: str, servers_folder: Path) -> Iterator[Pooler | None]:
    """What stands between the tests and their databases; None unless ``--pgbouncer`` asks for it."""
    if not pytestconfig.getoption("--pgbouncer"):
        yield None
        return
    if PROGRAM is None:
        pytest.exit("--pgbouncer: the program pgbouncer is missing; on Debian: apt-get install pgbouncer", 3)
    pooler = Pooler(url=postgres_url, folder=servers_folder / "pgbouncer")
    yield pooler
    pooler.stop()


@pytest.fixture
def database_url(databases: Databases, pooler: Pooler | None, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a fresh, migrated database of this test alone."""
    if request.node.get_closest_marker("direct") and pooler:
        pytest.skip("it is about a session of the server's own")
    is_new = request.node.get_closest_marker("new_database")
    url = databases.new() if is_new else databases.take()
    yield pooler.through(url) if pooler else url
    if pooler:
        pooler.leave(url)
    if is_new:
        databases.drop(url)
    else:
        databases.give_back(url)


@pytest.fixture
def empty_database_url(postgres_url: str) -> Iterator[str]:
    """URL of a fresh database without any table."""
    name = f"madeira_test_{uuid.uuid4().hex[:12]}"
    _administer(postgres_url, f"CREATE DATABASE {name}")
    yield with_database(postgres_url, name)
    _administer(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def shared_redis_url(servers_folder: Path) -> Iterator[str]:
    """URL of a Redis or Valkey that all tests share; refuses a server that holds somebody's keys, since tests flush it."""
    given = os.environ.get("MADEIRA_REDIS_URL")
    if given:
        with redis.Redis.from_url(given) as client:
            if client.dbsize():
                pytest.exit(f"MADEIRA_REDIS_URL's server holds {client.dbsize()} keys; tests empty it: name another", 3)
        yield given
        with redis.Redis.from_url(given) as client:
            client.flushall()
        return
    server = EmbeddedValkey(folder=servers_folder / "valkey", options={"appendonly": "no"})
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def redis_url(shared_redis_url: str) -> str:
    """URL of the shared Redis, emptied for this test."""
    with redis.Redis.from_url(shared_redis_url) as client:
        client.flushall()
        client.script_flush()
    return shared_redis_url


@pytest.fixture
def own_redis() -> Iterator[OwnRedis]:
    """A Valkey of this test alone, for tests that stop, kill or freeze it."""
    folder = Path(tempfile.mkdtemp(prefix="madeira-"))
    folder.chmod(0o711)
    server = OwnRedis(folder=folder / "valkey")
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_postgres() -> Iterator[OwnPostgres]:
    """A migrated Postgres of this test alone, for tests that stop, kill or freeze it."""
    from madeira.store.migrate import migrate

    folder = Path(tempfile.mkdtemp(prefix="madeira-"))
    folder.chmod(0o711)
    server = OwnPostgres(folder=folder / "postgres")
    server.start()
    migrate(server.url)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def standby(own_postgres: OwnPostgres) -> Iterator[Standby]:
    """A streaming replica of the test's own Postgres."""
    server = Standby(folder=own_postgres.folder.parent / "standby", primary=own_postgres)
    server.start()
    yield server
    server.stop()


def _administer(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as c:
        c.execute(statement.encode())
