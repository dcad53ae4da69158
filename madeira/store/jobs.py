"""Jobs: one action on many deliveries or events, made by a person, done by the workers (`madeira.store.job_steps`).

A job is about what was there when it was made: what died, or was accepted, later is none of its. So neither its own failures
nor those of another job come round to it again. Each thing that a person does to a job is one transaction with its audit row.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from madeira.errors import AlreadyThere, IllegalTransition
from madeira.states import JobState
from madeira.store import audit, configuration, job_walks
from madeira.store.job_walks import Action, Kind
from madeira.store.selection import Selection

#: Examples that a preview shows.
SAMPLE: Final = 3

#: Rates that a job may have, per second.
RATES: Final = (0.001, 10_000)

#: What a client may call a request by, so that it makes one job however often it is sent.
KEY_PATTERN: Final = r"^[A-Za-z0-9._:-]{1,128}$"

#: What a job shows of itself; `missing` are the endpoints without which a replay does not come to its end.
_COLUMNS: Final = """
    id, action, selection AS filter, among, reason, who, key, ordered, rate, state, total, done, failed, skipped, skips,
    (SELECT count(*) FROM job_begun b WHERE b.job_id = job.id) AS begun,
    CASE WHEN action = 'replay' AND finished_at IS NULL THEN ARRAY(
        SELECT o.endpoint
        FROM (SELECT endpoint FROM job_begun b WHERE b.job_id = job.id
              UNION SELECT endpoint FROM job_part p
                    WHERE p.job_id = job.id AND NOT is_over AND job.state IN ('running', 'paused')) o
        WHERE o.endpoint <> 'callback' AND NOT EXISTS (SELECT FROM endpoint e WHERE e.name = o.endpoint)
        ORDER BY 1) ELSE '{}' END AS missing,
    error, created_at, updated_at, finished_at
"""

_NOW: Final = "SELECT clock_timestamp()"

#: Make a job, unless there is one of this key.
_CREATE: Final = f"""
    INSERT INTO job (action, selection, among, reason, who, key, ordered, rate, total, created_at)
    VALUES (%(action)s, %(selection)s, %(among)s, %(reason)s, %(who)s, %(key)s, %(ordered)s, %(rate)s, %(total)s, %(before)s)
    ON CONFLICT (key) DO NOTHING
    RETURNING {_COLUMNS}
"""  # noqa: S608

#: Make the parts in which a job is walked.
_PARTS: Final = """
    INSERT INTO job_part (job_id, kind, endpoint)
    SELECT %(job_id)s, kind, endpoint FROM unnest(%(kinds)s::text[], %(endpoints)s::text[]) AS p (kind, endpoint)
"""

_OF_KEY: Final = f"SELECT {_COLUMNS} FROM job WHERE key = %(key)s"  # noqa: S608

_FIND: Final = f"SELECT {_COLUMNS} FROM job WHERE id = %(id)s"  # noqa: S608

#: The latest jobs below an id.
_PAGE: Final = f"""
    SELECT {_COLUMNS} FROM job
    WHERE id < %(before)s AND (%(state)s::text IS NULL OR state = %(state)s) AND (%(action)s::text IS NULL OR action = %(action)s)
    ORDER BY id DESC LIMIT %(limit)s
"""  # noqa: S608

#: Take hold of a job.
_LOCK: Final = "SELECT state FROM job WHERE id = %(id)s FOR NO KEY UPDATE"

#: Since when a job is in the state that a person has brought it to, and who that was; the end is nobody's word.
_SINCE: Final = "SELECT at, who FROM audit WHERE what = %(what)s AND action <> 'end' ORDER BY at DESC, id DESC LIMIT 1"

_SET_STATE: Final = "UPDATE job SET state = %(state)s, updated_at = clock_timestamp() WHERE id = %(id)s"

#: Jobs for which there is something to do: those that run, and those that wait for the end of what they began.
_RUNNABLE: Final = """
    SELECT id FROM job
    WHERE finished_at IS NULL AND (state <> 'paused' OR EXISTS (SELECT FROM job_begun b WHERE b.job_id = job.id))
    ORDER BY id
"""

#: Jobs that have not ended, the latest first; and those that failed, among the latest.
_UNDER_WAY: Final = f"""
    SELECT {_COLUMNS} FROM job WHERE finished_at IS NULL AND state IN ('running', 'paused') ORDER BY id DESC LIMIT %(limit)s
"""  # noqa: S608
_FAILED: Final = f"""
    SELECT {_COLUMNS} FROM job
    WHERE id > (SELECT coalesce(max(id), 0) FROM job) - 100 AND state = 'failed'
          AND updated_at > now() - %(days)s * interval '1 day'
    ORDER BY id DESC LIMIT %(limit)s
