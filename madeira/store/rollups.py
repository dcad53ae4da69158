"""What happened per minute and per hour, counted once, for charts that must not read the events themselves.

Nothing is counted where it happens: claim and settle know nothing of this. Counted is what their rows say afterwards, in the
order of ids: new events by `event.seq`, attempts and what they led to by `delivery_log.id`. Neither is ever given twice, both
are indexed already, and a row of the log never changes, so that the numbers stay true when a delivery is replayed meanwhile.
Ends that no attempt brought are noted by a trigger in `delivery_end`, and go from there as they are counted.

Ids are drawn before their rows are committed, so a cursor that just follows the highest id would pass by what commits late. So
a fence is set first, at the highest id that is visible, and nothing is counted until every transaction is over that was under
way at that moment (`pg_snapshot_xmin` tells, at no cost). An id that was drawn a moment before its transaction had a number is
covered by a second's wait on top; a transaction that somebody forgot holds the counting up for a few minutes at most, which is
longer than any of ours may live.

Numbers and cursor are written in one transaction that holds the cursor's row: two that count at once come one after another,
and one that dies in the middle has done nothing. Buckets are those of UTC.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import psycopg

from madeira.states import Outcome

#: What is kept: buckets of a minute, and of an hour.
Span = Literal["minute", "hour"]

#: For how long buckets are kept.
KEPT: Final[dict[Span, timedelta]] = {"minute": timedelta(days=2), "hour": timedelta(days=90)}

#: Upper bounds of the cells of the latency histogram, in seconds; one cell more holds what is beyond. Changing them needs a
#: migration: they are columns.
BOUNDS: Final = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0),
)

#: Classes of retries, each by its smallest number.
RETRIES: Final = {0: "0", 1: "1", 2: "2", 3: "3-4", 5: "5+"}

#: Rows that one step counts of each table; a step is one transaction.
PAGE: Final = 10_000

#: Rows that one step of the purge removes of each span.
PURGE_PAGE: Final = 10_000

#: Seconds for which a fence is left alone, so that whoever drew an id just before it is seen to be under way.
LAG_S: Final = 1.0

#: Seconds after which a fence counts as passed, whatever transaction is still under way.
PATIENCE_S: Final = 300.0

_ATTEMPTS: Final = tuple(str(outcome) for outcome in Outcome)

#: Column -> which of the rows in `item` it counts.
_COUNTS: Final = {
    "delivered": "ended = 'succeeded'",
    "dead": "ended = 'dead'",
    "cancelled": "ended = 'cancelled'",
    **{f"attempts_{outcome}": f"outcome = '{outcome}'" for outcome in _ATTEMPTS},
    "retries_0": "retries = 0",
    "retries_1": "retries = 1",
    "retries_2": "retries = 2",
    "retries_3": "retries IN (3, 4)",
    "retries_5": "retries >= 5",
    **{f"latency_{i}": f"cell = {i}" for i in range(len(BOUNDS) + 1)},
}

#: Each span, its unit, and since when its buckets are kept.
_SPANS: Final = "(VALUES {}) AS s (span, since)".format(
    ", ".join(f"('{span}', now() - interval '{kept.days} days')" for span, kept in KEPT.items())
)

#: Take hold of both cursors; tells which may go on, and to where.
_CURSORS: Final = """
    SELECT name, done, fence,
           fenced_at <= clock_timestamp() - %(lag_s)s * interval '1 s'
           AND (fence_xmax <= pg_snapshot_xmin(pg_current_snapshot())
                OR fenced_at <= clock_timestamp() - %(patience_s)s * interval '1 s')
    FROM rollup_cursor
    ORDER BY name
    FOR UPDATE
"""

#: Set a fence where there is none.
_SET_FENCES: Final = """
    UPDATE rollup_cursor
    SET fence = greatest(done, CASE name WHEN 'event' THEN (SELECT max(seq) FROM event)
                                         ELSE (SELECT max(id) FROM delivery_log) END),
        fence_xmax = pg_snapshot_xmax(pg_current_snapshot()), fenced_at = clock_timestamp()
    WHERE fence IS NULL
