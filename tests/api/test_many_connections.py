"""More connections than the API can have: those that do nothing make room, and no process ends for want of files."""

import contextlib
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.api.serving import Api, event
from tests.system.harness import wait_until

#: Files that the API may have open.
FILES = 256


@contextlib.contextmanager
def connections(api: Api, number: int, said: bytes = b"") -> Iterator[None]:
    """So many, each of which has been answered before the next one comes if `said` is a request."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20))
            connection.sendall(said)
            assert not said or connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        yield


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["nothing", "one request"])
def test_idle_connections_keep_nobody_out(serve: Callable[..., Api], database_url: str, redis_url: str, said: bytes) -> None:
    """Twice as many as there may be files: probes and posts are answered at once, by the same process."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start(files=FILES)
    before = api.worker_pids
    with connections(api, FILES * 2, said):
        assert api.request("GET", "/healthz", timeout_s=8).status == 200
        assert api.post(event("in")).status == 202
    assert api.worker_pids == before


def test_a_process_that_gets_no_more_files_goes_on(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """It says so, and takes connections again when there is room."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start()
    before = [pid] = api.worker_pids
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))
    with connections(api, 100):
        wait_until(lambda: "http.not_accepted" in api.log.read_text())
    assert api.request("GET", "/healthz", timeout_s=10).status == 200
    assert api.worker_pids == before


def test_a_request_that_comes_while_room_is_made_ends_no_process(
    serve: Callable[..., Api], database_url: str, redis_url: str
) -> None:
    """The connection that has been idle for longest speaks at the moment in which there are no files for a new one."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="4").start()
    before = [pid] = api.worker_pids
    said = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20)) for _ in range(10)]
        for connection in kept:
            connection.sendall(said)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        os.kill(pid, signal.SIGSTOP)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (10, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
        stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20))
        for connection in kept:
            connection.sendall(said)
        os.kill(pid, signal.SIGCONT)
        for connection in kept:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert api.worker_pids == before
