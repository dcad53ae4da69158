"""The record of what people did, read page by page; the latest first."""

import json
from typing import Final

import falcon

from madeira.api import query
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.states import Role
from madeira.store import audit as store
from madeira.store.database import Database

#: Entries of a page, unless the query says otherwise, and at most.
PAGE: Final = 50
MAX_PAGE: Final = 200


class Audit:
    """``GET /v1/audit``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of it."""
        self._auth.person(req.env, Role.VIEWER)
        asked = query.read(req, _PARAMETERS)
        limit = asked.pop("limit", PAGE)
        with self._database.connection() as connection:
            found = store.page(connection, limit=limit + 1, before=asked.pop("cursor", None), **asked)
        following = query.cursor(found[limit - 1]["at"], found[limit - 1]["id"]) if len(found) > limit else None
        resp.data = json.dumps({"entries": found[:limit], "next_cursor": following}, default=jsonable).encode()


_PARAMETERS: Final = {
    "who": query.text,
    "action": query.text,
    "what": query.text,
    "since": query.moment,
    "until": query.moment,
    "cursor": query.place,
    "limit": query.whole(1, MAX_PAGE),
}
