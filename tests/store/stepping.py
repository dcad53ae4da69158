"""Makes jobs and what they are about, carries them on step by step, and tells what came of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg

from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import FailureClass
from madeira.store import audit, jobs, routing
from madeira.store.job_steps import Step, step
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.store import making

Connection = psycopg.Connection[Any]

REPLAY = NewJob("replay", Selection(), "the partner is back")
UNORDERED = replace(REPLAY, ordered=False)
CANCEL = NewJob("cancel", Selection(), "nobody wants them", among="unfinished")
REROUTE = NewJob("reroute", Selection(), "the route was missing")


def dead(conn: Connection, number: int = 1, endpoint: str = "a", **fields: Any) -> list[DeliveryRef]:
    """So many dead deliveries, each of an event of its own, in the order of their events."""
    refs = [making.routed(conn, (endpoint,), **fields)[0] for _ in range(number)]
    for ref in refs:
        kill(conn, ref)
    return refs


def kill(conn: Connection, ref: DeliveryRef) -> None:
    making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)


def succeed(conn: Connection, ref: DeliveryRef) -> None:
    making.settled(conn, making.claimed(conn, ref))


def born_dead(conn: Connection, endpoint: str = "a") -> DeliveryRef:
    seq = making.accept(conn)
    plan = PlannedDelivery(endpoint, endpoint, failure_class=FailureClass.TEMPLATE, last_error="template: no")
    return routing.route(conn, [(seq, [plan])])[0].dead[0]


def unrouted(conn: Connection) -> int:
    seq = making.accept(conn)
    routing.route(conn, [(seq, [])])
    return seq


def made(conn: Connection, job: NewJob, who: str = "admin") -> int:
    return int(jobs.create(conn, job, who)[0]["id"])


def shown(conn: Connection, job_id: int) -> dict[str, Any]:
    found = jobs.find(conn, job_id)
    assert found is not None
    return found


def numbers(conn: Connection, job_id: int) -> tuple[int, ...]:
    """Total, done, failed, skipped, begun, left."""
    found = shown(conn, job_id)
    return tuple(found[name] for name in ("total", "done", "failed", "skipped", "begun", "left"))


def steps(conn: Connection, job_id: int, after: Callable[[Step], object] = lambda _step: None) -> list[DeliveryRef]:
    """Step until nothing moves; all that was begun, in its order."""
    begun: list[DeliveryRef] = []
    for _ in range(10_000):
        done = step(conn, job_id)
        begun += done.begun
        after(done)
        if done.is_over or not (done.moved or done.begun):
            return begun
    raise AssertionError("the job goes on for ever")


def delivers(conn: Connection, failing: frozenset[DeliveryRef] = frozenset()) -> Callable[[Step], None]:
    """What workers do after a step: deliver what it has begun; those in `failing` die again."""

    def work(done: Step) -> None:
        for ref in done.begun:
            (kill if ref in failing else succeed)(conn, ref)

    return work


def records(conn: Connection, job_id: int) -> list[tuple[str, str]]:
    """Who did what to a job, in the order of time."""
    return [(row["who"], row["action"]) for row in reversed(audit.page(conn, limit=100, what=f"job {job_id}"))]


def attempts(conn: Connection, ref: DeliveryRef) -> int:
    return int(making.delivery(conn, ref.delivery_id)["attempt"])


def event_id(conn: Connection, ref: DeliveryRef) -> str:
    return str(making.event(conn, ref.seq)["event_id"])
