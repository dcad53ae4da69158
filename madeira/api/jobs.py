"""Jobs over HTTP: one action on many, previewed, made, watched and steered.

Making one only writes it down; the workers do it (`actors/jobs.py`). They are told at once, and look every minute by themselves.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import falcon

from madeira.api import problems, query
from madeira.api.acting import Acting
from madeira.api.admin import bodies
from madeira.api.answers import jsonable
from madeira.api.auth import Authenticator
from madeira.api.problems import FieldError, Problem
from madeira.broker.queues import Queues
from madeira.errors import AlreadyThere, IllegalTransition, SelectionInvalid
from madeira.states import JobState, Role
from madeira.store import jobs as store
from madeira.store import selection
from madeira.store.database import Database
from madeira.store.jobs import KEY_PATTERN, RATES, NewJob

#: Jobs of a page, unless the query says otherwise, and at most.
PAGE: Final = 50
MAX_PAGE: Final = 200

ACTIONS: Final = ("replay", "cancel", "reroute")
AMONG: Final = ("unfinished", "dead")

#: What can be done to a job, and whether it needs a reason.
STEERS: Final[Mapping[str, bool]] = {"pause": True, "resume": False, "cancel": True}

_KEY: Final = re.compile(KEY_PATTERN, re.ASCII)
_ID: Final = re.compile(r"[0-9]{1,18}", re.ASCII)


class Jobs:
    """``GET`` and ``POST /v1/jobs``."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues) -> None:
        self._auth = auth
        self._database = database
        self._acting = Acting(database=database, queues=queues)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Show a page of jobs, the latest first."""
        self._auth.person(req.env, Role.VIEWER)
        wanted = query.read(req, _PARAMETERS)
        limit = wanted.pop("limit", PAGE)
        with self._database.connection() as connection:
            found = store.page(connection, limit=limit + 1, before=wanted.pop("cursor", None), **wanted)
        following = str(found[limit - 1]["id"]) if len(found) > limit else None
        resp.data = json.dumps({"jobs": found[:limit], "next_cursor": following}, default=jsonable).encode()

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make a job, or with ``dry_run`` only count what it would be about."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        query.none(req)
        job, dry_run = asked(bodies.document(req.env).values)
        if dry_run:
            with self._database.connection() as connection:
                preview = store.preview(connection, job)
            answer = {"dry_run": True, "total": preview.total, "sample": preview.sample, "missing": preview.missing}
            resp.data = json.dumps(answer, default=jsonable).encode()
            return
        try:
            made, is_new = self._acting.start_job(job, who=caller.name)
        except AlreadyThere as e:
            raise Problem(409, str(e), name="already-there") from None
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        if is_new:
            resp.status = falcon.HTTP_201
        resp.set_header("Location", f"/v1/jobs/{made['id']}")
        resp.data = json.dumps(made, default=jsonable).encode()


class Job:
    """``GET /v1/jobs/{id}``."""

    def __init__(self, *, auth: Authenticator, database: Database) -> None:
        self._auth = auth
        self._database = database

    def on_get(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:  # the name in the address
        """Show one job."""
        self._auth.person(req.env, Role.VIEWER)
        query.none(req)
        with self._database.connection() as connection:
            found = store.find(connection, number(id))
        if found is None:
            raise unknown(id)
        resp.data = json.dumps(found, default=jsonable).encode()


class Steer:
    """``POST /v1/jobs/{id}/pause``, ``resume`` and ``cancel``."""

    def __init__(self, *, auth: Authenticator, database: Database, queues: Queues, steer: str) -> None:
        self._auth = auth
        self._acting = Acting(database=database, queues=queues)
        self._steer = steer

    def on_post(self, req: falcon.Request, resp: falcon.Response, id: str) -> None:  # the name in the address
        """Pause, resume or cancel one job."""
        caller = self._auth.person(req.env, Role.OPERATOR)
        query.none(req, in_body=("reason",))
        needed = STEERS[self._steer]
        why = bodies.why(bodies.document(req.env, optional=not needed).values, needed=needed)
        try:
            found = self._acting.steer_job(number(id), self._steer, who=caller.name, why=why)
        except IllegalTransition as e:
            raise Problem(409, str(e), name=e.code) from None
        if found is None:
            raise unknown(id)
        resp.data = json.dumps(found.document, default=jsonable).encode()


def number(given: str) -> int:
    """The number of a job.

    Raises:
        Problem: 404.
    """
    if not _ID.fullmatch(given):
        raise unknown(given)
    return int(given)


def unknown(given: str) -> Problem:
    """What is answered about a job that is not there."""
    return Problem(404, f"there is no job {given[:64]!a}", name="unknown-job")


def asked(values: Mapping[str, Any]) -> tuple[NewJob, bool]:
    """The job that a body asks for, and whether it is only to be counted.

    Raises:
        Problem: 422, with one entry for each field that is unknown, missing or wrong.
    """
    errors = [
        FieldError(problems.shown(n), f"is no field of a job; known: {', '.join(_FIELDS)}") for n in values if n not in _FIELDS
    ]
    errors += [FieldError(name, told) for name, told in _REQUIRED.items() if name not in values]
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _FIELDS and not (value is None and name in _NULLABLE):
            try:
                found[name] = _FIELDS[name](value)
            except SelectionInvalid as e:
                errors += [FieldError(f"filter.{p.field}" if p.field else "filter", p.detail) for p in e.problems]
            except ValueError as e:
                errors.append(FieldError(name, str(e)))
    errors += _contradictions(found)
    if errors:
        raise problems.invalid(errors)
    dry_run = found.pop("dry_run", False)
    found.setdefault("among", "unfinished" if found["action"] == "cancel" else "dead")
    return NewJob(selection=found.pop("filter"), **found), dry_run


def _contradictions(found: Mapping[str, Any]) -> list[FieldError]:
    action = found.get("action")
    errors = []
    if action == "cancel" and "rate" in found:
        errors.append(FieldError("rate", "is for a replay or a reroute; a cancel calls nobody"))
    if action in ("cancel", "reroute") and "ordered" in found:
        errors.append(FieldError("ordered", f"is for a replay; a {action} has no order"))
    if action in ("replay", "reroute") and found.get("among") == "unfinished":
        errors.append(FieldError("among", f"is for a cancel; a {action} is about what is dead"))
    return errors


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(given: Any) -> str:
        if given not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return str(given)

    return check


def _rate(given: Any) -> float:
    low, high = RATES
    if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
        raise ValueError(f"must be a number from {low} to {high}: how many a second")
    return float(given)


def _key(given: Any) -> str:
    if not isinstance(given, str) or not _KEY.fullmatch(given):
        raise ValueError("must be of 1 to 128 letters, digits, '.', '_', ':' and '-'")
    return given


_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "action": _one_of(*ACTIONS),
    "filter": selection.from_document,
    "reason": bodies.needed_reason,
    "among": _one_of(*AMONG),
    "ordered": bodies.flag,
    "rate": _rate,
    "key": _key,
    "dry_run": bodies.flag,
}

_NULLABLE: Final = frozenset({"rate", "key"})

_REQUIRED: Final = {
    "action": f"is required: one of {', '.join(ACTIONS)}",
    "filter": "is required: which ones; {} means all",
    "reason": "is required: it stands in the audit",
}


def _cursor(given: str) -> int:
    if not _ID.fullmatch(given):
        raise ValueError("must be the next_cursor of an answer")
    return int(given)


_PARAMETERS: Final = {
    "state": query.choice(*JobState),
    "action": query.choice(*ACTIONS),
    "cursor": _cursor,
    "limit": query.whole(1, MAX_PAGE),
}
