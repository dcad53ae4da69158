"""Why a person does something: one line for the audit, held to the same rules by whichever door it comes in. Pure."""

import re
from typing import Final

#: Characters of a reason, at most.
MAX_REASON: Final = 500

_LINE: Final = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]*")


def is_line(given: str) -> bool:
    """Whether a text holds nothing that breaks a line, a terminal, or Postgres."""
    return _LINE.fullmatch(given) is not None


def check(given: str) -> str:
    """A reason that may as well be empty.

    Raises:
        ValueError: it is too long, or holds what does not belong into a line.
    """
    if len(given) > MAX_REASON or not is_line(given):
        raise ValueError(f"must be of at most {MAX_REASON} printable characters")
    return given


def check_needed(given: str) -> str:
    """A reason that somebody will ask for.

    Raises:
        ValueError: as `check`, or it says nothing.
    """
    if not check(given) or given[0].isspace():
        raise ValueError("must say why, and not begin with a space")
    return given
