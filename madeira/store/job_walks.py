"""Ways through what a job is about: each by the one index that fits, counted for a preview and walked page by page.

A page goes on from a cursor and looks at no more than `LOOK` rows, however few of them are wanted. Statements call the delivery
``d`` and its event ``e``, as a selection does. An event without deliveries comes with a ``d`` that says what of it can be said: a
selection by what only a delivery has does not meet it.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import psycopg

from madeira.store.selection import Selection, conditions

#: Rows that one page looks at.
LOOK: Final = 2000

#: ``dead``: the dead deliveries of one endpoint, in the order of their events. ``unrouted``: dead events that no delivery
#: explains. ``pending``: events that wait for their routing. ``unfinished``: deliveries that have not ended.
Kind = Literal["dead", "unrouted", "pending", "unfinished"]

#: What a job does.
Action = Literal["replay", "cancel", "reroute"]

_BORN_DEAD: Final = "d.attempt = 0 AND d.failure_class IN ('template', 'policy')"

#: What stands for the delivery of an event that has none.
_NO_DELIVERY: Final = """
    CROSS JOIN LATERAL (SELECT NULL::bigint AS id, NULL::text AS endpoint, NULL::text AS failure_class, e.reason AS last_error,
                               NULL::text AS last_error_code, {died} AS died_at, e.created_at AS created_at) d