"""

#: Move a cursor; one that has come to its fence waits for the next one.
_MOVE: Final = """
    UPDATE rollup_cursor
    SET done = %(done)s,
        fence = CASE WHEN fence > %(done)s THEN fence END,
        fence_xmax = CASE WHEN fence > %(done)s THEN fence_xmax END,
        fenced_at = CASE WHEN fence > %(done)s THEN fenced_at END
    WHERE name = %(name)s
"""

#: Count a page of accepted events. Tells how many there were, and the last.
_COUNT_EVENTS: Final = f"""
    WITH page AS MATERIALIZED (
        SELECT seq, source, created_at FROM event
        WHERE seq > %(after)s AND seq <= %(until)s
        ORDER BY seq
        LIMIT %(limit)s),
    counted AS (
        INSERT INTO rollup_source AS r (span, bucket, source, accepted)
        SELECT s.span, date_trunc(s.span, p.created_at, 'UTC'), p.source, count(*)
        FROM page p JOIN {_SPANS} ON p.created_at >= s.since
        GROUP BY 1, 2, 3
        ON CONFLICT (span, bucket, source) DO UPDATE SET accepted = r.accepted + excluded.accepted)
    SELECT count(*), max(seq) FROM page
"""  # noqa: S608

#: The part of the two statements that follow which counts what `item` holds.
_COUNT_ITEMS: Final = """
    counted AS (
        INSERT INTO rollup_endpoint AS r (span, bucket, endpoint, {columns})
        SELECT s.span, date_trunc(s.span, i.at, 'UTC'), i.endpoint, {counts}
        FROM item i JOIN {spans} ON i.at >= s.since
        GROUP BY 1, 2, 3
        ON CONFLICT (span, bucket, endpoint) DO UPDATE SET {sums})
""".format(  # noqa: S608
    columns=", ".join(_COUNTS),
    counts=", ".join(f"count(*) FILTER (WHERE {which})" for which in _COUNTS.values()),
    spans=_SPANS,
    sums=", ".join(f"{column} = r.{column} + excluded.{column}" for column in _COUNTS),
)

#: Count a page of attempts. The lookups are lateral ones, so that they stay lookups whatever the planner thinks of the size
#: of the tables. Time is counted from when the event could go: an event with a time of its own is not late before it.
_COUNT_ATTEMPTS: Final = f"""
    WITH page AS MATERIALIZED (
        SELECT id, delivery_id, attempt, outcome, settled_as, recorded_at FROM delivery_log
        WHERE id > %(after)s AND id <= %(until)s
        ORDER BY id
        LIMIT %(limit)s),
    item AS MATERIALIZED (
        SELECT p.id, p.recorded_at AS at, d.endpoint, p.outcome, p.settled_as AS ended,
               CASE WHEN p.settled_as IN ('succeeded', 'dead', 'cancelled') THEN p.attempt - 1 END AS retries,
               width_bucket(extract(epoch FROM p.recorded_at - e.since)::float8, %(bounds)s::float8[]) AS cell
        FROM page p
        CROSS JOIN LATERAL (SELECT endpoint, event_seq FROM delivery WHERE id = p.delivery_id OFFSET 0) d
        LEFT JOIN LATERAL (SELECT greatest(created_at, deliver_at) AS since FROM event
                           WHERE seq = d.event_seq AND p.settled_as = 'succeeded' OFFSET 0) e ON true),
    {_COUNT_ITEMS}
    SELECT count(*), max(id) FROM page
"""  # noqa: S608

#: Count a page of ends that no attempt brought, and let go of them.
_COUNT_ENDS: Final = f"""
    WITH item AS (
        DELETE FROM delivery_end
        WHERE id IN (SELECT id FROM delivery_end ORDER BY id LIMIT %(limit)s)
        RETURNING id, at, endpoint, NULL::text AS outcome, status AS ended, retries, NULL::integer AS cell),
    {_COUNT_ITEMS}
    SELECT count(*) FROM item
