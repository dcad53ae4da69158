"""What the migrations make is held against what is there: each thing that is missing is told by its name, with a remedy."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

from madeira.store import inventory, parts
from madeira.store.inventory import Fault

Connection = psycopg.Connection[Any]

pytestmark = pytest.mark.new_database


@pytest.fixture
def conn(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as c:
        yield c


def only(found: Iterator[Fault]) -> Fault:
    (one,) = found
    return one


def test_the_list_is_what_the_migrations_make(conn: Connection) -> None:
    """After a new migration: `make inventory`."""
    assert inventory.FILE.read_text() == inventory.text_of(conn)


#: What is done to a database, how the fault is told, and whether its remedy brings everything back.
DAMAGES = [
    ("DROP TABLE notice", "the table notice is missing", False),
    ("ALTER TABLE event DROP COLUMN traceparent", "the column event.traceparent is missing", False),
    ("DROP INDEX event_identity", "the index event_identity of event is missing", True),
    ("DROP INDEX delivery_log_rest_one_verdict", "the index delivery_log_rest_one_verdict of delivery_log_rest is missing", True),
    ("ALTER TABLE job DROP CONSTRAINT job_rate_check", "the constraint job_rate_check of job is missing", True),
    ("ALTER TABLE tombstone DROP CONSTRAINT tombstone_pkey", "the constraint tombstone_pkey of tombstone is missing", True),
    ("DROP TRIGGER delivery_move ON delivery", "the trigger delivery_move of delivery is missing", True),
    ("ALTER TABLE event DISABLE TRIGGER event_move", "the trigger event_move of event is switched off", True),
    (
        "ALTER TABLE delivery_log DETACH PARTITION delivery_log_rest",
        "the part delivery_log_rest of delivery_log is missing",
        True,
    ),
    ("DROP FUNCTION first_of_key", "the function first_of_key is missing", False),
    ("ALTER TABLE event ALTER seq DROP IDENTITY", "the column event.seq is without its IDENTITY", True),
    ("ALTER TABLE delivery_log ALTER id DROP IDENTITY", "the column delivery_log.id is without its IDENTITY", True),
    ("ALTER TABLE event ALTER source DROP NOT NULL", "the column event.source is without its NOT NULL", True),
    ("ALTER TABLE job ALTER skips DROP DEFAULT", "the column job.skips is without its DEFAULT", True),
    (
        "ALTER TABLE delivery ALTER claimed_key DROP EXPRESSION",
        "the column delivery.claimed_key is without its EXPRESSION",
        False,
    ),
    ("ALTER TABLE event ALTER reason SET NOT NULL", "the column event.reason has NOT NULL, which is none of ours", True),
    ("ALTER TABLE event ALTER reason SET DEFAULT 'x'", "the column event.reason has DEFAULT, which is none of ours", True),
    (
        "DROP INDEX event_identity; CREATE INDEX event_identity ON event (event_id, source)",
        "the index event_identity of event is another one (btree (event_id, source) instead of UNIQUE btree (event_id, source))",
        True,
    ),
    (
        "DROP INDEX event_trace; CREATE INDEX event_trace ON event (trace_id) INCLUDE (seq)",
        "the index event_trace of event is another one (btree (trace_id) INCLUDE (seq) instead of btree (trace_id, seq))",
        True,
    ),
    (
        "ALTER TABLE tombstone DROP CONSTRAINT tombstone_pkey, ADD CONSTRAINT tombstone_pkey PRIMARY KEY (event_id)",
        "the constraint tombstone_pkey of tombstone is another one (PRIMARY KEY (event_id) instead of PRIMARY KEY (event_id, ",
        True,
    ),
    (
        "DROP INDEX event_trace; CREATE INDEX event_trace ON event (seq, trace_id)",
        "the index event_trace of event is another one (btree (seq, trace_id) instead of btree (trace_id, seq))",
        True,
    ),
    (
        "DROP INDEX job_unfinished; CREATE INDEX job_unfinished ON job (id) WHERE finished_at IS NOT NULL",
        "the index job_unfinished of job is another one (btree (id) WHERE finished_at IS NOT NULL instead of btree (id) WHERE ",
        True,
    ),
    (
        "ALTER TABLE job DROP CONSTRAINT job_total_check, ADD CONSTRAINT job_total_check CHECK (total >= 0) NOT VALID",
        "the constraint job_total_check of job is another one (CHECK (total >= 0) NOT VALID instead of CHECK (total >= 0))",
        True,
    ),
    (
        "ALTER TABLE job_part DROP CONSTRAINT job_part_job_id_fkey; ALTER TABLE job_part ADD FOREIGN KEY (job_id) REFERENCES job",
        "the constraint job_part_job_id_fkey of job_part is another one (FOREIGN KEY (job_id) REFERENCES job(id) instead of ",
        True,
    ),
    (
        "CREATE OR REPLACE TRIGGER event_birth BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION event_guard()",
        "the trigger event_birth of event is another one (BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION event_guard() ",
        True,
    ),
    ("ALTER TABLE job ALTER total TYPE int", "the column job.total is another one (integer instead of bigint)", True),
    (
        "ALTER TABLE event ALTER event_id TYPE text",
        'the column event.event_id is another one (text instead of text COLLATE "C")',
        True,
    ),
    (
        "ALTER TABLE job ALTER skips SET DEFAULT '[7]'",
        "the column job.skips has another DEFAULT ('[7]'::jsonb instead of '{}'::jsonb)",
        True,
    ),
    (
        """ALTER TABLE delivery DROP COLUMN claimed_key, ADD COLUMN claimed_key text COLLATE "C"
            GENERATED ALWAYS AS (ordering_key) STORED;
            CREATE UNIQUE INDEX delivery_one_per_key ON delivery (endpoint, claimed_key) WHERE claimed_key IS NOT NULL""",
        "the column delivery.claimed_key has another EXPRESSION (ordering_key instead of CASE WHEN (claim_token IS NOT NULL)",
        False,
    ),
]


@pytest.mark.parametrize(("damage", "what", "is_mended"), DAMAGES, ids=[damage for damage, _, _ in DAMAGES])
def test_what_is_missing_is_told_by_its_name_and_the_remedy_brings_it_back(
    conn: Connection, damage: str, what: str, is_mended: bool
) -> None:
    assert list(inventory.faults(conn)) == []
    conn.execute(damage.encode())
    found = only(inventory.faults(conn))
    assert found.what.startswith(what)
    if is_mended:
        for statement in found.remedy.removeprefix("while everything is stopped, ").split("; "):
            conn.execute(statement.encode())
        assert list(inventory.faults(conn)) == []


def test_the_remedy_for_a_lost_identity_gives_no_number_that_is_taken(conn: Connection) -> None:
    """Also where a sequence by hand took its place: its default goes first."""
    insert = b"INSERT INTO burial (id, seqs) VALUES (41, '{}')"
    conn.execute(insert)
    conn.execute("CREATE SEQUENCE by_hand; ALTER TABLE burial ALTER id DROP IDENTITY, ALTER id SET DEFAULT nextval('by_hand')")
    found = list(inventory.faults(conn))
    assert [one.what.partition("burial.id ")[2] for one in found] == [
        "has DEFAULT, which is none of ours",
        "is without its IDENTITY",
    ]
    for one in found:
        conn.execute(one.remedy.encode())
    assert list(inventory.faults(conn)) == []
    assert conn.execute("INSERT INTO burial (seqs) VALUES ('{}') RETURNING id").fetchone() == (42,)


def test_a_copy_of_a_table_is_not_that_table(conn: Connection) -> None:
    """All columns are there, and nothing of what they were made with; their remedies, one after another, bring it back."""
    conn.execute("ALTER TABLE route RENAME TO o; CREATE TABLE route AS SELECT * FROM o; DROP TABLE o")
    found = list(inventory.faults(conn))
    assert {one.what for one in found} >= {
        "the column route.place is without its NOT NULL",
        "the column route.place is without its IDENTITY",
        "the column route.version is without its DEFAULT",
        "the constraint route_pkey of route is missing",
    }
    for one in found:
        conn.execute(one.remedy.encode())
    assert list(inventory.faults(conn)) == []


def test_an_index_whose_building_was_broken_off_is_not_usable(conn: Connection) -> None:
    """One of ours is built again, one that is left of something else is dropped."""
    conn.execute("INSERT INTO lease (name, holder, until) VALUES ('a', 'x', now()), ('b', 'x', now())")
    for name in ("job_unfinished", "lease_holder_ccnew"):
        conn.execute(sql.SQL("DROP INDEX IF EXISTS {}").format(sql.Identifier(name)))
        # As whoever interrupts it leaves it: it cannot be unique.
        with pytest.raises(psycopg.errors.UniqueViolation):
            conn.execute(sql.SQL("CREATE UNIQUE INDEX CONCURRENTLY {} ON lease (holder)").format(sql.Identifier(name)))
    conn.execute("DELETE FROM lease")
    found = list(inventory.faults(conn))
    # The list has the first under its own table.
    assert [one.what for one in found] == [
        "the index job_unfinished of job is missing",
        "the index job_unfinished of lease is not usable, and none of ours",
        "the index lease_holder_ccnew of lease is not usable, and none of ours",
    ]
    for one in (found[1], found[0], found[2]):
        conn.execute(one.remedy.encode())
    assert list(inventory.faults(conn)) == []
    conn.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'event_trace'::regclass")
    broken = only(inventory.faults(conn))
    assert broken.what.startswith("the index event_trace of event is not usable")
    conn.execute(broken.remedy.partition(", ")[2].encode())
    assert list(inventory.faults(conn)) == []


def test_the_index_of_a_part_of_the_log_is_missed_too(conn: Connection) -> None:
    """Parts come and go, so they stand in no list."""
    assert parts.make_ahead(conn)
    part = parts.parts(conn)[1].name
    for other in ("", "CREATE INDEX {} ON {} (token)", "CREATE UNIQUE INDEX {} ON {} (token, delivery_id, outcome)"):
        conn.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(f"{part}_one_verdict")))
        conn.execute(sql.SQL(other).format(sql.Identifier(f"{part}_one_verdict"), sql.Identifier(part)))
        found = only(inventory.faults(conn))
        assert f"the part {part} of delivery_log" in found.what
        for statement in found.remedy.split("; "):
            conn.execute(statement.encode())
    assert list(inventory.faults(conn)) == []


def test_how_an_index_is_stored_is_for_the_operator_to_choose(conn: Connection) -> None:
    conn.execute("ALTER INDEX delivery_due SET (fillfactor = 70); ALTER INDEX event_pkey SET (fillfactor = 70)")
    conn.execute("ALTER INDEX event_trace SET (fillfactor = 70, deduplicate_items = off)")
    assert list(inventory.faults(conn)) == []


def test_the_words_of_a_version_that_nobody_has_tried_are_not_held_against_it(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the catalogue says in columns of its own is."""
    conn.execute("DROP INDEX event_trace; CREATE INDEX event_trace ON event (seq, trace_id)")
    monkeypatch.setattr(inventory, "_TRIED", range(1, 2))
    assert list(inventory.faults(conn)) == []
    conn.execute("DROP INDEX event_trace; CREATE INDEX event_trace ON event (seq)")
    assert "btree (seq) instead of btree (trace_id, seq)" in only(inventory.faults(conn)).what


