"""What `madeira doctor` looks at in the database itself: whether all that the migrations made is there and may be used.

That they were applied says little after a restore, after an index whose building was broken off, or after a wrong `DROP`.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import psycopg

from madeira.cli.findings import Finding
from madeira.store import inventory, parts
from madeira.store.inventory import Fault

#: Faults of one kind that are told.
_TOLD: Final = 10


def rights(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Whether the role of `conn` sees the tables and may do in them what the processes do."""
    # What may be done in a table that hides one of ours is of no account.
    for fault in list(inventory.elsewhere(conn)) or inventory.denied(conn):
        yield _finding("rights", fault)


def tables(conn: psycopg.Connection[Any], *, is_ahead: bool) -> Iterator[Finding]:
    """Whether tables and what belongs to them are there; `is_ahead`: a later version has migrated them."""
    faults = inventory.faults(conn, is_ahead=is_ahead)
    told = [_finding("tables", fault) for fault in islice(faults, _TOLD)]
    yield from told
    if more := sum(1 for _ in faults):
        yield Finding("error", "tables", f"and {more} more are missing or not usable: restore the database from a backup")
    if not told:
        yield Finding("ok", "tables", "tables, indexes, constraints and triggers are all there")


def log_parts(conn: psycopg.Connection[Any]) -> Iterator[Finding]:
    """Whether the log of attempts has a part for today and the next day. Nothing fails where it has none, so it is no error."""
    missing = ", ".join(str(day) for day in parts.uncovered(conn))
    if missing:
        text = (
            f"delivery_log has no part for {missing}: attempts go to delivery_log_rest, from where they are removed row by row; "
            "the scheduler has parts made: start `periodiq madeira.actors` and workers, or run `madeira retention`"
        )
        yield Finding("warning", "parts", text)


def _finding(what: str, fault: Fault) -> Finding:
    return Finding("error", what, f"{fault.what}; {fault.remedy}")
