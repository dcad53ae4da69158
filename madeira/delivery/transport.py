"""The transport under httpx: HTTP/1.1 over plain sockets, with our own pool and one deadline for the whole call.

Why not httpx's own: it has no total timeout (a receiver that drips a byte a second holds a thread for as long as it likes),
it reads answers of any length, and it takes several times the CPU of what is here; the transport decides the speed of
delivery. Sockets are non-blocking, and every wait (for a name, a connection, a handshake, room to send, bytes to read) lasts
at most as long as what is left of the deadline.

A connection that was kept open may have been closed by the receiver at the very moment of its next use. The request is sent
again, once and on a new connection, only where it is certain that nobody read it: nothing came back, the receiver had closed
(FIN), and its kernel then refused our bytes (RST). Any other loss is a failure like others, a bare RST too: a receiver that
read a request and dropped the connection has perhaps acted on it, and is not called twice within one attempt.

Each attempt goes only to an address that its name has now and that the policy (`madeira.egress`) lets be called: the name is
resolved once, every address is judged (one that is denied refuses the attempt, since the next look-up may put it first), and
the connection is made to one of exactly these, or is a kept one whose peer is among them. TLS checks the name, not the address.
"""

import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

import httpx

from madeira.delivery import wire
from madeira.delivery.answer import CallFailed
from madeira.delivery.connection import Connection, Deadline, Line, connect
from madeira.delivery.resolve import Address, Resolver
from madeira.egress import Egress
from madeira.records import ClientCertificate
from madeira.states import ErrorCode
from madeira.target import Target

#: Seconds that an unused connection is kept.
IDLE_S: Final = 15.0

#: Keys of `httpx.Request.extensions` and `httpx.Response.extensions`.
TARGET: Final = "madeira_target"
CERTIFICATE: Final = "madeira_certificate"
DEADLINE: Final = "madeira_deadline"
REPLY: Final = "madeira_reply"


class Pool:
    """The limits of a process: calls at once, and connections kept by line, the least recently used closed first."""

    def __init__(self, *, max_connections: int, max_idle: int, idle_s: float = IDLE_S) -> None:
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._room = threading.Semaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: OrderedDict[Line, deque[Connection]] = OrderedDict()
        self._count = 0
        self._closed = False

    def enter(self) -> None:
        """Take the room of one call; `leave` follows.

        It does not wait: that would use up the time of the receiver.

        Raises:
            CallFailed: ``platform``: closed, or no room.
        """
        if self._closed:
            raise CallFailed(ErrorCode.PLATFORM, "the client is closed")
        if not self._room.acquire(blocking=False):
            raise CallFailed(ErrorCode.PLATFORM, "all connections of this process are in use")

    def leave(self) -> None:
        """Make room."""
        self._room.release()

    def take(self, line: Line, addresses: Sequence[Address]) -> Connection | None:
        """The kept connection of `line` that was used last, leads to one of `addresses`, and on which nothing came in meanwhile.

        Those that do not are closed.
        """
        while (connection := self._newest(line)) is not None:
            fresh = connection.idle_since + self._idle_s > time.monotonic()
            if fresh and any(connection.peer == address[0] for _, address in addresses) and connection.is_quiet():
                connection.reused = True
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Keep `connection` for a later call."""
        connection.idle_since = time.monotonic()
        with self._lock:
            kept = self._idle.get(connection.line)
            if kept is None:
                kept = self._idle[connection.line] = deque()
            kept.append(connection)
            self._idle.move_to_end(connection.line)
            self._count += 1
            surplus = self._oldest() if self._closed or self._count > self._max_idle else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        """Close what is idle; what is in use is closed as its call ends."""
        self._closed = True
        while True:
            with self._lock:
                if not self._count:
                    return
                connection = self._oldest()
            connection.close()

    @property
    def idle(self) -> int:
        """Connections that are kept now."""
        return self._count

    def _newest(self, line: Line) -> Connection | None:
        with self._lock:
            kept = self._idle.get(line)
            if not kept:
                return None
            self._count -= 1
            connection = kept.pop()
            if not kept:
                del self._idle[line]
            return connection

    def _oldest(self) -> Connection:
        line, kept = next(iter(self._idle.items()))
        self._count -= 1
        connection = kept.popleft()
        if not kept:
            del self._idle[line]
        return connection


class Response(httpx.Response):
    """A response that never leads elsewhere: httpx would look at ``Location`` even where it does not follow it."""

    @property
    def has_redirect_location(self) -> bool:
        """False, whatever the receiver says."""
        return False


class Transport(httpx.BaseTransport):
    """Carries out requests whose extensions hold their `Target` and `Deadline`, and the client certificate if there is one.

    `context` gives the TLS settings for a certificate, or raises `CallFailed`. The answer is read to its end, or to its bound,
    before `handle_request` returns; the `wire.Reply` is in the response's extensions.
    """

    def __init__(
        self,
        *,
        pool: Pool,
        resolver: Resolver,
        egress: Egress,
        context: Callable[[ClientCertificate | None], ssl.SSLContext],
    ) -> None:
        self._pool = pool
        self._resolver = resolver
        self._egress = egress
        self._context = context

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One call.

        Raises:
            CallFailed: there was no complete answer.
        """
        target: Target = request.extensions[TARGET]
        deadline: Deadline = request.extensions[DEADLINE]
        assert isinstance(request.stream, httpx.SyncByteStream)
        body = b"".join(request.stream)
        data = wire.request_bytes(request.method, target.path, target.authority, request.headers.raw, body)
        self._pool.enter()
        try:
            reply = self._call(request.method, data, target, request.extensions.get(CERTIFICATE), deadline)
        finally:
            self._pool.leave()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
        return Response(reply.status, headers=headers, stream=httpx.ByteStream(reply.body), extensions={REPLY: reply})

    def close(self) -> None:
        """Close the connections that are kept."""
        self._pool.close()

    def _call(
        self, method: str, data: bytes, target: Target, certificate: ClientCertificate | None, deadline: Deadline
    ) -> wire.Reply:
        addresses = self._addresses(target, deadline)
        kept = self._pool.take((target.origin, certificate), addresses)
        reply = self._exchange(kept, method, data, deadline) if kept is not None else None
        if reply is None:
            context = self._context(certificate) if target.scheme == "https" else None
            fresh = connect(target, certificate, addresses, context, deadline)
            reply = self._exchange(fresh, method, data, deadline)
        assert reply is not None
        return reply

    def _addresses(self, target: Target, deadline: Deadline) -> Sequence[Address]:
        """Where `target` is now, every address judged."""
        refused = self._egress.refusal_of_host(target.host)
        if refused is not None:
            raise CallFailed(ErrorCode.DENIED_BY_POLICY, refused)
        addresses = self._resolver.resolve(target.host, target.port, deadline.left_s())
        for _, address in addresses:
            refused = self._egress.refusal(target.host, address[0])
            if refused is not None:
                raise CallFailed(ErrorCode.DENIED_BY_POLICY, refused)
        return addresses

    def _exchange(self, connection: Connection, method: str, data: bytes, deadline: Deadline) -> wire.Reply | None:
        """Send `data` and read the answer; None when it is certain that nobody read the request."""
        connection.begin(deadline)
        keep = False
        try:
            connection.send(data)
            reply = wire.read_reply(connection.receive, method=method)
            keep = reply.reusable and connection.sent
            return reply
        except CallFailed as e:
            if e.error_code == ErrorCode.RESET and connection.reused and not connection.received and connection.was_refused():
                return None
            raise
        finally:
            if keep:
                self._pool.give(connection)
            else:
                connection.close()
