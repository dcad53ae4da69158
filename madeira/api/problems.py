"""What a client is told when something is wrong: ``application/problem+json`` (RFC 9457), and nothing of our insides.

Every answer of 400 and above comes from here, also those that falcon makes by itself. The ``type`` is stable: programs
may rely on it, people read ``title`` and ``detail``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import falcon

from madeira import log
from madeira.errors import BrokerUnavailable, StoreUnavailable
from madeira.store.schema import is_misfit

#: Media type of every answer that tells of an error.
MEDIA_TYPE: Final = "application/problem+json"

#: Seconds after which a client that met an unavailable store should try again.
RETRY_AFTER_S: Final = 2

#: Prefix of the problem types; what follows is stable.
TYPE_PREFIX: Final = "urn:madeira:problem:"

_log = log.get(__name__)

#: Every type of problem, by the stable part of its name: its status, and when it comes. The first of a status is the one that
#: is meant when only the status is given. The guide has this table too.
TYPES: Final[dict[str, tuple[int, str]]] = {
    "bad-request": (400, "The request cannot be read as HTTP, or its body was cut off."),
    "not-strict-json": (400, "The body is not JSON that every parser reads alike."),
    "unauthorized": (401, "No valid signature of a source, or no token that holds."),
    "forbidden": (403, "The token's role does not suffice; `needed` names the role that does."),
    "not-found": (404, "There is nothing under this address."),
    "unknown-event": (404, "There is no such event of this source."),
    "unknown-delivery": (404, "The event does not go to this endpoint."),
    "unknown-dead-letter": (404, "There is no such delivery, or it is not dead (any more)."),
    "unknown-source": (404, "There is no such source."),
    "unknown-endpoint": (404, "There is no such endpoint."),
    "unknown-route": (404, "There is no such route."),
    "unknown-job": (404, "There is no such job."),
    "unknown-token": (404, "There is no such token, or it is revoked."),
    "method-not-allowed": (405, "The method is not possible here; `Allow` names those that are."),
    "request-timeout": (408, "The request did not come in time."),
    "conflict": (409, "An event with this id was accepted with other content."),
    "already-finished": (409, "The event has ended; there is nothing to do any more."),
    "unfinished": (409, "The event is on its way still: cancel it first, or wait for its end."),
    "not-routed": (409, "The event has no delivery; mend the rules and reroute it."),
    "cancelled": (409, "The event was cancelled; post it again under another id."),
    "erased": (409, "The payload of the event was erased."),
    "nothing-to-replay": (409, "The event has no dead delivery; `force` sends again what succeeded."),
    "nothing-to-reroute": (409, "Routing the event again would change nothing."),
    "nothing-matches": (409, "There is nothing that the job would be about; none was made."),
    "already-there": (409, "The name is taken."),
    "in-use": (409, "Something else refers to it, or has work left for it; `detail` says what, and the remedy."),
    "unusable": (409, "The object cannot be used as it is configured; `detail` says why."),
    "paused": (409, "The endpoint is paused; resume it first."),
    "disabled": (409, "The endpoint is disabled; enable it first."),
    "built-in": (409, "The endpoint is built in and cannot be held."),
    "removed": (410, "The event was removed because of its age; `status_was` says how it had ended, `removed_at` when it went."),
    "stale": (412, "The object was changed since it was read; read it again."),
    "too-large": (413, "The body is larger than allowed."),
    "uri-too-long": (414, "The request line is too long."),
    "unsupported-media-type": (415, "The body is of another media type, charset or encoding than those taken here."),
    "expectation-failed": (417, "Only `Expect: 100-continue` is known."),
    "invalid": (422, "Fields or parameters are missing or wrong; `errors` names each."),
    "too-many-lines": (422, "The batch has more lines than one request may have."),
    "over-limit": (429, "The source is over its limit; `Retry-After` says when to go on."),
    "headers-too-large": (431, "The headers are too many or too long."),
    "internal": (500, "An error inside Madeira; it is in the log."),
    "not-implemented": (501, "A transfer encoding other than chunked."),
    "unavailable": (
        503,
        "A store or secrets cannot be used, too many bodies come, or the process ends; nothing was promised: see `Retry-After`.",
    ),
}

_NAMES: Final[dict[int, str]] = {status: name for name, (status, _) in reversed(TYPES.items())}


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing that is wrong with one field."""

    field: str
    detail: str


