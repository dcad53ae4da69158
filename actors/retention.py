"""Removes what is kept no longer, in small steps: a minute's tick goes on for a part of it, and rests most of the time.

One run at a time, by a lease row, however many schedulers tick. What a run does not manage the next one does.
`madeira/store/retention.py` says what goes and what is held back, `madeira/store/parts.py` how old attempts go.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import dramatiq
import psycopg
from periodiq import cron

from madeira import metrics
from madeira.broker.tools import current
from madeira.errors import MadeiraError, StoreUnavailable
from madeira.log import get
from madeira.store import leases, parts, retention
from madeira.store.database import Database
from madeira.store.retention import Ages, Step

T = TypeVar("T")

log = get(__name__)

#: Name of the lease row.
LEASE: Final = "retention"

#: Seconds until another may take over from a run whose process is gone.
LEASE_S: Final = 20.0

#: Seconds after which the lease is renewed. A renewal is a commit like any other, so not with each step; and two of them fit
#: before the lease runs out, whatever a step and its rest take.
RENEW_S: Final = 5.0

#: Seconds that one message goes on, so that a stop or a deploy never waits for it.
TURN_S: Final = 45.0

#: How long a step is rested after, as a multiple of what it took; and the bounds of a rest, in seconds. A step takes some
#: milliseconds, so that a twentieth of the time is worked; one that takes long, since others need the machine, is followed by a
#: long rest, but never by one so long that less goes than comes (see docs/decisions.md).
_REST: Final = 19.0
_RESTS_S: Final = (0.005, 0.5)


class NotRun(MadeiraError):
    """Raised when another run is under way."""


@dramatiq.actor(actor_name="retention", queue_name="retention", periodic=cron("* * * * *"), priority=30, max_retries=0)
def retention_run() -> None:
    """One run, unless another one is under way."""
    tools = current()
    try:
        run(tools.database, retention.ages_of(tools.settings), is_stopping=lambda: tools.broker.stopping)
    except NotRun as e:
        log.debug("retention.not_run", reason=str(e))
    except StoreUnavailable as e:
        log.warning("retention.deferred", error=str(e))


def run(
    database: Database,
    ages: Ages,
    *,
    who: str | None = None,
    turn_s: float = TURN_S,
    is_stopping: Callable[[], bool] = lambda: False,
    rest: float = _REST,
) -> Counter[str]:
    """Remove what may go, for `turn_s` seconds at most; returns how much went, by kind.

    `who` is the person who asked for it; None: it goes by itself. `rest` is how long a step is rested after, as a multiple of
    what it took.

    Raises:
        NotRun: another run is under way.
        StoreUnavailable: Postgres is away; the next run goes on.
    """
    return Run(database, ages, who=who, turn_s=turn_s, is_stopping=is_stopping, rest=rest).run()


class Run:
    """One run."""

    def __init__(
        self,
        database: Database,
        ages: Ages,
        *,
        who: str | None,
        turn_s: float,
        is_stopping: Callable[[], bool],
        rest: float,
    ) -> None:
        self._database = database
        self._ages = ages
        self._who = who
        self._until = time.monotonic() + turn_s
        self._is_stopping = is_stopping
        self._rest = rest
        self._holder = uuid4().hex
        self._renew_at = 0.0
        #: What went, by kind.
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Do it."""
        if not self._is_ours():
            raise NotRun(f"another run is under way, or its process is gone since less than {LEASE_S:g} s; try again after that")
        started = time.monotonic()
        try:
            with self._database.dedicated() as conn:
                self._parts(conn)
                self._rows(conn)
            metrics.RETENTION_LAST_SUCCESS.set_to_current_time()
        finally:
            self._end(time.monotonic() - started)
        return +self.counts

    def _end(self, duration_s: float) -> None:
        counts = dict(+self.counts)
        with self._database.connection() as conn:
            leases.release(conn, LEASE, self._holder)
            if counts:
                retention.note(conn, counts, self._who)
        for kind, count in counts.items():
            metrics.RETENTION_REMOVED.labels(kind).inc(count)
        if counts:
            log.info("retention.removed", duration_s=round(duration_s, 3), **counts)

    def _is_ours(self) -> bool:
        if time.monotonic() < self._renew_at:
            return True
        self._renew_at = time.monotonic() + RENEW_S
        with self._database.connection() as conn:
            return leases.take(conn, LEASE, self._holder, LEASE_S)

    def _goes_on(self) -> bool:
        return time.monotonic() < self._until and not self._is_stopping() and self._is_ours()

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _parts(self, conn: psycopg.Connection[Any]) -> None:
        try:
            made = parts.make_ahead(conn)
            if made:
                log.info("retention.parts_made", parts=made)
            for part in self._old(conn):
                if not self._goes_on():
                    return
                self._remove_part(conn, part)
        except parts.Busy as e:
            log.info("retention.log_busy", detail=f"the log could not be locked in time; the next run tries again: {e}")

    def _old(self, conn: psycopg.Connection[Any]) -> Iterator[parts.Part]:
        """Parts that are too old; of those that were looked through before only one at a time, in turn."""
        before = retention.bounds(conn).before(self._ages.attempts)
        if before is None:
            return
        old = [part for part in parts.parts(conn) if part.until <= before]
        kept = [part for part in old if part.is_kept]
        if kept:
            yield kept[int(time.time() // 60) % len(kept)]
        yield from (part for part in old if not part.is_kept)

    def _remove_part(self, conn: psycopg.Connection[Any], part: parts.Part) -> None:
        if part.is_kept:
            self.counts["attempt_parts"] += parts.drop_if_needless(conn, part)
            return
        removal = parts.Removal(conn, part)
        while self._timed(partial(removal.step, conn)):
            if not self._goes_on():
                return
        if not removal.finish(conn):
            log.warning("retention.part_held", part=part.name, size=part.size, attempts=removal.kept)
            return
        self.counts["attempt_parts"] += 1
        log.info("retention.part_removed", part=part.name, size=part.size, kept=removal.kept)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _rows(self, conn: psycopg.Connection[Any]) -> None:
        """A step of each duty in turn, until none has more to do."""
        duties = [self._remove, self._bury, self._strip, self._rest_of_log, self._old_tombstones, self._old_audit]
        while duties:
            left = []
            for duty in duties:
                if not self._goes_on():
                    return
                if self._timed(partial(duty, conn)).more:
                    left.append(duty)
            duties = left

    def _remove(self, conn: psycopg.Connection[Any]) -> Step:
        removed = retention.remove(conn, self._ages)
        if removed is None:
            return Step(0, more=False)
        self.counts.update({f"events_{status}": count for status, count in removed.events.items()})
        self.counts["deliveries"] += removed.deliveries
        return Step(sum(removed.events.values()), more=True)

    def _bury(self, conn: psycopg.Connection[Any]) -> Step:
        return retention.bury(conn, self._ages)

    def _strip(self, conn: psycopg.Connection[Any]) -> Step:
        step = retention.strip(conn, self._ages)
        self.counts["payloads"] += step.done
        return step

    def _rest_of_log(self, conn: psycopg.Connection[Any]) -> Step:
        before = retention.bounds(conn).before(self._ages.attempts)
        count = 0 if before is None else parts.remove_rest(conn, before)
        self.counts["attempts"] += count
        return Step(count, more=count == parts.REST_PAGE)

    def _old_tombstones(self, conn: psycopg.Connection[Any]) -> Step:
        step = retention.remove_old(conn, "tombstone", self._ages.tombstone)
        self.counts["ids"] += step.done
        return step

    def _old_audit(self, conn: psycopg.Connection[Any]) -> Step:
        step = retention.remove_old(conn, "audit", self._ages.audit)
        self.counts["audit"] += step.done
        return step

    def _timed(self, work: Callable[[], T]) -> T:
        """Do a step, and rest: whoever waits for a row, the disk or a processor comes first."""
        began = time.monotonic()
        done = work()
        time.sleep(rest_s(time.monotonic() - began, self._rest))
        return done


def rest_s(took_s: float, rest: float = _REST) -> float:
    """How long to rest after a step that took `took_s` seconds, in seconds; `rest` 0 is not at all."""
    return min(max(took_s * rest, _RESTS_S[0]), _RESTS_S[1]) if rest else 0.0
