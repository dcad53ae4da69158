"""Counts once a minute what happened, for the charts; ``madeira/store/rollups.py`` says how nothing is missed or counted twice.

One run at a time, by a lease row, however many schedulers tick; that only saves work, since two would come one after another
anyway. After a pause a run counts a bounded number of rows, and the next one goes on.
"""

import time
from uuid import uuid4

import dramatiq
from periodiq import cron

from madeira.broker.tools import current
from madeira.errors import StoreUnavailable
from madeira.log import get
from madeira.store import leases, rollups
from madeira.store.database import Database

log = get(__name__)

#: Name of the lease row.
LEASE = "rollup"

#: Seconds until another may take over from a run whose process is gone. Each step renews the lease, and takes less.
LEASE_S = 15.0

#: Steps of a run; what they do not manage the next run does.
STEPS = 30


@dramatiq.actor(queue_name="rollup", periodic=cron("* * * * *"), priority=20, max_retries=0)
def rollup() -> None:
    """One run, unless another one is under way."""
    tools = current()
    try:
        run(tools.database)
    except StoreUnavailable as e:
        log.warning("rollup.deferred", error=str(e))


def run(database: Database, *, steps: int = STEPS, page: int = rollups.PAGE, lag_s: float = rollups.LAG_S) -> int:
    """Count what is new, and remove what is kept no longer; returns the number of rows counted.

    Raises:
        StoreUnavailable: Postgres is away; the next run goes on where this one was.
    """
    holder = uuid4().hex
    if not _take(database, holder):
        return 0
    try:
        with database.connection() as conn:
            rollups.set_fences(conn)
        time.sleep(lag_s)
        counted = _count(database, holder, steps, page, lag_s)
        with database.connection() as conn:
            rollups.purge(conn)
        return counted
    finally:
        with database.connection() as conn:
            leases.release(conn, LEASE, holder)


def _count(database: Database, holder: str, steps: int, page: int, lag_s: float) -> int:
    counted = 0
    for _ in range(steps):
        if not _take(database, holder):
            break
        with database.connection() as conn:
            step = rollups.step(conn, page=page, lag_s=lag_s)
        counted += step.counted
        if not step.more:
            break
    return counted


def _take(database: Database, holder: str) -> bool:
    with database.connection() as conn:
        return leases.take(conn, LEASE, holder, LEASE_S)
