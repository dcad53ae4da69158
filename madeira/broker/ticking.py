"""The broker of the scheduler, which outlives a Redis that is away.

periodiq ends at the first tick that cannot be sent, with a traceback, and whoever starts it again has it end again. Nothing hangs
on a single tick: whatever is due a minute later is asked for again.
"""

from typing import Any

from dramatiq import Message
from dramatiq.errors import ConnectionClosed

from madeira.broker.broker import MadeiraBroker
from madeira.log import get

log = get(__name__)


class TickingBroker(MadeiraBroker):
    """A broker that drops what it cannot send, and says once that it does."""

    _is_away = False

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message, if Redis can be reached."""
        try:
            message = super().enqueue(message, delay=delay)
        except ConnectionClosed as e:
            if not self._is_away:
                detail = "no periodic work is asked for until Redis is back; workers ask for a reconcile themselves"
                log.error("broker.away", queue=message.queue_name, error=str(e), detail=detail)
            self._is_away = True
            return message
        if self._is_away:
            log.info("broker.back", queue=message.queue_name)
            self._is_away = False
        return message
