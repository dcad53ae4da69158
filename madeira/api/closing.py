"""How the API's socket is closed: nobody who has got a connection is cut off.

Closing a listening socket resets what has connected since the last look at its queue. So before the last look the kernel is made
to drop whatever begins a connection (SYN): its sender tries again after a second and is refused by then, as by a port where
nobody listens, which clients and load balancers take for what it is. The means is the least time to live of what the socket
takes (the mechanism of RFC 5082): handshakes that are under way are not held to it, and it asks for no privilege.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, Final

#: Linux's ``IP_MINTTL`` and ``IPV6_MINHOPCOUNT`` (linux/in.h, linux/in6.h): a socket for both families has both.
_LEAST_TTL: Final = ((socket.IPPROTO_IP, 21), (socket.IPPROTO_IPV6, 73))

#: More than what comes from a host that sets nothing else (64 or 128), or from over a router.
_NONE: Final = 255

#: Seconds for handshakes that are under way.
_HANDSHAKE_S: Final = 0.1


def refuse_new(listener: Any) -> None:
    """Let nobody begin a connection to a listening TCP socket, for good and in all processes that share it.

    Who is connected already can be accepted through `Admitting` as before.
    """
    _require(listener, _NONE)


def refuse_new_at_stop(server: Any) -> None:
    """Make gunicorn's master refuse new connections before it closes its sockets and stops its workers.

    Not where the sockets go on without it: another master has them, or systemd.
    """
    stop: Callable[..., None] = server.stop

    def gently(graceful: bool = True) -> None:
        if graceful and server.reexec_pid == server.master_pid == 0 and not server.systemd:
            for listener in server.LISTENERS:
                refuse_new(listener)
            time.sleep(_HANDSHAKE_S)
        stop(graceful)

    server.stop = gently


class Admitting:
    """A listening socket whose accepted connections are free of what `refuse_new` asks of the listener, and passes on to them."""

    def __init__(self, listener: Any) -> None:
        self._listener = listener

    def accept(self) -> tuple[socket.socket, Any]:
        """As of a socket."""
        connection, address = self._listener.accept()
        _require(connection, 0)
        return connection, address

    def getsockname(self) -> Any:
        """As of a socket."""
        return self._listener.getsockname()


def _require(sock: Any, ttl: int) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for level, option in _LEAST_TTL:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, ttl)
