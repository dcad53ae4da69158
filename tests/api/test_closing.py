"""A listening socket that is about to be closed: who is connected is served, nobody else gets a connection."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.api import closing


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_has_connected_is_served_and_who_comes_later_is_refused(family: socket.AddressFamily, host: str) -> None:
    """The later one does not know before the socket is closed; then it is as if nobody had ever listened."""
    with socket.socket(family) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind((host, 0))
        listener.listen(5)
        address = listener.getsockname()[:2]
        with socket.create_connection(address) as early:
            assert closing.refuse_new(listener)
            late = pool.submit(socket.create_connection, address, 10)
            accepted, _ = listener.accept()
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


def test_a_socket_of_another_kind_is_left_alone() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        assert not closing.refuse_new(listener)
