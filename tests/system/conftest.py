"""Whole systems on the shared servers, or on servers of their own where a test stops those."""

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import Queues
from madeira.store.database import Database
from tests.receiver import Receiver
from tests.servers import OwnRedis, with_database
from tests.system.harness import Madeira, Process, running, toml
from tests.system.states import BRISK, Cast, endpoints


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that answers 200 unless told otherwise."""
    with Receiver() as receiver:
        yield receiver


Launch = Callable[..., Madeira]


@pytest.fixture
def launch(tmp_path: Path, database_url: str, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Makes a Madeira with the given endpoints; by default on the shared servers. The test starts its processes."""
    with contextlib.ExitStack() as stack:

        def make(endpoints: Mapping[str, Mapping[str, Any]], *, env: Mapping[str, str] | None = None, **options: Any) -> Madeira:
            servers = {"database_url": database_url, "redis_url": redis_url} | options
            context: AbstractContextManager[Madeira] = running(folder=tmp_path, config=toml(endpoints), env=env, **servers)
            return stack.enter_context(context)

        yield make


@dataclass
class Stage:
    """A system that several tests use one after another, on a Redis and in a database of its own."""

    madeira: Madeira
    receiver: Receiver
    server: OwnRedis
    #: Routes, and nothing else, so that it can be frozen.
    router: Process
    #: Two processes for all other work.
    worker: Process
    #: The queues, as seen from outside.
    queues: Queues
    database: Database
    _casts: list[Cast] = field(default_factory=list)

    @property
    def lanes(self) -> list[str]:
        """The names of all lanes."""
        return list(endpoints(self.receiver))

    def cast(self) -> Cast:
        """Events in every state."""
        cast = Cast(self.madeira, self.receiver, self.router)
        self._casts.append(cast)
        cast.enter()
        return cast

    def clear(self) -> None:
        """Let go of what a test that failed left frozen or held."""
        self.server.resume()
        self.worker.thaw()
        self.router.thaw()
        for cast in self._casts:
            cast.let_go()
        self._casts.clear()
        self.madeira.wait_all()

    def told(self, what: str) -> int:
        """How many keys heartbeats said to have been ``put_back``, ``strays`` or ``taken_over`` so far."""
        return sum(int(n) for n in re.findall(rf'"{what}": (\d+)', self.logs()))

    def logs(self) -> str:
        """What all workers logged so far."""
        return self.router.tail(10**8) + self.worker.tail(10**8)


@pytest.fixture
def stage(shared_stage: Stage) -> Iterator[Stage]:
    """The running system of the module, whole when the test begins."""
    print(f"logs: {shared_stage.madeira.folder}")
    yield shared_stage
    shared_stage.clear()


@pytest.fixture(scope="module")
def shared_stage(
    tmp_path_factory: pytest.TempPathFactory, servers_folder: Path, postgres_url: str, template_database: str
) -> Iterator[Stage]:
    """One running system for the tests of a module that break Redis: whatever one test breaks must be whole for the next."""
    folder = tmp_path_factory.mktemp("stage")
    name = f"madeira_stage_{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(postgres_url, autocommit=True))
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}".encode())
        stack.callback(admin.execute, f"DROP DATABASE {name} WITH (FORCE)".encode())
        server = OwnRedis(folder=servers_folder / name)
        stack.callback(server.stop)
        server.start()
        receiver = stack.enter_context(Receiver())
        database_url = with_database(postgres_url, name)
        madeira = stack.enter_context(
            running(folder=folder, config=toml(endpoints(receiver)), database_url=database_url, redis_url=server.url, env=BRISK)
        )
        with ThreadPoolExecutor() as pool:
            router = pool.submit(madeira.worker, threads=4, queues=["route"], name="router")
            worker = pool.submit(madeira.worker, processes=2, queues=["deliver", "dead_letter", "reconcile"])
            madeira.api()
        queues = stack.enter_context(contextlib.closing(Queues(redis_url=server.url, namespace=madeira.namespace)))
        database = Database(url=database_url, application="stage", pool_max=4)
        database.open()
        stack.callback(database.close)
        yield Stage(madeira, receiver, server, router.result(), worker.result(), queues, database)
