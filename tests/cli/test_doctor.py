"""`madeira doctor` names each fault and its remedy; each is made first, in the servers where that is possible."""

import base64
import os
import socket
import threading
import time
import uuid
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from madeira.broker.queues import ROUTE, Queues
from madeira.cli import doctor, folders, running_system, stored
from madeira.cli.findings import Finding
from madeira.egress import Egress
from madeira.embedded import free_port
from madeira.routing.config import parse_toml
from madeira.settings import Settings
from madeira.store import configuration, holding, leases, parts, reconcile
from madeira.store.configuration import Snapshot
from tests.collector import Collector
from tests.disks import mounted

Connection = psycopg.Connection[Any]

OPEN = Egress(allow=(), deny=())

NOTHING = Snapshot(1, {}, {}, {})


@pytest.fixture
def conn(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as c:
        yield c


@pytest.fixture
def queues(redis_url: str) -> Iterator[Queues]:
    found = Queues(redis_url=redis_url, namespace=f"n{uuid.uuid4().hex[:8]}")
    yield found
    found.close()


def levels(found: Iterator[Finding]) -> list[str]:
    return [one.level for one in found]


def only(found: Iterator[Finding]) -> Finding:
    (one,) = found
    return one


@pytest.mark.parametrize("what", ["postgres", "redis"])
def test_a_server_that_cannot_be_reached_is_named_with_its_setting(what: str, tmp_path: Path) -> None:
    port = free_port()
    urls = {"postgres": f"postgresql://u:a-password@127.0.0.1:{port}/d", "redis": f"redis://:a-password@127.0.0.1:{port}/0"}
    setting = {"postgres": "database_url", "redis": "redis_url"}[what]
    values = Settings(**{setting: urls[what], "data_dir": tmp_path})
    look = {"postgres": doctor._postgres, "redis": doctor._redis}[what]
    found = only(doctor._guarded(what, lambda: look(values)))
    assert found.level == "error"
    assert f"MADEIRA_{setting.upper()}" in found.text
    assert "a-password" not in found.text
    assert len(found.text.splitlines()) == 1


def test_no_worker_is_told_and_one_that_lives_too(queues: Queues) -> None:
    found = only(running_system.workers(queues))
    assert (found.level, "dramatiq madeira.actors" in found.text) == ("warning", True)
    queues.beat("a-worker", silence_s=60, spread_s=1, queues=[ROUTE], held=[])
    assert levels(running_system.workers(queues)) == ["ok"]


def test_a_scheduler_that_does_not_run_is_seen_by_reconcile(conn: Connection) -> None:
    assert "has never run" in only(running_system.scheduler(conn)).text
    conn.execute("INSERT INTO reconcile_run (duration_s, holder, counts) VALUES (0.1, 'w', '{}')")
    assert levels(running_system.scheduler(conn)) == ["ok"]
    conn.execute("UPDATE reconcile_run SET finished_at = finished_at - interval '10 minutes'")
    found = only(running_system.scheduler(conn))
    assert found.level == "warning"
    assert "10 min ago" in found.text
    assert "periodiq madeira.actors" in found.text


def test_a_comparison_that_takes_long_is_told_as_such_instead_of_a_scheduler_that_is_missing(conn: Connection) -> None:
    """However often it renewed its lease; and what a process that is gone has left is none."""
    for _ in range(2):
        assert leases.take(conn, reconcile.LEASE, "a run", 15)
        conn.execute("UPDATE lease SET taken_at = taken_at - interval '5 minutes'")
    found = only(running_system.scheduler(conn))
    assert (found.level, "a run has been going on for 10 min" in found.text) == ("warning", True)
    assert "periodiq" not in found.text
    conn.execute("UPDATE lease SET until = clock_timestamp() - interval '1 s'")
    assert "periodiq" in only(running_system.scheduler(conn)).text


def test_clocks_that_differ_are_told_by_how_much_and_which_is_ahead(conn: Connection, queues: Queues) -> None:
    ahead = {"Postgres": running_system.clock_of_postgres(conn), "Redis": running_system.clock_of_redis(queues)}
    assert max(map(abs, ahead.values())) < 0.5, "all on this machine"
    assert levels(running_system.clocks(ahead)) == ["ok"]
    found = only(running_system.clocks(ahead | {"Redis": -5.0}))
    assert (found.level, "5.0 s ahead of that of Redis" in found.text, "NTP" in found.text) == ("warning", True, True)
    assert levels(running_system.clocks({"Postgres": 40.0, "Redis": -1.0})) == ["error"]
    assert levels(running_system.clocks({})) == []


def test_a_clock_that_is_put_back_is_measured(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = time.time
    monkeypatch.setattr(time, "time", lambda: honest() - 60)
    assert running_system.clock_of_postgres(conn) == pytest.approx(60, abs=0.5)


def test_an_endpoint_that_somebody_holds_is_named_with_the_command_that_lets_it_go(conn: Connection) -> None:
    assert levels(running_system.held(conn)) == []
    configuration.insert(conn, "endpoint", {"ledger": {"url": "http://x/"}})
    holding.change(conn, "ledger", "pause", who="ann", why="their migration")
    found = only(running_system.held(conn))
    assert (found.level, "ledger (paused)" in found.text) == ("warning", True)
    assert "madeira endpoints resume ledger" in found.text


def test_connections_that_are_nearly_all_taken_are_told(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(running_system.connections(conn)) == ["ok"]
    monkeypatch.setattr(running_system, "_TAKEN", 0.0)
    found = only(running_system.connections(conn))
    assert (found.level, "raise max_connections" in found.text) == ("warning", True)


@pytest.mark.parametrize(("free", "level"), [(3 * 2**30, "ok"), (2**30, "warning"), (100 * 2**20, "error")])
def test_a_disk_that_fills_is_told_before_it_is_full(tmp_path: Path, free: int, level: str) -> None:
    """Also of a folder that is not there yet."""
    usage = namedtuple("usage", "free")
    for folder in (tmp_path, tmp_path / "none" / "yet"):
        found = next(folders.look(Settings(data_dir=folder), is_up=False, usage=lambda _: usage(free)))
        assert (found.what, found.level) == ("disk", level)
        assert ("make room" in found.text) == (level != "ok")


def test_where_the_servers_are_elsewhere_room_for_the_metrics_will_do(tmp_path: Path) -> None:
    values = Settings(database_url="postgresql://h/d", redis_url="redis://h/0", data_dir=tmp_path)
    usage = namedtuple("usage", "free")
    assert levels(folders.look(values, is_up=False)) == []
    assert levels(folders.look(values, is_up=False, usage=lambda _: usage(0))) == ["warning"]
    assert levels(folders.look(values, is_up=True, usage=lambda _: usage(10 * 2**20))) == ["error", "warning"]


def test_a_folder_that_cannot_be_used_is_told_with_the_setting_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place, or on the way to it; of the metrics only a warning where nobody has named a folder."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "data"):
        found = only(folders.look(Settings(data_dir=folder), is_up=False))
        assert (found.what, found.level, "MADEIRA_DATA_DIR" in found.text) == ("data folder", "error", True)
        assert f"{tmp_path / 'file'} is not a folder" in found.text
    values = Settings(database_url="postgresql://h/d", redis_url="redis://h/0", data_dir=tmp_path / "file")
    assert levels(folders.look(values, is_up=False)) == ["warning"]
    monkeypatch.setenv("MADEIRA_DATA_DIR", str(tmp_path / "file"))
    assert levels(folders.look(values, is_up=False)) == ["error"]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "file"))
    assert "set PROMETHEUS_MULTIPROC_DIR" in only(folders.look(values, is_up=False)).text


def test_a_folder_that_may_not_be_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.refusal(tmp_path / "data") is None
    tmp_path.chmod(0o500)
    if os.geteuid() == 0:
        # Root may write everywhere; the kernel says of others what it would say of them.
        monkeypatch.setattr(os, "access", lambda path, mode: bool(path.stat().st_mode & 0o200))
    assert f"this user may not write into {tmp_path}" in str(folders.refusal(tmp_path / "data"))


def test_a_disk_for_reading_only_is_told_as_such() -> None:
    """It is no matter of this user's rights."""
    with mounted("ro") as folder:
        assert "mounted for reading only" in str(folders.refusal(folder / "data"))


def test_an_address_that_this_machine_does_not_have_is_told() -> None:
    found = [one for one in doctor._settings(Settings(host="192.0.2.1")) if one.what == "address"]
    assert [(one.level, "MADEIRA_HOST" in one.text) for one in found] == [("warning", True)]


def test_a_host_without_an_address_and_one_that_is_denied_are_told(conn: Connection) -> None:
    urls = {
        "good": "https://198.51.100.7/hook",
        "gone": "https://no-such-name.invalid/{event_type}",
        "inside": "http://169.254.169.254/latest",
        "moved": "http://moved.example/x",
        "any": "{+target_uri}",
    }
    configuration.insert(conn, "endpoint", {name: {"url": url} for name, url in urls.items()})

    def lookup(host: str, port: int, **more: Any) -> list[Any]:
        """As the resolver of this machine; one name leads inside."""
        return socket.getaddrinfo("127.0.0.1" if host == "moved.example" else host, port, **more)

    found = {one.text.split(":")[0]: one for one in running_system.addresses(configuration.read(conn), OPEN, lookup=lookup)}
    assert set(found) == {"endpoint gone", "endpoint inside", "endpoint moved"}
    assert {one.level for one in found.values()} == {"warning"}
    assert "no-such-name.invalid has no address" in found["endpoint gone"].text
    assert "MADEIRA_EGRESS_ALLOW" in found["endpoint moved"].text


def test_a_resolver_that_hangs_holds_nothing_up(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_system, "_LOOKUP_S", 0.05)
    configuration.insert(conn, "endpoint", {"slow": {"url": "http://slow.example/"}})
    released = threading.Event()

    def hangs(*_: object, **__: object) -> list[Any]:
        released.wait(60)
        return []

    found = only(running_system.addresses(configuration.read(conn), OPEN, lookup=hangs))
    released.set()
    assert "no answer within 0.05 s" in found.text


def test_every_endpoint_that_can_be_called_is_one_line(conn: Connection) -> None:
    configuration.insert(conn, "endpoint", {f"e{n}": {"url": f"http://198.51.100.{n}/"} for n in range(3)})
    found = only(running_system.addresses(configuration.read(conn), OPEN))
    assert (found.level, "3 endpoints" in found.text) == ("ok", True)


def test_everything_is_looked_at_in_one_go(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """With real servers: each kind of finding is there once, and nothing fails on the way."""
    values = Settings(database_url=database_url, redis_url=redis_url, data_dir=tmp_path)
    found = [*doctor._postgres(values), *doctor._redis(values), *running_system.clocks(doctor._clocks(values))]
    told = {one.what for one in found}
    assert {"migrations", "tables", "scheduler", "connections", "workers", "redis memory", "clocks"} <= told
    assert not [one for one in found if "cannot be examined" in one.text]


def test_a_collector_that_takes_spans_or_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with a request that holds none; a variable with which no process starts is an error."""
    values = Settings(traces="otlp", data_dir=tmp_path)
    with Collector() as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.env()["OTEL_EXPORTER_OTLP_ENDPOINT"])
        assert only(running_system.collector(values)).level == "ok"
        assert there.calls
        assert there.seen() == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    found = only(running_system.collector(values))
    assert (found.level, "OTEL_EXPORTER_OTLP_ENDPOINT" in found.text) == ("warning", True)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    found = only(running_system.collector(values))
    assert (found.level, "OTEL_BSP_MAX_QUEUE_SIZE" in found.text) == ("error", True)
    assert list(running_system.collector(Settings(data_dir=tmp_path))) == []


def test_signing_secrets_that_can_be_tried_out_are_told_by_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read from the environment too; the length of the key counts, not of its base64."""
    monkeypatch.setenv("SHORT", "demo-secret")
    long = "whsec_" + base64.b64encode(b"k" * 24).decode()
    text = f"""
        [[source]]
        name = "shop"
        secrets = ["{long}", "env:SHORT"]

        [[source]]
        name = "bank"
        secrets = ["{"k" * 24}"]

        [[endpoint]]
        name = "ledger"
        url = "http://ledger.example/"
        secrets = ["{long[:-8]}"]
    """
    found = [one for one in doctor._configuration(parse_toml(text, where="t"), NOTHING) if one.what == "secrets"]
    assert [(one.level, "source shop, endpoint ledger has" in one.text) for one in found] == [("warning", True)]
    good = parse_toml(text.replace("env:SHORT", long).replace(f'"{long[:-8]}"', f'"{long}"'), where="t")
    assert not [one for one in doctor._configuration(good, NOTHING) if one.what == "secrets"]


@pytest.mark.new_database
@pytest.mark.parametrize(
    ("damage", "told", "code"),
    [
        ("DROP TABLE audit", "the table audit is missing", 1),
        ("DROP INDEX event_identity", "CREATE UNIQUE INDEX CONCURRENTLY event_identity", 1),
        ("ALTER TABLE event DISABLE TRIGGER USER", "ALTER TABLE event ENABLE TRIGGER event_move", 1),
        ("ALTER TABLE delivery_log DETACH PARTITION {part}", "delivery_log has no part for ", 0),
    ],
    ids=["table", "index", "trigger", "part"],
)
def test_what_is_gone_of_the_tables_is_told_although_all_migrations_were_applied(
    conn: Connection, database_url: str, damage: str, told: str, code: int
) -> None:
    conn.execute(damage.format(part=parts.parts(conn)[0].name).encode())
    found = list(doctor._postgres(Settings(database_url=database_url)))
    assert ("ok", "migrations") in {(one.level, one.what) for one in found}
    (one,) = [one for one in found if told in one.text]
    assert one.level == ("error" if code else "warning")


@pytest.mark.new_database
def test_of_very_much_that_is_gone_a_part_is_named_and_the_rest_counted(conn: Connection) -> None:
    conn.execute("ALTER TABLE event DROP COLUMN created_at, DROP COLUMN traceparent")
    conn.execute("DROP TABLE audit, episode, job_begun, job_part, job, lease, notice, reconcile_run, retention_day")
    found = list(stored.tables(conn, is_ahead=False))
    assert [one.text for one in found if "more" in one.text] == [
        "and 1 more are missing or not usable: restore the database from a backup"
    ]
    assert {one.level for one in found} == {"error"}
    assert len(found) == 11


@pytest.mark.direct
@pytest.mark.new_database
def test_of_a_table_that_hides_one_of_ours_the_rights_are_not_told(conn: Connection) -> None:
    conn.execute("CREATE SCHEMA shop; CREATE TABLE shop.event (id int); SET search_path = shop, public")
    conn.execute("CREATE ROLE doctor_guest; GRANT USAGE ON SCHEMA shop TO doctor_guest; SET ROLE doctor_guest")
    try:
        (found,) = stored.rights(conn)
        assert "the table event of the schema public is hidden" in found.text
    finally:
        conn.execute("RESET ROLE; RESET search_path; DROP OWNED BY doctor_guest; DROP ROLE doctor_guest")


@pytest.mark.new_database
def test_a_role_without_rights_is_told_what_to_type_instead_of_what_it_cannot_see(conn: Connection, database_url: str) -> None:
    conn.execute("CREATE ROLE doctor_guest LOGIN PASSWORD 'x'")
    try:
        url = urlsplit(database_url)
        as_guest = urlunsplit(url._replace(netloc=f"doctor_guest:x@{url.netloc.rpartition('@')[2]}"))
        found = [
            one for one in doctor._postgres(Settings(database_url=as_guest)) if one.what in ("rights", "migrations", "tables")
        ]
        assert [(one.level, one.what) for one in found] == [("error", "rights"), ("error", "rights")]
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO doctor_guest" in found[0].text
    finally:
        conn.execute("DROP OWNED BY doctor_guest; DROP ROLE doctor_guest")
