"""What a dry run tells and what it hides; that it tells the truth is shown by tests/system/test_dry_run.py."""

import json
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest

from madeira.dry_run import HIDDEN, Response, document, dry_run
from madeira.egress import Egress
from madeira.records import CALLBACK_URL, Endpoint, NewEvent, RetryPolicy, Route
from madeira.routing.config import Rules

NOW = datetime(2026, 1, 2, tzinfo=UTC)

CALLBACK = Endpoint(name="callback", url=CALLBACK_URL)


def told(
    *routes: Route,
    endpoints: tuple[Endpoint, ...] = (),
    response: Response | None = None,
    unusable: dict[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """The document of a dry run; endpoint `a` is there by itself."""
    known = {e.name: e for e in (CALLBACK, Endpoint("a", "https://a.example/"), *endpoints)}
    rules = Rules(MappingProxyType({}), MappingProxyType(known), routes, unusable=unusable or {})
    event = NewEvent(
        **{
            "source": "billing",
            "event_id": "evt-1",
            "event_type": "payment.done",
            "payload": '{"n": 1.10, "token": "from-the-event"}',
            "body_sha256": bytes(32),
            "trace_id": "trace-1",
            **fields,
        }
    )
    found = document(dry_run(rules, event, egress=Egress(), now=NOW, response=response))
    assert json.loads(json.dumps(found)) == found
    return found


def test_each_route_tells_whether_it_matches_and_why_not() -> None:
    """In the order of the rules, with a reason for each that does not."""
    found = told(
        Route("good", "a", "billing", "payment.*", filter="payload.n > 1"),
        Route("source", "a", "shop"),
        Route("type", "a", event_type="refund.*"),
        Route("key", "a", routing_key="eu"),
        Route("no", "a", filter="payload.n > 2"),
        Route("failed", "a", filter="payload.none > 2"),
    )
    assert [(r["name"], r["matches"], r["failed"], r["reason"]) for r in found["routes"]] == [
        ("good", True, False, None),
        ("source", False, False, "it is for events of the source shop"),
        ("type", False, False, "it is for event types like refund.*"),
        ("key", False, False, "it is for the routing key eu"),
        ("no", False, False, "its filter says no"),
        ("failed", False, True, "its filter failed: there is no field none"),
    ]
    [delivery] = found["deliveries"]
    assert (found["status"], delivery["endpoint"], delivery["routes"]) == ("delivering", "a", ["good"])
    assert delivery["note"] == "template: the filter of route failed failed: there is no field none"


def test_the_request_is_shown_without_what_is_secret() -> None:
    """Neither credentials nor signatures: who may look must not get a body of his choice signed."""
    endpoint = Endpoint(
        "s",
        "https://s.example/{event_id}?x=1",
        method="PUT",
        secrets=("s3cr3t-key",),
        body='{"n": {{ payload.n }}}',
        headers={
            "Authorization": "Bearer s3cr3t-token",
            "X-Tenant": "s3cr3t-tenant",
            "X-Token": "s3cr3t {{ payload.token }} {{ payload.n }}",
            "X-Quoted": "{{ 's3cr3t' ~ payload.n }}",
            "X-Set": "{% set x = 7331 %}{{ x }}",
        },
    )
    found = told(Route("r", "s"), endpoints=(endpoint,))
    request = found["deliveries"][0]["request"]
    assert (request["method"], request["url"], request["body"]) == ("PUT", "https://s.example/evt-1?x=1", '{"n": 1.10}')
    headers = dict(request["headers"])
    assert (headers["X-Token"], headers["X-Tenant"], headers["X-Set"]) == (f"{HIDDEN}from-the-event 1.10", HIDDEN, HIDDEN)
    assert headers["webhook-signature"] == headers["X-Madeira-Signature"] == headers["Authorization"] == HIDDEN
    assert (headers["X-Trace-Id"], headers["Content-Type"]) == ("trace-1", "application/json")
    assert "s3cr3t" not in json.dumps(found)


def test_an_event_without_a_way_is_unrouted() -> None:
    found = told(Route("r", "a", "shop"))
    assert (found["status"], found["deliveries"]) == ("unrouted", [])


@pytest.mark.parametrize(
    ("endpoint", "failure_class", "error"),
    [
        (
            Endpoint("x", "https://x.example/{payload.none}"),
            "template",
            "template: endpoint x: url: the event has no payload.none",
        ),
        (
            Endpoint("x", "https://x.example/", body="{{ payload.token }}"),
            "template",
            "template: endpoint x: body: the result is not",
        ),
        (Endpoint("x", "http://127.0.0.1/"), "policy", "denied_by_policy: 127.0.0.1 is this machine itself"),
        (
            Endpoint("x", "https://x.example/", secrets=("whsec_!",)),
            None,
            "template: endpoint x: a secret that begins with whsec_",
        ),
        (Endpoint("x", "https://xn--/"), None, "bad_url: "),
    ],
)
def test_a_request_that_cannot_be_made_tells_why(endpoint: Endpoint, failure_class: str | None, error: str) -> None:
    """Dead at routing, or at the attempt, which then has a verdict."""
    [delivery] = told(Route("r", "x"), endpoints=(endpoint,), response=Response(200))["deliveries"]
    assert (delivery["request"], delivery["failure_class"]) == (None, failure_class)
    assert delivery["error"].startswith(error)
    assert (delivery["verdict"] or {}).get("status") == (None if failure_class else "dead")


def test_an_endpoint_that_cannot_be_used_here_is_told() -> None:
    """The delivery would wait."""
    [delivery] = told(Route("r", "a"), unusable={"endpoint/a": "secrets: A_SECRET is not set"})["deliveries"]
    assert delivery["error"] == "the delivery would wait: secrets: A_SECRET is not set"
    assert delivery["request"] is None


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (Response(200, {}, '{"code": 0}'), ("succeeded", None, "succeeded", None)),
        (Response(200, {}, '{"code": 7}'), ("business", "business", "pending", 60.0)),
        (Response(200, {}, "<html>"), ("unknown", "unparseable", "pending", 60.0)),
        (Response(200, {}, "x" * 70_000), ("unknown", "too_large", "pending", 60.0)),
        (Response(404), ("permanent", "http_404", "dead", None)),
        (Response(429, {"Retry-After": "120"}), ("retryable", "http_429", "pending", 120.0)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_answer_is_judged_as_a_real_one(response: Response, expected: tuple[Any, ...]) -> None:
    """Outcome, code, what becomes of the delivery and when it is tried again."""
    endpoint = Endpoint("x", "https://x.example/", success="body.code == 0", retry=RetryPolicy(jitter=0.5))
    [delivery] = told(Route("r", "x"), endpoints=(endpoint,), response=response)["deliveries"]
    verdict = delivery["verdict"]
    assert (verdict["outcome"], verdict["error_code"], verdict["status"], verdict["retry_in_s"]) == expected
    assert (verdict["reason"] is None) == (verdict["outcome"] == "succeeded")


def test_an_unmatched_event_would_go_to_its_callback_address() -> None:
    [delivery] = told(target_uri="https://back.example/cb")["deliveries"]
    assert (delivery["endpoint"], delivery["lane"]) == ("callback", "callback@back.example:443")
    assert delivery["request"]["url"] == "https://back.example/cb"
