"""``/metrics`` of the API: the sums over its processes, and the state of the whole as both stores tell it at this moment.

Here, and not at the workers' or the scheduler's pages, since an API is what every Madeira has, mostly several times, and what
is scraped when everything else is gone. Each API tells the same of the whole, so whoever adds up over APIs takes the maximum
(``deploy/prometheus/rules``).
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import falcon
import psycopg
from prometheus_client import Metric

from madeira import log, metrics, metrics_page
from madeira.api.problems import Problem
from madeira.broker.queues import KEYED, ORDINARY, Queues
from madeira.errors import BrokerUnavailable, StoreError
from madeira.lanes.pace import endpoint_of
from madeira.lanes.state import STATES
from madeira.store import gauges, holding
from madeira.store.database import Database
from madeira.store.replica import Lists

#: Seconds between two looks at the pools of a process.
_PERIOD_S: Final = 5.0

#: What needs no traceback: a store is away, or too slow.
_AWAY: Final = (BrokerUnavailable, StoreError, psycopg.Error)

_log = log.get(__name__)


class Numbers:
    """The page. What cannot be told is left out; the page itself never fails.

    `silence_s` is after how many seconds without a sign of life a worker counts as gone; `token`, unless it is empty, must come
    with each request; `lists` knows how the replica is, if there is one.
    """

    def __init__(self, *, database: Database, lists: Lists, queues: Queues, silence_s: float, token: str) -> None:
        self._database = database
        self._lists = lists
        self._queues = queues
        self._silence_s = silence_s
        self._token = token

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Make the page."""
        if not metrics_page.is_allowed(req.get_header("Authorization", default=""), self._token):
            raise Problem(401, "the numbers want the bearer token of MADEIRA_METRICS_TOKEN")
        resp.content_type = metrics.CONTENT_TYPE
        resp.data = metrics.page(*self._of_the_whole(), *self._of_replica())

    def on_head(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The same without the page, which falcon leaves out."""
        self.on_get(req, resp)

    def _of_the_whole(self) -> list[Metric]:
        """Whether the stores are there, what they tell, and what they were asked for in vain: alerts go by all three."""
        away = {"postgres": _trouble(self._database.trouble), "redis": _trouble(self._silence)}
        told: dict[str, Metric] = {}
        for part, stores, make in (
            ("redis", ("redis",), self._of_queues),
            ("redis", ("redis",), self._of_workers),
            ("postgres", ("postgres",), self._from_postgres),
            ("lanes", ("postgres", "redis"), self._of_lanes),
        ):
            # Whoever waits for a store that is away, once for each part, comes too late for Prometheus.
            if not any(away[store] for store in stores):
                told |= _tried(part, make)
        for store in away:
            if away[store]:
                _log.warning("metrics.numbers_missing", part=store, reason=away[store])
        return [
            metrics.STORE_UP.of({(store,): float(not trouble) for store, trouble in away.items()}),
            metrics.NUMBERS_MISSING.of({(g.name.removeprefix("madeira_"),): float(g.name not in told) for g in _ASKED}),
            *told.values(),
        ]

    def _silence(self) -> str | None:
        return None if self._queues.ping() else "Redis does not answer"

    def _of_queues(self) -> Iterator[Metric]:
        queues = (*KEYED, *ORDINARY)
        sizes = self._queues.sizes(queues)
        states = ("ready", "delayed", "held")
        yield metrics.QUEUE_MESSAGES.of({(q, state): getattr(size, state) for q, size in sizes.items() for state in states})
        yield metrics.DRAMATIQ_DEAD_MESSAGES.of({(q,): size.rejected for q, size in sizes.items()})

    def _of_workers(self) -> Iterator[Metric]:
        """By itself: a key of a queue that somebody has spoilt shall not hide that no worker lives."""
        yield metrics.WORKERS.of({(): self._queues.alive(self._silence_s)})

    def _from_postgres(self) -> Iterator[Metric]:
        with self._database.connection() as connection:
            for gauge, count in _GAUGES:
                yield from _counted(connection, gauge, count)

    def _of_replica(self) -> list[Metric]:
        """How the replica is, as this process found it; nothing where none is named."""
        lag_s = self._lists.lag_s
        if lag_s is None:
            return []
        return [metrics.REPLICA_LAG.of({(): lag_s}), metrics.REPLICA_USED.of({(): float(self._lists.uses_replica)})]

    def _of_lanes(self) -> Iterator[Metric]:
        """How many lanes of each endpoint are in which state; an endpoint without anything waiting has one."""
        yield metrics.LANE_STATE.of(self._lanes())

    def _lanes(self) -> dict[tuple[str, ...], float]:
        with self._database.connection() as connection:
            held = holding.states(connection)
        lanes = sorted({*held, *self._queues.lanes()})
        counts: dict[tuple[str, ...], float] = {}
        for lane, state in zip(lanes, self._queues.lane_states(lanes), strict=True):
            endpoint = endpoint_of(lane)
            word = held.get(endpoint, "active")
            for known in STATES:
                counts.setdefault((endpoint, known), 0)
            counts[endpoint, state.name if word == "active" else word] += 1
        return counts


class PoolWatch:
    """Sets the gauges of a process's pools every few seconds: whichever process serves the page cannot look into the others."""

    def __init__(self, *, database: Database, queues: Queues) -> None:
        self._database = database
        self._queues = queues
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="madeira-pools", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            metrics.tell_pools(self._database.stats(), self._queues.connections())
            self._stopped.wait(_PERIOD_S)


def _trouble(ask: Callable[[], str | None]) -> str | None:
    """Why a store cannot be used, whatever it is; None when it can."""
    try:
        return ask()
    except Exception as e:  # noqa: BLE001  # the page counts
        return f"{type(e).__name__}: {e}"


def _tried(part: str, make: Callable[[], Iterable[Metric]]) -> dict[str, Metric]:
    """The metrics of a part of the page, by name; what came before it failed when it does, for the rest of the page counts."""
    told: dict[str, Metric] = {}
    try:
        for family in make():
            told[family.name] = family
    except Exception as e:  # noqa: BLE001  # whatever it is, as above
        _log.warning("metrics.numbers_missing", part=part, reason=str(e), exc_info=not isinstance(e, _AWAY))
    return told


def _counted(connection: psycopg.Connection[Any], gauge: metrics.Snapshot, count: gauges.Count) -> Iterator[Metric]:
    """One gauge; nothing when its statement takes too long, which says nothing about the others."""
    try:
        yield gauge.of(count(connection))
    except psycopg.errors.QueryCanceled as e:
        connection.rollback()
        _log.warning("metrics.numbers_missing", part="postgres", reason=str(e).strip(), metric=gauge.name)


_GAUGES: Final[tuple[tuple[metrics.Snapshot, gauges.Count], ...]] = (
    (metrics.QUEUE_OLDEST_AGE, gauges.oldest_ages),
    (metrics.RECONCILE_LAST_SUCCESS, gauges.last_reconcile),
    (metrics.DEAD_LETTERS_NOW, gauges.dead_letters),
    (metrics.DELIVERIES_WAITING, gauges.deliveries_waiting),
)

#: What the page asks the stores for.
_ASKED: Final = (
    metrics.QUEUE_MESSAGES,
    metrics.DRAMATIQ_DEAD_MESSAGES,
    metrics.WORKERS,
    metrics.LANE_STATE,
    *(gauge for gauge, _ in _GAUGES),
)
