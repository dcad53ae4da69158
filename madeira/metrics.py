"""Every metric that Madeira exports, under one prefix, in base units, with bounded sets of labels (ids are never labels).

There are two kinds. What happens in a process is counted there: with ``PROMETHEUS_MULTIPROC_DIR`` set, prometheus-client
keeps such numbers in one file per process, and `page` adds them up over processes, dead ones included, so that a worker's
restart loses no count (`madeira.metrics_files`). What is a state of the whole (how long a queue is) is no process's own: the
API asks for it when its page is read, and hands it to `page` as a `Snapshot`; the pages of workers and scheduler do not have
it, so that it is read once for each page of an API and never once per process. Each page has of its own family how many processes
keep numbers that it lacks.

``PROMETHEUS_MULTIPROC_DIR`` must be in the environment before this module is imported (`settings.multiproc_dir` does it).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from madeira import metrics_blocks
from madeira.log import get
from madeira.metrics_files import NAMED, Names, families
from madeira.settings import metrics_folder
from madeira.states import FINISHED, FailureClass, Outcome

#: The media type of `page`.
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

#: Upper bounds in seconds, for what takes milliseconds to a minute.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

#: Upper bounds in seconds, from the idle way of an event to a day of retries.
_LATENCY: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 21600, 86400)

#: How a request to the intake may end; the first is success.
IngressOutcome = Literal[
    "accepted",
    "duplicate",
    "unauthorized",
    "malformed",
    "invalid",
    "unsupported",
    "too_large",
    "timeout",
    "conflict",
    "limited",
    "unavailable",
    "failed",
]

#: The kinds of differences that reconcile finds.
ReconcileKind = Literal[
    "event_not_queued",
    "delivery_not_queued",
    "dead_letter_not_queued",
    "route_finished_but_queued",
    "deliver_finished_but_queued",
    "abandoned",
]

#: The source of requests that name none that is known.
UNKNOWN: Final = "unknown"

log = get(__name__)

metrics_blocks.install()
disable_created_metrics()  # type: ignore[no-untyped-call]

INGRESS_REQUESTS = Counter("madeira_ingress_requests", "Requests to the intake, by how they ended.", ["source", "outcome"])
INGRESS_DURATION = Histogram("madeira_ingress_request_duration_seconds", "Time that intake took to answer.", buckets=_SECONDS)

ACTOR_MESSAGES = Counter("madeira_actor_messages", "Messages that an actor was run for, by how it ended.", ["actor", "outcome"])
ACTOR_DURATION = Histogram("madeira_actor_duration_seconds", "Time that an actor ran for a message.", ["actor"], buckets=_SECONDS)

DELIVERY_ATTEMPTS = Counter("madeira_delivery_attempts", "Attempts to deliver, by their verdict.", ["endpoint", "outcome"])
DELIVERY_ATTEMPT_DURATION = Histogram(
    "madeira_delivery_attempt_duration_seconds", "Time that one call of a receiver took.", ["endpoint"], buckets=_SECONDS
)
DELIVERIES_SETTLED = Counter("madeira_deliveries_settled", "Deliveries that reached a final state.", ["endpoint", "status"])
DELIVERY_RETRIES = Histogram(
    "madeira_delivery_retries", "Retries that a delivery had needed when it ended.", ["endpoint"], buckets=(0, 1, 2, 4, 5, 10)
)
DELIVERY_LATENCY = Histogram("madeira_delivery_latency_seconds", "Time from acceptance to success.", buckets=_LATENCY)
DEAD_LETTERS = Counter("madeira_dead_letters", "Deliveries that were given up.", ["endpoint", "failure_class"])

RECONCILE_DIFFERENCES = Counter(
    "madeira_reconcile_differences", "What Postgres knew and the broker did not, or the reverse, by kind.", ["kind"]
)
SCHEDULER_TICKS = Counter("madeira_scheduler_ticks", "Periodic work that the scheduler asked for.", ["actor"])

RETENTION_REMOVED = Counter("madeira_retention_removed", "What went because of its age, by kind.", ["kind"])
RETENTION_LAST_SUCCESS = Gauge(
    "madeira_retention_last_success_timestamp_seconds", "When retention last came to its end.", multiprocess_mode="max"
)

SPANS = Counter("madeira_spans", "Spans of OpenTelemetry, by what became of them: exported or lost.", ["outcome"])

POOL_CONNECTIONS = Gauge(
    "madeira_pool_connections", "Open connections to Postgres and Redis, by pool.", ["pool"], multiprocess_mode="livesum"
)
POOL_CONNECTIONS_MAX = Gauge(
    "madeira_pool_connections_max", "Connections that a pool may open.", ["pool"], multiprocess_mode="livesum"
)
POOL_WAITING = Gauge(
    "madeira_pool_waiting", "Threads that wait for a connection of a pool.", ["pool"], multiprocess_mode="livesum"
)


class Snapshot:
    """A gauge whose values are asked for when the page is made, and belong to no process."""

    def __init__(self, name: str, documentation: str, labels: tuple[str, ...]) -> None:
        #: The name on the page.
        self.name: Final = f"madeira_{name}"
        #: What it is, in words.
        self.documentation: Final = documentation
        self.labels: Final = labels

    def of(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """The metric with `values`, each under the values of its labels; names that are too many are added up."""
        names = {label: Names() for label in NAMED}
        few: dict[tuple[str, ...], float] = {}
        for labels, value in values.items():
            key = tuple(names[n](v) if n in NAMED else v for n, v in zip(self.labels, labels, strict=True))
            few[key] = few.get(key, 0.0) + value
        family = GaugeMetricFamily(self.name, self.documentation, labels=self.labels)
        for key, value in few.items():
            family.add_metric(key, value)
        return family


QUEUE_MESSAGES = Snapshot("queue_messages", "Messages in a queue: ready, delayed or held.", ("queue", "state"))
QUEUE_OLDEST_AGE = Snapshot("queue_oldest_age_seconds", "Age of the oldest message that is ready.", ("queue",))
DELIVERIES_WAITING = Snapshot("deliveries_waiting", "Unfinished deliveries, by retries so far.", ("endpoint", "retries"))
DEAD_LETTERS_NOW = Snapshot("dead_letters", "Deliveries that were given up and wait for a person.", ("endpoint",))
LANE_STATE = Snapshot("lane_state", "Lanes by what keeps them from being served, if anything.", ("endpoint", "state"))
DRAMATIQ_DEAD_MESSAGES = Snapshot("dramatiq_dead_messages", "Messages in Dramatiq's own dead queue.", ("queue",))
WORKERS = Snapshot("workers", "Worker processes that have given a sign of life lately.", ())
RECONCILE_LAST_SUCCESS = Snapshot(
    "reconcile_last_success_timestamp_seconds", "When reconcile last came to its end, by the clock of Postgres.", ()
)
STORE_UP = Snapshot("store_up", "Whether this API can use a store (1), which is postgres or redis, or not (0).", ("store",))
NUMBERS_MISSING = Snapshot(
    "numbers_missing", "Whether this page lacks (1) a metric that it asks a store for, since that failed.", ("metric",)
)
NUMBERS_IN_MEMORY = Snapshot(
    "numbers_in_memory",
    "Processes of this page that keep numbers in memory, since they could not write them: it lacks those.",
    (),
)
REPLICA_LAG = Snapshot("replica_lag_seconds", "Age of what the replica of Postgres is known to show, at most.", ())
REPLICA_USED = Snapshot("replica_used", "Whether lists are read on the replica (1), or on the primary in its stead (0).", ())

#: What the label `endpoint` or `source` is for a name, in whatever this process counts.
endpoint_label: Final = Names()
source_label: Final = Names()


def expect_sources(names: Iterable[str]) -> None:
    """Let the series of intake begin at 0: what first appears as 1 is no increase to Prometheus."""
    for name in (*names, UNKNOWN):
        for outcome in get_args(IngressOutcome):
            INGRESS_REQUESTS.labels(source_label(name), outcome)


def expect_endpoints(names: Iterable[str]) -> None:
    """Let the series of endpoints, and those of reconcile, begin at 0 likewise."""
    for kind in get_args(ReconcileKind):
        RECONCILE_DIFFERENCES.labels(kind)
    for name in names:
        endpoint = endpoint_label(name)
        for outcome in Outcome:
            DELIVERY_ATTEMPTS.labels(endpoint, outcome)
        for status in sorted(FINISHED):
            DELIVERIES_SETTLED.labels(endpoint, status)
        for failure_class in FailureClass:
            DEAD_LETTERS.labels(endpoint, failure_class)
        DELIVERY_RETRIES.labels(endpoint)


def tell_pools(postgres: Mapping[str, int], redis: tuple[int, int]) -> None:
    """Set the gauges of this process's pools; `postgres` as psycopg tells it, `redis` as connections made and allowed."""
    POOL_CONNECTIONS.labels("postgres").set(postgres["pool_size"])
    POOL_CONNECTIONS_MAX.labels("postgres").set(postgres["pool_max"])
    POOL_WAITING.labels("postgres").set(postgres["requests_waiting"])
    POOL_CONNECTIONS.labels("redis").set(redis[0])
    POOL_CONNECTIONS_MAX.labels("redis").set(redis[1])


def page(*snapshots: Metric) -> bytes:
    """The text that Prometheus reads: the sums over this family of processes, and `snapshots` besides."""
    folder = metrics_folder()
    if folder is None:
        return generate_latest(REGISTRY) + _text(snapshots)
    in_memory = NUMBERS_IN_MEMORY.of({(): metrics_blocks.in_memory(folder)})
    return _text(families(folder)) + _text([in_memory, *snapshots])


class _Collected:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)
