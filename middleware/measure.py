"""Counts and times what every actor does."""

import threading
import time
from collections.abc import Callable
from typing import Any

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.errors import Retry
from dramatiq.middleware import Middleware


class Measure(Middleware):
    """Reports the outcome and the duration of every message.

    Parameters:
        observe: takes the actor's name, the outcome (``done``, ``retried``, ``failed``, ``skipped``) and the seconds.
    """

    def __init__(self, *, observe: Callable[[str, str, float], None]) -> None:
        self._observe = observe
        self._local = threading.local()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        self._local.started = time.perf_counter()

    def after_process_message(  # noqa: D102
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        outcome = "done" if exception is None else "retried" if isinstance(exception, Retry) else "failed"
        self._report(message, outcome)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        self._report(message, "skipped")

    def _report(self, message: MessageProxy, outcome: str) -> None:
        started = getattr(self._local, "started", None)
        self._local.started = None
        self._observe(message.actor_name, outcome, 0.0 if started is None else time.perf_counter() - started)