def shown(name: str) -> str:
    """The name of a field that a client made up, as the answer may repeat it: short, and in printable ASCII."""
    return ascii(name[:64])[1:-1]


class Problem(falcon.HTTPError):
    """Raised to answer a request with a problem.

    `name` is the stable last part of ``type``; it follows from `status` when absent.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        name: str | None = None,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        **members: Any,
    ) -> None:
        super().__init__(status, title=title(status), description=detail, headers=dict(headers or {}))
        self.name = name or _NAMES.get(status, "error")
        self.errors = tuple(errors)
        self.members = members


def unauthorized() -> Problem:
    """The one answer to an unknown source, a wrong signature and a stale one: nobody learns which it was."""
    return Problem(
        401,
        "the source, its signature or its timestamp is not valid",
        headers={"WWW-Authenticate": 'Madeira-HMAC-SHA256, Bearer realm="madeira"'},
    )


def unknown_token() -> Problem:
    """The one answer to no token and to one that is unknown, revoked or expired."""
    return Problem(401, "a bearer token that holds is needed here", headers={"WWW-Authenticate": 'Bearer realm="madeira"'})


def forbidden(role: str, need: str) -> Problem:
    """A token that holds, of too low a role."""
    return Problem(403, f"this needs a token with the role {need}; yours has the role {role}", role=role, needed=need)


def invalid(errors: Sequence[FieldError]) -> Problem:
    """Fields that are missing, of the wrong type, or hold what they may not."""
    return Problem(422, "; ".join(f"{e.field}: {e.detail}" for e in errors), errors=errors)


def unavailable(detail: str) -> Problem:
    """The store is away: nothing is promised, send it again."""
    return Problem(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


def body(status: int, name: str, detail: str, errors: Sequence[FieldError] = (), **members: Any) -> bytes:
    """The bytes of a problem document."""
    document: dict[str, Any] = {"type": TYPE_PREFIX + name, "title": title(status), "status": status, "detail": detail}
    if errors:
        document["errors"] = [{"field": e.field, "detail": e.detail} for e in errors]
    return json.dumps(document | members).encode()


def parts(status: int, detail: str) -> bytes:
    """The bytes of a problem document whose name follows from its status."""
    return body(status, _NAMES.get(status, "error"), detail)


def install(app: "falcon.App[falcon.Request, falcon.Response]") -> None:
    """Make every error of `app` a problem document."""
    app.set_error_serializer(_serialize)
    app.add_error_handler(Exception, _unexpected)
    app.add_error_handler(StoreUnavailable, _store_away)
    app.add_error_handler(BrokerUnavailable, _store_away)


def _serialize(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    resp.content_type = MEDIA_TYPE
    if isinstance(error, Problem):
        resp.data = body(error.status_code, error.name, error.description or "", error.errors, **error.members)
        return
    detail = error.description or _described(error.status_code, req)
    resp.data = parts(error.status_code, detail)


def _described(status: int, req: falcon.Request) -> str:
    match status:
        case 404:
            return "there is nothing under this address"
        case 405:
            return f"{req.method} is not possible here"
        case _:
            return title(status)


def _store_away(_req: falcon.Request, _resp: falcon.Response, error: Exception, _params: dict[str, Any]) -> None:
    _log.warning("http.unavailable", reason=str(error))
    raise unavailable(f"{why_away(error, 'the store')}; nothing was confirmed, send the request again")


def why_away(error: Exception, store: str) -> str:
    """What callers are told of a store that is away: what is wrong with the tables, since that needs a person; else only that."""
    if is_misfit(str(error)):
        return str(error)
    return f"{store} cannot be reached at the moment"


def _unexpected(req: falcon.Request, _resp: falcon.Response, error: Exception, _params: dict[str, Any]) -> None:
    if isinstance(error, (falcon.HTTPError, falcon.HTTPStatus)):
        raise error
    _log.error("http.failed", method=req.method, path=req.path, exc_info=error)
    raise Problem(500, "an error inside Madeira; it is in the log")


def title(status: int) -> str:
    """The reason phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
