"""URL templates by RFC 6570, filled with values of an event.

Scheme, host and port are always literal: who posts events must not choose whom Madeira calls with an endpoint's credentials.
Values are percent-encoded (``{parameters.account}``), or only where needed if the template says so (``{+payload.path}``). A value
that is missing, null, an object, or empty in the path makes the URL fail, since ``/accounts//close`` is another address than the
one that was meant; so does a result with ``..`` for a folder, however encoded. Query parameters may be empty.

``{+target_uri}``, as a whole, is the address that came with the event.
"""

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from uritemplate import URITemplate
from uritemplate.variable import VariableValue

from madeira import target
from madeira.event_values import Number
from madeira.records import CALLBACK_URL
from madeira.templates.failure import TemplateFailed

#: Characters of a template, at most.
MAX_LENGTH: Final = 4096

_FIELDS: Final = ("event_id", "event_type", "source", "routing_key", "trace_id")
_TREES: Final = ("parameters", "payload")

_HEAD: Final = re.compile(r"https?://[^{}/?#@\\]+", re.IGNORECASE)
_EXPRESSION: Final = re.compile(r"\{([^{}]*)\}")
_OPERATORS: Final = ("", "+", ".", "/", ";", "?", "&")
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)(\*|:[1-9][0-9]{0,3})?")

#: Operators whose values may be empty.
_QUERY: Final = ("?", "&", ";")


def check(text: str) -> str | None:
    """Why `text` cannot be the template of a URL; None when it can."""
    if text == CALLBACK_URL:
        return None
    if len(text) > MAX_LENGTH:
        return f"has {len(text)} characters; {MAX_LENGTH} are allowed"
    head = _HEAD.match(text)
    if head is None:
        return (
            "must begin with http:// or https:// and a literal host; an expression may stand in path and query only "
            f"({CALLBACK_URL} can only be all of the URL)"
        )
    rest = text[head.end() :]
    if rest and not rest.startswith(("/", "?", "{/", "{?")):
        return "the host must be followed by /, ? or the end; an expression may stand in path and query only"
    if any(bracket in _EXPRESSION.sub("", rest) for bracket in "{}"):
        return "a { or } has no partner"
    if "#" in _EXPRESSION.sub("", rest):
        return "must not have a fragment (#…): it is never sent"
    for expression in _EXPRESSION.findall(rest):
        reason = _check_expression(expression)
        if reason:
            return f"{{{expression[:60]}}}: {reason}"
    try:
        target.parse(URITemplate(text).expand(dict.fromkeys(_names(text), "x")))
    except target.BadUrl as e:
        return str(e)
    return None


def _check_expression(expression: str) -> str | None:
    operator = expression[:1] if expression[:1] in _OPERATORS else ""
    if operator == "" and expression[:1] in ("#", "=", ",", "!", "@", "|"):
        return f"the operator {expression[0]} is not available; use none, or one of {' '.join(_OPERATORS[1:])}"
    for variable in expression.removeprefix(operator).split(","):
        match = _VARIABLE.fullmatch(variable)
        if match is None:
            return f"{variable[:60]!r} is no name such as parameters.account, with :3 or * behind it at most"
        first, _, below = match[1].partition(".")
        if first in _TREES and not below:
            return f"name the value in {first} that is meant, such as {first}.account"
        if first not in _TREES and (below or first not in _FIELDS):
            known = (*_FIELDS, *(f"{tree}.…" for tree in _TREES))
            near = difflib.get_close_matches(first, (*_FIELDS, *_TREES), n=1)
            return f"there is no {match[1]}; " + (
                f"did you mean {near[0]}?" if near and not below else f"known are {', '.join(known)}"
            )
    return None


def expand(text: str, values: Mapping[str, Any]) -> str:
    """The URL that the template `text` makes of `values`.

    Raises:
        TemplateFailed: a value is missing or does not fit, or the result leads elsewhere.
    """
    if text == CALLBACK_URL:
        address = values["target_uri"]
        if not address:
            raise TemplateFailed("the event brought no target_uri")
        return str(address)
    if "{" not in text and "}" not in text:
        return text
    template = _compiled(text)
    found: dict[str, VariableValue] = {}
    for part in template.variables:
        for name in part.variable_names:
            found[name] = _value(name, values, may_be_empty=part.operator.value in _QUERY)
    try:
        made = template.expand(found)
        there = target.parse(made)
    except UnicodeEncodeError:
        raise TemplateFailed("a value holds half a character (a lone surrogate)") from None
    except target.BadUrl as e:
        raise TemplateFailed(f"the result cannot be called: {e}") from None
    _refuse_other_place(text, made, there)
    return made


def _refuse_other_place(text: str, made: str, there: target.Target) -> None:
    head = _HEAD.match(text)
    if head is None or target.parse(head[0]).origin != there.origin:
        raise TemplateFailed("the result leads to another host than the template")
    if "#" in made:
        raise TemplateFailed("a value brings a fragment (#) into the URL")
    path = urlsplit(made).path
    if any(part in (".", "..") for part in re.split(r"[/\\]", unquote(path))):
        raise TemplateFailed("a value leads out of its folder (. or .. as a part of the path)")


def _value(name: str, values: Mapping[str, Any], *, may_be_empty: bool) -> str | list[str]:
    first, *below = name.split(".")
    try:
        value = values[first]
    except ValueError:
        raise TemplateFailed(f"{first} is no JSON") from None
    for step in below:
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step[:9]) < len(value):
            value = value[int(step[:9])]
        else:
            raise TemplateFailed(f"the event has no {name}")
    found = [_text(name, one) for one in value] if isinstance(value, list) else _text(name, value)
    if not found and not may_be_empty:
        raise TemplateFailed(f"{name} is empty")
    return found


def _text(name: str, value: Any) -> str:
    if value is None:
        raise TemplateFailed(f"{name} is null")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return value.text
    if isinstance(value, str | int | float):
        return str(value)
    raise TemplateFailed(f"{name} is no text, number or list of them")


def _names(text: str) -> list[str]:
    return [name for part in URITemplate(text).variables for name in part.variable_names]


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> URITemplate:
    reason = check(text)
    if reason:
        raise TemplateFailed(f"the template {reason}")
    return URITemplate(text)
