"""A claim and an endpoint to make requests from, each field of which a test may change."""

import base64
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from madeira import target
from madeira.delivery.request import OutboundRequest
from madeira.egress import Egress
from madeira.records import Claimed, Endpoint

#: A policy that lets the receivers of the tests be called.
LOOPBACK = Egress(allow=("127.0.0.0/8", "::1"))

#: A secret in the form that the Standard Webhooks libraries make.
WHSEC = "whsec_" + base64.b64encode(b"sixteen bytes or more of key").decode()

CREATED_AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)

CLAIM = Claimed(
    delivery_id=4711,
    seq=42,
    endpoint="ledger",
    lane="ledger",
    attempt=1,
    failures=0,
    token="3f2b8c1e-0000-4000-8000-000000000001",
    budget_age_s=0.0,
    source="billing",
    event_id="evt-1",
    event_type="payment.settled",
    target_uri=None,
    payload='{"amount": 12345678901234567890, "rate": 1.0, "a": 1, "a": 2, "note": "\u00e9 \\u00e9"}',
    parameters=None,
    trace_id="trace-1",
    traceparent=None,
    created_at=CREATED_AT,
)

ENDPOINT = Endpoint(name="ledger", url="http://ledger.example/hook", secrets=(WHSEC,))


def claim(**changes: Any) -> Claimed:
    """`CLAIM` with some fields changed."""
    return replace(CLAIM, **changes)


def endpoint(**changes: Any) -> Endpoint:
    """`ENDPOINT` with some fields changed."""
    return replace(ENDPOINT, **changes)


def post(url: str, body: bytes = b"{}", headers: list[tuple[str, str]] | None = None, method: str = "POST") -> OutboundRequest:
    """A plain request to `url`."""
    return OutboundRequest(method, target.parse(url), headers or [("Content-Type", "application/json")], body)
