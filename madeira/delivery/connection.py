"""One connection to a receiver: a non-blocking socket, every wait on which ends with the deadline of the call.

Connections are made here too: to the first of some addresses that answers, with TLS where the URL says so, and TLS checks
the name, not the address.
"""

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from madeira.delivery.answer import CallFailed
from madeira.delivery.resolve import Address
from madeira.records import ClientCertificate
from madeira.states import ErrorCode
from madeira.target import Target

#: Bytes asked for in one read.
_READ: Final = 65_536

#: Seconds to wait for the RST that shows that a request was refused unread.
_REFUSAL_WAIT_S: Final = 0.25

_BROKEN: Final = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)

#: What calls may share a connection: scheme, host and port, and what the receiver was shown.
Line = tuple[tuple[str, str, int], ClientCertificate | None]


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

    __slots__ = (
        "_poller",
        "_refused",
        "_socket",
        "deadline",
        "idle_since",
        "line",
        "peer",
        "received",
        "reused",
        "sent",
        "where",
    )

    def __init__(self, sock: socket.socket, line: Line, peer: str, where: str) -> None:
        self._socket = sock
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._refused = False
        self.line = line
        #: The address that it leads to.
        self.peer = peer
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


def connect(
    target: Target,
    certificate: ClientCertificate | None,
    addresses: Sequence[Address],
    context: ssl.SSLContext | None,
    deadline: Deadline,
) -> Connection:
    """Connect to the first of `addresses` that answers, with TLS by `context` unless it is None.

    Raises:
        CallFailed: as `Connection.connect` for the last address, and `Connection.handshake`.
    """
    connection = _connect_any(target, certificate, addresses, deadline)
    if context is not None:
        try:
            connection.handshake(context, target.host, deadline)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_any(
    target: Target, certificate: ClientCertificate | None, addresses: Sequence[Address], deadline: Deadline
) -> Connection:
    """Connect to the first address that answers; each gets an equal share of the time that is left."""
    failure = CallFailed(ErrorCode.CONNECT_TIMEOUT, f"no connection to {target.host} within {deadline.total_s:g} s")
    for number, where in enumerate(addresses):
        share = Deadline(deadline.left_s() / (len(addresses) - number))
        if share.total_s <= 0:
            break
        try:
            return _connect_one(target, certificate, where, share)
        except CallFailed as e:
            failure = e
    raise failure


def _connect_one(target: Target, certificate: ClientCertificate | None, where: Address, deadline: Deadline) -> Connection:
    family, address = where
    peer = address[0]
    shown = target.authority if peer == target.host else f"{target.authority} ({peer})"
    try:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as e:
        raise CallFailed(_connect_code(e.errno), f"no socket for {shown}: {_text(e)}") from None
    connection = Connection(sock, (target.origin, certificate), peer, shown)
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
