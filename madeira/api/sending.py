"""Sending an answer without waiting for whoever reads it.

A send that waits for the client holds its thread until there is room again, for ever if the client does not read. So what an
answer consists of is collected, head and body in one packet, and given to the kernel as far as it takes it; the rest of it is
the poller's, like a request that has not arrived. Only an answer that is too large to be kept waits in its thread, and only as
long as a slow sender might.
"""

import errno
import select
import socket
import struct
import time
from typing import Any, Final

from madeira.api import reading

#: Bytes of an answer that are collected before some are sent.
_PIECE: Final = 65_536

#: Bytes of an answer that are kept for a client which has not taken them; what makes more of them waits meanwhile.
_KEPT_MAX: Final = 1_048_576

#: A close with these gives up what has not been sent.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Outgoing:
    """The socket of a connection, for one answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._kept = bytearray()
        self._began = time.monotonic()
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        """Be the socket in everything else."""
        return getattr(self._sock, name)

    def sendall(self, data: bytes) -> None:
        """Take `data`, and send what there is when it is worth it.

        Raises:
            OSError: the client has gone, or has not read in time.
        """
        self._kept += data
        self._size += len(data)
        if len(self._kept) < _PIECE:
            return
        self._push()
        while len(self._kept) > _KEPT_MAX:
            self._wait()
            self._push()

    def send(self, data: bytes) -> int:
        """Send `data` (that a body is waited for) now, or with what follows.

        Raises:
            OSError: the client has gone.
        """
        self._kept += data
        self._push()
        return len(data)

    def shutdown(self, how: int) -> None:
        """Be the socket where its client is read no further; that the answer ended in the middle is not for gunicorn to hide."""
        if how != socket.SHUT_RD:
            raise OSError(errno.ENOTSUP, "whoever has the connection ends it")
        self._sock.shutdown(how)

    def close(self) -> None:
        """Leave the connection to whoever has it."""

    @property
    def has_begun(self) -> bool:
        """Whether the client may have got some of the answer."""
        return self._size > len(self._kept)

    def finish(self) -> bytearray:
        """Send what is left; what the kernel does not take of it.

        Raises:
            OSError: the client has gone.
        """
        self._push()
        return self._kept

    def _push(self) -> None:
        push(self._sock, self._kept)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        left_s = self._began + reading.allowed_s(self._size) - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            give_up(self._sock)
            raise ConnectionResetError(errno.ECONNRESET, "the client did not read the answer in time")


def push(sock: socket.socket, kept: bytearray) -> None:
    """Send of `kept` what the kernel takes now, and drop that from it.

    Raises:
        OSError: the client has gone.
    """
    while kept:
        try:
            sent = sock.send(kept, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        del kept[:sent]


def give_up(sock: socket.socket) -> None:
    """Have the kernel forget at the close what it has taken and the client has not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def break_off(sock: socket.socket) -> None:
    """Reset a connection: whoever reads up to its end, as HTTP/1.0 has it, is not to take what there is for the whole."""
    give_up(sock)
    sock.close()
