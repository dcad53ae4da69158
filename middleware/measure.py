"""Counts and times what every actor does."""

import threading
import time
from collections.abc import Callable
from typing import Any

from dramatiq import Broker, Message
from dramatiq.broker import MessageProxy
from dramatiq.errors import Retry
from dramatiq.middleware import Middleware


class Measure(Middleware):
    """Reports the outcome and the duration of every message.

    Parameters:
        observe: takes the actor's name, the outcome (``done``, ``retried``, ``failed``, ``skipped``) and the seconds.
        ticked: takes the name of an actor that the scheduler has just asked for.
    """

    def __init__(self, *, observe: Callable[[str, str, float], None], ticked: Callable[[str], None]) -> None:
        self._observe = observe
        self._ticked = ticked
        self._local = threading.local()

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:  # noqa: D102
        if "scheduled_at" in message.options and not self._is_processing:
            self._ticked(message.actor_name)

    @property
    def _is_processing(self) -> bool:
        """Whether this thread works on a message: then what it enqueues is not a tick."""
        return getattr(self._local, "started", None) is not None

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
