"""The work of a step of a job, by its action: what of the next page is taken, locked, and done.

Each of `replay`, `cancel` and `reroute` moves the cursor of what it has looked at, locks the events and then their deliveries,
each ascending, looks at them again, and notes in a `Done` what it did. The transaction is `madeira.store.job_steps`'.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus, EventStatus, FailureClass, JobState
from madeira.store import cancelling, job_walks
from madeira.store.columns import numbers, texts
from madeira.store.job_walks import Action, Kind, Page, Row
from madeira.store.replay import RECOUNT, REPLAY, REROUTE, UNBEAR, UNSENDABLE
from madeira.store.selection import Selection

#: Deliveries that a replay has begun and that have not ended, at most.
WINDOW: Final = 100

#: Deliveries or events of one step of a cancel or a reroute.
PAGE: Final = 300

#: Endpoints of which one step of a replay reads a page; the others come with the next, since what is behind comes first.
_PAGES: Final = 5

#: Rows that a page of a replay may pass over besides those that it begins.
_PASSED: Final = 50

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


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as its step has locked it."""

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
class Done:
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
        """Whether anything was done."""
        return bool(self.walked or self.done or self.failed or self.skips)


def parts_left(conn: psycopg.Connection[Any], job: Job) -> list[_Part]:
    """What is left to be walked, the earliest first."""
    return [_Part(*row) for row in conn.execute(_PARTS, {"id": job.id})]


def _read(conn: psycopg.Connection[Any], job: Job, part: _Part, limit: int) -> Page:
    return job_walks.page(
        conn, part.kind, job.action, job.selection, job.created_at, endpoint=part.endpoint, cursor=part.cursor, limit=limit
    )


def _move(conn: psycopg.Connection[Any], job: Job, part: _Part, goes_on: int | None, did: Done) -> None:
    """Set the cursor of a part; None: there is nothing behind."""
    where = {"id": job.id, "kind": part.kind, "endpoint": part.endpoint}
    conn.execute(_MOVE, where | {"cursor": part.cursor if goes_on is None else goes_on, "is_over": goes_on is None})
    did.walked = True
    did.more = True


def _lock(
    conn: psycopg.Connection[Any], job: Job, rows: Sequence[Row], *, all_of: Iterable[int] = ()
) -> tuple[dict[int, _Event], list[_Delivery]]:
    """Take hold of the events of some rows, and then of their deliveries (or of all deliveries of the events `all_of`)."""
    events = conn.execute(_LOCK_EVENTS, {"seqs": numbers({row.seq for row in rows})}).fetchall()
    ids = numbers(row.delivery_id for row in rows if row.delivery_id is not None)
    params = {"ids": ids, "all_of": numbers(all_of), "before": job.created_at}
    return {row[0]: _Event(*row) for row in events}, [_Delivery(*row) for row in conn.execute(_LOCK_DELIVERIES, params)]


def _ready(
    rows: Sequence[Row], deliveries: Sequence[_Delivery], events: dict[int, _Event], did: Done, *, needs_payload: bool
) -> list[_Delivery]:
    """Which of some dead deliveries are so still; of the others it is noted why they are passed over."""
    why = {d.id: _why_not(d, events[d.seq], needs_payload=needs_payload) for d in deliveries}
    # What is not there any more was taken back by a reroute, or removed.
    did.skips += Counter(reason for row in rows if (reason := why.get(row.delivery_id or 0, "no_longer")) is not None)
    return [d for d in deliveries if why[d.id] is None]


def _why_not(delivery: _Delivery, event: _Event, *, needs_payload: bool) -> str | None:
    if not delivery.is_meant:
        return "no_longer"
    if event.status == EventStatus.PENDING:
        return "not_routed"
    return "erased" if needs_payload and event.is_erased else None


# -- replay -------------------------------------------------------------------------------------------------------


