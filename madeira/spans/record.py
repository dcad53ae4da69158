"""The spans that there are, and what they say: names, states, numbers and codes.

Never a payload, a header or an error's text, which a receiver may have written; of an address scheme, host and port only: what
is behind may be a secret or somebody's data, and what has gone to a collector no erasure reaches.

Names of attributes follow the semantic conventions of OpenTelemetry; what these do not know begins with ``madeira.``.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from madeira import traceparent
from madeira.records import Accepted, Attempt, Claimed, NewEvent, RoutableEvent, Settled
from madeira.states import EventStatus, Outcome
from madeira.store.deliveries import DeadLetter
from madeira.store.routing import RouteResult
from madeira.target import Target
from madeira.traceparent import Traceparent

_SYSTEM: Final = "madeira"


class Ids(RandomIdGenerator):
    """Random ids; but the next trace that this thread begins gets the id that was set."""

    def __init__(self) -> None:
        self._local = threading.local()

    def set(self, trace: str) -> None:
        """The id (32 hexadecimal digits) of the trace that this thread begins next."""
        self._local.trace = int(trace, 16)

    def generate_trace_id(self) -> int:
        """That id, or a random one."""
        trace: int | None = getattr(self._local, "trace", None)
        self._local.trace = None
        return trace or super().generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """Nobody may rely on it."""
        return False


class Spans:
    """Begins the spans of one process; shared by its threads.

    Parameters:
        tracer: makes them.
        ids: where the tracer has its ids from.
        stop: sends what waits, in bounded time.
    """

    def __init__(self, *, tracer: Tracer, ids: Ids, stop: Callable[[], None]) -> None:
        self._tracer = tracer
        self._ids = ids
        #: Send what waits, in bounded time; later spans are lost.
        self.close: Final = stop

    def begin(
        self,
        name: str,
        kind: SpanKind,
        *,
        trace_id: str,
        parent: str | None,
        attributes: Mapping[str, Any],
        began_ns: int | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """A span below `parent` (a ``traceparent``), or the first one of the trace that belongs to `trace_id`.

        `began_ns` is since 1970; now when absent. What the thread is about otherwise does not matter.
        """
        given = traceparent.parse(parent or "")
        context = Context()
        if given is None:
            self._ids.set(traceparent.trace_of(trace_id))
        else:
            flags = TraceFlags(int(given.flags, 16) & TraceFlags.SAMPLED)
            above = SpanContext(int(given.trace_id, 16), int(given.parent_id, 16), is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(above), context)
        return self._tracer.start_span(name, context, kind, dict(attributes), links, start_time=began_ns)

    def post(self, route: str, scheme: str, parent: str | None, trace_id: str | None) -> "Post":
        """A request of the intake has come, with the trace that its headers name."""
        return Post(self, route, scheme, parent, trace_id)

    def notice(self, event: NewEvent) -> NewEvent:
        """An event of Madeira's own, which begins a trace: the event as it is to be stored."""
        span = self.begin(
            "notice",
            SpanKind.PRODUCER,
            trace_id=event.trace_id,
            parent=None,
            attributes=_of(event) | {"messaging.operation.type": "create"},
        )
        span.end()
        return replace(event, traceparent=_header(span))

    def routed(self, events: Sequence[RoutableEvent], results: Sequence[RouteResult], began_ns: int) -> None:
        """Events were routed, together, since `began_ns`; one span each, for those with which something was done."""
        done = {result.seq: result for result in results if result.status is not None}
        for event in events:
            result = done.get(event.seq)
            if result is None:
                continue
            attributes = {
                "messaging.operation.name": "route",
                "messaging.operation.type": "process",
                "madeira.deliveries": len(result.refs),
                "madeira.dead": len(result.dead),
                "madeira.status": str(result.status),
            }
            span = self.begin(
                "route",
                SpanKind.CONSUMER,
                trace_id=event.trace_id,
                parent=event.traceparent,
                attributes=_of(event) | attributes,
                began_ns=began_ns,
            )
            if result.status == EventStatus.DEAD:
                _fail(span, "dead" if result.dead else "unrouted")
            span.end()

    def attempt(self, claim: Claimed) -> "Call":
        """An attempt begins now."""
        return Call(self, claim)

    def given_up(self, row: DeadLetter, began_ns: int) -> None:
        """It was told, since `began_ns`, that a delivery was given up."""
        attributes = {
            "messaging.system": _SYSTEM,
            "messaging.destination.name": row.endpoint,
            "messaging.message.id": row.event_id,
            "madeira.source": row.source,
            "madeira.event_id": row.event_id,
            "madeira.trace_id": row.trace_id,
            "madeira.delivery_id": row.delivery_id,
            "madeira.endpoint": row.endpoint,
            "madeira.failure_class": row.failure_class,
        }
        span = self.begin(
            "dead_letter",
            SpanKind.INTERNAL,
            trace_id=row.trace_id,
            parent=row.traceparent,
            attributes=attributes,
            began_ns=began_ns,
        )
        _fail(span, row.failure_class)
        span.end()


