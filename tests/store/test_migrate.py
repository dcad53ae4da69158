"""Migrations: applied once, by whoever comes first, and held to what a service that goes on needs."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

from madeira.errors import StoreError, StoreUnavailable
from madeira.store import inventory, schema
from madeira.store.database import Database
from madeira.store.migrate import FOLDER, migrate, pending
from madeira.store.schema import is_misfit
from madeira.store.search_path import HIDDEN
from tests.servers import with_database
from tests.store.waiting import until


def test_an_empty_database_gets_every_file_once(empty_database_url: str) -> None:
    """Files are applied in order; a second run finds nothing left to do."""
    files = sorted(path.name for path in FOLDER.glob("*.sql"))
    assert pending(empty_database_url) == files
    assert migrate(empty_database_url) == files
    assert migrate(empty_database_url) == []
    assert pending(empty_database_url) == []


def test_hosts_that_migrate_at_once_apply_each_file_once(empty_database_url: str) -> None:
    """Of eight concurrent runs one applies everything and the others nothing; none fails."""
    applied: list[list[str]] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        applied.append(migrate(empty_database_url))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, applied)) == [0] * 7 + [len(list(FOLDER.glob("*.sql")))]


def test_a_database_that_cannot_keep_every_character_is_refused(postgres_url: str) -> None:
    """A payload is kept byte for byte, which SQL_ASCII or Latin-1 do not promise."""
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute("CREATE DATABASE madeira_latin1 ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    try:
        with pytest.raises(StoreError, match="LATIN1"):
            migrate(with_database(postgres_url, "madeira_latin1"))
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as c:
            c.execute("DROP DATABASE madeira_latin1 WITH (FORCE)")


@contextmanager
def no_owner(database_url: str) -> Iterator[tuple[psycopg.Connection, str]]:
    """The administrator's connection to a database, and the URL of a role that owns nothing there."""
    with psycopg.connect(database_url, autocommit=True) as admin:
        admin.execute("CREATE ROLE \"no owner\" LOGIN PASSWORD 'x'")
        try:
            yield admin, conninfo.make_conninfo(database_url, user="no owner", password="x")
        finally:
            admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO CURRENT_USER").format(sql.Identifier(admin.info.dbname)))
            admin.execute('DROP OWNED BY "no owner"; DROP ROLE "no owner"')


@pytest.fixture
def owner(empty_database_url: str) -> Iterator[tuple[str, psycopg.Connection]]:
    """The URL of a role that owns an empty database and is no superuser, and a superuser's connection."""
    with psycopg.connect(empty_database_url, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        admin.execute("CREATE ROLE an_owner LOGIN PASSWORD 'x'")
        admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO an_owner").format(name))
        try:
            yield conninfo.make_conninfo(empty_database_url, user="an_owner", password="x"), admin
        finally:
            admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO CURRENT_USER").format(name))
            admin.execute("DROP OWNED BY an_owner; DROP ROLE an_owner")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            "ALTER ROLE an_owner SET search_path = ''",
            "an_owner finds and makes tables in no schema (search_path: empty); ALTER ROLE",
        ),
        ("ALTER ROLE an_owner SET search_path = nowhere", "(search_path: nowhere); ALTER ROLE an_owner IN DATABASE"),
        (
            "REVOKE USAGE, CREATE ON SCHEMA public FROM PUBLIC, pg_database_owner",
            "; GRANT USAGE, CREATE ON SCHEMA public TO an_owner",
        ),
        ("DROP SCHEMA public", "; CREATE SCHEMA an_owner AUTHORIZATION an_owner"),
    ],
)
def test_a_role_that_looks_in_no_schema_is_told_what_the_administrator_has_to_type(
    owner: tuple[str, psycopg.Connection], damage: str, told: str
) -> None:
    """Before there are tables, and after; `madeira doctor` says the same."""
    url, admin = owner
    if admin.info.server_version < 150000:
        damage = damage.replace(", pg_database_owner", "")
    admin.execute(damage.encode())
    with pytest.raises(StoreError, match=re.escape(told)) as refused:
        migrate(url)
    with psycopg.connect(url) as conn:
        (found,) = inventory.elsewhere(conn)
    assert str(refused.value) == f"{found.what}; {found.remedy}"
    for statement in found.remedy.split("; ")[:-1]:
        admin.execute(statement.encode())
    assert migrate(url)


