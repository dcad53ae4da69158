"""Lets a keyed message run only while its in-flight marker lives.

The marker is set in Redis when a key is handed out and runs out by itself, after which another worker may take the key
over. A process that was stopped (a pause of the machine, SIGSTOP) wakes up with messages in memory whose markers are
gone: it gives them back instead of calling. A question that fails counts as "run out": Dramatiq would swallow its error
and run the message.
"""

from collections.abc import Callable

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware, SkipMessage

from madeira.log import get

log = get(__name__)


class InFlight(Middleware):
    """Gives back keyed messages whose marker has run out.

    Parameters:
        is_live: whether the marker of a message lives; True for messages that have none.
        give_back: puts the message's keys back to the front of their queue, with their rate tokens.
    """

    def __init__(self, *, is_live: Callable[[MessageProxy], bool], give_back: Callable[[MessageProxy], None]) -> None:
        self._is_live = is_live
        self._give_back = give_back

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        if self._may_run(message):
            return
        log.warning("grant.expired", actor=message.actor_name)
        try:
            self._give_back(message)
        except Exception:
            log.exception("grant.not_given_back", remedy="it comes back by itself, without a verdict")
        raise SkipMessage("the marker has run out")

    def _may_run(self, message: MessageProxy) -> bool:
        try:
            return self._is_live(message)
        except Exception:
            log.exception("grant.unknown", actor=message.actor_name)
            return False
