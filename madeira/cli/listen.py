"""`madeira listen`: a receiver for development. It verifies what comes in and prints it.

It checks signatures with the published package `standardwebhooks`, as a receiver written by somebody else would.
"""

import json
import socket
import threading
import time
from collections import Counter
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import click
from click.core import ParameterSource
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from madeira.cli.common import json_option
from madeira.cli.faults import Faults
from madeira.cli.filters import Number, Whole
from madeira.delivery.signing import standard_key
from madeira.digits import whole
from madeira.settings import secret_reference

#: Bytes of a body that are printed.
_SHOWN: Final = 150

#: Largest body that is read.
_MAX_BODY: Final = 16 * 1024 * 1024

#: Calls of one delivery that the sample receiver answers with 503 before it takes it.
_SHAKY: Final = 2


#: A share of the calls, and a time.
_SHARE: Final = Number(0, 1)
_SECONDS: Final = Number(0, 3600)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8900, show_default=True, type=Whole(0, 65535), help="Port to listen on; 0: any.")
@click.option(
    "--secret",
    multiple=True,
    help="Secret that calls are signed with, best as env:NAME: a literal is seen in the list of processes. Several: any fits.",
)
@click.option("--status", default=200, show_default=True, type=Whole(200, 599), help="Status to answer with.")
@click.option("--body", default='{"success": true}', show_default=True, help="Body to answer with.")
@click.option("--sample", is_flag=True, help="Answer by the event type, as `madeira up --demo` needs it.")
@click.option("--slow", default=0.0, type=_SECONDS, metavar="SECONDS", help="Wait before each answer.")
@click.option("--fail", default=0.0, type=_SHARE, metavar="SHARE", help="Answer this share of the calls with a failure.")
@click.option("--fail-status", default=503, show_default=True, type=Whole(200, 599), help="Status of such a failure.")
@click.option("--hang", default=0.0, type=_SHARE, metavar="SHARE", help="Never answer this share of the calls.")
@click.option("--drop", default=0.0, type=_SHARE, metavar="SHARE", help="Cut this share of the calls off without an answer.")
@click.option("--refuse", default=0.0, type=_SECONDS, metavar="SECONDS", help="Refuse connections for so long at first.")
@json_option
def listen(
    host: str,
    port: int,
    secret: tuple[str, ...],
    status: int,
    body: str,
    sample: bool,
    slow: float,
    fail: float,
    fail_status: int,
    hang: float,
    drop: float,
    refuse: float,
    as_json: bool,
) -> None:
    """Receive calls, verify their signatures and print them; with --json as one object a line.

    To see what becomes of an endpoint that misbehaves: shares are from 0 to 1, and counted, so that 0.25 is one of every four
    calls.
    """
    _check_together(fail=fail, hang=hang, drop=drop)
    faults = Faults(fail=fail, hang=hang, drop=drop, slow_s=slow, refuse_s=refuse)
    answers = SampleAnswers() if sample else FixedAnswer(status, body.encode())
    verifiers = [_verifier(s) for s in secret]
    try:
        server = Receiver(
            (host, port), verifiers=verifiers, answers=answers, faults=faults, fail_status=fail_status, as_json=as_json
        )
    except (OSError, UnicodeError) as e:
        reason = getattr(e, "strerror", None) or "the host is no possible name"
        raise click.ClickException(
            f"cannot listen on {one_line(host)} port {port}: {reason}; choose another --port (0: any free one) or --host"
        ) from None
    url = f"http://{host}:{server.server_port}/"
    _say(as_json, {"listening": url, "refuses_s": refuse}, f"listening on {url}{f', in {refuse:g} s' if refuse else ''}")
    with server:
        try:
            time.sleep(refuse)
            server.server_activate()
            server.serve_forever()
        except KeyboardInterrupt:
            _say(as_json, {"stopped": True}, "stopped")


