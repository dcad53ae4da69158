"""The transport under httpx: HTTP/1.1 over plain sockets, with our own pool and one deadline for the whole call.

Why not httpx's own: it has no total timeout (a receiver that drips a byte a second holds a thread for as long as it likes),
it reads answers of any length, and it takes several times the CPU of what is here; the transport decides the speed of
delivery. Sockets are non-blocking, and every wait (for a name, a connection, a handshake, room to send, bytes to read) lasts
at most as long as what is left of the deadline.

A connection that was kept open may have been closed by the receiver at the very moment of its next use. The request is sent
again, once and on a new connection, only where it is certain that nobody read it: nothing came back, the receiver had closed
(FIN), and its kernel then refused our bytes (RST). Any other loss is a failure like others, a bare RST too: a receiver that
read a request and dropped the connection has perhaps acted on it, and is not called twice within one attempt.
"""

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import httpx

from madeira.delivery import wire
from madeira.delivery.answer import CallFailed
from madeira.delivery.resolve import Address, Resolver
from madeira.states import ErrorCode
from madeira.target import Target

#: Seconds that an unused connection is kept.
IDLE_S: Final = 15.0

#: Bytes asked for in one read.
_READ: Final = 65_536

#: Seconds to wait for the RST that shows that a request was refused unread.
_REFUSAL_WAIT_S: Final = 0.25

_BROKEN: Final = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)

#: Keys of `httpx.Request.extensions` and `httpx.Response.extensions`.
TARGET: Final = "madeira_target"
DEADLINE: Final = "madeira_deadline"
REPLY: Final = "madeira_reply"

Origin = tuple[str, str, int]


class Deadline:
    """The moment at which a call ends, whatever it is doing."""

    __slots__ = ("_at", "total_s")

    def __init__(self, total_s: float) -> None:
        self._at = time.monotonic() + total_s
        #: Seconds from beginning to end.
        self.total_s = total_s

    def left_s(self) -> float:
        """Seconds left; negative when it has passed."""
        return self._at - time.monotonic()


