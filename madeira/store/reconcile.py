"""What Postgres says is unfinished, page by page, for comparing it with the broker and for rebuilding it.

Every reader is bounded and goes on from the last key it gave (keyset), so that a page costs the same whatever the backlog. Its
limit is written as a question, `LIMIT (SELECT n)`: a planner that knows the limit and takes the table for a small one, as it does
until the rows have been counted, reads all that is unfinished and sorts it; one that does not know it follows the index.
What changed lately is found without an index on a time of change, which every claim would have to write: new rows have
the highest ids, and whatever else changed left a new row in ``delivery_log``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus
from madeira.store.columns import numbers
from madeira.store.ordering import IS_FIRST

#: Whoever compares holds it.
LEASE: Final = "reconcile"

#: Seconds after which a run is late: there is one every minute.
LATE_S: Final = 180.0

#: Seconds until a delivery may be called or taken over.
_DELAY: Final = """
    greatest(0, extract(epoch FROM CASE WHEN d.status = 'delivering' THEN d.lease_until ELSE d.next_attempt_at END
                        - clock_timestamp()))::float8
"""

#: Events that wait for their routing.
_UNROUTED: Final = """
    SELECT seq, greatest(0, extract(epoch FROM route_at - clock_timestamp()))::float8
    FROM event
    WHERE route_at IS NOT NULL AND seq > %(after)s AND updated_at <= now() - %(older_than_s)s * interval '1 s'
    ORDER BY seq
    LIMIT (SELECT %(limit)s)
"""

#: Unfinished deliveries.
_UNFINISHED: Final = f"""
    SELECT d.id, d.event_seq, d.lane, {_DELAY}, d.line, d.status, d.ordering_key IS NOT NULL, {IS_FIRST}
    FROM delivery d
    WHERE d.finished_at IS NULL AND d.id > %(after)s AND d.updated_at <= now() - %(older_than_s)s * interval '1 s'
    ORDER BY d.id
    LIMIT (SELECT %(limit)s)
"""  # noqa: S608

#: Unfinished deliveries among the newest rows and those of the newest attempts. As an array, so that they are found first
#: and then looked up, whatever the planner thinks of their number.
_RECENT: Final = f"""
    SELECT d.id, d.event_seq, d.lane, {_DELAY}, d.line, d.status, d.ordering_key IS NOT NULL, {IS_FIRST}
    FROM (SELECT * FROM delivery WHERE id = ANY (ARRAY(
        (SELECT n.id FROM (SELECT id, created_at FROM delivery ORDER BY id DESC LIMIT %(limit)s) n
         WHERE n.created_at >= now() - %(since_s)s * interval '1 s')
        UNION
        (SELECT n.delivery_id FROM (SELECT delivery_id, recorded_at FROM delivery_log ORDER BY id DESC LIMIT %(limit)s) n
         WHERE n.recorded_at >= now() - %(since_s)s * interval '1 s'))) OFFSET 0) d
    WHERE d.finished_at IS NULL AND d.updated_at <= now() - %(older_than_s)s * interval '1 s'
    ORDER BY d.id
"""  # noqa: S608

#: What should have been called or taken over by now, the longest overdue first. What is not the first of its ordering key waits
#: rightly, and must not fill the page; it is passed over, as far as one may look.
_OVERDUE: Final = f"""
    SELECT d.id, d.event_seq, d.lane, {_DELAY}, d.line, d.status, d.ordering_key IS NOT NULL, true
    FROM (SELECT * FROM delivery
          WHERE finished_at IS NULL AND next_attempt_at < now() - %(older_than_s)s * interval '1 s'
          ORDER BY next_attempt_at
          LIMIT (SELECT 10 * %(limit)s)) d
    WHERE d.updated_at <= now() - %(older_than_s)s * interval '1 s'
          AND (d.status = 'pending' OR d.lease_until < now() - %(older_than_s)s * interval '1 s') AND {IS_FIRST}
    ORDER BY d.next_attempt_at
    LIMIT (SELECT %(limit)s)
