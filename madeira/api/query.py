"""The parameters of a query, checked as strictly as a body: a misspelt filter must not show everything.

Each parameter has a function that checks and converts its text; all that is wrong is told at once, with 422.
"""

import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import falcon

from madeira import digits, reasons
from madeira.api import problems
from madeira.api.problems import FieldError

#: Characters of a text that something is looked up by.
_MAX_TEXT: Final = 512

_MOMENT: Final = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}:\d{2}(?:\.\d{1,9})?(?:[Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_CURSOR: Final = re.compile(r"(\d{1,18})-(\d{1,18})", re.ASCII)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_FRACTION: Final = re.compile(r"(\.\d{6})\d+")

#: Turns the text of a parameter into its value, or raises ValueError with what would be right.
Check = Callable[[str], Any]


def read(req: falcon.Request, checks: Mapping[str, Check], *, in_body: Collection[str] = ()) -> dict[str, Any]:
    """The values of the parameters that the query holds. What belongs `in_body` and stands here is told so.

    Raises:
        Problem: 422, with one entry for each parameter that is unknown, given twice, or wrong.
    """
    values: dict[str, Any] = {}
    errors: list[FieldError] = []
    for name, given in req.params.items():
        check = checks.get(name)
        if check is None and name in in_body:
            errors.append(FieldError(name, f'belongs into the body: {{"{name}": ...}}'))
        elif check is None:
            known = ", ".join(checks) or "none"
            errors.append(FieldError(problems.shown(name), f"is no parameter of this query; known: {known}"))
        elif not isinstance(given, str):
            errors.append(FieldError(name, "is given more than once"))
        else:
            try:
                values[name] = check(given)
            except ValueError as e:
                errors.append(FieldError(name, str(e)))
    if errors:
        raise problems.invalid(errors)
    return values


def none(req: falcon.Request, *, in_body: Collection[str] = ()) -> None:
    """Let only a request pass that asks for nothing in its query; as `read`.

    Raises:
        Problem: 422, with one entry for each parameter.
    """
    # Intake asks this of every event.
    if req.query_string:
        read(req, {}, in_body=in_body)


def text(given: str) -> str:
    """A text that something is looked up by."""
    if not given or len(given) > _MAX_TEXT or not reasons.is_line(given):
        raise ValueError(f"must be of 1 to {_MAX_TEXT} printable characters")
    return given


def moment(given: str) -> datetime:
    """A time in RFC 3339, with its zone."""
    # A plus sign that was not escaped comes as a space.
    spelt = given.replace(" ", "+")
    if _MOMENT.fullmatch(spelt):
        try:
            return datetime.fromisoformat(_FRACTION.sub(r"\1", spelt.upper())).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    raise ValueError("must be a time in RFC 3339, such as 2026-01-31T12:00:00Z")


def cursor(at: datetime, number: int) -> str:
    """The place behind an entry of a list in the order of (time, id), for clients; `place` reads it."""
    return f"{(at - _EPOCH) // _MICROSECOND}-{number}"


def place(given: str) -> tuple[datetime, int]:
    """The time and the id of a `cursor`."""
    found = _CURSOR.fullmatch(given)
    try:
        if found:
            return _EPOCH + int(found[1]) * _MICROSECOND, int(found[2])
    except OverflowError:
        pass
    raise ValueError("must be the next_cursor of an answer")


def whole(low: int, high: int) -> Check:
    """A whole number from `low` to `high`."""

    def check(given: str) -> int:
        number = digits.plain(given, len(str(high)))
        if number is None or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return check


def choice(*allowed: str) -> Check:
    """One of a few words."""

    def check(given: str) -> str:
        if given not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return given

    return check
