"""One step of a job: a bounded page of it, in one transaction with its cursor and its counts.

A step takes hold of the job's row first, so that two that do the same at once follow one another, and everything that it does is
committed with the cursor: whatever is killed, each delivery is done once, and the counts are true. Then events are locked and
then their deliveries, each ascending, as everywhere.

A replay begins no more than `job_work.WINDOW` deliveries that have not ended; an ordered one, one per endpoint. So what is still
to come stays dead, out of the reach of reconcile and of every other job, until its turn.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus, JobState
from madeira.store import audit, jobs
from madeira.store.job_work import WORK, Done, Job, parts_left
from madeira.store.selection import from_document

#: Steps in a row that may fail before the job does.
MAX_STUMBLES: Final = 5

#: How the audit calls who ends a job.
_BY: Final = "madeira"

#: Take hold of a job. Seconds by which its rate lets it go: below zero, not yet.
_LOCK: Final = """
    SELECT id, action, selection, reason, who, ordered, rate, state, created_at, finished_at IS NOT NULL,
           extract(epoch FROM clock_timestamp() - next_at)::float8
    FROM job WHERE id = %(id)s
    FOR NO KEY UPDATE
"""

#: What a job has begun and what has ended since: it is taken off the list.
_COLLECT: Final = """
    DELETE FROM job_begun b
    USING (SELECT o.delivery_id, coalesce(d.status, 'gone') AS status
           FROM job_begun o LEFT JOIN delivery d ON d.id = o.delivery_id
           WHERE o.job_id = %(id)s AND (d.id IS NULL OR d.finished_at IS NOT NULL)) e
    WHERE b.job_id = %(id)s AND b.delivery_id = e.delivery_id
    RETURNING e.status
"""

#: What a job has begun and what has not ended, by endpoint.
_BEGUN: Final = "SELECT endpoint, count(*) FROM job_begun WHERE job_id = %(id)s GROUP BY endpoint"

#: Carry a step over into the job; `gone` began by the rate.
_TALLY: Final = """
    UPDATE job
    SET done = done + %(done)s, failed = failed + %(failed)s, skipped = skipped + %(skipped)s,
        skips = %(skips)s, total = greatest(total, done + failed + skipped + %(done)s + %(failed)s + %(skipped)s + %(begun)s),
        next_at = CASE WHEN %(gone)s = 0 OR rate IS NULL THEN next_at
                       ELSE CASE WHEN next_at < clock_timestamp() - interval '1 s' THEN clock_timestamp() ELSE next_at END
                            + %(gone)s / rate * interval '1 s' END,
        stumbles = 0, error = CASE WHEN state = 'failed' THEN error END, updated_at = clock_timestamp()
    WHERE id = %(id)s
"""

#: What the job has passed over so far, by reason.
_SKIPS: Final = "SELECT skips FROM job WHERE id = %(id)s"

#: End a job. What it never met was done by somebody else before its turn.
_FINISH: Final = """
    UPDATE job
    SET state = %(state)s, finished_at = clock_timestamp(), updated_at = clock_timestamp(),
        skipped = skipped + l.missed,
        skips = CASE WHEN l.missed = 0 THEN skips ELSE
                jsonb_set(skips, '{no_longer}', to_jsonb(coalesce((skips->>'no_longer')::bigint, 0) + l.missed)) END
    FROM (SELECT CASE WHEN %(state)s = 'done' THEN total - done - failed - skipped ELSE 0 END AS missed
          FROM job WHERE id = %(id)s) l
    WHERE id = %(id)s
"""

#: What a job has begun and what is still to be queued or called; the broker must know it.
_PENDING: Final = """
    SELECT d.id, d.event_seq, d.lane, greatest(0, extract(epoch FROM d.next_attempt_at - clock_timestamp()))::float8, d.line
    FROM job_begun b JOIN delivery d ON d.id = b.delivery_id
    WHERE b.job_id = %(id)s AND d.status = 'pending'
"""

_STUMBLE: Final = """
    UPDATE job SET stumbles = stumbles + 1, error = %(error)s, updated_at = clock_timestamp()
    WHERE id = %(id)s AND finished_at IS NULL
    RETURNING stumbles, state
