"""The configuration file: sources, endpoints and routes in TOML, checked as a whole and turned into frozen records.

Each table has a list of its fields, and each field a function that checks and converts its value; an error names the file,
the table, the field and what would be right, since it stops a start or keeps a change from taking effect. Values of secrets
and headers are never told. Fields of a later version are known by name, so that a file written for it is refused with the
true reason.
"""

import base64
import binascii
import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from madeira import target
from madeira.errors import SettingsError
from madeira.headers import is_reserved
from madeira.records import CALLBACK_URL, Endpoint, RetryPolicy, Route, Source
from madeira.settings import secret_reference

#: Name of the endpoint that is always there: it calls the address that came with the event.
CALLBACK: Final = "callback"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e\xa0-\xff\t]*")

#: Numbers up to this are told in errors: a longer integer is no float, and may be too long to be written at all.
_SHOWABLE: Final = 1e300

_METHODS: Final = ("POST", "PUT", "PATCH")

_SECRET_PREFIX: Final = "whsec_"  # noqa: S105  # a prefix, no secret


@dataclass(frozen=True, slots=True)
class Rules:
    """All sources, endpoints and routes of one moment."""

    sources: Mapping[str, Source]
    #: The built-in `CALLBACK` included.
    endpoints: Mapping[str, Endpoint]
    #: In the order of the file.
    routes: tuple[Route, ...]


class _Wrong(Exception):
    """Raised by a field's check; the caller adds the place."""


_Check = Callable[[Any], Any]

_T = TypeVar("_T")


