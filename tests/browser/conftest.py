"""Chromium, windows in it, and a Madeira to look at. A missing Chromium ends the run at once: it is never a skip."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from madeira.states import Role
from tests.api.conftest import shared_api  # noqa: F401  # a fixture
from tests.api.people import token
from tests.api.serving import Api
from tests.browser import window
from tests.browser.window import Window
from tests.browser.world import World

#: What opens windows: `windows(role)`, with options of Playwright's contexts.
Windows = Callable[..., Window]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/browser/" in item.nodeid:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One Chromium for all tests."""
    if window.found() is None:
        pytest.exit("there is no Chromium to test the console with; on Debian: apt-get install chromium fonts-dejavu", 3)
    driver, browser = window.launched()
    yield browser
    browser.close()
    driver.stop()


@pytest.fixture(scope="module")
def signed_in(chromium: Any, shared_api: Api) -> Callable[[Role], Any]:  # noqa: F811
    """The cookies of somebody of a role, who signed in once for the module."""
    kept: dict[Role, Any] = {}

    def state(role: Role) -> Any:
        if role not in kept:
            first = Window(chromium.new_context(), shared_api)
            first.sign_in(token(shared_api, role)[0])
            assert first.address == "/console", first.text()
            kept[role] = first.context.storage_state()
            first.close()
        return kept[role]

    return state


@pytest.fixture
def windows(chromium: Any, shared_api: Api, signed_in: Callable[[Role], Any]) -> Iterator[Windows]:  # noqa: F811
    """Opens windows for somebody of a role, or for a stranger; what their pages complain of fails the test."""
    opened: list[Window] = []

    def make(role: Role | None = Role.OPERATOR, *, width: int = window.DESK, height: int = 900, **options: Any) -> Window:
        state = signed_in(role) if role else None
        size = {"width": width, "height": height}
        opened.append(Window(chromium.new_context(storage_state=state, viewport=size, **options), shared_api))
        return opened[-1]

    yield make
    errors = [error for one in opened for error in one.errors]
    for one in opened:
        one.close()
    assert errors == []


@pytest.fixture(scope="module")
def conn(shared_api: Api) -> Iterator[psycopg.Connection[Any]]:  # noqa: F811
    """A connection to the database that the console shows."""
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as c:
        yield c


@pytest.fixture(scope="module")
def world(shared_api: Api, conn: psycopg.Connection[Any]) -> Iterator[World]:  # noqa: F811
    """Something of everything."""
    made = World(shared_api, conn)
    yield made
    made.close()
