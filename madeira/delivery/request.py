"""The request of a claimed delivery.

The body is the same bytes on every attempt: it follows from the event alone, and the payload goes into it as the very bytes
that the upstream sent, never parsed and written again (a 20-digit number or ``1.0`` arrives as it was); or a template of the
endpoint made it when the event was routed. URL, headers and secrets come from the endpoint as it is now, so that a corrected
endpoint helps what is already waiting.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import madeira
from madeira import target, templates, traceparent
from madeira.delivery import signing
from madeira.errors import MadeiraError
from madeira.event_values import EventValues, utc_text
from madeira.headers import is_reserved
from madeira.records import Attempt, Claimed, ClientCertificate, Endpoint
from madeira.states import ErrorCode, Outcome
from madeira.templates import TemplateFailed
from madeira.traceparent import Traceparent

USER_AGENT: Final = f"Madeira/{madeira.__version__}"

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class NotSent(MadeiraError):
    """Raised when a delivery cannot be turned into a request; `attempt` is what goes into the log instead of a call."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(f"{attempt.error_code}: {attempt.reason}")
        self.attempt = attempt


@dataclass(frozen=True, slots=True)
class OutboundRequest:
    """One HTTP request, complete."""

    method: str
    target: target.Target
    #: In the order in which they go on the wire; without Host and Content-Length, which the transport adds.
    headers: list[tuple[str, str]] = field(repr=False)
    body: bytes = field(repr=False)
    #: What is shown to a receiver that asks for a certificate.
    client_certificate: ClientCertificate | None = None

    @property
    def url(self) -> str:
        """The URL that is called, without user and password."""
        return self.target.url


def build(claim: Claimed, endpoint: Endpoint, *, now: datetime, test: bool = False, span: str | None = None) -> OutboundRequest:
    """Make the request for `claim`; `now` becomes its timestamp. `test` says that it is a test call, which its id tells.

    `span` is the ``traceparent`` of whoever records this attempt; without it one is made up.

    Raises:
        NotSent: the URL cannot be called, or a template, a header or a secret of the endpoint cannot be used. No retry mends
            that.
    """
    values = EventValues(claim)
    try:
        url, given = templates.url_of(endpoint, values), templates.headers_of(endpoint, values)
    except TemplateFailed as e:
        why = f"endpoint {endpoint.name}: {e.reason}"
        raise NotSent(_refusal(ErrorCode.TEMPLATE, why, _printable(endpoint.url), now)) from None
    if not url:
        why = f"endpoint {endpoint.name} calls the target_uri of the event, which brought none: post it again with one"
        raise NotSent(_refusal(ErrorCode.BAD_URL, why, "", now))
    try:
        where = target.parse(url)
    except target.BadUrl as e:
        raise NotSent(_refusal(ErrorCode.BAD_URL, str(e), _printable(url), now)) from None
    body = _body(claim)
    try:
        headers = _headers(endpoint, given, where, body, now, claim, webhook_id(claim, test=test), span)
    except ValueError as e:
        raise NotSent(_refusal(ErrorCode.TEMPLATE, f"endpoint {endpoint.name}: {e}", where.url, now)) from None
    return OutboundRequest(endpoint.method, where, headers, body, endpoint.client_certificate)


def webhook_id(claim: Claimed, *, test: bool = False) -> str:
    """The ``webhook-id``: the same over all attempts, takeovers and replays of a delivery.

    Receivers use it to recognise repetitions, so it must differ between two Madeiras too: hence the hash behind the number.
    That of a test call has `signing.TEST_ID` for the number: the signature covers it, so that nobody can take it off.
    """
    whole = "\n".join((claim.source, claim.event_id, claim.endpoint, claim.created_at.astimezone(UTC).isoformat()))
    return f"{signing.TEST_ID if test else f'msg_{claim.delivery_id}_'}{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


def check_header(name: str, value: str) -> None:
    """Refuse a header that an endpoint may not have.

    Raises:
        ValueError: the name is not one, is reserved, or the value would break the message; the value is not told.
    """
    if not _TOKEN.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a header")
    if is_reserved(name):
        raise ValueError(f"the header {name} is set by Madeira itself")
    if _CONTROL.search(value):
        raise ValueError(f"the value of the header {name} holds a line break or another control character")


def _body(claim: Claimed) -> bytes:
    if claim.body is not None:
        return claim.body.encode()
    envelope = json.dumps(
        {
            "event_id": claim.event_id,
            "event_type": claim.event_type,
            "source": claim.source,
            "created_at": utc_text(claim.created_at),
            "trace_id": claim.trace_id,
        }
    )
    return f'{envelope[:-1]}, "payload": {claim.payload}}}'.encode()


def _headers(
    endpoint: Endpoint,
    given: Mapping[str, str],
    where: target.Target,
    body: bytes,
    now: datetime,
    claim: Claimed,
    message_id: str,
    span: str | None,
) -> list[tuple[str, str]]:
    timestamp = str(int(now.timestamp()))
    headers = [
        ("Content-Type", "application/json"),
        ("User-Agent", USER_AGENT),
        ("Accept-Encoding", "identity"),
        ("X-Trace-Id", claim.trace_id),
        ("traceparent", span or _traceparent(claim)),
        ("webhook-id", message_id),
        ("webhook-timestamp", timestamp),
        ("X-Madeira-Timestamp", timestamp),
        ("X-Madeira-Attempt", str(claim.attempt)),
    ]
    if endpoint.secrets:
        headers.append(("webhook-signature", signing.standard_signature(endpoint.secrets, message_id, timestamp, body)))
        headers.append(("X-Madeira-Signature", signing.madeira_signature(endpoint.secrets, timestamp, body)))
    authorized = False
    for name, value in given.items():
        if is_reserved(name):
            continue
        check_header(name, value)
        authorized |= name.lower() == "authorization"
        headers.append((name, value))
    if where.authorization and not authorized:
        headers.append(("Authorization", where.authorization))
    return headers


def _traceparent(claim: Claimed) -> str:
    """The upstream's trace with this attempt as its parent; a trace made from ``trace_id`` where it brought none."""
    given = traceparent.parse(claim.traceparent or "")
    flags = given.flags if given else "01"
    trace = given.trace_id if given else traceparent.trace_of(claim.trace_id)
    span = hashlib.sha256(f"{claim.delivery_id} {claim.attempt} {claim.token}".encode()).hexdigest()[:16]
    return str(Traceparent(trace, span, flags))


def _refusal(code: ErrorCode, reason: str, url: str, now: datetime) -> Attempt:
    return Attempt(Outcome.PERMANENT, now, 0.0, url, error_code=code, reason=reason)


def _printable(url: str) -> str:
    """`url` for the log: without user and password, without what would break a line or Postgres, cut at 500 characters."""
    scheme, found, rest = url.partition("://")
    if found:
        authority, slash, path = rest.partition("/")
        url = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in url[:500])
