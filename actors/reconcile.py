"""Compares what Postgres says is unfinished with what the broker knows, and mends the difference.

Everything that can go wrong between the two ends here: a worker or an API process that died between its commit and its
message, a key that somebody deleted, a finish that never reached Redis. A key is in exactly one place or in none, so
the comparison is exact: no guess by age, and no duplicates when a backlog is an hour deep.

One run at a time, by a lease row, however many schedulers tick. A run looks at what changed lately, at what is overdue,
and at a slice of the rest; where it finds unknown keys it goes on until a whole pass finds none.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import dramatiq
from periodiq import cron
from psycopg import Connection

from madeira import metrics
from madeira.broker.queues import DEAD_LETTER, DELIVER, ROUTE, Ensure, Queues, delivery_key, ensure_delivery, is_key
from madeira.broker.tools import current
from madeira.broker.waking import wake_jobs
from madeira.errors import BrokerUnavailable, MadeiraError, StoreUnavailable
from madeira.log import get
from madeira.metrics import ReconcileKind
from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus
from madeira.store import cancelling, jobs, leases, notices, ordering
from madeira.store import reconcile as rows
from madeira.store.database import Database
from madeira.store.reconcile import LEASE, Unfinished

log = get(__name__)

#: Seconds until another may take over from a run whose process is gone. Each page renews the lease, and takes less.
LEASE_S = 15.0

#: Rows per page.
PAGE = 1000

#: Rows younger than this are on their way to the broker and not asked for, in seconds.
GRACE_S = 5.0

#: Deliveries that a run ends at most, of those that were asked to end and whose worker is gone.
_ABANDONED = 1000

#: Pages of the backlog that a run without findings looks at, per queue.
_SLICES = 5

#: Pages after a finding that are looked at all the same; no backlog has more.
_WHOLE = 1_000_000

#: Seconds that the next of an ordering key may be on its way to the broker after the one before it has ended.
_SUCCESSION_S = 0.5

#: What changed in this many seconds is looked at by every run.
_RECENT_S = 300.0


@dramatiq.actor(queue_name="reconcile", periodic=cron("* * * * *"), priority=0, max_retries=0)
def reconcile() -> None:
    """One run, unless another one is under way or has just ended."""
    tools = current()
    try:
        run(tools.broker.wire, tools.database, period_s=tools.settings.reconcile_s)
    except NotRun as e:
        log.debug("reconcile.not_run", reason=str(e))
    except (StoreUnavailable, BrokerUnavailable) as e:
        log.error("reconcile.deferred", error=str(e))


def run(queues: Queues, database: Database, *, period_s: float, grace_s: float = GRACE_S, force: bool = False) -> Counter[str]:
    """One run; returns counts by kind of difference.

    `force` runs even when one has just ended (a person asked for it).

    Raises:
        NotRun: there was nothing to compare with, or it is another run's turn.
        StoreUnavailable, BrokerUnavailable: a store is away; nothing was lost, the next run goes on.
    """
    holder = uuid4().hex
    with database.connection() as conn:
        if not leases.take(conn, LEASE, holder, LEASE_S):
            raise NotRun(f"another run is under way, or its process is gone since less than {LEASE_S:g} s; try again after that")
        last = rows.last_runs(conn, 1)
    try:
        if not force and last and last[0]["age_s"] < period_s * 0.5:
            raise NotRun("a run has just ended")
        return _run(queues, database, holder, min(grace_s, period_s), last[0]["slice_from"] if last else 0)
    except _Overtaken:
        log.warning("reconcile.overtaken", detail="another run took over while this one stood still")
        raise NotRun("another run took over while this one stood still, and does the same work") from None
    finally:
        with database.connection() as conn:
            leases.release(conn, LEASE, holder)


def _run(queues: Queues, database: Database, holder: str, grace_s: float, slice_from: int) -> Counter[str]:
    if not queues.has_epoch():
        # Without an epoch nothing can be known; the workers rebuild.
        raise NotRun(
            "Redis is empty, or its queues are being rebuilt; the workers do that within seconds: start one, if none runs"
        )
    started = time.monotonic()
    with database.connection() as conn:
        abandoned = cancelling.end_abandoned(conn, _ABANDONED)
    if abandoned:
        with database.connection() as conn:
            queues.ensure([ensure_delivery(ref) for ref in ordering.following(conn, abandoned)])
    with database.connection() as conn:
        stranded = jobs.is_stranded(conn)
    if stranded:
        wake_jobs(queues)
    comparison = Comparison(queues, database, holder=holder, grace_s=grace_s, slice_from=slice_from)
    comparison.note("abandoned", len(abandoned))
    comparison.run()
    counts = +comparison.counts
    duration_s = time.monotonic() - started
    with database.connection() as conn:
        rows.record_run(conn, counts, duration_s, holder, comparison.slice_from)
        notices.reconciled(conn, counts)
    for kind, count in counts.items():
        metrics.RECONCILE_DIFFERENCES.labels(kind).inc(count)
    log.info("reconcile.ended", duration_s=round(duration_s, 3), **counts)
    return counts


class NotRun(MadeiraError):
    """Raised when nothing was compared; the message says why, and what to do."""


class _Overtaken(MadeiraError):
    """Raised when the lease of a run that stood still has gone to another run."""


class Comparison:
    """One comparison of Postgres with the broker, in both directions.

    `counts` tells afterwards what was found, by kind; `slice_from` where the next slice begins.
    """

    def __init__(self, queues: Queues, database: Database, *, holder: str, grace_s: float, slice_from: int) -> None:
        self._queues = queues
        self._database = database
        self._holder = holder
        self._grace_s = grace_s
        self.counts: Counter[str] = Counter()
        self.slice_from = slice_from

    def run(self) -> None:
        """Both directions."""
        self._unrouted()
        self._unfinished()
        self._unnotified()
        self._finished_but_queued(ROUTE)
        self._finished_but_queued(DELIVER)

    def note(self, kind: ReconcileKind, number: int) -> None:
        """Count what was found."""
        self.counts[kind] += number

    def _read(self, reader: Callable[..., list[Any]], *args: Any, **options: Any) -> list[Any]:
        with self._database.connection() as conn:
            still_ours = leases.take(conn, LEASE, self._holder, LEASE_S)
        if not still_ours:
            raise _Overtaken
        with self._database.connection() as conn:
            return reader(conn, *args, **options)

    # -- Postgres knows it, the broker does not -----------------------------------------------------------------

    def _unrouted(self) -> None:
        after, clean = 0, 0
        while clean < _SLICES:
            page = self._read(rows.unrouted, after, PAGE, older_than_s=self._grace_s)
            known = {str(seq): delay_s for seq, delay_s in page}
            missing = self._queues.unknown(ROUTE, list(known.items()))
            if missing:
                # Read again: what was routed meanwhile is not missing.
                gone = self._read_set(rows.finished_events_among, [int(key) for key in missing])
                lost = [Ensure(ROUTE, key, known[key]) for key in missing if int(key) not in gone]
                self._queues.ensure(lost)
                self.note("event_not_queued", len(lost))
            clean = 0 if missing else clean + 1
            if len(page) < PAGE:
                return
            after = page[-1][0]

    def _unfinished(self) -> None:
        self._deliveries(self._read(rows.recently_changed, _RECENT_S, PAGE, older_than_s=self._grace_s))
        self._deliveries(self._read(rows.overdue, PAGE, older_than_s=self._grace_s))
        self._deliveries(self._read(_after_recent, _RECENT_S, PAGE, older_than_s=self._grace_s))
        clean, wraps = 0, 0
        while clean < _SLICES and wraps < 2:
            page = self._read(rows.unfinished_deliveries, self.slice_from, PAGE, older_than_s=self._grace_s)
            if self._deliveries(page):
                # Something is wrong: go on until a whole pass finds nothing.
                clean, wraps = -_WHOLE, 0
            clean += 1
            self.slice_from = page[-1].ref.delivery_id if len(page) == PAGE else 0
            wraps += self.slice_from == 0

    def _deliveries(self, page: Sequence[Unfinished]) -> int:
        known = {delivery_key(row.ref): row.ref for row in page if row.is_first}
        missing = self._queues.unknown(DELIVER, [(key, ref.delay_s) for key, ref in known.items()])
        if any(row.is_ordered and delivery_key(row.ref) in missing for row in page):
            missing = self._still_unknown(missing, known)
        if not missing:
            return 0
        gone = self._read_set(rows.not_first_among, [known[key].delivery_id for key in missing])
        lost = [known[key] for key in missing if known[key].delivery_id not in gone]
        self._queues.ensure([ensure_delivery(ref) for ref in lost])
        self.note("delivery_not_queued", len(lost))
        return len(lost)

    def _still_unknown(self, missing: set[str], known: Mapping[str, DeliveryRef]) -> set[str]:
        """Ask once more, a moment later: what became the first of its key just now is on its way, however old it is."""
        time.sleep(_SUCCESSION_S)
        return self._queues.unknown(DELIVER, [(key, known[key].delay_s) for key in missing])

    def _read_set(self, reader: Callable[[Connection[Any], Sequence[int]], set[int]], ids: Sequence[int]) -> set[int]:
        with self._database.connection() as conn:
            return reader(conn, ids)

    def _unnotified(self) -> None:
        page = self._read(rows.dead_unnotified, 0, PAGE, older_than_s=self._grace_s)
        missing = self._queues.unknown(DEAD_LETTER, [(str(ref.delivery_id), 0.0) for ref in page])
        told = self._read_set(rows.notified_among, [int(key) for key in missing]) if missing else set()
        lost = [Ensure(DEAD_LETTER, key) for key in missing if int(key) not in told]
        self._queues.ensure(lost)
        self.note("dead_letter_not_queued", len(lost))

    # -- the broker knows it, Postgres has finished it ----------------------------------------------------------

    def _finished_but_queued(self, queue: str) -> None:
        keys = self._queues.some_delayed(queue, PAGE)
        self._queues.forget(queue, [key for key in keys if not is_key(queue, key)])
        by_id = {int(key.split(":", 1)[0]): key for key in keys if is_key(queue, key)}
        reader = rows.finished_among if queue == DELIVER else rows.finished_events_among
        gone = self._read_set(reader, list(by_id))
        if not gone:
            return
        kind: ReconcileKind = "deliver_finished_but_queued" if queue == DELIVER else "route_finished_but_queued"
        self.note(kind, self._queues.forget(queue, [by_id[i] for i in gone]))
        # A person may have replayed one meanwhile: what is unfinished now is queued again.
        back = gone - self._read_set(reader, list(gone))
        self._queues.ensure([Ensure(queue, by_id[i]) for i in back])
        if queue == DELIVER:
            with self._database.connection() as conn:
                firsts = ordering.firsts(conn, list(gone)).values()
            self._queues.ensure([ensure_delivery(first.to_queue) for first in firsts if first.to_queue])


def _after_recent(conn: Connection[Any], since_s: float, limit: int, *, older_than_s: float) -> list[Unfinished]:
    """What came first of its ordering key when another one had ended."""
    found = ordering.after_recent(conn, since_s, limit, older_than_s=older_than_s)
    return [Unfinished(ref, DeliveryStatus.PENDING, is_ordered=True) for ref in found]
