"""What machines ask: is the process alive, can it do its work, what do the numbers say.

``/healthz`` depends on nothing: a supervisor must not restart a process because Postgres is away. ``/readyz`` says 503
without Postgres or its tables, since nothing can be accepted then; without Redis it says 200 and ``degraded``, since intake
works. All answer in bounded time, also when a server is frozen and its connections stay open.
"""

import json
from collections.abc import Callable
from typing import Any, Final

import falcon
import psycopg
from prometheus_client import Metric

from madeira import log, metrics
from madeira.api.problems import RETRY_AFTER_S
from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable, StoreError
from madeira.lanes.pace import endpoint_of
from madeira.lanes.state import STATES
from madeira.store import gauges, holding
from madeira.store.database import NO_TABLES, Database
from madeira.store.schema import is_misfit

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
        trouble = self._database.trouble()
        postgres = trouble is None
        redis = self._queues.ping()
        status = "unavailable" if not postgres else "ok" if redis else "degraded"
        if not postgres:
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(RETRY_AFTER_S))
        resp.data = json.dumps({"status": status, "postgres": _told(trouble), "redis": _word(redis)}).encode()


def _told(trouble: str | None) -> str:
    """What strangers may know of Postgres: whether it is there, and what is wrong with the tables."""
    if trouble is not None and (trouble == NO_TABLES or is_misfit(trouble)):
        return trouble
    return _word(trouble is None)


class Numbers:
    """``/metrics``: the sums over the API's processes, and the state of the whole as both stores tell it at this moment.

    What cannot be told is left out; the page itself never fails.
    """

    def __init__(self, *, database: Database, queues: Queues) -> None:
        self._database = database
        self._queues = queues

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Make the page."""
        resp.content_type = metrics.CONTENT_TYPE
        resp.data = metrics.page(*self._from_redis(), *self._from_postgres(), *self._of_lanes())

    def _of_lanes(self) -> list[Metric]:
        """How many lanes of each endpoint are in which state; an endpoint without anything waiting has one."""
        try:
            with self._database.connection() as connection:
                held = holding.states(connection)
            lanes = sorted({*held, *self._queues.lanes()})
            found = self._queues.lane_states(lanes)
        except (BrokerUnavailable, StoreError, psycopg.Error) as e:
            _log.warning("metrics.lanes_missing", reason=str(e))
            return []
        counts: dict[tuple[str, ...], float] = {}
        for lane, state in zip(lanes, found, strict=True):
            endpoint = endpoint_of(lane)
            word = held.get(endpoint, "active")
            for known in STATES:
                counts.setdefault((endpoint, known), 0)
            counts[endpoint, state.name if word == "active" else word] += 1
        return [metrics.LANE_STATE.of(counts)]

    def _from_redis(self) -> list[Metric]:
        try:
            sizes = self._queues.sizes()
        except BrokerUnavailable as e:
            _log.warning("metrics.redis_missing", reason=str(e))
            return []
        states = ("ready", "delayed", "held")
        return [metrics.QUEUE_MESSAGES.of({(q, state): getattr(size, state) for q, size in sizes.items() for state in states})]

    def _from_postgres(self) -> list[Metric]:
        families: list[Metric] = []
        try:
            with self._database.connection() as connection:
                for gauge, count in _GAUGES:
                    families.append(gauge.of(count(connection)))
        except (StoreError, psycopg.Error) as e:
            _log.warning("metrics.postgres_missing", reason=str(e))
        return families


_GAUGES: Final[tuple[tuple[metrics.Snapshot, Callable[[psycopg.Connection[Any]], dict[tuple[str, ...], float]]], ...]] = (
    (metrics.QUEUE_OLDEST_AGE, gauges.oldest_ages),
    (metrics.DEAD_LETTERS_NOW, gauges.dead_letters),
    (metrics.DELIVERIES_WAITING, gauges.deliveries_waiting),
)


def _word(up: bool) -> str:
    return "ok" if up else "unavailable"
