"""Running APIs for the tests."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import Queues
from tests.api.serving import CONFIG, Api, event, rows
from tests.servers import with_database


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Makes APIs that are stopped after the test: ``serve(database_url, redis_url, MADEIRA_…="…")``, not started yet."""
    served: list[Api] = []

    def make(database_url: str, redis_url: str, *, config: str | None = CONFIG, **env: str) -> Api:
        folder = tmp_path / f"api{len(served)}"
        api = Api(folder=folder, database_url=database_url, redis_url=redis_url, config=config, **env)
        served.append(api)
        return api

    yield make
    for api in served:
        api.stop()


@pytest.fixture
def api(serve: Callable[..., Api], database_url: str, redis_url: str) -> Api:
    """An API of two workers on the shared servers."""
    return serve(database_url, redis_url).start()


@pytest.fixture(scope="module")
def shared_api(
    postgres_url: str, template_database: str, shared_redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    """An API, with a database of its own, that the tests of a module share: they look at answers, not at what was before."""
    name = f"madeira_api_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}".encode())
    api = Api(
        folder=tmp_path_factory.mktemp("shared_api"),
        database_url=with_database(postgres_url, name),
        redis_url=shared_redis_url,
        MADEIRA_NAMESPACE=name,
        MADEIRA_MAX_BODY="20000",
    )
    yield api.start()
    api.stop()
    with psycopg.connect(postgres_url, autocommit=True) as c:
        c.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def leaves_no_row(shared_api: Api) -> Iterator[None]:
    """Whatever is refused leaves no row, and a good event still passes afterwards on both workers."""
    before = rows(shared_api.env["MADEIRA_DATABASE_URL"])
    yield
    assert rows(shared_api.env["MADEIRA_DATABASE_URL"]) == before
    assert [shared_api.post(event(uuid.uuid4().hex)).status for _ in range(2)] == [202] * 2


@pytest.fixture
def conn(shared_api: Api) -> Iterator[psycopg.Connection[Any]]:
    """A connection to the database of the shared API."""
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as conn:
        yield conn


@pytest.fixture
def queues(shared_api: Api) -> Iterator[Queues]:
    """The queues of the shared API."""
    with contextlib.closing(
        Queues(redis_url=shared_api.env["MADEIRA_REDIS_URL"], namespace=shared_api.env["MADEIRA_NAMESPACE"])
    ) as queues:
        yield queues
