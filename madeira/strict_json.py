"""One strict parse of a request body, at the door, so that no two readers of it can disagree later.

Python's parser is lenient where others are not: it takes the last of two equal keys, NaN, and numbers that overflow. A
body on which parsers disagree would be checked by one component and acted upon by another, so it is refused here, once.
Besides the values the parse returns the *text* of each top-level value as it was received: a payload is stored and
passed on by these bytes, never re-serialised, so that ``1.0`` and a 20-digit integer arrive as they were sent.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

#: Levels of nesting that a body may have, the outermost object counted.
MAX_DEPTH: Final = 64

#: Characters of one number: CPython's own bound on the digits of an integer, since more take quadratic time.
MAX_NUMBER: Final = 4300

_WHITESPACE: Final = re.compile(r"[ \t\n\r]*")
_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class NotStrictJson(ValueError):
    """Raised when a body is no JSON that every parser reads alike; the message is fit for the sender."""


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON object at the top of a body."""

    values: dict[str, Any]
    #: The text of each top-level value, exactly as received.
    texts: dict[str, str]


def parse(raw: bytes) -> Document | None:
    """Parse the bytes of a body.

    Returns None when the body is strict JSON, but no object at its top.

    Raises:
        NotStrictJson: it is not UTF-8, has a byte order mark, is no JSON, names a key twice, holds NaN, an infinity, a
            number that overflows or is longer than `MAX_NUMBER`, or is nested deeper than `MAX_DEPTH`.
    """
    text = _decode(raw)
    _check_depth(text)
    try:
        if text.startswith("{", _skip(text, 0)):
            return _object(text)
        _other(text)
        return None
    except json.JSONDecodeError as e:
        raise NotStrictJson(f"{e.msg} at line {e.lineno}, column {e.colno}") from None
    except RecursionError:
        raise NotStrictJson(f"nested deeper than {MAX_DEPTH} levels") from None


def _decode(raw: bytes) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        raise NotStrictJson("starts with a byte order mark; send plain UTF-8")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise NotStrictJson(f"not UTF-8 at byte {e.start}") from None


def _check_depth(text: str) -> None:
    """Refuse deep nesting before the parser recurses into it; most bodies have too few brackets for a closer look."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        bracket = match[0]
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise NotStrictJson(f"nested deeper than {MAX_DEPTH} levels")
        elif bracket in "]}":
            depth -= 1


def _object(text: str) -> Document:
    """Walk the top-level members one by one, for their spans; what is below them is left to the C parser."""
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    at = _skip(text, _skip(text, 0) + 1)
    if text[at : at + 1] == "}":
        _end(text, at + 1)
        return Document(values, texts)
    while True:
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        key, at = _DECODER.raw_decode(text, at)
        if key in values:
            raise NotStrictJson(f"the key {_shown(key)} occurs twice")
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        start = _skip(text, at + 1)
        values[key], at = _value(text, start)
        texts[key] = text[start:at]
        at = _skip(text, at)
        following = text[at : at + 1]
        if following == "}":
            _end(text, at + 1)
            return Document(values, texts)
        if following != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)


def _other(text: str) -> None:
    _, at = _value(text, _skip(text, 0))
    _end(text, at)


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except (json.JSONDecodeError, NotStrictJson):
        raise
    except ValueError:
        # What the parser of integers raises past its bound.
        raise NotStrictJson(f"a number of more than {MAX_NUMBER} characters") from None


def _skip(text: str, at: int) -> int:
    match = _WHITESPACE.match(text, at)
    return match.end() if match else at


def _end(text: str, at: int) -> None:
    at = _skip(text, at)
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) == len(pairs):
        return members
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise NotStrictJson(f"the key {_shown(key)} occurs twice in one object")
        seen.add(key)
    return members


def as_whole(value: object) -> int | None:
    """A parsed value as the whole number that it is, or None when it is none.

    To JSON 3.0 is as whole as 3 (JSON Schema 2020-12 validation, section 6.1.1); true is none.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None if isinstance(value, bool) or not isinstance(value, int) else value


def _float(text: str) -> float:
    if len(text) > MAX_NUMBER:
        raise NotStrictJson(f"a number of more than {MAX_NUMBER} characters")
    number = float(text)
    if math.isinf(number):
        raise NotStrictJson(f"the number {text[:40]} is too large for a double")
    return number


def _constant(text: str) -> Any:
    raise NotStrictJson(f"{text} is not JSON")


def _shown(key: str) -> str:
    return ascii(key[:64])


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_members, parse_float=_float, parse_constant=_constant, strict=True)