def parse_toml(text: str, *, where: str, environ: Mapping[str, str] | None = None) -> Rules:
    """Parse and check a configuration file's `text`.

    `where` names the file in errors; `environ` is where ``env:NAME`` is looked up (the process's environment when absent).

    Raises:
        SettingsError: the first thing that is wrong, and where.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise SettingsError(f"{where}: not valid TOML: {e}") from None
    except RecursionError:
        raise SettingsError(f"{where}: not usable TOML: values are nested too deeply") from None
    except ValueError as e:
        # A number with too many digits, for one, is no error of syntax to the parser.
        raise SettingsError(f"{where}: not usable TOML: {e}") from None
    return _Reader(where, environ).rules(document)


def no_rules() -> Rules:
    """What holds without a file: no source, and the built-in endpoint only."""
    return Rules(MappingProxyType({}), MappingProxyType({CALLBACK: _callback()}), ())


def _callback() -> Endpoint:
    return Endpoint(name=CALLBACK, url=CALLBACK_URL)


class _Reader:
    def __init__(self, where: str, environ: Mapping[str, str] | None) -> None:
        self._where = where
        self._environ = environ

    def rules(self, document: Mapping[str, Any]) -> Rules:
        _refuse_unknown(document, ("source", "endpoint", "route"), self._where)
        sources = self._named("source", document, self._source)
        endpoints = {CALLBACK: _callback(), **self._named("endpoint", document, self._endpoint)}
        routes = self._named("route", document, partial(self._route, sources, endpoints))
        return Rules(MappingProxyType(sources), MappingProxyType(endpoints), tuple(routes.values()))

    def _named(self, kind: str, document: Mapping[str, Any], read: Callable[[str, str, Mapping[str, Any]], _T]) -> dict[str, _T]:
        tables = document.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise SettingsError(f"{self._where}: write [[{kind}]] with double brackets: there can be several")
        found: dict[str, _T] = {}
        for number, table in enumerate(tables, 1):
            name = self._field(f"{self._where}: {kind} number {number}", table, "name", _name)
            place = f"{self._where}: {kind} {name!r}"
            if name in found:
                raise SettingsError(f"{place}: there are two of this name")
            found[name] = read(name, place, table)
        return found

    def _source(self, name: str, place: str, table: Mapping[str, Any]) -> Source:
        values = self._fields(place, table, {"name": _name, "secrets": _texts}, required=("secrets",))
        secrets = self._secrets(place, values["secrets"])
        if not secrets:
            raise SettingsError(f"{place}: secrets must hold at least one: nothing that the source posts could be verified")
        return Source(name=name, secrets=secrets)

    def _endpoint(self, name: str, place: str, table: Mapping[str, Any]) -> Endpoint:
        values = self._fields(place, table, _ENDPOINT, required=("url",), later=("success", "body"))
        if values.pop("ordering", "none") != "none":
            raise SettingsError(f'{place}: field ordering: anything but "none" is not available in this version')
        breaker = self._fields(f"{place}: breaker", values.pop("breaker", {}), {"enabled": _flag})
        if breaker.get("enabled"):
            raise SettingsError(f"{place}: the breaker is not available in this version; leave it out or set enabled = false")
        values["secrets"] = self._secrets(place, values.pop("secrets", ()))
        values["headers"] = self._headers(place, values.pop("headers", {}))
        values["retry"] = self._retry(place, values.pop("retry", {}))
        return Endpoint(**{**values, "name": name})

    def _headers(self, place: str, table: Mapping[str, Any]) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        for name, value in table.items():
            headers[name] = self._field(f"{place}: headers", table, name, partial(_header, name))
            headers[name] = secret_reference(value, f"{place}: header {name}", self._environ)
            if not _HEADER_VALUE.fullmatch(headers[name]):
                raise SettingsError(
                    f"{place}: header {name}: its value holds a character that is not allowed, such as a line break"
                )
        return MappingProxyType(headers)

    def _retry(self, place: str, table: Mapping[str, Any]) -> RetryPolicy:
        place = f"{place}: retry"
        values = self._fields(place, table, _RETRY)
        if "delays" in values:
            both = sorted(values.keys() & {"initial", "factor", "max"})
            if both:
                raise SettingsError(f"{place}: delays is an explicit list and cannot stand beside {', '.join(both)}")
        policy = RetryPolicy(**values)
        if policy.initial > policy.max:
            raise SettingsError(f"{place}: initial = {policy.initial:g} is more than max = {policy.max:g}")
        return policy

    def _route(
        self, sources: Mapping[str, Source], endpoints: Mapping[str, Endpoint], name: str, place: str, table: Mapping[str, Any]
    ) -> Route:
        values = self._fields(place, table, _ROUTE, required=("endpoint",), later=("filter",))
        for field, known in (("endpoint", endpoints), ("source", sources)):
            if field in values and values[field] not in known:
                raise SettingsError(f"{place}: there is no {field} {values[field]!r}{_did_you_mean(values[field], known)}")
        return Route(**{**values, "name": name})

    def _secrets(self, place: str, references: Iterable[str]) -> tuple[str, ...]:
        secrets = tuple(secret_reference(r, f"{place}: secrets", self._environ) for r in references)
        for number, secret in enumerate(secrets, 1):
            if secret.startswith(_SECRET_PREFIX) and not _is_base64(secret.removeprefix(_SECRET_PREFIX)):
                raise SettingsError(f"{place}: secrets: number {number} is not base64 after {_SECRET_PREFIX}")
        return secrets

    def _fields(
        self,
        place: str,
        table: Mapping[str, Any],
        checks: Mapping[str, _Check],
        *,
        required: Iterable[str] = (),
        later: Iterable[str] = (),
    ) -> dict[str, Any]:
        for name in later:
            if name in table:
                raise SettingsError(f"{place}: field {name} is not available in this version")
        _refuse_unknown(table, checks, place)
        for name in required:
            if name not in table:
                raise SettingsError(f"{place}: field {name} is missing")
        return {name: self._field(place, table, name, checks[name]) for name in table}

    def _field(self, place: str, table: Mapping[str, Any], name: str, check: _Check) -> Any:
        if name not in table:
            raise SettingsError(f"{place}: field {name} is missing")
        try:
            return check(table[name])
        except _Wrong as e:
            raise SettingsError(f"{place}: field {name}: {e}") from None


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], place: str) -> None:
    for name in table:
        if name not in known:
            raise SettingsError(f"{place}: unknown field {name!r}{_did_you_mean(name, known)}")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known are {', '.join(known)}" if known else ""


def _is_base64(text: str) -> bool:
    try:
        return bool(base64.b64decode(text, validate=True))
    except binascii.Error:
        return False


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"}
    return kinds.get(type(value), "a date or time")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"must be a text, not {_kind(value)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _Wrong(f"must be a list of texts, not {_kind(value)}")
    return tuple(_text(v) for v in value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"must be true or false, not {_kind(value)}")
    return value


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"must be a table, not {_kind(value)}")
    return value


def _number(low: float, high: float) -> _Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Wrong(f"must be a number, not {_kind(value)}")
        if not low <= value <= high:
            shown = "the number" if abs(value) > _SHOWABLE else f"{value:g}"
            raise _Wrong(f"{shown} is not between {low:g} and {high:g}")
        return float(value)

    return check


def _whole(low: int, high: int) -> _Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Wrong(f"must be a whole number, not {_kind(value)}")
        if not low <= value <= high:
            raise _Wrong(f"{value if abs(value) < _SHOWABLE else 'the number'} is not between {low} and {high}")
        return value

    return check


def _delays(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise _Wrong("must be a list of at least one number of seconds")
    check = _number(0.0, 30 * 86400)
    return tuple(check(v) for v in value)


def _name(value: Any) -> str:
    if not _NAME.fullmatch(_text(value)):
        raise _Wrong(f"{value!r} must be 1 to 64 of letters, digits, '.', '_' and '-', and start with a letter or digit")
    return str(value)


def _one_of(*allowed: str) -> _Check:
    def check(value: Any) -> str:
        if _text(value) not in allowed:
            raise _Wrong(f"{value!r} is none of {', '.join(allowed)}")
        return str(value)

    return check


def _url(value: Any) -> str:
    if _text(value) == CALLBACK_URL:
        return CALLBACK_URL
    if "{" in value or "}" in value:
        raise _Wrong(f"a URL template other than {CALLBACK_URL} is not available in this version")
    if not value.isprintable() or " " in value:
        raise _Wrong("holds a space or a control character")
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as e:
        raise _Wrong(f"is not a URL: {e}") from None
    if not valid:
        raise _Wrong(f"must be an http:// or https:// URL with a host, or {CALLBACK_URL}")
    if parts.username is not None or parts.fragment:
        raise _Wrong("must hold neither a user name (put credentials into headers) nor a fragment")
    try:
        target.parse(value)
    except target.BadUrl as e:
        raise _Wrong(str(e)) from None
    return str(value)


def _header(name: str, value: Any) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise _Wrong("is not the name of a header")
    if is_reserved(name):
        raise _Wrong("this header is set by Madeira and cannot be replaced")
    return _text(value)


def _pattern(value: Any) -> str:
    if not _text(value):
        raise _Wrong('must not be empty; "*" matches every type')
    return str(value)


_ENDPOINT: Final[dict[str, _Check]] = {
    "name": _name,
    "url": _url,
    "method": _one_of(*_METHODS),
    "headers": _table,
    "rate": _number(0.001, 100_000),
    "burst": _whole(1, 100_000),
    "concurrency": _whole(1, 10_000),
    "timeout": _number(0.05, 600),
    "secrets": _texts,
    "retry": _table,
    "require_body": _flag,
    "ordering": _text,
    "breaker": _table,
}

_RETRY: Final[dict[str, _Check]] = {
    "initial": _number(0.01, 86400),
    "factor": _number(1, 100),
    "max": _number(0.01, 30 * 86400),
    "jitter": _number(0, 1),
    "max_attempts": _whole(1, 1000),
    "max_age": _number(0.1, 365 * 86400),
    "delays": _delays,
}

_ROUTE: Final[dict[str, _Check]] = {
    "name": _name,
    "endpoint": _text,
    "source": _text,
    "event_type": _pattern,
    "routing_key": _text,
}
