"""The record of what people did, read page by page; the latest first."""

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

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

_CURSOR: Final = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


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
        following = cursor(found[limit - 1]) if len(found) > limit else None
        resp.data = json.dumps({"entries": found[:limit], "next_cursor": following}, default=jsonable).encode()


def cursor(entry: dict[str, Any]) -> str:
    """The place of an entry, from which a page goes on."""
    return f"{(entry['at'] - _EPOCH) // _MICROSECOND}-{entry['id']}"


def place(given: str) -> tuple[datetime, int]:
    """The place that a cursor names.

    Raises:
        ValueError: it is none of ours.
    """
    found = _CURSOR.fullmatch(given)
    try:
        if found:
            return _EPOCH + int(found[1]) * _MICROSECOND, int(found[2])
    except OverflowError:
        pass
    raise ValueError("must be the next_cursor of an answer")


_PARAMETERS: Final = {
    "who": query.text,
    "action": query.text,
    "what": query.text,
    "since": query.moment,
    "until": query.moment,
    "cursor": place,
    "limit": query.whole(1, MAX_PAGE),
}
