"""The threads that keep a worker process in touch with Redis: the heartbeat, and the wait to be woken.

The heartbeat has a thread of its own, so that no amount of work can delay it. It also is the safety net under the
scheduler: where no reconcile has run for a while, it asks for one.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import redis

from madeira.broker.broker import MadeiraBroker
from madeira.broker.memory import warn_of_eviction
from madeira.errors import BrokerUnavailable, StoreUnavailable
from madeira.log import get

log = get(__name__)

#: Seconds that one blocking wait takes at most; well below the client's own timeout.
_WAIT_S: Final = 1


class Pulse:
    """The heartbeat and the waker of one worker process.

    Parameters:
        waiting: a client for blocking calls, whose timeout is longer than they are.
        beat_s: seconds between two beats.
        after_beat: called after each beat that reached Redis.
        rebuild: rebuilds the broker from Postgres; called in a thread of its own when the epoch is missing.
    """

    def __init__(
        self,
        *,
        broker: MadeiraBroker,
        waiting: redis.Redis,
        beat_s: float,
        after_beat: Callable[[], None],
        rebuild: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._waiting = waiting
        self._beat_s = beat_s
        self._after_beat = after_beat
        self._rebuild = rebuild
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._rebuilding = threading.Lock()

    def start(self) -> None:
        """Start both threads."""
        for name, run in (("beat", self._run_beats), ("waker", self._run_waker)):
            thread = threading.Thread(target=run, name=f"madeira-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End both threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=_WAIT_S + 5)
        self._waiting.close()
        self._waiting.connection_pool.disconnect()

    def start_rebuild(self) -> None:
        """Rebuild in the background; a no-op while this process is at it."""
        if self._rebuilding.acquire(blocking=False):
            threading.Thread(target=self._run_rebuild, name="madeira-rebuild", daemon=True).start()

    def _run_rebuild(self) -> None:
        try:
            self._rebuild()
        except (StoreUnavailable, BrokerUnavailable) as e:
            log.error("rebuild.failed", error=str(e), remedy="it is tried again at once")
            self._stopped.wait(1.0)
        except Exception:
            log.exception("rebuild.failed", remedy="it is tried again at once")
            self._stopped.wait(1.0)
        finally:
            self._rebuilding.release()

    def _run_beats(self) -> None:
        met, away = False, False
        while not self._stopped.is_set():
            try:
                self._broker.beat()
                if away:
                    log.info("beat.back")
                if away or not met:
                    # What comes back may be another server, or one with other settings.
                    warn_of_eviction(self._broker.wire.client)
                met, away = True, False
                self._after_beat()
            except BrokerUnavailable as e:
                if not away:
                    log.error("beat.failed", error=str(e))
                away = True
            except Exception:
                log.exception("beat.failed")
            self._stopped.wait(self._beat_s)

    def _run_waker(self) -> None:
        key = f"{self._broker.namespace}:wake:{self._broker.process}"
        while not self._stopped.is_set():
            try:
                woken = self._waiting.blpop([key], timeout=_WAIT_S)
                if woken is not None:
                    self._broker.nudge(bytes(woken[1]).decode())  # type: ignore[arg-type]
            except redis.RedisError:
                self._stopped.wait(0.5)


class Due:
    """Tells when something that should happen every `period_s` seconds has not been asked for in that time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def __call__(self) -> bool:
        """True at most once per period."""
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._period_s
        return True
