"""How gunicorn serves the API: its threaded worker, with these differences.

- What gunicorn refuses by itself, before any application sees it (a header with a control character, a malformed chunk), is told
  as a problem document like every other error. A request that names no host is refused, as the standard has it.
- A request gets a thread when it has arrived, its head and a body that is not large, and waits in the kernel until then: slow
  senders, however many, hold no thread that a probe needs. Of the bodies that a thread must wait for, since they are large, in
  chunks, or asked for (``Expect``), no more are read at once than leave a quarter of the threads to all others.
- An answer whose reader is slow is the poller's too. No thread waits for a body that nobody wants, nor the main one for a client
  that is slow to close after its last answer.
- The thread that has answered a client which posts one request after the other waits a moment for the next one, while a quarter
  of the threads is free: the way through the main thread costs a tenth of what a post does.
- A worker that stops takes what has already reached its socket and then closes the socket at once: left open until the last
  request has ended, it would let the kernel accept connections that nobody will answer, and reset them at the end.
- The processes share the connections evenly. Of too many the one that has been idle for longest is closed.
- When the master was killed, each answer says that it is the last one.
"""

import errno
import math
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Final

from gunicorn.http import errors  # type: ignore[import-untyped]
from gunicorn.workers.gthread import STOP_KEEPALIVE_LINGER, ThreadWorker  # type: ignore[import-untyped]

from madeira import log
from madeira.api import arrival, closing, reading, refusing, sending, sharing

#: Seconds that a client may take to close after its last answer, and bytes that it may still send (RFC 9112, section 9.6).
_PARTING_S: Final = 2.0
_PARTING_MAX: Final = 65_536

#: What the kernel says when it has no more for this process, or for any.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Seconds after which it is asked again.
_RECOVERS_S: Final = 0.5

#: Seconds for which a thread waits for the next request of a client whose last one came within that time.
_LINGER_S: Final = 0.03

#: Seconds for which a thread reads what nobody wanted of a body that has come already.
_REST_S: Final = 0.25

#: What a thread returns of a connection whose request has not arrived.
_WAITS: Final = object()

#: The same, where its body must be waited for by a thread, and as many threads as may do.
_PARKED: Final = object()

#: Seconds after which it waits no longer: three times as long as a thread waits for a body that does not come.
_PARKED_S: Final = 3 * reading.PATIENCE_S

