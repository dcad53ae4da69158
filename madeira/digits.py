"""Numbers in texts (settings, options of commands, requests, answers), read as they look and no other way.

Python's own readers take more: ``1_0`` for ten, space around, the digits of every script, ``nan`` and ``inf``. A value that is
taken for another than whoever typed it meant is worse than one that is refused.
"""

import math
import re
from typing import Final

_WHOLE: Final = re.compile(r"-?[0-9]{1,18}")
_LONG: Final = re.compile(r"-?[0-9]{19,}")
_NUMBER: Final = re.compile(r"-?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?")

_REMEDY: Final = "write it in the digits 0 to 9, with nothing around it"


def whole(text: str) -> int:
    """A whole number.

    Raises:
        ValueError: `text` is none; the message says how one is written.
    """
    if _LONG.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is too large: a whole number has 18 digits at most")
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number; {_REMEDY}")
    return int(text)


def number(text: str) -> float:
    """A number, with a point or an exponent if need be; otherwise as `whole`."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is not a number; {_REMEDY}, such as 2.5")
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text!r} is too large")
    return found


def plain(text: str, most: int) -> int | None:
    """What 1 to `most` digits 0 to 9 say; None of any other text, also of one with a sign."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most else None
