"""HTTP/1.1 as bytes: what is read from a receiver, however it is cut into pieces."""

import gzip
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.delivery import wire
from madeira.delivery.answer import MAX_BODY, CallFailed
from madeira.delivery.wire import Reply
from madeira.states import ErrorCode


def read(pieces: Iterable[bytes], method: str = "POST") -> Reply:
    """Read an answer that comes in these pieces and then ends."""
    coming = iter([piece for piece in pieces if piece])
    return wire.read_reply(lambda: next(coming, b""), method=method)


def failed(*pieces: bytes) -> tuple[ErrorCode, str]:
    with pytest.raises(CallFailed) as caught:
        read(pieces)
    return caught.value.error_code, caught.value.reason


GOOD = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok": (200, b"ok", True),
    b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok": (200, b"ok", True),
    b"HTTP/1.1 200 \r\ncontent-length:2\r\n\r\nok": (200, b"ok", True),
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok": (200, b"ok", True),
    b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok": (200, b"ok", True),
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n": (200, b"", True),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b"", True),
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 100\r\n\r\n": (304, b"", True),
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok": (200, b"ok", False),
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 smuggled": (200, b"ok", False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok": (200, b"ok", False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\nConnection: Keep-Alive\r\n\r\nok": (200, b"ok", True),
    b"HTTP/1.1 200 OK\r\n\r\nto the end": (200, b"to the end", False),
    b"HTTP/1.1 200 OK\r\n\r\n": (200, b"", False),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n": (200, b"ok", True),
    b"HTTP/1.1 200 O\r\nTransfer-Encoding: Chunked\r\nContent-Length: 9\r\n\r\n2;\r\nok\r\na\r\n01234567\r\n\r\n0\r\nX:\n\r\n": (
        200,
        b"ok01234567\r\n",
        True,
    ),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok": (
        201,
        b"ok",
        True,
    ),
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nwhatever": (101, b"", False),
    b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\nok": (600, b"ok", True),
    b"HTTP/1.1 099 Odder\r\nContent-Length: 0\r\n\r\n": (99, b"", True),
}


