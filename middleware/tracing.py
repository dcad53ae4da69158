"""Puts what a message is about into every log line that is written while it runs."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from dramatiq import Broker
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Middleware


class Tracing(Middleware):
    """Opens a log context per message.

    Parameters:
        bind: opens a context in which log lines carry the given fields.
    """

    def __init__(self, *, bind: Callable[..., AbstractContextManager[Any]]) -> None:
        self._bind = bind
        self._local = threading.local()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        self._local.context = self._bind(**describe(message))
        self._local.context.__enter__()

    def after_process_message(  # noqa: D102
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._close()

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:  # noqa: D102
        self._close()

    def _close(self) -> None:
        context = getattr(self._local, "context", None)
        if context is not None:
            self._local.context = None
            context.__exit__(None, None, None)


def describe(message: MessageProxy) -> Mapping[str, Any]:
    """The log fields of a message."""
    fields: dict[str, Any] = {"actor": message.actor_name}
    if message.queue_name == "deliver" and message.args:
        fields["delivery"] = message.args[0]
    return fields
