"""Dramatiq's Retries, tuned: deliveries come back when their endpoint's policy says, and nothing else counts.

The policy (`madeira.retry`) has decided, and settle has recorded, before the actor raises ``Retry(delay)``. For keyed
messages this class therefore adds no back-off of its own and never gives up: an exception that is not a ``Retry`` is a
fault of the platform, not of the receiver, and leaves the message without a verdict, for which the broker has a rule.
Ordinary messages are retried as Dramatiq does, with exponential back-off and jitter.
"""

from collections.abc import Callable
from typing import Any

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.errors import Retry
from dramatiq.middleware import Retries


class TunedRetries(Retries):
    """Retries for keyed and ordinary messages.

    Parameters:
        is_keyed: whether messages of a queue are keys.
        options: as for `dramatiq.middleware.Retries`; they hold for ordinary messages.
    """

    def __init__(self, *, is_keyed: Callable[[str], bool], **options: Any) -> None:
        super().__init__(**options)
        self._is_keyed = is_keyed

    def after_process_message(  # noqa: D102
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if not self._is_keyed(message.queue_name):
            super().after_process_message(broker, message, result=result, exception=exception)  # type: ignore[no-untyped-call]
        elif isinstance(exception, Retry) and exception.delay is not None:
            broker.enqueue(message, delay=exception.delay)  # type: ignore[arg-type]
