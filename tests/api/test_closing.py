"""A listening socket that is about to be closed: who is connected is served, nobody else gets a connection."""

import contextlib
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.api import closing

#: Family of the listener, its address, and the address of those who connect.
EACH_FAMILY = pytest.mark.parametrize(
    ("family", "host", "address"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),
    ],
)


@EACH_FAMILY
def test_who_has_connected_is_served_and_who_comes_later_is_refused(
    family: socket.AddressFamily, host: str, address: str
) -> None:
    """The later one does not know before the socket is closed; then it is as if nobody had ever listened."""
    with socket.socket(family) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind((host, 0))
        listener.listen(5)
        port = listener.getsockname()[1]
        with socket.create_connection((address, port), 10) as early:
            closing.refuse_new(listener)
            late = pool.submit(socket.create_connection, (address, port), 10)
            accepted, _ = closing.Admitting(listener).accept()
            with accepted:
                early.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
                accepted.sendall(b"hello")
                assert early.recv(5) == b"hello"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
            listener.close()
            with pytest.raises(ConnectionRefusedError):
                late.result()


@EACH_FAMILY
def test_whoever_knocks_is_served_or_refused_and_nobody_is_cut_off(family: socket.AddressFamily, host: str, address: str) -> None:
    """Four knock as fast as they can; each that gets a connection gets its answer, until all are refused."""
    with socket.socket(family) as listener, ThreadPoolExecutor(4) as pool:
        listener.bind((host, 0))
        listener.listen(100)
        listener.setblocking(False)
        port = listener.getsockname()[1]

        def knock() -> Counter[str]:
            seen: Counter[str] = Counter()
            while not seen["refused"]:
                try:
                    with socket.create_connection((address, port), 10) as s:
                        s.sendall(b"hello")
                        seen["answered" if s.recv(5) == b"hello" else "closed"] += 1
                except ConnectionRefusedError:
                    seen["refused"] += 1
                except ConnectionError:
                    seen["cut off"] += 1
            return seen

        def take() -> None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted, _ = closing.Admitting(listener).accept()
                    accepted.settimeout(10)
                    with accepted:
                        accepted.sendall(accepted.recv(5))

        knocks = [pool.submit(knock) for _ in range(4)]
        for _ in range(1000):
            take()
        closing.refuse_new(listener)
        for _ in range(1000):
            take()
        listener.close()
        seen = sum((k.result() for k in knocks), Counter[str]())
    assert set(seen) == {"answered", "refused"}


def test_a_socket_of_another_kind_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        closing.refuse_new(listener)
