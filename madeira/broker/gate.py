"""The gate of a worker process, closed while Postgres is away: who cannot record an outcome must not ask for work."""

import threading
import time
from collections.abc import Callable

from madeira.log import get
from madeira.store.schema import is_misfit

log = get(__name__)


class Gate:
    """Open from the beginning.

    `trouble` tells why Postgres cannot be used, and is asked at most once a second while the gate is closed; `clock` gives
    monotonic seconds.
    """

    def __init__(self, *, trouble: Callable[[], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._trouble = trouble
        self._clock = clock
        #: What was last in the way.
        self._why: str | None = None
        self._lock = threading.Lock()
        self._closed_until: float | None = None

    def close(self, why: str) -> None:
        """Ask for no more messages until Postgres can be used."""
        self._tell(why)
        self._closed_until = self._clock() + 1.0

    def is_open(self) -> bool:
        """Whether messages may be asked for."""
        closed_until = self._closed_until
        if closed_until is None:
            return True
        if self._clock() < closed_until or not self._lock.acquire(blocking=False):
            return False
        try:
            why = self._trouble()
            if why is None:
                self._closed_until = self._why = None
                log.info("store.back")
                return True
            self.close(why)
            return False
        finally:
            self._lock.release()

    def _tell(self, why: str) -> None:
        """Once; and once more when it turns out that a person has to do something."""
        before, self._why = self._why, why
        if before is None or is_misfit(before) != is_misfit(why):
            log.warning("store.away", reason=why, detail="asking for no messages until Postgres can be used")