"""  # noqa: S608

#: Remove buckets that are too old.
_PURGE: Final = """
    DELETE FROM {table}
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM {table} WHERE span = %(span)s AND bucket < now() - %(kept)s LIMIT %(limit)s))
"""


def set_fences(conn: psycopg.Connection[Any]) -> None:
    """Set a fence at the newest rows, where none is set; what is behind it can be counted once it has been passed."""
    conn.execute(_SET_FENCES)


class Step(NamedTuple):
    """What one step counted."""

    #: Rows.
    counted: int
    #: Whether there is more that can be counted now.
    more: bool


def step(conn: psycopg.Connection[Any], *, page: int = PAGE, lag_s: float = LAG_S) -> Step:
    """Count at most `page` rows of each kind, in one transaction."""
    counted, more = 0, False
    with conn.transaction():
        cursors = conn.execute(_CURSORS, {"lag_s": lag_s, "patience_s": PATIENCE_S}).fetchall()
        for name, done, fence, passed in cursors:
            if not passed:
                continue
            params = {"after": done, "until": fence, "limit": page, "bounds": list(BOUNDS)}
            ((rows, last),) = conn.execute(_COUNT_EVENTS if name == "event" else _COUNT_ATTEMPTS, params)
            full = rows == page and last < fence
            conn.execute(_MOVE, {"name": name, "done": last if full else fence})
            counted, more = counted + rows, more or full
        ((rows,),) = conn.execute(_COUNT_ENDS, {"limit": page})
    return Step(counted + rows, more or rows == page)


def purge(conn: psycopg.Connection[Any], limit: int = PURGE_PAGE) -> int:
    """Remove buckets that are kept no longer, at most `limit` of each kind; returns how many."""
    return sum(
        conn.execute(_PURGE.format(table=table).encode(), {"span": span, "kept": kept, "limit": limit}).rowcount
        for table in ("rollup_source", "rollup_endpoint")
        for span, kept in KEPT.items()
    )


# -- reading ----------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """A range of time up to now, as a chart shows it."""

    span: Span
    #: Time between two points.
    step: timedelta
    #: Number of points; the last one has just begun.
    points: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """What happened at an endpoint, or at all of them."""

    #: Deliveries that ended so. One that is replayed and ends again is counted again; so is a dead one that is cancelled.
    delivered: int = 0
    dead: int = 0
    cancelled: int = 0
    #: Outcome of `Outcome` -> attempts.
    attempts: tuple[tuple[str, int], ...] = ()
    #: Deliveries that ended, by the calls they took beyond the first: class -> how many.
    retries: tuple[tuple[str, int], ...] = ()
    #: Deliveries that succeeded, by the time from acceptance (or `deliver_at`) to success: one cell per bound, and one beyond.
    latency: tuple[int, ...] = ()

    def latency_s(self, share: float) -> float | None:
        """Seconds within which a `share` of the successes came, 0.95 for the p95; None without any.

        Within a cell it is taken that they came evenly. Beyond the last bound it is the last bound.
        """
        total = sum(self.latency)
        if not total:
            return None
        rank, below = share * total, 0
        for i, count in enumerate(self.latency[:-1]):
            if count and below + count >= rank:
                lower = BOUNDS[i - 1] if i else 0.0
                return lower + (BOUNDS[i] - lower) * max(0.0, rank - below) / count
            below += count
        return BOUNDS[-1]


class Point(NamedTuple):
    """One point of a series."""

    at: datetime
    #: Events accepted (0 in a series of one endpoint: an event belongs to none before it is routed).
    accepted: int
    numbers: Numbers


_SUMS: Final = ", ".join(f"coalesce(sum({column}), 0)::bigint" for column in _COUNTS)

#: The points of a range, empty ones included.
_POINTS: Final = """
    SELECT at FROM (SELECT date_bin(%(step)s, coalesce(%(now)s, now()), 'epoch'::timestamptz) AS last) l,
           generate_series(last - %(step)s * (%(points)s - 1), last, %(step)s) AS at
    ORDER BY at
