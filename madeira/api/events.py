"""Stop 1 of 4. Before: bytes on a socket. After: one committed row; its id on the queue ``route``.

The order is what makes the promise: read bounded bytes, verify the signature over exactly these, parse once and strictly,
check the fields, commit, queue, and only then say 202. Before the commit nothing was promised; after it reconcile covers
whatever does not happen. What is a duplicate is decided by Postgres alone.
"""

import json
import time
from datetime import datetime
from typing import Any, Final

import falcon

from madeira import log, metrics
from madeira.api import problems, reading, strict_json, validation
from madeira.api.auth import Authenticator, Caller
from madeira.api.patience import Patience
from madeira.api.problems import FieldError, Problem
from madeira.api.strict_json import NotStrictJson
from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key
from madeira.errors import BrokerUnavailable, IllegalTransition, StoreUnavailable
from madeira.records import Accepted, DeliveryRef, NewEvent
from madeira.states import Role
from madeira.store import cancelling
from madeira.store import events as store
from madeira.store.database import Database

#: Characters of the reason of a cancel.
MAX_REASON: Final = 500

#: Bytes of the body of a cancel.
_MAX_CANCEL_BODY: Final = 4096

_OUTCOMES: Final = {
    400: "malformed",
    401: "unauthorized",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported",
    422: "invalid",
    503: "unavailable",
}

_log = log.get(__name__)