class Post:
    """The span of one request of the intake; there is one only if its source is known, so that strangers fill no queue."""

    def __init__(self, spans: Spans, route: str, scheme: str, parent: str | None, trace_id: str | None) -> None:
        self._spans = spans
        self._parent = parent
        self._trace_id = trace_id
        self._began_ns = time.time_ns()
        self._span: Span | None = None
        self._lines: dict[int, Span] = {}
        self._name = f"POST {route}"
        self._attributes: dict[str, Any] = {
            "http.request.method": "POST",
            "http.route": route,
            "url.path": route,
            "url.scheme": scheme,
        }
        #: Who posts, once that is verified.
        self.source: str | None = None

    def event(self, event: NewEvent) -> NewEvent:
        """It is about `event`: returns it as it is to be stored, with this span above whatever follows."""
        self._span = self._begin(event.trace_id, event.traceparent, _of(event))
        return replace(event, traceparent=_header(self._span))

    def line(self, number: int, event: NewEvent) -> NewEvent:
        """The same for a line of a batch, which has a span of its own; in another trace, if the line brings one."""
        whole = self._whole()
        own = _header(whole)
        same = event.traceparent is not None or event.trace_id == self._trace_id
        self._lines[number] = span = self._spans.begin(
            "accept",
            SpanKind.PRODUCER,
            trace_id=event.trace_id,
            parent=own if same else None,
            attributes=_of(event) | {"messaging.operation.type": "create", "madeira.line": number},
            links=() if same else [Link(whole.get_span_context())],
        )
        return replace(event, traceparent=_header(span))

    def line_ended(self, number: int, accepted: Accepted) -> None:
        """That line was committed, or turned out to be known."""
        span = self._lines.pop(number, None)
        if span is not None:
            span.set_attributes(_became(accepted))
            span.end()

    def end(self, status: int, outcome: str, accepted: Accepted | None = None) -> None:
        """It is answered with `status`."""
        if self.source is None:
            return
        span = self._whole()
        span.set_attributes({"http.response.status_code": status, "madeira.outcome": outcome})
        if accepted is not None:
            span.set_attributes(_became(accepted))
        if status >= 500:
            _fail(span, str(status))
        span.end()

    def _whole(self) -> Span:
        if self._span is None:
            self._span = self._begin(self._trace_id or uuid.uuid4().hex, self._parent, {"madeira.source": self.source or ""})
        return self._span

    def _begin(self, trace_id: str, parent: str | None, attributes: Mapping[str, Any]) -> Span:
        return self._spans.begin(
            self._name,
            SpanKind.SERVER,
            trace_id=trace_id,
            parent=parent,
            attributes={**self._attributes, **attributes},
            began_ns=self._began_ns,
        )


class Call:
    """The span of one attempt. One whose worker is lost ends never, and is not exported; the next attempt's number tells."""

    def __init__(self, spans: Spans, claim: Claimed) -> None:
        attributes: dict[str, Any] = {
            "messaging.operation.name": "deliver",
            "messaging.operation.type": "send",
            "messaging.destination.name": claim.endpoint,
            "madeira.delivery_id": claim.delivery_id,
            "madeira.endpoint": claim.endpoint,
            "madeira.attempt": claim.attempt,
        }
        if claim.line == "replay":
            attributes["madeira.replay"] = True
        if claim.job_id is not None:
            attributes["madeira.job_id"] = claim.job_id
        if claim.attempt > 1:
            attributes["http.request.resend_count"] = claim.attempt - 1
        self._span = spans.begin(
            f"deliver {claim.endpoint}",
            SpanKind.CLIENT,
            trace_id=claim.trace_id,
            parent=claim.traceparent,
            attributes=_of(claim) | attributes,
        )
        #: What the receiver is told in ``traceparent``.
        self.header: Final = _header(self._span)

    def goes_to(self, method: str, target: Target) -> None:
        """Whom it calls."""
        self._span.set_attributes(
            {
                "http.request.method": method,
                "server.address": target.host,
                "server.port": target.port,
                "url.scheme": target.scheme,
                "url.full": f"{target.scheme}://{target.authority}",
            }
        )

    def end(self, attempt: Attempt, settled: Settled) -> None:
        """What came of it. The span lasts as long as the call; that it was settled is told with it."""
        self._span.set_attributes(
            {"madeira.outcome": str(attempt.outcome), "madeira.status": "late" if settled.status is None else str(settled.status)}
        )
        if attempt.status_code is not None:
            self._span.set_attribute("http.response.status_code", attempt.status_code)
        if attempt.outcome is not Outcome.SUCCEEDED:
            _fail(self._span, attempt.error_code or str(attempt.outcome))
        self._span.end(_nanoseconds(attempt.started_at, attempt.duration_s))


def _of(event: NewEvent | RoutableEvent | Claimed) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.message.id": event.event_id,
        "madeira.source": event.source,
        "madeira.event_id": event.event_id,
        "madeira.event_type": event.event_type,
        "madeira.trace_id": event.trace_id,
    }


def _became(accepted: Accepted) -> dict[str, Any]:
    """The trace id too: a duplicate belongs to that of the event that was first."""
    return {"madeira.seq": accepted.seq, "madeira.duplicate": accepted.duplicate, "madeira.trace_id": accepted.trace_id}


def _header(span: Span) -> str:
    context = span.get_span_context()
    flags = context.trace_flags & TraceFlags.SAMPLED
    return str(Traceparent(f"{context.trace_id:032x}", f"{context.span_id:016x}", f"{flags:02x}"))


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)


def _nanoseconds(start: datetime, seconds: float) -> int:
    return round((start.timestamp() + seconds) * 1e9)
