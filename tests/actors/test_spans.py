"""What a worker records of routing, attempts and dead letters; with the collector's own eyes."""

from collections.abc import Iterator

import pytest

from madeira.broker.queues import ROUTE, Ensure, ensure_delivery
from madeira.broker.waking import wake_jobs
from madeira.store import jobs, replay
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.actors.conftest import Make
from tests.collector import CLIENT, CONSUMER, ERROR, PRODUCER, Collector
from tests.receiver import Answer, Receiver
from tests.store import making
from tests.system.harness import configure, toml

UPSTREAM = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = UPSTREAM.split("-")[1:3]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as collector:
        for name, value in collector.env().items():
            if name.startswith("OTEL_"):
                monkeypatch.setenv(name, value)
        yield collector


def test_each_attempt_is_a_span_whose_id_the_receiver_is_told(make: Make, receiver: Receiver, collector: Collector) -> None:
    """In the trace of the event's row, below the span that stands there; without path, query, payload or secret."""
    receiver.queue("/a", Answer(status=503, body=b"the-receivers-words"))
    process = make(
        {"url": receiver.url("/a?token=the-secret"), "headers": {"X-Key": "the-secret"}, "retry": {"initial": 0.1, "max": 0.1}},
        traces="otlp",
    )
    process.start()
    ref = process.routed(payload='{"card": "the-payload"}', traceparent=UPSTREAM)
    process.wait_status(ref, "succeeded")
    one, two = collector.wait_named("deliver a", "deliver a")
    assert {(s.trace, s.parent, s.kind) for s in (one, two)} == {(TRACE, PARENT, CLIENT)}
    assert [call.headers["traceparent"] for call in receiver.calls] == [f"00-{TRACE}-{s.id}-01" for s in (one, two)]
    event = process.event(ref)
    assert one.attributes == {
        "messaging.system": "madeira",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "send",
        "messaging.destination.name": "a",
        "messaging.message.id": event["event_id"],
        "madeira.source": event["source"],
        "madeira.event_id": event["event_id"],
        "madeira.event_type": event["event_type"],
        "madeira.trace_id": event["trace_id"],
        "madeira.delivery_id": ref.delivery_id,
        "madeira.endpoint": "a",
        "madeira.attempt": 1,
        "madeira.outcome": "retryable",
        "madeira.status": "pending",
        "http.request.method": "POST",
        "http.response.status_code": 503,
        "server.address": "127.0.0.1",
        "server.port": receiver.port,
        "url.scheme": "http",
        "url.full": f"http://127.0.0.1:{receiver.port}",
        "error.type": "http_503",
    }
    assert one.status == ERROR
    changed = {
        "madeira.attempt": 2,
        "http.request.resend_count": 1,
        "madeira.outcome": "succeeded",
        "madeira.status": "succeeded",
    }
    rest = {k: v for k, v in one.attributes.items() if k != "error.type"}
    assert two.attributes == rest | changed | {"http.response.status_code": 200}
    sent = b"".join(call.body for call in collector.calls)
    assert not [word for word in (b"the-secret", b"the-payload", b"the-receivers-words") if word in sent]


def test_routing_is_a_span_for_each_event_and_a_dead_letter_is_one(make: Make, receiver: Receiver, collector: Collector) -> None:
    """All below the span that the row names; without one, in the trace of the event's trace id."""
    receiver.answer("/a", Answer(status=400))
    process = make(traces="otlp")
    process.start()
    known = making.accept(process.conn, traceparent=UPSTREAM, event_type="a.x")
    unknown = making.accept(process.conn, trace_id="4bf92f3577b34da6a3ce929d0e0e4736", event_type="nobody.wants")
    for seq in (known, unknown):
        process.queues.ensure([Ensure(ROUTE, str(seq))])
    spans = collector.wait_named("route", "route", "deliver a", "dead_letter")
    of = {(s.name, s.trace): s for s in spans}
    route, lost = of["route", TRACE], of["route", "4bf92f3577b34da6a3ce929d0e0e4736"]
    assert (route.kind, route.parent, route.attributes["madeira.deliveries"]) == (CONSUMER, PARENT, 1)
    assert (lost.parent, lost.status, lost.attributes["error.type"]) == ("", ERROR, "unrouted")
    dead = of["dead_letter", TRACE]
    assert (dead.parent, dead.attributes["madeira.failure_class"]) == (PARENT, "receiver")
    assert of["deliver a", TRACE].parent == PARENT


