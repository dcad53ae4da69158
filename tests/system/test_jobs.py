"""Jobs in whole systems: the process that goes on with one is killed, and everything is counted."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from random import Random
from statistics import quantiles
from typing import Any

import psycopg
import pytest

from tests.receiver import Answer, Call, Receiver
from tests.store import making
from tests.system.conftest import Launch
from tests.system.harness import TOKEN, Madeira, wait_until

#: Dead letters, half of each endpoint.
DEAD = 200

ENDPOINTS = ("a", "b")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that takes its time, and refuses a twentieth of all calls."""
    dice = Random(11)

    def answer(_call: Call) -> Answer:
        return Answer(status=503 if dice.random() < 0.05 else 200, delay_s=dice.random() * 0.03)

    with Receiver(default=answer) as receiver:
        yield receiver


@pytest.fixture
def madeira(launch: Launch, receiver: Receiver) -> Madeira:
    """A system with its API and dead letters; the test starts its workers."""
    retry = {"initial": 0.2, "max": 0.2, "max_attempts": 2}
    fields = {"retry": retry, "breaker": {"enabled": False}, "timeout": 2}
    madeira = launch({name: {"url": receiver.url(f"/{name}"), **fields} for name in ENDPOINTS})
    madeira.api()
    with psycopg.connect(madeira.database_url, autocommit=True) as conn:
        refs = [making.routed(conn, (ENDPOINTS[n % 2],))[0] for n in range(DEAD)]
        # They died in another order than their events were accepted in.
        for ref in sorted(refs, key=lambda ref: ref.delivery_id % 7):
            making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)
    return madeira


def ask(madeira: Madeira, method: str, path: str, **fields: Any) -> Any:
    answer = madeira.http.request(method, path, json=fields or None, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def show(madeira: Madeira, job: int) -> Any:
    return ask(madeira, "GET", f"/v1/jobs/{job}")


@pytest.mark.long
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "in any order"])
def test_a_job_whose_process_is_killed_goes_on_and_replays_each_delivery_once(
    madeira: Madeira, receiver: Receiver, ordered: bool
) -> None:
    """kill -9 at thirty percent, and once more at sixty: the counts are true, the order is kept, the record is complete."""
    worker = madeira.worker()
    job = ask(madeira, "POST", "/v1/jobs", action="replay", filter={}, reason="the partner is back", ordered=ordered)["id"]
    for share in (0.3, 0.6):
        wait_until(lambda: ended(show(madeira, job)) >= DEAD * share, 60, what=f"{share:.0%}")  # noqa: B023
        worker.kill()
        told = show(madeira, job)
        assert told["total"] == ended(told) + told["begun"] + told["left"] == DEAD
        worker = madeira.worker()
    found = wait_until(lambda: (now := show(madeira, job))["finished_at"] and now, 120, what="the end of the job")

    by_status = Counter(row["status"] for row in madeira.rows("SELECT status FROM delivery"))
    assert found["state"] == "done"
    assert (found["done"], found["failed"], found["skipped"]) == (by_status["succeeded"], by_status["dead"], 0)
    assert found["done"] + found["failed"] == DEAD
    assert {row["job_id"] for row in madeira.rows("SELECT job_id FROM delivery")} == {job}
    # Sent again once, a delivery has a first call and at most one retry, besides what was lost with the process.
    verdicts = madeira.rows(
        "SELECT delivery_id, count(*) FILTER (WHERE outcome NOT IN ('lost', 'late')) - 1 AS n, "
        "count(*) FILTER (WHERE outcome = 'succeeded') AS won FROM delivery_log GROUP BY 1"
    )
    assert max(row["n"] for row in verdicts) <= 2
    assert max(row["won"] for row in verdicts) <= 1
    if ordered:
        assert inversions(madeira, receiver) == 0
    record = [row["action"] for row in madeira.rows("SELECT action FROM audit WHERE what = %s ORDER BY id", f"job {job}")]
    assert record == ["replay", "end"]


@pytest.mark.long
@pytest.mark.alone
def test_an_ordered_replay_keeps_its_order_and_live_traffic_its_pace(
    madeira: Madeira, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the same two endpoints: no inversion, and the ninety-fifth of a hundred live events takes at most half as long again."""
    dead = {row["event_id"] for row in madeira.rows("SELECT event_id FROM event")}
    madeira.worker(threads=16)
    live(madeira, lambda sent: sent < LIVE_RATE)
    without = lateness(receiver, live(madeira, lambda sent: sent < LIVE_RATE * ALONE_S))
    job = ask(madeira, "POST", "/v1/jobs", action="replay", filter={}, reason="the partner is back")["id"]
    ids = live(madeira, lambda sent: sent % 5 or show(madeira, job)["finished_at"] is None)
    beside = lateness(receiver, ids)
    found = show(madeira, job)
    with capsys.disabled():
        print(
            f"\nload {os.getloadavg()[0]:.1f}; live p95 {p95(without) * 1000:.1f} ms without, {p95(beside) * 1000:.1f} ms beside "
            f"the replay of {DEAD} ({len(ids) / LIVE_RATE:.1f} s): {found['done']} delivered, {found['failed']} dead again"
        )
    assert found["done"] + found["failed"] == DEAD
    assert inversions(madeira, receiver, dead) == 0
    # Below some milliseconds it is the machine that is measured.
    assert p95(beside) <= 1.5 * p95(without) + 0.005


#: Live events a second, and seconds for which they are alone.
LIVE_RATE = 25
ALONE_S = 8


def live(madeira: Madeira, goes_on: Callable[[int], object]) -> dict[str, float]:
    """Post events at an even pace, in turn to both endpoints, while `goes_on`, asked with how many there were; when each was."""
    posted: dict[str, float] = {}
    due = time.monotonic()
    while goes_on(len(posted)):
        threading.Event().wait(max(0.0, due - time.monotonic()))
        due += 1 / LIVE_RATE
        at = time.monotonic()
        posted[madeira.post(f"{ENDPOINTS[len(posted) % 2]}.live")] = at
    return posted


def lateness(receiver: Receiver, posted: Mapping[str, float]) -> list[float]:
    """Seconds from the post of each event to its first call."""
    receiver.wait_until(lambda: set(posted) <= called(receiver).keys(), 20, what="the first call of each")
    first = called(receiver)
    return [first[name] - at for name, at in posted.items()]


def called(receiver: Receiver) -> dict[str, float]:
    """When each event was called first."""
    first: dict[str, float] = {}
    for call in receiver.calls:
        first.setdefault(call.json()["event_id"], call.at)
    return first


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20)[18]


def ended(job: Any) -> int:
    return int(job["done"] + job["failed"] + job["skipped"])


def inversions(madeira: Madeira, receiver: Receiver, among: Container[str] | None = None) -> int:
    """How often an event (of those in `among`) was called after a later one of its endpoint."""
    seqs = {row["event_id"]: row["seq"] for row in madeira.rows("SELECT event_id, seq FROM event")}
    found = 0
    wanted = [call for call in receiver.calls if among is None or call.json()["event_id"] in among]
    calls = sorted(wanted, key=lambda call: (call.path, call.number))
    for _, of_endpoint in groupby(calls, key=lambda call: call.path):
        order = [seqs[call.json()["event_id"]] for call in of_endpoint]
        found += sum(later < before for before, later in pairwise(order))
    return found
