"""How long intake waits for its commit, and for whom.

Each request may wait a bounded time. A frozen Postgres would still let requests pile up behind the threads that wait, each
later one answered later: so after a wait in vain only one request at a time tries, and for a shorter time, since it may have
stood in line before; the others are told at once that the store is away. The next commit, whoever waited for it, ends this, and
so do a few seconds in which nobody waited in vain: what a process met long ago says nothing about the first burst of today.
A lost connection is no such case: it fails quickly, and the next request connects anew.
"""

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, NewEvent

#: Seconds for which a wait in vain is remembered.
MEMORY_S: Final = 3.0


class Commits(Protocol):
    """Commits one event together with those of other requests; see `madeira.store.group_commit`."""

    def submit(self, item: NewEvent, timeout_s: float | None) -> Accepted:
        """Wait until `item` is committed, at most `timeout_s` seconds."""
        ...


class Patience:
    """Waits for commits.

    `wait_s` is how long a request waits, `try_s` how long one that tries alone does, `last_commit` tells when this process
    committed last, by `clock`, which gives monotonic seconds.
    """

    def __init__(
        self,
        *,
        commits: Commits,
        last_commit: Callable[[], float],
        wait_s: float,
        try_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commits = commits
        self._last_commit = last_commit
        self._wait_s = wait_s
        self._try_s = try_s
        self._clock = clock
        self._last_vain = float("-inf")
        self._trying = threading.Lock()

    def commit(self, event: NewEvent) -> Accepted:
        """Have `event` committed.

        Raises:
            StoreUnavailable: not in time, or nobody knows whether it was.
        """
        if self._last_vain <= max(self._last_commit(), self._clock() - MEMORY_S):
            return self._wait(event, self._wait_s)
        if not self._trying.acquire(blocking=False):
            raise StoreUnavailable("Postgres does not answer; another request is trying")
        try:
            return self._wait(event, self._try_s)
        finally:
            self._trying.release()

    def _wait(self, event: NewEvent, limit_s: float) -> Accepted:
        started = self._clock()
        try:
            return self._commits.submit(event, limit_s)
        except StoreUnavailable:
            now = self._clock()
            if now - started >= limit_s:
                self._last_vain = now
            raise