def test_a_role_that_looks_away_from_the_tables_is_not_sent_to_make_them(owner: tuple[str, psycopg.Connection]) -> None:
    """Whoever runs on them says so too, and goes on once it is mended."""
    url, admin = owner
    migrate(url)
    admin.execute("ALTER ROLE an_owner SET search_path = ''")
    with pytest.raises(StoreError, match="the tables are in the schema public, where this session does not look") as refused:
        migrate(url)
    database = Database(url=url, application="tests", pool_max=1)
    database.open()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"^{re.escape(HIDDEN)}$"), database.connection():
            pass
    with pytest.raises(StoreUnavailable, match=f"^{re.escape(HIDDEN)}$"):
        database.connect()
    assert database.trouble() == HIDDEN
    assert is_misfit(HIDDEN), "else it would be told as a server that is away"
    admin.execute(str(refused.value).split("; ")[1].encode())
    assert database.trouble() is None
    database.close()


@pytest.mark.parametrize(
    ("owner", "lacks"),
    [("pg_database_owner", "the role must own its database"), ("CURRENT_USER", "the role must be let make tables there")],
)
def test_a_role_that_may_make_no_tables_is_told_what_the_administrator_has_to_type(
    empty_database_url: str, owner: str, lacks: str
) -> None:
    """As after `createdb` by somebody else: `public` is the owner's of the database, before Postgres 15 the administrator's."""
    with no_owner(empty_database_url) as (admin, as_other):
        admin.execute(f"ALTER SCHEMA public OWNER TO {owner}; REVOKE CREATE ON SCHEMA public FROM PUBLIC".encode())
        with pytest.raises(StoreError, match=lacks) as refused:
            migrate(as_other)
        admin.execute(str(refused.value).partition("; ")[2].encode())
        assert migrate(as_other)


def test_a_role_whose_tables_are_another_s_is_told_whose(empty_database_url: str) -> None:
    """Owning the database would not help then."""
    migrate(empty_database_url)
    with no_owner(empty_database_url) as (admin, as_other):
        admin.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
        with pytest.raises(StoreError, match=f"the tables belong to another role; migrate as {admin.info.user}"):
            migrate(as_other)