class Connection:
    """One connection to a receiver; used by one thread at a time."""

    __slots__ = ("_poller", "_refused", "_socket", "deadline", "idle_since", "origin", "received", "reused", "sent", "where")

    def __init__(self, sock: socket.socket, origin: Origin, where: str) -> None:
        self._socket = sock
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._refused = False
        self.origin = origin
        #: For messages: name, address and port.
        self.where = where
        self.deadline = Deadline(0.0)
        self.idle_since = 0.0
        #: Whether it carried a call before this one.
        self.reused = False
        #: Whether this call's request went out whole.
        self.sent = False
        #: Whether any byte of this call's answer came.
        self.received = False

    def close(self) -> None:
        """Close it; never fails."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def is_quiet(self) -> bool:
        """Whether nothing came in while it was idle: a close, or bytes that belong to no call."""
        return not self._poller.poll(0)

    def begin(self, deadline: Deadline) -> None:
        """Start a call on it."""
        self.deadline = deadline
        self.sent = self.received = False

    def wait(self, events: int, deadline: Deadline) -> int:
        """Wait for the socket; what happened, as of `select.poll`, or 0 when the deadline has passed first."""
        left = deadline.left_s()
        if left <= 0:
            return 0
        poller = self._poller
        if events != select.POLLIN:
            poller = select.poll()
            poller.register(self._socket, events)
        found = poller.poll(left * 1000)
        return found[0][1] if found else 0

    def connect(self, address: tuple[str, int], deadline: Deadline) -> None:
        """Connect to `address`.

        Raises:
            CallFailed: ``connect_timeout``, ``connect_refused``, ``unreachable``, ``reset`` or ``platform``.
        """
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            error = self._socket.connect_ex(address)
        except OSError as e:
            error = e.errno or errno.EHOSTUNREACH
        if error == errno.EINPROGRESS:
            if not self.wait(select.POLLOUT, deadline):
                raise CallFailed(ErrorCode.CONNECT_TIMEOUT, f"no connection to {self.where} within {deadline.total_s:.3g} s")
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise CallFailed(_connect_code(error), f"no connection to {self.where}: {os.strerror(error)}")

    def handshake(self, context: ssl.SSLContext, host: str, deadline: Deadline) -> None:
        """Speak TLS from here on; the certificate must be for `host`.

        Raises:
            CallFailed: ``tls`` or ``deadline``.
        """
        try:
            secured = context.wrap_socket(self._socket, server_hostname=host.removesuffix("."), do_handshake_on_connect=False)
        except (ssl.SSLError, OSError, ValueError) as e:
            raise CallFailed(ErrorCode.TLS, f"no TLS with {self.where}: {_text(e)}") from None
        self._socket = secured
        while True:
            try:
                return secured.do_handshake()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except (ssl.SSLError, OSError, ValueError) as e:
                raise CallFailed(ErrorCode.TLS, f"the TLS handshake with {self.where} failed: {_text(e)}") from None
            if not self.wait(events, deadline):
                raise CallFailed(
                    ErrorCode.DEADLINE, f"the TLS handshake with {self.where} took longer than {deadline.total_s:g} s"
                )

    def send(self, data: bytes) -> None:
        """Send all of `data`; stops early when the receiver has answered already or hung up (its answer may be there).

        Raises:
            CallFailed: ``deadline``, ``tls`` or ``unreachable``.
        """
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
                continue
            except BlockingIOError:
                events = select.POLLOUT | select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except _BROKEN as e:
                self._refused = isinstance(e, BrokenPipeError)
                return
            except ssl.SSLError as e:
                raise CallFailed(ErrorCode.TLS, f"the TLS connection to {self.where} broke: {_text(e)}") from None
            except OSError as e:
                raise CallFailed(_connect_code(e.errno), f"the connection to {self.where} broke: {_text(e)}") from None
            happened = self.wait(events, self.deadline)
            if not happened:
                raise CallFailed(ErrorCode.DEADLINE, f"{self.where} did not take the request within {self.deadline.total_s:g} s")
            if events != select.POLLIN and happened == select.POLLIN:
                return
        self.sent = True

    def receive(self) -> bytes:
        """The next bytes; b"" at the end.

        Raises:
            CallFailed: ``read_timeout`` (nothing came at all), ``deadline``, ``reset`` or ``tls``.
        """
        secured = isinstance(self._socket, ssl.SSLSocket)
        # TLS may hold bytes that the kernel no longer shows, so there it is read first and waited for afterwards.
        events = 0 if secured else select.POLLIN
        while True:
            if events and not self.wait(events, self.deadline):
                raise self._too_slow()
            try:
                data = self._socket.recv(_READ)
            except (BlockingIOError, ssl.SSLWantReadError):
                events = select.POLLIN
                if self.deadline.left_s() <= 0:
                    raise self._too_slow() from None
                continue
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
            except ssl.SSLError as e:
                raise CallFailed(ErrorCode.TLS, f"the TLS connection to {self.where} broke: {_text(e)}") from None
            except OSError as e:
                raise CallFailed(ErrorCode.RESET, f"{self.where} reset the connection: {_text(e)}") from None
            self.received |= bool(data)
            return data

    def was_refused(self) -> bool:
        """Whether the receiver had closed before our request came: its kernel answers a late request with RST.

        Asked once the end was read. A receiver that read the request and then closed sends no RST.
        """
        if self._refused:
            return True
        poller = select.poll()
        poller.register(self._socket, 0)  # POLLERR and POLLHUP come unasked
        poller.poll(max(0.0, min(_REFUSAL_WAIT_S, self.deadline.left_s())) * 1000)
        try:
            return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.EPIPE
        except OSError:
            return False

    def _too_slow(self) -> CallFailed:
        total = f"{self.deadline.total_s:g} s"
        if self.received:
            return CallFailed(ErrorCode.DEADLINE, f"the answer of {self.where} was not complete within {total}")
        return CallFailed(ErrorCode.READ_TIMEOUT, f"{self.where} did not answer within {total}")


class Pool:
    """The limits of a process: calls at once, and connections kept by origin, the least recently used closed first."""

    def __init__(self, *, max_connections: int, max_idle: int, idle_s: float = IDLE_S) -> None:
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._room = threading.Semaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: OrderedDict[Origin, deque[Connection]] = OrderedDict()
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

    def take(self, origin: Origin) -> Connection | None:
        """The kept connection to `origin` that was used last, provided that nothing came in meanwhile."""
        while (connection := self._newest(origin)) is not None:
            if connection.idle_since + self._idle_s > time.monotonic() and connection.is_quiet():
                connection.reused = True
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Keep `connection` for a later call."""
        connection.idle_since = time.monotonic()
        with self._lock:
            kept = self._idle.get(connection.origin)
            if kept is None:
                kept = self._idle[connection.origin] = deque()
            kept.append(connection)
            self._idle.move_to_end(connection.origin)
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

    def _newest(self, origin: Origin) -> Connection | None:
        with self._lock:
            kept = self._idle.get(origin)
            if not kept:
                return None
            self._count -= 1
            connection = kept.pop()
            if not kept:
                del self._idle[origin]
            return connection

    def _oldest(self) -> Connection:
        origin, kept = next(iter(self._idle.items()))
        self._count -= 1
        connection = kept.popleft()
        if not kept:
            del self._idle[origin]
        return connection


