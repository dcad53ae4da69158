"""One step of a job: a bounded page of it, in one transaction with its cursor and its counts.

A step takes hold of the job's row first, so that two that do the same at once follow one another, and everything that it does is
committed with the cursor: whatever is killed, each delivery is done once, and the counts are true. Then events are locked and
then their deliveries, each ascending, as everywhere.

A replay begins no more than `WINDOW` deliveries that have not ended; an ordered one, one per endpoint. So what is still to come
stays dead, out of the reach of reconcile and of every other job, until its turn.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus, EventStatus, FailureClass, JobState
from madeira.store import audit, cancelling, job_walks, jobs
from madeira.store.columns import numbers, texts
from madeira.store.job_walks import Action, Kind, Page, Row
from madeira.store.replay import RECOUNT, REPLAY, REROUTE, UNBEAR, UNSENDABLE
from madeira.store.selection import Selection, from_document

#: Deliveries that a replay has begun and that have not ended, at most.
WINDOW: Final = 100

#: Deliveries or events of one step of a cancel or a reroute.
PAGE: Final = 300

#: Rows that a page of a replay may pass over besides those that it begins.
_PASSED: Final = 50

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

#: What is left to be walked, the earliest first.
_PARTS: Final = """
    SELECT kind, endpoint, cursor FROM job_part
    WHERE job_id = %(id)s AND NOT is_over
    ORDER BY CASE kind WHEN 'unfinished' THEN 1 ELSE 0 END, cursor, kind, endpoint
"""

_MOVE: Final = """
    UPDATE job_part SET cursor = %(cursor)s, is_over = %(is_over)s
    WHERE job_id = %(id)s AND kind = %(kind)s AND endpoint = %(endpoint)s
"""

#: Take hold of events.
_LOCK_EVENTS: Final = """
    SELECT seq, status, reason, erased_at IS NOT NULL, deliveries FROM event
    WHERE seq = ANY(%(seqs)s::bigint[]) ORDER BY seq FOR NO KEY UPDATE
"""

#: Take hold of deliveries, and say which of them died before the job was made. A statement of its own: it must see what was done
#: until the locks of the events were got.
_LOCK_DELIVERIES: Final = """
    SELECT id, event_seq, endpoint, lane, status, attempt, failure_class, coalesce(died_at < %(before)s, false)
    FROM delivery
    WHERE id = ANY(%(ids)s::bigint[]) OR event_seq = ANY(%(all_of)s::bigint[])
    ORDER BY id
    FOR NO KEY UPDATE
"""

#: End dead deliveries that are locked, with their events.
_CANCEL_DEAD: Final = """
    UPDATE delivery
    SET status = 'cancelled', job_id = %(job_id)s, finished_at = clock_timestamp(), died_at = NULL, cancel_requested_at = NULL,
        updated_at = clock_timestamp()
    WHERE id = ANY(%(ids)s::bigint[]) AND status = 'dead'
"""

#: Note by which job deliveries are ended.
_MARK: Final = "UPDATE delivery SET job_id = %(job_id)s WHERE id = ANY(%(ids)s::bigint[])"

_BEGIN: Final = """
    INSERT INTO job_begun (job_id, delivery_id, endpoint)
    SELECT %(job_id)s, id, endpoint FROM unnest(%(ids)s::bigint[], %(endpoints)s::text[]) AS b (id, endpoint)
"""

#: Carry a step over into the job; `gone` began by the rate.
_TALLY: Final = """
    UPDATE job
    SET done = done + %(done)s, failed = failed + %(failed)s, skipped = skipped + %(skipped)s,
        skips = %(skips)s, total = greatest(total, done + failed + skipped + %(done)s + %(failed)s + %(skipped)s + %(begun)s),
        next_at = CASE WHEN %(gone)s = 0 OR rate IS NULL THEN next_at
                       ELSE CASE WHEN next_at < clock_timestamp() - interval '1 s' THEN clock_timestamp() ELSE next_at END
                            + %(gone)s / rate * interval '1 s' END,
        stumbles = 0, updated_at = clock_timestamp()
    WHERE id = %(id)s
"""

#: What the job has passed over so far, by reason.
_SKIPS: Final = "SELECT skips FROM job WHERE id = %(id)s"

#: End a job. What it never met was done by somebody else before its turn.
_FINISH: Final = """
    UPDATE job
    SET state = %(state)s, finished_at = clock_timestamp(), updated_at = clock_timestamp(), error = %(error)s,
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
    RETURNING stumbles
