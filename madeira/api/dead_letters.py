"""Dead letters over HTTP: a list, its groups, and one of them with all that was tried.

Groups are a resource of their own, since they answer another question in another shape; both take the same filters, which are
those of a job too.
"""

import json
import re
from typing import Any, Final

import falcon

from madeira.api import query
from madeira.api.answers import jsonable, show_digests
from madeira.api.auth import Authenticator
from madeira.api.problems import Problem
from madeira.states import Role
from madeira.store import dead_letters as store
from madeira.store import selection
from madeira.store.database import Database
from madeira.store.dead_letters import Place
from madeira.store.replica import Lists
from madeira.store.selection import Selection

#: Entries of a page, unless the query says otherwise, and at most.
PAGE: Final = 50
MAX_PAGE: Final = 200

_ID: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


class _Reading:
    """What both lists work with."""

    def __init__(self, *, auth: Authenticator, lists: Lists) -> None:
        self._auth = auth
        self._lists = lists


class DeadLetters(_Reading):
    """``GET /v1/dead-letters``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of dead letters, the latest first."""
        self._auth.person(req.env, Role.VIEWER)
        asked = query.read(req, _PARAMETERS)
        limit, cursor = asked.pop("limit", PAGE), asked.pop("cursor", None)
        wanted, after = Selection(**asked), Place(*cursor) if cursor else None
        found = self._lists.read(lambda connection: store.page(connection, wanted, limit=limit, after=after))
        answer = {
            "dead_letters": found.items,
            "next_cursor": None if found.after is None else query.cursor(*found.after),
            # False: it has looked at as many as a page may, and the rest is behind the cursor.
            "complete": found.after is None or len(found.items) == limit,
        }
        resp.data = json.dumps(answer, default=jsonable).encode()


class Groups(_Reading):
    """``GET /v1/dead-letters/groups``."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show how many there are by endpoint and error, the largest group first."""
        self._auth.person(req.env, Role.VIEWER)
        asked = query.read(req, _OF_GROUPS)
        limit = asked.pop("limit", PAGE)
        wanted = Selection(**asked)
        found = self._lists.read(lambda connection: store.groups(connection, wanted, limit=limit))
        answer = {"groups": found.groups, "counted": found.counted, "complete": found.complete}
        resp.data = json.dumps(answer, default=jsonable).encode()


class DeadLetter:
    """``GET /v1/dead-letters/{delivery_id}``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response, delivery_id: str) -> None:
        """Show one dead letter with its attempts, what was sent and what came back."""
        self._auth.person(req.env, Role.VIEWER)
        query.none(req)
        found = None
        if _ID.fullmatch(delivery_id):
            with self._database.connection() as connection:
                found = store.find(connection, int(delivery_id))
        if found is None:
            detail = f"there is no dead letter {delivery_id[:32]!a}: no such delivery, or it is not dead (any more)"
            raise Problem(404, detail, name="unknown-dead-letter")
        show_digests(found["attempts"])
        resp.data = json.dumps(found, default=jsonable).encode()


_FILTERS: Final[dict[str, query.Check]] = {**selection.CHECKS, "since": query.moment, "until": query.moment}
_OF_GROUPS: Final[dict[str, query.Check]] = {**_FILTERS, "limit": query.whole(1, MAX_PAGE)}
_PARAMETERS: Final[dict[str, Any]] = {**_OF_GROUPS, "cursor": query.place}
