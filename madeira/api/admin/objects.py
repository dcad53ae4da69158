"""Sources, endpoints and routes over HTTP: listed, made, changed and removed, with the same checks as the file.

A change names the version that it was made to, in ``If-Match`` or in the document, and is refused when the object has another
one by now: of two people who edit at the same time the second one is told, and nothing is lost. Without it the change is made
to whatever is there.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import falcon

from madeira import log
from madeira.api import problems, query
from madeira.api.admin import bodies, lanes
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.problems import FieldError, Problem
from madeira.broker.queues import DELIVER, Queues, delivery_key
from madeira.errors import AlreadyThere, BrokerUnavailable, ConfigurationInvalid, FieldProblem, InUse, NotThere, Stale
from madeira.ids import NAME
from madeira.routing.fields import Kind
from madeira.routing.manage import Configurator, Removed, Shown
from madeira.states import Role
from madeira.store import endpoints
from madeira.store.database import Database

#: A version as ``If-Match`` holds it.
_ETAG: Final = re.compile(r'(?:W/)?"?([0-9]{1,18})"?')

_log = log.get(__name__)


class Objects:
    """``/v1/sources``, ``/v1/endpoints``, ``/v1/routes``."""

    def __init__(self, *, auth: Authenticator, configurator: Configurator, kind: Kind) -> None:
        self._auth = auth
        self._configurator = configurator
        self._kind: Kind = kind

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """List them all: routes in their order, the others by name."""
        self._auth.person(req.env, Role.VIEWER)
        query.read(req, {})
        found = self._configurator.list(self._kind)
        resp.data = json.dumps({f"{self._kind}s": [_document(one) for one in found]}, default=jsonable).encode()

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make one."""
        caller = self._auth.person(req.env, Role.ADMIN)
        why = query.read(req, {"reason": bodies.reason}).get("reason")
        document = dict(bodies.document(req.env).values)
        name = document.pop("name", None)
        with _told(self._kind):
            made = self._configurator.create(self._kind, name, document, who=caller.name, why=why)
        resp.status = falcon.HTTP_201
        resp.set_header("Location", f"/v1/{self._kind}s/{made.name}")
        _show(resp, made)


class Object:
    """``/v1/sources/{name}`` and so on."""

    def __init__(
        self, *, auth: Authenticator, configurator: Configurator, kind: Kind, database: Database, queues: Queues
    ) -> None:
        self._auth = auth
        self._configurator = configurator
        self._kind: Kind = kind
        self._database = database
        self._queues = queues

    def on_get(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Show one; of an endpoint also how many deliveries it has left, whether it is held, and how its lane is."""
        self._auth.person(req.env, Role.VIEWER)
        query.read(req, {})
        with _told(self._kind):
            found = self._configurator.get(self._kind, known(self._kind, name))
        more: dict[str, Any] = {}
        if self._kind == "endpoint":
            with self._database.connection() as connection:
                more["unfinished"] = endpoints.unfinished(connection, name)
            more |= lanes.shown(name, database=self._database, queues=self._queues)
        _show(resp, found, **more)

    def on_patch(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Change one by a JSON merge patch."""
        caller = self._auth.person(req.env, Role.ADMIN)
        why = query.read(req, {"reason": bodies.reason}).get("reason")
        patch = dict(bodies.document(req.env, patch=True).values)
        expected, wrong = _expected(req, patch)
        with _told(self._kind):
            changed = self._configurator.update(
                self._kind, known(self._kind, name), patch, expected=expected, who=caller.name, why=why, told=wrong
            )
        _show(resp, changed)

    def on_delete(self, req: falcon.Request, resp: falcon.Response, name: str) -> None:
        """Remove one."""
        caller = self._auth.person(req.env, Role.ADMIN)
        asked = query.read(req, _REMOVAL if self._kind == "endpoint" else {"reason": bodies.reason})
        unfinished, why = asked.get("unfinished", "refuse"), asked.get("reason")
        if unfinished == "cancel" and not (why or "").strip():
            raise problems.invalid([FieldError("reason", "must say why, when deliveries are cancelled")])
        with _told(self._kind):
            removed = self._configurator.delete(
                self._kind,
                known(self._kind, name),
                expected=_expected(req, {})[0],
                who=caller.name,
                why=why,
                unfinished=unfinished,
            )
        forget(self._queues, removed)
        resp.data = json.dumps(
            {"name": name, "removed": True, "cancelled": len(removed.cancelled), "requested": removed.requested}
        ).encode()


def forget(queues: Queues, removed: Removed) -> None:
    """Take what was cancelled by a removal out of the queues; should that fail, the claim refuses it later."""
    try:
        queues.forget(DELIVER, [delivery_key(ref) for ref in removed.cancelled])
    except BrokerUnavailable as e:
        _log.warning("cancel.not_forgotten", reason=str(e), keys=len(removed.cancelled))


_REMOVAL: Final = {"unfinished": query.choice("refuse", "cancel"), "reason": bodies.reason}


@contextmanager
def _told(kind: Kind) -> Iterator[None]:
    """Tells a client what cannot be done, and why."""
    try:
        yield
    except NotThere as e:
        raise Problem(404, str(e), name=f"unknown-{kind}") from None
    except AlreadyThere as e:
        raise Problem(409, str(e), name="already-there") from None
    except InUse as e:
        raise Problem(409, str(e), name="in-use") from None
    except Stale as e:
        raise Problem(412, str(e)) from None
    except ConfigurationInvalid as e:
        raise problems.invalid([FieldError(p.field or "body", p.detail) for p in e.problems]) from None


def known(kind: Kind, name: str) -> str:
    """`name`, if it can be one at all.

    Raises:
        NotThere: nothing can be called so.
    """
    if not NAME.fullmatch(name):
        raise NotThere(f"there is no {kind} {name[:64]!a}")
    return name


def _expected(req: falcon.Request, patch: dict[str, Any]) -> tuple[int | None, list[FieldProblem]]:
    """The version that a change was made to, from ``If-Match`` or the document, and what is wrong with the one in the
    document; None when neither names one.

    Raises:
        Problem: 400, when ``If-Match`` holds no version.
    """
    header = _if_match(req)
    version = patch.pop("version", None)
    if version is None:
        return header, []
    if isinstance(version, bool) or not isinstance(version, int | float) or version != int(version):
        return header, [FieldProblem("version", "must be the version of what was read, or be left out")]
    if header is not None and header != version:
        return None, [FieldProblem("version", "must be the same as in If-Match")]
    return int(version), []


def _if_match(req: falcon.Request) -> int | None:
    given = req.get_header("If-Match")
    if given is None or given.strip() == "*":
        return None
    match = _ETAG.fullmatch(given.strip())
    if match is None:
        raise Problem(400, 'the header If-Match must hold the ETag of what was read, such as "3", or *')
    return int(match[1])


def _document(found: Shown) -> dict[str, Any]:
    dates = {"version": found.version, "created_at": found.created_at, "updated_at": found.updated_at}
    return {"name": found.name, **found.document, **dates}


def _show(resp: falcon.Response, found: Shown, **more: Any) -> None:
    resp.set_header("ETag", f'"{found.version}"')
    resp.data = json.dumps(_document(found) | more, default=jsonable).encode()
