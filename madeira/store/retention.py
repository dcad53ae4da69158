"""What goes in time: payloads of what has ended, events with their deliveries, ids, audit entries; each after its own age.

Every step is one short transaction over a bounded page, and waits for no disk; whoever calls decides when to rest. Nothing
unfinished goes, nothing that an unfinished job may be about, nothing that the roll-ups have not counted yet, and no dead letter
of which nobody was told.

An event goes in two steps. First its tombstone is written and its number noted (`bury`); a while later the event goes with its
deliveries (`remove`), unless anything was done with it since. In between both are there: an insert that began before the
tombstone was committed would not see it, but sees the event. So at every moment a known id is known.

The walk over the events goes in the order of acceptance and remembers where it was, since the beginning of the table is full of
what was removed and not vacuumed yet. It begins anew now and then, for the sake of what it had to pass by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from madeira.settings import Settings
from madeira.store import audit, erase
from madeira.store.columns import numbers
from madeira.store.database import unhurried

#: Events of a page: what a post may have to wait for is what one page writes.
PAGE: Final = 250

#: Between the commit of a tombstone and the removal of its event. No insert lives as long.
WAIT: Final = timedelta(seconds=75)

#: After which a walk that came to its end begins anew.
AGAIN: Final[dict[str, timedelta]] = {"payload": timedelta(days=7), "event": timedelta(hours=6)}

#: How far behind the counting of the roll-ups everything stays.
_BEHIND_COUNTING: Final = timedelta(hours=1)

#: Before everything.
_NEVER: Final = datetime(1, 1, 2, tzinfo=UTC)

#: Who removes what goes by itself, as the audit calls it.
WHO: Final = "retention"

Kind = Literal["payload", "event"]

#: Until when the roll-ups have counted, and since when there are jobs that have not ended: what they may be about stays.
_BOUNDS: Final = """
    SELECT clock_timestamp(),
           (SELECT done FROM rollup_cursor WHERE name = 'event'),
           (SELECT recorded_at FROM delivery_log
            WHERE id > (SELECT done FROM rollup_cursor WHERE name = 'delivery_log') ORDER BY id LIMIT 1),
           (SELECT min(created_at) FROM job WHERE finished_at IS NULL)
"""

#: Take hold of a walk.
_WALK: Final = "SELECT after FROM retention_walk WHERE kind = %(kind)s FOR UPDATE"

#: Begin a walk anew that came to its end, when it is long since it began.
_WALK_AGAIN: Final = """
    UPDATE retention_walk SET after = 0, began_at = clock_timestamp()
    WHERE kind = %(kind)s AND began_at < clock_timestamp() - %(again)s
"""

_MOVE_WALK: Final = "UPDATE retention_walk SET after = %(after)s WHERE kind = %(kind)s"

#: The page that a step looks at: only what was accepted before anything of it can be due.
_PAGE: Final = """
    page AS MATERIALIZED (
        SELECT seq, source, event_id, trace_id, status, body_sha256, created_at, updated_at, erased_at FROM event
        WHERE seq > %(after)s AND seq <= %(counted)s
        ORDER BY seq
        LIMIT (SELECT %(limit)s))
"""

#: Which of a page may go: it has ended long enough ago, and no job that has not ended can be about it.
_MAY_GO: Final = """
    (status = 'succeeded' AND updated_at < %(succeeded)s
     OR status = 'cancelled' AND updated_at < %(cancelled)s
     OR status = 'dead' AND updated_at < %(dead)s AND %(jobs_since)s::timestamptz IS NULL)
    AND (%(jobs_since)s::timestamptz IS NULL OR updated_at < %(jobs_since)s)
"""

#: Write the tombstones of a page, and note whose they are.
_BURY: Final = f"""
    WITH {_PAGE},
    due AS MATERIALIZED (
        SELECT * FROM page p
        WHERE {_MAY_GO}
              AND (status <> 'dead' OR NOT EXISTS (
                  SELECT FROM delivery d
                  WHERE d.event_seq = p.seq AND d.died_at IS NOT NULL AND d.notified_at IS NULL))),
    buried AS (
        INSERT INTO tombstone (event_id, source, seq, trace_id, status, body_sha256, created_at, ended_at)
        SELECT event_id, source, seq, trace_id, status, body_sha256, created_at, updated_at
        FROM due
        ORDER BY event_id COLLATE "C", source COLLATE "C"
        ON CONFLICT DO NOTHING
        RETURNING seq),
    noted AS (
        INSERT INTO burial (seqs) SELECT array_agg(seq ORDER BY seq) FROM buried HAVING count(*) > 0)
    SELECT count(*), max(seq), max(created_at), (SELECT count(*) FROM buried) FROM page