class Events:
    """``POST /v1/events``."""

    def __init__(self, *, auth: Authenticator, patience: Patience, max_body: int) -> None:
        self._auth = auth
        self._patience = patience
        self._max_body = max_body
        self._counters: dict[tuple[str, str], Any] = {}

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Accept one event."""
        started = time.perf_counter()
        outcome = "failed"
        try:
            accepted = self._accept(req.env)
            outcome = "duplicate" if accepted.duplicate else "accepted"
            resp.status = falcon.HTTP_200 if accepted.duplicate else falcon.HTTP_202
            resp.data = _receipt(accepted)
        except Problem as e:
            outcome = _OUTCOMES.get(e.status_code, "failed")
            raise
        finally:
            self._count(req.env, outcome)
            metrics.INGRESS_DURATION.observe(time.perf_counter() - started)

    def _accept(self, environ: dict[str, Any]) -> Accepted:
        reading.json_only(environ)
        raw = reading.body(environ, limit=self._max_body)
        source = self._auth.source(environ, raw)
        try:
            document = strict_json.parse(raw)
        except NotStrictJson as e:
            raise Problem(400, f"the body is not strict JSON: {e}", name="not-strict-json") from None
        event = validation.new_event(document, source=source, raw=raw, environ=environ)
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
                created_at=_time(accepted.created_at),
            )
        return accepted

    def _count(self, environ: dict[str, Any], outcome: str) -> None:
        key = (self._auth.label(environ), outcome)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._counters[key] = metrics.INGRESS_REQUESTS.labels(*key)
        counter.inc()


class Event:
    """``GET /v1/events/{event_id}``: the envelope, its deliveries and attempts, and where waits what is unfinished."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues) -> None:
        self._auth = auth
        self._database = database
        self._queues = queues

    def on_get(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Show one event."""
        caller = self._auth.caller(req.env, reading.body(req.env, limit=_MAX_CANCEL_BODY))
        source = _source_of(caller, req, event_id)
        with self._database.connection() as connection:
            found = store.find(connection, source, event_id)
        if found is None:
            raise _unknown(event_id)
        self._add_places(found)
        resp.data = envelope(found)

    def _add_places(self, found: dict[str, Any]) -> None:
        """Say where what is unfinished waits, as far as Redis can tell at this moment."""
        waiting = [d for d in found["deliveries"] if d["status"] in ("pending", "delivering")]
        keys = [delivery_key(DeliveryRef(d["id"], found["seq"], d["lane"])) for d in waiting]
        try:
            if found["status"] == "pending":
                found["waits"] = _place(self._queues.where(ROUTE, [str(found["seq"])])[0])
            for delivery, place in zip(waiting, self._queues.where(DELIVER, keys), strict=True):
                delivery["waits"] = _place(place)
        except BrokerUnavailable:
            for part in [*waiting, *([found] if found["status"] == "pending" else [])]:
                part["waits"] = {"where": "unknown"}


class Cancel:
    """``POST /v1/events/{event_id}/cancel``: ends what has not ended, by the wish of its source or of the administrator."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues) -> None:
        self._auth = auth
        self._database = database
        self._queues = queues

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Cancel one event."""
        raw = reading.body(req.env, limit=_MAX_CANCEL_BODY)
        caller = self._auth.caller(req.env, raw, Role.OPERATOR)
        why = _reason(raw)
        source = _source_of(caller, req, event_id)
        try:
            with self._database.connection() as connection:
                result = cancelling.cancel(connection, source, event_id, caller.name, why)
        except IllegalTransition as e:
            raise Problem(409, str(e), name="already-finished") from None
        if result is None:
            raise _unknown(event_id)
        self._forget(result)
        resp.data = json.dumps(
            {
                "event_id": event_id,
                "source": source,
                "status": result.status,
                "cancelled": len(result.cancelled),
                "requested": result.requested,
            }
        ).encode()

    def _forget(self, result: cancelling.CancelResult) -> None:
        """Take what was cancelled out of the queues; should that fail, routing and claim refuse it later."""
        try:
            self._queues.forget(ROUTE, [str(result.seq)])
            self._queues.forget(DELIVER, [delivery_key(ref) for ref in result.cancelled])
        except BrokerUnavailable as e:
            _log.warning("cancel.not_forgotten", reason=str(e), deliveries=len(result.cancelled))


def envelope(found: dict[str, Any]) -> bytes:
    """The JSON of an event as the store found it, with payload and parameters as the very text that was received."""
    rest = {k: v for k, v in found.items() if k not in ("payload", "parameters")}
    for attempt in (a for d in rest["deliveries"] for a in d["attempts"]):
        attempt["sha256"] = attempt["sha256"].hex() if attempt["sha256"] else None
    head = json.dumps(rest, default=jsonable)
    return f'{head[:-1]}, "parameters": {found["parameters"] or "null"}, "payload": {found["payload"]}}}'.encode()


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
            "created_at": _time(accepted.created_at),
        }
    ).encode()


def _source_of(caller: Caller, req: falcon.Request, event_id: str) -> str:
    """Whose event it is about; a source sees only its own."""
    asked = req.get_param("source")
    if caller.source is not None:
        if asked not in (None, caller.source) or not validation.is_event_id(event_id):
            raise _unknown(event_id)
        return caller.source
    if not asked:
        raise problems.invalid([FieldError("source", "is required in the query: /v1/events/{event_id}?source=NAME")])
    if not validation.is_event_id(event_id) or not asked.isprintable():
        raise _unknown(event_id)
    return asked


def _unknown(event_id: str) -> Problem:
    return Problem(404, f"there is no event {event_id[:128]!a} of this source", name="unknown-event")


def _reason(raw: bytes) -> str:
    """The reason in the body of a cancel: ``{"reason": "…"}``, or no body."""
    if not raw:
        return ""
    try:
        document = strict_json.parse(raw)
    except NotStrictJson as e:
        raise Problem(400, f"the body is not strict JSON: {e}", name="not-strict-json") from None
    if document is None:
        raise problems.invalid([FieldError("body", "must be a JSON object, or be left out")])
    errors = [FieldError(ascii(k[:64])[1:-1], "is not a field of a cancel") for k in document.values if k != "reason"]
    why = document.values.get("reason", "")
    if not isinstance(why, str) or len(why) > MAX_REASON or not why.isprintable():
        errors.append(FieldError("reason", f"must be a string of at most {MAX_REASON} printable characters"))
    if errors:
        raise problems.invalid(errors)
    return str(why)


def _place(place: Any) -> dict[str, Any]:
    shown = {"where": place.kind, "seconds": round(place.delay_s, 3), "ahead": place.ahead}
    return shown | {"for": place.limit} if place.limit else shown


def jsonable(value: Any) -> Any:
    """What JSON has no type for: times in RFC 3339, bytes as text."""
    if isinstance(value, datetime):
        return _time(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    return str(value)


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
