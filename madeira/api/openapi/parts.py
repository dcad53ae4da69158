"""The words in which the description of the API is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from madeira.api import problems
from madeira.reasons import MAX_REASON
from madeira.states import Role

Schema = dict[str, Any]

JSON: Final = "application/json"

#: What any request may be answered, by the server itself or since a store is away.
_ALWAYS: Final = (400, 408, 413, 414, 417, 431, 500, 501, 503)

_SIGNATURE: Final[dict[str, list[str]]] = {"signatureSource": [], "signatureTimestamp": [], "signature": []}

SECURITY: Final[dict[str, Schema]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token `mdr_…` with a role (`madeira token create`), or the one of `MADEIRA_ADMIN_TOKEN`.",
    },
    "signatureSource": {"type": "apiKey", "in": "header", "name": "X-Madeira-Source", "description": "The name of the source."},
    "signatureTimestamp": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Madeira-Timestamp",
        "description": "Unix seconds, at most five minutes from the server's clock.",
    },
    "signature": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Madeira-Signature",
        "description": "Hexadecimal HMAC-SHA256, with the source's secret, over the timestamp, a newline and the body.",
    },
}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: nobody in particular, a source, or a token whose role suffices; or either of the latter."""

    #: The role that a token needs; None: no token helps.
    role: Role | None = None
    #: Whether a source may ask by its signature.
    source: bool = False

    def security(self) -> list[dict[str, list[str]]]:
        """As the description says it: any one of these."""
        ways: list[dict[str, list[str]]] = []
        if self.role is not None:
            ways.append({"token": []})
        if self.source:
            ways.append(dict(_SIGNATURE))
        return ways


OPEN: Final = Access()
SOURCE: Final = Access(source=True)
VIEWER: Final = Access(role=Role.VIEWER)
OPERATOR: Final = Access(role=Role.OPERATOR)
ADMIN: Final = Access(role=Role.ADMIN)
VIEWER_OR_SOURCE: Final = Access(role=Role.VIEWER, source=True)
OPERATOR_OR_SOURCE: Final = Access(role=Role.OPERATOR, source=True)


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked of the API."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    access: Access
    #: Status -> (what it means, schema of the body or None).
    answers: Mapping[int, tuple[str, Schema | None]]
    #: Statuses of problems, besides those that any request may get.
    problems: tuple[int, ...] = ()
    parameters: Sequence[Schema] = ()
    body: Schema | None = None
    text: str = ""
    #: Whether it changes something on behalf of a person, and so leaves one row in the audit.
    audited: bool = False
    #: Media type of the answer.
    media_type: str = JSON
    #: Status -> headers of that answer.
    headers: Mapping[int, Schema] = field(default_factory=dict)

    def responses(self) -> Schema:
        """All answers, by status."""
        found: Schema = {}
        for status, (meaning, schema) in self.answers.items():
            found[str(status)] = {"description": meaning}
            if schema is not None:
                found[str(status)]["content"] = {self.media_type: {"schema": schema}}
            if status in self.headers:
                found[str(status)]["headers"] = self.headers[status]
        guarded = ((401,) if self.access != OPEN else ()) + ((403,) if self.access.role not in (None, Role.VIEWER) else ())
        for status in sorted({*_ALWAYS, *guarded, *self.problems} - set(self.answers)):
            found[str(status)] = {
                "description": HTTPStatus(status).phrase,
                "content": {problems.MEDIA_TYPE: {"schema": ref("Problem")}},
            }
        return found


def ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def obj(optional: Mapping[str, Schema] | None = None, /, **required: Schema) -> Schema:
    """An object with exactly these members; those in `optional` may be missing."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def text(about: str = "", **more: Any) -> Schema:
    """A string."""
    return {"type": "string", **({"description": about} if about else {}), **more}


def whole(about: str = "", **more: Any) -> Schema:
    """A whole number, none below zero unless `more` says otherwise."""
    return {"type": "integer", "minimum": 0, **({"description": about} if about else {}), **more}


def number(about: str = "", **more: Any) -> Schema:
    """A number."""
    return {"type": "number", **({"description": about} if about else {}), **more}


def flag(about: str = "") -> Schema:
    """True or false."""
    return {"type": "boolean", **({"description": about} if about else {})}


def words(*values: str, about: str = "") -> Schema:
    """One of a few words."""
    return {"type": "string", "enum": list(values), **({"description": about} if about else {})}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    if "$ref" in schema or "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    changed = dict(schema, type=[*types, "null"])
    if "enum" in schema:
        changed["enum"] = [*schema["enum"], None]
    return changed


def moment(about: str = "") -> Schema:
    """A time in RFC 3339."""
    return text(about, format="date-time")


def json_body(schema: Schema, *, media_types: Sequence[str] = (JSON,), required: bool = True) -> Schema:
    """A request's body."""
    return {"required": required, "content": {media_type: {"schema": schema} for media_type in media_types}}


def in_query(name: str, schema: Schema, about: str, *, required: bool = False) -> Schema:
    """A parameter of the query."""
    return {"name": name, "in": "query", "required": required, "schema": schema, "description": about}


def in_path(name: str, schema: Schema, about: str) -> Schema:
    """A part of the path."""
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": about}


def shared(name: str) -> Schema:
    """A parameter that several operations have."""
    return {"$ref": f"#/components/parameters/{name}"}


_BREAKING: Final = r"\u0000-\u001f\u007f-\u009f\u2028\u2029"

_CHARACTER: Final = f"[^{_BREAKING}]"

#: What people write: no control characters.
PRINTABLE: Final = rf"^{_CHARACTER}*$"

#: The same, beginning with something to be seen.
NOT_EMPTY: Final = rf"^[^\s{_BREAKING}]{_CHARACTER}*$"

NAME: Final = text(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")

EVENT_ID: Final = text(pattern=r"^[A-Za-z0-9._:-]{1,128}$", minLength=1, maxLength=128)

#: What something is looked up by.
LOOKED_UP: Final = text(minLength=1, maxLength=512, pattern=PRINTABLE)

REASON: Final = text("Why; kept in the audit.", maxLength=MAX_REASON, pattern=PRINTABLE)

PARAMETERS: Final[dict[str, Schema]] = {
    "name": in_path("name", NAME, "Its name."),
    "event_id": in_path("event_id", EVENT_ID, "The id of the event."),
    "source": in_query("source", NAME, "Whose event it is; a source that signs may leave it out.", required=True),
    "reason": in_query("reason", REASON, "Why; kept in the audit."),
    "since": in_query("since", moment(), "Not before this time."),
    "until": in_query("until", moment(), "Before this time."),
    "limit": in_query("limit", whole(minimum=1, maximum=200, default=50), "Entries of a page."),
    "if_match": {
        "name": "If-Match",
        "in": "header",
        "required": False,
        "schema": text(pattern='^([*]|(W/)?"?[0-9]{1,18}"?)$'),
        "description": "The `ETag` (or the `version`) of what was read; when it has changed since, the answer is 412, "
        "and 400 when this is none.",
    },
}
