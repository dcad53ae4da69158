"""Senders that dribble: given up in a bounded time, and no hindrance to anybody else meanwhile."""

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.api.serving import Api, event, rows, signed

#: Many more than the threads that serve them.
SENDERS = 40


def head(body: bytes, **more: str) -> bytes:
    """The head of a signed post of `body`, whose length is left to `more`."""
    lines = "".join(f"{k}: {v}\r\n" for k, v in (signed(body) | more).items())
    return f"POST /v1/events HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode()


@contextlib.contextmanager
def dribbling(api: Api, at_once: bytes, then: bytes, every_s: float = 0.5) -> Iterator[list[socket.socket]]:
    """Connections that have sent `at_once` and go on with one byte of `then` every `every_s` seconds."""
    stopped = threading.Event()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=40)) for _ in range(SENDERS)]

        def run() -> None:
            for n in range(len(then)):
                for connection in connections:
                    with contextlib.suppress(OSError):
                        connection.sendall(then[n : n + 1])
                if stopped.wait(every_s):
                    return

        for connection in connections:
            connection.sendall(at_once)
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield connections
        finally:
            stopped.set()
            thread.join()


def status(connection: socket.socket) -> int:
    """The status of the answer."""
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status


BODY = event("slow", payload="x" * 2000)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    ("at_once", "then"),
    [
        (b"G", b"ET /healthz HTTP/1.1\r\nHost: " + b"x" * 1000),
        (head(BODY, **{"Content-Length": str(len(BODY))}), BODY),
    ],
    ids=["head", "body"],
)
def test_slow_senders_hold_no_thread(
    serve: Callable[..., Api], database_url: str, redis_url: str, at_once: bytes, then: bytes
) -> None:
    """With many more of them than threads probes and posts are answered at once; they themselves get 408."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="2").start()
    started = time.monotonic()
    with dribbling(api, at_once, then) as slow:
        for n in range(5):
            assert api.request("GET", "/healthz", timeout_s=3).status == 200
            assert api.request("POST", "/v1/events", event(f"e{n}"), signed(event(f"e{n}")), timeout_s=3).status == 202
        assert [status(connection) for connection in slow] == [408] * SENDERS
        assert 8 < time.monotonic() - started < 20
    assert rows(database_url) == 5


@pytest.mark.long
@pytest.mark.alone
def test_a_byte_now_and_then_does_not_prolong_a_body(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """A chunked body that is read by a thread has one deadline, whatever comes meanwhile."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="50", MADEIRA_MAX_BODY="20000").start()
    chunks = b"1\r\nx\r\n" * 100
    started = time.monotonic()
    with dribbling(api, head(BODY, **{"Transfer-Encoding": "chunked"}), chunks) as slow:
        assert [status(connection) for connection in slow] == [408] * SENDERS
        assert time.monotonic() - started < 20
    assert rows(database_url) == 0


def test_a_request_in_pieces_is_served(shared_api: Api) -> None:
    """Wherever it was cut, also twice on one connection, the second head arriving with the first body."""
    first, second = event("pieces-1"), event("pieces-2")
    stream = b"".join(head(body, **{"Content-Length": str(len(body))}) + body for body in (first, second))
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(stream), 40):
            connection.sendall(stream[at : at + 40])
        answers = b""
        while answers.count(b"HTTP/1.1 202") < 2:
            part = connection.recv(4096)
            assert part, answers
            answers += part


def test_a_sender_that_goes_in_the_middle_is_dropped(shared_api: Api) -> None:
    """Half a body and then the end: told at once, not after the time that a slow sender gets."""
    body = event("gone")
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=5) as connection:
        connection.sendall(head(body, **{"Content-Length": str(len(body))}) + body[:5])
        connection.shutdown(socket.SHUT_WR)
        assert status(connection) == 400


@pytest.mark.long
def test_a_client_that_does_not_close_after_its_last_answer_holds_up_nobody(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    """An answer with ``Connection: close`` whose client goes on holding the connection: others are served meanwhile."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1").start()
    held = [socket.create_connection(("127.0.0.1", api.port), timeout=20) for _ in range(5)]
    for s in held:
        s.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert s.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert api.get("/healthz").duration_s < 1
    for s in held:
        # Ours is closed at once, and all of it after a while.
        while s.recv(4096):
            pass
        s.close()
