"""What machines ask: is the process alive, can it do its work, what do the numbers say.

``/healthz`` depends on nothing: a supervisor must not restart a process because Postgres is away. ``/readyz`` says 503
without Postgres, since nothing can be accepted then; without Redis it says 200 and ``degraded``, since intake works. All
answer in bounded time, also when a server is frozen and its connections stay open.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

import falcon
import psycopg
from prometheus_client import Metric

from madeira import log, metrics
from madeira.api.problems import RETRY_AFTER_S
from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable, StoreError
from madeira.store import gauges
from madeira.store.database import Database

_log = log.get(__name__)


class Alive:
    """``/healthz``."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Answer, which is all that is asked."""
        resp.data = b'{"status": "ok"}'


class Ready:
    """``/readyz``."""

    def __init__(self, *, database: Database, queues: Queues) -> None:
        self._database = database
        self._queues = queues

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Probe both stores."""
        postgres = self._database.probe()
        redis = self._queues.ping()
        status = "unavailable" if not postgres else "ok" if redis else "degraded"
        if not postgres:
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(RETRY_AFTER_S))
        resp.data = json.dumps({"status": status, "postgres": _word(postgres), "redis": _word(redis)}).encode()


class Numbers:
    """``/metrics``: the sums over the API's processes, and the state of the whole as it is at this moment.

    `snapshots` are asked one after the other; one that fails is left out.
    """

    def __init__(self, *, snapshots: Iterable[Callable[[], Metric]]) -> None:
        self._snapshots = tuple(snapshots)

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Make the page."""
        families: list[Metric] = []
        for snapshot in self._snapshots:
            try:
                families.append(snapshot())
            except (BrokerUnavailable, StoreError, psycopg.Error) as e:
                _log.warning("metrics.snapshot_missing", reason=str(e))
        resp.content_type = metrics.CONTENT_TYPE
        resp.data = metrics.page(*families)


def snapshots(database: Database, queues: Queues) -> tuple[Callable[[], Metric], ...]:
    """The gauges of the whole, from both stores, each asked when the page is made."""

    def counted(gauge: metrics.Snapshot, count: Callable[[psycopg.Connection[Any]], dict[tuple[str, ...], float]]) -> Metric:
        with database.connection() as connection:
            return gauge.of(count(connection))

    return (
        lambda: _queue_messages(queues),
        lambda: counted(metrics.QUEUE_OLDEST_AGE, gauges.oldest_ages),
        lambda: counted(metrics.DELIVERIES_WAITING, gauges.deliveries_waiting),
        lambda: counted(metrics.DEAD_LETTERS_NOW, gauges.dead_letters),
    )


def _queue_messages(queues: Queues) -> Metric:
    states = ("ready", "delayed", "held")
    sizes = queues.sizes()
    return metrics.QUEUE_MESSAGES.of({(name, state): getattr(size, state) for name, size in sizes.items() for state in states})


def _word(up: bool) -> str:
    return "ok" if up else "unavailable"