"""  # noqa: S608

#: What workers hold, by Postgres' account. This one runs through the backlog, once in a rebuild: an index for it would have
#: to be written by every claim and every settle.
_DELIVERING: Final = """
    SELECT d.id, d.event_seq, d.lane, greatest(0, extract(epoch FROM d.lease_until - clock_timestamp()))::float8,
           d.claim_token::text
    FROM delivery d
    WHERE d.finished_at IS NULL AND d.status = 'delivering' AND d.id > %(after)s
    ORDER BY d.id
    LIMIT %(limit)s
"""

#: Which of some deliveries are still unfinished. `OFFSET 0` keeps the two questions apart: asked at once, a partial index of
#: all that is unfinished looks cheap to a planner that last saw it empty.
_STILL_UNFINISHED: Final = """
    SELECT id FROM (SELECT id, finished_at FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    WHERE finished_at IS NULL
"""

#: Which of some deliveries still must be queued.
_STILL_FIRST: Final = f"""
    SELECT d.id FROM (SELECT * FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    WHERE d.finished_at IS NULL AND {IS_FIRST}
"""  # noqa: S608

#: Which of some events still wait for their routing.
_STILL_UNROUTED: Final = """
    SELECT seq FROM (SELECT seq, route_at FROM event WHERE seq = ANY(%(ids)s::bigint[]) OFFSET 0) e
    WHERE route_at IS NOT NULL
"""

#: Which of some deliveries are still dead letters that nobody was told of.
_STILL_UNNOTIFIED: Final = """
    SELECT id FROM (SELECT id, died_at, notified_at FROM delivery WHERE id = ANY(%(ids)s::bigint[]) OFFSET 0) d
    WHERE died_at IS NOT NULL AND notified_at IS NULL
"""

#: Dead letters that nobody was told of.
_DEAD_UNNOTIFIED: Final = """
    SELECT id, event_seq, lane
    FROM delivery
    WHERE died_at IS NOT NULL AND notified_at IS NULL AND id > %(after)s
          AND died_at <= now() - %(older_than_s)s * interval '1 s'
    ORDER BY id
    LIMIT (SELECT %(limit)s)
"""

#: Note what a run found.
_RECORD_RUN: Final = """
    INSERT INTO reconcile_run (duration_s, holder, counts, slice_from)
    VALUES (%(duration_s)s, %(holder)s, %(counts)s, %(slice_from)s)
"""

#: The latest runs.
_LAST_RUNS: Final = """
    SELECT finished_at, extract(epoch FROM clock_timestamp() - finished_at)::float8 AS age_s, duration_s, holder, counts,
           slice_from
    FROM reconcile_run
    ORDER BY id DESC
    LIMIT %(limit)s
"""


class Unfinished(NamedTuple):
    """An unfinished delivery; the delay of `ref` runs to its due time, or to its lease's end while a worker holds it."""

    ref: DeliveryRef
    #: ``PENDING`` or ``DELIVERING``.
    status: DeliveryStatus
    #: Whether it goes in an order with others.
    is_ordered: bool = False
    #: Whether it is to be queued: False for what waits behind another one of its ordering key.
    is_first: bool = True


class Held(NamedTuple):
    """A delivery that a worker holds, by Postgres' account."""

    ref: DeliveryRef
    #: Seconds left of the lease; 0 when it has run out.
    lease_s: float
    token: str


def unrouted(conn: psycopg.Connection[Any], after_seq: int, limit: int, *, older_than_s: float = 0.0) -> list[tuple[int, float]]:
    """Events to be routed, as (seq, seconds until then), from `after_seq` on (not included)."""
    params = {"after": after_seq, "limit": limit, "older_than_s": older_than_s}
    return conn.execute(_UNROUTED, params, binary=True).fetchall()


def unfinished_deliveries(
    conn: psycopg.Connection[Any], after_id: int, limit: int, *, older_than_s: float = 0.0
) -> list[Unfinished]:
    """Pending and delivering deliveries not touched for `older_than_s` seconds, from `after_id` on (not included)."""
    return _unfinished(conn, _UNFINISHED, {"after": after_id, "limit": limit, "older_than_s": older_than_s})


def recently_changed(conn: psycopg.Connection[Any], since_s: float, limit: int, *, older_than_s: float = 0.0) -> list[Unfinished]:
    """Unfinished deliveries born or tried in the last `since_s` seconds, among the newest `limit` of both kinds."""
    return _unfinished(conn, _RECENT, {"since_s": since_s, "limit": limit, "older_than_s": older_than_s})


def overdue(conn: psycopg.Connection[Any], limit: int, *, older_than_s: float = 5.0) -> list[Unfinished]:
    """Deliveries due, or with a lease run out, for more than `older_than_s` seconds; the longest overdue first."""
    return _unfinished(conn, _OVERDUE, {"limit": limit, "older_than_s": older_than_s})


def _unfinished(conn: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> list[Unfinished]:
    rows = conn.execute(statement, params, binary=True)
    return [Unfinished(DeliveryRef(*row[:5]), DeliveryStatus(row[5]), *row[6:]) for row in rows]


def delivering(conn: psycopg.Connection[Any], after_id: int, limit: int) -> list[Held]:
    """What workers hold now, from `after_id` on (not included)."""
    rows = conn.execute(_DELIVERING, {"after": after_id, "limit": limit}, binary=True)
    return [Held(DeliveryRef(*ref), ref[3], token) for *ref, token in rows]


def finished_among(conn: psycopg.Connection[Any], ids: Sequence[int]) -> set[int]:
    """Which of the deliveries `ids` are finished or gone."""
    return set(ids) - {row[0] for row in conn.execute(_STILL_UNFINISHED, {"ids": numbers(ids)}, binary=True)}


def not_first_among(conn: psycopg.Connection[Any], ids: Sequence[int]) -> set[int]:
    """Which of the deliveries `ids` need not be queued: those that are finished, gone, or behind another one of their key."""
    return set(ids) - {row[0] for row in conn.execute(_STILL_FIRST, {"ids": numbers(ids)}, binary=True)}


def finished_events_among(conn: psycopg.Connection[Any], seqs: Sequence[int]) -> set[int]:
    """Which of the events `seqs` need no routing any more, or are gone."""
    return set(seqs) - {row[0] for row in conn.execute(_STILL_UNROUTED, {"ids": numbers(seqs)}, binary=True)}


def notified_among(conn: psycopg.Connection[Any], ids: Sequence[int]) -> set[int]:
    """Of which of the deliveries `ids` nobody need be told: those that were, are not dead any more, or are gone."""
    return set(ids) - {row[0] for row in conn.execute(_STILL_UNNOTIFIED, {"ids": numbers(ids)}, binary=True)}


def dead_unnotified(conn: psycopg.Connection[Any], after_id: int, limit: int, *, older_than_s: float = 0.0) -> list[DeliveryRef]:
    """Dead letters of more than `older_than_s` seconds that nobody was told of, from `after_id` on (not included)."""
    params = {"after": after_id, "limit": limit, "older_than_s": older_than_s}
    rows = conn.execute(_DEAD_UNNOTIFIED, params, binary=True)
    return [DeliveryRef(*row) for row in rows]


def record_run(
    conn: psycopg.Connection[Any], counts: Mapping[str, int], duration_s: float, holder: str, slice_from: int = 0
) -> None:
    """Note what a run found (kind of difference -> how many) and at which delivery the next slice begins."""
    params = {"duration_s": duration_s, "holder": holder, "counts": Jsonb(dict(counts)), "slice_from": slice_from}
    conn.execute(_RECORD_RUN, params)


def last_runs(conn: psycopg.Connection[Any], limit: int) -> list[dict[str, Any]]:
    """The latest runs, the last one first: ``finished_at``, ``age_s``, ``duration_s``, ``holder``, ``counts``, ``slice_from``."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_LAST_RUNS, {"limit": limit}).fetchall()
