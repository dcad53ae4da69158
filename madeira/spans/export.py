"""How spans leave the process: by a queue with an upper limit and one thread, which sends them to the collector.

Whoever ends a span puts it into the queue and goes on: a collector that is away, slow or hostile holds up nobody. What finds the
queue full, or is not taken by the collector in time, is lost: it is counted, and told once until spans get through again. The
class of OpenTelemetry for this would tell each loss in a line and count none; and its end may take half a minute.

Endpoint, headers, time-out, sampler and resource are read by OpenTelemetry's own code from its own variables.
"""

import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NoOpTracer

import madeira
from madeira import log, metrics
from madeira.settings import of_opentelemetry
from madeira.spans.record import Ids, Spans

#: Spans that wait at most, spans that are sent at once, and milliseconds until they are: what OpenTelemetry says, unless its
#: variables say otherwise.
_SIZE: Final = 2048
_BATCH: Final = 512
_DELAY_MS: Final = 5000

#: Seconds that a process which ends gives its last spans.
FLUSH_S: Final = 2.0

#: Bytes that are read of a collector's answer, of which only the status matters.
_ANSWER_MAX: Final = 65_536

#: What tells every failure by itself, again and again, with the collector's address.
_TALKATIVE: Final = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.exporter.otlp.common.http")

_log = log.get(__name__)


class Queue(SpanProcessor):
    """Takes spans that have ended, and sends them from a thread of its own.

    Parameters:
        exporter: sends a batch; may take long, and may fail.
        size: spans that wait at most, beside those that are being sent.
        batch: spans that are sent at once.
        delay_s: seconds until fewer than a batch are sent.
    """

    def __init__(self, *, exporter: SpanExporter, size: int, batch: int, delay_s: float) -> None:
        self._exporter = exporter
        self._size = size
        self._batch = min(batch, size)
        self._delay_s = delay_s
        self._waiting: deque[ReadableSpan] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        for outcome in ("exported", "lost"):
            metrics.SPANS.labels(outcome)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span; never waits."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            waiting = len(self._waiting)
            if waiting < self._size and not self._stopping:
                self._waiting.append(span)
        if waiting >= self._size or self._stopping:
            self._lose(1, "more spans wait than OTEL_BSP_MAX_QUEUE_SIZE allows")
        elif waiting + 1 >= self._batch:
            self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Send what waits, for at most `timeout_s` seconds; the rest is lost."""
        with self._lock:
            self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        # Ends its wait before another try, too.
        self._exporter.shutdown()
        with self._lock:
            left = len(self._waiting)
            self._waiting.clear()
        if left:
            self._lose(left, "the process ended before the collector took them")

    def _run(self) -> None:
        while True:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            stopping = self._stopping
            while batch := self._take():
                self._send(batch)
            if stopping:
                return

    def _take(self) -> list[ReadableSpan]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]

    def _send(self, batch: list[ReadableSpan]) -> None:
        why: str | None
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
            why = getattr(self._exporter, "why", None)
        except Exception as e:  # noqa: BLE001  # whatever it is, it is no reason to end the thread
            sent, why = False, type(e).__name__
        if not sent:
            self._lose(len(batch), why or "the collector did not take them")
            return
        metrics.SPANS.labels("exported").inc(len(batch))
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            _log.info("spans.exported_again", lost=lost)

    def _lose(self, spans: int, why: str) -> None:
        metrics.SPANS.labels("lost").inc(spans)
        with self._lock:
            first = self._lost == 0
            self._lost += spans
        if first:
            _log.warning("spans.lost", spans=spans, reason=why, remedy="look after the collector; nothing else is held up")


class _Session(requests.Session):
    """Reads only the beginning of an answer, and notes what came of the last request, without its address."""

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def send(self, request: Any, **options: Any) -> Any:
        try:
            response = super().send(request, **options | {"stream": True, "allow_redirects": False})
            response.raw.read(_ANSWER_MAX, decode_content=False)
            # Keeps the connection if that was all.
            response.close()
        except Exception as e:
            self.why = f"the collector cannot be reached: {type(e).__name__}"
            raise
        response._content, response._content_consumed = b"", True
        self.why = f"the collector answered {response.status_code}"
        return response


class _Exporter(OTLPSpanExporter):
    """The exporter of OpenTelemetry with that session; `why` says what came of its last request."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._own = _Session()
        super().__init__(session=self._own, timeout=timeout_s)

    @property
    def why(self) -> str:
        return self._own.why

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._own.why = ""
        return super().export(spans)


def start(process: str) -> Spans | None:
    """What records the spans of this process and sends them; None where OpenTelemetry's own variable switches it off.

    Raises:
        SettingsError: a variable is malformed.
    """
    queue = _queue(_Exporter())
    ids = Ids()
    provider = TracerProvider(resource=_resource(process), id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("madeira", madeira.__version__)
    if isinstance(tracer, NoOpTracer):
        _log.info("spans.disabled", by="OTEL_SDK_DISABLED")
        return None
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    queue.start()
    return Spans(tracer=tracer, ids=ids, stop=lambda: queue.stop(FLUSH_S))


def refusal(timeout_s: float) -> str | None:
    """Why the collector takes nothing, asked with a request that holds no span; None when it does.

    Raises:
        SettingsError: a variable is malformed.
    """
    exporter = _Exporter(timeout_s)
    _queue(exporter)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    if exporter.export([]) is SpanExportResult.SUCCESS:
        return None
    return exporter.why or "the collector did not take the request"


def _queue(exporter: SpanExporter) -> Queue:
    return Queue(
        exporter=exporter,
        size=of_opentelemetry("OTEL_BSP_MAX_QUEUE_SIZE", _SIZE),
        batch=of_opentelemetry("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH),
        delay_s=of_opentelemetry("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS) / 1000,
    )


def _resource(process: str) -> Resource:
    """Who records; what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say counts more."""
    own = {
        "service.name": f"madeira-{process}",
        "service.version": madeira.__version__,
        "service.instance.id": f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}",
    }
    return Resource.create(own | dict(OTELResourceDetector().detect().attributes))