def test_what_a_later_version_may_have_replaced_is_not_missed(conn: Connection) -> None:
    """Tables and columns this version needs all the same; what is added is nobody's fault."""
    conn.execute("DROP INDEX event_trace; CREATE TABLE later (id int); ALTER TABLE event ADD COLUMN later int")
    conn.execute("ALTER TABLE event ALTER source DROP NOT NULL")
    assert list(inventory.faults(conn, is_ahead=True)) == []
    conn.execute("ALTER TABLE event DROP COLUMN traceparent")
    assert only(inventory.faults(conn, is_ahead=True)).what == "the column event.traceparent is missing"


def test_days_without_a_part_are_told(conn: Connection) -> None:
    """Also where the first part, which has no beginning, is the last one."""
    assert parts.uncovered(conn) == []
    (first,) = parts.parts(conn)
    conn.execute(sql.SQL("ALTER TABLE delivery_log DETACH PARTITION {}").format(sql.Identifier(first.name)))
    assert len(parts.uncovered(conn)) == 2
    conn.execute("SET timezone = 'Asia/Kathmandu'")
    ((tomorrow,),) = conn.execute("SELECT (date_trunc('day', now() AT TIME ZONE 'UTC') + '1 day') AT TIME ZONE 'UTC'")
    attach = sql.SQL("ALTER TABLE delivery_log ATTACH PARTITION {} FOR VALUES FROM (MINVALUE) TO ({})")
    conn.execute(attach.format(sql.Identifier(first.name), sql.Literal(tomorrow)))
    assert parts.uncovered(conn) == [tomorrow.astimezone(first.until.tzinfo).date()]