def _check_together(**shares: float) -> None:
    """What only means something together, or contradicts itself.

    Raises:
        click.UsageError: it does.
    """
    # In hundredths of hundredths: 0.33, 0.56 and 0.11 are more than 1 to a processor.
    if sum(round(share * 10_000) for share in shares.values()) > 10_000:
        given = [f"--{name} {share:g}" for name, share in shares.items() if share]
        raise click.UsageError(
            f"{' and '.join(given)} are {sum(shares.values()):g} of all calls together, and must not be more than 1"
        )
    given_to = click.get_current_context().get_parameter_source
    is_given = {name for name in ("status", "body", "sample", "fail_status") if given_to(name) is not ParameterSource.DEFAULT}
    if "fail_status" in is_given and not shares["fail"]:
        raise click.UsageError("--fail-status needs --fail: without it no call is answered with a failure")
    if "sample" in is_given and is_given & {"status", "body"}:
        raise click.UsageError("--sample answers by the event type; leave --status and --body out, or --sample")


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(document) if as_json else text)


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


#: What is said of a signature, as a program reads it.
_SIGNATURES: Final = {"signature good": "good", "SIGNATURE WRONG": "wrong", "not verified": "not verified"}

Answers = FixedAnswer | SampleAnswers


class Receiver(ThreadingHTTPServer):
    """The server: each call is verified, printed and answered in a thread of its own."""

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        *,
        verifiers: list[Webhook],
        answers: Answers,
        faults: Faults | None = None,
        fail_status: int = 503,
        as_json: bool = False,
    ) -> None:
        # Bound only: until it is activated, connections are refused.
        super().__init__(address, _Call, bind_and_activate=False)
        self.verifiers = verifiers
        self.answers = answers
        self.faults = faults or Faults()
        self.fail_status = fail_status
        self.as_json = as_json
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

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
        length = _number(self.headers.get("Content-Length", "0"))
        if length is None or not 0 <= length <= _MAX_BODY:
            self.close_connection = True
            self._answer(400 if length is None or length < 0 else 413, b"")
            return
        body = self.rfile.read(length)
        verified = self.server.verify(body, {k.lower(): v for k, v in self.headers.items()})
        fault = self.server.faults.meet()
        status, answer = self._judge(body, verified)
        if fault == "fail":
            status, answer = self.server.fail_status, b'{"error": "as asked for"}'
        self._tell(body, verified, None if fault in ("hang", "drop") else status, fault)
        if fault == "drop":
            self._cut()
            return
        if fault == "hang":
            # Until whoever called has had enough.
            self.rfile.read(1)
            self._cut()
            return
        time.sleep(self.server.faults.slow_s)
        self._answer(status, answer)

    def _cut(self) -> None:
        self.close_connection = True
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # It is gone already.
            return

    do_PUT = do_PATCH = do_POST

    def _judge(self, body: bytes, verified: str) -> tuple[int, bytes]:
        if verified == "SIGNATURE WRONG":
            return 401, b'{"error": "signature"}'
        try:
            event = json.loads(body)
        except ValueError:
            event = None
        return self.server.answers(event if isinstance(event, dict) else {}, self.headers.get("webhook-id", ""))

    def _tell(self, body: bytes, verified: str, status: int | None, fault: str | None) -> None:
        now = datetime.now().astimezone()
        attempt = self.headers.get("X-Madeira-Attempt", "?")
        if self.server.as_json:
            told = {
                "at": now.isoformat(),
                "method": self.command,
                "path": self.path,
                "webhook_id": self.headers.get("webhook-id"),
                "attempt": _number(attempt),
                "signature": _SIGNATURES[verified],
                "answered": status,
                "fault": fault,
                "body": body.decode("utf-8", "replace"),
            }
            click.echo(json.dumps(told))
            return
        shown = body[:_SHOWN].decode("utf-8", "replace") + ("…" if len(body) > _SHOWN else "")
        answered = f"answered {status}" if status is not None else {"hang": "never answered", "drop": "cut off"}[fault or ""]
        said = f"{now:%H:%M:%S}.{now.microsecond // 1000:03} {self.command} {self.path} attempt {attempt}, {verified}"
        click.echo(f"{said}, {answered}: {one_line(shown)}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: `_tell` does."""


def _number(text: str) -> int | None:
    try:
        return whole(text)
    except ValueError:
        return None


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