"""


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


@dataclass(frozen=True, slots=True)
class _Job:
    id: int
    action: Action
    selection: Selection
    reason: str
    who: str
    ordered: bool
    rate: float | None
    state: JobState
    created_at: Any
    is_finished: bool
    late_s: float

    @property
    def allowance(self) -> int:
        """How many may go now by the rate; what was missed in the last second is made up for, no more."""
        if self.rate is None:
            return PAGE
        if self.late_s < 0:
            return 0
        return 1 if self.late_s > 1 else min(PAGE, 1 + int(self.late_s * self.rate))


@dataclass(frozen=True, slots=True)
class _Part:
    kind: Kind
    endpoint: str
    cursor: int


@dataclass(frozen=True, slots=True)
class _Delivery:
    id: int
    seq: int
    endpoint: str
    lane: str
    status: str
    attempt: int
    failure_class: str | None
    died_before: bool

    @property
    def is_meant(self) -> bool:
        """Whether it is dead, and was when the job was made."""
        return self.status == DeliveryStatus.DEAD and self.died_before

    @property
    def is_born_dead(self) -> bool:
        """Whether routing made it dead."""
        return self.status == DeliveryStatus.DEAD and self.attempt == 0 and self.failure_class in UNSENDABLE


@dataclass(frozen=True, slots=True)
class _Event:
    seq: int
    status: str
    reason: str | None
    is_erased: bool
    deliveries: int


@dataclass(slots=True)
class _Done:
    """What a step has done so far."""

    done: int = 0
    failed: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    #: What counts for the rate.
    gone: int = 0
    walked: bool = False
    more: bool = False
    begun: list[DeliveryRef] = field(default_factory=list)
    ended: list[DeliveryRef] = field(default_factory=list)
    to_route: list[int] = field(default_factory=list)
    unrouted: list[int] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        return bool(self.walked or self.done or self.failed or self.skips)


def step(conn: psycopg.Connection[Any], job_id: int) -> Step:
    """Do the next page of a job; note what has ended of what it began; end it when nothing is left.

    Raises:
        SelectionInvalid: its selection cannot be read (any more).
    """
    with conn.transaction():
        job = _locked(conn, job_id)
        if job is None or job.is_finished:
            return Step(is_over=True)
        did = _Done()
        _collect(conn, job, did)
        begun = dict(conn.execute(_BEGUN, {"id": job.id}).fetchall())
        if job.state is JobState.RUNNING:
            _WORK[job.action](conn, job, begun, did)
        if did.moved:
            _tally(conn, job, did, sum(begun.values()) + len(did.begun))
        is_over = _finish_if_over(conn, job)
        wait_s = max(0.0, -job.late_s) if job.rate is not None else 0.0
        return Step(is_over, did.moved, did.more, wait_s, did.begun, did.ended, did.to_route, did.unrouted)


def pending(conn: psycopg.Connection[Any], job_id: int) -> list[DeliveryRef]:
    """What a job has begun and what waits: whoever goes on with a job whose process died makes sure that it is queued."""
    return [DeliveryRef(*row) for row in conn.execute(_PENDING, {"id": job_id})]


def stumble(conn: psycopg.Connection[Any], job_id: int, error: str) -> bool:
    """Note that a step failed; True when that was once too often, and the job has failed by it."""
    with conn.transaction():
        row = conn.execute(_STUMBLE, {"id": job_id, "error": error}).fetchone()
        if row is None:
            return True
        if row[0] < MAX_STUMBLES:
            return False
        _finish(conn, job_id, JobState.FAILED, error)
        return True


def _locked(conn: psycopg.Connection[Any], job_id: int) -> _Job | None:
    row = conn.execute(_LOCK, {"id": job_id}).fetchone()
    if row is None:
        return None
    job = _Job(*row)
    return replace(job, selection=from_document(job.selection), state=JobState(job.state))


def _collect(conn: psycopg.Connection[Any], job: _Job, did: _Done) -> None:
    """Count what has ended of what the job began."""
    success = DeliveryStatus.CANCELLED if job.action == "cancel" else DeliveryStatus.SUCCEEDED
    for (status,) in conn.execute(_COLLECT, {"id": job.id}):
        if status == success:
            did.done += 1
        elif job.action == "replay" and status == DeliveryStatus.DEAD:
            did.failed += 1
        else:
            did.skips[status] += 1


def _tally(conn: psycopg.Connection[Any], job: _Job, did: _Done, begun: int) -> None:
    ((skips,),) = conn.execute(_SKIPS, {"id": job.id})
    together = Counter(skips) + did.skips
    values = {"done": did.done, "failed": did.failed, "skipped": did.skips.total(), "begun": begun, "gone": did.gone}
    conn.execute(_TALLY, values | {"id": job.id, "skips": Jsonb(together)})


def _finish_if_over(conn: psycopg.Connection[Any], job: _Job) -> bool:
    if conn.execute(_BEGUN, {"id": job.id}).fetchone() is not None or job.state is JobState.PAUSED:
        return False
    if job.state is JobState.RUNNING:
        if conn.execute(_PARTS, {"id": job.id}).fetchone() is not None:
            return False
        _finish(conn, job.id, JobState.DONE)
    else:
        _finish(conn, job.id, job.state)
    return True


def _finish(conn: psycopg.Connection[Any], job_id: int, state: JobState, error: str | None = None) -> None:
    conn.execute(_FINISH, {"id": job_id, "state": state, "error": error})
    detail = {"state": state} | jobs.counts(conn, job_id) | ({"error": error} if error else {})
    job = jobs.find(conn, job_id)
    assert job is not None
    audit.record(conn, _BY, "end", f"job {job_id}", job["reason"], detail)


def _parts(conn: psycopg.Connection[Any], job: _Job) -> list[_Part]:
    return [_Part(*row) for row in conn.execute(_PARTS, {"id": job.id})]


def _read(conn: psycopg.Connection[Any], job: _Job, part: _Part, limit: int) -> Page:
    return job_walks.page(
        conn, part.kind, job.action, job.selection, job.created_at, endpoint=part.endpoint, cursor=part.cursor, limit=limit
    )


def _move(conn: psycopg.Connection[Any], job: _Job, part: _Part, goes_on: int | None, did: _Done) -> None:
    """Set the cursor of a part; None: there is nothing behind."""
    where = {"id": job.id, "kind": part.kind, "endpoint": part.endpoint}
    conn.execute(_MOVE, where | {"cursor": part.cursor if goes_on is None else goes_on, "is_over": goes_on is None})
    did.walked = True
    did.more = True


def _lock(
    conn: psycopg.Connection[Any], job: _Job, rows: Sequence[Row], *, all_of: Iterable[int] = ()
) -> tuple[dict[int, _Event], list[_Delivery]]:
    """Take hold of the events of some rows, and then of their deliveries (or of all deliveries of the events `all_of`)."""
    events = conn.execute(_LOCK_EVENTS, {"seqs": numbers({row.seq for row in rows})}).fetchall()
    ids = numbers(row.delivery_id for row in rows if row.delivery_id is not None)
    params = {"ids": ids, "all_of": numbers(all_of), "before": job.created_at}
    return {row[0]: _Event(*row) for row in events}, [_Delivery(*row) for row in conn.execute(_LOCK_DELIVERIES, params)]


# -- replay -------------------------------------------------------------------------------------------------------


def _replay(conn: psycopg.Connection[Any], job: _Job, begun: dict[str, int], did: _Done) -> None:
    rows = _due(conn, job, begun, did)
    did.skips += Counter(row.why for row in rows if row.why is not None)
    rows = [row for row in rows if row.why is None]
    if not rows:
        return
    events, deliveries = _lock(conn, job, rows)
    ready = [d for d in deliveries if d.is_meant and not events[d.seq].is_erased and events[d.seq].status != EventStatus.PENDING]
    did.skips += +Counter({"no_longer": len(rows) - len(ready)})
    conn.execute(REPLAY, {"ids": numbers(d.id for d in ready), "job_id": job.id})
    conn.execute(RECOUNT, {"seqs": numbers({d.seq for d in ready})})
    _begin(conn, job, ready)
    did.gone = len(ready)
    did.begun = [DeliveryRef(d.id, d.seq, d.lane, line="replay") for d in ready]


def _due(conn: psycopg.Connection[Any], job: _Job, begun: dict[str, int], did: _Done) -> list[Row]:
    """What may begin now, and what is passed over on the way to it."""
    parts = _parts(conn, job)
    share = 1 if job.ordered else max(1, WINDOW // max(1, len(parts)))
    room = min(WINDOW - sum(begun.values()), job.allowance)
    rows: list[Row] = []
    for part in parts:
        wanted = min(room, share - begun.get(part.endpoint, 0))
        if wanted <= 0:
            continue
        found = _read(conn, job, part, wanted + _PASSED)
        taken = _up_to(found.rows, wanted)
        # Where not all of the page is taken, the next one begins behind what is.
        _move(conn, job, part, found.goes_on if len(taken) == len(found.rows) else taken[-1].place, did)
        room -= sum(row.why is None for row in taken)
        rows += taken
    return rows


def _up_to(rows: Sequence[Row], wanted: int) -> list[Row]:
    """The rows up to the one with which `wanted` of them may begin."""
    taken: list[Row] = []
    for row in rows:
        if wanted == 0:
            break
        taken.append(row)
        wanted -= row.why is None
    return taken


def _begin(conn: psycopg.Connection[Any], job: _Job, deliveries: Sequence[_Delivery]) -> None:
    values = {"ids": numbers(d.id for d in deliveries), "endpoints": texts(d.endpoint for d in deliveries)}
    conn.execute(_BEGIN, values | {"job_id": job.id})


# -- cancel -------------------------------------------------------------------------------------------------------


def _cancel(conn: psycopg.Connection[Any], job: _Job, begun: dict[str, int], did: _Done) -> None:
    part = next(iter(_parts(conn, job)), None)
    if part is None:
        return
    found = _read(conn, job, part, PAGE)
    _move(conn, job, part, found.goes_on, did)
    if found.rows:
        _CANCEL[part.kind](conn, job, found.rows, begun, did)


def _cancel_events(conn: psycopg.Connection[Any], job: _Job, rows: Sequence[Row], begun: dict[str, int], did: _Done) -> None:
    _lock(conn, job, rows)
    did.unrouted = [row[0] for row in conn.execute(cancelling.CANCEL_UNROUTED, {"seqs": numbers(r.seq for r in rows)})]
    did.done += len(did.unrouted)
    # What was routed meanwhile is met, and counted, among the deliveries.


def _cancel_unfinished(conn: psycopg.Connection[Any], job: _Job, rows: Sequence[Row], begun: dict[str, int], did: _Done) -> None:
    _, deliveries = _lock(conn, job, rows)
    still = [d for d in deliveries if d.status in (DeliveryStatus.PENDING, DeliveryStatus.DELIVERING)]
    did.skips += +Counter({"no_longer": len(rows) - len(still)})
    ids = [d.id for d in still]
    conn.execute(_MARK, {"ids": numbers(ids), "job_id": job.id})
    did.ended, _ = cancelling.end(conn, ids, f"cancelled by job {job.id} of {job.who}: {job.reason}")
    did.done += len(did.ended)
    ended = {ref.delivery_id for ref in did.ended}
    asked = [d for d in still if d.id not in ended]
    _begin(conn, job, asked)
    for delivery in asked:
        begun[delivery.endpoint] = begun.get(delivery.endpoint, 0) + 1


def _cancel_dead(conn: psycopg.Connection[Any], job: _Job, rows: Sequence[Row], begun: dict[str, int], did: _Done) -> None:
    events, deliveries = _lock(conn, job, rows)
    ready = [d for d in deliveries if d.is_meant and events[d.seq].status != EventStatus.PENDING]
    did.skips += +Counter({"no_longer": len(rows) - len(ready)})
    conn.execute(_CANCEL_DEAD, {"ids": numbers(d.id for d in ready), "job_id": job.id})
    conn.execute(RECOUNT, {"seqs": numbers({d.seq for d in ready})})
    did.done += len(ready)


_CANCEL: Final = {"pending": _cancel_events, "unfinished": _cancel_unfinished, "dead": _cancel_dead}


# -- reroute ------------------------------------------------------------------------------------------------------


def _reroute(conn: psycopg.Connection[Any], job: _Job, begun: dict[str, int], did: _Done) -> None:
    part = next(iter(_parts(conn, job)), None)
    limit = min(PAGE, job.allowance)
    if part is None or limit == 0:
        return
    found = _read(conn, job, part, limit)
    _move(conn, job, part, found.goes_on, did)
    did.skips += Counter(row.why for row in found.rows if row.why is not None)
    rows = [row for row in found.rows if row.why is None]
    if not rows:
        return
    events, deliveries = _lock(conn, job, rows, all_of={row.seq for row in rows})
    gone: dict[int, list[int]] = {row.seq: [] for row in rows}
    for delivery in deliveries:
        if delivery.is_born_dead:
            gone[delivery.seq].append(delivery.id)
    ready = [seq for seq in gone if _may_be_routed(events.get(seq), gone[seq])]
    did.skips += +Counter({"no_longer": len(gone) - len(ready)})
    conn.execute(UNBEAR, {"ids": numbers(i for seq in ready for i in gone[seq])})
    conn.execute(REROUTE, {"seqs": numbers(ready), "gone": numbers(len(gone[seq]) for seq in ready)})
    did.to_route = ready
    did.gone = len(ready)
    did.done += len(ready)


def _may_be_routed(event: _Event | None, gone: Sequence[int]) -> bool:
    if event is None:
        return False
    is_unexplained = event.deliveries == 0 or event.reason == FailureClass.PLATFORM
    return event.status == EventStatus.DEAD and not event.is_erased and (bool(gone) or is_unexplained)


_WORK: Final = {"replay": _replay, "cancel": _cancel, "reroute": _reroute}