"""

#: Give a job up; what it has begun is still counted.
_FAIL: Final = "UPDATE job SET state = 'failed', stumbles = 0 WHERE id = %(id)s"


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did; the broker must hear of it once it is committed."""

    #: Whether the job needs no further step.
    is_over: bool = False
    #: Whether anything changed.
    moved: bool = False
    #: Whether the next step would find more to do at once.
    more: bool = False
    #: Seconds until the job's rate lets it go on; 0 when it does, or has none.
    wait_s: float = 0.0
    #: Deliveries that are due now.
    begun: list[DeliveryRef] = field(default_factory=list)
    #: Deliveries that ended by it.
    ended: list[DeliveryRef] = field(default_factory=list)
    #: Events that are to be routed.
    to_route: list[int] = field(default_factory=list)
    #: Events that will not be routed.
    unrouted: list[int] = field(default_factory=list)


def step(conn: psycopg.Connection[Any], job_id: int) -> Step:
    """Do the next page of a job; note what has ended of what it began; end it when nothing is left.

    Raises:
        SelectionInvalid: its selection cannot be read (any more).
    """
    with conn.transaction():
        job = _locked(conn, job_id)
        if job is None or job.is_finished:
            return Step(is_over=True)
        did = Done()
        _collect(conn, job, did)
        begun = dict(conn.execute(_BEGUN, {"id": job.id}).fetchall())
        if job.state is JobState.RUNNING:
            WORK[job.action](conn, job, begun, did)
        if did.moved:
            _tally(conn, job, did, sum(begun.values()) + len(did.begun))
        is_over = _finish_if_over(conn, job)
        wait_s = max(0.0, -job.late_s) if job.rate is not None else 0.0
        return Step(is_over, did.moved, did.more, wait_s, did.begun, did.ended, did.to_route, did.unrouted)


def pending(conn: psycopg.Connection[Any], job_id: int) -> list[DeliveryRef]:
    """What a job has begun and what waits: whoever goes on with a job whose process died makes sure that it is queued."""
    return [DeliveryRef(*row) for row in conn.execute(_PENDING, {"id": job_id})]


def stumble(conn: psycopg.Connection[Any], job_id: int, error: str) -> bool:
    """Note that a step failed; once too often, and the job has failed. True when it needs no further step."""
    with conn.transaction():
        row = conn.execute(_STUMBLE, {"id": job_id, "error": error}).fetchone()
        if row is None:
            return True
        stumbles, state = row
        if stumbles < MAX_STUMBLES:
            return False
        if state != JobState.FAILED:
            conn.execute(_FAIL, {"id": job_id})
            return False
        # Not even what it began can be counted.
        _finish(conn, job_id, JobState.FAILED)
        return True


def _locked(conn: psycopg.Connection[Any], job_id: int) -> Job | None:
    row = conn.execute(_LOCK, {"id": job_id}).fetchone()
    if row is None:
        return None
    job = replace(Job(*row), state=JobState(row[7]))
    # One that begins nothing more must not fail by what it was about.
    return replace(job, selection=from_document(row[2])) if job.state is JobState.RUNNING else job


def _collect(conn: psycopg.Connection[Any], job: Job, did: Done) -> None:
    """Count what has ended of what the job began."""
    success = DeliveryStatus.CANCELLED if job.action == "cancel" else DeliveryStatus.SUCCEEDED
    for (status,) in conn.execute(_COLLECT, {"id": job.id}):
        if status == success:
            did.done += 1
        elif job.action == "replay" and status == DeliveryStatus.DEAD:
            did.failed += 1
        else:
            did.skips[status] += 1


def _tally(conn: psycopg.Connection[Any], job: Job, did: Done, begun: int) -> None:
    ((skips,),) = conn.execute(_SKIPS, {"id": job.id})
    together = Counter(skips) + did.skips
    values = {"done": did.done, "failed": did.failed, "skipped": did.skips.total(), "begun": begun, "gone": did.gone}
    conn.execute(_TALLY, values | {"id": job.id, "skips": Jsonb(together)})


def _finish_if_over(conn: psycopg.Connection[Any], job: Job) -> bool:
    if conn.execute(_BEGUN, {"id": job.id}).fetchone() is not None or job.state is JobState.PAUSED:
        return False
    if job.state is JobState.RUNNING:
        if parts_left(conn, job):
            return False
        _finish(conn, job.id, JobState.DONE)
    else:
        _finish(conn, job.id, job.state)
    return True


def _finish(conn: psycopg.Connection[Any], job_id: int, state: JobState) -> None:
    conn.execute(_FINISH, {"id": job_id, "state": state})
    job = jobs.find(conn, job_id)
    assert job is not None
    detail = {"state": state} | jobs.counts(conn, job_id) | ({"error": job["error"]} if job["error"] else {})
    audit.record(conn, _BY, "end", f"job {job_id}", job["reason"], detail)
