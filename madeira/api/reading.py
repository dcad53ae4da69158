"""Reading a request's body: bounded before it is read, and in time.

A body's announced length is checked first; a chunked one is read up to the limit and no further. The time for the whole body
is bounded too, so that a sender cannot keep a thread by sending a byte now and then.
"""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

from madeira import strict_json
from madeira.api.problems import Problem
from madeira.strict_json import Document, NotStrictJson

#: Seconds that any sender gets for a head or a body, whatever its size.
PATIENCE_S: Final = 10.0

#: Bytes a second that a sender must keep up beyond that.
RATE: Final = 16_000

#: Bytes of a body of unknown length that are waited for at a time: who sends nothing more is given up by what has come so far.
_PIECE: Final = 65_536

#: Seconds between two looks for senders whose time is up.
_LOOK_S: Final = 0.25

#: Looks in a row without any read after which the watch sleeps until there is one: under load it never does, since being woken
#: by every request costs a quarter of what accepting an event takes.
_IDLE_LOOKS: Final = 20

#: Media type of a request body.
JSON: Final = "application/json"


def json_only(environ: Mapping[str, Any]) -> None:
    """Let only JSON in UTF-8 pass.

    Raises:
        Problem: 415, for another media type, another charset, or a compressed body.
    """
    only(environ, JSON)


def only(environ: Mapping[str, Any], media_type: str) -> None:
    """Let only `media_type` in UTF-8 pass.

    Raises:
        Problem: 415, for another media type, another charset, or a compressed body.
    """
    given = environ.get("CONTENT_TYPE", "")
    if given != media_type and not _is(given, media_type):
        raise Problem(415, f"Content-Type must be {media_type} (in UTF-8)", headers={"Accept": media_type})
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
            _close_after(environ)
            raise Problem(400, f"the body ended after {len(raw)} of {length} announced bytes")
        return raw
    if "HTTP_TRANSFER_ENCODING" not in environ:
        return b""
    raw = _in_pieces(environ, limit + 1)
    if len(raw) > limit:
        raise _too_large(limit)
    return raw


def json_if_any(environ: Mapping[str, Any], *, limit: int) -> bytes:
    """The whole body, at most `limit` bytes, where there may be none; what there is must be said to be JSON in UTF-8.

    Raises:
        Problem: 400, 408, 413 or 415.
    """
    raw = body(environ, limit=limit)
    if raw:
        json_only(environ)
    return raw


def parsed(raw: bytes) -> Document | None:
    """The JSON object in `raw`; None when it is another value.

    Raises:
        Problem: 400, it is not strict JSON.
    """
    try:
        return strict_json.parse(raw)
    except NotStrictJson as e:
        raise Problem(400, f"the body is not strict JSON: {e}", name="not-strict-json") from None


def _length(announced: str, limit: int) -> int:
    if not announced.isascii() or not announced.isdigit():
        raise Problem(400, "Content-Length must be a number")
    # Compared by digits first: an absurdly long number is not worth converting.
    if len(announced.lstrip("0")) > len(str(limit)) or int(announced) > limit:
        raise _too_large(limit)
    return int(announced)


def allowed_s(size: int) -> float:
    """Seconds that a sender may take for `size` bytes."""
    return PATIENCE_S + size / RATE


def _in_pieces(environ: Mapping[str, Any], most: int) -> bytes:
    raw = bytearray()
    began = time.monotonic()
    while (size := min(_PIECE, most - len(raw))) > 0:
        piece = _read(environ, size, began=began, before=len(raw))
        raw += piece
        if len(piece) < size:
            break
    return bytes(raw)


def _read(environ: Mapping[str, Any], size: int, *, began: float | None = None, before: int = 0) -> bytes:
    """`size` bytes of a body, or all that is left of it, after the `before` that have come since `began`."""
    limit_s = allowed_s(before + size)
    deadline = (time.monotonic() if began is None else began) + limit_s
    try:
        with _ended_at(deadline, environ.get("gunicorn.socket")):
            raw: bytes = environ["wsgi.input"].read(size)
    # What a server raises for malformed chunks or a lost connection is its own business; none of it is an event.
    except Exception:  # noqa: BLE001
        _close_after(environ)
        if time.monotonic() >= deadline:
            raise _too_slow(limit_s) from None
        raise Problem(400, "the body could not be read: it is malformed or was cut off") from None
    if len(raw) < size and time.monotonic() >= deadline:
        _close_after(environ)
        raise _too_slow(limit_s)
    return raw


def _close_after(environ: Mapping[str, Any]) -> None:
    """Have the connection closed after the answer: what still comes of this body would be taken for the next request."""
    message = getattr(environ["wsgi.input"], "message", None)
    if message is not None:
        message.must_close = True


class _Watch:
    """Ends reads whose time is up by closing their connection for reading.

    A timeout of the socket would begin anew with every byte.
    """

    def __init__(self) -> None:
        # Made at the first use: not even one that never ran survives a fork.
        self._thread: threading.Thread | None = None
        self._some = threading.Condition()
        self._reads: dict[int, tuple[float, socket.socket]] = {}
        self._sleeps = False

    def add(self, deadline: float, connection: socket.socket) -> None:
        with self._some:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="madeira-slow-senders", daemon=True)
                self._thread.start()
            self._reads[id(connection)] = (deadline, connection)
            if self._sleeps:
                self._some.notify()

    def remove(self, connection: socket.socket) -> None:
        with self._some:
            del self._reads[id(connection)]

    def _run(self) -> None:
        idle = 0
        while True:
            with self._some:
                idle = 0 if self._reads else idle + 1
                if idle > _IDLE_LOOKS:
                    self._sleeps = True
                    self._some.wait()
                    self._sleeps = False
                    idle = 0
                now = time.monotonic()
                for deadline, connection in self._reads.values():
                    if deadline <= now:
                        _end(connection)
            time.sleep(_LOOK_S)


def _end(connection: socket.socket) -> None:
    # The sender may have gone at this very moment.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


_watch: Final = _Watch()


@contextmanager
def _ended_at(deadline: float, connection: socket.socket | None) -> Iterator[None]:
    if connection is None:
        yield
        return
    _watch.add(deadline, connection)
    try:
        yield
    finally:
        _watch.remove(connection)


def _too_slow(limit_s: float) -> Problem:
    return Problem(408, f"the body did not come within {limit_s:.0f} seconds")


def _too_large(limit: int) -> Problem:
    return Problem(413, f"the body is larger than {limit} bytes")


def _is(content_type: str, wanted: str) -> bool:
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    return media_type == wanted and all(p in ("", "charset=utf-8", 'charset="utf-8"') for p in parameters)
