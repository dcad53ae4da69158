"""Connections to a fresh database."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from madeira.store.database import Database


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The connections of a process, open."""
    database = Database(url=database_url, application="tests", pool_max=20)
    database.open()
    yield database
    database.close()


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """A connection as group commit uses it: in autocommit mode."""
    with database.connect() as conn:
        yield conn