@pytest.mark.parametrize("raw", GOOD, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_an_answer_is_read_however_it_is_cut(raw, size):
    """Status, body, and whether the connection may be used again."""
    reply = read(raw[at : at + size] for at in range(0, len(raw), size))
    status, body, reusable = GOOD[raw]
    assert (reply.status, reply.body, reply.truncated) == (status, body, False)
    if not (raw.endswith(b"smuggled") and size < 10_000):  # bytes that come later are found when it is taken from the pool
        assert reply.reusable == reusable


def test_the_body_of_an_answer_to_head_is_not_waited_for():
    """Its Content-Length is that of another answer."""
    assert read([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"], method="HEAD").reusable


def test_headers_are_joined_and_folded():
    """Names in lower case, repeated ones joined, folded lines unfolded, any byte taken."""
    reply = read([b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nX-B: a\r\n  b\r\nX-C: \xff\r\nX-D:\r\nContent-Length: 0\r\n\r\n"])
    assert reply.headers == {"x-a": "1, 2", "x-b": "a b", "x-c": "\xff", "x-d": "", "content-length": "0"}


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"<html>\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 +20 OK\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: first\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2;" + b"x" * 9000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 300,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_what_is_not_http_is_a_protocol_error(raw):
    """Whether it comes in one piece or in many; the reason is one line and none of the receiver's bytes."""
    for size in (9, 100_000):
        code, reason = failed(*(raw[at : at + size] for at in range(0, len(raw), size)))
        assert code is ErrorCode.PROTOCOL
        assert reason.isprintable()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
    ],
    ids=repr,
)
def test_an_answer_that_ends_early_is_a_reset(raw):
    """A truncated answer is no answer: its beginning might look like a success."""
    assert failed(raw)[0] is ErrorCode.RESET


def read_or_refused(raw: bytes) -> Reply | ErrorCode:
    try:
        return read([raw])
    except CallFailed as e:
        return e.error_code


@given(st.sampled_from(sorted(GOOD)), st.data())
def test_any_beginning_of_an_answer_is_read_or_refused(raw, data):
    """Cut anywhere, it ends in a reply or in CallFailed."""
    result = read_or_refused(raw[: data.draw(st.integers(0, len(raw)))])
    assert isinstance(result, Reply) or result in (ErrorCode.RESET, ErrorCode.PROTOCOL)


@given(st.binary(max_size=300) | st.binary(max_size=300).map(b"HTTP/1.1 200 OK\r\n".__add__))
def test_any_bytes_are_read_or_refused(raw):
    """Nothing that a receiver sends raises anything else."""
    result = read_or_refused(raw)
    assert isinstance(result, Reply) or result in (ErrorCode.RESET, ErrorCode.PROTOCOL)


def framed(body: bytes, how: str, headers: bytes = b"") -> list[bytes]:
    """An answer with `body` in one of the three framings, in pieces of 10,000 bytes."""
    head = b"HTTP/1.1 200 OK\r\n" + headers
    if how == "length":
        raw = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    elif how == "chunked":
        pieces = (body[at : at + 5000] for at in range(0, len(body), 5000))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        raw = head + b"\r\n" + body
    return [raw[at : at + 10_000] for at in range(0, len(raw), 10_000)]


@pytest.mark.parametrize("how", ["length", "chunked", "close"])
def test_the_body_is_bounded(how):
    """64 KiB are read and no more, and the connection is not used again."""
    whole = read(framed(b"x" * MAX_BODY, how))
    assert (len(whole.body), whole.truncated) == (MAX_BODY, False)
    pieces = iter(framed(b"x" * 10_000_000, how))
    reply = wire.read_reply(lambda: next(pieces, b""), method="POST")
    assert (len(reply.body), reply.truncated, reply.reusable) == (MAX_BODY, True, False)
    assert len(list(pieces)) > 900, "the rest must stay unread"


@pytest.mark.parametrize("how", ["length", "chunked", "close"])
@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "deflate", "raw deflate"])
def test_a_compressed_body_is_unpacked(how, encoding):
    """We ask for none, but some compress all the same."""
    plain = b'{"success": true}'
    if "gzip" in encoding.lower():
        body = gzip.compress(plain, mtime=0)
    elif encoding == "deflate":
        body = zlib.compress(plain)
    else:
        body = zlib.compress(plain, wbits=-15)
    reply = read(framed(body, how, b"Content-Encoding: %b\r\n" % encoding.split()[-1].encode()))
    assert (reply.body, reply.truncated) == (plain, False)


@pytest.mark.parametrize("how", ["length", "chunked", "close"])
def test_a_bomb_is_not_unpacked(how):
    """100 MB in 100 KB, and 50 MB in less than 64 KiB: at most 64 KiB come out."""
    for size in (100_000_000, 50_000_000):
        reply = read(framed(gzip.compress(b" " * size, mtime=0), how, b"Content-Encoding: gzip\r\n"))
        assert len(reply.body) <= MAX_BODY
        assert reply.truncated


@pytest.mark.parametrize("body", [b"no gzip", gzip.compress(b'{"a": 1}', mtime=0)[:-9], b"\x1f\x8b"])
def test_what_cannot_be_unpacked_stays_as_it_is(body):
    """The verdict then finds that it is no JSON."""
    assert read(framed(body, "length", b"Content-Encoding: gzip\r\n")).body == body


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"identity", b"", b"nonsense"])
def test_other_encodings_are_left_alone(encoding):
    """They are not asked for and not understood."""
    assert read(framed(b'{"a": 1}', "length", b"Content-Encoding: %b\r\n" % encoding)).body == b'{"a": 1}'


def test_a_request_is_one_head_and_one_body():
    """Host first, then the headers in their order, then the length."""
    made = wire.request_bytes("POST", "/x?y", "a.test:81", [(b"X-A", b"1"), (b"X-B", b"\xc3\xa9")], b"{}\r\n")
    assert made == b"POST /x?y HTTP/1.1\r\nHost: a.test:81\r\nX-A: 1\r\nX-B: \xc3\xa9\r\nContent-Length: 4\r\n\r\n{}\r\n"


@pytest.mark.parametrize("bad", ["a\r\nX-B: b", "a\nb", "a\rb", "\r\n\r\nbody"])
@pytest.mark.parametrize("place", ["method", "path", "authority", "name", "value"])
def test_a_line_break_is_never_sent(bad, place):
    """Wherever it got in from, the message is not sent split."""
    parts = {"method": "POST", "path": "/", "authority": "a.test", "name": "X-A", "value": "1", place: bad}
    with pytest.raises(CallFailed) as caught:
        wire.request_bytes(
            parts["method"], parts["path"], parts["authority"], [(parts["name"].encode(), parts["value"].encode())], b""
        )
    assert caught.value.error_code is ErrorCode.PLATFORM
