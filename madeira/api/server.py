"""How gunicorn serves the API: its threaded worker with eight differences, and its log in the form of all our logs.

What gunicorn refuses by itself, before any application sees it (a header with a control character, a malformed chunk), is
told as a problem document like every other error. A request gets a thread when it has arrived, its head and a body that is not
large, and waits in the kernel until then: slow senders, however many, hold no thread that a probe needs. And a worker that
stops takes what has already reached its socket and then closes the socket at once: left open until the last request has ended,
as gunicorn does, it would let the kernel accept connections that nobody will answer, and reset them at the end. And a client
that is slow to close after its last answer is waited for at the poller: gunicorn's main thread waits for it, two seconds in
which nobody else is served. And a request that names no host is refused, as the standard has it. And the thread that has answered
a client which posts one request after the other waits a moment for the next one, while a quarter of the threads is free: the way
through the main thread costs a tenth of what a post does. And no thread waits for a body that nobody wants: where it has not
come, the connection ends. And when the master was killed, each answer says that it is the last one.
"""

import logging
import math
import os
import re
import select
import selectors
import socket
import time
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from gunicorn import glogging, util  # type: ignore[import-untyped]
from gunicorn.http import errors  # type: ignore[import-untyped]
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, ThreadWorker  # type: ignore[import-untyped]

from madeira import log
from madeira.api import app, batch, closing, problems, reading

#: Seconds after which an answer is worth a line of its own.
SLOW_S: Final = 1.0

#: Bytes of a request that wait in the kernel for the rest of it; a head must be smaller, of a larger body the rest is read by
#: a thread.
WAITING_MAX: Final = 65_536

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*(?=\r\n)", re.IGNORECASE)

#: A body that is not simply to be waited for: its sender waits for a word first, or it is in chunks.
_NOT_PLAIN: Final = re.compile(rb"\r\n(?:expect|transfer-encoding)[ \t]*:", re.IGNORECASE)

#: The one kind of request whose body may be larger than an event's.
_BATCH: Final = b"POST /v1/events/batch"

#: The state of a connection that neither side has closed (Linux's ``tcpi_state``).
_ESTABLISHED: Final = 1

#: Seconds that a client may take to close after its last answer, and bytes that it may still send (RFC 9112, section 9.6).
_PARTING_S: Final = 2.0
_PARTING_MAX: Final = 65_536

#: Seconds for which a thread waits for the next request of a client whose last one came within that time.
_LINGER_S: Final = 0.03

#: Seconds for which a thread reads what nobody wanted of a body that has come already.
_REST_S: Final = 0.25

#: What a thread returns of a connection whose request has not arrived.
_WAITS: Final = object()

#: Since when a request names the host that it is for.
_NAMES_ITS_HOST: Final = (1, 1)


class NoHost(errors.ParseException):  # type: ignore[misc]
    """A request that does not name the host that it is for; RFC 9112, section 3.2, has it refused."""


_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (errors.LimitRequestLine, 414, "the request line is too long"),
    (errors.LimitRequestHeaders, 431, "the headers are too many or too long"),
    (errors.ExpectationFailed, 417, "only Expect: 100-continue is supported"),
    (errors.UnsupportedTransferCoding, 501, "Transfer-Encoding may be chunked only"),
    (errors.InvalidHeaderName, 400, "the name of a header is not valid"),
    (errors.InvalidHeader, 400, "a header is repeated, contradictory, or holds what it may not"),
    (errors.ObsoleteFolding, 400, "a header is folded over several lines"),
    (NoHost, 400, "the header Host is missing"),
    (errors.ParseException, 400, "the request is malformed"),
)

_log = log.get(__name__)


