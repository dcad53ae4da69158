"""Senders that dribble: given up in a bounded time, and no hindrance to anybody else meanwhile."""

import contextlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.serving import Api, event, rows, signed
from tests.system.harness import wait_until

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
            assert api.request("GET", "/healthz", timeout_s=8).status == 200
            assert api.request("POST", "/v1/events", event(f"e{n}"), signed(event(f"e{n}")), timeout_s=8).status == 202
        assert [status(connection) for connection in slow] == [408] * SENDERS
        assert 8 < time.monotonic() - started < 20
    assert rows(database_url) == 5


@pytest.mark.parametrize(
    "more", [{"Transfer-Encoding": "chunked"}, {"Content-Length": "2000", "Expect": "100-continue"}, {"Content-Length": "100000"}]
)
def test_bodies_that_do_not_come_leave_threads_to_others(
    serve: Callable[..., Api], database_url: str, redis_url: str, more: dict[str, str]
) -> None:
    """With more of them than threads, of the kinds that a thread waits for, probes and posts are answered at once.

    So is a whole body of each of these kinds when one of the others is over: none is refused for them.
    """
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start()
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=40)) for _ in range(8)]
        for connection in stalled:
            connection.sendall(head(BODY, **more) + b" " * 70_000 * ("Expect" not in more and "Content-Length" in more))
        for n in range(5):
            assert api.request("GET", "/healthz", timeout_s=8).status == 200
            assert api.request("POST", "/v1/events", event(f"e{n}"), signed(event(f"e{n}")), timeout_s=8).status == 202
        body = event("patient")
        last = stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=40))
        last.sendall(head(body, Expect="100-continue", **{"Content-Length": str(len(body))}))
        for connection in stalled[:4]:
            connection.close()
        answer = last.recv(4096)
        assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"
        last.sendall(body)
        assert status(last) == 202
    assert rows(database_url) == 6


def test_bodies_that_only_seem_to_have_come_leave_threads_to_others(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    """However what a thread must wait for is written; a body in chunks that has come needs none of their turns."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start()
    batch = head(BODY, **{"Content-Length": "2000000", "Content-Type": "application/x-ndjson"})
    disguised = [
        head(BODY, **{"Content-Length": "00000000002000"}),
        b"\r\n" + batch.replace(b"/v1/events", b"/v1/events/batch"),
        batch.replace(b"/v1/events", b"/v1/events/%62atch"),
        head(BODY, **{"Transfer-Encoding": "chunked"}) + b"100\r\nx\r\n0\r\n\r\n",
        head(BODY, **{"Content-Length": "2000", "Expect": "100-continue"}) + b"5\r\nhello\r\n0\r\n\r\n",
    ]
    with contextlib.ExitStack() as stack:
        for said in disguised * 4:
            stalled = stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20))
            stalled.sendall(said)
        for n in range(5):
            assert api.request("GET", "/healthz", timeout_s=8).status == 200
            whole = head(event(f"e{n}"), **{"Transfer-Encoding": "chunked"})
            whole += b"%x\r\n%s\r\n0\r\n\r\n" % (len(event(f"e{n}")), event(f"e{n}"))
            with socket.create_connection(("127.0.0.1", api.port), timeout=3) as connection:
                connection.sendall(whole + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert status(connection) == 202
    assert rows(database_url) == 5


@pytest.mark.long
@pytest.mark.alone
def test_nobody_waits_for_a_turn_for_ever(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """Who comes behind many bodies that do not come is told so, and may try again."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="2").start()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=60)) for _ in range(8)]
        for connection in stalled:
            connection.sendall(head(BODY, **{"Transfer-Encoding": "chunked"}))
        found = [status(connection) for connection in stalled]
        assert set(found) == {408, 503}, found
        assert found.count(503) >= 3, found
        assert time.monotonic() - started < 60


@pytest.mark.long
@pytest.mark.alone
def test_a_byte_now_and_then_does_not_prolong_a_body(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """A chunked body that is read by a thread has one deadline, whatever comes meanwhile."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="60", MADEIRA_MAX_BODY="20000").start()
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "begun"),
    [
        ({"Content-Length": "300", "Expect": "100-continue"}, b"{"),
        ({"Transfer-Encoding": "chunked"}, b"100\r\n{"),
    ],
    ids=["announced", "in chunks"],
)
def test_what_comes_of_a_body_after_its_time_is_no_request(shared_api: Api, more: dict[str, str], begun: bytes) -> None:
    """The answer says that it is the last, after ten seconds however large a body may be, and the connection ends."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=30) as connection:
        connection.sendall(head(BODY, **more) + begun)
        answer = b""
        while b"408" not in answer:
            answer += connection.recv(4096)
        assert time.monotonic() - started < 18
        assert b"connection: close" in answer.lower()
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            while part := connection.recv(4096):
                answer += part
        assert answer.count(b"HTTP/1.1 200") == 0


def test_a_body_that_nobody_wants_and_that_does_not_come_holds_no_thread(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    """Beside more of them than threads another request is answered soon."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="1").start()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20))
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n")
        assert api.request("GET", "/healthz", timeout_s=8).status == 200


def test_a_worker_whose_master_was_killed_ends_whoever_asks(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """A client that makes no pause is told that the answer is the last one."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start()
    [worker] = api.worker_pids
    client = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    for n in range(3):
        client.request("GET", "/healthz")
        assert client.getresponse().read(), n
    os.kill(api.pid, signal.SIGKILL)
    while True:
        client.request("GET", "/healthz")
        answer = client.getresponse()
        answer.read()
        if answer.getheader("Connection") == "close":
            break
    wait_until(lambda: not is_there(worker), 15, what="the end of the worker")


def is_there(pid: int) -> bool:
    """Whether a process has not ended; who was to ask how it did may be gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
