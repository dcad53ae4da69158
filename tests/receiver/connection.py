"""One connection of the receiver: requests are read from its socket, and answers written as they are scripted, byte by byte."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from tests.receiver.answers import Answer, Call

if TYPE_CHECKING:
    from tests.receiver.server import Receiver

#: SO_LINGER on, for no time: closing such a socket sends RST.
_RESET: Final = struct.pack("ii", 1, 0)


class Connection(asyncio.Protocol):
    """One connection: reads requests one after another and carries out their answers."""

    def __init__(self, receiver: "Receiver", loop: asyncio.AbstractEventLoop) -> None:
        self._receiver = receiver
        self._loop = loop
        self._buffer = bytearray()
        self._number = -1
        self._client_serial: str | None = None
        self._call: Call | None = None
        self._transport: asyncio.Transport

    def abort(self) -> None:
        self._transport.abort()

    # From asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        shown = transport.get_extra_info("peercert")
        self._client_serial = shown["serialNumber"] if shown else None
        self._number = self._receiver.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None:
            self._end(None)
        # asyncio closes the socket right after this call; whoever waits for the close must not be told before.
        self._loop.call_soon(self._receiver.disconnected, self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._call is None:
            self._next()

    # Reading

    def _next(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        header_list = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        length = next((int(value) for name, value in header_list if name.lower() == "content-length"), 0)
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        self._call, answer = self._receiver.arrived(self._number, self._client_serial, method, path, header_list, body)
        self._begin(answer)

    # Answering

    def _begin(self, answer: Answer) -> None:
        if answer.hold is not None and not answer.hold.is_set():
            call = self._call

            def go_on() -> None:
                if self._call is call:
                    self._after_delay(answer)

            def opened() -> None:
                with contextlib.suppress(RuntimeError):  # the receiver was stopped meanwhile
                    self._loop.call_soon_threadsafe(go_on)

            answer.hold.when_set(opened)
            return
        self._after_delay(answer)

    def _after_delay(self, answer: Answer) -> None:
        if answer.delay_s > 0:
            self._loop.call_later(answer.delay_s, self._if_same_call(lambda: self._send(answer)))
        else:
            self._send(answer)

    def _if_same_call(self, what: Callable[[], None]) -> Callable[[], None]:
        call = self._call

        def guarded() -> None:
            if self._call is call and call is not None:
                what()

        return guarded

    def _send(self, answer: Answer) -> None:
        if answer.reset:
            self._reset()
        elif answer.no_answer:
            self._transport.close()
        elif answer.interim:
            self._interim(answer, answer.interim)
        else:
            self._send_final(answer)

    def _interim(self, answer: Answer, left: int) -> None:
        if left == 0:
            self._send_final(answer)
            return
        self._transport.write(b"HTTP/1.1 %d Interim\r\n\r\n" % answer.interim_status)
        if left > 0:
            self._interim(answer, left - 1)
        else:
            self._loop.call_later(0.001, self._if_same_call(lambda: self._interim(answer, left)))

    def _send_final(self, answer: Answer) -> None:
        head, body = encode(answer)
        if answer.reset_after is not None:
            self._transport.write((head + body)[: answer.reset_after])
            self._reset()
        elif answer.drip_head_s is not None:
            self._drip(head + body, answer.drip_head_s, answer)
        elif answer.drip_body_s is not None:
            self._transport.write(head)
            self._drip(body, answer.drip_body_s, answer)
        else:
            self._transport.write(head + body)
            self._done(answer)

    def _drip(self, data: bytes, every_s: float, answer: Answer) -> None:
        if not data:
            self._done(answer)
            return
        self._transport.write(data[:1])
        self._loop.call_later(every_s, self._if_same_call(lambda: self._drip(data[1:], every_s, answer)))

    def _done(self, answer: Answer) -> None:
        self._end(answer.status)
        if answer.close_after or answer.drop_after or answer.until_close:
            self._transport.close()
        elif self._buffer:
            self._loop.call_soon(self._next)

    def _reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def _end(self, status: int | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            self._receiver.finished(call, status)


def encode(answer: Answer) -> tuple[bytes, bytes]:
    """The answer's head and body, as bytes."""
    if answer.raw is not None:
        return b"", answer.raw
    body = answer.body.encode() if isinstance(answer.body, str) else answer.body
    lines = [f"HTTP/1.1 {answer.status} Scripted"]
    headers = {"Content-Type": "application/json", **answer.headers}
    if answer.chunk:
        headers["Transfer-Encoding"] = "chunked"
        body = b"".join(_chunks(body, answer.chunk))
    elif not answer.until_close and answer.status not in (204, 304) and "Content-Length" not in headers:
        headers["Content-Length"] = str(len(body))
    if answer.close_after or answer.until_close:
        headers["Connection"] = "close"
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n", b"" if answer.status in (204, 304) else body


def _chunks(body: bytes, size: int) -> Iterable[bytes]:
    for at in range(0, len(body), size):
        piece = body[at : at + size]
        yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"
