"""What a receiver echoes of an endpoint's credentials, taken out of what it answered before anybody reads it.

Receivers put what they were sent into their errors, and seldom as it was: in JSON, in HTML, in a query, in base64. So the
credentials are looked for in the answer as it came, and in the answer with its escapes undone, one kind after the other and all
of them up to three deep; what is found there is replaced where it stood. The case of ASCII letters never matters.

What is looked for follows from the endpoint alone and is made once; an answer without a body costs nothing, and one without
escapes a search for each form.
"""

import base64
import binascii
import bisect
import functools
import html
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from madeira.delivery.signing import STANDARD_PREFIX
from madeira.records import Endpoint

#: What stands for a credential.
MASK: Final = b"***"

#: Characters below which a value is not looked for: its letters may stand in any answer.
SHORTEST: Final = 8

#: Endpoints whose forms are kept.
_KEPT: Final = 1024

#: What a template of a header fills in.
_EXPRESSION: Final = re.compile(r"(?s)\{\{.*?\}\}|\{%.*?%\}")

#: The value of a parameter in a header, as in ``Token token="…"``, ``session=…; path=/``.
_PARAMETER: Final = re.compile(r'=\s*"?([^\s",;]+)')

#: Bytes that a character may take where it is escaped, at most.
_LONGEST_CHARACTER: Final = 12

#: How often escapes are undone, of what was escaped several times.
_DEPTH: Final = 3


def masked(text: bytes, endpoint: Endpoint, *, first: int) -> bytes:
    """The first `first` bytes of `text`, with ``***`` for whatever is known as a credential of `endpoint`.

    One that goes on behind them is masked too. No more of `text` is looked at than that needs: a receiver has no say in what
    its answer costs.
    """
    if len(text) < SHORTEST:
        return text[:first]
    forms = _forms(endpoint.secrets, tuple(endpoint.headers.values()))
    if not forms:
        return text[:first]
    looked_at = text[: first + _LONGEST_CHARACTER * len(forms[0])]
    return _replaced(text[:first], sorted(_places(looked_at.lower(), forms)))


def _replaced(text: bytes, places: list[tuple[int, int]]) -> bytes:
    parts, end = [], 0
    for start, stop in places:
        if start >= len(text):
            break
        if start >= end:
            parts += [text[end:start], MASK]
        end = max(end, stop)
    return b"".join((*parts, text[end:]))


# -- what is looked for -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=_KEPT)
def _forms(secrets: tuple[str, ...], headers: tuple[str, ...]) -> tuple[bytes, ...]:
    """What may stand for a credential, in lower case."""
    found: set[bytes] = set()
    for value in {*secrets, *_parts_of_secrets(secrets), *_parts_of_headers(headers)}:
        if len(value) >= SHORTEST:
            found.update(_forms_of(value))
    return tuple(sorted(found, key=len, reverse=True))


def _parts_of_secrets(secrets: Iterable[str]) -> Iterator[str]:
    for secret in secrets:
        if secret.startswith(STANDARD_PREFIX):
            yield secret.removeprefix(STANDARD_PREFIX).rstrip("=")
            yield from _decoded(secret.removeprefix(STANDARD_PREFIX))


def _parts_of_headers(headers: Iterable[str]) -> Iterator[str]:
    for value in headers:
        # Of a template, what is not made of the event.
        for literal in _EXPRESSION.split(value):
            credential = literal.strip().rsplit(" ", 1)[-1]
            yield from (literal, literal.strip(), credential, *_PARAMETER.findall(literal))
            if literal.strip()[:6].lower() == "basic ":
                for pair in _decoded(credential):
                    yield from (pair, *pair.split(":", 1))


def _decoded(text: str) -> Iterator[str]:
    """The text in base64, if it is one."""
    try:
        yield base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
    except (binascii.Error, ValueError):
        return


def _forms_of(value: str) -> Iterator[bytes]:
    for coding in ("utf-8", "latin-1"):
        try:
            raw = value.encode(coding)
        except UnicodeEncodeError:
            continue
        yield raw.lower()
        # A space in a form that was posted.
        yield raw.replace(b" ", b"+").lower()
        yield raw.hex().encode()
        yield from (form.lower() for form in _base64(raw))


