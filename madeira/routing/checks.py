"""Checks of what a configuration holds beside plain values: URLs, templates, expressions, headers, certificates.

A template or an expression is compiled here, so that a mistake in it is told when it is saved and not when an event meets it.
"""

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from madeira import event_values, expressions, target, templates
from madeira.certificates import check_certificate
from madeira.headers import is_reserved
from madeira.records import CALLBACK_URL, NO_ORDER, WHOLE_ENDPOINT
from madeira.routing import values
from madeira.routing.values import How, Value, Wrong

_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE: Final = re.compile(r"[\x20-\x7e\xa0-\xff\t]*")

#: Characters of a header's value, at most.
_MAX_HEADER: Final = 8192

#: Headers of an endpoint, and secrets of a source or endpoint, at most.
_MAX_HEADERS: Final = 100
_MAX_SECRETS: Final = 20


def url() -> Value:
    """The URL of an endpoint: a template (RFC 6570) whose host is fixed, or all of it the address that came with the event."""

    def check(value: Any, how: How) -> str:
        found = values.as_text(value, target.MAX_URL)
        if found == CALLBACK_URL or how.stored:
            # Were one that is stored no URL after all, each attempt would say so, on record; an endpoint that cannot be
            # used at all would only let its deliveries wait.
            return found
        if not found.isprintable() or " " in found:
            raise Wrong("holds a space or a control character")
        host = _host(_before_expressions(found))
        reason = how.refusal_of_host(host)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": target.MAX_URL})


def _before_expressions(url: str) -> str:
    """What of `url` is the same for every event: its host, at least."""
    if "{" not in url and "}" not in url:
        return url
    reason = templates.check_url(url)
    if reason:
        raise Wrong(reason)
    return url.partition("{")[0]


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


def body() -> Value:
    """A template of the body."""

    def check(value: Any, _how: How) -> str:
        found = values.as_text(value)
        if not found:
            raise Wrong("must not be empty; leave it out for the standard body")
        reason = templates.check_body(found)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": 65_536})


def expression(variables: frozenset[str]) -> Value:
    """An expression over `variables`."""

    def check(value: Any, _how: How) -> str:
        found = values.as_text(value, expressions.MAX_LENGTH)
        if not found.strip():
            raise Wrong("must not be empty; leave it out instead")
        reason = expressions.check(found, variables)
        if reason:
            raise Wrong(reason)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": expressions.MAX_LENGTH})


def headers() -> Value:
    """A table of headers; their values are secrets."""
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
                problems += [(f".{values.printable(name)}{at}", detail) for at, detail in e.problems]
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


def look_at_pem(found: str) -> None:
    """Look at a certificate or a key by itself."""
    if "-----BEGIN " not in found:
        raise Wrong("is not PEM (-----BEGIN …-----)")


def check_pair(certificate: Mapping[str, str]) -> None:
    """See that a client certificate and its key can be used, where both can be looked at."""
    if any(text.startswith(values.ENV_PREFIX) for text in certificate.values()):
        return
    reason = check_certificate(certificate["chain"], certificate["key"])
    if reason:
        raise Wrong(reason)


def ordering() -> Value:
    """The order of deliveries: a word, or an expression over the event that yields a key."""
    key = expression(frozenset(event_values.NAMES))

    def check(value: Any, how: How) -> str:
        if value in (NO_ORDER, WHOLE_ENDPOINT):
            return str(value)
        try:
            return _yields_key(key.check(value, how))
        except Wrong as e:
            hint = f'must be "{NO_ORDER}", "{WHOLE_ENDPOINT}", or an expression (CEL) that yields a key, such as payload.account'
            raise Wrong(f"{hint}: {'; '.join(detail for _, detail in e.problems)}") from None

    return Value(check, key.schema)


def _yields_key(text: str) -> str:
    """`text`, unless it reads nothing of an event and never yields a key; of others each event has to tell."""
    if not expressions.variables_of(text):
        try:
            expressions.Scope({}).key(text)
        except expressions.ExpressionFailed as e:
            raise Wrong(e.reason) from None
    return text


def table() -> Value:
    """A table; its fields are checked by themselves."""
    return Value(lambda value, _how: as_table(value), {"type": "object"})


def secrets(*, least: int) -> Value:
    """A list of at least `least` signing secrets."""
    return values.list_of(values.secret(values.signing_secret), least=least, most=_MAX_SECRETS, what="texts")