"""  # noqa: S608

#: A batch that has waited for its time.
_BATCH: Final = """
    SELECT id, seqs FROM burial WHERE at < clock_timestamp() - %(wait)s ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
"""

#: Take hold of those of a batch with which nothing was done since.
_LOCK: Final = f"""
    SELECT e.seq, e.status
    FROM event e
    CROSS JOIN LATERAL (SELECT seq, status, ended_at FROM tombstone
                        WHERE event_id = e.event_id AND source = e.source OFFSET 0) t
    WHERE e.seq = ANY(%(seqs)s::bigint[]) AND t.seq = e.seq AND e.status = t.status AND e.updated_at = t.ended_at
          AND e.unfinished = 0 AND {_MAY_GO.replace("status", "e.status").replace("updated_at", "e.updated_at")}
    ORDER BY e.seq
    FOR UPDATE OF e
"""  # noqa: S608

_REMOVE_DELIVERIES: Final = "DELETE FROM delivery WHERE event_seq = ANY(%(seqs)s::bigint[])"
_REMOVE_EVENTS: Final = "DELETE FROM event WHERE seq = ANY(%(seqs)s::bigint[])"
_REMOVE_BURIAL: Final = "DELETE FROM burial WHERE id = %(id)s"

#: Take the tombstones away of events that are still there.
_SPARE: Final = """
    DELETE FROM tombstone WHERE ctid = ANY (ARRAY(
        SELECT t.ctid FROM event e
        CROSS JOIN LATERAL (SELECT ctid, seq FROM tombstone
                            WHERE event_id = e.event_id AND source = e.source OFFSET 0) t
        WHERE e.seq = ANY(%(seqs)s::bigint[]) AND t.seq = e.seq))
"""

#: Take the payloads of a page away; of what goes as a whole by now they go with it. The digest stays, by which the same post is
#: told a duplicate.
_STRIP: Final = f"""
    WITH {_PAGE},
    due AS MATERIALIZED (
        SELECT seq FROM page
        WHERE erased_at IS NULL AND {_MAY_GO}
              AND updated_at >= CASE status WHEN 'succeeded' THEN %(goes_succeeded)s::timestamptz
                                            ELSE %(goes_cancelled)s::timestamptz END),
    locked AS MATERIALIZED (
        SELECT e.seq FROM event e
        WHERE e.seq = ANY (ARRAY(SELECT seq FROM due)) AND e.erased_at IS NULL AND e.status IN ('succeeded', 'cancelled')
        ORDER BY e.seq
        FOR NO KEY UPDATE),
    stripped AS (
        UPDATE event e
        SET {erase.OF_PAYLOAD}, erased_at = clock_timestamp(), erased_by = 'retention'
        WHERE e.seq = ANY (ARRAY(SELECT seq FROM locked))
        RETURNING e.seq),
    bodies AS (
        UPDATE delivery SET body = NULL WHERE event_seq = ANY (ARRAY(SELECT seq FROM stripped)) AND body IS NOT NULL)
    SELECT count(*), max(seq), max(created_at), (SELECT count(*) FROM stripped) FROM page
"""  # noqa: S608

#: Remove a page of what is old, of tables that nothing refers to.
_REMOVE_OLD: Final = {
    "tombstone": """
        DELETE FROM tombstone WHERE ctid = ANY (ARRAY(
            SELECT t.ctid FROM tombstone t
            WHERE t.buried_at < now() - %(age)s ORDER BY t.buried_at LIMIT %(limit)s))
    """,
    "audit": """
        DELETE FROM audit WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM audit WHERE at < now() - %(age)s ORDER BY at, id LIMIT %(limit)s))
    """,
}

#: What would go of the events, if it were done now.
_WOULD_GO: Final = f"""
    SELECT count(*) FILTER (WHERE {_MAY_GO}) FROM event WHERE seq <= %(counted)s
