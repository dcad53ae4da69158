"""HTTP/1.1 as far as a webhook needs it: one request out as bytes, one bounded answer in.

Pure protocol: bytes come from a function that is handed in, which knows about sockets and deadlines. Whatever a receiver
sends, the outcome is a `Reply` or a `CallFailed`, and memory is bounded: 64 KiB of header section, a few interim answers,
`answer.MAX_BODY` bytes of body.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from madeira import digits
from madeira.delivery.answer import MAX_BODY, CallFailed
from madeira.states import ErrorCode

#: Bytes of a header section, at most.
MAX_HEAD: Final = 65_536

#: Header lines in a header section, at most.
MAX_HEADERS: Final = 256

#: Interim answers (1xx) before the final one, at most.
MAX_INTERIM: Final = 16

#: Bytes of a line that gives the size of a chunk, at most.
_MAX_CHUNK_LINE: Final = 1024

#: Gives the next bytes of the connection, b"" at its end; raises `CallFailed`.
Receive = Callable[[], bytes]

_END_OF_HEAD: Final = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE: Final = re.compile(r"HTTP/1\.([01]) ([0-9]{3})(?: .*)?")
_CHUNK_SIZE: Final = re.compile(rb"[0-9a-fA-F]{1,16}")
_NO_BODY: Final = frozenset({204, 205, 304})


@dataclass(frozen=True, slots=True)
class Head:
    """The status line and the headers of an answer."""

    status: int
    headers: dict[str, str]
    #: Whether the connection may be used again, as far as the head says.
    keep_alive: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer read from a connection, its body decompressed."""

    status: int
    headers: dict[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    #: Whether there was more of the body than was read.
    truncated: bool
    #: Whether the connection stands at the beginning of the next answer.
    reusable: bool


def request_bytes(method: str, path: str, authority: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A whole request as it goes on the wire.

    Raises:
        CallFailed: ``platform``, when something in it holds a line break: it is never sent split.
    """
    lines = [f"{method} {path} HTTP/1.1\r\nHost: {authority}".encode()]
    lines += [b"%b: %b" % header for header in headers]
    lines.append(b"Content-Length: %d\r\n\r\n" % len(body))
    head = b"\r\n".join(lines)
    expected = len(lines) + 2
    if head.count(b"\n") != expected or head.count(b"\r") != expected:
        raise CallFailed(ErrorCode.PLATFORM, "a header of the request holds a line break")
    return head + body


def read_reply(receive: Receive, *, method: str) -> Reply:
    """Read one answer.

    Raises:
        CallFailed: ``protocol``, ``reset``, or what `receive` raises.
    """
    head, rest = _read_final_head(receive)
    headers = head.headers
    if method == "HEAD" or head.status in _NO_BODY or head.status < 200:
        body, rest, complete = b"", rest, True
    elif "transfer-encoding" in headers:
        body, rest, complete = _read_chunked(receive, rest, headers["transfer-encoding"])
    elif "content-length" in headers:
        body, rest, complete = _read_length(receive, rest, _content_length(headers["content-length"]))
    else:
        body, complete = _read_to_end(receive, rest)
        rest = b"closed"
    truncated = not complete
    if body and "content-encoding" in headers:
        body, cut = _decompress(body, headers["content-encoding"].lower(), complete)
        truncated |= cut
    # 101 hands the connection over to another protocol; bytes beyond the answer belong to no request of ours.
    reusable = head.keep_alive and complete and not rest and head.status != 101
    return Reply(head.status, headers, body, truncated, reusable)


def _read_final_head(receive: Receive) -> tuple[Head, bytes]:
    data = b""
    for _ in range(MAX_INTERIM + 1):
        raw, data = _read_raw_head(receive, data)
        head = _parse_head(raw)
        if not 100 <= head.status < 200 or head.status == 101:
            return head, data
    raise CallFailed(ErrorCode.PROTOCOL, f"more than {MAX_INTERIM} interim answers (1xx) came")


def _read_raw_head(receive: Receive, data: bytes) -> tuple[bytes, bytes]:
    pieces = bytearray(data) if data else bytearray(receive())
    if not pieces:
        raise _ended_early()
    searched = 0
    while True:
        end = _END_OF_HEAD.search(pieces, searched)
        if end is not None and end.start() <= MAX_HEAD:
            return bytes(pieces[: end.start()]), bytes(pieces[end.end() :])
        if len(pieces) > MAX_HEAD:
            raise CallFailed(ErrorCode.PROTOCOL, f"the answer's header section is longer than {MAX_HEAD} bytes")
        searched = max(0, len(pieces) - 3)
        more = receive()
        if not more:
            raise _ended_early()
        pieces += more


def _parse_head(raw: bytes) -> Head:
    # latin-1 maps each byte to one character, so that nothing a receiver sends can fail to decode.
    first, *lines = raw.decode("latin-1").split("\n")
    found = _STATUS_LINE.fullmatch(first.rstrip("\r"))
    if found is None:
        raise CallFailed(ErrorCode.PROTOCOL, "the answer does not begin with an HTTP/1 status line")
    if len(lines) > MAX_HEADERS:
        raise CallFailed(ErrorCode.PROTOCOL, f"the answer has more than {MAX_HEADERS} header lines")
    headers: dict[str, str] = {}
    last = ""
    for line in lines:
        if line[:1] in (" ", "\t") and last:
            headers[last] += " " + line.strip()
            continue
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise CallFailed(ErrorCode.PROTOCOL, "the answer has a malformed header line")
        last, value = name.lower(), value.strip()
        headers[last] = f"{headers[last]}, {value}" if last in headers else value
    connection = headers.get("connection", "").lower()
    keep_alive = "close" not in connection if found[1] == "1" else "keep-alive" in connection
    return Head(int(found[2]), headers, keep_alive)


def _content_length(value: str) -> int:
    lengths = {part.strip() for part in value.split(",")}
    length = digits.plain(lengths.pop(), 18)
    if lengths or length is None:
        raise CallFailed(ErrorCode.PROTOCOL, "the answer's Content-Length is not one number")
    return length


def _read_length(receive: Receive, data: bytes, length: int) -> tuple[bytes, bytes, bool]:
    wanted = min(length, MAX_BODY)
    if len(data) < wanted:
        data = _collect(receive, data, wanted)
    return data[:wanted], data[wanted:], length <= MAX_BODY


def _collect(receive: Receive, data: bytes, wanted: int) -> bytes:
    """At least `wanted` bytes, of which `data` are there already."""
    pieces, size = [data], len(data)
    while size < wanted:
        more = receive()
        if not more:
            raise _ended_early()
        pieces.append(more)
        size += len(more)
    return b"".join(pieces)


def _read_to_end(receive: Receive, data: bytes) -> tuple[bytes, bool]:
    pieces, size = [data], len(data)
    while size <= MAX_BODY:
        more = receive()
        if not more:
            return b"".join(pieces), True
        pieces.append(more)
        size += len(more)
    return b"".join(pieces)[:MAX_BODY], False


def _read_chunked(receive: Receive, data: bytes, encoding: str) -> tuple[bytes, bytes, bool]:
    if encoding.strip().lower() != "chunked":
        raise CallFailed(ErrorCode.PROTOCOL, "the answer has a Transfer-Encoding other than chunked")
    pieces, left = [], MAX_BODY
    while True:
        line, data = _read_line(receive, data)
        size = _chunk_size(line)
        if size == 0:
            break
        if size > left:
            data = _collect(receive, data, left)
            pieces.append(data[:left])
            return b"".join(pieces), b"", False
        if len(data) < size + 2:
            data = _collect(receive, data, size + 2)
        if data[size : size + 2] != b"\r\n":
            raise CallFailed(ErrorCode.PROTOCOL, "a chunk of the answer is longer than it says")
        pieces.append(data[:size])
        left -= size
        data = data[size + 2 :]
    return b"".join(pieces), _skip_trailers(receive, data), True


def _chunk_size(line: bytes) -> int:
    text = line.partition(b";")[0].strip()
    if not _CHUNK_SIZE.fullmatch(text):
        raise CallFailed(ErrorCode.PROTOCOL, "a chunk of the answer has no size")
    return int(text, 16)


def _skip_trailers(receive: Receive, data: bytes) -> bytes:
    for _ in range(MAX_HEADERS):
        line, data = _read_line(receive, data)
        if not line:
            return data
    raise CallFailed(ErrorCode.PROTOCOL, f"the answer has more than {MAX_HEADERS} trailers")


def _read_line(receive: Receive, data: bytes) -> tuple[bytes, bytes]:
    while b"\n" not in data:
        if len(data) > _MAX_CHUNK_LINE:
            raise CallFailed(ErrorCode.PROTOCOL, "a line between the answer's chunks is too long")
        more = receive()
        if not more:
            raise _ended_early()
        data += more
    line, _, rest = data.partition(b"\n")
    return line.rstrip(b"\r"), rest


def _decompress(body: bytes, encoding: str, complete: bool) -> tuple[bytes, bool]:
    """`body` without its compression, and whether that was more than `MAX_BODY`.

    We ask for none (``Accept-Encoding: identity``). What cannot be undone is left as it is: the verdict finds that it is no
    JSON.
    """
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return body, False
    for wbits in (47, -15):  # 47: gzip or zlib, whichever it is; -15: the headless deflate that some send
        unpack = zlib.decompressobj(wbits)
        try:
            plain = unpack.decompress(body, MAX_BODY + 1)
        except zlib.error:
            continue
        if len(plain) > MAX_BODY:
            return plain[:MAX_BODY], True
        return (plain, False) if unpack.eof or not complete else (body, False)
    return body, False


def _ended_early() -> CallFailed:
    return CallFailed(ErrorCode.RESET, "the connection was closed before the answer was complete")
