"""A source whose secrets cannot be used in this process: its sender did nothing wrong, and must not give up."""

import json
import time
from collections.abc import Callable

import pytest

from tests.api.serving import SECRET, Api, event, signed

pytestmark = pytest.mark.long

CONFIG = f"""
[[source]]
name = "shop"
secrets = ["{SECRET}"]

[[source]]
name = "broken"
secrets = ["env:NOWHERE_SET"]

[[source]]
name = "half"
secrets = ["env:NOWHERE_SET", "{SECRET}"]
"""


@pytest.fixture
def broken(serve: Callable[..., Api], database_url: str, redis_url: str) -> Api:
    return serve(database_url, redis_url, config=CONFIG).start()


@pytest.mark.parametrize(
    ("source", "secret", "status"),
    [
        ("shop", SECRET, 202),
        ("shop", "wrong", 401),
        ("unknown", SECRET, 401),
        ("broken", "maybe the right one", 503),
        ("half", SECRET, 202),
        ("half", "maybe the missing one", 503),
    ],
)
def test_who_may_be_right_is_told_to_come_again(broken: Api, source: str, secret: str, status: int) -> None:
    """503 with Retry-After, by every way in that a source signs; whoever is wrong for certain is told 401."""
    posted = broken.post(event("one"), source=source, secret=secret)
    assert posted.status == status
    batch = event("two") + b"\n"
    batched = broken.request(
        "POST", "/v1/events/batch", batch, signed(batch, source=source, secret=secret) | {"Content-Type": "application/x-ndjson"}
    )
    assert batched.status == (200 if status == 202 else status)
    read = broken.request("GET", "/v1/events", None, signed(b"", source=source, secret=secret))
    assert read.status == (200 if status == 202 else status)
    for reply in (posted, batched, read):
        if status == 503:
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json["type"] == "urn:madeira:problem:unavailable"
    if status == 503:
        numbers = broken.get("/metrics", admin=True).body.decode()
        assert f'madeira_ingress_requests_total{{outcome="unavailable",source="{source}"}}' in numbers


@pytest.mark.parametrize("wrong", ["no signature", "stale", "no timestamp"])
def test_what_no_secret_can_have_signed_is_refused(broken: Api, wrong: str) -> None:
    """Such a request would be refused with every secret."""
    headers = signed(event("x"), source="broken", at=time.time() - (3600 if wrong == "stale" else 0))
    if wrong != "stale":
        del headers["X-Madeira-Signature" if wrong == "no signature" else "X-Madeira-Timestamp"]
    assert broken.request("POST", "/v1/events", event("x"), headers).status == 401


def test_without_a_usable_source_nobody_is_told_to_make_one(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """There is one; what it lacks is in the log."""
    config = CONFIG[CONFIG.index('[[source]]\nname = "broken"') : CONFIG.index('[[source]]\nname = "half"')]
    api = serve(database_url, redis_url, config=config).start()
    events = {json.loads(line)["event"] for line in api.log.read_text().splitlines() if line.startswith("{")}
    assert "rules.unusable" in events
    assert "api.no_sources" not in events
