"""Turns columns of values into array parameters, for statements that handle a whole group at once.

psycopg would choose the array's type by the size of its numbers, and so prepare one statement anew for each; an array
literal of no type of its own is cast where it is used, and is cheaper to make.
"""

from collections.abc import Iterable


def numbers(values: Iterable[object]) -> str:
    """An array literal of numbers, UUIDs, booleans: whatever needs no quoting. None is NULL."""
    return "{" + ",".join("NULL" if v is None else str(v) for v in values) + "}"


def texts(values: Iterable[str | None]) -> str:
    """An array literal of texts. None is NULL."""
    return "{" + ",".join("NULL" if v is None else quoted(v) for v in values) + "}"


def quoted(value: str) -> str:
    """One text as an element of an array literal."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def binaries(values: Iterable[bytes | None]) -> str:
    """An array literal of byte strings. None is NULL."""
    return "{" + ",".join("NULL" if v is None else f'"\\\\x{v.hex()}"' for v in values) + "}"


def one_line(statement: str) -> str:
    """`statement` without its layout: psycopg takes one longer than 4,096 characters apart again at every call."""
    return " ".join(statement.split())