#: Of all workers of this master.
shares: Final = sharing.Shares()

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
        #: Connections whose body a thread waits for, and those whose turn it is when one of them is done.
        self._patient = 0
        self._parked: deque[Any] = deque()
        self._counting = threading.Lock()
        #: Connections whose client has not taken an answer.
        self._unsent: list[Any] = []
        self._turn = sharing.Turn(shares)
        #: Until when no connection is taken, since there are no files for them.
        self._exhausted_until = 0.0
        self._is_exhausted = False

    def accept(self, listener: Any) -> None:
        """Take a connection, if there is one, and it is not another process' turn."""
        if self.alive and self._turn.leaves(self.nr_conns):
            super().set_accept_enabled(False)
            return
        try:
            super().accept(closing.Admitting(listener))
        except OSError as e:
            if e.errno not in _EXHAUSTED:
                raise
            _log.warning("http.not_accepted", reason=str(e), connections=self.nr_conns)
            self._exhausted_until = time.monotonic() + _RECOVERS_S
            super().set_accept_enabled(False)
            # Room is made when all has been seen to that came with this: an idle connection may have a request by now.
            self._is_exhausted = True

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """Answer a request that no application saw."""
        refusing.refuse(client, exc)

    def enqueue_req(self, conn: Any) -> None:
        """Have a thread see to a connection."""
        self._in_hand += 1
        conn.has_turn = getattr(conn, "has_turn", False)
        super().enqueue_req(conn)

    def handle(self, conn: Any) -> Any:
        """See to a connection, in a thread: serve its request, and those that follow closely."""
        conn.unsent = b""
        follows = time.monotonic() - getattr(conn, "answered", -math.inf) <= _LINGER_S
        while (result := self._handle(conn)) is True and not conn.unsent:
            conn.answered = time.monotonic()
            # Who waits for a body of its own comes first: one who makes no pause would keep its turn for ever.
            follows = follows and not (conn.has_turn and self._parked) and self._lingers(conn)
            if not follows:
                break
        return result

    def _lingers(self, conn: Any) -> bool:
        """Whether the next request of a connection comes in a moment; nobody waits while others may want the thread."""
        if self.cfg.is_ssl or not self.alive or self._in_hand > self.cfg.threads * 3 // 4:
            return False
        poll = select.poll()
        poll.register(conn.sock, select.POLLIN)
        return bool(arrival.held(conn) or poll.poll(_LINGER_S * 1000))

    def _handle(self, conn: Any) -> Any:
        """Serve a request that has arrived; of another one only see how far it has come."""
        if self.cfg.is_ssl or conn.sock.family not in (socket.AF_INET, socket.AF_INET6) or getattr(conn, "is_http2", False):
            return super().handle(conn)
        # When the first byte of the request that is under way came; None before.
        since = conn.since = getattr(conn, "since", None)
        try:
            conn.sock.setblocking(False)
            come, needed, is_whole = arrival.of(conn)
        except OSError:
            return False
        if come > arrival.WAITING_MAX:
            refusing.answer(conn.sock, 431, "the headers are too many or too long")
            return False
        if come >= needed:
            conn.since = None
            conn.data_ready = True
            conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return super().handle(conn) if is_whole else self._handle_patiently(conn)
        now = time.monotonic()
        if come and since is None:
            conn.since = since = now
        if since is not None and now >= since + reading.allowed_s(needed):
            refusing.answer(conn.sock, 408, "the request did not come in time")
            return False
        # Not before there is more than now: a socket with something to read would wake the poller all the time.
        wanted = come + 1 if needed > arrival.WAITING_MAX else needed
        conn.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted - len(arrival.held(conn)))
        conn.wait_until = now + self.cfg.keepalive if since is None else since + reading.allowed_s(needed)
        return _WAITS

    def _handle_patiently(self, conn: Any) -> Any:
        """Serve a request whose body has yet to come, if there is a thread for that."""
        with self._counting:
            if not conn.has_turn and (self._parked or self._patient >= self._patient_max):
                return _PARKED
            self._patient += not conn.has_turn
            conn.has_turn = True
        return super().handle(conn)

    @property
    def _patient_max(self) -> int:
        return max(1, int(self.cfg.threads) * 3 // 4)

    def handle_request(self, req: Any, conn: Any) -> bool:
        """Have a request answered; whether the connection is kept."""
        refusing.require_host(req)
        if any(name == "CONNECTION" and "close" in map(str.strip, value.lower().split(",")) for name, value in req.headers):
            # gunicorn sees it only where it is the one option.
            req.force_close()
        # For whoever reads the body, and finds that nothing can follow it.
        req.body.message = req
        if self.cfg.is_ssl:
            return bool(super().handle_request(req, conn))
        outgoing = sending.Outgoing(conn.sock)
        try:
            is_kept = bool(super().handle_request(req, SimpleNamespace(sock=outgoing, client=conn.client, server=conn.server)))
        except StopIteration:
            # The application failed in the middle of its answer, as gunicorn has logged.
            if outgoing.has_begun:
                sending.break_off(conn.sock)
            else:
                refusing.answer(conn.sock, 500, refusing.FAILED)
            return False
        conn.unsent = outgoing.finish()
        return is_kept

    def _keepalive_after(self, conn: Any, keepalive: bool) -> bool:
        """Whether the connection is kept: not if what was not read of the body has yet to come, which no thread waits for."""
        try:
            return keepalive and bool(conn.parser.finish_body(deadline=time.monotonic() + _REST_S))
        except (errors.ParseException, OSError):
            # The request has had its answer: another one would be taken for that of the next.
            return False

    def finish_request(self, conn: Any, fs: Any) -> None:
        """What follows a thread's work, in the main thread: what has not arrived, or not left, waits at the poller."""
        self._in_hand -= 1
        result = False if fs.cancelled() or fs.exception() is not None else fs.result()
        if result is _PARKED:
            conn.timeout = time.monotonic() + _PARKED_S
            self._parked.append(conn)
        elif result is _WAITS:
            self._await(conn)
        elif conn.unsent:
            conn.timeout = time.monotonic() + reading.allowed_s(len(conn.unsent))
            self._unsent.append(conn)
            self.poller.register(conn.sock, selectors.EVENT_WRITE, partial(self._send_rest, conn, fs, result))
        else:
            self._finish(conn, fs, result)
        self._pass_turn(conn)

    def _pass_turn(self, conn: Any) -> None:
        with self._counting:
            self._patient -= conn.has_turn
            conn.has_turn = False
            if not self._parked or self._patient >= self._patient_max:
                return
            following = self._parked.popleft()
            self._patient += 1
            following.has_turn = True
        self.enqueue_req(following)

    def _await(self, conn: Any) -> None:
        conn.timeout = conn.wait_until
        if not self.alive and conn.since is None:
            conn.timeout = min(conn.timeout, time.monotonic() + STOP_KEEPALIVE_LINGER)
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def _send_rest(self, conn: Any, fs: Any, result: Any, _sock: Any) -> None:
        try:
            sending.push(conn.sock, conn.unsent)
        except OSError:
            self._unread(conn)
            return
        if not conn.unsent:
            self._unsent.remove(conn)
            self.poller.unregister(conn.sock)
            self._finish(conn, fs, result)

    def _unread(self, conn: Any) -> None:
        """Give up a client that does not take its answer."""
        self._unsent.remove(conn)
        self.poller.unregister(conn.sock)
        self.nr_conns -= 1
        sending.give_up(conn.sock)
        conn.close()

    def _finish(self, conn: Any, fs: Any, result: Any) -> None:
        if not result and not self.cfg.is_ssl:
            self._part(conn)
        else:
            super().finish_request(conn, fs)

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
        """Give up those whose time is up; whoever has sent something is told so. Of too many an idle one is given up, too."""
        now = time.monotonic()
        for conn in [conn for conn in self._parting if conn.timeout <= now]:
            self._parted(conn)
        for conn in [conn for conn in self._unsent if conn.timeout <= now]:
            self._unread(conn)
        for conn in [conn for conn in self.pending_conns if conn.timeout <= now]:
            self.pending_conns.remove(conn)
            self.poller.unregister(conn.sock)
            if conn.since is not None:
                self.enqueue_req(conn)
            else:
                self.nr_conns -= 1
                conn.close()
        for conn in [conn for conn in self._parked if conn.timeout <= now]:
            self._parked.remove(conn)
            _log.info("http.refused", status=503, reason="NoTurn")
            refusing.answer(conn.sock, 503, "too many bodies are waited for; try again")
            self._part(conn)
        if self._is_exhausted or self.nr_conns >= self.worker_connections:
            self._is_exhausted = False
            self._make_room()

    def _cap_keepalive(self, deadline: float) -> None:
        """Keep no connection without a request longer than until `deadline`."""
        super()._cap_keepalive(deadline)
        for conn in self.pending_conns:
            if conn.since is None:
                conn.timeout = min(conn.timeout, deadline)

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        """Wait for what comes next; meanwhile the other processes know how many connections this one has."""
        if self.alive and self._exhausted_until > time.monotonic():
            shares.end(self.age)
        elif self.alive:
            shares.tell(self.age, self.nr_conns)
        left_s = self._holds_back_s()
        super().wait_for_and_dispatch_events(min(timeout, left_s) if left_s > 0 else timeout)

    def _holds_back_s(self) -> float:
        """Seconds for which this process takes no connection."""
        return max(self._turn.left_s(self.nr_conns), self._exhausted_until - time.monotonic())

    def _make_room(self) -> None:
        """Close the connection that has been idle for longest: those that are kept in reserve are not to keep others out."""
        kept = [(conn.timeout, self.keepalived_conns, conn) for conn in self.keepalived_conns]
        silent = [(conn.timeout, self.pending_conns, conn) for conn in self.pending_conns if conn.since is None]
        for _, conns, conn in sorted([*kept, *silent], key=itemgetter(0)):
            if not arrival.has_begun(conn.sock):
                conns.remove(conn)
                self.poller.unregister(conn.sock)
                self.nr_conns -= 1
                conn.close()
                return

    def set_accept_enabled(self, enabled: bool) -> None:
        """Begin or cease to accept connections; the last time, first take those that are already there.

        It is the last time, too, when the master was killed: a new one needs the socket.
        """
        if enabled and self._holds_back_s() > 0:
            return
        super().set_accept_enabled(enabled)
        if enabled or (self.alive and self.ppid == os.getppid()):
            return
        # gunicorn leaves it true when the master has gone; then each answer says that it is the last, and no thread waits.
        self.alive = False
        shares.end(self.age)
        for listener in self.sockets:
            self._take_all(listener)
            listener.close()

    def _take_all(self, listener: Any) -> None:
        listener.setblocking(False)
        before = -1
        while before != self.nr_conns < self.worker_connections:
            before = self.nr_conns
            self.accept(listener)
