"""Spans leave a process without holding up anybody, whatever the collector does."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from prometheus_client import REGISTRY

from madeira import spans
from madeira.errors import SettingsError
from madeira.records import NewEvent
from madeira.settings import Settings
from madeira.spans import export
from madeira.spans.record import Spans
from tests.collector import PATH, Collector
from tests.receiver import Answer, Gate, black_hole_port, closed_port

ON = Settings(traces="otlp")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


Start = Callable[..., Spans]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> Iterator[Start]:
    """Starts what records, with variables of OpenTelemetry; stopped after the test."""
    with ExitStack() as stack:

        def make(**variables: str) -> Spans:
            for name, value in collector.env(**variables).items():
                if name.startswith("OTEL_"):
                    monkeypatch.setenv(name, value)
            made = spans.start(ON, "worker")
            assert made is not None
            stack.callback(made.close)
            return made

        yield make


def event(number: int = 0, **fields: Any) -> NewEvent:
    known = {"source": "s", "event_type": "a.b", "payload": "{}", "body_sha256": b"", "trace_id": f"t-{number}"}
    return NewEvent(event_id=f"e-{number}", **known | fields)


def counted(outcome: str) -> float:
    return REGISTRY.get_sample_value("madeira_spans_total", {"outcome": outcome}) or 0.0


def test_nothing_of_opentelemetry_is_loaded_unless_it_is_asked_for() -> None:
    """Neither by the API nor by a worker."""
    script = (
        "import sys; import madeira.api, madeira.broker, actors.deliver, actors.route, madeira.spans as s\n"
        "from madeira.settings import Settings\n"
        "s.load(Settings()); assert s.start(Settings(), 'api') is None\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'google', 'requests')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_start_stops_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says which module is missing."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "madeira.spans.export")
    monkeypatch.delattr(spans, "export")
    with pytest.raises(SettingsError, match=r"pip install '\.\[otel\]'.*opentelemetry"):
        spans.load(ON)


def test_a_variable_that_is_no_number_stops_the_start(start: Start) -> None:
    """By its name."""
    with pytest.raises(SettingsError, match="OTEL_BSP_MAX_QUEUE_SIZE: 'many' is not a whole number"):
        start(OTEL_BSP_MAX_QUEUE_SIZE="many")


def test_opentelemetrys_own_switch_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is as if the setting were off."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert spans.start(ON, "api") is None


def test_spans_arrive_with_who_recorded_them(start: Start, collector: Collector) -> None:
    """By default the kind of process; what OpenTelemetry's variables say counts more."""
    start().notice(event(1))
    start(OTEL_SERVICE_NAME="payments", OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test").notice(event(2))
    one, two = collector.wait_named("notice", "notice")
    assert one.resource["service.name"] == "madeira-worker"
    assert (two.resource["service.name"], two.resource["deployment.environment.name"]) == ("payments", "test")
    assert one.resource["service.instance.id"] != two.resource["service.instance.id"]


def test_what_waits_at_the_end_is_sent(start: Start, collector: Collector) -> None:
    """Before the process has ended."""
    made = start(OTEL_BSP_SCHEDULE_DELAY="3600000")
    for number in range(3):
        made.notice(event(number))
    made.close()
    assert len(collector.seen()) == 3


HELD = Gate()

#: What a collector may do, beside taking spans.
TROUBLE: dict[str, Answer] = {
    "500": Answer(status=500),
    "429 for a year": Answer(status=429, headers={"Retry-After": "31536000"}),
    "no answer": Answer(hold=HELD),
    "reset": Answer(reset=True),
    "drips": Answer(body=b"x" * 1000, drip_body_s=0.05),
    "no HTTP": Answer(raw=b"\x00" * 100),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_whatever_the_collector_does_nobody_waits_and_the_end_is_near(trouble: str, start: Start, collector: Collector) -> None:
    """A thousand spans are recorded within a second, of which a few wait and the others are counted; the end takes seconds."""
    collector.answer(PATH, TROUBLE[trouble])
    made = start(OTEL_BSP_MAX_QUEUE_SIZE="50", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    before = counted("lost") + counted("exported")
    lost = counted("lost")
    began = time.monotonic()
    for number in range(1000):
        made.notice(event(number))
    assert time.monotonic() - began < 1
    assert counted("lost") - lost > 500
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < export.FLUSH_S + 1
    assert counted("lost") + counted("exported") - before >= 1000 - 10, "but for what is on its way"


@pytest.mark.parametrize("port", [closed_port, black_hole_port])
def test_a_collector_that_is_away_holds_up_nobody(port: Any, start: Start) -> None:
    """Whether it refuses or is silent; each span is counted as lost, none as exported."""
    with port() as number:
        others = threading.enumerate()
        made = start(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{number}", OTEL_EXPORTER_OTLP_TIMEOUT="1")
        (sender,) = [thread for thread in threading.enumerate() if thread not in others]
        lost, exported = counted("lost"), counted("exported")
        for i in range(5):
            made.notice(event(i))
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < export.FLUSH_S + 1
        sender.join(10)
        assert (counted("lost") - lost, counted("exported") - exported) == (5, 0)


def test_an_answer_without_end_is_not_read_to_its_end(start: Start, collector: Collector) -> None:
    """A hundred megabytes are announced; the spans have arrived, and the next ones do on another connection."""
    collector.answer(PATH, Answer(body=b"x" * 100_000_000))
    made = start()
    made.notice(event(1))
    collector.wait_named("notice")
    made.notice(event(2))
    collector.wait_named("notice", "notice")
    assert collector.connections == 2


def test_loss_is_told_once_and_so_is_its_end(start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the collector's address, which may hold a secret."""
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(export._log, "warning", lambda key, **fields: told.append((key, fields)))
    monkeypatch.setattr(export._log, "info", lambda key, **fields: told.append((key, fields)))
    collector.queue(PATH, Answer(status=400), Answer(status=400))
    exported = counted("exported")
    made = start(OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer%20secret")
    for number in range(3):
        made.notice(event(number))
        collector.wait_for(number + 1, path=PATH)
        collector.wait_idle()
    made.close()
    assert [key for key, _ in told] == ["spans.lost", "spans.exported_again"]
    assert told[0][1]["reason"] == "the collector answered 400"
    assert told[1][1]["lost"] == 2
    assert counted("exported") - exported == 1
    assert collector.calls_to(PATH)[0].headers["authorization"] == "Bearer secret"


SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("sampler", "parent", "recorded"),
    [
        ("parentbased_always_on", SAMPLED, True),
        ("parentbased_always_on", None, True),
        ("parentbased_always_on", SAMPLED[:-1] + "0", False),
        ("parentbased_always_off", SAMPLED, True),
        ("parentbased_always_off", None, False),
        ("always_off", SAMPLED, False),
    ],
)
def test_the_sampler_decides_and_what_it_decides_goes_on_with_the_event(
    sampler: str, parent: str | None, recorded: bool, start: Start, collector: Collector
) -> None:
    """The row says whether the trace is recorded; the trace is the upstream's, or that of the event's trace id."""
    made = start(OTEL_TRACES_SAMPLER=sampler)
    post = made.post("/v1/events", "http", parent, None)
    post.source = "s"
    stored = post.event(event(trace_id="0af7651916cd43dd8448eb211c80319c", traceparent=parent)).traceparent
    post.end(202, "accepted")
    made.close()
    assert stored is not None
    version, trace, span, flags = stored.split("-")
    assert (version, trace, flags) == ("00", "0af7651916cd43dd8448eb211c80319c", "01" if recorded else "00")
    assert [(s.id, s.parent) for s in collector.seen()] == ([(span, parent.split("-")[2] if parent else "")] if recorded else [])
