"""Tokens of people and programs: made, listed, revoked; an administrator's business."""

import json
from datetime import timedelta
from typing import Any, Final

import falcon

from madeira.api import problems, query
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.problems import FieldError, Problem
from madeira.errors import AlreadyThere, NotThere
from madeira.ids import NAME
from madeira.states import Role
from madeira.store import tokens as store
from madeira.store.database import Database

_FIELDS: Final = frozenset({"name", "role", "expires_in", "reason"})

#: Longest life of a token that can be asked for.
MAX_EXPIRES: Final = timedelta(seconds=store.MAX_EXPIRES_S)


class Tokens:
    """``/v1/tokens``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """List the tokens that are not revoked; of none the secret part."""
        self._auth.person(req.env, Role.ADMIN)
        query.read(req, {})
        with self._database.connection() as connection:
            found = store.listed(connection)
        resp.data = json.dumps({"tokens": found}, default=jsonable).encode()

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make one; the answer is the only place that ever tells its text."""
        caller = self._auth.person(req.env, Role.ADMIN)
        query.read(req, {})
        asked = _asked(bodies.document(req.env).values)
        try:
            with self._database.connection() as connection:
                text, made = store.create(connection, who=caller.name, **asked)
        except AlreadyThere as e:
            raise Problem(409, str(e), name="already-there") from None
        resp.status = falcon.HTTP_201
        resp.set_header("Cache-Control", "no-store")
        resp.data = json.dumps({"token": text} | made, default=jsonable).encode()


class Token:
    """``/v1/tokens/{name}``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_delete(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Revoke it; it holds for at most two seconds more."""
        caller = self._auth.person(req.env, Role.ADMIN)
        why = query.read(req, {"reason": bodies.reason}).get("reason")
        if not NAME.fullmatch(name):
            raise Problem(404, f"there is no token {name[:64]!a}", name="unknown-token")
        try:
            with self._database.connection() as connection:
                ended = store.revoke(connection, name=name, who=caller.name, why=why)
        except NotThere as e:
            raise Problem(404, str(e), name="unknown-token") from None
        resp.data = json.dumps(ended, default=jsonable).encode()


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    """What `store.create` takes, from a body."""
    errors = bodies.unknown(values, _FIELDS, "a token")
    name, role, expires = values.get("name"), values.get("role"), values.get("expires_in")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        errors.append(
            FieldError("name", "must be of 1 to 64 letters, digits, '.', '_' and '-', and begin with a letter or digit")
        )
    if not isinstance(role, str) or role not in tuple(Role):
        errors.append(FieldError("role", f"must be one of {', '.join(Role)}"))
    if expires is not None and not _is_life(expires):
        errors.append(FieldError("expires_in", f"must be a number of seconds from 1 to {store.MAX_EXPIRES_S:.0f}, or null"))
    why = bodies.reason_if_any(values, errors)
    if errors:
        raise problems.invalid(errors)
    return {"name": name, "role": Role(str(role)), "expires_s": expires, "why": why}


def _is_life(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= store.MAX_EXPIRES_S
