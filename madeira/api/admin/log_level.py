"""The level of the log, for all processes of the API and of the workers, while they run."""

import json
from collections.abc import Mapping
from typing import Any, Final

import falcon

from madeira.api import query
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.settings import LOG_LEVELS
from madeira.states import Role
from madeira.store import configuration
from madeira.store.configuration import LOG_LEVEL_MAX_S
from madeira.store.database import Database
from madeira.strict_json import as_whole


class LogLevel:
    """``GET`` and ``PUT /v1/log-level``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Tell the level that was asked for, and until when it holds."""
        self._auth.person(req.env, Role.VIEWER)
        query.none(req)
        with self._database.connection() as connection:
            level, until = configuration.log_level(connection)
        resp.data = _document(level, until)

    def on_put(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Ask for a level; null gives each process its own again."""
        caller = self._auth.person(req.env, Role.ADMIN)
        query.none(req, in_body=("level", "for_s", "reason"))
        given = bodies.document(req.env, optional=True).values
        asked = bodies.checked(given, _CHECKS, "this request", required=_REQUIRED)
        level, for_s = asked["level"], asked.get("for_s")
        with self._database.connection() as connection:
            until = configuration.set_log_level(connection, level, for_s=for_s, who=caller.name, why=asked["reason"])
        resp.data = _document(level, until)


def _document(level: str | None, until: Any) -> bytes:
    return json.dumps({"level": level, "until": until}, default=jsonable).encode()


def _level(given: Any) -> str | None:
    if given is not None and given not in LOG_LEVELS:
        raise ValueError(f"must be one of {', '.join(LOG_LEVELS)}, or null")
    return None if given is None else str(given)


def _for_s(given: Any) -> int | None:
    if given is None:
        return None
    seconds = as_whole(given)
    if seconds is None or not 1 <= seconds <= LOG_LEVEL_MAX_S:
        raise ValueError(f"must be a whole number of seconds from 1 to {LOG_LEVEL_MAX_S}, or be left out")
    return seconds


_CHECKS: Final[Mapping[str, bodies.Check]] = {"level": _level, "for_s": _for_s, "reason": bodies.needed_reason}

_REQUIRED: Final = {"level": "is required; null gives each process its own again", "reason": "is required"}