"""

#: The same, with what happened at one endpoint or at all.
_SERIES: Final = f"""
    SELECT date_bin(%(step)s, bucket, 'epoch'::timestamptz), {_SUMS}
    FROM rollup_endpoint
    WHERE span = %(span)s AND bucket >= %(since)s AND (%(endpoint)s::text IS NULL OR endpoint = %(endpoint)s)
    GROUP BY 1
"""  # noqa: S608

#: Accepted events of all sources.
_ACCEPTED: Final = """
    SELECT date_bin(%(step)s, bucket, 'epoch'::timestamptz), sum(accepted)
    FROM rollup_source
    WHERE span = %(span)s AND bucket >= %(since)s
    GROUP BY 1
"""


def series(
    conn: psycopg.Connection[Any],
    of: Range,
    *,
    endpoint: str | None = None,
    now: datetime | None = None,
) -> list[Point]:
    """The points of a range up to `now` (the database's time), the earliest first; where nothing happened there are zeros.

    `endpoint` narrows it to one, by which accepted events are not counted.
    """
    params: dict[str, Any] = {"step": of.step, "points": of.points, "span": of.span, "now": now}
    at = [row[0] for row in conn.execute(_POINTS, params)]
    params |= {"since": at[0], "endpoint": endpoint}
    numbers = {row[0]: _numbers(row[1:]) for row in conn.execute(_SERIES, params)}
    accepted = dict(conn.execute(_ACCEPTED, params).fetchall()) if endpoint is None else {}
    return [Point(moment, int(accepted.get(moment, 0)), numbers.get(moment) or _NOTHING) for moment in at]


#: Slices of the last hour, and seconds of each.
SLICES: Final = 12
SLICE_S: Final = 300

#: How the attempts at each endpoint went, in slices of the hour that has been counted; the last minutes are not.
_SLICES: Final = f"""
    SELECT endpoint, floor(extract(epoch FROM bucket - since) / {SLICE_S})::integer,
           sum(attempts_succeeded)::bigint, sum({" + ".join(f"attempts_{o}" for o in _ATTEMPTS if o != Outcome.LATE)})::bigint
    FROM rollup_endpoint, (SELECT date_trunc('minute', now()) - interval '61 minutes' AS since) s
    WHERE span = 'minute' AND bucket >= since AND bucket < since + {SLICES * SLICE_S} * interval '1 s'
    GROUP BY 1, 2
    ORDER BY 1, 2
"""  # noqa: S608


class Slice(NamedTuple):
    """Five minutes of the last hour at one endpoint."""

    #: From 0; the latest is `SLICES` - 1.
    number: int
    succeeded: int
    #: Without those that came too late.
    attempts: int


def slices(conn: psycopg.Connection[Any]) -> dict[str, list[Slice]]:
    """How the attempts at each endpoint went in the last hour; where nothing was tried there is none."""
    found: dict[str, list[Slice]] = {}
    for endpoint, *rest in conn.execute(_SLICES):
        found.setdefault(endpoint, []).append(Slice(*rest))
    return found


def _numbers(row: Sequence[int]) -> Numbers:
    delivered, dead, cancelled, *rest = row
    attempts, rest = rest[: len(_ATTEMPTS)], rest[len(_ATTEMPTS) :]
    retries, latency = rest[: len(RETRIES)], rest[len(RETRIES) :]
    return Numbers(
        delivered,
        dead,
        cancelled,
        tuple(zip(_ATTEMPTS, attempts, strict=True)),
        tuple(zip(RETRIES.values(), retries, strict=True)),
        tuple(latency),
    )


_NOTHING: Final = _numbers([0] * len(_COUNTS))
