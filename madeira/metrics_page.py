"""The /metrics page of processes that are no web servers: the workers and the scheduler."""

import hashlib
import hmac
import http.client
import socket
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from madeira import metrics

#: Seconds that a client may take for its request.
_TIMEOUT_S: Final = 10.0

#: The header of every answer that says whose numbers the page tells: the `mark` of their folder.
FOLDER_HEADER: Final = "X-Madeira-Metrics-Folder"

#: Seconds that a page may take to say whose it is.
_ASK_S: Final = 2.0

#: Where to ask whoever listens at every address of the machine.
_WILDCARDS: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nothing is bound there


def serve(host: str, port: int, *, folder: Path | None, token: str = "") -> ThreadingHTTPServer:
    """A server of `metrics.page` at ``/metrics``, bound and not running yet: call its ``serve_forever``.

    `folder` is where its numbers are, None for those of this process. Unless it is empty, `token` must come with each request.
    Raises OSError or UnicodeError when the address cannot be bound.
    """
    return _Server((host, port), token, folder)


def mark(folder: Path | None) -> str:
    """What tells one folder of numbers from another on this machine, by whatever path it is reached, and tells no path."""
    try:
        found = folder.stat() if folder else None
    except OSError:
        found = None
    text = f"{found.st_dev}:{found.st_ino}" if found else str(folder)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mark_at(host: str, port: int) -> str | None:
    """The `mark` of the page that is served there now; None when what answers is no page of `serve`'s, or nothing answers."""
    connection = http.client.HTTPConnection(_WILDCARDS.get(host, host), port, timeout=_ASK_S)
    with closing(connection):
        try:
            # Not the page itself, which takes time and may want a token.
            connection.request("HEAD", "/")
            return connection.getresponse().getheader(FOLDER_HEADER)
        except (OSError, http.client.HTTPException):
            return None


def is_allowed(authorization: str, token: str) -> bool:
    """Whether a request with this ``Authorization`` may see the page: without a `token` each may."""
    scheme, _, given = authorization.partition(" ")
    wanted = token.encode()
    return not token or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), wanted))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str, folder: Path | None) -> None:
        self.token = token
        self.folder = folder
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Page)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that has gone is no event."""


class _Page(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server
    _is_other_method = False

    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        if not is_allowed(self.headers.get("Authorization", ""), self.server.token):
            self.send_error(HTTPStatus.UNAUTHORIZED)
            return
        body = metrics.page()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", metrics.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse; a method that there is no ``do_`` for is one that this page does not have."""
        self._is_other_method = code == HTTPStatus.NOT_IMPLEMENTED
        if self._is_other_method:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, None
        super().send_error(code, message, explain)

    def end_headers(self) -> None:
        """Say on every answer whose page this is."""
        self.send_header(FOLDER_HEADER, mark(self.server.folder))
        if self._is_other_method:
            self.send_header("Allow", "GET, HEAD")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no event."""
