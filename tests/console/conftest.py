"""The API with its console."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.api.conftest import serve, shared_api  # noqa: F401  # fixtures
from tests.api.serving import Api


@pytest.fixture
def conn(shared_api: Api) -> Iterator[psycopg.Connection[Any]]:  # noqa: F811
    """A connection to the database that the console shows."""
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as c:
        yield c
