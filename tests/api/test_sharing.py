"""How the processes of the API share the connections."""

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from madeira.api import server
from madeira.api.sharing import Shares, Turn
from tests.api.serving import Api
from tests.system.harness import wait_until

#: Connections that are kept, as many at once as an upstream's pool opens.
MANY = 32


@contextlib.contextmanager
def kept(api: Api, number: int) -> Iterator[list[int]]:
    """So many connections that come at once, have been answered and are kept: how many each process has of them, oldest first."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=20)) for _ in range(number)]
        for connection in found:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        for connection in found:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        ports = {f"{connection.getsockname()[1]:04X}" for connection in found}
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        inodes = {f"socket:[{line[9]}]" for line in lines if line[2].rpartition(":")[2] in ports}
        yield [sum(link in inodes for link in links(pid)) for pid in api.worker_pids]


def links(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield os.readlink(entry)


def stands_still(pid: int) -> bool:
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in Path(f"/proc/{pid}/task").glob("*/stat"))


def all_serve(api: Api, processes: int) -> bool:
    with kept(api, processes * 2) as shares:
        return len(shares) == processes and all(shares)


@pytest.mark.parametrize("processes", [2, 3])
def test_connections_are_shared_evenly(serve: Callable[..., Api], database_url: str, redis_url: str, processes: int) -> None:
    """Each process has its part of those that come at once; also after one was killed, whose place a new one takes."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES=str(processes)).start()
    wait_until(lambda: all_serve(api, processes), what="connections in all processes")
    with kept(api, MANY) as shares:
        assert sum(shares) == MANY
        assert min(shares) >= MANY // processes // 2, shares
        killed = api.worker_pids[0]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: killed not in api.worker_pids and len(api.worker_pids) == processes, what="a new process")
        with kept(api, MANY) as more:
            assert sum(more) == MANY


def test_nobody_waits_for_a_process_that_stands_still(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """One that has fewer connections and takes none: the other one takes them all, and hardly later."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="2").start()
    wait_until(lambda: all_serve(api, 2), what="connections in both processes")
    frozen = api.worker_pids[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        wait_until(lambda: stands_still(frozen), what="a process that stands still")
        began = time.monotonic()
        with kept(api, MANY) as shares:
            assert time.monotonic() - began < 10
            assert shares == [0, MANY]
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_a_process_leaves_connections_to_one_that_has_two_fewer() -> None:
    """And no longer than that is so."""
    shares = Shares()
    ours = Turn(shares)
    shares.tell(1, 7)
    shares.tell(2, 6)
    assert not ours.leaves(7)
    shares.tell(2, 5)
    assert ours.leaves(7)
    assert ours.left_s(7) > 0
    shares.tell(2, 6)
    assert ours.left_s(7) == 0


def test_one_that_stands_still_is_waited_for_once() -> None:
    """Until it looks again; one that has ended is waited for never."""
    shares = Shares()
    ours = Turn(shares)
    shares.tell(1, 0)
    shares.tell(2, 0)
    assert ours.leaves(9)
    shares.tell(2, 9)
    wait_until(lambda: ours.left_s(9) <= 0)
    assert not ours.leaves(9)
    shares.tell(1, 0)
    assert ours.leaves(9)
    shares.end(1)
    assert ours.left_s(9) == 0
    assert not ours.leaves(9)


def test_nothing_is_left_to_a_process_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks, for what it has already, and takes none."""

    class Looking(server.Worker):
        """A worker without a process or connections."""

        def __init__(self) -> None:
            self.alive, self.age, self.nr_conns = True, 1, 0
            self.poller = selectors.DefaultSelector()
            self._turn = Turn(shares)
            self._exhausted_until = 0.0

    shares = Shares()
    monkeypatch.setattr(server, "shares", shares)
    with contextlib.closing((worker := Looking()).poller):
        worker.wait_for_and_dispatch_events(0)
        assert shares.behind(9)
        worker._exhausted_until = time.monotonic() + 0.1
        worker.wait_for_and_dispatch_events(0)
        assert not shares.behind(9)
        wait_until(lambda: worker._exhausted_until < time.monotonic())
        worker.wait_for_and_dispatch_events(0)
        assert shares.behind(9)
