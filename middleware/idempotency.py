"""Lets a keyed message run only when this process was given it.

A message of a keyed actor is the name of a row; the right to work on it is the grant that came with its hand-out. A
copy without a grant (put there by hand, or left over from before it was finished) is not run: the work is queued
already, or done. A question that fails counts as "no": Dramatiq would swallow its error and run the message.
"""

from collections.abc import Callable
from typing import Any

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware, SkipMessage

from madeira.log import get

log = get(__name__)


class Idempotency(Middleware):
    """Refuses keyed messages without a grant.

    Parameters:
        is_keyed: whether messages of a queue are keys.
        has_grant: whether this process holds the grant of a message.
    """

    def __init__(self, *, is_keyed: Callable[[str], bool], has_grant: Callable[[MessageProxy], bool]) -> None:
        self._is_keyed = is_keyed
        self._has_grant = has_grant

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        if not self._may_run(message):
            log.warning("grant.missing", actor=message.actor_name, args=list[Any](message.args))
            raise SkipMessage("no grant")

    def _may_run(self, message: MessageProxy) -> bool:
        try:
            return not self._is_keyed(message.queue_name) or self._has_grant(message)
        except Exception:
            log.exception("grant.unknown", actor=message.actor_name)
            return False
