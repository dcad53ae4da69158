"""Ports behind which nobody answers, each in a way of its own."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections (the kernel does) and never says a word: no TLS handshake, no answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that nobody listens on: connections are refused. It stays bound, so that nobody else gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def black_hole_port() -> Iterator[int]:
    """A port whose queue of connections is full: further SYNs are dropped, so that connecting never ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