"""  # noqa: S608

#: Whether there is something to do, and nobody who does it.
_IS_STRANDED: Final = f"""
    SELECT EXISTS ({_RUNNABLE})
           AND NOT EXISTS (SELECT FROM lease WHERE name = %(lease)s AND until > clock_timestamp())
"""  # noqa: S608

#: Name of the lease row of the process that goes on with jobs.
LEASE: Final = "jobs"

#: What a person may do to a job: the states from which, and the one that follows.
STEERS: Final[dict[str, tuple[frozenset[JobState], JobState]]] = {
    "pause": (frozenset({JobState.RUNNING}), JobState.PAUSED),
    "resume": (frozenset({JobState.PAUSED}), JobState.RUNNING),
    "cancel": (frozenset({JobState.RUNNING, JobState.PAUSED}), JobState.CANCELLED),
}


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a person asks for."""

    action: Action
    selection: Selection
    #: Why; it stands in the audit.
    reason: str
    #: Of a cancel: ``unfinished`` or ``dead``; all else is about the dead.
    among: str = "dead"
    #: Of a replay: one at a time per endpoint, in the order of the events.
    ordered: bool = True
    #: How many a second, at most; None: as fast as each endpoint takes them.
    rate: float | None = None
    #: What makes a request that is sent twice one job.
    key: str | None = None


class Steered(NamedTuple):
    """What came of a person's word to a job."""

    #: As it is now.
    job: dict[str, Any]
    #: Whether it was in this state before.
    already: bool
    #: Since when it is, and who brought it there; None when the audit does not go back so far.
    since: datetime | None
    by: str | None

    @property
    def document(self) -> dict[str, Any]:
        """All of it, for a program."""
        return self.job | {"already": self.already, "since": self.since, "by": self.by}


@dataclass(frozen=True, slots=True)
class Preview:
    """What a job would be about."""

    total: int
    #: By kind: the endpoints.
    parts: list[tuple[Kind, str]]
    #: A few of them.
    sample: list[dict[str, Any]]
    #: Of a replay: the endpoints that were removed; what goes there waits until one of that name is made.
    missing: list[str]
    #: The moment of the count.
    at: datetime


def preview(conn: psycopg.Connection[Any], job: NewJob) -> Preview:
    """Count what a job would be about, and take a sample; changes nothing."""
    ((at,),) = conn.execute(_NOW)
    total, parts = _counted(conn, job, at)
    sample: list[dict[str, Any]] = []
    for kind in dict(parts):
        left = SAMPLE - len(sample)
        sample += job_walks.sample(conn, kind, job.action, job.selection, at, left) if left else []
    missing = configuration.missing_among(conn, [endpoint for _, endpoint in parts]) if job.action == "replay" else []
    return Preview(total, parts, sample, missing, at)


def skips(conn: psycopg.Connection[Any], job: NewJob, found: Preview) -> dict[str, int]:
    """How many of what a preview has counted would be passed over, whatever happens meanwhile, by the reason."""
    told: Counter[str] = Counter()
    for kind in dict(found.parts):
        told.update(job_walks.skips(conn, kind, job.action, job.selection, found.at))
    return dict(told)


def _counted(conn: psycopg.Connection[Any], job: NewJob, at: datetime) -> tuple[int, list[tuple[Kind, str]]]:
    total = 0
    parts: list[tuple[Kind, str]] = []
    for kind in job_walks.kinds(job.action, job.among):
        number, endpoints = job_walks.count(conn, kind, job.action, job.selection, at)
        total += number
        parts += [(kind, endpoint) for endpoint in endpoints]
    # What waits for its routing now may be a delivery when the job comes to it.
    if ("pending", "") in parts and ("unfinished", "") not in parts:
        parts.append(("unfinished", ""))
    return total, parts


def create(conn: psycopg.Connection[Any], job: NewJob, who: str) -> tuple[dict[str, Any], bool]:
    """Make a job; it, and whether it is new: with a key that was given before it is the job of then. Writes the audit row too.

    Raises:
        AlreadyThere: another job was made under this key.
        IllegalTransition: there is nothing that it would be about (``nothing-matches``).
    """
    selection = job.selection.as_document()
    asked = {"action": job.action, "among": job.among, "reason": job.reason, "ordered": job.ordered, "rate": job.rate}
    with conn.transaction():
        if (known := _of_key(conn, job)) is not None:
            return _same(known, asked | {"filter": selection}), False
        ((at,),) = conn.execute(_NOW)
        total, parts = _counted(conn, job, at)
        if not total:
            # The first of two of one key may have taken it all since.
            if (known := _of_key(conn, job)) is not None:
                return _same(known, asked | {"filter": selection}), False
            raise IllegalTransition(f"nothing matches: {nothing(job)}; no job was made", code="nothing-matches")
        values = asked | {"selection": Jsonb(selection), "key": job.key, "who": who, "total": total, "before": at}
        made = _one(conn, _CREATE, values)
        if made is not None:
            kinds, endpoints = [kind for kind, _ in parts], [endpoint for _, endpoint in parts]
            conn.execute(_PARTS, {"job_id": made["id"], "kinds": kinds, "endpoints": endpoints})
            detail = {"filter": selection, "total": total, "among": job.among, "ordered": job.ordered, "rate": job.rate}
            audit.record(conn, who, job.action, f"job {made['id']}", job.reason, detail)
            # Once more: it has its parts now.
            return find(conn, made["id"]) or made, True
    # Made by another request between the question and the answer.
    known = _of_key(conn, job)
    assert known is not None
    return _same(known, asked | {"filter": selection}), False


