"""Clients that ask and do not read the answers: given up in a bounded time, and no hindrance to anybody else meanwhile."""

import contextlib
import http.client
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from madeira.api import reading, sending
from tests.api.serving import Api

#: Many more than the threads that serve them.
READERS = 6

#: Requests behind one another, whose answers are more than any buffer holds.
MANY = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 100


@contextlib.contextmanager
def reading_nothing(api: Api) -> Iterator[list[socket.socket]]:
    """Connections that have asked for more than their buffers hold."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(READERS)]
        for reader in found:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            reader.connect(("127.0.0.1", api.port))
            reader.sendall(MANY)
        yield found


def is_reset(reader: socket.socket) -> bool:
    poll = select.poll()
    poll.register(reader, 0)
    return bool(poll.poll(0))


def body(stream: BinaryIO) -> bytes:
    """The body of the next answer, which is good."""
    assert stream.readline().startswith(b"HTTP/1.1 200 ")
    headers = http.client.parse_headers(stream)
    return stream.read(int(headers["Content-Length"]))


def test_clients_that_do_not_read_hold_no_thread(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """With more of them than threads probes are answered all the time, and in the end their connections are reset."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="1", MADEIRA_THREADS="2").start()
    began = time.monotonic()
    with reading_nothing(api) as left:
        while left:
            assert api.request("GET", "/healthz", timeout_s=8).status == 200
            left = [reader for reader in left if not is_reset(reader)]
            assert time.monotonic() - began < 40
    assert time.monotonic() - began > reading.PATIENCE_S


def test_a_client_that_reads_late_gets_everything(shared_api: Api) -> None:
    """More answers than the buffers hold, read when they are full: each of them is whole, and the last one too."""
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(("127.0.0.1", shared_api.port))
        reader.sendall(MANY)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_000_000)
        shared_api.get("/healthz")
        stream = reader.makefile("rb")
        first, *others = (body(stream) for _ in range(100))
        assert json.loads(first)
        assert set(others) == {first}


def test_the_word_that_a_body_is_waited_for_waits_for_no_reader() -> None:
    """It goes before what follows, when there is room again."""
    word = b"HTTP/1.1 100 Continue\r\n\r\n"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        full = bytearray(b"x" * 10_000_000)
        sending.push(ours, full)
        # Of a send that waits, of which there is to be none.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        outgoing = sending.Outgoing(ours)
        outgoing.send(word)
        outgoing.sendall(b"HTTP/1.1 202 Accepted\r\n")
        kept = outgoing.finish()
        assert kept == word + b"HTTP/1.1 202 Accepted\r\n"
