"""What is done with events that were accepted: cancel, replay, reroute, erase.

All are Postgres' decision, in one transaction with its audit row; what follows in the queues is told after the commit, and
reconcile, routing or the claim see to it if that fails. A source may cancel its own events, everything else takes a person or
a program with a token: an operator, for an erasure an administrator.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import falcon

from madeira import reasons
from madeira.api import query, reading
from madeira.api.acting import Acting
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.listing import missing, source_of
from madeira.api.problems import Problem
from madeira.broker.queues import Queues
from madeira.errors import IllegalTransition
from madeira.states import Role
from madeira.store import cancelling, erase, ordering
from madeira.store.database import Database

#: Bytes of the body of an action.
MAX_BODY: Final = 4096

#: Characters of the name of an endpoint.
MAX_NAME: Final = 255

#: Deliveries that are cancelled in one transaction.
PAGE: Final = 500

#: Seconds after which cancelling all of an endpoint stops for now, before a client or a proxy gives the request up.
ENOUGH_S: Final = 15.0


class _Action:
    """What all actions work with."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues) -> None:
        self._auth = auth
        self._database = database
        self._acting = Acting(database=database, queues=queues)

    def _absent(self, source: str, event_id: str, endpoint: str | None = None) -> Problem:
        """The answer when there was nothing to act on: the event is gone, there was none, or it does not go there."""
        told = missing(source, event_id, database=self._database)
        return told if endpoint is None or told.status_code == HTTPStatus.GONE else _unknown_here(event_id, endpoint)


class Cancel(_Action):
    """``POST /v1/events/{event_id}/cancel``: ends what has not ended of an event, or of its way to one endpoint."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Cancel one event."""
        raw = reading.json_if_any(req.env, limit=MAX_BODY)
        caller = self._auth.caller(req.env, raw, Role.OPERATOR)
        asked = _asked(raw, endpoint=_endpoint)
        source, endpoint = source_of(caller, req, event_id), asked.get("endpoint")
        with _told():
            result = self._acting.cancel(source, event_id, who=caller.name, why=asked.get("reason", ""), endpoint=endpoint)
        if result is None:
            raise self._absent(source, event_id, endpoint)
        _answer(resp, event_id, source, status=result.status, cancelled=len(result.cancelled), requested=result.requested)


class Replay(_Action):
    """``POST /v1/events/{event_id}/replay``: sends again what is dead; with ``force`` also what succeeded."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Replay one event."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        asked = _asked(reading.json_if_any(req.env, limit=MAX_BODY), required=True, endpoint=_endpoint, force=bodies.flag)
        source, endpoint = source_of(caller, req, event_id), asked.get("endpoint")
        force = asked.get("force", False)
        with _told():
            result = self._acting.replay(source, event_id, who=caller.name, why=asked["reason"], endpoint=endpoint, force=force)
        if result is None:
            raise self._absent(source, event_id, endpoint)
        _answer(
            resp,
            event_id,
            source,
            status=result.status,
            replayed=len(result.refs),
            endpoints=result.endpoints,
            missing=result.missing,
        )


class Reroute(_Action):
    """``POST /v1/events/{event_id}/reroute``: has an event routed again whose rules were wrong and are mended."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Reroute one event."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        asked = _asked(reading.json_if_any(req.env, limit=MAX_BODY), required=True)
        source = source_of(caller, req, event_id)
        with _told():
            result = self._acting.reroute(source, event_id, who=caller.name, why=asked["reason"])
        if result is None:
            raise self._absent(source, event_id)
        _answer(resp, event_id, source, status="pending", removed=result.endpoints)


class Erase(_Action):
    """``POST /v1/events/{event_id}/erase``: takes away what an ended event holds of its subject."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Erase one event."""
        caller = self._auth.person(req.env, Role.ADMIN)
        asked = _asked(reading.json_if_any(req.env, limit=MAX_BODY), required=True)
        source = source_of(caller, req, event_id)
        with _told(), self._database.connection() as connection:
            result = erase.erase(connection, source, event_id, caller.name, asked["reason"])
        if result is None:
            raise self._absent(source, event_id)
        _answer(resp, event_id, source, status=result.status, erased_at=result.erased_at)


class CancelEndpoint(_Action):
    """``POST /v1/endpoints/{name}/cancel``: ends all that waits for an endpoint, whether or not that is still configured."""

    def on_post(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Cancel all that is unfinished, for some seconds; ``complete`` tells whether that was all."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        query.none(req, in_body=("reason",))
        why = _asked(reading.json_if_any(req.env, limit=MAX_BODY), required=True)["reason"]
        try:
            name = _endpoint(name)
        except ValueError:
            raise _no_endpoint(name) from None
        enough = time.monotonic() + ENOUGH_S
        sweep = cancelling.Sweep(name, caller.name, why)
        while not sweep.complete and time.monotonic() < enough:
            with self._database.connection() as connection:
                ended = sweep.go_on(connection, PAGE)
            self._acting.forget(ended)
        with self._database.connection() as connection:
            self._acting.ensure(ordering.of_endpoint(connection, name, PAGE))
        if not sweep.known:
            raise _no_endpoint(name)
        answer = {"endpoint": name, "cancelled": sweep.cancelled, "requested": sweep.requested, "complete": sweep.complete}
        resp.data = json.dumps(answer).encode()


@contextmanager
def _told() -> Iterator[None]:
    """Tells a client why an action is not possible, as 409."""
    try:
        yield
    except IllegalTransition as e:
        raise Problem(409, str(e), name=e.code) from None


def _answer(resp: falcon.Response, event_id: str, source: str, **members: Any) -> None:
    resp.data = json.dumps({"event_id": event_id, "source": source, **members}, default=jsonable).encode()


def _unknown_here(event_id: str, endpoint: str) -> Problem:
    return Problem(404, f"there is no event {event_id[:128]!a} of this source that goes to {endpoint!a}", name="unknown-delivery")


def _no_endpoint(name: str) -> Problem:
    return Problem(404, f"there is no endpoint {name[:128]!a}, and nothing waits for one of this name", name="unknown-endpoint")


def _asked(raw: bytes, *, required: bool = False, **fields: Any) -> Mapping[str, Any]:
    """The checked fields of an action's body: ``reason``, and those of `fields`, each with its check.

    Raises:
        Problem: 400 or 422.
    """
    if not raw and not required:
        return {}
    checks = {"reason": bodies.needed_reason if required else bodies.reason, **fields}
    values = bodies.parsed(raw or b"{}", optional=not required).values
    return bodies.checked(values, checks, "this action", required={"reason": "is required"} if required else {})


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_NAME or not reasons.is_line(value):
        raise ValueError("must be the name of an endpoint")
    return value
