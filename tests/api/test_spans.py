"""What the API records of posts, and what it hands on with the event."""

import json
import os
import statistics
from collections.abc import Callable, Iterator

import psycopg
import pytest

from tests.api.serving import Api, event, signed
from tests.collector import PARENT, PATH, PRODUCER, SERVER, TRACE, UPSTREAM, Collector
from tests.receiver import Answer, Gate


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def stored(api: Api, event_id: str) -> str:
    with psycopg.connect(api.database_url) as conn:
        row = conn.execute("SELECT traceparent FROM event WHERE event_id = %s", [event_id]).fetchone()
    assert row is not None
    return str(row[0])


def test_a_post_is_a_span_and_the_row_names_it(
    serve: Callable[..., Api], collector: Collector, database_url: str, redis_url: str
) -> None:
    """Accepted, known, refused; of a batch each line too; but nothing of strangers."""
    api = serve(database_url, redis_url, **collector.env(MADEIRA_PROCESSES="1")).start()
    parent = {"traceparent": UPSTREAM}
    assert api.post(event("one"), parent).status == 202
    assert api.post(event("one"), {"X-Trace-Id": "again"}).status == 200
    assert api.post(event("two", trace_id="4bf92f3577b34da6a3ce929d0e0e4736")).status == 202
    assert api.post(b"{}", parent).status == 422
    assert api.post(event("no"), parent, secret="another").status == 401
    accepted, known, two, refused = collector.wait_named(*["POST /v1/events"] * 4)
    assert {s.kind for s in (accepted, known, two, refused)} == {SERVER}
    assert (accepted.trace, accepted.parent) == (refused.trace, refused.parent) == (TRACE, PARENT)
    assert stored(api, "one") == f"00-{TRACE}-{accepted.id}-01"
    assert accepted.resource["service.name"] == "madeira-api"
    wanted = {"http.request.method": "POST", "http.route": "/v1/events", "madeira.event_id": "one", "madeira.source": "shop"}
    assert wanted.items() <= accepted.attributes.items()
    assert known.attributes["madeira.duplicate"]
    assert known.attributes["madeira.trace_id"] == TRACE, "that of the event"
    assert (two.trace, two.parent) == ("4bf92f3577b34da6a3ce929d0e0e4736", "")
    codes = [(s.attributes["http.response.status_code"], s.attributes["madeira.outcome"]) for s in (accepted, known, refused)]
    assert codes == [(202, "accepted"), (200, "duplicate"), (422, "invalid")]

    lines = [{"event_id": "three"}, {"event_id": "four", "trace_id": "6bf92f3577b34da6a3ce929d0e0e4736"}]
    body = "\n".join(json.dumps({"event_type": "a.b", "payload": 1} | line) for line in lines).encode()
    headers = signed(body) | {"Content-Type": "application/x-ndjson", "X-Trace-Id": TRACE}
    assert api.request("POST", "/v1/events/batch", body, headers).status == 200
    seen = {
        s.attributes.get("madeira.event_id", s.name): s for s in collector.wait_named("accept", "accept", "POST /v1/events/batch")
    }
    batch, three, four = seen["POST /v1/events/batch"], seen["three"], seen["four"]
    assert (batch.trace, batch.kind, three.kind) == (TRACE, SERVER, PRODUCER)
    assert (three.trace, three.parent, three.links) == (TRACE, batch.id, [])
    assert (four.trace, four.parent, four.links) == ("6bf92f3577b34da6a3ce929d0e0e4736", "", [(batch.trace, batch.id)])
    assert stored(api, "four") == f"00-{four.trace}-{four.id}-01"
    api.stop()
    assert [s for s in collector.seen() if s.attributes.get("http.response.status_code") == 401] == []


def cpu_s(api: Api) -> float:
    """Processor time that the API's worker has used."""
    [pid] = api.worker_pids
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.alone
def test_intake_does_not_feel_a_collector_that_hangs(
    serve: Callable[..., Api], collector: Collector, database_url: str, redis_url: str
) -> None:
    """Posts to an API without traces, to one with them, and to one whose queue is full all the time, in turns: the same p95."""
    quick, hanging = collector, Collector()
    hanging.answer(PATH, Answer(hold=Gate()))
    full = {"OTEL_BSP_MAX_QUEUE_SIZE": "10", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5"}
    with hanging:
        environments = {"off": {}, "on": quick.env(OTEL_BSP_SCHEDULE_DELAY="5000"), "hanging": hanging.env(**full)}
        apis = {name: serve(database_url, redis_url, MADEIRA_PROCESSES="1", **env).start() for name, env in environments.items()}
        took: dict[str, list[float]] = {name: [] for name in apis}
        used = {name: -cpu_s(api) for name, api in apis.items()}
        for n in range(1000):
            for name, api in apis.items():
                reply = api.post(event(f"{name}-{n}"))
                assert reply.status == 202
                if n >= 100:
                    took[name].append(reply.duration_s)
        used = {name: before + cpu_s(apis[name]) for name, before in used.items()}
        p95 = {name: statistics.quantiles(times, n=20)[-1] for name, times in took.items()}
        for name in apis:
            print(
                f"{name}: p50 {statistics.median(took[name]) * 1e3:.2f} ms, p95 {p95[name] * 1e3:.2f} ms, cpu {used[name]:.2f} ms"
            )
        for api in apis.values():
            api.stop()
    assert max(p95["on"], p95["hanging"]) < p95["off"] * 1.3 + 0.002
