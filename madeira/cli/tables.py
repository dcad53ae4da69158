"""How commands print tables, and pages of what they list: on a terminal as wide as that, else as wide as a file reads well."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import psycopg
from rich.console import Console
from rich.table import Table

from madeira.store.database import Database

#: How a state of an event or a delivery is coloured.
STATUS_COLORS: Final = {"succeeded": "green", "dead": "red", "cancelled": "yellow", "pending": "cyan", "delivering": "cyan"}

#: Characters of a line where the output is no terminal, unless COLUMNS says more.
_WIDTH: Final = 160

#: What is read at a time.
_PAGE: Final = 200

Place = TypeVar("Place")


def table(columns: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `right` hold numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return made


def console() -> Console:
    """What prints to standard output."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = max(made.width, _WIDTH)
    return made


def rows(
    database: Database,
    page: Callable[[psycopg.Connection[Any], int, Place | None], tuple[Sequence[Mapping[str, Any]], Place | None]],
    limit: int,
) -> Iterator[Mapping[str, Any]]:
    """At most `limit` rows of a list; `page` reads that many from a place on, and tells the place of the next page, if any."""
    place: Place | None = None
    while limit > 0:
        with database.connection() as conn:
            found, place = page(conn, min(limit, _PAGE), place)
        yield from found
        limit -= len(found)
        if place is None:
            return
