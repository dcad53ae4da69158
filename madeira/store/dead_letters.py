"""Dead letters for those who look through them: pages, the latest first; groups; and one of them with all that was tried.

A page goes on from a place (the time of death and the id) and counts nothing; groups are counted over a bounded number. Both walk
an index that holds nothing but what is dead, from the latest on, and ask the other conditions of each that is met.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import dict_row

from madeira.store.columns import numbers
from madeira.store.selection import Selection, conditions

#: Dead letters that one page looks at.
LOOK: Final = 10_000

#: Dead letters that are counted by groups, and if each has to be met with its event for it.
COUNTED: Final = 100_000
COUNTED_WITH_EVENT: Final = 20_000

#: What is shown of each.
_COLUMNS: Final = """
    d.id, e.event_id, e.source, e.event_type, d.endpoint, d.routes, d.failure_class, d.last_error_code AS error_code,
    d.last_error, d.attempt, d.died_at, e.created_at AS accepted_at, d.trace_id, e.erased_at
"""

#: The walk reads an index in its order, a row at a time, and looks at each event by itself: while Postgres has not counted the
#: rows of a table it believes that there are few, and that reading all and sorting them is as good.
_IN_ORDER: Final = """
    SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true),
           set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)
"""

#: When the attempts of some deliveries failed.
_FAILURES: Final = """
    SELECT delivery_id, min(recorded_at), max(recorded_at)
    FROM delivery_log
    WHERE delivery_id = ANY(%(ids)s::bigint[]) AND outcome NOT IN ('succeeded', 'late')
    GROUP BY delivery_id
"""

#: One dead letter.
_ONE: Final = f"""
    SELECT {_COLUMNS}
    FROM delivery d JOIN event e ON e.seq = d.event_seq
    WHERE d.id = %(id)s AND d.died_at IS NOT NULL
"""  # noqa: S608

#: All attempts, in the order of time.
_ATTEMPTS: Final = """
    SELECT delivery_id, attempt, started_at, duration_s, url, status_code, outcome, error_code, reason, settled_as,
           excerpt, length, sha256, worker, exchange, recorded_at
    FROM delivery_log
    WHERE delivery_id = %(id)s
    ORDER BY started_at, id
