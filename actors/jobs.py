"""Goes on with jobs, page by page, in turn: a replay, cancel or reroute of many.

One process at a time does so, by a lease row, in one thread however many jobs there are. What it does is decided and kept by
`madeira.store.job_steps`; this only calls it, tells the broker, and waits in between. It is woken when a job is made or let go,
and sends itself on while there is something to do. It looks every minute by itself, and reconcile wakes it where nobody goes on:
so a job goes on whose process was killed. The lease outlives a turn until shortly before the next one, so whatever else was woken
ends at once: a second message that sent itself on too would take the thread in every pause of the first, before all deliveries.
"""

import time
from collections.abc import Callable
from typing import Final
from uuid import uuid4

import dramatiq
import psycopg
from dramatiq.errors import ConnectionClosed
from periodiq import cron

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Queues, delivery_key, ensure_delivery
from madeira.broker.tools import current
from madeira.broker.waking import JOBS
from madeira.errors import BrokerUnavailable, MadeiraError, StoreUnavailable
from madeira.log import get
from madeira.store import job_steps, leases, ordering
from madeira.store import jobs as store
from madeira.store.database import Database
from madeira.store.job_steps import Step

log = get(__name__)

#: Seconds until another may take over from a process that is gone.
LEASE_S: Final = 15.0

#: Seconds between two renewals of the lease.
_RENEW_S: Final = 3.0

#: Seconds that one message goes on, so that a stop or a deploy never waits for a job.
TURN_S: Final = 30.0

#: Seconds between two looks at what was begun: at first, and at most when nothing has moved for a while.
LOOK_S: Final = (0.02, 0.5)

#: Seconds without any movement after which a turn ends, so that what waits for a receiver keeps no thread.
IDLE_S: Final = 2.0

#: Seconds between two turns: after one in which something moved, and after one that ended since nothing did. Where a worker has
#: one thread only, it calls meanwhile.
_PAUSE_S: Final = 0.1
_IDLE_PAUSE_S: Final = 0.5

#: Seconds before the next turn at which the lease is free again: its message must never find it taken by the turn before.
_FREE_BEFORE_S: Final = 0.05

#: Seconds for which a job rests whose page failed, while the others go on.
_REST_S: Final = 0.5

#: Milliseconds after which a message that met a store away tries again.
_AGAIN_MS: Final = 5_000


@dramatiq.actor(queue_name=JOBS, periodic=cron("* * * * *"), priority=5, max_retries=0)
def jobs() -> None:
    """Go on with the jobs that there are, unless another process does."""
    tools = current()
    try:
        turn = Turn(tools.broker.wire, tools.database, is_stopping=lambda: tools.broker.stopping)
        if turn.run():
            _send(round(turn.pause_s * 1000))
    except StoreUnavailable as e:
        log.error("jobs.deferred", error=str(e))
        _send(_AGAIN_MS)


def _send(delay_ms: int) -> None:
    try:
        jobs.send_with_options(delay=delay_ms)
    except ConnectionClosed as e:
        log.warning("jobs.not_sent_on", error=str(e), detail="the next tick, or reconcile, wakes a worker")


