"""What a single post and the lines of a batch have in common: from bytes to a checked event, and what is counted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from madeira import metrics
from madeira.api import validation
from madeira.api.auth import Authenticator
from madeira.api.problems import Problem
from madeira.egress import Egress
from madeira.metrics import IngressOutcome
from madeira.records import NewEvent
from madeira.strict_json import Document

if TYPE_CHECKING:
    from madeira.spans.record import Post, Spans

#: What a refusal is called in metrics, by its status.
_OUTCOMES: Final[Mapping[int, IngressOutcome]] = {
    400: "malformed",
    401: "unauthorized",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported",
    422: "invalid",
    429: "limited",
    503: "unavailable",
}


class Intake:
    """Checks events.

    A class, so that what checking needs beside the bytes is handed over in one place for both ways in: `egress` says which
    callback addresses are refused at the door.
    """

    def __init__(self, *, egress: Egress) -> None:
        self._egress = egress

    def event(self, document: Document | None, *, source: str, raw: bytes, environ: Mapping[str, Any]) -> NewEvent:
        """The event that `document`, parsed from `raw`, describes.

        Raises:
            Problem: 422, with one entry for each field that is wrong.
        """
        return validation.new_event(document, source=source, raw=raw, environ=environ, egress=self._egress)


class Outcomes:
    """Counts what became of posts, by source."""

    def __init__(self, *, auth: Authenticator) -> None:
        self._auth = auth
        self._counters: dict[tuple[str, str], Any] = {}

    def count(self, environ: Mapping[str, Any], outcome: IngressOutcome, events: int = 1) -> None:
        """Count `events` of one outcome."""
        key = (metrics.source_label(self._auth.label(environ)), outcome)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = metrics.INGRESS_REQUESTS.labels(*key)
        counter.inc(events)


def begun(spans: "Spans", route: str, environ: Mapping[str, Any]) -> "Post":
    """The span of the request that `environ` describes."""
    parent, trace_id = validation.from_headers(environ)
    return spans.post(route, environ["wsgi.url_scheme"], parent, trace_id)


def outcome_of(problem: Problem) -> IngressOutcome:
    """What a refusal is called in metrics."""
    return _OUTCOMES.get(problem.status_code, "failed")
