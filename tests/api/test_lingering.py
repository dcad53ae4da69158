"""Whoever posts one request after the other keeps its thread in between, but not from anybody else."""

import http.client
import io
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from madeira.api import server
from tests.api.serving import Api

THREADS = 4


class Scripted(server.Worker):
    """A worker of four threads without a process; its requests are answered as `results` say."""

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(is_ssl=False, threads=THREADS)
        self.alive = True
        self._in_hand = 1
        self._parked = deque()
        self.results: list[Any] = []
        self.handled = 0
        #: What the client does when it has been answered.
        self.answered: Callable[[], object] = lambda: None

    def _handle(self, conn: Any) -> Any:
        self.handled += 1
        if conn.parser is None:
            conn.sock.recv(1)
        self.answered()
        return self.results.pop(0)


@pytest.fixture
def worker() -> Scripted:
    return Scripted()


@pytest.fixture
def ends() -> Iterator[tuple[SimpleNamespace, socket.socket]]:
    """A connection that was answered just now, and its client, whose next request has arrived."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"1")
        yield SimpleNamespace(sock=ours, parser=None, answered=float("inf"), has_turn=False), theirs


Ends = tuple[SimpleNamespace, socket.socket]


def test_requests_that_follow_closely_are_served_by_the_thread_that_is_there(worker: Scripted, ends: Ends) -> None:
    conn, client = ends
    worker.answered = lambda: client.send(b"2")
    worker.results = [True, True, False]
    assert worker.handle(conn) is False
    assert worker.handled == 3


def test_a_request_that_was_read_ahead_follows_closely(worker: Scripted, ends: Ends) -> None:
    """It does not make the socket readable any more."""
    conn, _ = ends
    conn.sock.recv(1)
    conn.parser = SimpleNamespace(unreader=SimpleNamespace(buf=io.BytesIO(b"2")))
    worker.results = [True, False]
    assert worker.handle(conn) is False
    assert worker.handled == 2


def test_the_thread_is_free_when_nothing_follows_in_a_moment(worker: Scripted, ends: Ends) -> None:
    conn, _ = ends
    worker.results = [True]
    assert worker.handle(conn) is True
    assert worker.handled == 1


@pytest.mark.parametrize("reason", ["busy", "stopping", "not quick", "new", "encrypted", "others wait for bodies"])
def test_nobody_is_waited_for_when_it_may_cost_somebody_else(worker: Scripted, ends: Ends, reason: str) -> None:
    """The next request, which is there already, waits for its turn like everybody's."""
    conn, client = ends
    worker.answered = lambda: client.send(b"2")
    worker.results = [True]
    if reason == "busy":
        worker._in_hand = THREADS
    elif reason == "stopping":
        worker.alive = False
    elif reason == "not quick":
        conn.answered = 0.0
    elif reason == "new":
        del conn.answered
    elif reason == "others wait for bodies":
        conn.has_turn = True
        worker._parked.append(SimpleNamespace())
    else:
        worker.cfg.is_ssl = True
    assert worker.handle(conn) is True
    assert worker.handled == 1


def test_many_who_post_without_a_pause_hold_up_neither_others_nor_a_stop(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    """As many as there are threads, and more; who comes beside them is answered at once, and a stop is over soon."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS=str(THREADS)).start()
    stopped = threading.Event()
    answered = threading.Semaphore(0)

    def hammer() -> None:
        client = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
        while not stopped.is_set():
            try:
                client.request("GET", "/healthz")
                client.getresponse().read()
            except (OSError, http.client.HTTPException):
                return
            answered.release()

    with ExitStack() as stack:
        stack.callback(stopped.set)
        for _ in range(2 * THREADS):
            thread = threading.Thread(target=hammer)
            thread.start()
            stack.callback(thread.join)
            assert answered.acquire(timeout=10)
            assert api.request("GET", "/healthz", timeout_s=5).status == 200
        os.kill(api.pid, signal.SIGTERM)
        assert api.wait() == 0