def replay(conn: psycopg.Connection[Any], job: Job, begun: dict[str, int], did: Done) -> None:
    """Begin what may begin now, and pass over what cannot be sent."""
    rows = _due(conn, job, begun, did)
    did.skips += Counter(row.why for row in rows if row.why is not None)
    rows = [row for row in rows if row.why is None]
    if not rows:
        return
    events, deliveries = _lock(conn, job, rows)
    ready = _ready(rows, deliveries, events, did, needs_payload=True)
    conn.execute(REPLAY, {"ids": numbers(d.id for d in ready), "job_id": job.id})
    conn.execute(RECOUNT, {"seqs": numbers({d.seq for d in ready})})
    _begin(conn, job, ready)
    did.gone = len(ready)
    did.begun = [DeliveryRef(d.id, d.seq, d.lane, line="replay") for d in ready]


def _due(conn: psycopg.Connection[Any], job: Job, begun: dict[str, int], did: Done) -> list[Row]:
    """What may begin now, and what is passed over on the way to it."""
    parts = parts_left(conn, job)
    share = 1 if job.ordered else max(1, WINDOW // max(1, len(parts)))
    room = min(WINDOW - sum(begun.values()), job.allowance)
    rows: list[Row] = []
    pages = 0
    for part in parts:
        wanted = min(room, share - begun.get(part.endpoint, 0))
        if wanted <= 0:
            continue
        if pages == _PAGES:
            break
        pages += 1
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


def _begin(conn: psycopg.Connection[Any], job: Job, deliveries: Sequence[_Delivery]) -> None:
    values = {"ids": numbers(d.id for d in deliveries), "endpoints": texts(d.endpoint for d in deliveries)}
    conn.execute(_BEGIN, values | {"job_id": job.id})


# -- cancel -------------------------------------------------------------------------------------------------------


def cancel(conn: psycopg.Connection[Any], job: Job, begun: dict[str, int], did: Done) -> None:
    """End the next page of what waits, or is dead; ask for the end of what is being called."""
    part = next(iter(parts_left(conn, job)), None)
    if part is None:
        return
    found = _read(conn, job, part, PAGE)
    _move(conn, job, part, found.goes_on, did)
    if found.rows:
        _CANCEL[part.kind](conn, job, found.rows, begun, did)


def _cancel_events(conn: psycopg.Connection[Any], job: Job, rows: Sequence[Row], begun: dict[str, int], did: Done) -> None:
    _lock(conn, job, rows)
    did.unrouted = [row[0] for row in conn.execute(cancelling.CANCEL_UNROUTED, {"seqs": numbers(r.seq for r in rows)})]
    did.done += len(did.unrouted)
    # What was routed meanwhile is met, and counted, among the deliveries.


def _cancel_unfinished(conn: psycopg.Connection[Any], job: Job, rows: Sequence[Row], begun: dict[str, int], did: Done) -> None:
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


def _cancel_dead(conn: psycopg.Connection[Any], job: Job, rows: Sequence[Row], begun: dict[str, int], did: Done) -> None:
    events, deliveries = _lock(conn, job, rows)
    ready = _ready(rows, deliveries, events, did, needs_payload=False)
    conn.execute(_CANCEL_DEAD, {"ids": numbers(d.id for d in ready), "job_id": job.id})
    conn.execute(RECOUNT, {"seqs": numbers({d.seq for d in ready})})
    did.done += len(ready)


_CANCEL: Final = {"pending": _cancel_events, "unfinished": _cancel_unfinished, "dead": _cancel_dead}


# -- reroute ------------------------------------------------------------------------------------------------------


def reroute(conn: psycopg.Connection[Any], job: Job, begun: dict[str, int], did: Done) -> None:
    """Have the next page of what could not be sent routed again."""
    part = next(iter(parts_left(conn, job)), None)
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


#: What does the next page of a job, by its action.
WORK: Final = {"replay": replay, "cancel": cancel, "reroute": reroute}
