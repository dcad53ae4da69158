"""Lists of events, newest first, page by page, whatever the size of the table.

A page goes on from a place in the order of acceptance (keyset) and counts nothing. It looks at no more than `LOOK` events
however few of them match; where it stopped the next page goes on. What narrows the walk by an index is the source or the
trace; the other conditions are asked of each event that is met. Times are found by halving, since `seq` rises with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import dict_row

from madeira.states import EventStatus
from madeira.store.columns import numbers

#: Events that one page looks at.
LOOK: Final = 10_000

#: Events accepted together may be out of step with their times by this much: an INSERT that waited, a clock put right.
SLACK: Final = timedelta(minutes=2)

#: The end of the order of acceptance.
_NEWEST: Final = 2**63 - 1

#: What an event shows of itself in a list: all but payload and parameters.
_COLUMNS: Final = """
    seq, event_id, event_type, source, target_uri, routing_key, created_at, updated_at, trace_id, retry_count, status, reason,
    deliver_at, routed_at, erased_at, erased_by, deliveries AS delivery_count, unfinished, dead, cancelled
"""


class _Walk(NamedTuple):
    """A way through the events by the one index that fits, so that none is passed that the walk does not count."""

    where: str
    order: str


_ALL: Final = _Walk("seq < %(before)s AND seq >= %(floor)s", "seq DESC")
_PENDING: Final = _Walk("route_at IS NOT NULL AND seq < %(before)s AND seq >= %(floor)s", "seq DESC")
#: Its index is over this expression, so that statements about one event cannot be led to it by an old plan.
_OF_SOURCE: Final = _Walk(
    "(source || '', seq) < (%(source)s, %(before)s) AND (source || '', seq) >= (%(source)s, %(floor)s)",
    "source || '' DESC, seq DESC",
)
_OF_TRACE: Final = _Walk(
    "(trace_id, seq) < (%(trace_id)s, %(before)s) AND (trace_id, seq) >= (%(trace_id)s, %(floor)s)", "trace_id DESC, seq DESC"
)

#: What is asked of each event that is met.
_CONDITIONS: Final[Mapping[str, str]] = {
    "status": "status = %(status)s",
    "event_type": "event_type = %(event_type)s",
    "type_prefix": "starts_with(event_type, %(type_prefix)s)",
    "source": "source = %(source)s",
    "trace_id": "trace_id = %(trace_id)s",
    "since": "created_at >= %(since)s",
    "until": "created_at < %(until)s",
    # OFFSET 0: asked of each event by itself, never as a join, which would not keep the order.
    "endpoint": "EXISTS (SELECT FROM delivery d WHERE d.event_seq = e.seq AND d.endpoint = %(endpoint)s OFFSET 0)",
    # The beginning of a payload: it may be large, and ten thousand of them are looked through.
    "words": """
        strpos(lower(concat_ws(' ', event_id, event_type, routing_key, target_uri, reason)), %(words)s) > 0
        OR EXISTS (SELECT FROM event p WHERE p.seq = e.seq AND strpos(lower(left(p.payload, 10000)), %(words)s) > 0 OFFSET 0)
        OR EXISTS (SELECT FROM delivery d WHERE d.event_seq = e.seq AND strpos(lower(d.last_error), %(words)s) > 0 OFFSET 0)
    """,
}

#: Has an index read in its order, a row at a time: while Postgres has not counted the rows of a table it believes that there
#: are few, and that reading all and sorting them is as good (tried: 700 ms for a page that takes 3).
_IN_ORDER: Final = "SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)"

#: How the deliveries of some events stand.
_DELIVERIES: Final = """
    SELECT event_seq, id, endpoint, status, attempt, failure_class
    FROM delivery
    WHERE event_seq = ANY(%(seqs)s::bigint[])
"""

#: The first and the last event that there are.
_ENDS: Final = "SELECT min(seq), max(seq) FROM event"

#: When the next event from some place on was accepted.
_MOMENT: Final = "SELECT created_at FROM event WHERE seq >= %(seq)s ORDER BY seq LIMIT 1"


class Page(NamedTuple):
    """A page of a list."""

    events: list[dict[str, Any]]
    #: The place from which the next page goes on; None when there is nothing further.
    before: int | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events a list holds: those that match all that is given."""

    status: EventStatus | None = None
    #: A type, or the beginning of one and a ``*``.
    event_type: str | None = None
    source: str | None = None
    #: Events with a delivery to this endpoint.
    endpoint: str | None = None
    trace_id: str | None = None
    #: Accepted at this time or later.
    since: datetime | None = None
    #: Accepted before this time.
    until: datetime | None = None
    #: A text that stands in what an event says of itself, in the beginning of its payload, or in the last error of a delivery;
    #: small and large letters are alike.
    words: str | None = None


