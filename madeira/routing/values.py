"""Checks of single values of a configuration: each takes what a document holds and gives its canonical form, or says what is
wrong and what would be right.

Beside its check each kind of value has a fragment of JSON schema that says the same to a machine, as far as that goes.
Secrets and header values are never repeated in what is said.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from madeira.ids import NAME
from madeira.settings import refusal_of_reference
from madeira.strict_json import as_whole

#: Numbers up to this are told in errors: a longer integer is no float, and may be too long to be written at all.
_SHOWABLE: Final = 1e300

#: What a name of an object looks like, for JSON schema.
NAME_PATTERN: Final = f"^{NAME.pattern}$"

#: What stands before the name of an environment variable.
ENV_PREFIX: Final = "env:"

_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")

#: What a secret looks like where it is not told; see `madeira.routing.secrets`.
HIDDEN: Final = "hidden"

_SECRET_PREFIX: Final = "whsec_"  # noqa: S105  # a prefix, no secret

#: Characters of a secret, at most.
_MAX_SECRET: Final = 1024


class Wrong(Exception):
    """Raised by a check. `at` is the place below the field, such as ``[1]`` or ``.max``; empty for the field itself."""

    def __init__(self, detail: str, at: str = "") -> None:
        super().__init__(detail)
        self.problems: list[tuple[str, str]] = [(at, detail)]

    @classmethod
    def of(cls, problems: list[tuple[str, str]]) -> "Wrong":
        """Several at once, as (place, what is wrong)."""
        wrong = cls("; ".join(detail for _, detail in problems))
        wrong.problems = problems
        return wrong


@dataclass(frozen=True, slots=True)
class How:
    """What a check must know beside the value."""

    #: Whether secrets are the secrets themselves; else ``env:NAME`` is a reference, which cannot be looked into.
    resolved: bool = False
    #: Whether the value is from the database, and was checked when it was saved.
    stored: bool = False
    #: Why a host may not be called; None when it may.
    refusal_of_host: Callable[[str], str | None] = lambda _host: None


#: Gives the canonical form of a value, which JSON can hold, or raises `Wrong`.
Check = Callable[[Any, How], Any]


class Value(NamedTuple):
    """A kind of value: its check, and its JSON schema."""

    check: Check
    schema: Mapping[str, Any]


def printable(key: str) -> str:
    """A key of a document, as the place of a problem: on one line, and not longer than a line."""
    return key[:100] if key.isprintable() else ascii(key[:100])


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    kinds = {bool: "a boolean", int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "a table"}
    return "nothing" if value is None else kinds.get(type(value), "a date or time")


def as_text(value: Any, longest: int = 65_536) -> str:
    """`value`, if it is a text that Postgres can keep."""
    if not isinstance(value, str):
        raise Wrong(f"must be a text, not {kind_of(value)}")
    if len(value) > longest:
        raise Wrong(f"is longer than {longest} characters")
    if "\0" in value or not _encodes(value):
        raise Wrong("holds a character that cannot be kept (U+0000, or half of a surrogate pair)")
    return value


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text(longest: int, *, empty: bool = True, remedy: str = "") -> Value:
    """A text of at most `longest` characters; `remedy` says what to write instead of an empty one."""

    def check(value: Any, _how: How) -> str:
        found = as_text(value, longest)
        if not found and not empty:
            raise Wrong(f"must not be empty{'; ' + remedy if remedy else ''}")
        return found

    return Value(check, {"type": "string", "maxLength": longest} | ({} if empty else {"minLength": 1}))


def name() -> Value:
    """The name of an object."""

    def check(value: Any, _how: How) -> str:
        found = as_text(value)
        if not NAME.fullmatch(found):
            shown = repr(found) if len(found) <= 80 else "it"
            raise Wrong(f"{shown} must be 1 to 64 of letters, digits, '.', '_' and '-', and start with a letter or digit")
        return found

    return Value(check, {"type": "string", "pattern": NAME_PATTERN})


def number(low: float, high: float) -> Value:
    """A number of that range."""

    def check(value: Any, _how: How) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Wrong(f"must be a number, not {kind_of(value)}")
        if not low <= value <= high:
            shown = "the number" if abs(value) > _SHOWABLE else f"{value:g}"
            raise Wrong(f"{shown} is not between {low:g} and {high:g}")
        return float(value)

    return Value(check, {"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int) -> Value:
    """A whole number of that range."""

    def check(value: Any, _how: How) -> int:
        number = as_whole(value)
        if number is None:
            raise Wrong(f"must be a whole number, not {kind_of(value)}")
        if not low <= number <= high:
            raise Wrong(f"{number if abs(number) < _SHOWABLE else 'the number'} is not between {low} and {high}")
        return number

    return Value(check, {"type": "integer", "minimum": low, "maximum": high})


def flag() -> Value:
    """True or false."""

    def check(value: Any, _how: How) -> bool:
        if not isinstance(value, bool):
            raise Wrong(f"must be true or false, not {kind_of(value)}")
        return value

    return Value(check, {"type": "boolean"})


def one_of(*allowed: str) -> Value:
    """One of some words."""

    def check(value: Any, _how: How) -> str:
        found = as_text(value)
        if found not in allowed:
            shown = repr(found) if len(found) <= 80 else "it"
            raise Wrong(f"{shown} is none of {', '.join(allowed)}")
        return found

    return Value(check, {"type": "string", "enum": list(allowed)})


def list_of(item: Value, *, least: int, most: int, what: str) -> Value:
    """A list; `what` says of what, for people."""

    def check(value: Any, how: How) -> list[Any]:
        if not isinstance(value, list):
            raise Wrong(f"must be a list of {what}, not {kind_of(value)}")
        if not least <= len(value) <= most:
            raise Wrong(f"must hold {f'at least {least}' if len(value) < least else f'at most {most}'} of {what}")
        found, problems = [], []
        for place, one in enumerate(value):
            try:
                found.append(item.check(one, how))
            except Wrong as e:
                problems += [(f"[{place}]{at}", detail) for at, detail in e.problems]
        if problems:
            raise Wrong.of(problems)
        return found

    return Value(check, {"type": "array", "items": dict(item.schema), "minItems": least, "maxItems": most})


def secret(look: Callable[[str], None], longest: int = _MAX_SECRET) -> Value:
    """A secret, or ``env:NAME``; `look` raises `Wrong` for what cannot be one, where it is there to be looked at."""

    def check(value: Any, how: How) -> str:
        found = as_text(value, longest)
        if not found:
            raise Wrong("must not be empty")
        if not how.resolved:
            if found.startswith(ENV_PREFIX):
                _check_env_name(found.removeprefix(ENV_PREFIX))
                return found
            if is_hidden(found):
                raise Wrong(f"'{HIDDEN}' stands for a secret that is kept, and there is none at this place: send the secret")
        look(found)
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": longest})


def is_hidden(found: str) -> bool:
    """Whether a text stands for a secret that is not told."""
    return found == HIDDEN or found.startswith(f"{HIDDEN}:")


def signing_secret(found: str) -> None:
    """Look at a secret that something is signed with."""
    if found.startswith(_SECRET_PREFIX) and not _is_base64(found.removeprefix(_SECRET_PREFIX)):
        raise Wrong(f"is not base64 after {_SECRET_PREFIX}")


def _check_env_name(found: str) -> None:
    if not _ENV_NAME.fullmatch(found):
        raise Wrong(f"after {ENV_PREFIX} must come the name of an environment variable: letters, digits and '_'")
    refusal = refusal_of_reference(found)
    if refusal:
        raise Wrong(refusal)


def _is_base64(found: str) -> bool:
    try:
        return bool(base64.b64decode(found, validate=True))
    except (binascii.Error, ValueError):
        return False
