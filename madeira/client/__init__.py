"""The Python client, for both sides: whoever sends events to Madeira, and whoever receives its calls.

    from madeira.client import Client, verify

    with Client("https://madeira.example", source="billing", secret=secret) as client:
        receipt = client.send("payment.settled", {"amount": 42}, event_id="payment-1")

    delivery = verify(request.headers, request.body, [new_secret, old_secret])

It needs the standard library and httpx. Nothing of the server is imported, started or read from the environment, so that
an upstream or a receiver may use it without a database driver at hand.
"""

from madeira.client.batches import BatchResult, Rejected, Summary
from madeira.client.errors import (
    ClientError,
    Conflict,
    InvalidEvent,
    NotFound,
    Problem,
    Refused,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    UnexpectedBody,
    UnwantedTest,
    VerificationFailed,
)
from madeira.client.events import Event
from madeira.client.receiving import Call, Delivery, authenticate, verify
from madeira.client.sending import Cancellation, Client, Receipt

__all__ = [
    "BatchResult",
    "Call",
    "Cancellation",
    "Client",
    "ClientError",
    "Conflict",
    "Delivery",
    "Event",
    "InvalidEvent",
    "NotFound",
    "Problem",
    "Receipt",
    "Refused",
    "Rejected",
    "Summary",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "UnexpectedBody",
    "UnwantedTest",
    "VerificationFailed",
    "authenticate",
    "verify",
]