def page(conn: psycopg.Connection[Any], wanted: Wanted, *, limit: int, before: int | None = None) -> Page:
    """The newest `limit` events below the place `before` that are wanted, each with its ``deliveries`` in short.

    A page may be short or empty and yet have a next one: then it has looked at as many events as it may.
    """
    params, conditions = _asked(wanted)
    params |= {"limit": limit, "look": LOOK, **_between(conn, wanted, before)}
    where, order = _walk(wanted)
    asked = " AND ".join(f"({_CONDITIONS[name]})" for name in conditions) or "true"
    walk = f"FROM event WHERE {where} ORDER BY {order}"
    # What is met is asked one by one, in the order of the walk: nothing here is joined or sorted.
    statement = f"SELECT * FROM (SELECT {_COLUMNS} {walk} LIMIT %(look)s) e WHERE {asked} LIMIT %(limit)s"  # noqa: S608
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(_IN_ORDER)
        found = cursor.execute(statement.encode(), params).fetchall()
        _add_deliveries(cursor, found)
        if len(found) == limit:
            return Page(found, found[-1]["seq"])
        last = cursor.execute(f"SELECT seq {walk} OFFSET %(look)s - 1 LIMIT 1".encode(), params).fetchone()
        return Page(found, last["seq"] if last else None)


def _asked(wanted: Wanted) -> tuple[dict[str, Any], list[str]]:
    """The parameters of a list, and the names of its conditions."""
    params: dict[str, Any] = {
        name: value
        for name in ("status", "source", "endpoint", "trace_id", "since", "until")
        if (value := getattr(wanted, name)) is not None
    }
    if wanted.words is not None:
        params["words"] = wanted.words.lower()
    kind = wanted.event_type
    if kind is not None and kind.endswith("*"):
        params["type_prefix"] = kind[:-1]
    elif kind is not None:
        params["event_type"] = kind
    return params, [name for name in _CONDITIONS if name in params]


def _walk(wanted: Wanted) -> _Walk:
    if wanted.trace_id is not None:
        return _OF_TRACE
    if wanted.status is EventStatus.PENDING:
        return _PENDING
    return _ALL if wanted.source is None else _OF_SOURCE


def _between(conn: psycopg.Connection[Any], wanted: Wanted, before: int | None) -> dict[str, int]:
    """The part of the order of acceptance in which everything that is wanted lies."""
    floor, ceiling = 0, _NEWEST if before is None else before
    if wanted.since is not None or wanted.until is not None:
        find = _finder(conn)
        if wanted.since is not None:
            floor = find(wanted.since, -SLACK)
        if wanted.until is not None:
            ceiling = min(ceiling, find(wanted.until, SLACK))
    return {"floor": floor, "before": ceiling}


def _finder(conn: psycopg.Connection[Any]) -> Callable[[datetime, timedelta], int]:
    """Finds the place of the first event that was accepted at some time or later; about 20 look-ups in the primary key."""
    row = conn.execute(_ENDS).fetchone()
    first, last = row if row and row[0] is not None else (1, 0)

    def find(moment: datetime, slack: timedelta) -> int:
        low, high = first, last + 1
        while low < high:
            middle = (low + high) // 2
            found = conn.execute(_MOMENT, {"seq": middle}).fetchone()
            if found is not None and found[0] - moment < slack:
                low = middle + 1
            else:
                high = middle
        return int(low)

    return find


def _add_deliveries(cursor: psycopg.Cursor[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    by_seq: dict[int, list[dict[str, Any]]] = {event["seq"]: [] for event in events}
    if by_seq:
        for delivery in cursor.execute(_DELIVERIES, {"seqs": numbers(by_seq)}):
            by_seq[delivery.pop("event_seq")].append(delivery)
    for event in events:
        event["deliveries"] = sorted(by_seq[event["seq"]], key=lambda delivery: int(delivery["id"]))