def nothing(job: NewJob) -> str:
    """What a job has not found that was to be about something."""
    if job.action == "reroute":
        return (
            "there is no such event that could be routed again, which is for what never had a body or an address, and for what no"
            " route matched; what a receiver refused is replayed"
        )
    return "there is no such dead letter" if job.among == "dead" else "nothing of this kind is unfinished"


def _of_key(conn: psycopg.Connection[Any], job: NewJob) -> dict[str, Any] | None:
    return None if job.key is None else _one(conn, _OF_KEY, {"key": job.key})


def _same(known: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    if any(known[name] != value for name, value in asked.items()):
        raise AlreadyThere(
            f"the key {known['key']} was given to job {known['id']}, which asks for something else: give another key"
        )
    return known


def find(conn: psycopg.Connection[Any], job_id: int) -> dict[str, Any] | None:
    """A job as it is now; None when there is none."""
    return _one(conn, _FIND, {"id": job_id})


def page(
    conn: psycopg.Connection[Any], *, limit: int, before: int | None = None, state: str | None = None, action: str | None = None
) -> list[dict[str, Any]]:
    """At most `limit` jobs below the id `before`, the latest first."""
    params = {"limit": limit, "before": 2**63 - 1 if before is None else before, "state": state, "action": action}
    with conn.cursor(row_factory=dict_row) as cursor:
        return [_shown(row) for row in cursor.execute(_PAGE, params)]


def lately(conn: psycopg.Connection[Any], *, limit: int = 20, days: int = 1) -> list[dict[str, Any]]:
    """The jobs that are worth a word: those that go on or are paused, and those of the last `days` that failed."""
    with conn.cursor(row_factory=dict_row) as cursor:
        params = {"limit": limit, "days": days}
        return [_shown(row) for statement in (_UNDER_WAY, _FAILED) for row in cursor.execute(statement, params).fetchall()]


def steer(conn: psycopg.Connection[Any], job_id: int, steer: str, who: str, why: str | None) -> Steered | None:
    """``pause``, ``resume`` or ``cancel`` a job; None when there is none.

    Twice is the same as once, and told as such. Writes the audit row too, if anything changed.

    Raises:
        IllegalTransition: the job has ended (``already-finished``).
    """
    allowed, becomes = STEERS[steer]
    with conn.transaction():
        row = conn.execute(_LOCK, {"id": job_id}).fetchone()
        if row is None:
            return None
        state = JobState(row[0])
        if state in allowed:
            conn.execute(_SET_STATE, {"id": job_id, "state": becomes})
            audit.record(conn, who, steer, f"job {job_id}", why, {"before": state, "after": becomes} | counts(conn, job_id))
        elif state is not becomes:
            raise IllegalTransition(f"job {job_id} is {state} already; there is nothing left to {steer}")
        job = _one(conn, _FIND, {"id": job_id})
        assert job is not None
        since, by = conn.execute(_SINCE, {"what": f"job {job_id}"}).fetchone() or (None, None)
        return Steered(job, state is becomes, since, by)


def counts(conn: psycopg.Connection[Any], job_id: int) -> dict[str, Any]:
    """How far a job has come, for the audit."""
    job = _one(conn, _FIND, {"id": job_id})
    assert job is not None
    return {name: job[name] for name in ("total", "done", "failed", "skipped", "begun", "skips")}


def runnable(conn: psycopg.Connection[Any]) -> list[int]:
    """The jobs for which there is something to do, the oldest first."""
    return [row[0] for row in conn.execute(_RUNNABLE)]


def is_stranded(conn: psycopg.Connection[Any]) -> bool:
    """Whether there is something to do, and no process that does it (any more)."""
    return bool(conn.execute(_IS_STRANDED, {"lease": LEASE}).fetchone() == (True,))


def _one(conn: psycopg.Connection[Any], statement: str, params: dict[str, Any]) -> dict[str, Any] | None:
    with conn.cursor(row_factory=dict_row) as cursor:
        row = cursor.execute(statement.encode(), params).fetchone()
    return None if row is None else _shown(row)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A job with what is left to do: neither counted nor begun."""
    row["left"] = max(0, row["total"] - row["done"] - row["failed"] - row["skipped"] - row["begun"])
    return row
