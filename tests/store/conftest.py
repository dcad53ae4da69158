"""Connections to a fresh database, and groups that share one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from madeira.store.database import Database
from tests.store.grouping import APPLICATION, Gate, Groups


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
    with database.connect(one_plan=True) as conn:
        yield conn


@pytest.fixture
def several(database: Database) -> Iterator[list[psycopg.Connection[Any]]]:
    """Connections for contenders."""
    with ExitStack() as stack:
        yield [stack.enter_context(database.connect()) for _ in range(4)]


@contextmanager
def opened(url: str, *, statement_timeout_s: float) -> Iterator[Database]:
    """Connections whose sessions go by the name of the group under test."""
    database = Database(url=url, application=APPLICATION, pool_max=1, statement_timeout_s=statement_timeout_s)
    database.open()
    yield database
    database.close()


@pytest.fixture
def own_database(database_url: str) -> Iterator[Database]:
    """Connections whose sessions go by the name of the group under test; a statement may take 0.5 s."""
    with opened(database_url, statement_timeout_s=0.5) as database:
        yield database


@pytest.fixture
def patient_database(database_url: str) -> Iterator[Database]:
    """The same, but a statement may take as long as a test does."""
    with opened(database_url, statement_timeout_s=100) as database:
        yield database


@pytest.fixture
def gate(database_url: str) -> Iterator[Gate]:
    """Closed until the test opens it."""
    with Database(url=database_url, application="gate", pool_max=1, statement_timeout_s=100).connect() as conn:
        yield Gate(conn)


@pytest.fixture
def grouped() -> Iterator[Groups]:
    """Makes groups that end with the test."""
    groups = Groups()
    yield groups
    for group in groups.made:
        group.stop(timeout_s=10)