"""


class _Way(NamedTuple):
    """How the rows of a kind are found: in which table, beyond a cursor, and in which order."""

    table: str
    #: The index's own condition.
    within: str
    #: The columns by which the cursor goes.
    place: str
    joined: str
    #: What must hold besides; `before` is when the job was made.
    also: str


_OF_DELIVERY: Final = "JOIN event e ON e.seq = d.event_seq"

_WAYS: Final[dict[Kind, _Way]] = {
    "dead": _Way("delivery d", "d.died_at IS NOT NULL", "event_seq", _OF_DELIVERY, "d.died_at < %(before)s"),
    "unfinished": _Way("delivery d", "d.finished_at IS NULL", "id", _OF_DELIVERY, "e.created_at < %(before)s"),
    "unrouted": _Way(
        "event e",
        "e.reason IS NOT NULL",
        "seq",
        _NO_DELIVERY.format(died="e.updated_at"),
        "e.status = 'dead' AND e.reason IN ('unrouted', 'platform') AND e.updated_at < %(before)s",
    ),
    "pending": _Way(
        "event e",
        "e.route_at IS NOT NULL",
        "seq",
        _NO_DELIVERY.format(died="NULL::timestamptz"),
        "e.created_at < %(before)s",
    ),
}

#: The columns that a page needs; never the payload, which may be large.
_COLUMNS: Final = {
    "delivery d": "d.id, d.event_seq, d.endpoint, d.attempt, d.failure_class, d.last_error, d.last_error_code, d.died_at,"
    " d.created_at",
    "event e": "e.seq, e.source, e.event_id, e.event_type, e.reason, e.status, e.erased_at, e.created_at, e.updated_at",
}


class Row(NamedTuple):
    """One that is wanted."""

    #: Where the cursor stands behind it.
    place: int
    seq: int
    #: None: an event without a delivery.
    delivery_id: int | None
    #: Why nothing can be done with it, whatever happens; None when something may.
    why: str | None


class Page(NamedTuple):
    """The next that are wanted, in their order."""

    rows: list[Row]
    #: Where the next page begins; None when this was the last one.
    goes_on: int | None


def kinds(action: Action, among: str) -> tuple[Kind, ...]:
    """What a job is about, in the order in which it is walked."""
    if action == "replay":
        return ("dead",)
    if action == "reroute":
        return ("dead", "unrouted")
    # Events first: what is routed meanwhile is met among the deliveries.
    return ("dead",) if among == "dead" else ("pending", "unfinished")


def count(
    conn: psycopg.Connection[Any], kind: Kind, action: Action, selection: Selection, before: Any
) -> tuple[int, Sequence[str]]:
    """How many there are (of a reroute: events), and the endpoints by which they are walked; ``""`` where that is not so."""
    way, wanted, params = _asked(kind, action, selection, before)
    # Without a condition on the event there is no need to read it.
    joined = way.joined if any("e." in condition for condition in wanted) else ""
    found = f"FROM {way.table} {joined} WHERE {' AND '.join((way.within, *wanted))}"
    if kind != "dead":
        ((total,),) = conn.execute(f"SELECT count(*) {found}".encode(), params, prepare=False)
        return total, [""] if total else []
    groups = conn.execute(f"SELECT d.endpoint, count(*) {found} GROUP BY 1 ORDER BY 1".encode(), params, prepare=False).fetchall()
    total = sum(number for _, number in groups)
    if action == "reroute" and total:
        ((total,),) = conn.execute(f"SELECT count(DISTINCT d.event_seq) {found}".encode(), params, prepare=False)
    return total, [endpoint for endpoint, _ in groups]


def skips(conn: psycopg.Connection[Any], kind: Kind, action: Action, selection: Selection, before: Any) -> dict[str, int]:
    """How many of them nothing can be done with, by the reason."""
    why = _why(kind, action)
    if why.startswith("NULL"):
        return {}
    way, wanted, params = _asked(kind, action, selection, before)
    found = f"FROM {way.table} {way.joined} WHERE {' AND '.join((way.within, *wanted))}"
    statement = f"SELECT why, count(*) FROM (SELECT {why} AS why {found}) w WHERE why IS NOT NULL GROUP BY 1"  # noqa: S608
    return dict(conn.execute(statement.encode(), params, prepare=False).fetchall())


def sample(
    conn: psycopg.Connection[Any], kind: Kind, action: Action, selection: Selection, before: Any, limit: int
) -> list[dict[str, Any]]:
    """The first `limit` of them, as they are shown."""
    way, wanted, params = _asked(kind, action, selection, before)
    statement = f"""
        SELECT e.source, e.event_id, e.event_type, d.endpoint, coalesce(d.died_at, d.created_at) AS at,
               d.failure_class, d.last_error
        FROM {way.table} {way.joined} WHERE {" AND ".join((way.within, *wanted))}
        ORDER BY {way.table[-1]}.{way.place} LIMIT %(limit)s
    """  # noqa: S608
    with conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute(statement.encode(), params | {"limit": limit}, prepare=False).fetchall()


def page(
    conn: psycopg.Connection[Any],
    kind: Kind,
    action: Action,
    selection: Selection,
    before: Any,
    *,
    endpoint: str,
    cursor: int,
    limit: int,
) -> Page:
    """The next `limit` beyond `cursor`; locks nothing."""
    way, wanted, params = _asked(kind, action, selection, before)
    alias = way.table[-1]
    of_endpoint = "AND d.endpoint = %(endpoint)s" if kind == "dead" else ""
    seq, delivery_id = ("e.seq", "NULL::bigint") if alias == "e" else ("d.event_seq", "d.id")
    statement = f"""
        WITH looked AS MATERIALIZED (
            SELECT {_COLUMNS[way.table]} FROM {way.table}
            WHERE {way.within} {of_endpoint} AND {alias}.{way.place} > %(cursor)s
            ORDER BY {alias}.{way.place} LIMIT (SELECT %(look)s)),
        wanted AS MATERIALIZED (
            SELECT {alias}.{way.place} AS place, {seq} AS seq, {delivery_id} AS id, {_why(kind, action)} AS why
            FROM looked {alias} {way.joined} WHERE {" AND ".join(wanted)}
            ORDER BY {alias}.{way.place} LIMIT %(limit)s)
        SELECT w.place, w.seq, w.id, w.why, g.goes_on
        FROM (SELECT CASE WHEN (SELECT count(*) FROM wanted) = %(limit)s THEN (SELECT max(place) FROM wanted)
                          WHEN (SELECT count(*) FROM looked) = %(look)s THEN (SELECT max({way.place}) FROM looked)
                     END AS goes_on) g
        LEFT JOIN wanted w ON true
        ORDER BY w.place
    """  # noqa: S608
    params |= {"endpoint": endpoint, "cursor": cursor, "limit": limit, "look": LOOK}
    # Planned anew each time: a plan from before the table was analysed may walk all that has ended.
    found = conn.execute(statement.encode(), params, prepare=False).fetchall()
    return Page([Row(*row[:4]) for row in found if row[0] is not None], found[0][4])


def _asked(kind: Kind, action: Action, selection: Selection, before: Any) -> tuple[_Way, Sequence[str], dict[str, Any]]:
    way = _WAYS[kind]
    wanted, params = conditions(selection)
    if kind == "dead" and action == "reroute":
        wanted.append(_BORN_DEAD)
    return way, [way.also, *wanted], params | {"before": before}


def _why(kind: Kind, action: Action) -> str:
    if action == "cancel":
        return "NULL::text"
    erased = "WHEN e.erased_at IS NOT NULL THEN 'erased'"
    born_dead = f"WHEN {_BORN_DEAD} THEN 'born_dead'" if action == "replay" and kind == "dead" else ""
    return f"CASE {erased} {born_dead} END"
