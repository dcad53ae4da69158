"""The fields of sources, endpoints and routes: one table for the file, the API, the terminal and the reference.

Each field says what it is called, how its value is checked, what it does, in which unit, and what holds without it. Whatever
else needs to know a field (the schema in the API's description, the page of the reference) is made from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from madeira import event_values, expressions
from madeira.records import Breaker, Endpoint, RetryPolicy, Source
from madeira.routing import checks, globs, values
from madeira.routing.values import Value
from madeira.store.configuration import Kind as Kind

#: The kinds of objects, in the order in which they depend on each other.
KINDS: Final[tuple[Kind, ...]] = ("source", "endpoint", "route")

_METHODS: Final = ("POST", "PUT", "PATCH")

#: Characters of a certificate with its chain, at most.
_MAX_PEM: Final = 65_536

#: The longest time that an attempt may be given, in seconds; what stops a worker must wait longer (`deploy/`).
MAX_TIMEOUT_S: Final = 600

_MONTH_S: Final = 30 * 86_400

#: What a secret is and how it is given, for the reference.
_GIVEN: Final = "given as a literal, which is sealed at once, or as `env:NAME`"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a document."""

    name: str
    value: Value
    #: What it does, for the reference; no full stop.
    doc: str
    unit: str = ""
    #: What holds without it; None when that is nothing that a document could say.
    default: Any = None
    #: The same in words, where there is no value.
    absent: str = ""
    required: bool = False
    #: The fields of a table.
    fields: tuple["Field", ...] = ()
    #: Whether its values are secrets: the only ones, those of a list, or those of a table.
    hides: Literal["", "text", "list", "table"] = ""


def schema(kind: Kind) -> dict[str, Any]:
    """The JSON schema of a document of `kind`, its name included."""
    return _table_schema(FIELDS[kind])


def _table_schema(fields: tuple[Field, ...]) -> dict[str, Any]:
    properties = {}
    for field in fields:
        found: dict[str, Any] = _table_schema(field.fields) if field.fields else dict(field.value.schema)
        found["description"] = f"{field.doc}{f' ({field.unit})' if field.unit else ''}."
        if field.default is not None:
            found["default"] = field.default
        properties[field.name] = found
    required = [field.name for field in fields if field.required]
    shape = {"type": "object", "properties": properties, "additionalProperties": False}
    return shape | ({"required": required} if required else {})


# -- the tables ------------------------------------------------------------------------------------------------------

_ENDPOINT: Final = Endpoint(name="", url="")
_RETRY: Final = RetryPolicy()
_BREAKER: Final = Breaker()

_NAME_DOC: Final = "1 to 64 of letters, digits, `.`, `_` and `-`"

_RETRY_FIELDS: Final = (
    Field("initial", values.number(0.01, 86_400), "Time until the second attempt", "seconds", _RETRY.initial),
    Field("factor", values.number(1, 100), "By how much the time grows with each further attempt", "", _RETRY.factor),
    Field("max", values.number(0.01, _MONTH_S), "The longest it gets", "seconds", _RETRY.max),
    Field("jitter", values.number(0, 1), "Random addition, as a share of the time", "", _RETRY.jitter),
    Field("max_attempts", values.whole(1, 1000), "Failures after which a delivery is dead", "", _RETRY.max_attempts),
    Field(
        "max_age",
        values.number(0.1, 365 * 86_400),
        "Time since the first attempt after which a failure is final",
        "seconds",
        _RETRY.max_age,
    ),
    Field(
        "delays",
        values.list_of(values.number(0.0, _MONTH_S), least=1, most=1000, what="numbers of seconds"),
        "An explicit list of times instead of `initial`, `factor` and `max`; the last one repeats",
        "seconds",
        absent="none",
    ),
)

_BREAKER_FIELDS: Final = (
    Field("enabled", values.flag(), "Whether there is one", "", _BREAKER.enabled),
    Field("hold", values.number(0.1, 1800), "How long it holds deliveries back at first", "seconds", _BREAKER.hold),
    Field(
        "max",
        values.number(0.1, 1800),
        "The longest that becomes: it doubles each time that the receiver fails again",
        "seconds",
        _BREAKER.max,
    ),
)

_CERTIFICATE_FIELDS: Final = (
    Field(
        "chain",
        values.secret(checks.look_at_pem, _MAX_PEM),
        f"The certificate and those between it and the root, in PEM, {_GIVEN}",
        required=True,
        hides="text",
    ),
    Field(
        "key",
        values.secret(checks.look_at_pem, _MAX_PEM),
        f"Its private key in PEM, without a passphrase, {_GIVEN}",
        required=True,
        hides="text",
    ),
)