class Turn:
    """One turn of one process; `is_stopping` tells that it is to end early, `turn_s` when at the latest."""

    def __init__(
        self, queues: Queues, database: Database, *, is_stopping: Callable[[], bool] = lambda: False, turn_s: float = TURN_S
    ) -> None:
        self._queues = queues
        self._database = database
        self._is_stopping = is_stopping
        self._until = time.monotonic() + turn_s
        self._holder = uuid4().hex
        self._renew_at = 0.0
        #: Whether it has ended since nothing moved.
        self.is_idle = False
        #: Jobs whose beginnings were made sure of.
        self._known: set[int] = set()
        #: Jobs that have stumbled -> reading of the monotonic clock at which they are tried again.
        self._resting: dict[int, float] = {}

    def run(self) -> bool:
        """Go on until nothing is left, or the time is up; whether there is something left, for a turn in `pause_s` seconds.

        Raises:
            StoreUnavailable: Postgres is away; nothing is lost.
        """
        if not self._is_ours():
            return False
        is_kept = False
        try:
            self._work()
            is_kept = self._keep()
        finally:
            if not is_kept:
                with self._database.connection() as conn:
                    leases.release(conn, store.LEASE, self._holder)
        if is_kept:
            return True
        # Asked once more after the lease is free: whoever was woken meanwhile has found it taken.
        with self._database.connection() as conn:
            return bool(store.runnable(conn))

    @property
    def pause_s(self) -> float:
        """Seconds until the next turn, where something is left."""
        return _IDLE_PAUSE_S if self.is_idle else _PAUSE_S

    def _keep(self) -> bool:
        """Keep the lease through the pause, if there is something left; a process that is to stop leaves it to others at once."""
        if self._is_stopping():
            return False
        with self._database.connection() as conn:
            return bool(store.runnable(conn)) and leases.take(conn, store.LEASE, self._holder, self.pause_s - _FREE_BEFORE_S)

    def _work(self) -> None:
        wait_s, moved_at = LOOK_S[0], time.monotonic()
        while self._is_ours() and not self._is_stopping() and time.monotonic() < self._until:
            with self._database.connection() as conn:
                runnable = store.runnable(conn)
            if not runnable:
                return
            now = time.monotonic()
            steps = [self._step(job_id) for job_id in runnable if self._resting.get(job_id, 0.0) <= now]
            if any(step.moved for step in steps):
                moved_at = time.monotonic()
            self.is_idle = time.monotonic() - moved_at > IDLE_S
            if self.is_idle:
                return
            if any(step.more for step in steps):
                # Full pages follow each other at once, windows wait for what was begun.
                wait_s = LOOK_S[0]
                time.sleep(0.0 if any(step.ended or step.to_route or step.unrouted for step in steps) else wait_s)
                continue
            wait_s = LOOK_S[0] if any(step.moved for step in steps) else min(LOOK_S[1], wait_s * 2)
            time.sleep(min([wait_s, *(step.wait_s for step in steps if step.wait_s > 0)]))

    def _is_ours(self) -> bool:
        if time.monotonic() < self._renew_at:
            return True
        with self._database.connection() as conn:
            is_ours = leases.take(conn, store.LEASE, self._holder, LEASE_S)
        self._renew_at = time.monotonic() + _RENEW_S
        return is_ours

    def _step(self, job_id: int) -> Step:
        try:
            with self._database.connection() as conn:
                step = job_steps.step(conn, job_id)
        except StoreUnavailable:
            raise
        except Exception as e:
            log.exception("job.stumbled", job=job_id)
            with self._database.connection() as conn:
                is_over = job_steps.stumble(conn, job_id, _told(e))
            self._resting[job_id] = time.monotonic() + _REST_S
            return Step(is_over=is_over)
        self._tell(job_id, step)
        return step

    def _tell(self, job_id: int, step: Step) -> None:
        """Let the broker know what was committed; should Redis be away, reconcile does."""
        with self._database.connection() as conn:
            begun = step.begun
            if job_id not in self._known:
                begun = job_steps.pending(conn, job_id)
                self._known.add(job_id)
            due = [*ordering.leading(conn, begun), *ordering.following(conn, step.ended)]
        try:
            self._queues.ensure([*(ensure_delivery(ref) for ref in due), *(Ensure(ROUTE, str(seq)) for seq in step.to_route)])
            # Afterwards: a key that is still queued when this process dies makes its claim see to what follows.
            self._queues.forget(DELIVER, [delivery_key(ref) for ref in step.ended])
            self._queues.forget(ROUTE, [str(seq) for seq in step.unrouted])
        except BrokerUnavailable as e:
            log.warning("job.not_told", job=job_id, reason=str(e))
        if step.is_over:
            log.info("job.ended", job=job_id)


def _told(error: Exception) -> str:
    """What a person may read of an error: never what Postgres quotes of a row."""
    if isinstance(error, psycopg.Error):
        return f"Postgres: {error.diag.message_primary or type(error).__name__}"
    return str(error) if isinstance(error, MadeiraError) else f"{type(error).__name__}; more is in the log of the workers"
