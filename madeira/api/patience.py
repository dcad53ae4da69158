"""How long intake waits for its commit, and for whom.

Each request may wait a bounded time. A frozen Postgres would still let requests pile up behind the threads that wait, each
later one answered later: so once a wait was in vain only one request at a time tries, and the others are told at once that
the store is away. A lost connection is no such case: it fails quickly, and the next request connects anew.
"""

import threading
import time
from typing import Protocol

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, NewEvent


class Commits(Protocol):
    """Commits one event together with those of other requests; see `madeira.store.group_commit`."""

    def submit(self, item: NewEvent, timeout_s: float | None) -> Accepted:
        """Wait until `item` is committed, at most `timeout_s` seconds."""
        ...


class Patience:
    """Waits for commits, at most `wait_s` seconds for each, and for one at a time after a wait in vain."""

    def __init__(self, *, commits: Commits, wait_s: float) -> None:
        self._commits = commits
        self._wait_s = wait_s
        self._in_vain = False
        self._trying = threading.Lock()

    def commit(self, event: NewEvent) -> Accepted:
        """Have `event` committed.

        Raises:
            StoreUnavailable: not in time, or nobody knows whether it was.
        """
        if not self._in_vain:
            return self._wait(event)
        if not self._trying.acquire(blocking=False):
            raise StoreUnavailable("Postgres does not answer; another request is trying")
        try:
            return self._wait(event)
        finally:
            self._trying.release()

    def _wait(self, event: NewEvent) -> Accepted:
        started = time.monotonic()
        try:
            accepted = self._commits.submit(event, self._wait_s)
        except StoreUnavailable:
            self._in_vain = self._in_vain or time.monotonic() - started >= self._wait_s
            raise
        self._in_vain = False
        return accepted
