"""What follows the commit of a group of events: their ids go on the queue ``route``.

Postgres has promised already, so Redis gets little time here, and none for a while after it failed: events that are not
queued now are found and queued by reconcile.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from madeira import log
from madeira.errors import BrokerUnavailable
from madeira.records import Accepted, NewEvent

#: Seconds for which Redis is not asked after it failed.
PAUSE_S: Final = 1.0

_log = log.get(__name__)


class _Queues(Protocol):
    def accept(self, accepted: Sequence[Accepted]) -> None: ...


class Enqueue:
    """Called by whoever committed, with what was committed; never raises, never takes long.

    The committing thread and those that serve batches share one: that of two of them both ask Redis, or both wait, when it has
    just failed does no harm.

    `queues` must bound the time of a call itself; `clock` gives monotonic seconds.
    """

    def __init__(self, *, queues: _Queues, clock: Callable[[], float] = time.monotonic) -> None:
        self._queues = queues
        self._clock = clock
        self._not_before = float("-inf")
        self._skipped = 0
        #: When a group was committed last, by `clock`.
        self.last_commit = float("-inf")

    def __call__(self, _events: Sequence[NewEvent], accepted: Sequence[Accepted]) -> None:
        """Queue `accepted`, unless Redis failed a moment ago."""
        self.last_commit = self._clock()
        if self.last_commit < self._not_before:
            self._skipped += len(accepted)
            return
        try:
            self._queues.accept(accepted)
        except BrokerUnavailable as e:
            self._not_before = self._clock() + PAUSE_S
            self._skipped += len(accepted)
            _log.warning("intake.not_queued", reason=str(e), events=self._skipped)
            return
        if self._skipped:
            _log.info("intake.queued_again", left_to_reconcile=self._skipped)
            self._skipped = 0