class Response(httpx.Response):
    """A response that never leads elsewhere: httpx would look at ``Location`` even where it does not follow it."""

    @property
    def has_redirect_location(self) -> bool:
        """False, whatever the receiver says."""
        return False


class Transport(httpx.BaseTransport):
    """Carries out requests whose extensions hold their `Target` and `Deadline`.

    The answer is read to its end, or to its bound, before `handle_request` returns; the `wire.Reply` is in the response's
    extensions.
    """

    def __init__(self, *, pool: Pool, resolver: Resolver, context: Callable[[], ssl.SSLContext]) -> None:
        self._pool = pool
        self._resolver = resolver
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
            reply = self._call(request.method, data, target, deadline)
        finally:
            self._pool.leave()
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers.items()]
        return Response(reply.status, headers=headers, stream=httpx.ByteStream(reply.body), extensions={REPLY: reply})

    def close(self) -> None:
        """Close the connections that are kept."""
        self._pool.close()

    def _call(self, method: str, data: bytes, target: Target, deadline: Deadline) -> wire.Reply:
        kept = self._pool.take(target.origin)
        reply = self._exchange(kept, method, data, deadline) if kept is not None else None
        if reply is None:
            reply = self._exchange(self._connect(target, deadline), method, data, deadline)
        assert reply is not None
        return reply

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

    def _connect(self, target: Target, deadline: Deadline) -> Connection:
        connection = self._connect_any(target, self._resolver.resolve(target.host, target.port, deadline.left_s()), deadline)
        if target.scheme == "https":
            try:
                connection.handshake(self._context(), target.host, deadline)
            except BaseException:
                connection.close()
                raise
        return connection

    def _connect_any(self, target: Target, addresses: list[Address], deadline: Deadline) -> Connection:
        """Connect to the first address that answers; each gets an equal share of the time that is left."""
        failure = CallFailed(ErrorCode.CONNECT_TIMEOUT, f"no connection to {target.host} within {deadline.total_s:g} s")
        for number, (family, address) in enumerate(addresses):
            share = Deadline(deadline.left_s() / (len(addresses) - number))
            if share.total_s <= 0:
                break
            try:
                return _connect_one(target, family, address, share)
            except CallFailed as e:
                failure = e
        raise failure


def _connect_one(target: Target, family: socket.AddressFamily, address: tuple[str, int], deadline: Deadline) -> Connection:
    where = target.authority if address[0] == target.host else f"{target.authority} ({address[0]})"
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as e:
        raise CallFailed(_connect_code(e.errno), f"no socket for {where}: {_text(e)}") from None
    connection = Connection(sock, target.origin, where)
    try:
        connection.connect(address, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_code(error: int | None) -> ErrorCode:
    match error:
        case errno.ECONNREFUSED:
            return ErrorCode.CONNECT_REFUSED
        case errno.ETIMEDOUT:
            return ErrorCode.CONNECT_TIMEOUT
        case errno.ECONNRESET | errno.EPIPE | errno.ECONNABORTED:
            return ErrorCode.RESET
        case errno.EMFILE | errno.ENFILE | errno.ENOBUFS | errno.ENOMEM:
            return ErrorCode.PLATFORM
    return ErrorCode.UNREACHABLE


def _text(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
