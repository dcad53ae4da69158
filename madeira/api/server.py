"""How gunicorn serves the API: its threaded worker with two differences, and its log in the form of all our logs.

What gunicorn refuses by itself, before any application sees it (a header with a control character, a malformed chunk), is
told as a problem document like every other error. And a worker that stops takes what has already reached its socket and
then closes the socket at once: left open until the last request has ended, as gunicorn does, it would let the kernel
accept connections that nobody will answer, and reset them at the end.
"""

import logging
import os
import socket
from datetime import timedelta
from http import HTTPStatus
from typing import Any, Final

from gunicorn import glogging, util  # type: ignore[import-untyped]
from gunicorn.http import errors  # type: ignore[import-untyped]
from gunicorn.workers.gthread import ThreadWorker  # type: ignore[import-untyped]

from madeira import log
from madeira.api import app, problems

#: Seconds after which an answer is worth a line of its own.
SLOW_S: Final = 1.0

_REFUSALS: Final[tuple[tuple[type[Exception], int, str], ...]] = (
    (errors.LimitRequestLine, 414, "the request line is too long"),
    (errors.LimitRequestHeaders, 431, "the headers are too many or too long"),
    (errors.ExpectationFailed, 417, "only Expect: 100-continue is supported"),
    (errors.UnsupportedTransferCoding, 501, "Transfer-Encoding may be chunked only"),
    (errors.InvalidHeaderName, 400, "the name of a header is not valid"),
    (errors.InvalidHeader, 400, "a header is repeated, contradictory, or holds what it may not"),
    (errors.ObsoleteFolding, 400, "a header is folded over several lines"),
    (errors.ParseException, 400, "the request is malformed"),
)

_log = log.get(__name__)


class Worker(ThreadWorker):  # type: ignore[misc]
    """A threaded worker whose own refusals are problem documents, and that leaves nobody waiting when it stops."""

    def handle_error(self, req: Any, client: socket.socket, addr: Any, exc: Exception) -> None:
        """Answer a request that no application saw."""
        for kind, status, detail in _REFUSALS:
            if isinstance(exc, kind):
                _log.info("http.refused", status=status, reason=type(exc).__name__)
                _answer(client, status, detail)
                return
        _log.error("http.failed", exc_info=exc)
        _answer(client, 500, "an error inside Madeira; it is in the log")

    def set_accept_enabled(self, enabled: bool) -> None:
        """Begin or cease to accept connections; the last time, first take those that are already there.

        It is the last time, too, when the master was killed: a new one needs the socket.
        """
        super().set_accept_enabled(enabled)
        if enabled or (self.alive and self.ppid == os.getppid()):
            return
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