"""  # noqa: S608

#: The counts of today, which the first step of a day begins.
_DAY: Final = """
    INSERT INTO retention_day AS r (day, counts) VALUES ((clock_timestamp() AT TIME ZONE 'UTC')::date, %(counts)s)
    ON CONFLICT (day) DO UPDATE SET last_at = clock_timestamp(), counts = (
        SELECT jsonb_object_agg(key, coalesce((r.counts ->> key)::bigint, 0) + coalesce((excluded.counts ->> key)::bigint, 0))
        FROM jsonb_object_keys(r.counts || excluded.counts) AS key)
    RETURNING day, counts, audit_id
"""

_SET_AUDIT: Final = "UPDATE retention_day SET audit_id = %(audit_id)s WHERE day = %(day)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """After how long what goes; None: never. Events and payloads count from their end, all else from when it was written."""

    payload: timedelta | None = None
    succeeded: timedelta | None = None
    cancelled: timedelta | None = None
    dead: timedelta | None = None
    attempts: timedelta | None = None
    #: Of ids, from when their events were removed.
    tombstone: timedelta | None = None
    audit: timedelta | None = None


def ages_of(settings: Settings) -> Ages:
    """What the settings ask for; 0 days are never."""

    def age(days: int) -> timedelta | None:
        return timedelta(days=days) if days else None

    return Ages(
        payload=age(settings.keep_payload_days),
        succeeded=age(settings.keep_succeeded_days),
        cancelled=age(settings.keep_cancelled_days),
        dead=age(settings.keep_dead_days),
        attempts=age(settings.keep_attempts_days),
        tombstone=age(settings.keep_ids_days),
        audit=age(settings.keep_audit_days),
    )


class Step(NamedTuple):
    """What one step did."""

    #: How many went, or were prepared to.
    done: int
    #: Whether there is more to do at once.
    more: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """What holds things back at a moment."""

    now: datetime
    #: The last event that the roll-ups have counted.
    counted: int
    #: Nothing that ended later goes, since its attempts may not be counted yet.
    counted_until: datetime
    #: When the oldest job was made that has not ended.
    jobs_since: datetime | None

    def before(self, age: timedelta | None) -> datetime | None:
        """What ended before this may go; None: nothing may."""
        return None if age is None else min(self.now - age, self.counted_until)


def bounds(conn: psycopg.Connection[Any]) -> Bounds:
    """What holds things back now."""
    ((now, counted, uncounted, jobs_since),) = conn.execute(_BOUNDS).fetchall()
    return Bounds(now, counted, now if uncounted is None else min(now, uncounted - _BEHIND_COUNTING), jobs_since)


def strip(conn: psycopg.Connection[Any], ages: Ages, page: int = PAGE) -> Step:
    """Take the payloads of a page of events away that succeeded or were cancelled long enough ago.

    Dead letters keep theirs for as long as they are there: it is what a replay sends.
    """
    held = bounds(conn)
    before = held.before(ages.payload)
    cutoffs = {"succeeded": before, "cancelled": before, "dead": None}
    goes = {f"goes_{status}": cutoff or _NEVER for status, cutoff in _cutoffs(held, ages).items()}
    return _walk(conn, "payload", _STRIP, held, cutoffs, page, **goes)


def bury(conn: psycopg.Connection[Any], ages: Ages, page: int = PAGE) -> Step:
    """Prepare the removal of a page of events: write their tombstones."""
    held = bounds(conn)
    return _walk(conn, "event", _BURY, held, _cutoffs(held, ages), page)


def _cutoffs(held: Bounds, ages: Ages) -> dict[str, datetime | None]:
    return {status: held.before(getattr(ages, status)) for status in ("succeeded", "cancelled", "dead")}


def _walk(
    conn: psycopg.Connection[Any],
    kind: Kind,
    statement: str,
    held: Bounds,
    cutoffs: Mapping[str, datetime | None],
    limit: int,
    **more: datetime,
) -> Step:
    latest = max((cutoff for cutoff in cutoffs.values() if cutoff is not None), default=None)
    if latest is None:
        return Step(0, more=False)
    with unhurried(conn):
        ((after,),) = conn.execute(_WALK, {"kind": kind}).fetchall()
        params = {"after": after, "counted": held.counted, "limit": limit, "jobs_since": held.jobs_since, **cutoffs, **more}
        ((seen, last, newest, count),) = conn.execute(statement, params).fetchall()
        # A page with something too young in it is looked at again: in the order of acceptance all that follows is younger still.
        is_over = seen == 0 or newest >= latest
        if is_over:
            conn.execute(_WALK_AGAIN, {"kind": kind, "again": AGAIN[kind]})
        else:
            conn.execute(_MOVE_WALK, {"kind": kind, "after": last})
    return Step(count, more=not is_over)


class Removed(NamedTuple):
    """What `remove` did with one batch."""

    #: Events that are gone, by their status.
    events: dict[str, int]
    deliveries: int


def remove(conn: psycopg.Connection[Any], ages: Ages, wait: timedelta = WAIT) -> Removed | None:
    """Remove one batch of events whose tombstones stand for `wait` at least; None when there is none."""
    held = bounds(conn)
    with unhurried(conn):
        batch = conn.execute(_BATCH, {"wait": wait}).fetchone()
        if batch is None:
            return None
        params = {"seqs": batch[1], "jobs_since": held.jobs_since, **_cutoffs(held, ages)}
        gone = conn.execute(_LOCK, params).fetchall()
        seqs = {"seqs": numbers(seq for seq, _ in gone)}
        deliveries = conn.execute(_REMOVE_DELIVERIES, seqs).rowcount
        conn.execute(_REMOVE_EVENTS, seqs)
        # Of those that are gone there is no event any more; all others are spared.
        if len(gone) < len(batch[1]):
            conn.execute(_SPARE, {"seqs": batch[1]})
        conn.execute(_REMOVE_BURIAL, {"id": batch[0]})
    counts: dict[str, int] = {}
    for _, status in gone:
        counts[status] = counts.get(status, 0) + 1
    return Removed(counts, deliveries)


def waits_s(conn: psycopg.Connection[Any], wait: timedelta = WAIT) -> float | None:
    """Seconds until the next batch may go; None when there is none."""
    row = conn.execute(
        "SELECT greatest(0, extract(epoch FROM at + %s - clock_timestamp()))::float8 FROM burial ORDER BY id LIMIT 1", (wait,)
    ).fetchone()
    return None if row is None else float(row[0])


def remove_old(
    conn: psycopg.Connection[Any], kind: Literal["tombstone", "audit"], age: timedelta | None, page: int = PAGE
) -> Step:
    """Remove a page of tombstones or of audit entries that are older than `age`."""
    if age is None:
        return Step(0, more=False)
    with unhurried(conn):
        count = conn.execute(_REMOVE_OLD[kind].encode(), {"age": age, "limit": page}).rowcount
    return Step(count, more=count == page)


def would_go(conn: psycopg.Connection[Any], ages: Ages) -> dict[str, int]:
    """How many payloads and events would go now; reads all events, so it may take a while."""
    held = bounds(conn)
    shared = {"counted": held.counted, "jobs_since": held.jobs_since}
    before = held.before(ages.payload)
    statement = _WOULD_GO + " AND erased_at IS NULL"
    found = conn.execute(statement.encode(), shared | {"succeeded": before, "cancelled": before, "dead": None}).fetchone()
    counts = {"payload": found[0] if found else 0}
    for status in ("succeeded", "cancelled", "dead"):
        only = {"succeeded": None, "cancelled": None, "dead": None} | {status: held.before(getattr(ages, status))}
        found = conn.execute(_WOULD_GO.encode(), shared | only).fetchone()
        counts[status] = found[0] if found else 0
    return counts


def note(conn: psycopg.Connection[Any], counts: Mapping[str, int], who: str | None = None) -> None:
    """Add to what went today, and say it in the audit.

    What goes by itself has one entry of a day; what a person had removed (`who`) has its own.
    """
    with conn.transaction():
        ((day, total, entry),) = conn.execute(_DAY, {"counts": Jsonb(dict(counts))}).fetchall()
        if who is not None:
            audit.record(conn, who, "retention", "by hand", None, counts)
        elif entry is not None:
            audit.amend(conn, entry, total)
        else:
            entry = audit.record(conn, WHO, "retention", f"day {day}", None, total)
            conn.execute(_SET_AUDIT, {"audit_id": entry, "day": day})
