"""A running system for a module's tests, and backlogs: rows by the thousand, made in groups by the store's own functions.

A backlog that came in over HTTP would be the same rows; here it takes seconds, and leaves the processors to what is measured.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import redis

from madeira.broker.queues import DELIVER, Queues, delivery_key, ensure_delivery
from madeira.records import Accepted, Claimed, DeliveryRef, PlannedDelivery, Refused
from madeira.store import events, routing
from madeira.store.claims import ClaimRequest, claim
from madeira.store.deliveries import settle
from tests.receiver import Receiver
from tests.servers import with_database
from tests.store import making
from tests.system.harness import Madeira, Process, running, toml, wait_until

#: Events per statement.
PAGE = 100


@dataclass
class Bulk:
    """Makes backlogs in one Madeira."""

    madeira: Madeira
    conn: "psycopg.Connection[Any]"
    queues: Queues

    def post(self, count: int, event_type: str, payload: str = "1") -> list[Accepted]:
        """Accept events and queue them for routing."""
        accepted = self.accept(count, event_type, payload)
        self.queues.accept(accepted)
        return accepted

    def accept(self, count: int, event_type: str, payload: str = "1") -> list[Accepted]:
        """Accept events; nobody is told."""
        accepted: list[Accepted] = []
        for page in _sizes(count):
            new = [making.new_event(source="test", event_type=event_type, payload=payload) for _ in range(page)]
            accepted += events.insert(self.conn, new)
        return accepted

    def wait(self, count: int, endpoint: str, payload: str = "1") -> list[DeliveryRef]:
        """Have deliveries to `endpoint` that may go at once wait in its lane."""
        refs: list[DeliveryRef] = []
        for page in _sizes(count):
            routed = self._routed(page, [endpoint], payload)
            self._queue(routed)
            refs += routed
        return refs

    def delay(self, delays_s: Sequence[float], endpoint: str) -> list[DeliveryRef]:
        """Have deliveries to `endpoint` whose first attempt has failed wait for their second, due in `delays_s` seconds."""
        refs: list[DeliveryRef] = []
        for start in range(0, len(delays_s), PAGE):
            page = delays_s[start : start + PAGE]
            failed = self._failed(self._routed(len(page), [endpoint], "1"), page)
            self._queue(failed)
            refs += failed
        return refs

    def put_off(self, count: int, delay_s: float, endpoints: Sequence[str]) -> None:
        """Have `count` events wait for their first attempts, one for each of `endpoints`, due in `delay_s` seconds."""
        for page in _sizes(count):
            refs = [replace(ref, delay_s=delay_s) for ref in self._routed(page, endpoints, "1")]
            self.conn.execute(
                "UPDATE delivery SET next_attempt_at = clock_timestamp() + %s * interval '1 s' WHERE id = ANY(%s)",
                (delay_s, [ref.delivery_id for ref in refs]),
            )
            self._queue(refs)

    def _routed(self, count: int, endpoints: Sequence[str], payload: str) -> list[DeliveryRef]:
        plan = [PlannedDelivery(endpoint, endpoint, (endpoint,)) for endpoint in endpoints]
        accepted = self.accept(count, f"{endpoints[0]}.x", payload)
        return [ref for result in routing.route(self.conn, [(a.seq, plan) for a in accepted]) for ref in result.refs]

    def call_off(self, endpoint: str) -> None:
        """End what waits for `endpoint`, so that the next test has the system for itself."""
        rows = self.conn.execute(
            "UPDATE delivery SET status = 'cancelled', finished_at = clock_timestamp() "
            "WHERE endpoint = %s AND status = 'pending' RETURNING id, event_seq, lane",
            (endpoint,),
        )
        self.queues.forget(DELIVER, [delivery_key(DeliveryRef(*row)) for row in rows])

    def wait_done(self, *endpoints: str, timeout: float = 20.0) -> None:
        """Wait until nothing is unfinished that goes to `endpoints`."""
        left = "SELECT count(*) FROM delivery WHERE endpoint = ANY(%s) AND finished_at IS NULL"
        wait_until(lambda: self.madeira.value(left, list(endpoints)) == 0, timeout, what=f"the end of what goes to {endpoints}")

    def _failed(self, refs: Sequence[DeliveryRef], delays_s: Sequence[float]) -> list[DeliveryRef]:
        verdicts = []
        for answer, delay_s in zip(self._claimed(refs), delays_s, strict=True):
            assert isinstance(answer, Claimed), answer
            verdicts.append(making.verdict(answer, replace(making.RETRY, delay_s=delay_s)))
        settled = settle(self.conn, verdicts)
        return [replace(ref, delay_s=s.delay_s, line="retry") for ref, s in zip(refs, settled, strict=True)]

    def _claimed(self, refs: Sequence[DeliveryRef]) -> list[Claimed | Refused]:
        return claim(self.conn, [ClaimRequest(ref.delivery_id, making.token(), 40.0) for ref in refs])

    def _queue(self, refs: Sequence[DeliveryRef]) -> None:
        """Before reconcile does: it runs often here."""
        self.queues.ensure([ensure_delivery(ref) for ref in refs])


def _sizes(count: int) -> Iterator[int]:
    for start in range(0, count, PAGE):
        yield min(PAGE, count - start)


@contextlib.contextmanager
def bulk(madeira: Madeira) -> Iterator[Bulk]:
    """The maker of backlogs of `madeira`, with connections of its own."""
    queues = Queues(redis_url=madeira.redis_url, namespace=madeira.namespace)
    with psycopg.connect(madeira.database_url, autocommit=True) as conn, contextlib.closing(queues):
        yield Bulk(madeira, conn, queues)


@dataclass
class Site:
    """A running system that the tests of a module share: an API, two worker processes, a receiver."""

    madeira: Madeira
    receiver: Receiver
    worker: Process
    bulk: Bulk
    #: A connection of the test's own, which stays.
    redis: "redis.Redis"


@contextlib.contextmanager
def site(
    *,
    folder: Path,
    postgres_url: str,
    template_database: str,
    redis_url: str,
    endpoints: Callable[[Receiver], Mapping[str, Mapping[str, Any]]],
    threads: int,
    env: Mapping[str, str] | None = None,
) -> Iterator[Site]:
    """Start a system in a database of its own; `redis_url` is emptied, so nobody else may use it meanwhile."""
    name = f"madeira_site_{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(psycopg.connect(postgres_url, autocommit=True))
        admin.execute(f"CREATE DATABASE {name} TEMPLATE {template_database}".encode())
        stack.callback(admin.execute, f"DROP DATABASE {name} WITH (FORCE)".encode())
        client = stack.enter_context(redis.Redis.from_url(redis_url))
        client.flushall()
        receiver = stack.enter_context(Receiver())
        madeira = stack.enter_context(
            running(
                folder=folder,
                config=toml(endpoints(receiver)),
                database_url=with_database(postgres_url, name),
                redis_url=redis_url,
                env={"MADEIRA_THREADS": str(threads), **(env or {})},
            )
        )
        with ThreadPoolExecutor() as pool:
            worker = pool.submit(madeira.worker, processes=2, threads=threads)
            madeira.api()
        yield Site(madeira, receiver, worker.result(), stack.enter_context(bulk(madeira)), client)
