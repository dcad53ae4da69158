"""How far a request has come, as seen without reading it."""

import re
import socket
from typing import Any, Final, NamedTuple

from madeira.api import app, batch

#: Bytes of a request that wait in the kernel for the rest of it; a head must be smaller, of a larger body the rest is read by
#: a thread.
WAITING_MAX: Final = 65_536

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*0*([0-9]{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)

#: A body that is not simply to be waited for: its sender waits for a word first, or it is in chunks.
_NOT_PLAIN: Final = re.compile(rb"\r\n(expect|transfer-encoding)[ \t]*:", re.IGNORECASE)

#: How a chunk begins, as nearly all senders have it; of another one it is seen as it is read.
_CHUNK: Final = re.compile(rb"([0-9a-f]{1,8})\r\n", re.IGNORECASE)

#: The one kind of request whose body may be larger than an event's.
_BATCH: Final = b"POST /v1/events/batch"

#: The state of a connection that neither side has closed (Linux's ``tcpi_state``).
_ESTABLISHED: Final = 1


class Arrival(NamedTuple):
    """How many bytes of a request have come, how many it takes before it is served, and whether nothing is missing then."""

    come: int
    needed: int
    is_whole: bool


#: A request that is served as it is.
_AT_ONCE: Final = Arrival(0, 0, is_whole=True)


def of(conn: Any) -> Arrival:
    """How far the next request of a connection, whose socket does not block, has come.

    Raises:
        OSError: the connection is broken.
    """
    is_closed = False
    try:
        waiting = conn.sock.recv(WAITING_MAX + 1, socket.MSG_PEEK)
        is_closed = not waiting
    except BlockingIOError:
        waiting = b""
    if is_closed or conn.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        # The sender has closed: whatever has come is all that there is.
        return _AT_ONCE
    data = held(conn) + waiting
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return Arrival(len(data), WAITING_MAX + 1, is_whole=False)
    if kinds := {kind.lower() for kind in _NOT_PLAIN.findall(data, 0, end + 2)}:
        return Arrival(0, 0, is_whole=b"expect" not in kinds and _has_last_chunk(data, end + 4))
    lengths = _LENGTH.findall(data, 0, end + 2)
    if len(lengths) != 1:
        return _AT_ONCE
    if int(lengths[0]) > _limit(data):
        # It is refused by its head, at once; unless it is a batch whose address is written otherwise, which is read.
        return Arrival(0, 0, is_whole=False)
    size = end + 4 + int(lengths[0])
    return Arrival(min(len(data), WAITING_MAX), min(size, WAITING_MAX), is_whole=len(data) >= size)


def has_begun(sock: socket.socket) -> bool:
    """Whether some of a request is there, on a connection that was idle."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


def held(conn: Any) -> bytes:
    """What was read of this request already, behind the one before."""
    return conn.parser.unreader.buf.getvalue() if conn.parser is not None else b""


def _has_last_chunk(data: bytes, at: int) -> bool:
    """Whether the body in chunks that begins `at` a place in `data` ends there, too."""
    while chunk := _CHUNK.match(data, at):
        size = int(chunk[1], 16)
        if size == 0:
            return data.startswith(b"\r\n", chunk.end())
        at = chunk.end() + size + len(b"\r\n")
    return False


def _limit(data: bytes) -> int:
    """Bytes that the body of the request that begins with `data` may have, unless it is written in an uncommon way."""
    return batch.MAX_BYTES if data.startswith(_BATCH) else int(app.settings.max_body)
