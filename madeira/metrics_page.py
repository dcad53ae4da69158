"""The /metrics page of processes that are no web servers: the workers and the scheduler."""

import hmac
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from madeira import metrics

#: Seconds that a client may take for its request.
_TIMEOUT_S: Final = 10.0


def serve(host: str, port: int, *, token: str = "") -> ThreadingHTTPServer:
    """A server of `metrics.page` at ``/metrics``, bound and not running yet: call its ``serve_forever``.

    Unless it is empty, `token` must come with each request. Raises OSError or UnicodeError when the address cannot be bound.
    """
    return _Server((host, port), token)


def is_allowed(authorization: str, token: str) -> bool:
    """Whether a request with this ``Authorization`` may see the page: without a `token` each may."""
    scheme, _, given = authorization.partition(" ")
    wanted = token.encode()
    return not token or (scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1", "replace"), wanted))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Page)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that has gone is no event."""


class _Page(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/metrics":
            self.send_error(404)
            return
        if not is_allowed(self.headers.get("Authorization", ""), self.server.token):
            self.send_error(401)
            return
        body = metrics.page()
        self.send_response(200)
        self.send_header("Content-Type", metrics.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no event."""
