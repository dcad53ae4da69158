"""A configuration in a database of its own, and what changes it."""

from collections.abc import Iterator

import pytest

from madeira.routing.manage import Configurator
from madeira.store.database import Database
from tests.system.harness import configurator as make_configurator


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Connections to a fresh, migrated database."""
    database = Database(url=database_url, application="tests", pool_max=4)
    database.open()
    yield database
    database.close()


@pytest.fixture
def configurator(database: Database) -> Configurator:
    """What changes the configuration, with the key of the tests; this machine may be called."""
    return make_configurator(database)