class Worker(ThreadWorker):  # type: ignore[misc]
    """A threaded worker whose own refusals are problem documents, and that leaves nobody waiting when it stops."""

    #: Whether it goes on.
    alive: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Connections that had their last answer.
        self._parting: list[Any] = []
        #: Connections that have a thread or wait for one.
        self._in_hand = 0

    def accept(self, listener: Any) -> None:
        """Take a connection, if there is one."""
        super().accept(closing.Admitting(listener))

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """Answer a request that no application saw."""
        for kind, status, detail in _REFUSALS:
            if isinstance(exc, kind):
                _log.info("http.refused", status=status, reason=type(exc).__name__)
                _answer(client, status, detail)
                return
        _log.error("http.failed", exc_info=exc)
        _answer(client, 500, "an error inside Madeira; it is in the log")

    def enqueue_req(self, conn: Any) -> None:
        """Have a thread see to a connection."""
        self._in_hand += 1
        super().enqueue_req(conn)

    def handle(self, conn: Any) -> Any:
        """See to a connection, in a thread: serve its request, and those that follow closely."""
        follows = time.monotonic() - getattr(conn, "answered", -math.inf) <= _LINGER_S
        while (result := self._handle(conn)) is True:
            conn.answered = time.monotonic()
            follows = follows and self._lingers(conn)
            if not follows:
                break
        return result

    def _lingers(self, conn: Any) -> bool:
        """Whether the next request of a connection comes in a moment; nobody waits while others may want the thread."""
        if self.cfg.is_ssl or not self.alive or self._in_hand > self.cfg.threads * 3 // 4:
            return False
        poll = select.poll()
        poll.register(conn.sock, select.POLLIN)
        return bool(_held(conn) or poll.poll(_LINGER_S * 1000))

    def _handle(self, conn: Any) -> Any:
        """Serve a request that has arrived; of another one only see how far it has come."""
        if self.cfg.is_ssl or conn.sock.family not in (socket.AF_INET, socket.AF_INET6) or getattr(conn, "is_http2", False):
            return super().handle(conn)
        # When the first byte of the request that is under way came; None before.
        since = conn.since = getattr(conn, "since", None)
        try:
            conn.sock.setblocking(False)
            come, needed = _arrived(conn)
        except OSError:
            return False
        if come > WAITING_MAX:
            _answer(conn.sock, 431, "the headers are too many or too long")
            return False
        if come >= needed:
            conn.since = None
            conn.data_ready = True
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return super().handle(conn)
        now = time.monotonic()
        if come and since is None:
            conn.since = since = now
        if since is not None and now >= since + reading.allowed_s(needed):
            _answer(conn.sock, 408, "the request did not come in time")
            return False
        # Not before there is more than now: a socket with something to read would wake the poller all the time.
        wanted = come + 1 if needed > WAITING_MAX else needed
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted - len(_held(conn)))
        conn.wait_until = now + self.cfg.keepalive if since is None else since + reading.allowed_s(needed)
        return _WAITS

    def handle_request(self, req: Any, conn: Any) -> bool:
        """Have a request answered; whether the connection is kept."""
        if req.version >= _NAMES_ITS_HOST and not any(name == "HOST" for name, _ in req.headers):
            raise NoHost
        # For whoever reads the body, and finds that nothing can follow it.
        req.body.message = req
        return bool(super().handle_request(req, conn))

    def _keepalive_after(self, conn: Any, keepalive: bool) -> bool:
        """Whether the connection is kept: not if what was not read of the body has yet to come, which no thread waits for."""
        return keepalive and bool(conn.parser.finish_body(deadline=time.monotonic() + _REST_S))

    def finish_request(self, conn: Any, fs: Any) -> None:
        """What follows a thread's work, in the main thread: a request that has not arrived waits at the poller."""
        self._in_hand -= 1
        result = False if fs.cancelled() or fs.exception() is not None else fs.result()
        if not result and not self.cfg.is_ssl:
            self._part(conn)
            return
        if result is not _WAITS:
            super().finish_request(conn, fs)
            return
        conn.timeout = conn.wait_until
        if not self.alive and conn.since is None:
            conn.timeout = min(conn.timeout, time.monotonic() + STOP_KEEPALIVE_LINGER)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def _part(self, conn: Any) -> None:
        """Close our side of a connection, and the whole when the client has closed too: unread bytes would reset it."""
        try:
            conn.sock.shutdown(socket.SHUT_WR)
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            conn.sock.setblocking(False)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self._read_rest, conn))
        except (OSError, ValueError):
            self.nr_conns -= 1
            conn.close()
            return
        conn.timeout = time.monotonic() + _PARTING_S
        conn.rest = 0
        self._parting.append(conn)

    def _read_rest(self, conn: Any, _sock: Any) -> None:
        try:
            read = len(conn.sock.recv(_PARTING_MAX))
        except BlockingIOError:
            return
        except OSError:
            read = 0
        conn.rest += read
        if read == 0 or conn.rest >= _PARTING_MAX:
            self._parted(conn)

    def _parted(self, conn: Any) -> None:
        self._parting.remove(conn)
        self.poller.unregister(conn.sock)
        self.nr_conns -= 1
        conn.close()

    def murder_pending(self) -> None:
        """Give up those whose time is up; whoever has sent something is told so."""
        now = time.monotonic()
        for conn in [conn for conn in self._parting if conn.timeout <= now]:
            self._parted(conn)
        for conn in [conn for conn in self.pending_conns if conn.timeout <= now]:
            self.pending_conns.remove(conn)
            self.poller.unregister(conn.sock)
            if conn.since is not None:
                self.enqueue_req(conn)
            else:
                self.nr_conns -= 1
                conn.close()

    def _cap_keepalive(self, deadline: float) -> None:
        """Keep no connection without a request longer than until `deadline`."""
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            if conn.since is None:
                conn.timeout = min(conn.timeout, deadline)

    def set_accept_enabled(self, enabled: bool) -> None:
        """Begin or cease to accept connections; the last time, first take those that are already there.

        It is the last time, too, when the master was killed: a new one needs the socket.
        """
        super().set_accept_enabled(enabled)
        if enabled or (self.alive and self.ppid == os.getppid()):
            return
        # gunicorn leaves it true when the master has gone; then each answer says that it is the last, and no thread waits.
        self.alive = False
        for listener in self.sockets:
            self._take_all(listener)
            listener.close()

    def _take_all(self, listener: Any) -> None:
        listener.setblocking(False)
        before = -1
        while before != self.nr_conns < self.worker_connections:
            before = self.nr_conns
            self.accept(listener)


