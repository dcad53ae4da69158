"""Order in whole systems: whatever dies or forgets, a key's events come to the receiver one after another, in their order."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from madeira.broker.queues import ensure_delivery
from tests.receiver import Receiver
from tests.system import crash, order
from tests.system.harness import Madeira, running, toml, wait_until
from tests.system.order import Crew, Traffic
from tests.system.states import queues_of

#: Seconds between two kills.
EVERY_S = 1.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver that refuses a twentieth of all calls."""
    with Receiver(default=order.flaky) as receiver:
        yield receiver


@pytest.fixture
def madeira(tmp_path: Path, database_url: str, redis_url: str, receiver: Receiver) -> Iterator[Madeira]:
    """A system with one ordered endpoint, and its API; the test starts its workers."""
    servers = {"database_url": database_url, "redis_url": redis_url}
    with running(folder=tmp_path, config=toml(order.endpoint(receiver, concurrency=50)), env=crash.SCALED, **servers) as madeira:
        madeira.api()
        yield madeira


def under_fire(
    madeira: Madeira, receiver: Receiver, capsys: pytest.CaptureFixture[str], *, keys: int, events: int, kills: int | None
) -> None:
    """Post, kill one of two workers every second (at most `kills`), wipe Redis twice, and count everything in the end.

    Every second some of what waits for its turn is queued by hand: the order must not depend on what is in Redis.
    """
    queues = queues_of(madeira)
    crew = Crew(madeira)
    wait_until(lambda: len(crew.ready) == 2, 30, what="the workers' start")
    started, flushes, killed = time.monotonic(), 0, 0
    traffic = Traffic(madeira, keys=keys, events=events)
    try:
        next_kill = time.monotonic() + EVERY_S
        while not traffic.is_done or madeira.unfinished():
            assert time.monotonic() - started < 300, f"{madeira.unfinished()} events are left after five minutes"
            wait_until(lambda: time.monotonic() >= next_kill, what="the next second")  # noqa: B023
            next_kill += EVERY_S
            if kills is None or killed < kills:
                killed += crew.kill_one()
            if receiver.count() >= keys * events * (flushes + 1) / 3 and flushes < 2:
                madeira.redis.flushall()
                flushes += 1
            queues.ensure([ensure_delivery(ref) for ref in order.some_pending(madeira)])
    finally:
        traffic.close()
        queues.close()
    receiver.wait_idle()

    ended = crash.all_claims(madeira, receiver)
    unexplained = crash.blame(ended, crew.faults)
    finished = Counter(row["status"] for row in madeira.rows("SELECT status FROM event"))
    twice = order.taken_twice(receiver)
    again = {c.delivery for c in ended if c.lost and c.calls}
    with capsys.disabled():
        took_s = time.monotonic() - started
        print(f"\n{keys} keys x {events} events in {took_s:.0f} s: {killed} workers killed, {flushes} wipes, {dict(finished)}")
        print(
            f"{len(receiver.calls)} calls, {sum(c.lost for c in ended)} claims lost, {sum(c.lost and c.calls for c in ended)} of "
            f"them called; taken twice: {len(twice)}"
        )

    assert flushes == 2
    assert finished == {"succeeded": keys * events}, "nothing is lost"
    taken = order.first_successes(receiver)
    assert {key: len(numbers) for key, numbers in taken.items()} == {f"key-{k}": events for k in range(keys)}
    assert order.inversions(taken) == {}
    assert order.overlaps(receiver) == [], "one call at a time of each key"
    assert unexplained == [], "called again, though nobody who was killed had it in his hands"
    assert twice <= again, "taken twice, though no worker was killed that had the call in its hands"


@pytest.mark.alone
@pytest.mark.crash
@pytest.mark.timeout(600)
def test_under_fire_a_key_keeps_its_order(
    madeira: Madeira, receiver: Receiver, rounds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zero inversions, zero losses, and a second call only for what a killed worker had in its hands."""
    if rounds == 1:
        under_fire(madeira, receiver, capsys, keys=12, events=15, kills=5)
    else:
        under_fire(madeira, receiver, capsys, keys=50, events=40, kills=None)
