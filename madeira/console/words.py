"""How values are told to people: times as ages, numbers with separators, ids shortened, states as words.

Everything here gives plain text; the templates escape it. The exact value is never lost: it stands beside, for hovering and
copying.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

#: Characters of an id before it is shortened, and what is left of it before and after the dots.
_ID: Final = (22, 10, 8)

#: Units of a span, from the largest: seconds and word.
_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"))

#: What a state means for whoever looks: red only for what needs a person.
_TONES: Final = {
    "succeeded": "good",
    "done": "good",
    "running": "busy",
    "failed": "bad",
    "active": "good",
    "ok": "good",
    "delivering": "busy",
    "ramp": "busy",
    "half_open": "busy",
    "pending": "wait",
    "retryable": "wait",
    "unknown": "wait",
    "business": "wait",
    "late": "wait",
    "lost": "wait",
    "retry_after": "wait",
    "paused": "wait",
    "open": "bad",
    "dead": "bad",
    "permanent": "bad",
    "disabled": "bad",
    "unavailable": "bad",
    "cancelled": "off",
}

#: What nobody sees, or what makes the text around it look like another: control characters, and those that override the direction
#: of letters. Marks of direction, which Arabic and Hebrew need, and joiners stay.
_HIDDEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

#: States of a lane, as one says them.
_LANES: Final = {
    "active": "flowing",
    "open": "held by breaker",
    "half_open": "breaker: one call tries",
    "ramp": "breaker closing",
    "retry_after": "left alone as asked",
}


def seen(value: Any) -> Any:
    """`value`; in a text that is not markup of ours what one would not see is written out, by its code point."""
    if type(value) is not str:
        return value
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)


def number(value: float | None) -> str:
    """With separators of thousands."""
    return "" if value is None else f"{value:,}"


def span(seconds: float) -> str:
    """A time in its two largest units."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    whole = int(seconds)
    for n, (size, unit) in enumerate(_UNITS):
        if whole >= size:
            rest_size, rest_unit = _UNITS[n + 1] if n + 1 < len(_UNITS) else (1, "s")
            rest = whole % size // rest_size
            return f"{whole // size} {unit} {rest} {rest_unit}" if rest and whole // size < 10 else f"{whole // size} {unit}"
    return f"{whole} s"


def ago(moment: datetime, now: datetime | None = None) -> str:
    """How long ago it was, or how far ahead it is."""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if -1 < seconds < 1:
        return "just now"
    return f"{span(seconds)} ago" if seconds > 0 else f"in {span(seconds)}"


def exact(moment: datetime) -> str:
    """To the millisecond, in UTC."""
    at = moment.astimezone(UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} UTC"


def already(since: datetime | None, by: str | None) -> str:
    """What is told of a state that was there before somebody asked for it: since when, and by whom, where that is known."""
    return " already" + (f", since {exact(since)}" if since else "") + (f" by {by}" if by else "")


def short(identifier: str) -> str:
    """An id with its middle left out, if it is long."""
    most, before, after = _ID
    return identifier if len(identifier) <= most else f"{identifier[:before]}…{identifier[-after:]}"


def cut(text: Any, most: int) -> str:
    """The beginning of a long text."""
    told = str(text)
    return told if len(told) <= most else told[:most] + "…"


def sentence(text: str) -> str:
    """A text that begins with a plain word, with a capital there; names, which are written as they are, keep their letters."""
    word = re.match(r"[a-z]+(?=[ ,:.]|$)", text)
    return text[0].upper() + text[1:] if word else text


def tone(state: str) -> str:
    """How a state is coloured; it is always told as a word too."""
    return _TONES.get(state, "off")


def lane(state: str) -> str:
    """The state of a lane."""
    return _LANES.get(state, state)


def percent(part: int, whole: int) -> str:
    """A part of a whole, to a tenth; 100 only when it is all of it, and 0 only when it is nothing."""
    tenths = min(999, max(1, 1000 * part // whole)) if 0 < part < whole else 1000 * (part > 0)
    return f"{tenths / 10:g} %"


def plural(count: int, one: str, many: str | None = None) -> str:
    """A number and its noun."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def joined(names: Any) -> str:
    """Names as one says them in a sentence."""
    *others, last = [str(name) for name in names]
    return f"{', '.join(others)} and {last}" if others else last


def waits(missing: Sequence[str]) -> str:
    """What is told of a replay to endpoints that were removed; nothing when there is none."""
    return f"Not configured: {joined(missing)}. What goes there waits until it is, or is cancelled." if missing else ""


def request(document: Mapping[str, Any] | None) -> str | None:
    """A request that would go out, or went, as it looks on the wire; it holds nothing that is secret."""
    if document is None:
        return None
    head = "\n".join([f"{document['method']} {document['url']}", *(f"{name}: {value}" for name, value in document["headers"])])
    return f"{head}\n\n{document['body']}"


def address(*parts: str, **query: Any) -> str:
    """An address of the console: its parts, and what the query asks for; None is left out."""
    path = "/".join(["/console", *(quote(part, safe="") for part in parts)])
    asked = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{path}?{urlencode(asked, doseq=True)}" if asked else path
