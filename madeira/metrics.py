"""Every metric that Madeira exports, under one prefix, in base units, with bounded sets of labels (ids are never labels).

There are two kinds. What happens in a process is counted there: with ``PROMETHEUS_MULTIPROC_DIR`` set, prometheus-client
keeps such numbers in one file per process, and `page` adds them up over processes, dead ones included, so that a worker's
restart loses no count. What is a state of the whole (how long a queue is) is no process's own: whoever serves a page asks for
it at that moment and hands it to `page` as a `Snapshot`.

``PROMETHEUS_MULTIPROC_DIR`` must be in the environment before this module is imported (`settings.multiproc_dir` does it).
"""

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import add
from pathlib import Path
from typing import Final

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
    multiprocess,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict

from madeira.log import get
from madeira.settings import metrics_folder

#: The media type of `page`.
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

#: Upper bounds in seconds, for what takes milliseconds to a minute.
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

#: Upper bounds in seconds, from the idle way of an event to a day of retries.
_LATENCY: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 21600, 86400)

#: Stands for the process id in the names of the files that hold the sums of the dead.
_NOBODY: Final = "0"

#: Kinds of files whose numbers outlive their process, and how two of them become one.
_FOLDED: Final[Mapping[str, Callable[[float, float], float]]] = {"counter": add, "histogram": add, "gauge_max": max}

log = get(__name__)

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
    "madeira_delivery_retries", "Retries that a delivery had needed when it ended.", ["endpoint"], buckets=(0, 1, 2, 5, 10)
)
DELIVERY_LATENCY = Histogram("madeira_delivery_latency_seconds", "Time from acceptance to success.", buckets=_LATENCY)
DEAD_LETTERS = Counter("madeira_dead_letters", "Deliveries that were given up.", ["endpoint", "failure_class"])

RECONCILE_DIFFERENCES = Counter(
    "madeira_reconcile_differences", "What Postgres knew and the broker did not, or the reverse, by kind.", ["kind"]
)
RECONCILE_LAST_SUCCESS = Gauge(
    "madeira_reconcile_last_success_timestamp_seconds", "When reconcile last came to its end.", multiprocess_mode="max"
)

RETENTION_REMOVED = Counter("madeira_retention_removed", "What went because of its age, by kind.", ["kind"])
RETENTION_LAST_SUCCESS = Gauge(
    "madeira_retention_last_success_timestamp_seconds", "When retention last came to its end.", multiprocess_mode="max"
)

POOL_CONNECTIONS = Gauge(
    "madeira_pool_connections", "Open connections to Postgres and Redis, by pool.", ["pool"], multiprocess_mode="livesum"
)


class Snapshot:
    """A gauge whose values are asked for when the page is made, and belong to no process."""

    def __init__(self, name: str, documentation: str, labels: tuple[str, ...]) -> None:
        self._name = f"madeira_{name}"
        self._documentation = documentation
        self._labels = labels

    def of(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """The metric with `values`, each under the values of its labels."""
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


QUEUE_MESSAGES = Snapshot("queue_messages", "Messages in a queue: ready, delayed or held.", ("queue", "state"))
QUEUE_OLDEST_AGE = Snapshot("queue_oldest_age_seconds", "Age of the oldest message that is ready.", ("queue",))
DELIVERIES_WAITING = Snapshot("deliveries_waiting", "Unfinished deliveries, by retries so far.", ("endpoint", "retries"))
DEAD_LETTERS_NOW = Snapshot("dead_letters", "Deliveries that were given up and wait for a person.", ("endpoint",))
LANE_STATE = Snapshot("lane_state", "Lanes by what keeps them from being served, if anything.", ("endpoint", "state"))
DRAMATIQ_DEAD_MESSAGES = Snapshot("dramatiq_dead_messages", "Messages in Dramatiq's own dead queue.", ("queue",))


def page(*snapshots: Metric) -> bytes:
    """The text that Prometheus reads: the sums over this family of processes, and `snapshots` besides.

    Never fails because of one bad file: what can be read is told, what cannot is logged.
    """
    folder = metrics_folder()
    if folder is None:
        return generate_latest(REGISTRY) + _text(snapshots)
    with _alone(Path(folder)):
        _fold_the_dead(Path(folder))
        families = _merged(folder)
    return _text(families) + _text(snapshots)


def clear(folder: Path) -> None:
    """Forget the numbers of earlier processes; only while none of the family runs."""
    for file in folder.glob("*.db"):
        file.unlink(missing_ok=True)


def serve(host: str, port: int) -> ThreadingHTTPServer:
    """A server of `page` at ``/metrics``, bound and not running yet: call its ``serve_forever``."""
    return ThreadingHTTPServer((host, port), _Page)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.split("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = page()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a scrape is no event."""


class _Collected:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


def _merged(folder: Path) -> list[Metric]:
    files = [str(f) for f in folder.glob("*.db")]
    try:
        return _merge(files)
    except Exception:  # noqa: BLE001  # a torn file raises whatever its bytes lead to
        return _merge([f for f in files if _is_readable(f)])


def _merge(files: list[str]) -> list[Metric]:
    return list(multiprocess.MultiProcessCollector.merge(files, accumulate=True))  # type: ignore[no-untyped-call]


def _is_readable(file: str) -> bool:
    try:
        _merge([file])
    except Exception as e:  # noqa: BLE001  # as above
        log.warning("metrics.file_unreadable", file=file, error=repr(e))
        return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One page at a time: between adding a dead process's counts to the sums and removing its file they are there twice."""
    with (folder / "page.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fold_the_dead(folder: Path) -> None:
    """Add the numbers of processes that are gone to one file, else restarts would fill the disk and slow each page down.

    Gauges of the kind "live" just go: they tell of processes that are there.
    """
    for file in folder.glob("*.db"):
        kind, _, pid = file.stem.rpartition("_")
        if pid == _NOBODY or not pid.isdigit() or Path(f"/proc/{pid}").exists():
            continue
        if kind.startswith("gauge_live"):
            file.unlink(missing_ok=True)
        elif kind in _FOLDED:
            _fold(file, folder / f"{kind}_{_NOBODY}.db", _FOLDED[kind])


def _fold(file: Path, into: Path, combine: Callable[[float, float], float]) -> None:
    try:
        numbers = [(key, value) for key, value, _, _ in MmapedDict.read_all_values_from_file(str(file))]  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001  # a torn file, of which `_is_readable` tells
        return
    sums = MmapedDict(str(into))  # type: ignore[no-untyped-call]
    for key, value in numbers:
        sums.write_value(key, combine(sums.read_value(key)[0], value), 0.0)  # type: ignore[no-untyped-call]
    sums.close()  # type: ignore[no-untyped-call]
    file.unlink(missing_ok=True)
