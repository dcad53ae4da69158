"""Order in whole systems: whatever dies or forgets, a key's events come to the receiver one after another, in their order."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from madeira.broker.queues import ensure_delivery
from tests.receiver import Answer, Call, Receiver
from tests.system import crash, order
from tests.system.harness import TOKEN, Madeira, running, toml, wait_until
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
    madeira: Madeira,
    receiver: Receiver,
    capsys: pytest.CaptureFixture[str],
    *,
    keys: int,
    events: int,
    kills: int | None = None,
    starting: int = 0,
) -> None:
    """Post, kill one of two workers every second (at most `kills`), wipe Redis twice, and count everything in the end.

    Every second some of what waits for its turn is queued by hand: the order must not depend on what is in Redis.
    """
    queues = queues_of(madeira)
    crew = Crew(madeira, starting=starting)
    wait_until(lambda: len(crew.ready) >= 2, 30, what="the workers' start")
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
    took_s = time.monotonic() - started
    receiver.wait_idle()

    ended = crash.all_claims(madeira, receiver)
    unexplained = crash.blame(ended, crew.faults)
    finished = Counter(row["status"] for row in madeira.rows("SELECT status FROM event"))
    twice = order.taken_twice(receiver)
    again = {c.delivery for c in ended if c.lost and c.calls}
    with capsys.disabled():
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


@pytest.mark.long
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
        under_fire(madeira, receiver, capsys, keys=50, events=40, starting=4)


@pytest.mark.long
@pytest.mark.alone
def test_dead_letters_of_a_key_are_replayed_in_order_though_one_fails_and_a_worker_dies(
    madeira: Madeira, receiver: Receiver
) -> None:
    """Ten of each of two keys, replayed in any order: the fourth of one fails twice, the worker that calls its sixth is killed.

    It goes on at the sixth and leaves none out, and the other key does not wait for that.
    """
    chance = Random(46)
    receiver.default(Answer(status=400))
    first_crew = madeira.worker()
    names = {key: [madeira.post("a.b", {"key": key, "n": n}, event_id=f"{key}-{n}") for n in range(10)] for key in ("k", "l")}
    wait_until(lambda: madeira.value("SELECT count(*) FROM event WHERE status = 'dead'") == 20, what="the death of all")
    assert order.inversions(called(receiver)) == {}
    first_crew.stop()
    madeira.rows("UPDATE event SET created_at = now() WHERE event_id = ANY(%s) RETURNING seq", names["k"][2:5])
    receiver.forget()

    failing, kill = iter([503, 503]), crash.killing(madeira)
    struck: list[Call] = []

    def answers(call: Call) -> Answer:
        payload = call.json()["payload"]
        if payload == {"key": "k", "n": 5} and not struck:
            struck.append(call)
            kill(call)
            return Answer(delay_s=0.1)
        status = next(failing, 200) if payload == {"key": "k", "n": 3} else 200
        return Answer(status=status, delay_s=chance.uniform(0, 0.2))

    receiver.default(answers)
    for event_id in chance.sample([*names["k"], *names["l"]], 20):
        replay(madeira, event_id)
    for _ in range(2):
        madeira.worker()
    madeira.wait_all(40)
    receiver.wait_idle()

    assert struck, "no worker was killed"
    assert order.first_successes(receiver) == {"k": list(range(10)), "l": list(range(10))}
    assert order.overlaps(receiver) == []
    assert called(receiver)["k"] == [0, 1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 9]
    others = [call for call in receiver.calls if call.json()["payload"]["key"] == "l"]
    waited = sum(two.at - (one.ended or 0) > crash.TIMEOUT_S for one, two in pairwise(others))
    lost = sum(row["outcome"] == "lost" for event_id in names["l"] for row in madeira.attempts(event_id))
    assert waited <= lost, "the other key waits only if the killed worker had a call of its own in its hands"


def called(receiver: Receiver) -> dict[str, list[int]]:
    """The numbers of each key's events as they were called."""
    found: dict[str, list[int]] = {}
    for call in receiver.calls:
        found.setdefault(call.json()["payload"]["key"], []).append(call.json()["payload"]["n"])
    return found


def replay(madeira: Madeira, event_id: str) -> None:
    """Have the dead deliveries of an event sent again, as a person does."""
    answer = madeira.http.post(
        f"/v1/events/{event_id}/replay",
        params={"source": "test"},
        json={"reason": "the receiver is mended"},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 200, answer.text
