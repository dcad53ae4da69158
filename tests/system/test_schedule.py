"""Events for later, and what people do with events, from the POST to the receiver's door."""

import json
import time
import uuid

import httpx
import pytest

from tests.receiver import Answer, Receiver
from tests.system.conftest import Launch
from tests.system.harness import TOKEN, Madeira, later, toml, wait_until

#: Seconds after its time within which an event must have been called, on a machine that does other things too.
SOON_S = 2.0


def act(madeira: Madeira, path: str, **fields: object) -> httpx.Response:
    return madeira.http.post(path, json=fields, headers={"Authorization": f"Bearer {TOKEN}"})


def cancelled_by_its_source(madeira: Madeira, event_id: str) -> httpx.Response:
    body = b'{"reason": "ordered twice"}'
    return madeira.http.post(f"/v1/events/{event_id}/cancel", content=body, headers=madeira.sign(body))


@pytest.mark.alone
def test_an_event_for_later_is_called_when_it_is_due_and_not_before(launch: Launch, receiver: Receiver) -> None:
    madeira = launch({"a": {"url": receiver.url("/a")}})
    madeira.api()
    madeira.worker()
    posted = time.monotonic()
    madeira.post("a.later", deliver_at=later(2.0))
    madeira.post("a.sooner", deliver_at=later(1.0))
    madeira.post("a.past", deliver_at=later(-60))
    receiver.wait_for(3)
    called = {json.loads(call.body)["event_type"]: call.at - posted for call in receiver.calls}
    for kind, due_s in (("a.past", 0.0), ("a.sooner", 1.0), ("a.later", 2.0)):
        # The event's own time was taken a moment after `posted`: before it would be a broken promise.
        assert due_s <= called[kind] <= due_s + SOON_S
    madeira.wait_all()


@pytest.mark.parametrize(
    "loss", [*(pytest.param(loss, marks=pytest.mark.long) for loss in ("nothing", "the worker", "Redis' memory")), "both"]
)
def test_an_event_that_is_cancelled_before_it_is_due_is_never_called(launch: Launch, receiver: Receiver, loss: str) -> None:
    madeira = launch({"a": {"url": receiver.url("/a")}})
    madeira.api()
    worker = madeira.worker()
    gone = madeira.post("a.cancelled", deliver_at=later(2.0))
    kept = madeira.post("a.kept", deliver_at=later(2.5))
    answer = cancelled_by_its_source(madeira, gone)
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    if loss in ("the worker", "both"):
        worker.kill()
    if loss in ("Redis' memory", "both"):
        madeira.redis.flushall()
    if loss in ("the worker", "both"):
        madeira.worker()
    madeira.wait_status(kept, "succeeded")
    # All that reconcile finds is queued by now, and with one event on record a run had nothing else to find.
    runs = madeira.value("SELECT count(*) FROM reconcile_run")
    wait_until(lambda: madeira.value("SELECT count(*) FROM reconcile_run") >= runs + 2, what="two runs of reconcile")
    assert [json.loads(call.body)["event_id"] for call in receiver.calls] == [kept]
    assert madeira.event(gone)["status"] == "cancelled"


def test_a_trace_passes_through_with_a_new_span_for_each_attempt(launch: Launch, receiver: Receiver) -> None:
    receiver.queue("/a", Answer(status=503))
    madeira = launch({"a": {"url": receiver.url("/a")}})
    madeira.api()
    madeira.worker()
    trace, span = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    body = json.dumps({"event_id": "traced", "event_type": "a.b", "payload": 1}).encode()
    given = madeira.sign(body) | {"traceparent": f"00-{trace}-{span}-01"}
    assert madeira.http.post("/v1/events", content=body, headers=given).json()["trace_id"] == trace
    calls = receiver.wait_for(2)
    parts = [call.headers["traceparent"].split("-") for call in calls]
    assert {(version, trace_id, flags) for version, trace_id, _, flags in parts} == {("00", trace, "01")}
    assert len({span, *(part[2] for part in parts)}) == 3
    assert {call.headers["x-trace-id"] for call in calls} == {trace}
    madeira.wait_status("traced", "succeeded")


def test_what_is_dead_is_sent_again_by_a_replay_as_the_same_delivery(launch: Launch, receiver: Receiver) -> None:
    receiver.queue("/a", Answer(status=400))
    madeira = launch({"a": {"url": receiver.url("/a")}})
    madeira.api()
    madeira.worker()
    event_id = madeira.post("a.b", {"n": 1})
    madeira.wait_status(event_id, "dead")
    answer = act(madeira, f"/v1/events/{event_id}/replay?source=test", reason="mended")
    assert (answer.status_code, answer.json()["replayed"]) == (200, 1)
    madeira.wait_status(event_id, "succeeded")
    first, second = receiver.calls
    assert (first.body, first.webhook_id) == (second.body, second.webhook_id)
    assert [call.headers["x-madeira-attempt"] for call in (first, second)] == ["1", "2"]
    assert [a["outcome"] for a in madeira.attempts(event_id)] == ["permanent", "succeeded"]


def test_an_event_that_found_no_route_is_delivered_after_the_rules_are_mended(launch: Launch, receiver: Receiver) -> None:
    endpoints = {"a": {"url": receiver.url("/a")}}
    madeira = launch(endpoints)
    madeira.api()
    madeira.worker()
    event_id = madeira.post("nobody.cares", {"n": 1})
    assert madeira.wait_status(event_id, "dead")["reason"] == "unrouted"
    madeira.configure(toml(endpoints, [{"name": "mended", "event_type": "nobody.*", "endpoint": "a"}]))
    # Processes follow within two seconds; until then routing finds nothing, which is told again and may be asked again.
    deadline = time.monotonic() + 10
    while madeira.event(event_id)["status"] != "succeeded":
        assert time.monotonic() < deadline
        act(madeira, f"/v1/events/{event_id}/reroute?source=test", reason="mended")
        madeira.wait_status(event_id, "dead", "succeeded")
    assert len(receiver.calls) == 1


def test_the_events_of_a_batch_are_each_called_once(launch: Launch, receiver: Receiver) -> None:
    madeira = launch({"a": {"url": receiver.url("/a")}})
    madeira.api()
    madeira.worker()
    names = [f"b{n}" for n in range(250)]
    body = b"\n".join(json.dumps({"event_id": name, "event_type": "a.b", "payload": name}).encode() for name in names)
    headers = madeira.sign(body) | {"Content-Type": "application/x-ndjson"}
    for expected in ({"accepted": 250, "duplicates": 0, "rejected": []}, {"accepted": 0, "duplicates": 250, "rejected": []}):
        assert madeira.http.post("/v1/events/batch", content=body, headers=headers).json() == expected
    madeira.wait_all()
    assert sorted(json.loads(call.body)["event_id"] for call in receiver.calls) == sorted(names)
