"""One marked call to an endpoint, on somebody's word: does it answer, and what would Madeira make of the answer?

The call goes the way of every delivery: the same templates, the same signatures, the same guard over addresses, the same judge.
It carries the header ``X-Madeira-Test``, by which a receiver can tell it from the real thing, and an event that exists nowhere
else: nothing is stored of it but a row in the audit, written before the call is made.
"""

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from madeira import dry_run, ids, log, templates
from madeira.delivery import request as requests
from madeira.delivery.answer import CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.request import NotSent, OutboundRequest
from madeira.delivery.verdict import judge
from madeira.errors import MadeiraError, NotThere, StoreError
from madeira.event_values import EventValues
from madeira.records import Attempt, Claimed, Endpoint
from madeira.routing.config import CALLBACK, Problems, callback, resolved
from madeira.sealing import Sealer
from madeira.states import ErrorCode, Outcome
from madeira.store import audit, configuration
from madeira.store.database import Database
from madeira.templates import TemplateFailed

#: The header that marks a test call.
HEADER: Final = ("X-Madeira-Test", "1")

#: Type of the event of a test call, unless the caller names one.
EVENT_TYPE: Final = "madeira.test"

#: Its payload, unless the caller gives one.
PAYLOAD: Final = '{"test": true}'

#: Its source; no source that posts can have a name with a space in it.
SOURCE: Final = "madeira test"

#: Test calls that a process makes at a time: each holds a thread until its receiver has answered.
CALLS: Final = 4

_log = log.get(__name__)


class Unusable(MadeiraError):
    """Raised when an endpoint cannot be called as it is configured; the message says why."""


class Busy(MadeiraError):
    """Raised when as many test calls are under way as this process makes at a time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is to be sent."""

    event_type: str = EVENT_TYPE
    #: The text of a JSON value.
    payload: str = field(default=PAYLOAD, repr=False)
    #: The text of a JSON object.
    parameters: str | None = field(default=None, repr=False)
    #: For an endpoint that calls the address of the event.
    target_uri: str | None = None
    routing_key: str | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it."""

    event: Claimed
    #: None when no request could be made.
    request: OutboundRequest | None
    attempt: Attempt
    endpoint: Endpoint

    def shown(self) -> dict[str, Any]:
        """For a person or a program; without credentials."""
        a = self.attempt
        answer = None
        if a.status_code is not None:
            answer = {"status": a.status_code, "excerpt": a.excerpt.decode("utf-8", "replace"), "length": a.length}
        return {
            "request": dry_run.request_document(self.event, self.request, self.endpoint) if self.request else None,
            "answer": answer,
            "verdict": {"outcome": a.outcome, "error_code": a.error_code, "reason": a.reason},
            "duration_s": round(a.duration_s, 6),
        }


class Trials:
    """Makes test calls by the configuration in `database`.

    `sealer` opens its secrets, `caller` makes the calls; it must allow `CALLS` at a time. `environ` is where ``env:NAME`` is
    looked up; the process's environment when absent.
    """

    def __init__(self, *, database: Database, sealer: Sealer, caller: Caller, environ: Mapping[str, str] | None = None) -> None:
        self._database = database
        self._sealer = sealer
        self._caller = caller
        self._environ = environ
        self._places = threading.BoundedSemaphore(CALLS)

    def call(self, name: str, trial: Trial, *, who: str, why: str | None = None) -> Tried:
        """Call the endpoint `name` once, for at most its timeout.

        Raises:
            NotThere: there is no endpoint of this name.
            Unusable: a secret of it cannot be opened or looked up here.
            Busy: `CALLS` calls are under way.
            StoreUnavailable: Postgres is away; nothing was called.
        """
        if not self._places.acquire(blocking=False):
            raise Busy(f"{CALLS} test calls are under way in this process; try again when one has ended")
        try:
            detail: dict[str, Any] = {"event_type": trial.event_type}
            with self._database.connection() as connection:
                endpoint = self._endpoint(connection, name)
                entry = audit.record(connection, who, "test", f"endpoint {name}", why, detail)
            tried = self._try(endpoint, trial)
            self._amend(entry, detail, tried.attempt)
            return tried
        finally:
            self._places.release()

    def _endpoint(self, connection: Any, name: str) -> Endpoint:
        if name == CALLBACK:
            return callback()
        stored = configuration.one(connection, "endpoint", name)
        if stored is None:
            raise NotThere(f"there is no endpoint {name!r}")
        problems = Problems()
        found = resolved(
            "endpoint", name, stored.spec, sealer=self._sealer, environ=self._environ, problems=problems, stored=True
        )
        if not isinstance(found, Endpoint):
            raise Unusable(f"endpoint {name}: " + "; ".join(f"{p.field}: {p.detail}" for p in problems.found))
        return found

    def _try(self, endpoint: Endpoint, trial: Trial) -> Tried:
        now = datetime.now(UTC)
        claim = _claim(endpoint, trial, now)
        request = None
        try:
            claim = replace(claim, body=templates.body_of(endpoint, EventValues(claim)))
            built = requests.build(claim, endpoint, now=now)
            request = replace(built, headers=[*built.headers, HEADER])
            attempt = judge(self._caller.call(request, deadline_s=endpoint.timeout), endpoint)
        except TemplateFailed as e:
            attempt = Attempt(
                Outcome.PERMANENT,
                now,
                0.0,
                endpoint.url,
                error_code=ErrorCode.TEMPLATE,
                reason=f"endpoint {endpoint.name}: {e.reason}",
            )
        except NotSent as refusal:
            attempt = refusal.attempt
        except CallFailed as failed:
            attempt = judge(failed, endpoint)
        return Tried(claim, request, attempt, endpoint)

    def _amend(self, entry: int, detail: Mapping[str, Any], attempt: Attempt) -> None:
        """Add what came of it to the row in the audit; the call was made, so its answer is told even if that fails."""
        found = {
            "url": attempt.url,
            "outcome": attempt.outcome,
            "status_code": attempt.status_code,
            "error_code": attempt.error_code,
        }
        try:
            with self._database.connection() as connection:
                audit.amend(connection, entry, {**detail, **found})
        except StoreError as e:
            _log.warning("trial.not_noted", reason=str(e))


def _claim(endpoint: Endpoint, trial: Trial, now: datetime) -> Claimed:
    return Claimed(
        delivery_id=0,
        seq=0,
        endpoint=endpoint.name,
        lane=endpoint.name,
        attempt=1,
        failures=0,
        token=str(uuid.uuid4()),
        budget_age_s=0.0,
        source=SOURCE,
        event_id=f"test-{ids.uuid7()}",
        event_type=trial.event_type,
        target_uri=trial.target_uri,
        payload=trial.payload,
        parameters=trial.parameters,
        trace_id=uuid.uuid4().hex,
        traceparent=None,
        created_at=now,
        routing_key=trial.routing_key,
    )
