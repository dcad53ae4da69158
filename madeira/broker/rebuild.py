"""Rebuilds the queues from Postgres after Redis lost its memory.

Redis carries an epoch that only a rebuild makes; while it is missing, keyed queues hand out nothing and intake goes on.
Before the epoch is made, the places of calls that are still under way are written: by the workers that make them, with
their heartbeats, and from the ``delivering`` rows for workers that may be dead. Otherwise a wipe with ten calls in
flight would admit ten more. The step that makes the epoch requires the nonce that the rebuild began with, so that a
second wipe, or a second rebuild, starts it over.
"""

import threading
from collections.abc import Callable
from typing import Final
from uuid import uuid4

from madeira.broker.queues import ROUTE, Ensure, Queues, delivery_key, ensure_dead_letter, ensure_delivery
from madeira.log import get
from madeira.store import leases, reconcile
from madeira.store.database import Database

log = get(__name__)

#: Name of the lease row: one rebuild at a time.
LEASE: Final = "rebuild"

#: Beats after which another may take over from a rebuild whose process is gone, and a second. The epoch takes about two.
_LEASE_BEATS: Final = 5

#: Rows per page.
_PAGE: Final = 1000


def rebuild(*, queues: Queues, database: Database, holder: str, beat_s: float, stopped: Callable[[float], bool]) -> bool:
    """Rebuild, unless somebody else is at it or it is not needed.

    `stopped` waits the given seconds and tells whether the process ends meanwhile. Returns whether the epoch was made
    by this call.

    Raises:
        BrokerUnavailable, StoreUnavailable: a store went away; the rebuild is tried again later.
    """
    # Short, so that a process that dies meanwhile does not stop the others for long: of two the nonce lets one through.
    with database.connection() as conn:
        if not leases.take(conn, LEASE, holder, _LEASE_BEATS * beat_s + 1.0):
            return False
    try:
        return _rebuild(queues, database, beat_s, stopped)
    finally:
        with database.connection() as conn:
            leases.release(conn, LEASE, holder)


def _rebuild(queues: Queues, database: Database, beat_s: float, stopped: Callable[[float], bool]) -> bool:
    nonce = uuid4().hex
    if not queues.rebuild_begin(nonce):
        return False
    log.warning("rebuild.began", detail="Redis has no epoch: it is new or lost its memory")
    # Two beats: every living worker has announced what it holds. Where nothing is unfinished nobody holds anything.
    if _anything_unfinished(database) and stopped(2.2 * beat_s):
        return False
    if not _hold(queues, database, nonce) or not queues.rebuild_commit(nonce):
        log.warning("rebuild.again", detail="Redis lost its memory once more, or another rebuild began")
        return False
    queued = fill(queues, database)
    log.warning("rebuild.ended", queued=queued)
    return True


def _anything_unfinished(database: Database) -> bool:
    with database.connection() as conn:
        return bool(reconcile.unfinished_deliveries(conn, 0, 1))


def _hold(queues: Queues, database: Database, nonce: str) -> bool:
    after = 0
    while True:
        with database.connection() as conn:
            rows = reconcile.delivering(conn, after, _PAGE)
        places = [(delivery_key(row.ref), f"pg:{row.token}", row.lease_s) for row in rows if row.lease_s > 0]
        if not queues.rebuild_hold(nonce, places):
            return False
        if len(rows) < _PAGE:
            return True
        after = rows[-1].ref.delivery_id


def fill(queues: Queues, database: Database) -> int:
    """Make sure that everything unfinished is queued; returns how many keys were not."""
    return _fill_route(queues, database) + _fill_deliver(queues, database) + _fill_dead_letters(queues, database)


def _fill_route(queues: Queues, database: Database) -> int:
    queued, after = 0, 0
    while True:
        with database.connection() as conn:
            rows = reconcile.unrouted(conn, after, _PAGE)
        queued += queues.ensure([Ensure(ROUTE, str(seq), delay_s) for seq, delay_s in rows])
        if len(rows) < _PAGE:
            return queued
        after = rows[-1][0]


def _fill_deliver(queues: Queues, database: Database) -> int:
    queued, after = 0, 0
    while True:
        with database.connection() as conn:
            page = reconcile.unfinished_deliveries(conn, after, _PAGE)
        queued += queues.ensure([ensure_delivery(row.ref) for row in page if row.is_first])
        if len(page) < _PAGE:
            return queued
        after = page[-1].ref.delivery_id


def _fill_dead_letters(queues: Queues, database: Database) -> int:
    queued, after = 0, 0
    while True:
        with database.connection() as conn:
            refs = reconcile.dead_unnotified(conn, after, _PAGE)
        queued += queues.ensure([ensure_dead_letter(ref) for ref in refs])
        if len(refs) < _PAGE:
            return queued
        after = refs[-1].delivery_id


class Stopper:
    """An event that ends waits early."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self, seconds: float) -> bool:
        """Wait; True when the process ends."""
        return self._event.wait(seconds)

    def stop(self) -> None:
        """End all waits."""
        self._event.set()
