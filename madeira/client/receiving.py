"""The receiving side: whether a call is Madeira's, and what it brings.

By Standard Webhooks: the signature covers the id of the delivery, the timestamp and the raw body. Any one of several secrets
is enough, so that one can be replaced without a gap.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from madeira.client.errors import UnexpectedBody, UnwantedTest, VerificationFailed
from madeira.delivery import signing


class Headers(Protocol):
    """Headers as any framework has them: names in any case."""

    def items(self) -> Any:
        """Pairs of name and value."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is proven to be Madeira's."""

    #: Names the delivery; the same on every attempt. Keep it, to know a repetition.
    webhook_id: str
    #: When this attempt was made, Unix seconds.
    timestamp: int
    #: Number of this attempt, from 1; None when the header is missing. Not covered by the signature.
    attempt: int | None

    @property
    def is_test(self) -> bool:
        """Whether it is a test call; the signature covers that."""
        return self.webhook_id.startswith(signing.TEST_ID)


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event that a genuine call brought."""

    event_id: str
    event_type: str
    source: str
    #: When Madeira accepted it.
    created_at: datetime
    trace_id: str
    #: As `json` reads it. The numbers as they were sent are in the body's own text.
    payload: Any = field(repr=False)
    #: Names the delivery; the same on every attempt. Keep it, to know a repetition.
    webhook_id: str
    #: Number of this attempt, from 1; None when the header is missing. Not covered by the signature.
    attempt: int | None

    @property
    def is_test(self) -> bool:
        """Whether it is a test call; the signature covers that."""
        return self.webhook_id.startswith(signing.TEST_ID)


def verify(
    headers: Mapping[str, str] | Headers,
    body: bytes,
    secrets: str | Sequence[str],
    *,
    tolerance_s: float = 300,
    now: float | None = None,
    allow_tests: bool = False,
) -> Delivery:
    """The event that a call brings, if the call is genuine.

    `body` is the raw body, before anything parsed it. `secrets` are those of the endpoint, ``whsec_…`` or any other text; any
    one of them is enough. `tolerance_s` is how far the call's timestamp may be from this clock, in seconds; `now` is that
    clock, in Unix seconds, where it is not the machine's. `allow_tests` takes test calls too: what is in one is what somebody
    chose who may make them, so do nothing where `Delivery.is_test`.

    Raises:
        VerificationFailed: nothing proves that it is Madeira's, or it is a test call (`UnwantedTest`); answer 401.
        UnexpectedBody: it is, but the body is not Madeira's envelope; see `authenticate`.
        ValueError: a secret is empty, or is no base64 after ``whsec_``.
    """
    call = authenticate(headers, body, secrets, tolerance_s=tolerance_s, now=now, allow_tests=allow_tests)
    try:
        return _delivery(call, json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UnexpectedBody(
            "the call is genuine, but its body is not Madeira's envelope: if the endpoint has a body template, use "
            "madeira.client.authenticate and read the body by that template"
        ) from None


def authenticate(
    headers: Mapping[str, str] | Headers,
    body: bytes,
    secrets: str | Sequence[str],
    *,
    tolerance_s: float = 300,
    now: float | None = None,
    allow_tests: bool = False,
) -> Call:
    """Prove a call to be Madeira's, whatever its body is: for endpoints with a body template. Arguments are as of `verify`.

    Raises:
        VerificationFailed: nothing proves that it is Madeira's, or it is a test call (`UnwantedTest`); answer 401.
        ValueError: a secret is empty, or is no base64 after ``whsec_``.
    """
    keys = _keys(secrets)
    found = _lower(headers)
    webhook_id, timestamp, signature = (_needed(found, name) for name in ("webhook-id", "webhook-timestamp", "webhook-signature"))
    at = _number(timestamp)
    if at is None:
        raise VerificationFailed("webhook-timestamp is not a number of Unix seconds")
    off_s = abs(at - (time.time() if now is None else now))
    if off_s > tolerance_s:
        raise VerificationFailed(f"webhook-timestamp is {off_s:.0f} s off; {tolerance_s:g} s are allowed")
    if not signing.verify_standard(keys, webhook_id, timestamp, signature, body):
        which = "the secret" if len(keys) == 1 else f"any of the {len(keys)} secrets"
        raise VerificationFailed(f"no signature in webhook-signature was made of this body with {which}")
    if not allow_tests and webhook_id.startswith(signing.TEST_ID):
        raise UnwantedTest("the call is genuine, but only a test call: give allow_tests=True to take those too, and act on none")
    return Call(webhook_id, at, _number(found.get("x-madeira-attempt", "")))


def _delivery(call: Call, envelope: Any) -> Delivery:
    texts = [envelope[name] for name in ("event_id", "event_type", "source", "created_at", "trace_id")]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    event_id, event_type, source, created_at, trace_id = texts
    return Delivery(
        event_id=event_id,
        event_type=event_type,
        source=source,
        created_at=datetime.fromisoformat(created_at),
        trace_id=trace_id,
        payload=envelope["payload"],
        webhook_id=call.webhook_id,
        attempt=call.attempt,
    )


def _keys(secrets: str | Sequence[str]) -> tuple[str, ...]:
    keys = (secrets,) if isinstance(secrets, str) else tuple(secrets)
    if not keys or not all(keys):
        raise ValueError("give at least one secret, and no empty one: with an empty one everybody could sign")
    return keys


def _lower(headers: Mapping[str, str] | Headers) -> dict[str, str]:
    """`headers` by lower-case name.

    One that is there twice is as good as none: which of them was signed is anybody's guess.
    """
    found: dict[str, str] = {}
    for name, value in headers.items():
        key = str(name).lower()
        found[key] = "" if key in found and found[key] != value else str(value)
    return found


def _needed(found: Mapping[str, str], name: str) -> str:
    value = found.get(name, "")
    if not value or not value.isascii():
        raise VerificationFailed(f"the header {name} is missing, is there twice, or is not of ASCII")
    return value


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