def test_without_postgres_migrate_says_so() -> None:
    """A refused connection is StoreUnavailable, not psycopg's own error."""
    with pytest.raises(StoreUnavailable):
        migrate("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(StoreUnavailable):
        pending("postgresql://nobody@127.0.0.1:1/none")


def test_what_died_before_codes_were_kept_gets_the_code_of_its_last_failure(empty_database_url: str) -> None:
    """From the log; of what was born dead, from the words that routing wrote. What is alive has none."""
    with psycopg.connect(empty_database_url, autocommit=True) as c:
        for name in ("0001_events_and_deliveries", "0002_configuration", "0003_lanes", "0004_ordering"):
            c.execute((FOLDER / f"{name}.sql").read_bytes())
        c.execute("""
            INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at)
            VALUES ('shop', 'one', 'order.paid', '1', sha256(''), 't', now())
        """)
        c.execute("""
            INSERT INTO delivery (event_seq, endpoint, lane, status, finished_at, died_at, failure_class, last_error, trace_id)
            VALUES (1, 'tried', 'a', 'dead', now(), now(), 'receiver', 'the receiver answered 503', 't'),
                   (1, 'born', 'a', 'dead', now(), now(), 'template', 'template: no such field', 't'),
                   (1, 'other', 'a', 'dead', now(), now(), 'platform', 'no word of a code', 't'),
                   (1, 'alive', 'a', 'pending', NULL, NULL, NULL, NULL, 't')
        """)
        c.execute("""
            INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, settled_as, worker)
            SELECT 1, n, gen_random_uuid(), now(), outcome, code, settled_as, 'worker:1'
            FROM (VALUES (1, 'retryable', 'dns', 'pending'), (2, 'retryable', 'http_503', 'dead'), (1, 'late', 'tls', NULL))
                 AS l (n, outcome, code, settled_as)
        """)
        c.execute((FOLDER / "0005_dead_letters.sql").read_bytes())
        codes = dict(c.execute("SELECT endpoint, last_error_code FROM delivery").fetchall())
    assert codes == {"tried": "http_503", "born": "template", "other": None, "alive": None}


# -- while the service runs -----------------------------------------------------------------------------------------


def files_of(folder: Path, **texts: str) -> Path:
    """A folder with migrations; ``__`` in a name is a dot."""
    for name, text in texts.items():
        (folder / f"{name.removeprefix('m').replace('__', '.')}.sql").write_text(text)
    return folder


@contextmanager
def busy(url: str, statement: str) -> Iterator[None]:
    """A transaction that has done `statement`, and stays open."""
    with psycopg.connect(url) as c:
        c.execute(statement.encode())
        yield
        c.rollback()


def waiting(url: str) -> int:
    """How many sessions wait for a lock."""
    with psycopg.connect(url, autocommit=True) as c:
        row = c.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
        return int(row.fetchone()[0])  # type: ignore[index]


@pytest.fixture
def things(empty_database_url: str, tmp_path: Path) -> tuple[str, Path]:
    """A database with a table of things, and the folder of its migrations."""
    migrate(empty_database_url, folder=files_of(tmp_path, m0001_things="CREATE TABLE thing (id int PRIMARY KEY, n int)"))
    with psycopg.connect(empty_database_url, autocommit=True) as c:
        c.execute("INSERT INTO thing SELECT n, n FROM generate_series(1, 1000) n")
    return empty_database_url, tmp_path


def test_a_migration_that_waits_lets_the_others_pass_and_gets_its_turn(things: tuple[str, Path]) -> None:
    """It gives up its place in the queue for a lock after a moment; writers behind it are held up no longer than that."""
    url, folder = things
    files_of(folder, m0002_more="ALTER TABLE thing ADD COLUMN more text")
    with ThreadPoolExecutor(1) as pool, psycopg.connect(url, autocommit=True) as writer:
        with busy(url, "UPDATE thing SET n = 0 WHERE id = 1"):
            migration = pool.submit(migrate, url, folder=folder, lock_s=0.3)
            until(lambda: waiting(url) == 1)
            for n in range(2, 6):
                writer.execute("UPDATE thing SET n = 0 WHERE id = %s", [n])
            until(lambda: waiting(url) == 1)
            assert not migration.done()
        assert migration.result(20) == ["0002_more.sql"]


def test_a_migration_that_never_gets_its_lock_says_who_is_in_the_way_and_changes_nothing(things: tuple[str, Path]) -> None:
    url, folder = things
    files_of(folder, m0002_two="CREATE TABLE two (id int); ALTER TABLE thing ADD COLUMN more text")
    with busy(url, "UPDATE thing SET n = 0 WHERE id = 1"), pytest.raises(StoreError, match=r"0002_two\.sql got no lock"):
        migrate(url, folder=folder, lock_s=0.05, patience_s=0.1)
    assert pending(url, folder=folder) == ["0002_two.sql"]
    assert migrate(url, folder=folder) == ["0002_two.sql"]


def test_whoever_migrates_for_too_long_is_told_of(things: tuple[str, Path]) -> None:
    """A host that waits for another one does not wait for ever."""
    url, folder = things
    files_of(folder, m0002_more="ALTER TABLE thing ADD COLUMN more text")
    with ThreadPoolExecutor(1) as pool:
        with busy(url, "UPDATE thing SET n = 0 WHERE id = 1"):
            first = pool.submit(migrate, url, folder=folder, lock_s=0.3)
            until(lambda: waiting(url) == 1)
            with pytest.raises(StoreError, match="another host has been migrating"):
                migrate(url, folder=folder, patience_s=0.1)
        assert first.result(20) == ["0002_more.sql"]


def test_an_index_is_built_while_others_write_and_while_hosts_wait_for_their_turn(things: tuple[str, Path]) -> None:
    """Nobody who writes is held up, and none of four hosts at once hangs or builds it twice."""
    url, folder = things
    files_of(folder, m0002_index__concurrently="-- By n.\nCREATE INDEX CONCURRENTLY thing_n ON thing (n) WHERE n > 0;")
    with ThreadPoolExecutor(4) as pool, psycopg.connect(url, autocommit=True) as writer:
        with busy(url, "UPDATE thing SET n = 0 WHERE id = 1"):
            runs = [pool.submit(migrate, url, folder=folder) for _ in range(4)]
            until(lambda: waiting(url) == 1)
            writer.execute("SET lock_timeout = '1s'")
            writer.execute("UPDATE thing SET n = 0 WHERE id = 2")
        assert sorted(run.result(20) for run in runs) == [[], [], [], ["0002_index.concurrently.sql"]]
        assert writer.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'thing_n'::regclass").fetchone() == (True,)


def test_an_index_whose_building_was_broken_off_is_built_anew(things: tuple[str, Path]) -> None:
    """What is left of it is never taken for the index; one that is whole is left as it is, one that is to go goes."""
    url, folder = things
    files_of(
        folder,
        m0002_index__concurrently="CREATE UNIQUE INDEX CONCURRENTLY thing_n ON thing (n);\n"
        "CREATE INDEX CONCURRENTLY thing_whole ON thing (n);\n"
        "DROP INDEX CONCURRENTLY thing_old; DROP INDEX CONCURRENTLY nothing;",
    )
    with psycopg.connect(url, autocommit=True) as c:
        c.execute("CREATE INDEX thing_whole ON thing (n)")
        c.execute("CREATE INDEX thing_old ON thing (id, n)")
        c.execute("UPDATE thing SET n = 7 WHERE id = 8")
        with pytest.raises(StoreError, match=r"0002_index\.concurrently\.sql cannot be applied: .*unique"):
            migrate(url, folder=folder)
        assert c.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'thing_n'::regclass").fetchone() == (False,)
        c.execute("UPDATE thing SET n = 8 WHERE id = 8")
        whole = c.execute("SELECT 'thing_whole'::regclass::oid").fetchone()
        assert migrate(url, folder=folder) == ["0002_index.concurrently.sql"]
        assert c.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'thing_n'::regclass").fetchone() == (True,)
        assert c.execute("SELECT 'thing_whole'::regclass::oid").fetchone() == whole
        assert c.execute("SELECT to_regclass('thing_old')").fetchone() == (None,)


def test_what_is_built_concurrently_is_an_index_and_nothing_else(things: tuple[str, Path]) -> None:
    """Anything else could be done in half."""
    url, folder = things
    files_of(folder, m0002_bad__concurrently="CREATE INDEX CONCURRENTLY thing_n ON thing (n); DELETE FROM thing;")
    with pytest.raises(StoreError, match="only CREATE INDEX CONCURRENTLY"):
        migrate(url, folder=folder)


# -- the rule for migrations of released versions -------------------------------------------------------------------

#: The last migration of the first release. Those up to it are applied to tables that are empty.
FIRST_RELEASE = "0009"

#: What would stop the service while it is done, or the version that still runs, with what to do instead.
FORBIDDEN = {
    r"CREATE (UNIQUE )?INDEX (?!CONCURRENTLY)(?P<on>.* ON (event|delivery|delivery_log|audit)\b)": "build it concurrently",
    r"ALTER COLUMN \w+ TYPE": "add a column, fill it, take the old one away a release later",
    r"ALTER TABLE (event|delivery|delivery_log) [^;]*GENERATED": "it rewrites the table: let the statements fill a column",
    r"SET NOT NULL": "add a CHECK NOT VALID, validate it in a later file",
    r"ADD CONSTRAINT (?![^;]*NOT VALID)[^;]*(CHECK|FOREIGN KEY)": "add it NOT VALID, validate it in a later file",
    r"\bRENAME\b": "the version that still runs knows the old name",
    r"LOCK TABLE": "it stops the service",
}


def offences(name: str, text: str) -> list[str]:
    """What a migration must not do, by its text."""
    text = re.sub(r"--[^\n]*", "", text)
    # What a file makes itself is empty, and nobody uses it yet.
    for table in re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", text):
        text = re.sub(rf"CREATE (UNIQUE )?INDEX \w+ ON {table}\b[^;]*;|ALTER TABLE {table}\b[^;]*;", "", text)
    found = [f"{name}: {pattern}: {remedy}" for pattern, remedy in FORBIDDEN.items() if re.search(pattern, text, re.IGNORECASE)]
    if re.search(r"\bDROP (TABLE|COLUMN|FUNCTION)\b", text, re.IGNORECASE) and ".after_" not in name:
        found.append(f"{name}: what a version still uses is taken away: say `.after_NNNN` in its name, a release later")
    return found


def test_no_migration_stops_the_service_or_the_version_that_still_runs() -> None:
    """Each of those that come to tables in use keeps to the rule of docs/upgrading.md."""
    later = [path for path in FOLDER.glob("[0-9]*.sql") if path.name[:4] > FIRST_RELEASE]
    assert [offence for path in later for offence in offences(path.name, path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("CREATE INDEX delivery_x ON delivery (lane);", True),
        ("CREATE TABLE x (id int); CREATE INDEX x_id ON x (id);", False),
        ("ALTER TABLE event ADD COLUMN x text;", False),
        ("ALTER TABLE event ADD COLUMN x text GENERATED ALWAYS AS (source) STORED;", True),
        ("ALTER TABLE event ADD CONSTRAINT x CHECK (seq > 0);", True),
        ("ALTER TABLE event ADD CONSTRAINT x CHECK (seq > 0) NOT VALID;", False),
        ("ALTER TABLE event DROP COLUMN parameters;", True),
        ("ALTER TABLE event RENAME COLUMN parameters TO p;", True),
    ],
)
def test_the_rule_is_broken_by_what_breaks_it(text: str, is_bad: bool) -> None:
    assert bool(offences("0099_x.sql", text)) is is_bad


@pytest.mark.parametrize(
    ("applied", "told"),
    [
        ([], None),
        (["0009_more.sql", "0010_index.concurrently.sql"], None),
        (["0009_fewer.after_0008.sql"], None),
        (["0009_more.sql", "0010_fewer.after_0009.sql"], "of a later version (0010_fewer.after_0009.sql)"),
    ],
)
def test_a_version_works_on_tables_that_are_ahead_until_what_it_needs_is_gone(applied: list[str], told: str | None) -> None:
    """Tables may be ahead of the processes for the time of an upgrade, and say when they are too far ahead."""
    ours = ["0007_a.sql", "0008_b.sql"]
    found = schema.misfit({*ours, *applied}, ours)
    assert (found is None) if told is None else (found is not None and told in found)


def test_tables_that_are_behind_or_too_far_ahead_are_told_by_whoever_connects(
    database_url: str, request: pytest.FixtureRequest
) -> None:
    """A new process on old tables, and an old one on tables that a later version has shortened, refuse with the remedy.

    Once that is mended, it takes the pool a second or so to try again.
    """
    database = Database(url=database_url, application="tests", pool_max=1)
    database.open()
    request.addfinalizer(database.close)
    with psycopg.connect(database_url, autocommit=True) as c:
        newest = schema.known()[-1]
        c.execute("DELETE FROM schema_migration WHERE name = %s", [newest])
        assert database.trouble() == f"the tables are older than this version (not applied: {newest}): run `madeira migrate`"
        with pytest.raises(StoreUnavailable, match=r"^the tables are older"):
            database.connect()
        c.execute("INSERT INTO schema_migration (name) VALUES (%s)", [newest])
        until(lambda: database.trouble() is None)
        c.execute("INSERT INTO schema_migration (name) VALUES ('9999_fewer.after_9998.sql')")
        assert str(database.trouble()).startswith("the tables are of a later version (9999_fewer.after_9998.sql)")
        c.execute("DELETE FROM schema_migration WHERE name LIKE '9999%'")
        until(lambda: database.trouble() is None)
