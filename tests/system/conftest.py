"""Whole systems on the shared servers, or on servers of their own where a test stops those."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.receiver import Receiver
from tests.system.harness import Madeira, running, toml


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
