"""The API, and what stands between a client and it."""

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from madeira.client import Client
from tests.api.conftest import api, serve, shared_api  # noqa: F401  # fixtures
from tests.api.serving import SECRET, Api
from tests.receiver import Answer, Call, Receiver


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Makes clients of the source "shop" that are closed after the test; they wait little."""
    made: list[Client] = []

    def make(url: str, **more: object) -> Client:
        client = Client(url, **{"source": "shop", "secret": SECRET, "backoff_s": 0.01, **more})  # type: ignore[arg-type]
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def between() -> Iterator[Receiver]:
    """A server that the client talks to, and that the test scripts: a proxy, seen from the client."""
    with Receiver() as receiver:
        yield receiver


def passed_on(api: Api) -> Callable[[Call], Answer]:  # noqa: F811
    """Lets the API answer."""

    def script(call: Call) -> Answer:
        reply = api.request(call.method, call.path, call.body, dict(call.header_list))
        return Answer(status=reply.status, body=reply.body, headers={"Content-Type": reply.headers["content-type"]})

    return script


def answer_lost(api: Api) -> Callable[[Call], Answer]:  # noqa: F811
    """Lets the API take the request, and closes the connection instead of passing its answer on."""

    def script(call: Call) -> Answer:
        passed_on(api)(call)
        return Answer(no_answer=True)

    return script


class Watching(httpx.BaseTransport):
    """A transport that tells when a connection could not be made, and which answers came."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.failed = threading.Event()
        self.statuses: list[int] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            response = self._inner.handle_request(request)
        except httpx.ConnectError:
            self.failed.set()
            raise
        self.statuses.append(response.status_code)
        return response

    def close(self) -> None:
        self._inner.close()


def url(api: Api) -> str:  # noqa: F811
    return f"http://127.0.0.1:{api.port}"


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)
