"""Signatures, in both directions.

Madeira's own scheme: ``X-Madeira-Signature`` is the HMAC-SHA256, in hex, of the timestamp as it stands in
``X-Madeira-Timestamp`` (Unix seconds), a newline, and the raw body. The key is the secret's text as UTF-8, whatever it looks
like, so that ``openssl dgst -hmac "$SECRET"`` makes the same. It is what upstreams sign events with and what receivers may
check calls with: one verifier serves both directions.

Standard Webhooks: ``webhook-signature`` is ``v1,`` and the base64 of the HMAC-SHA256 of ``<id>.<timestamp>.<body>``. The key
of a secret ``whsec_<base64>`` is the decoded base64, that of any other secret its text as UTF-8.

While a secret is being rotated there are several: both headers then hold one signature for each, in the order of the secrets,
and any one that fits is enough. Standard Webhooks separates them by a space, Madeira's scheme by a comma. A receiver that
knows one secret goes on working if it compares with each.
"""

import base64
import binascii
import hmac
from collections.abc import Sequence
from typing import Final

from madeira import digits

#: Seconds that a timestamp may differ from the verifier's clock, either way.
WINDOW_S: Final = 300

#: What a secret for Standard Webhooks begins with; base64 follows.
STANDARD_PREFIX: Final = "whsec_"

#: What the ``webhook-id`` of a test call begins with, and that of no delivery.
TEST_ID: Final = "msg_test_"

#: Signatures in one header that are looked at; more are refused, so that nobody can make us compute at will.
_MAX_SIGNATURES: Final = 8


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """One signature of Madeira's scheme, in hex; `timestamp` in Unix seconds, as it stands in the header."""
    return hmac.digest(secret.encode(), timestamp.encode() + b"\n" + body, "sha256").hex()


def madeira_signature(secrets: Sequence[str], timestamp: str, body: bytes) -> str:
    """The value of ``X-Madeira-Signature``: one signature per secret, separated by commas."""
    return ",".join(sign(secret, timestamp, body) for secret in secrets)


def verify(secrets: Sequence[str], timestamp: str | None, signature: str | None, body: bytes, *, now: float) -> bool:
    """Whether one of `secrets` made `signature` of Madeira's scheme over `timestamp` and the raw `body`.

    `now` is the verifier's clock in Unix seconds; `timestamp` may be `WINDOW_S` off. Missing or malformed values are just
    False: a sender is told nothing about why. The comparison takes the same time whichever secret fits and wherever the
    first difference is.
    """
    if not timestamp or not signature or not is_fresh(timestamp, now):
        return False
    offered = [part.strip().lower().encode("utf-8", "replace") for part in signature.split(",", _MAX_SIGNATURES)]
    if len(offered) > _MAX_SIGNATURES:
        return False
    fits = False
    for secret in secrets:
        expected = sign(secret, timestamp, body).encode()
        for candidate in offered:
            fits |= hmac.compare_digest(expected, candidate)
    return fits


def is_fresh(timestamp: str, now: float) -> bool:
    """Whether `timestamp`, in Unix seconds, is at most `WINDOW_S` from `now`; a malformed one is not."""
    at = digits.plain(timestamp, 12)
    return at is not None and abs(at - now) <= WINDOW_S


def standard_key(secret: str) -> bytes:
    """The key that Standard Webhooks uses for `secret`.

    Raises:
        ValueError: what follows ``whsec_`` is not base64; the message does not tell the secret.
    """
    if not secret.startswith(STANDARD_PREFIX):
        return secret.encode()
    text = secret[len(STANDARD_PREFIX) :].rstrip("=")
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ValueError("a secret that begins with whsec_ must go on in base64")
    return key


def standard_signature(secrets: Sequence[str], message_id: str, timestamp: str, body: bytes) -> str:
    """The value of ``webhook-signature``: ``v1,<base64>`` per secret, separated by spaces.

    Raises:
        ValueError: a secret begins with ``whsec_`` and does not go on in base64.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    digests = (hmac.digest(standard_key(secret), signed, "sha256") for secret in secrets)
    return " ".join("v1," + base64.b64encode(digest).decode() for digest in digests)


def verify_standard(secrets: Sequence[str], message_id: str, timestamp: str, signature: str, body: bytes) -> bool:
    """Whether one of `secrets` made one of the signatures in `signature`, the value of ``webhook-signature``.

    Looks at nothing else: whether `timestamp` is recent is for the caller to judge. Signatures of other versions than ``v1``
    are passed over. The comparison takes the same time whichever secret fits and wherever the first difference is.

    Raises:
        ValueError: a secret begins with ``whsec_`` and does not go on in base64.
    """
    offered = [part.encode("utf-8", "replace") for part in signature.split(" ", _MAX_SIGNATURES)]
    if len(offered) > _MAX_SIGNATURES:
        return False
    fits = False
    for expected in standard_signature(secrets, message_id, timestamp, body).split(" "):
        for candidate in offered:
            fits |= hmac.compare_digest(expected.encode(), candidate)
    return fits
