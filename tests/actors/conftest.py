"""A worker process inside the test, and a receiver for it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.inprocess import InProcess, in_process
from tests.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that answers 200 unless told otherwise."""
    with Receiver() as receiver:
        yield receiver


Make = Callable[..., InProcess]


@pytest.fixture
def make(tmp_path: Path, database_url: str, redis_url: str, receiver: Receiver) -> Iterator[Make]:
    """Makes a worker process with the endpoint `a`; `endpoint` changes its settings."""
    with contextlib.ExitStack() as stack:

        def process(endpoint: dict[str, Any] | None = None, **options: Any) -> InProcess:
            servers = {"database_url": database_url, "redis_url": redis_url, "folder": tmp_path}
            fields = {"url": receiver.url("/a"), "retry": {"initial": 30, "max": 60}} | (endpoint or {})
            return stack.enter_context(in_process(endpoints={"a": fields}, **servers | options))

        yield process


@pytest.fixture
def process(make: Make) -> InProcess:
    """A worker process that works."""
    process = make()
    process.start()
    return process
