"""Reading events: lists of them, and each with its deliveries, their attempts, and where waits what is unfinished.

A viewer sees all events; a source, by its signature over an empty body, sees its own and none else's.
"""

import base64
import binascii
import json
import re
from typing import Any, Final

import falcon

from madeira.api import problems, query, reading, validation
from madeira.api.answers import envelope, jsonable
from madeira.api.auth import Authenticator, Caller
from madeira.api.problems import FieldError, Problem
from madeira.broker import places
from madeira.broker.queues import Queues
from madeira.states import EventStatus, Role
from madeira.store import listing, selection, story, tombstones
from madeira.store.database import Database
from madeira.store.listing import Wanted
from madeira.store.replica import Lists

#: Events of a page, unless the query says otherwise, and at most.
PAGE: Final = 50
MAX_PAGE: Final = 200

#: Bytes of the body of a read: a source signs an empty one.
MAX_BODY: Final = 4096

_CURSOR: Final = re.compile(rb"e([0-9]{1,18})")


class Listing:
    """``GET /v1/events``."""

    def __init__(self, *, auth: Authenticator, lists: Lists) -> None:
        self._auth = auth
        self._lists = lists

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of events, the newest first."""
        caller = self._auth.caller(req.env, reading.body(req.env, limit=MAX_BODY), Role.VIEWER)
        asked = query.read(req, PARAMETERS)
        limit, before = asked.pop("limit", PAGE), asked.pop("cursor", None)
        if caller.source is not None and asked.setdefault("source", caller.source) != caller.source:
            raise problems.invalid([FieldError("source", "must be the one that signs, or be left out")])
        wanted = Wanted(**asked)
        found = self._lists.read(lambda connection: listing.page(connection, wanted, limit=limit, before=before))
        answer = {
            "events": found.events,
            "next_cursor": None if found.before is None else _cursor(found.before),
            # False: it has looked at as many events as a page may, and the rest is behind the cursor.
            "complete": found.before is None or len(found.events) == limit,
        }
        resp.data = json.dumps(answer, default=jsonable).encode()


class Event:
    """``GET /v1/events/{event_id}``: the envelope, its deliveries and attempts, and where waits what is unfinished."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues) -> None:
        self._auth = auth
        self._database = database
        self._queues = queues

    def on_get(self, req: falcon.Request, resp: falcon.Response, event_id: str) -> None:
        """Show one event."""
        caller = self._auth.caller(req.env, reading.body(req.env, limit=MAX_BODY), Role.VIEWER)
        source = source_of(caller, req, event_id)
        found = find(source, event_id, database=self._database, queues=self._queues, asked_by=caller.source)
        if found is None:
            raise missing(source, event_id, database=self._database)
        resp.data = envelope(found)


def find(source: str, event_id: str, *, database: Database, queues: Queues, asked_by: str | None = None) -> dict[str, Any] | None:
    """An event with its ``deliveries``, their ``attempts``, and in ``waits`` where waits what is unfinished; None when there
    is none. `asked_by` is the source that asks, which is told the ids of its own events only; None: a person.
    """
    with database.connection() as connection:
        found = story.find(connection, source, event_id)
        if found is None:
            return None
        waits = places.in_order(connection, found)
    places.add(found, waits, queues, asked_by=asked_by)
    return found


def source_of(caller: Caller, req: falcon.Request, event_id: str) -> str:
    """Whose event it is about; a source sees only its own.

    Raises:
        Problem: 404; 422 when a person does not name the source, or the query holds something else.
    """
    asked: str | None = query.read(req, _WHOSE).get("source")
    if caller.source is not None:
        if asked not in (None, caller.source) or not validation.is_event_id(event_id):
            raise unknown(event_id)
        return caller.source
    if not asked:
        raise problems.invalid([FieldError("source", "is required in the query: /v1/events/{event_id}?source=NAME")])
    if not validation.is_event_id(event_id) or not asked.isprintable():
        raise unknown(event_id)
    return asked


def unknown(event_id: str) -> Problem:
    """The answer to an id that its source, or the caller, does not have."""
    return Problem(404, f"there is no event {event_id[:128]!a} of this source", name="unknown-event")


def missing(source: str, event_id: str, *, database: Database) -> Problem:
    """The answer to the id of an event that is not there: whether it ever was is known for as long as its id is kept."""
    with database.connection() as connection:
        found = tombstones.find(connection, [(source, event_id)]).get((source, event_id))
    if found is None:
        return unknown(event_id)
    told = {name: jsonable(found[key]) for name, key in _OF_GONE.items()}
    detail = f"the event {event_id} was {found['status']}, and removed because of its age"
    return Problem(410, detail, name="removed", status_was=found["status"], **told)


def _cursor(before: int) -> str:
    return base64.urlsafe_b64encode(b"e%d" % before).decode().rstrip("=")


def _before(given: str) -> int:
    try:
        text = base64.b64decode(given.encode("ascii") + b"=" * (-len(given) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        text = b""
    found = _CURSOR.fullmatch(text)
    if found is None:
        raise ValueError("must be the next_cursor of an answer")
    return int(found[1])


#: What is told of an event that is gone, and the column that has it.
_OF_GONE: Final = {"accepted_at": "created_at", "ended_at": "ended_at", "removed_at": "buried_at"}

#: Of what is about one event; a source that cannot be is one that has no such event.
_WHOSE: Final[dict[str, query.Check]] = {"source": str}

#: What narrows a list.
PARAMETERS: Final = {
    "status": lambda given: EventStatus(query.choice(*EventStatus)(given)),
    "event_type": selection.CHECKS["event_type"],
    "source": query.text,
    "endpoint": query.text,
    "trace_id": query.text,
    "since": query.moment,
    "until": query.moment,
    "cursor": _before,
    "limit": query.whole(1, MAX_PAGE),
}
