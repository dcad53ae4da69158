"""Receives Madeira's calls with Madeira's Python client.

PORT=8901 SECRETS="the-new-secret the-old-secret" python receive.py
"""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from madeira.client import VerificationFailed, verify

SECRETS = os.environ["SECRETS"].split()
#: The deliveries that were taken in; in real life a table with a unique key.
known: set[str] = set()


class Receiver(BaseHTTPRequestHandler):
    """Answers 204 to what Madeira sent, and 401 to everything else."""

    protocol_version = "HTTP/1.1"  # keeps the connection open between calls

    def do_POST(self) -> None:
        """Take in one call."""
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(min(length, 16 * 1024 * 1024))
        try:
            delivery = verify(self.headers, body, SECRETS)
        except VerificationFailed as e:
            print(f"refused: {e}", flush=True)
            self.answer(401)
            return
        if delivery.webhook_id not in known:
            known.add(delivery.webhook_id)
            print(f"{delivery.event_type} {delivery.event_id}", flush=True)
        self.answer(204)

    def answer(self, status: int) -> None:
        """Answer without a body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Receiver) as server:
        print(f"listening on port {server.server_port}", flush=True)
        server.serve_forever()
