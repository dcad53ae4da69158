"""A downstream HTTP server of our own, which the tests script and then ask what arrived.

It speaks just enough HTTP/1.1 over one asyncio loop in a thread of its own: a real server on a real socket that costs little
CPU (the machine is shared with what is being tested), can misbehave in every way that a receiver can, and knows exactly how
many calls overlapped, in all and for one ``webhook-id``. Tests wait for what they expect with `Receiver.wait_for` and
`Receiver.wait_until`, which are woken by each arrival and each answer; nothing here polls or sleeps.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

#: Seconds that `Receiver.wait_for` and `Receiver.wait_until` wait unless told otherwise.
DEFAULT_TIMEOUT_S: Final = 10.0

#: SO_LINGER on, for no time: closing such a socket sends RST.
_RESET: Final = struct.pack("ii", 1, 0)


class Gate:
    """Holds answers back until `set` is called; like `threading.Event`, but a loop can be told instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Let everything through that waits now or comes later."""
        with self._lock:
            self._open = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._open

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the gate is open, in whatever thread opens it."""
        with self._lock:
            if not self._open:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the receiver does with one request; the default is a 200 with ``{"success": true}``."""

    status: int = 200
    #: Sent as it is; a str is encoded as UTF-8.
    body: bytes | str = b'{"success": true}'
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Seconds before the first byte of the answer.
    delay_s: float = 0.0
    #: The answer begins only when this is set.
    hold: Gate | None = None
    #: Seconds between two bytes of the body; None: all at once.
    drip_body_s: float | None = None
    #: Seconds between two bytes of the whole answer, header section included; None: all at once.
    drip_head_s: float | None = None
    #: Interim answers (status `interim_status`) before the real one; -1: without end, one every millisecond.
    interim: int = 0
    interim_status: int = 100
    #: Send the body in chunks of this many bytes instead of with a Content-Length; 0: do not.
    chunk: int = 0
    #: Say neither length nor chunks; the body ends with the connection.
    until_close: bool = False
    #: Close the connection after the answer, saying so (`Connection: close`).
    close_after: bool = False
    #: Close the connection after the answer without having said so: the client's pool finds it stale.
    drop_after: bool = False
    #: Close without a byte of answer.
    no_answer: bool = False
    #: Reset the connection (RST) without a byte of answer.
    reset: bool = False
    #: Reset the connection after this many bytes of the answer; None: do not.
    reset_after: int | None = None
    #: Bytes to send instead of an HTTP answer, exactly as they are.
    raw: bytes | None = None


#: Decides the answer from the request; runs in the receiver's loop and must not block.
Script = Callable[["Call"], Answer]


def json_answer(value: Any, **more: Any) -> Answer:
    """An `Answer` whose body is `value` as JSON."""
    return Answer(body=json.dumps(value), **more)


@dataclass(slots=True, eq=False)
class Call:
    """One request as it arrived."""

    #: 0 for the first call that this receiver saw.
    number: int
    #: Number of the TCP connection that it came on, from 0.
    connection: int
    method: str
    #: Path with its query, as sent.
    path: str
    #: Names in lower case; of a repeated header the last.
    headers: dict[str, str]
    #: Names and values as sent, in order.
    header_list: list[tuple[str, str]]
    body: bytes
    #: Arrival of the last byte of the request, `time.monotonic`.
    at: float
    #: The same moment, Unix seconds.
    wall: float
    #: Serial number of the certificate that the client showed; None when it showed none.
    client_serial: str | None = None
    #: Calls that were unanswered when this one came, itself included.
    overlap: int = 1
    #: The same, among those with the same ``webhook-id``.
    overlap_same_id: int = 1
    #: End of the answer or of the connection, `time.monotonic`; None while unanswered.
    ended: float | None = None
    #: Status that was sent; None when no complete answer was.
    status: int | None = None

    @property
    def webhook_id(self) -> str:
        """The ``webhook-id`` header; empty when there was none."""
        return self.headers.get("webhook-id", "")

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Receiver:
    """A scriptable HTTP server on an ephemeral port of 127.0.0.1.

    Which answer a request gets: the next one queued for its path, else the path's standing answer, else the default.
    Stopping and starting again keeps the port and all records.
    """

    def __init__(
        self, *, default: Answer | Script | None = None, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self._default: Answer | Script = default or Answer()
        self._tls = tls
        self._host = host
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = 0
        self._standing: dict[str, Answer | Script] = {}
        self._queued: dict[str, deque[Answer | Script]] = {}
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._per_path: Counter[str] = Counter()
        self._ended = 0
        self._open_calls = 0
        self._open_by_id: Counter[str] = Counter()
        self._max_overlap = 0
        self._max_by_id: dict[str, int] = {}
        self._connections = 0
        self._protocols: set[_Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket
        self._welcoming: dict[asyncio.Task[None], socket.socket] = {}
        self._thread: threading.Thread | None = None

    # Life

    def start(self) -> Self:
        """Listen; on the same port as before when it was stopped."""
        if self._thread is not None:
            raise RuntimeError("the receiver is already started")
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="receiver", daemon=True)
        self._thread.start()
        started.wait()
        if self._loop is None:
            self._thread.join()
            self._thread = None
            raise RuntimeError(f"the receiver cannot listen on {self._host}:{self._port}")
        return self

    def stop(self) -> None:
        """Close the listening socket and every connection; twice is harmless."""
        if self._thread is None or self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._thread = self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The port; fixed by the first start."""
        return self._port

    def url(self, path: str = "/") -> str:
        """The URL of `path` on this receiver."""
        scheme = "https" if self._tls else "http"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{self._port}{path}"

    # Script

    def answer(self, path: str, answer: Answer | Script) -> None:
        """Make `answer` the standing answer of `path` (without query)."""
        with self._changed:
            self._standing[path] = answer

    def queue(self, path: str, *answers: Answer | Script) -> None:
        """Give these answers, one request each, before the standing answer of `path` counts again."""
        with self._changed:
            self._queued.setdefault(path, deque()).extend(answers)

    def default(self, answer: Answer | Script) -> None:
        """Make `answer` what every path gets that has none of its own."""
        with self._changed:
            self._default = answer

    # Records

    @property
    def calls(self) -> list[Call]:
        """Every call so far, by arrival."""
        with self._changed:
            return list(self._calls)

    def calls_to(self, path: str) -> list[Call]:
        """The calls to `path` (without query), by arrival."""
        return [call for call in self.calls if call.path.partition("?")[0] == path]

    def count(self, path: str | None = None) -> int:
        """How many calls arrived, in all or at `path`."""
        with self._changed:
            return len(self._calls) if path is None else self._per_path[path]

    @property
    def answered(self) -> int:
        """How many calls have ended: answered to the end, or their connection gone."""
        return self._ended

    @property
    def in_progress(self) -> int:
        """How many calls wait for their answer now."""
        return self._open_calls

    def by_id(self) -> dict[str, list[Call]]:
        """The calls by ``webhook-id``."""
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.webhook_id, []).append(call)
        return found

    @property
    def max_overlap(self) -> int:
        """The largest number of calls that were unanswered at one moment."""
        return self._max_overlap

    @property
    def overlaps(self) -> dict[str, int]:
        """``webhook-id`` -> the largest number of its calls unanswered at one moment, for those where it was more than one."""
        with self._changed:
            return {key: most for key, most in self._max_by_id.items() if most > 1}

    @property
    def connections(self) -> int:
        """How many TCP connections were made so far."""
        return self._connections

    @property
    def open_connections(self) -> int:
        """How many TCP connections are open now."""
        return len(self._protocols)

    def forget(self) -> None:
        """Drop the records of the calls that have ended; scripts stay."""
        with self._changed:
            self._calls.clear()
            self._per_path.clear()
            self._ended = 0
            self._max_overlap = self._open_calls
            self._max_by_id = dict(self._open_by_id)

    # Waiting

    def wait_until(self, predicate: Callable[[], bool], timeout: float = DEFAULT_TIMEOUT_S, *, what: str = "") -> None:
        """Wait until `predicate()` is true; it is asked again at each arrival, answer and change of connections.

        Raises:
            AssertionError: `timeout` seconds have passed.
        """
        with self._changed:
            if not self._changed.wait_for(predicate, timeout):
                raise AssertionError(
                    f"not within {timeout:g} s{': ' + what if what else ''}; {len(self._calls)} calls came, "
                    f"{self._ended} ended, by path {dict(self._per_path)}"
                )

    def wait_for(self, count: int, timeout: float = DEFAULT_TIMEOUT_S, *, path: str | None = None) -> list[Call]:
        """Wait until `count` calls arrived (at `path`, when given) and return those that did.

        Raises:
            AssertionError: `timeout` seconds have passed.
        """
        self.wait_until(lambda: self.count(path) >= count, timeout, what=f"{count} calls to {path or 'any path'}")
        return self.calls if path is None else self.calls_to(path)

    def wait_idle(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until no call is unanswered."""
        self.wait_until(lambda: self._open_calls == 0, timeout, what="no call in progress")

    # In the loop's thread

    def _run(self, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        try:
            self._listener = socket.create_server((self._host, self._port), family=self._family, backlog=1024)
            self._listener.setblocking(False)
            self._port = self._listener.getsockname()[1]
            self._loop = loop
        except OSError:
            loop.close()
            return
        finally:
            started.set()
        accepting = loop.create_task(self._accept(loop, self._listener))
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._close_all(accepting))
            loop.close()

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            task = loop.create_task(self._welcome(loop, sock))
            self._welcoming[task] = sock
            task.add_done_callback(self._welcoming.pop)

    async def _welcome(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a failed TLS handshake, too, is one
            await loop.connect_accepted_socket(lambda: _Connection(self, loop), sock, ssl=self._tls)

    async def _close_all(self, accepting: "asyncio.Task[None]") -> None:
        socks = list(self._welcoming.values())
        tasks = [accepting, *self._welcoming]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for protocol in list(self._protocols):
            protocol.abort()
        for _ in range(3):  # transports close in the loop's next rounds
            await asyncio.sleep(0)
        for sock in [self._listener, *socks]:
            sock.close()

    def _connected(self, protocol: "_Connection") -> int:
        with self._changed:
            self._protocols.add(protocol)
            number = self._connections
            self._connections += 1
            self._changed.notify_all()
        return number

    def _disconnected(self, protocol: "_Connection") -> None:
        with self._changed:
            self._protocols.discard(protocol)
            self._changed.notify_all()

    def _arrived(
        self,
        connection: int,
        client_serial: str | None,
        method: str,
        path: str,
        header_list: list[tuple[str, str]],
        body: bytes,
    ) -> tuple[Call, Answer]:
        headers = {name.lower(): value for name, value in header_list}
        bare = path.partition("?")[0]
        with self._changed:
            call = Call(
                number=len(self._calls),
                connection=connection,
                method=method,
                path=path,
                headers=headers,
                header_list=header_list,
                body=body,
                at=time.monotonic(),
                wall=time.time(),
                client_serial=client_serial,
            )
            self._calls.append(call)
            self._per_path[bare] += 1
            self._open_calls += 1
            self._max_overlap = max(self._max_overlap, self._open_calls)
            call.overlap = self._open_calls
            key = call.webhook_id
            if key:
                self._open_by_id[key] += 1
                call.overlap_same_id = self._open_by_id[key]
                self._max_by_id[key] = max(self._max_by_id.get(key, 0), call.overlap_same_id)
            queued = self._queued.get(bare)
            script = queued.popleft() if queued else self._standing.get(bare, self._default)
            self._changed.notify_all()
        return call, script if isinstance(script, Answer) else script(call)

    def _finished(self, call: Call, status: int | None) -> None:
        with self._changed:
            call.ended = time.monotonic()
            call.status = status
            self._ended += 1
            self._open_calls -= 1
            key = call.webhook_id
            if key:
                self._open_by_id[key] -= 1
                if not self._open_by_id[key]:
                    del self._open_by_id[key]
            self._changed.notify_all()


class _Connection(asyncio.Protocol):
    """One connection: reads requests one after another and carries out their answers."""

    def __init__(self, receiver: Receiver, loop: asyncio.AbstractEventLoop) -> None:
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
        self._number = self._receiver._connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._call is not None:
            self._end(None)
        # asyncio closes the socket right after this call; whoever waits for the close must not be told before.
        self._loop.call_soon(self._receiver._disconnected, self)

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
        self._call, answer = self._receiver._arrived(self._number, self._client_serial, method, path, header_list, body)
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
        head, body = _encode(answer)
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
            self._receiver._finished(call, status)


def _encode(answer: Answer) -> tuple[bytes, bytes]:
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


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections (the kernel does) and never says a word: no TLS handshake, no answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that nobody listens on: connections are refused. It stays bound, so that nobody else gets it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def black_hole_port() -> Iterator[int]:
    """A port whose queue of connections is full: further SYNs are dropped, so that connecting never ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]
