"""One trace over processes, hours and restarts."""

import json
from collections.abc import Iterator

import pytest

from tests.collector import CLIENT, CONSUMER, PARENT, SERVER, TRACE, UPSTREAM, Collector
from tests.receiver import Answer, Receiver
from tests.system.conftest import Launch

pytestmark = pytest.mark.long


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def test_post_route_and_attempts_are_one_trace_through_restarts_and_a_replay(
    launch: Launch, receiver: Receiver, collector: Collector
) -> None:
    """The first worker routes and fails, the next one fails for good, and what a person replays goes on in the same trace."""
    receiver.queue("/a", Answer(status=503), Answer(status=400))
    madeira = launch({"a": {"url": receiver.url("/a"), "retry": {"initial": 1, "max": 1}}}, env=collector.env())
    madeira.api(workers=2)
    worker = madeira.worker(processes=2)
    body = json.dumps({"event_id": "e", "event_type": "a.b", "payload": {"card": "the-payload"}}).encode()
    assert (
        madeira.http.post("/v1/events", content=body, headers=madeira.sign(body) | {"traceparent": UPSTREAM}).status_code == 202
    )
    receiver.wait_for(1)
    worker.stop()
    assert [s.name for s in collector.seen()].count("deliver a") == 1, "a stop sends what waits"
    worker = madeira.worker()
    madeira.wait_status("e", "dead")
    collector.wait_named("dead_letter")
    answer = madeira.http.post(
        "/v1/events/e/replay?source=test", json={"reason": "mended"}, headers={"Authorization": "Bearer the-token-of-the-tests"}
    )
    assert answer.status_code == 200, answer.text
    madeira.wait_status("e", "succeeded")
    worker.stop()
    spans = collector.wait_named("POST /v1/events", "route", "dead_letter", *["deliver a"] * 3)
    assert {s.trace for s in spans} == {TRACE}
    [post] = [s for s in spans if s.name == "POST /v1/events"]
    assert (post.parent, post.kind) == (PARENT, SERVER)
    assert {s.parent for s in spans if s is not post} == {post.id}
    assert [s.kind for s in spans if s.name == "route"] == [CONSUMER]
    attempts = [s for s in spans if s.name == "deliver a"]
    assert [(s.kind, s.attributes["madeira.attempt"], s.attributes["madeira.outcome"]) for s in attempts] == [
        (CLIENT, 1, "retryable"),
        (CLIENT, 2, "permanent"),
        (CLIENT, 3, "succeeded"),
    ]
    assert [s.attributes.get("madeira.replay") for s in attempts] == [None, None, True]
    assert [call.headers["traceparent"] for call in receiver.calls] == [f"00-{TRACE}-{s.id}-01" for s in attempts]
    assert not any(b"the-payload" in call.body for call in collector.calls)