def test_what_is_replayed_goes_on_in_its_trace_and_says_that_it_is_a_replay(
    make: Make, receiver: Receiver, collector: Collector
) -> None:
    """By a person, by force, and by a job, whose number its retries bear too; below the span of the post each time."""
    for status in (400, 200, 200, 400, 503, 200):
        receiver.queue("/a", Answer(status=status))
    process = make({"url": receiver.url("/a"), "retry": {"initial": 0.1, "max": 0.1}}, traces="otlp")
    process.start()
    ref = process.routed(traceparent=UPSTREAM)
    process.wait_status(ref, "dead")

    def again(**options: bool) -> None:
        event = process.event(ref)
        done = replay.replay(process.conn, event["source"], event["event_id"], "ann", "mended", **options)
        assert done is not None
        process.queues.ensure([ensure_delivery(one) for one in done.refs])

    again()
    process.wait_status(ref, "succeeded")
    again(force=True)
    receiver.wait_for(3)
    process.wait_status(ref, "succeeded")
    again(force=True)
    process.wait_status(ref, "dead")
    job, _ = jobs.create(process.conn, NewJob("replay", Selection(), "mended"), "ann")
    wake_jobs(process.queues)
    receiver.wait_for(6)
    process.wait_status(ref, "succeeded")

    attempts = [s for s in collector.wait_named(*["deliver a"] * 6) if s.name == "deliver a"]
    assert {(s.trace, s.parent) for s in attempts} == {(TRACE, PARENT)}
    said = [tuple(s.attributes.get(f"madeira.{name}") for name in ("attempt", "replay", "job_id")) for s in attempts]
    assert said == [
        (1, None, None),
        (2, True, None),
        (3, True, None),
        (4, True, None),
        (5, True, job["id"]),
        (6, None, job["id"]),
    ]


def test_a_trace_that_is_not_recorded_goes_on_unrecorded(make: Make, receiver: Receiver, collector: Collector) -> None:
    """The receiver is told so, and what follows for another event is recorded all the same."""
    process = make(traces="otlp")
    process.start()
    quiet = process.routed(traceparent=UPSTREAM[:-1] + "0")
    process.wait_status(quiet, "succeeded")
    loud = process.routed(traceparent=UPSTREAM)
    process.wait_status(loud, "succeeded")
    [span] = collector.wait_named("deliver a")
    assert span.attributes["madeira.delivery_id"] == loud.delivery_id
    assert [call.headers["traceparent"][-2:] for call in receiver.calls] == ["00", "01"]


def test_a_notice_begins_a_trace_of_its_own(make: Make, receiver: Receiver, collector: Collector, database_url: str) -> None:
    """What tells of Madeira itself was posted by nobody: its routing and its attempts are below a span of the worker."""
    receiver.answer("/a", Answer(status=400))
    process = make(traces="otlp")
    endpoints = {"a": {"url": receiver.url("/a")}, "pager": {"url": receiver.url("/pager")}}
    routes = [{"name": "notices", "source": "madeira", "event_type": "madeira.*", "endpoint": "pager"}]
    configure(database_url, toml(endpoints, routes))
    process.start()
    process.routed(traceparent=UPSTREAM)
    receiver.wait_for(1, path="/pager")
    spans = {s.name: s for s in collector.wait_named("notice", "deliver pager") if s.trace != TRACE}
    notice, call = spans["notice"], spans["deliver pager"]
    assert (notice.kind, notice.parent) == (PRODUCER, "")
    assert (call.trace, call.parent) == (notice.trace, notice.id)
