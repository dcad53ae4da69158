"""Reading a request's body: bounded before it is read, and in time.

A body's announced length is checked first; a chunked one is read up to the limit and no further. A sender that stalls is
given up, so that it cannot keep a thread.
"""

import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from madeira.api.problems import Problem

#: Seconds without a byte after which a sender is given up.
STALL_S: Final = 10

_STALL: Final = struct.pack("ll", STALL_S, 0)
_FOREVER: Final = struct.pack("ll", 0, 0)

#: Media type of a request body.
JSON: Final = "application/json"


def json_only(environ: Mapping[str, Any]) -> None:
    """Let only JSON in UTF-8 pass.

    Raises:
        Problem: 415, for another media type, another charset, or a compressed body.
    """
    given = environ.get("CONTENT_TYPE", "")
    if given != JSON and not _is_json(given):
        raise Problem(415, f"Content-Type must be {JSON} (in UTF-8)", headers={"Accept": JSON})
    if environ.get("HTTP_CONTENT_ENCODING", "identity").strip().lower() not in ("", "identity"):
        raise Problem(415, "Content-Encoding is not supported: send the body as it is", headers={"Accept-Encoding": "identity"})


def body(environ: Mapping[str, Any], *, limit: int) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises:
        Problem: 400, 408 or 413.
    """
    announced = environ.get("CONTENT_LENGTH")
    if announced:
        length = _length(announced, limit)
        raw = _read(environ, length) if length else b""
        if len(raw) < length:
            raise Problem(400, f"the body ended after {len(raw)} of {length} announced bytes")
        return raw
    if "HTTP_TRANSFER_ENCODING" not in environ:
        return b""
    raw = _read(environ, limit + 1)
    if len(raw) > limit:
        raise _too_large(limit)
    return raw


def _length(announced: str, limit: int) -> int:
    if not announced.isascii() or not announced.isdigit():
        raise Problem(400, "Content-Length must be a number")
    # Compared by digits first: an absurdly long number is not worth converting.
    if len(announced.lstrip("0")) > len(str(limit)) or int(announced) > limit:
        raise _too_large(limit)
    return int(announced)


def _read(environ: Mapping[str, Any], size: int) -> bytes:
    try:
        with _hurried(environ.get("gunicorn.socket")):
            raw: bytes = environ["wsgi.input"].read(size)
    except BlockingIOError:
        raise Problem(408, f"no byte of the body came for {STALL_S} seconds") from None
    # What a server raises for malformed chunks or a lost connection is its own business; none of it is an event.
    except Exception:  # noqa: BLE001
        raise Problem(400, "the body could not be read: it is malformed or was cut off") from None
    return raw


@contextmanager
def _hurried(connection: socket.socket | None) -> Iterator[None]:
    """Let the kernel end a read that waits too long: Python's own timeout would cost a poll before each send and receive."""
    if connection is None:
        yield
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _STALL)
    try:
        yield
    finally:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _FOREVER)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit} bytes")


def _is_json(content_type: str) -> bool:
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return media_type == JSON and all(p in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters)
