"""Lets a delivery start only close to the moment that its lane's pace gave it.

The pace is kept where grants are handed out. A grant that then lies in a busy process's memory would start late and
next to the ones after it, and so break the pace at the receiver, while another process could have started it in time.
Such a grant is given back with its rate token. A question that fails counts as "too late": Dramatiq would swallow its
error and run the message.
"""

from collections.abc import Callable

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware, SkipMessage

from madeira.log import get

log = get(__name__)


class RateLimit(Middleware):
    """Gives back deliveries that were not started in time.

    Parameters:
        is_stale: whether a message waited too long in memory while others could have taken it.
        give_back: puts the message's keys back to the front of their queue, with their rate tokens.
    """

    def __init__(self, *, is_stale: Callable[[MessageProxy], bool], give_back: Callable[[MessageProxy], None]) -> None:
        self._is_stale = is_stale
        self._give_back = give_back

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        if self._may_run(message):
            return
        log.info("grant.stale", actor=message.actor_name)
        try:
            self._give_back(message)
        except Exception:
            log.exception("grant.not_given_back", remedy="it comes back by itself, without a verdict")
        raise SkipMessage("not started in time")

    def _may_run(self, message: MessageProxy) -> bool:
        try:
            return not self._is_stale(message)
        except Exception:
            log.exception("grant.unknown", actor=message.actor_name)
            return False
