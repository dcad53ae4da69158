"""A worker in the process of the test, with the broker, the middleware and the tools that `dramatiq madeira.actors` has.

What a test needs to hold still it can hold here: the receiver keeps an answer back, and the lock of a consumer keeps
what a worker has finished from reaching Redis. Rows are made by the store's own functions.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dramatiq
import psycopg
import redis
from dramatiq import Worker
from dramatiq.middleware import Middleware

from madeira.broker import MadeiraBroker, build
from madeira.broker.queues import DELIVER, Place, Queues, delivery_key, ensure_delivery
from madeira.broker.tools import Tools
from madeira.records import DeliveryRef
from madeira.settings import Settings
from tests.store import making
from tests.system.harness import KEY, configure, toml, wait_until

#: Timings of a process that beats often, and that nobody takes for dead.
QUICK: Mapping[str, Any] = {
    "beat_s": 0.2,
    "silence_s": 60.0,
    "lease_margin_s": 20.0,
    "reconcile_s": 3600.0,
    "metrics_port": 0,
    "scheduler_metrics_port": 0,
}

#: The receivers of the tests are on this machine.
LOOPBACK = ("127.0.0.0/8", "::1")


class InProcess:
    """One worker process, in this process; `without` leaves out middleware of the given class."""

    def __init__(
        self,
        *,
        folder: Path,
        database_url: str,
        redis_url: str,
        endpoints: Mapping[str, Mapping[str, Any]],
        without: type[Middleware] | None = None,
        **settings: Any,
    ) -> None:
        configure(database_url, toml(endpoints))
        values = {"namespace": "m", "data_dir": folder / "data", "threads": 8, "egress_allow": LOOPBACK, **QUICK, **settings}
        self.settings = Settings(database_url=database_url, redis_url=redis_url, secret_key=(KEY,), **values)
        self.broker: MadeiraBroker = build(self.settings)
        if without is not None:
            self.broker.middleware[:] = [m for m in self.broker.middleware if type(m) is not without]
        assert isinstance(self.broker.tools, Tools)
        self.tools = self.broker.tools
        self.queues = self.broker.wire
        self.redis = redis.Redis.from_url(redis_url)
        self.worker: Worker | None = None
        self._conn: psycopg.Connection[Any] | None = None
        _adopt_actors(self.broker)
        if self.queues.rebuild_begin("test"):
            assert self.queues.rebuild_commit("test")

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker."""
        self.worker = Worker(self.broker, worker_threads=self.settings.threads, worker_timeout=50)
        self.worker.start()

    def stop(self) -> None:
        """Stop the worker as SIGTERM does."""
        if self.worker is None:
            return
        stopping = threading.Thread(target=self.worker.stop, kwargs={"timeout": 20_000})
        stopping.start()
        while stopping.is_alive():
            self.wake()
            stopping.join(0.1)
        self.worker = None

    def close(self) -> None:
        """Stop the worker, and close whatever is open."""
        started = self.broker.worker is not None
        self.stop()
        if not started:
            self.tools.close()
        if self._conn is not None:
            self._conn.close()
        self.redis.close()

    def wake(self) -> None:
        """End the wait of the waker, which blocks in Redis for up to a second."""
        with contextlib.suppress(redis.RedisError):
            self.redis.rpush(f"m:wake:{self.broker.process}", "")

    @contextlib.contextmanager
    def nothing_reaches_redis(self, queue: str = DELIVER) -> Iterator[None]:
        """Within the block a worker's threads go on, but what they finish is not sent, and nothing is fetched."""
        with self.broker.consumers[queue].lock:
            yield

    # -- rows and keys ------------------------------------------------------------------------------------------

    @property
    def conn(self) -> "psycopg.Connection[Any]":
        """A connection of the test's own, each statement committed."""
        if self._conn is None or self._conn.closed:
            self._conn = psycopg.connect(self.settings.database_url, autocommit=True)
        return self._conn

    def routed(self, *endpoints: str, queued: bool = True, **fields: Any) -> DeliveryRef:
        """A delivery of an event of its own, on its way to the first of `endpoints`; queued unless said otherwise."""
        refs = making.routed(self.conn, endpoints or ("a",), **fields)
        if queued:
            self.queue(*refs)
        return refs[0]

    def queue(self, *refs: DeliveryRef) -> None:
        """Make sure that deliveries are queued."""
        self.queues.ensure([ensure_delivery(ref) for ref in refs])

    def delivery(self, ref: DeliveryRef) -> dict[str, Any]:
        return making.delivery(self.conn, ref.delivery_id)

    def event(self, ref: DeliveryRef) -> dict[str, Any]:
        return making.event(self.conn, ref.seq)

    def outcomes(self, ref: DeliveryRef) -> list[str]:
        """The outcomes of a delivery's attempts, in order."""
        return [outcome for _, outcome, _ in making.log_of(self.conn, ref.delivery_id)]

    def place(self, ref: DeliveryRef) -> Place:
        """Where the broker has a delivery."""
        return self.queues.where(DELIVER, [delivery_key(ref)])[0]

    def reconcile(self, queues: Queues | None = None, *, grace_s: float = 0.0) -> dict[str, int]:
        """One reconcile run that spares no young row, unless it is told to; what it found."""
        # Imported when the actors have a broker.
        from actors import reconcile

        return dict(reconcile.run(queues or self.queues, self.tools.database, period_s=60, grace_s=grace_s, force=True))

    def due_later_in_redis_s(self, ref: DeliveryRef) -> float:
        """By how many seconds a delayed delivery is due later in Redis than in Postgres; both have the clock of this machine."""
        score = self.redis.zscore("m:deliver:delayed", delivery_key(ref))
        assert score is not None, "it is not delayed"
        return float(score) / 1000 - self.delivery(ref)["next_attempt_at"].timestamp()

    def wait_status(self, ref: DeliveryRef, status: str, timeout: float = 10.0) -> dict[str, Any]:
        """Wait until a delivery has a state; its row."""
        row: dict[str, Any] = wait_until(
            lambda: (row := self.delivery(ref))["status"] == status and row, timeout, what=f"delivery {ref.delivery_id} {status}"
        )
        return row

    def wait_place(self, ref: DeliveryRef, *kinds: str, timeout: float = 10.0) -> Place:
        """Wait until the broker has a delivery in one of some places."""
        place: Place = wait_until(
            lambda: (place := self.place(ref)).kind in kinds and place, timeout, what=f"delivery {ref.delivery_id} {kinds}"
        )
        return place

    def wait_place_of(self, queue: str, key: str, *kinds: str, timeout: float = 10.0) -> Place:
        """Wait until the broker has any key in one of some places."""
        place: Place = wait_until(
            lambda: (place := self.queues.where(queue, [key])[0]).kind in kinds and place, timeout, what=f"{queue} {key} {kinds}"
        )
        return place


def _adopt_actors(broker: MadeiraBroker) -> None:
    """Make the actors those of `broker`: their modules, imported once, declared them to the first one."""
    dramatiq.set_broker(broker)
    from actors.dead_letter import dead_letter
    from actors.deliver import deliver
    from actors.jobs import jobs
    from actors.notify import notify
    from actors.reconcile import reconcile
    from actors.retention import retention_run
    from actors.rollup import rollup
    from actors.route import route

    actors: Sequence[dramatiq.Actor[..., Any]] = (
        route,
        deliver,
        dead_letter,
        jobs,
        notify,
        reconcile,
        retention_run,
        rollup,
    )
    for actor in actors:
        actor.broker = broker
        broker.declare_actor(actor)


@contextlib.contextmanager
def in_process(**options: Any) -> Iterator[InProcess]:
    """A worker process in this process, that ends with the block."""
    process = InProcess(**options)
    try:
        yield process
    finally:
        process.close()
