"""How many events a source may send: over all processes of the API together, on Redis' clock.

Asked only for sources that have a limit, and only after the signature was found good, so that nobody else can use it up. A
source may send its burst at once and then as fast as its rate. A batch costs as many as it has lines, and is let in as a whole
or not at all; one that is larger than the burst could ever allow is let in when the bucket is full, and paid for afterwards.

Redis away must not close the door: each process then limits by itself, so that as many times the rate may come in as there
are processes.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from madeira import log
from madeira.api.problems import Problem
from madeira.errors import BrokerUnavailable
from madeira.records import Source

#: Seconds for which Redis is not asked after it failed.
PAUSE_S: Final = 1.0

#: Events that may be paid for afterwards: the largest batch.
MOST_AHEAD: Final = 5_000

#: Seconds by which a wait may differ from what was reckoned.
_ROUNDED_S: Final = 0.01

_log = log.get(__name__)


class _Queues(Protocol):
    def run(self, name: str, *args: Any) -> Any: ...


class Limits:
    """Lets events in or refuses them.

    `sources` gives the sources as they are now, `queues` must bound the time of a call itself, `clock` gives monotonic seconds.
    """

    def __init__(
        self, *, sources: Callable[[], Mapping[str, Source]], queues: _Queues, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sources = sources
        self._queues = queues
        self._clock = clock
        self._alone = _Alone()
        self._not_before = float("-inf")

    def take(self, name: str, events: int = 1) -> None:
        """Let `events` of the source `name` in.

        Raises:
            Problem: 429, with the seconds after which it is worth trying again.
        """
        source = self._sources().get(name)
        if source is None or source.rate is None or events == 0:
            return
        wait_s = self._ask(source, source.rate, events)
        if wait_s > 0:
            seconds = max(1, math.ceil(wait_s))
            raise Problem(
                429,
                f"{name} may send {source.rate:g} events a second (and {source.burst} at once): try again in {seconds} s"
                + _reason(source.burst, source.rate, events, wait_s),
                name="over-limit",
                headers={"Retry-After": str(seconds)},
            )

    def _ask(self, source: Source, rate: float, events: int) -> float:
        """Seconds to wait; 0 when they may come now."""
        now = self._clock()
        if now >= self._not_before:
            try:
                wait_ms = self._queues.run(
                    "limit", source.name, f"{1000 / rate:.6f}", source.burst, events, max(source.burst, MOST_AHEAD)
                )
            except BrokerUnavailable as e:
                self._not_before = self._clock() + PAUSE_S
                _log.warning("intake.limited_alone", reason=str(e), source=source.name)
            else:
                return float(wait_ms) / 1000
        return self._alone.wait(source, rate, events, now)


def _reason(burst: int, rate: float, events: int, wait_s: float) -> str:
    """Why the wait is longer than rate and burst let one expect; empty when it is not."""
    if events > burst:
        return f"; a batch larger than the burst, this one of {events}, is let in when all of the burst is saved up"
    if wait_s > events / rate + _ROUNDED_S:
        return "; more than the burst was let in at once, as a batch, and is paid for first"
    return ""


class _Alone:
    """The limits of this process by itself; the same reckoning as in ``scripts/limit.lua``, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: When the bucket of a source is full again.
        self._full: dict[str, float] = {}

    def wait(self, source: Source, rate: float, events: int, now: float) -> float:
        gap, burst = 1 / rate, source.burst
        with self._lock:
            full = min(max(self._full.get(source.name, now), now), now + gap * max(burst, MOST_AHEAD))
            wait_s = full - now if events > burst else full + (events - burst) * gap - now
            # A rounding error of the clock's arithmetic is no reason to wait.
            if wait_s > 1e-6:
                return wait_s
            self._full[source.name] = full + events * gap
            return 0.0
