"""What the tests of where calls may go are measured with: every connection and look-up of this process, and names at will."""

import contextlib
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from madeira.delivery.resolve import Resolver

_lock = threading.Lock()
_listening: list["Seen"] = []


class Seen:
    """What the process connected to and looked up, within a `watching` block."""

    def __init__(self) -> None:
        self.connected: list[Any] = []
        self.looked_up: list[str] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _listening or event not in ("socket.connect", "socket.getaddrinfo"):
        return
    with _lock:
        for seen in _listening:
            if event == "socket.connect":
                seen.connected.append(arguments[1])
            else:
                seen.looked_up.append(arguments[0])


# The interpreter itself tells of each: nothing that connects is missed, whoever does it. A hook stays for ever.
sys.addaudithook(_hook)


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    """Everything that this process connects to and looks up within the block."""
    seen = Seen()
    with _lock:
        _listening.append(seen)
    try:
        yield seen
    finally:
        with _lock:
            _listening.remove(seen)


class Names:
    """A name server of the test: the addresses that it gives next, and how often it was asked."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        #: What it gives afterwards, one after the other.
        self.later: deque[Sequence[str]] = deque()
        self.failure: OSError | None = None
        self.asked: list[str] = []
        #: Seconds, for the resolver's freshness; a test turns it on.
        self.now = 0.0
        #: Seconds by which it goes on by itself, each time that it is looked at.
        self.step = 0.0

    def getaddrinfo(self, host: str, port: int, **options: object) -> list[Any]:
        self.asked.append(host)
        if self.failure is not None:
            raise self.failure
        found = [_entry(address, port) for address in self.addresses]
        if self.later:
            self.addresses = self.later.popleft()
        return found

    def resolver(self) -> Resolver:
        """A resolver that asks this name server, by its clock."""
        return Resolver(getaddrinfo=self.getaddrinfo, clock=self._clock)

    def _clock(self) -> float:
        self.now += self.step
        return self.now


def _entry(address: str, port: int) -> tuple[Any, ...]:
    if ":" in address:
        return (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
    return (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
