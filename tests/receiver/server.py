"""The server itself: it scripts answers, keeps every call on record, and wakes whoever waits for one."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from tests.receiver.answers import Answer, Call, Script
from tests.receiver.connection import Connection

#: Seconds that `Receiver.wait_for` and `Receiver.wait_until` wait unless told otherwise.
DEFAULT_TIMEOUT_S: Final = 10.0


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
        self._protocols: set[Connection] = set()
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

    # In the loop's thread; what has no underscore is told by a connection

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
            await loop.connect_accepted_socket(lambda: Connection(self, loop), sock, ssl=self._tls)

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

    def connected(self, protocol: Connection) -> int:
        with self._changed:
            self._protocols.add(protocol)
            number = self._connections
            self._connections += 1
            self._changed.notify_all()
        return number

    def disconnected(self, protocol: Connection) -> None:
        with self._changed:
            self._protocols.discard(protocol)
            self._changed.notify_all()

    def arrived(
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

    def finished(self, call: Call, status: int | None) -> None:
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