@pytest.fixture
def guest(conn: Connection, database_url: str) -> Iterator[Connection]:
    """A role that owns nothing and may nothing."""
    conn.execute("""CREATE ROLE "a guest" LOGIN PASSWORD 'x'""")
    with psycopg.connect(conninfo.make_conninfo(database_url, user="a guest", password="x"), autocommit=True) as c:
        yield c
    conn.execute('DROP OWNED BY "a guest"; DROP ROLE "a guest"')


@pytest.mark.direct
def test_a_role_that_may_not_do_what_the_processes_do_is_told_what_to_type(conn: Connection, guest: Connection) -> None:
    """Rights in the tables, and to make parts of the log; the owner of all has both."""
    assert list(inventory.denied(conn)) == []
    tables, log = inventory.denied(guest)
    assert "SELECT, INSERT, UPDATE, DELETE in api_token" in tables.what
    assert "parts of delivery_log" in log.what
    conn.execute(tables.remedy.encode())
    conn.execute('REVOKE DELETE ON job FROM "a guest"')
    again, _ = inventory.denied(guest)
    assert again.what == "the role a guest may not DELETE in job"
    conn.execute('REVOKE INSERT ON schema_migration FROM "a guest"')
    conn.execute(tables.remedy.encode())
    conn.execute(log.remedy.encode())
    assert list(inventory.denied(guest)) == []


