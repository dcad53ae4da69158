"""Stop 1 of 4. Before: bytes on a socket. After: one committed row; its id on the queue ``route``.

The order is what makes the promise: read bounded bytes, verify the signature over exactly these, parse once and strictly,
check the fields, commit, queue, and only then say 202. Before the commit nothing was promised; after it reconcile covers
whatever does not happen. What is a duplicate is decided by Postgres alone.
"""

import json
import time
from typing import TYPE_CHECKING, Any, Final

import falcon

from madeira import log, metrics
from madeira.api import intake, problems, query, reading
from madeira.api.answers import rfc3339
from madeira.api.auth import Authenticator
from madeira.api.intake import Intake, Outcomes
from madeira.api.limits import Limits
from madeira.api.listing import Listing
from madeira.api.patience import Patience
from madeira.api.problems import Problem
from madeira.errors import StoreUnavailable
from madeira.metrics import IngressOutcome
from madeira.records import Accepted, NewEvent

if TYPE_CHECKING:
    from madeira.spans.record import Post, Spans

_log = log.get(__name__)

#: Its address, for traces.
ROUTE: Final = "/v1/events"


class Events:
    """``POST /v1/events``; what ``GET`` answers under the same address is `listing`'s."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        limits: Limits,
        checks: Intake,
        outcomes: Outcomes,
        patience: Patience,
        max_body: int,
        listing: Listing,
        spans: "Spans | None",
    ) -> None:
        self._auth = auth
        self._limits = limits
        self._checks = checks
        self._outcomes = outcomes
        self._patience = patience
        self._max_body = max_body
        self._spans = spans
        self.on_get = listing.on_get

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Accept one event."""
        started = time.perf_counter()
        outcome: IngressOutcome = "failed"
        status = 500
        accepted = None
        post = intake.begun(self._spans, ROUTE, req.env) if self._spans else None
        try:
            accepted = self._accept(req, post)
            outcome = "duplicate" if accepted.duplicate else "accepted"
            status = 200 if accepted.duplicate else 202
            resp.status = falcon.HTTP_200 if accepted.duplicate else falcon.HTTP_202
            resp.data = _receipt(accepted)
        except Problem as e:
            outcome, status = intake.outcome_of(e), e.status_code
            raise
        finally:
            if post:
                post.end(status, outcome, accepted)
            self._outcomes.count(req.env, outcome)
            metrics.INGRESS_DURATION.observe(time.perf_counter() - started)

    def _accept(self, req: falcon.Request, post: "Post | None") -> Accepted:
        environ: dict[str, Any] = req.env
        reading.json_only(environ)
        raw = reading.body(environ, limit=self._max_body)
        source = self._auth.source(environ, raw)
        if post:
            post.source = source
        query.none(req)
        self._limits.take(source)
        event = self._checks.event(reading.parsed(raw), source=source, raw=raw, environ=environ)
        if post:
            event = post.event(event)
        try:
            accepted = self._patience.commit(event)
        except StoreUnavailable as e:
            _log.warning("intake.unavailable", reason=str(e), **_names(event))
            raise problems.unavailable("the store cannot be reached; nothing is promised, send the event again") from None
        _log.debug("intake.accepted", seq=accepted.seq, duplicate=accepted.duplicate, **_names(event))
        if accepted.conflict:
            _log.warning("intake.conflict", seq=accepted.seq, **_names(event))
            raise Problem(
                409,
                "an event with this id was accepted before, with other content; it is unchanged",
                event_id=accepted.event_id,
                source=accepted.source,
                created_at=rfc3339(accepted.created_at),
            )
        return accepted


def _names(event: NewEvent) -> dict[str, str]:
    return {"source": event.source, "event_id": event.event_id, "trace_id": event.trace_id}


def _receipt(accepted: Accepted) -> bytes:
    return json.dumps(
        {
            "event_id": accepted.event_id,
            "source": accepted.source,
            "trace_id": accepted.trace_id,
            "status": accepted.status,
            "duplicate": accepted.duplicate,
            "created_at": rfc3339(accepted.created_at),
        }
    ).encode()
