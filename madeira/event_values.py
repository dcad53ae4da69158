"""What filters and templates read of an event: its fields by name, the JSON in it parsed at most once, and only if asked for.

Most routes look at source and type alone, so a payload is left as the text it is until somebody wants a value out of it.
Numbers remember how they were written: a template that passes on ``1.10`` or an integer of 20 digits passes on just that.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from madeira.records import Claimed, RoutableEvent

#: The names, in the order in which they are documented.
NAMES: Final = (
    "event_id",
    "event_type",
    "source",
    "routing_key",
    "target_uri",
    "trace_id",
    "created_at",
    "payload",
    "parameters",
)


class Number(float):
    """A number with a fraction or an exponent, which remembers its spelling."""

    __slots__ = ("text",)

    text: str

    def __str__(self) -> str:
        return self.text


class Object(dict[str, Any]):
    """A parsed JSON object that remembers its text."""

    __slots__ = ("text",)

    text: str


class Array(list[Any]):
    """A parsed JSON array that remembers its text."""

    __slots__ = ("text",)

    text: str


class EventValues(Mapping[str, Any]):
    """The values of one event by name (see `NAMES`); ``parameters`` is an empty object where the event has none.

    Looking up ``payload`` or ``parameters`` raises ValueError when the text is no JSON: it was at intake, so that means that
    it was erased or changed by hand.
    """

    def __init__(self, event: RoutableEvent | Claimed) -> None:
        self._event = event
        self._parsed: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name in ("payload", "parameters"):
            if name not in self._parsed:
                self._parsed[name] = parse(getattr(self._event, name) or ("{}" if name == "parameters" else ""))
            return self._parsed[name]
        if name == "created_at":
            return utc_text(self._event.created_at)
        if name in NAMES:
            return getattr(self._event, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def utc_text(moment: datetime) -> str:
    """`moment` as calls tell it: RFC 3339, UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse(text: str) -> Any:
    """The value of a JSON `text`; numbers, and an object or array at the top, remember how they were written.

    Raises:
        ValueError: it is no JSON, or is nested too deeply.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if isinstance(value, dict):
        value = Object(value)
        value.text = text
    elif isinstance(value, list):
        value = Array(value)
        value.text = text
    return value


def _fraction(text: str) -> Number:
    number = Number(text)
    number.text = text
    return number


def _whole(text: str) -> int | Number:
    # Python has no integer that is a negative zero.
    return int(text) if text != "-0" else _fraction(text)


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=_fraction, parse_int=_whole, parse_constant=_constant)
