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
