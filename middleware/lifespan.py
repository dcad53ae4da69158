"""Opens what a worker process works with after it was forked, and closes it in the order that loses nothing."""

from collections.abc import Callable, Sequence

from dramatiq import Broker, Worker
from dramatiq.middleware import Middleware


class Lifespan(Middleware):
    """The beginning and the end of a worker process.

    Parameters:
        start: opens pools and threads; a worker that is forked must not inherit them.
        stop_fetching: ends fetching and gives back what was not started, before calls in flight are waited for.
        stop: closes everything, after the last finish was sent.
        beside: functions that Dramatiq runs in processes of their own beside the workers.
    """

    def __init__(
        self,
        *,
        start: Callable[[Worker], None],
        stop_fetching: Callable[[], None],
        stop: Callable[[], None],
        beside: Sequence[Callable[[], int]] = (),
    ) -> None:
        self._start = start
        self._stop_fetching = stop_fetching
        self._stop = stop
        self._beside = list(beside)

    @property
    def forks(self) -> list[Callable[[], int]]:  # noqa: D102
        return self._beside

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: D102
        self._start(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:  # noqa: D102
        self._stop_fetching()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:  # noqa: D102
        self._stop()
