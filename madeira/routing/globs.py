"""What a route asks of an event's type and routing key, checked for whether any event can have it.

A route that can never match is a mistake in writing, and nothing would ever tell of it: its events are just not delivered.
"""

import fnmatch
import string
from collections.abc import Iterator
from typing import Any, Final

from madeira import reasons
from madeira.routing import values
from madeira.routing.values import How, Value, Wrong

#: Characters of a pattern of event types, at most; an event's type has one less.
_MAX_PATTERN: Final = 256
_MAX_TYPE: Final = 255
_MAX_KEY: Final = 255

#: An event's type is words of these with dots between.
_WORD: Final = frozenset(string.ascii_letters + string.digits + "_-")

_ANY: Final = _WORD | {"."}


def event_type() -> Value:
    """A glob over event types that some type matches."""
    any_text = values.text(_MAX_PATTERN, empty=False, remedy='"*" matches every type')

    def check(value: Any, how: How) -> str:
        found: str = any_text.check(value, how)
        # One that was kept before this was checked does no harm.
        if not how.stored and not can_match(found):
            raise Wrong(
                "no event can have such a type, so that the route would never match: a type is words of A-Z a-z 0-9 _ - with "
                f"dots between, at most {_MAX_TYPE} characters; in a pattern * is any characters, ? is one, [ab] is one of these"
            )
        return found

    return Value(check, any_text.schema)


def routing_key() -> Value:
    """A text that can be the routing key of an event."""

    def check(value: Any, how: How) -> str:
        if how.stored:
            return values.as_text(value)
        found = values.as_text(value, _MAX_KEY)
        if not found:
            raise Wrong("must not be empty, since no event has an empty one; leave it out to match events with any key or none")
        if not reasons.is_line(found):
            raise Wrong("holds a control character, which no event's routing key has, so that the route would never match")
        return found

    return Value(check, {"type": "string", "minLength": 1, "maxLength": _MAX_KEY})


def can_match(pattern: str) -> bool:
    """Whether there is an event type that the glob matches."""
    # What may have been read before each piece: a word (after which a type may end), or nothing or a dot.
    in_word, between = False, True
    least = 0
    for allowed in _pieces(pattern):
        if allowed is None:
            in_word = between = in_word or between
            continue
        least += 1
        in_word, between = bool(allowed & _WORD) and (in_word or between), "." in allowed and in_word
    return in_word and least <= _MAX_TYPE


def _pieces(pattern: str) -> Iterator[frozenset[str] | None]:
    """For each piece of a glob the characters that it stands for; None for a star. As `fnmatch` reads it."""
    at = 0
    while at < len(pattern):
        end = _end_of_piece(pattern, at)
        piece, at = pattern[at:end], end
        yield None if piece == "*" else frozenset(c for c in _ANY if fnmatch.fnmatchcase(c, piece))


def _end_of_piece(pattern: str, at: int) -> int:
    if pattern[at] != "[":
        return at + 1
    first = at + 1 + pattern.startswith("!", at + 1)
    close = pattern.find("]", first + pattern.startswith("]", first))
    return close + 1 if close >= 0 else at + 1
