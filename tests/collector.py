"""A collector of traces: the receiver of the tests, which is a real HTTP server, with what it got decoded by OpenTelemetry's own
description of the protocol."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.receiver import Answer, Receiver

PATH = "/v1/traces"

SERVER, CLIENT, PRODUCER, CONSUMER, INTERNAL = 2, 3, 4, 5, 1
ERROR = 2

#: What an upstream sends as its place in a trace, and the two ids in it.
UPSTREAM = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, PARENT = UPSTREAM.split("-")[1:3]


@dataclass(frozen=True)
class Seen:
    """A span as it arrived."""

    name: str
    trace: str
    id: str
    #: Empty for the first one of a trace.
    parent: str
    kind: int
    attributes: Mapping[str, Any]
    status: int
    began_ns: int
    ended_ns: int
    links: list[tuple[str, str]]
    resource: Mapping[str, Any]


class Collector(Receiver):
    """Takes spans until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.answer(PATH, Answer(body=b"", headers={"Content-Type": "application/x-protobuf"}))

    def env(self, **more: str) -> dict[str, str]:
        """The settings of a process whose spans go here, soon."""
        return {
            "MADEIRA_TRACES": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url("").rstrip("/"),
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            **more,
        }

    def seen(self) -> list[Seen]:
        """All spans that arrived, in the order in which they began."""
        found = [span for call in self.calls_to(PATH) for span in decoded(call.body)]
        return sorted(found, key=lambda span: span.began_ns)

    def wait(self, wanted: Callable[[list[Seen]], bool], what: str) -> list[Seen]:
        """Wait until what arrived is as `wanted`."""
        self.wait_until(lambda: wanted(self.seen()), 20, what=what)
        return self.seen()

    def wait_named(self, *names: str) -> list[Seen]:
        """Wait until spans of these names, each as often as it is named, have arrived; all that there are."""
        return self.wait(
            lambda seen: all([s.name for s in seen].count(name) >= names.count(name) for name in names), f"spans {names}"
        )


def decoded(body: bytes) -> list[Seen]:
    """The spans of one request."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Seen(
            name=span.name,
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            kind=span.kind,
            attributes=_values(span.attributes),
            status=span.status.code,
            began_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            resource=_values(of.resource.attributes),
        )
        for of in request.resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}