_SOURCE_FIELDS: Final = (
    Field("name", values.name(), f"{_NAME_DOC}; comes in `X-Madeira-Source`", required=True),
    Field(
        "secrets",
        checks.secrets(least=1),
        f"List of signing secrets, {_GIVEN}; any one of them verifies, so that one can be changed without a gap",
        required=True,
        hides="list",
    ),
    Field(
        "rate",
        values.number(0.001, 1_000_000),
        "Events that are accepted over all processes; more are answered 429, which tells when to go on",
        "per second",
        absent="not limited",
    ),
    Field(
        "burst",
        values.whole(1, 1_000_000),
        "Events that may come at once. A batch of more is let in when all of the burst is saved up, and paid for afterwards: "
        "the next event waits until the rate has made up for it, about a hundred seconds after 1,000 events at 10 per second",
        "",
        Source(name="", secrets=()).burst,
    ),
)

_ENDPOINT_FIELDS: Final = (
    Field("name", values.name(), f"{_NAME_DOC}; `callback` is built in and cannot be changed", required=True),
    Field(
        "url",
        checks.url(),
        "An `http://` or `https://` URL, with expressions (RFC 6570) in path and query, such as `{event_type}` or "
        "`{parameters.account}`; or `{+target_uri}`: the address that came with the event",
        required=True,
    ),
    Field("method", values.one_of(*_METHODS), "`POST`, `PUT` or `PATCH`", "", _ENDPOINT.method),
    Field(
        "headers",
        checks.headers(),
        f"Table of headers, {_GIVEN}; templates (Jinja2) where they hold `{{{{`. "
        "Those that Madeira sets itself cannot be replaced",
        absent="none",
        hides="table",
    ),
    Field("body", checks.body(), "A template (Jinja2) whose result is the JSON of the body", absent="the standard body"),
    Field(
        "secrets",
        checks.secrets(least=0),
        f"List of signing secrets, {_GIVEN}; calls are signed with each of them",
        absent="none",
        hides="list",
    ),
    Field(
        "client_certificate", checks.table(), "Shown to a receiver that asks for it", absent="none", fields=_CERTIFICATE_FIELDS
    ),
    Field(
        "success",
        checks.expression(expressions.ANSWER_VARIABLES),
        "An expression (CEL) over `status`, `headers`, `body` and `text` that says whether an answer is a success",
        absent="the standard rule",
    ),
    Field("require_body", values.flag(), "Whether a 2xx with an empty body is a failure", "", _ENDPOINT.require_body),
    Field("rate", values.number(0.001, 100_000), "Calls over all processes", "per second", absent="not limited"),
    Field("burst", values.whole(1, 100_000), "Calls that may follow at once after a pause", "", _ENDPOINT.burst),
    Field("concurrency", values.whole(1, 10_000), "Calls at a time over all processes", "", _ENDPOINT.concurrency),
    Field(
        "timeout",
        values.number(0.05, MAX_TIMEOUT_S),
        "Time for a whole attempt, from resolving the name to the last byte",
        "seconds",
        _ENDPOINT.timeout,
    ),
    Field("retry", checks.table(), "When a failed delivery is tried again", absent="the defaults below", fields=_RETRY_FIELDS),
    Field(
        "ordering",
        checks.ordering(),
        "Which deliveries go one after another, in the order in which their events were accepted: `none`, all of the `endpoint`, "
        "or those of one key, which an expression (CEL) over the event yields, such as `payload.account`",
        "",
        _ENDPOINT.ordering,
    ),
    Field(
        "breaker",
        checks.table(),
        "Leaves a receiver alone that fails, and lets it come back step by step",
        absent="the defaults below",
        fields=_BREAKER_FIELDS,
    ),
)

_ROUTE_FIELDS: Final = (
    Field("name", values.name(), _NAME_DOC, required=True),
    Field("endpoint", values.name(), "Where matching events go", required=True),
    Field("source", values.name(), "Only events of this source", absent="any"),
    Field(
        "event_type",
        globs.event_type(),
        "A glob over the event's type; `*` matches dots too",
        "",
        "*",
    ),
    Field("routing_key", globs.routing_key(), "Only events with exactly this routing key", absent="any"),
    Field(
        "filter",
        checks.expression(frozenset(event_values.NAMES)),
        "An expression (CEL) over the event that is true for those that match",
        absent="all",
    ),
)

#: The fields of each kind, the name first.
FIELDS: Final[Mapping[Kind, tuple[Field, ...]]] = {
    "source": _SOURCE_FIELDS,
    "endpoint": _ENDPOINT_FIELDS,
    "route": _ROUTE_FIELDS,
}

_TOLD: Final = "is told, and not set; leave it out"

#: What is shown of an object beside its fields, and why it is not taken back.
READ_ONLY: Final[Mapping[Kind, Mapping[str, str]]] = {
    "source": {"created_at": _TOLD, "updated_at": _TOLD},
    "endpoint": {
        "state": "is told, and not set: hold the endpoint by its actions pause and disable, let it go by resume and enable "
        "(POST /v1/endpoints/{name}/pause, or `madeira endpoints pause NAME`)",
        **dict.fromkeys(("reason", "since", "by", "lane", "unfinished", "created_at", "updated_at"), _TOLD),
    },
    "route": {"created_at": _TOLD, "updated_at": _TOLD},
}