def _base64(raw: bytes) -> Iterator[bytes]:
    """`raw` in base64: by itself, and what is the same of it wherever it stands in something longer."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield from {encode(raw), encode(raw).rstrip(b"=")}
        for before in range(3):
            whole = encode(bytes(before) + raw)
            rest = (before + len(raw)) % 3
            # The characters that hold bits of a neighbour too.
            yield whole[(0, 2, 3)[before] : len(whole) - (0, 3, 2)[rest]]


# -- where it is found ------------------------------------------------------------------------------------------------

#: Of each kind of escape: how it is found, in a text in lower case, and what stands for it.
_JSON: Final = re.compile(rb"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|\\u([0-9a-f]{4})|\\x([0-9a-f]{2})|\\(.)", re.DOTALL)
_PERCENT: Final = re.compile(rb"%([0-9a-f]{2})")
_HTML: Final = re.compile(rb"&(?:#x0{0,8}([0-9a-f]{1,6})|#0{0,8}([0-9]{1,7})|([a-z]{2,6}));")

_CONTROLS: Final = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f"}


def _undo_json(escape: re.Match[bytes]) -> bytes:
    high, low, unit, byte, other = escape.groups()
    if other is not None:
        return _CONTROLS.get(other, other)
    if byte is not None:
        return bytes.fromhex(byte.decode())
    return bytes.fromhex((high + low if high else unit).decode()).decode("utf-16-be", "replace").encode()


def _undo_percent(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


def _undo_html(escape: re.Match[bytes]) -> bytes:
    return html.unescape(escape[0].decode()).encode(errors="replace")


_Kind = tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]]

#: By the character that such an escape begins with.
_KINDS: Final[dict[bytes, _Kind]] = {
    b"\\": (_JSON, _undo_json),
    b"%": (_PERCENT, _undo_percent),
    b"&": (_HTML, _undo_html),
}


@dataclass(frozen=True, slots=True)
class _Reading:
    """A text with escapes undone, and where its bytes come from."""

    text: bytes
    #: Where each run of bytes that were moved together begins in `text`, and began before.
    here: tuple[int, ...] = (0,)
    there: tuple[int, ...] = (0,)
    before: "_Reading | None" = None

    def origin(self, at: int) -> int:
        """Where the byte at `at` came from; an escape is one with all that it stands for."""
        if self.before is None:
            return at
        run = bisect.bisect_right(self.here, at) - 1
        return self.before.origin(self.there[run] + at - self.here[run])


def _places(lowered: bytes, forms: tuple[bytes, ...]) -> set[tuple[int, int]]:
    """Begin and end of whatever is read as one of `forms`."""
    places = set()
    for reading in _readings(_Reading(lowered)):
        for form in forms:
            at = reading.text.find(form)
            while at >= 0:
                places.add((reading.origin(at), reading.origin(at + len(form))))
                at = reading.text.find(form, at + len(form))
    return places


def _readings(plain: _Reading) -> Iterator[_Reading]:
    """`plain`, with one kind of escapes undone, and with all of them; each again and again."""
    yield plain
    there = [kind for sign, kind in _KINDS.items() if sign in plain.text]
    for kind in there:
        yield from _deeper(plain, (kind,))
    if len(there) > 1:
        yield from _deeper(plain, tuple(_KINDS.values()))


def _deeper(reading: _Reading, kinds: tuple[_Kind, ...]) -> Iterator[_Reading]:
    for _ in range(_DEPTH):
        before = reading.text
        for kind in kinds:
            reading = _undone(reading, kind)
        if reading.text == before:
            return
        yield reading


def _undone(reading: _Reading, kind: _Kind) -> _Reading:
    pattern, undo = kind
    text, parts, here, there, end, size = reading.text, [], [0], [0], 0, 0
    for escape in pattern.finditer(text):
        start, stop = escape.span()
        new = undo(escape).lower()
        parts += [text[end:start], new]
        size += start - end
        here += [size, size + len(new)]
        there += [start, stop]
        size += len(new)
        end = stop
    if not end:
        return reading
    parts.append(text[end:])
    return _Reading(b"".join(parts), tuple(here), tuple(there), reading)
