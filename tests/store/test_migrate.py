"""Migrations: applied once, by whoever comes first."""

import threading

import psycopg
import pytest

from madeira.errors import StoreError, StoreUnavailable
from madeira.store.migrate import FOLDER, migrate, pending
from tests.servers import with_database


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