"""

#: What some dead letters say.
_EXAMPLES: Final = "SELECT id, failure_class, last_error FROM delivery WHERE id = ANY(%(ids)s::bigint[])"

#: What groups are made of: of all it is found in the index alone, else conditions need more.
_IN_INDEX: Final = ("id", "died_at", "endpoint", "last_error_code")
_READ: Final = (*_IN_INDEX, "event_seq", "failure_class", "last_error", "created_at")


class Place(NamedTuple):
    """Where a page ends, and the next one goes on."""

    died_at: datetime
    id: int


class Page(NamedTuple):
    """A page of dead letters."""

    items: list[dict[str, Any]]
    #: From where the next page goes on; None when there is nothing further.
    after: Place | None


@dataclass(frozen=True, slots=True)
class Groups:
    """Dead letters by endpoint and code of the last failure, the largest group first."""

    groups: list[dict[str, Any]]
    #: How many were counted: the latest of those that match.
    counted: int
    #: Among how many of the latest.
    among: int
    #: Whether these are all that match.
    complete: bool


def page(conn: psycopg.Connection[Any], selection: Selection, *, limit: int, after: Place | None = None) -> Page:
    """At most `limit` dead letters that are selected, the latest first, from behind the place `after` on.

    A page may be short or empty and yet have a next one: then it has looked at as many as it may.
    """
    walk, params = _walk(selection, after)
    wanted, more = conditions(selection)
    params |= more | {"limit": limit, "look": LOOK}
    statement = f"""
        SELECT {_COLUMNS} FROM (SELECT d.* {walk} LIMIT %(look)s) d {_WITH_EVENT}
        WHERE {" AND ".join(wanted) or "true"}
        ORDER BY d.died_at DESC, d.id DESC
        LIMIT %(limit)s
    """  # noqa: S608
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_IN_ORDER)
        items = cursor.execute(statement.encode(), params, prepare=False).fetchall()
        _add_failures(conn, items)
        if len(items) == limit:
            return Page(items, Place(items[-1]["died_at"], items[-1]["id"]))
        last = f"SELECT d.died_at, d.id {walk} OFFSET %(look)s - 1 LIMIT 1"
        row = conn.execute(last.encode(), params, prepare=False).fetchone()
        return Page(items, Place(*row) if row else None)


#: Each met with its event, in the order of the walk: OFFSET 0 keeps it from becoming a join that has an order of its own.
_WITH_EVENT: Final = "CROSS JOIN LATERAL (SELECT * FROM event WHERE seq = d.event_seq OFFSET 0) e"


def _walk(selection: Selection, after: Place | None = None) -> tuple[str, dict[str, Any]]:
    """The way through the dead letters by the index that fits; what is beside the times and the endpoint it passes all."""
    where, params = ["d.died_at IS NOT NULL"], {}
    bounds: Mapping[str, Any] = {
        "d.endpoint = %(of)s": selection.endpoint,
        "d.died_at >= %(floor)s": selection.since,
        "d.died_at < %(ceiling)s": selection.until,
    }
    for name, (condition, value) in zip(("of", "floor", "ceiling"), bounds.items(), strict=True):
        if value is not None:
            where.append(condition)
            params[name] = value
    if after is not None:
        where.append("(d.died_at, d.id) < (%(died_at)s, %(id)s)")
        params |= {"died_at": after.died_at, "id": after.id}
    order = "d.died_at DESC, d.id DESC"
    return f"FROM delivery d WHERE {' AND '.join(where)} ORDER BY {order}", params


def _add_failures(conn: psycopg.Connection[Any], items: list[dict[str, Any]]) -> None:
    """Add when each failed first and last; what was born dead did so when it was born."""
    times = {i: (first, last) for i, first, last in conn.execute(_FAILURES, {"ids": numbers(item["id"] for item in items)})}
    for item in items:
        item["first_failed_at"], item["last_failed_at"] = times.get(item["id"], (item["died_at"], item["died_at"]))


def groups(conn: psycopg.Connection[Any], selection: Selection, *, limit: int) -> Groups:
    """The `limit` largest groups of the dead letters that are selected; only so many of the latest are looked at.

    A group has ``endpoint``, ``error_code``, ``count``, ``first_died_at``, ``last_died_at``, and of one of its letters, its
    ``example`` (the id), ``failure_class`` and ``last_error``.
    """
    walk, params = _walk(selection)
    wanted, more = conditions(selection)
    of_event = any("e." in condition for condition in wanted)
    among = COUNTED_WITH_EVENT if of_event else COUNTED
    params |= more | {"limit": limit, "look": among}
    columns = ", ".join(f"d.{name}" for name in (_READ if wanted else _IN_INDEX))
    # Those that are met and not wanted are counted too: so it is known whether the walk came to its end.
    statement = f"""
        SELECT endpoint, last_error_code AS error_code, count(*) FILTER (WHERE wanted) AS count, count(*) AS met,
               min(died_at) FILTER (WHERE wanted) AS first_died_at, max(died_at) FILTER (WHERE wanted) AS last_died_at,
               max(id) FILTER (WHERE wanted) AS example
        FROM (SELECT d.id, d.died_at, d.endpoint, d.last_error_code, ({" AND ".join(wanted) or "true"}) AS wanted
              FROM (SELECT {columns} {walk} LIMIT %(look)s) d {_WITH_EVENT if of_event else ""}
              OFFSET 0) met
        GROUP BY endpoint, last_error_code
    """  # noqa: S608
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_IN_ORDER)
        found = cursor.execute(statement.encode(), params, prepare=False).fetchall()
        met = sum(group.pop("met") for group in found)
        found = [group for group in found if group["count"]]
        found.sort(key=lambda group: (-group["count"], group["endpoint"], group["error_code"] or ""))
        _add_examples(conn, found[:limit])
    return Groups(found[:limit], sum(group["count"] for group in found), among, complete=met < among)


def _add_examples(conn: psycopg.Connection[Any], found: list[dict[str, Any]]) -> None:
    rows = conn.execute(_EXAMPLES, {"ids": numbers(group["example"] for group in found)})
    said = {i: (failure_class, words) for i, failure_class, words in rows}
    for group in found:
        group["failure_class"], group["last_error"] = said.get(group["example"], (None, None))


def find(conn: psycopg.Connection[Any], delivery_id: int) -> dict[str, Any] | None:
    """One dead letter as in a page, and its ``attempts`` in the order of time; None when it is not dead."""
    with conn.cursor(row_factory=dict_row) as cursor:
        item = cursor.execute(_ONE, {"id": delivery_id}).fetchone()
        if item is None:
            return None
        _add_failures(conn, [item])
        item["attempts"] = cursor.execute(_ATTEMPTS, {"id": delivery_id}).fetchall()
        return item