class Logger(glogging.Logger):  # type: ignore[misc]
    """gunicorn's logger, whose lines go the way of all our lines.

    An answer gets a line when it is an error or was slow; at level ``debug`` every one does. What was accepted is on record
    in Postgres.
    """

    def setup(self, cfg: Any) -> None:
        """Take the place of gunicorn's own handlers and formats."""
        self.cfg = cfg
        s = app.settings
        log.configure(s, "api")
        log.catch()
        self.loglevel = getattr(logging, s.log_level.upper())
        self.error_log.setLevel(self.loglevel)
        self.error_log.propagate = True
        self._every = self.loglevel <= logging.DEBUG

    @property
    def access_log_enabled(self) -> bool:
        """Whether `access` wants to be called."""
        return True

    def access(self, resp: Any, req: Any, environ: Any, request_time: timedelta) -> None:
        """Tell of one answer."""
        status = resp.status_code if hasattr(resp, "status_code") else _status(resp.status)
        slow = request_time.total_seconds() > SLOW_S
        if status < HTTPStatus.BAD_REQUEST and not slow and not self._every:
            return
        _log.log(
            logging.WARNING if slow or status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO,
            "http.answered",
            method=environ.get("REQUEST_METHOD"),
            path=environ.get("PATH_INFO"),
            source=environ.get("HTTP_X_MADEIRA_SOURCE"),
            status=status,
            duration_s=request_time.total_seconds(),
            client=environ.get("REMOTE_ADDR"),
        )


def _arrived(conn: Any) -> tuple[int, int]:
    """How many bytes of a request have come, and how many it takes before it is served."""
    is_closed = False
    try:
        waiting = conn.sock.recv(WAITING_MAX + 1, socket.MSG_PEEK)
        is_closed = not waiting
    except BlockingIOError:
        waiting = b""
    if is_closed or conn.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        # The sender has closed: whatever has come is all that there is.
        return 0, 0
    data = _held(conn) + waiting
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return len(data), WAITING_MAX + 1
    lengths = _LENGTH.findall(data, 0, end + 2)
    # What will be refused by its head is refused at once.
    if len(lengths) != 1 or int(lengths[0]) > _limit(data) or _NOT_PLAIN.search(data, 0, end + 2):
        return 0, 0
    return min(len(data), WAITING_MAX), min(end + 4 + int(lengths[0]), WAITING_MAX)


def _limit(data: bytes) -> int:
    """Bytes that the body of the request that begins with `data` may have."""
    return batch.MAX_BYTES if data.startswith(_BATCH) else int(app.settings.max_body)


def _held(conn: Any) -> bytes:
    """What was read of this request already, behind the one before."""
    return conn.parser.unreader.buf.getvalue() if conn.parser is not None else b""


def _status(line: Any) -> int:
    digits = str(line).split(None, 1)[0]
    return int(digits) if digits.isdigit() else 0


def _answer(client: socket.socket, status: int, detail: str) -> None:
    body = problems.parts(status, detail)
    head = (
        f"HTTP/1.1 {status} {problems.title(status)}\r\nConnection: close\r\n"
        f"Content-Type: {problems.MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        util.write_nonblock(client, head.encode("latin-1") + body)
    except OSError:
        _log.debug("http.client_gone")
