"""`madeira listen`: a receiver for development. It verifies what comes in and prints it.

It checks signatures with the published package `standardwebhooks`, as a receiver written by somebody else would.
"""

import json
import threading
from collections import Counter
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import click
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from madeira.delivery.signing import standard_key
from madeira.settings import secret_reference

#: Bytes of a body that are printed.
_SHOWN: Final = 150

#: Largest body that is read.
_MAX_BODY: Final = 16 * 1024 * 1024

#: Calls of one delivery that the sample receiver answers with 503 before it takes it.
_SHAKY: Final = 2


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8900, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0: any.")
@click.option(
    "--secret",
    multiple=True,
    help="Secret that calls are signed with, best as env:NAME: a literal is seen in the list of processes. Several: any fits.",
)
@click.option("--status", default=200, show_default=True, type=click.IntRange(100, 599), help="Status to answer with.")
@click.option("--body", default='{"success": true}', show_default=True, help="Body to answer with.")
@click.option("--sample", is_flag=True, help="Answer by the event type, as `madeira up --demo` needs it.")
def listen(host: str, port: int, secret: tuple[str, ...], status: int, body: str, sample: bool) -> None:
    """Receive calls, verify their signatures and print them."""
    answers = SampleAnswers() if sample else FixedAnswer(status, body.encode())
    verifiers = [_verifier(s) for s in secret]
    try:
        server = Receiver((host, port), verifiers=verifiers, answers=answers)
    except (OSError, UnicodeError) as e:
        reason = getattr(e, "strerror", None) or "the host is no possible name"
        raise click.ClickException(
            f"cannot listen on {one_line(host)} port {port}: {reason}; choose another --port (0: any free one) or --host"
        ) from None
    click.echo(f"listening on http://{host}:{server.server_port}/")
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("stopped")


class FixedAnswer:
    """The same answer to every call."""

    def __init__(self, status: int, body: bytes) -> None:
        self._answer = (status, body)

    def __call__(self, _event: dict[str, Any], _delivery: str) -> tuple[int, bytes]:
        """Status and body."""
        return self._answer


class SampleAnswers:
    """What the receiver of the demo answers: good, busy at first, refusing, or saying no in a 200."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, event: dict[str, Any], delivery: str) -> tuple[int, bytes]:
        """Status and body, by the event's type."""
        kind = str(event.get("event_type"))
        if kind == "sample.shaky" and self._count(delivery) <= _SHAKY:
            return 503, b'{"error": "busy, come again"}'
        if kind == "sample.refused":
            return 400, b'{"error": "this account does not exist"}'
        if kind == "sample.unwelcome":
            return 200, b'{"success": false, "message": "the ledger is closed"}'
        return 200, b'{"success": true}'

    def _count(self, delivery: str) -> int:
        with self._lock:
            self._calls[delivery] += 1
            return self._calls[delivery]


Answers = FixedAnswer | SampleAnswers


class Receiver(ThreadingHTTPServer):
    """The server: each call is verified, printed and answered in a thread of its own."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], *, verifiers: list[Webhook], answers: Answers) -> None:
        super().__init__(address, _Call)
        self.verifiers = verifiers
        self.answers = answers

    def verify(self, body: bytes, headers: dict[str, str]) -> str:
        """What is to be said about the signature."""
        if not self.verifiers:
            return "not verified"
        for verifier in self.verifiers:
            try:
                verifier.verify(body, headers, json_parse=False)
            except (WebhookVerificationError, ValueError):
                # A malformed signature, or a body that is no text, is a ValueError to the package.
                continue
            return "signature good"
        return "SIGNATURE WRONG"


class _Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MAX_BODY:
            self.close_connection = True
            self._answer(413, b"")
            return
        body = self.rfile.read(length)
        verified = self.server.verify(body, {k.lower(): v for k, v in self.headers.items()})
        status, answer = self._judge(body, verified)
        self._tell(body, verified, status)
        self._answer(status, answer)

    do_PUT = do_PATCH = do_POST

    def _judge(self, body: bytes, verified: str) -> tuple[int, bytes]:
        if verified == "SIGNATURE WRONG":
            return 401, b'{"error": "signature"}'
        try:
            event = json.loads(body)
        except ValueError:
            event = None
        return self.server.answers(event if isinstance(event, dict) else {}, self.headers.get("webhook-id", ""))

    def _tell(self, body: bytes, verified: str, status: int) -> None:
        time = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
        attempt = self.headers.get("X-Madeira-Attempt", "?")
        shown = body[:_SHOWN].decode("utf-8", "replace") + ("…" if len(body) > _SHOWN else "")
        click.echo(f"{time} {self.command} {self.path} attempt {attempt}, {verified}, answered {status}: {one_line(shown)}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: `_tell` does."""


def one_line(text: str) -> str:
    """`text` in one line without control characters: what strangers send must not drive the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.replace("\n", " "))


def _verifier(secret: str) -> Webhook:
    """What verifies the calls of an endpoint with that secret, or with that ``env:NAME``."""
    found = secret_reference(secret, "--secret")
    try:
        # The package takes a text for base64; the key is handed to it, since a secret may be any text.
        return Webhook(standard_key(found))
    except ValueError:
        reason = "a secret that begins with whsec_ must go on in base64, and others be text"
        raise click.BadParameter(reason, param_hint="--secret") from None
