"""Trying rules out over HTTP: what would become of an event, by the rules as they are at this moment."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import falcon

from madeira import dry_run
from madeira.api import query, validation
from madeira.api.admin import bodies
from madeira.api.auth import Authenticator
from madeira.api.problems import FieldError
from madeira.dry_run import Response
from madeira.egress import Egress
from madeira.routing.config import Rules
from madeira.routing.follow import rules_of
from madeira.sealing import Sealer
from madeira.states import Role
from madeira.store import configuration
from madeira.store.configuration import Snapshot
from madeira.store.database import Database
from madeira.strict_json import Document

#: Statuses that an answer can have.
_STATUS: Final = range(100, 1000)

_RESPONSE: Final = frozenset({"status", "headers", "body"})


class DryRun:
    """``POST /v1/dry-run``."""

    def __init__(self, *, auth: Authenticator, rules: "NewestRules", egress: Egress) -> None:
        self._auth = auth
        self._rules = rules
        self._egress = egress

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Tell which routes match and why the others do not, the exact requests, and what an answer would come to."""
        self._auth.person(req.env, Role.VIEWER)
        query.read(req, {})
        document = bodies.document(req.env)
        rules = self._rules.read()
        source = document.values.get("source")
        errors: list[FieldError] = []
        if not isinstance(source, str):
            errors.append(FieldError("source", "is required: the name of the source that would post it"))
        elif reason := dry_run.no_source(rules, source):
            errors.append(FieldError("source", reason))
        response = _response(document.values.get("response"), errors)
        event = validation.new_event(
            _event(document), source=str(source), raw=b"", environ={}, egress=self._egress, beside=errors
        )
        found = dry_run.dry_run(rules, event, egress=self._egress, now=datetime.now(UTC), response=response)
        resp.data = json.dumps(dry_run.document(found)).encode()


class NewestRules:
    """The rules as Postgres has them now: those that this process follows, or newer ones that it has not read yet.

    `followed` gives the rules that this process goes by; None while there are none.
    """

    def __init__(self, *, database: Database, sealer: Sealer, followed: Callable[[], Rules | None]) -> None:
        self._database = database
        self._sealer = sealer
        self._followed = followed

    def read(self) -> Rules:
        """Read them, unless they are known already.

        Raises:
            StoreUnavailable: Postgres is away.
        """
        with self._database.connection() as connection:
            known = self._followed()
            if known is not None and configuration.version(connection) == known.version:
                return known
            return self.of(configuration.read(connection))

    def of(self, found: Snapshot) -> Rules:
        """The rules of a configuration that need not be there."""
        return rules_of(found, sealer=self._sealer)


def _event(document: Document) -> Document:
    """What of a body is the event; its source is checked already."""
    beside = ("response", "source")
    return Document(*({k: v for k, v in part.items() if k not in beside} for part in (document.values, document.texts)))


def _response(given: Any, errors: list[FieldError]) -> Response | None:
    """The answer that is to be judged; None when there is none, or what is wrong is in `errors`."""
    if given is None:
        return None
    if not isinstance(given, dict):
        errors.append(FieldError("response", "must be an object"))
        return None
    before = len(errors)
    errors += [FieldError(f"response.{e.field}", e.detail) for e in bodies.unknown(given, _RESPONSE, "a response")]
    status, headers, body = given.get("status"), given.get("headers", {}), given.get("body", "")
    if isinstance(status, bool) or not isinstance(status, int | float) or status not in _STATUS:
        errors.append(FieldError("response.status", "must be a status of HTTP, from 100 to 999"))
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        errors.append(FieldError("response.headers", "must be an object of strings"))
    if not isinstance(body, str):
        errors.append(FieldError("response.body", "must be a string: the body as it comes over the wire"))
    return Response(int(status or 0), headers, body) if len(errors) == before else None
