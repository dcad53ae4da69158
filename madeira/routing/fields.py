"""The fields of sources, endpoints and routes: one table for the file, the API, the terminal and the reference.

Each field says what it is called, how its value is checked, what it does, in which unit, and what holds without it. Whatever
else needs to know a field (the schema in the API's description, the page of the reference) is made from here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

try:
    from madeira import expressions, templates
except ImportError:  # INTERIM

    class _Interim:
        def __getattr__(self, name):  # type: ignore
            return lambda *a: None

    expressions = templates = _Interim()  # type: ignore
from madeira import target
from madeira.certificates import check_certificate
from madeira.headers import is_reserved
from madeira.records import CALLBACK_URL, Endpoint, RetryPolicy
from madeira.routing import values
from madeira.routing.values import How, Value, Wrong

#: The kinds of objects, in the order in which they depend on each other.
Kind = Literal["source", "endpoint", "route"]
KINDS: Final[tuple[Kind, ...]] = ("source", "endpoint", "route")

_METHODS: Final = ("POST", "PUT", "PATCH")

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e\xa0-\xff\t]*")

#: Characters of a header's value and of a certificate with its chain, at most.
_MAX_HEADER: Final = 8192
_MAX_PEM: Final = 65_536

#: Headers of an endpoint, and secrets of a source or endpoint, at most.
_MAX_HEADERS: Final = 100
_MAX_SECRETS: Final = 20

#: Scheme and authority of a URL, and what follows.
_AUTHORITY: Final = re.compile(r"(?s)([^:/?#]*://[^/?#{]*)(.*)")
#: An expression of a URL template; those that may follow a host directly begin with one of these.
_EXPRESSION: Final = re.compile(r"\{([^{}]*)\}")
_AFTER_HOST: Final = ("{/", "{?")

#: What a secret is and how it is given, for the reference.
_GIVEN: Final = "each a literal (sealed at once), `env:NAME`, or `sealed:…` from an export"


#: What a route's filter may look at.
FILTER_VARIABLES: Final = frozenset(
    {"event_id", "event_type", "source", "routing_key", "target_uri", "trace_id", "created_at", "payload", "parameters"}
)


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


# -- checks of one kind of field -------------------------------------------------------------------------------------


def _url() -> Value:
    def check(value: Any, how: How) -> str:
        found = values.as_text(value, target.MAX_URL)
        if found == CALLBACK_URL:
            return found
        if not found.isprintable() or " " in found:
            raise Wrong("holds a space or a control character")
        host = _host(_without_expressions(found))
        reason = how.refusal_of_host(host)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": target.MAX_URL})


def _without_expressions(url: str) -> str:
    """`url` with each expression replaced by something harmless."""
    if "{" not in url and "}" not in url:
        return url
    reason = templates.check_url(url)
    if reason:
        raise Wrong(reason)
    whole = _AUTHORITY.fullmatch(url)
    rest = whole[2] if whole else ""
    if whole is None or (rest.startswith("{") and not rest.startswith(_AFTER_HOST)):
        raise Wrong(
            f"an expression may stand in path and query, not in scheme, host or port; only {CALLBACK_URL} is all of a URL"
        )
    return whole[1] + _EXPRESSION.sub(lambda e: e[1][0] + "x" if e[1][0] in "/?&;.#" else "x", rest)


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as e:
        raise Wrong(f"is not a URL: {e}") from None
    if not valid:
        raise Wrong(f"must be an http:// or https:// URL with a host, or {CALLBACK_URL}")
    if parts.username is not None or parts.fragment:
        raise Wrong("must hold neither a user name (put credentials into headers) nor a fragment")
    try:
        return target.parse(url).host
    except target.BadUrl as e:
        raise Wrong(str(e)) from None


def _body() -> Value:
    def check(value: Any, _how: How) -> str:
        found = values.as_text(value)
        if not found:
            raise Wrong("must not be empty; leave it out for the standard body")
        reason = templates.check_body(found)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": 65_536})


def _expression(variables: frozenset[str]) -> Value:
    def check(value: Any, _how: How) -> str:
        found = values.as_text(value, 8192)
        if not found.strip():
            raise Wrong("must not be empty; leave it out instead")
        reason = expressions.check(found, variables)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": 8192})


def _headers() -> Value:
    one = values.secret(_look_at_header, _MAX_HEADER)

    def check(value: Any, how: How) -> dict[str, str]:
        table = as_table(value)
        if len(table) > _MAX_HEADERS:
            raise Wrong(f"must hold at most {_MAX_HEADERS} headers")
        found: dict[str, str] = {}
        problems = []
        for name, one_value in table.items():
            try:
                _check_header_name(name, found)
                found[name] = one.check(one_value, how)
            except Wrong as e:
                problems += [(f".{name[:100]}{at}", detail) for at, detail in e.problems]
        if problems:
            raise Wrong.of(problems)
        return found

    return Value(check, {"type": "object", "additionalProperties": dict(one.schema), "maxProperties": _MAX_HEADERS})


def as_table(value: Any) -> Mapping[str, Any]:
    """`value`, if it is a table."""
    if not isinstance(value, dict):
        raise Wrong(f"must be a table, not {values.kind_of(value)}")
    return value


def _check_header_name(name: str, others: Mapping[str, str]) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise Wrong("is not the name of a header")
    if is_reserved(name):
        raise Wrong("this header is set by Madeira and cannot be replaced")
    if name.lower() in {other.lower() for other in others}:
        raise Wrong("stands there twice: the case of a header's name does not matter")


def _look_at_header(found: str) -> None:
    if not _HEADER_VALUE.fullmatch(found):
        raise Wrong("its value holds a character that is not allowed, such as a line break")
    if "{{" in found:
        reason = templates.check_header(found)
        if reason:
            raise Wrong(reason)


def _look_at_pem(found: str) -> None:
    if "-----BEGIN " not in found:
        raise Wrong("is not PEM (-----BEGIN …-----)")


def check_pair(certificate: Mapping[str, str]) -> None:
    """See that a client certificate and its key can be used, where both can be looked at."""
    if any(text.startswith(values.ENV_PREFIX) for text in certificate.values()):
        return
    reason = check_certificate(certificate["chain"], certificate["key"])
    if reason:
        raise Wrong(reason)


def _ordering() -> Value:
    def check(value: Any, _how: How) -> str:
        if values.as_text(value) != "none":
            raise Wrong('anything but "none" is not available in this version')
        return "none"

    return Value(check, {"type": "string", "enum": ["none"]})


def _not_yet() -> Value:
    def check(value: Any, _how: How) -> bool:
        if not isinstance(value, bool):
            raise Wrong(f"must be true or false, not {values.kind_of(value)}")
        if value:
            raise Wrong("the breaker is not available in this version; leave it out or set enabled = false")
        return value

    return Value(check, {"type": "boolean", "enum": [False]})


def _table() -> Value:
    return Value(lambda value, _how: as_table(value), {"type": "object"})


def _delays() -> Value:
    return values.list_of(values.number(0.0, 30 * 86400), least=1, most=1000, what="numbers of seconds")


def _secrets(*, least: int) -> Value:
    return values.list_of(values.secret(values.signing_secret), least=least, most=_MAX_SECRETS, what="texts")


# -- the tables ------------------------------------------------------------------------------------------------------

_ENDPOINT: Final = Endpoint(name="", url="")
_RETRY: Final = RetryPolicy()

_RETRY_FIELDS: Final = (
    Field("initial", values.number(0.01, 86400), "Time until the second attempt", "seconds", _RETRY.initial),
    Field("factor", values.number(1, 100), "By how much the time grows with each further attempt", "", _RETRY.factor),
    Field("max", values.number(0.01, 30 * 86400), "The longest it gets", "seconds", _RETRY.max),
    Field("jitter", values.number(0, 1), "Random addition, as a share of the time", "", _RETRY.jitter),
    Field("max_attempts", values.whole(1, 1000), "Failures after which a delivery is dead", "", _RETRY.max_attempts),
    Field("max_age", values.number(0.1, 365 * 86400), "Time since the first attempt after which a failure is final", "seconds", _RETRY.max_age),
    Field("delays", _delays(), "An explicit list of times instead of `initial`, `factor` and `max`; the last one repeats", "seconds", absent="none"),
)  # fmt: skip

_CERTIFICATE_FIELDS: Final = (
    Field("chain", values.secret(_look_at_pem, _MAX_PEM), "The certificate and what is between it and the root, in PEM; given like a secret", required=True, hides="text"),
    Field("key", values.secret(_look_at_pem, _MAX_PEM), "Its private key in PEM, without a password; given like a secret", required=True, hides="text"),
)  # fmt: skip

#: The fields of each kind, the name first.
FIELDS: Final[Mapping[Kind, tuple[Field, ...]]] = {
    "source": (
        Field("name", values.name(), "1 to 64 of letters, digits, `.`, `_` and `-`; comes in `X-Madeira-Source`", required=True),
        Field("secrets", _secrets(least=1), f"List of signing secrets, {_GIVEN}; any one of them verifies, so that one can be changed without a gap", required=True, hides="list"),
        Field("rate", values.number(0.001, 1_000_000), "Events per second that are accepted over all processes; more are answered 429", "per second", absent="not limited"),
        Field("burst", values.whole(1, 1_000_000), "Events that may come at once", "", 1),
    ),
    "endpoint": (
        Field("name", values.name(), "1 to 64 of letters, digits, `.`, `_` and `-`; `callback` is built in and cannot be changed", required=True),
        Field("url", _url(), "An `http://` or `https://` URL, with expressions (RFC 6570) in path and query, such as `{event_type}` or `{parameters.account}`; or `{+target_uri}`: the address that came with the event", required=True),
        Field("method", values.one_of(*_METHODS), "`POST`, `PUT` or `PATCH`", "", _ENDPOINT.method),
        Field("headers", _headers(), f"Table of headers, {_GIVEN}; a template (Jinja2) where it holds `{{{{`. Those that Madeira sets itself cannot be replaced", absent="none", hides="table"),
        Field("body", _body(), "A template (Jinja2) whose result is the JSON of the body", absent="the standard body"),
        Field("secrets", _secrets(least=0), f"List of signing secrets, {_GIVEN}; calls are signed with each of them", absent="none", hides="list"),
        Field("client_certificate", _table(), "Shown to a receiver that asks for it", absent="none", fields=_CERTIFICATE_FIELDS),
        Field("success", _expression(frozenset({"status", "headers", "body"})), "An expression (CEL) over `status`, `headers` and `body` that says whether an answer is a success", absent="the standard rule"),
        Field("require_body", values.flag(), "Whether a 2xx with an empty body is a failure", "", _ENDPOINT.require_body),
        Field("rate", values.number(0.001, 100_000), "Calls per second over all processes", "per second", absent="not limited"),
        Field("burst", values.whole(1, 100_000), "Calls that may follow at once after a pause", "", _ENDPOINT.burst),
        Field("concurrency", values.whole(1, 10_000), "Calls at a time over all processes", "", _ENDPOINT.concurrency),
        Field("timeout", values.number(0.05, 600), "Time for a whole attempt, from resolving the name to the last byte", "seconds", _ENDPOINT.timeout),
        Field("retry", _table(), "When a failed delivery is tried again", absent="as below", fields=_RETRY_FIELDS),
        Field("ordering", _ordering(), "Whether deliveries keep the order of acceptance; only `none` in this version", "", "none"),
        Field("breaker", _table(), "Not available in this version", absent="off", fields=(Field("enabled", _not_yet(), "Only `false` in this version", "", False),)),
    ),
    "route": (
        Field("name", values.name(), "1 to 64 of letters, digits, `.`, `_` and `-`", required=True),
        Field("endpoint", values.name(), "Where matching events go", required=True),
        Field("source", values.name(), "Only events of this source", absent="any"),
        Field("event_type", values.text(256, empty=False, remedy='"*" matches every type'), "A glob; `*` matches dots too", "", "*"),
        Field("routing_key", values.text(256), "Only events with exactly this routing key", absent="any"),
        Field("filter", _expression(FILTER_VARIABLES), "An expression (CEL) over the event that is true for those that match", absent="all"),
    ),
}  # fmt: skip