@pytest.mark.direct
def test_tables_that_a_session_does_not_see_are_told_as_hidden(conn: Connection, guest: Connection, database_url: str) -> None:
    """By its search_path, or since its role may not use the schema; where there are none, they are not hidden."""
    assert list(inventory.elsewhere(conn)) == []
    conn.execute("SELECT set_config('search_path', '', false)")
    assert "pg_dump" in only(inventory.elsewhere(conn)).remedy
    with psycopg.connect(database_url, options="-c search_path=") as c:
        assert "options" in only(inventory.elsewhere(c)).remedy, "no pooler has done that, and no ALTER ROLE undoes it"
    conn.execute("SET search_path = nowhere")
    found = only(inventory.elsewhere(conn))
    assert "in the schema public, where this session does not look (search_path: nowhere)" in found.what
    conn.execute("RESET search_path")
    conn.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    found = only(inventory.elsewhere(guest))
    conn.execute(found.remedy.encode())
    assert list(inventory.elsewhere(guest)) == []
    conn.execute("DROP TABLE schema_migration")
    assert list(inventory.elsewhere(conn)) == []


@pytest.mark.direct
@pytest.mark.parametrize("said_of", ["ROLE {role}", "DATABASE {database}", "ROLE {role} IN DATABASE {database}"])
def test_a_path_that_leads_nowhere_is_mended_by_the_remedy_whoever_set_it(
    conn: Connection, guest: Connection, database_url: str, said_of: str
) -> None:
    """What is said of the role in the database wins over all else that the server keeps."""
    of = said_of.format(role='"a guest"', database=conn.info.dbname)
    conn.execute(f"ALTER {of} SET search_path = ''".encode())
    as_guest = conninfo.make_conninfo(database_url, user="a guest", password="x")
    with psycopg.connect(as_guest) as c:
        found = only(inventory.elsewhere(c))
    assert "where this session does not look (search_path: empty)" in found.what
    conn.execute(found.remedy.partition("; ")[0].encode())
    with psycopg.connect(as_guest) as c:
        assert list(inventory.elsewhere(c)) == []


@pytest.mark.direct
@pytest.mark.parametrize("table", ["event", "delivery_log_rest", "schema_migration", "a part of the log"])
def test_a_table_that_was_moved_to_another_schema_is_told_as_moved_and_not_as_lost(conn: Connection, table: str) -> None:
    moved = parts.parts(conn)[0].name if table == "a part of the log" else table
    conn.execute(f"CREATE SCHEMA attic; ALTER TABLE {moved} SET SCHEMA attic".encode())
    found = only(inventory.elsewhere(conn))
    assert found.what.startswith(f"the table {moved} is in the schema attic, where this session does not look")
    conn.execute(found.remedy.encode())
    assert [*inventory.elsewhere(conn), *inventory.faults(conn)] == []


@pytest.mark.direct
def test_a_table_of_somebody_else_in_another_schema_is_not_told_as_ours(conn: Connection) -> None:
    """Neither one of that name with other columns, nor one of another Madeira in the same database."""
    conn.execute("CREATE SCHEMA shop; CREATE TABLE shop.audit (id int)")
    conn.execute("CREATE SCHEMA second; CREATE TABLE second.audit (LIKE audit); CREATE TABLE second.schema_migration (name text)")
    assert list(inventory.elsewhere(conn)) == []
    conn.execute("DROP TABLE audit")
    assert list(inventory.elsewhere(conn)) == []
    assert only(inventory.faults(conn)).what == "the table audit is missing"


@pytest.mark.direct
@pytest.mark.parametrize(
    ("table", "made"),
    [
        ("event", "TABLE shop.event (id int)"),
        ("event", "TABLE shop.event (LIKE event)"),
        ("event", "VIEW shop.event AS SELECT 1"),
        ("schema_migration", "TABLE shop.schema_migration (version int)"),
    ],
)
def test_a_table_that_another_one_of_its_name_hides_is_told_as_hidden(conn: Connection, table: str, made: str) -> None:
    conn.execute(f"CREATE SCHEMA shop; CREATE {made}".encode())
    assert list(inventory.elsewhere(conn)) == []
    conn.execute("SET search_path = shop, public")
    found = only(inventory.elsewhere(conn))
    assert f"the table {table} of the schema public is hidden by what has the same name in the schema shop" in found.what
    statement, _, _ = found.remedy.partition("; ")
    with conn.transaction(force_rollback=True):
        conn.execute(statement.encode())
        role = conn.execute("SELECT setconfig FROM pg_db_role_setting WHERE setrole = current_user::regrole AND setdatabase <> 0")
        assert "search_path=public" in role.fetchone()[0]
    conn.execute("SET search_path = public")
    assert list(inventory.elsewhere(conn)) == []
