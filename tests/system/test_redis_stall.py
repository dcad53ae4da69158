"""Redis stands still for seconds, as on a paused machine: nothing is lost, nothing is called twice, nothing is stranded.

A call that Redis answers too late has been carried out all the same. So a fetch may have handed out what nobody knows of,
and an enqueue may have happened though it failed.
"""

import time

import pytest

from madeira.broker.queues import DELIVER, KEYED, ROUTE, Ensure
from tests.receiver import Answer, Gate
from tests.system.conftest import Stage
from tests.system.harness import wait_until
from tests.system.states import CALL_S, calls_by_event

#: Longer than a worker waits for one answer of Redis, and than a process may be silent by the settings of these tests.
STALL_S = 4.8


def test_a_stall_during_fetch_and_enqueue_strands_and_doubles_nothing(stage: Stage) -> None:
    """Cases in one stall: a fetch whose answer is lost on either queue, a finish and a retry meanwhile, posts meanwhile."""
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    gate = Gate()
    receiver.answer("/flaky", Answer())
    receiver.queue("/flaky", Answer(status=503, hold=gate))
    receiver.answer("/capped", Answer(hold=gate))
    receiver.answer("/good", Answer())
    retried, finished = madeira.post("flaky.x"), madeira.post("capped.x")
    receiver.wait_for(2)
    stage.worker.freeze()
    to_deliver = madeira.post_many(10, "good.x")
    wait_until(lambda: stage.queues.sizes([DELIVER])[DELIVER].ready == 10, what="ten deliveries that wait")
    stage.router.freeze()
    to_route = madeira.post_many(10, "good.x")
    stage.server.stall()
    try:
        stage.worker.thaw()
        stage.router.thaw()
        ends = time.monotonic() + STALL_S
        gate.set()
        took = []
        meanwhile = []
        while time.monotonic() < ends:
            begun = time.monotonic()
            meanwhile.append(madeira.post("good.x"))
            took.append(time.monotonic() - begun)
            wait_until(lambda now=begun: time.monotonic() > now + 0.2, every=0.05)
        assert len(madeira.attempts(retried)) == 1, "the verdict is in Postgres while Redis stands still"
    finally:
        stage.server.resume()
    madeira.wait_all()
    receiver.wait_idle()
    expected = dict.fromkeys([finished, *to_deliver, *to_route, *meanwhile], 1) | {retried: 2}
    assert calls_by_event(receiver) == expected
    assert receiver.overlaps == {}
    assert attempts(stage, expected) == expected
    assert "Timeout reading from socket" in stage.logs(), "the case was met: answers came too late"
    wait_until(lambda: all(size.held == 0 for size in stage.queues.sizes(KEYED).values()), what="empty hands")
    # How soon exactly is measured where nothing else runs, by the tests of the API's outages.
    assert max(took) < STALL_S / 2, "accepted without waiting for Redis"


def attempts(stage: Stage, event_ids: dict[str, int]) -> dict[str, int]:
    """How many attempts Postgres has on record for each event."""
    rows = stage.madeira.rows(
        "SELECT e.event_id, count(*) AS n FROM event e JOIN delivery d ON d.event_seq = e.seq "
        "JOIN delivery_log l ON l.delivery_id = d.id WHERE e.event_id = ANY(%s) GROUP BY 1",
        list(event_ids),
    )
    return {row["event_id"]: row["n"] for row in rows}


@pytest.mark.parametrize("queue", [ROUTE, DELIVER])
def test_what_was_handed_to_a_living_worker_that_never_heard_of_it_comes_back(stage: Stage, queue: str) -> None:
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    receiver.answer("/good", Answer())
    ids = [madeira.post("good.x")]
    madeira.wait_all()
    process = stage.router if queue == ROUTE else stage.worker
    names = [name.decode() for name in madeira.redis.zrange("m:procs", 0, -1)]
    name = next(name for name in names if int(name.split(".")[-2]) in process.children())
    process.freeze()
    ids += madeira.post_many(10, "good.x")
    wait_until(lambda: stage.queues.sizes([queue])[queue].ready == 10, what="ten keys that wait")
    # The fetch of a worker whose answer is lost on the way.
    turn = stage.queues.turn(
        queue, name, room=16, nonce="lost", version=1 if queue == DELIVER else None, threads=16, in_hand=0, by_lane={},
        lease_s=60.0, finishes=[], follow=[],
    )  # fmt: skip
    assert turn.grants
    process.thaw()
    # What the first heartbeat noted is lost too; the next ones note it again.
    redis = madeira.redis
    wait_until(lambda: redis.delete(*redis.keys("m:strays:*") or ["-"]), what="a suspicion", every=0.002)
    # Before any lease ends: that of a call is its time and two seconds.
    madeira.wait_all(CALL_S)
    receiver.wait_idle()
    assert calls_by_event(receiver) == dict.fromkeys(ids, 1)


def test_a_key_that_is_put_everywhere_by_hand_is_called_once(stage: Stage) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    receiver.forget()
    gate = Gate()
    receiver.answer("/good", Answer(hold=gate))
    event_id = madeira.post("good.x")
    receiver.wait_for(1)
    (key,) = redis.hkeys("m:deliver:held")
    put_back = stage.told("put_back")
    seq = key.decode().split(":")[1]
    # A copy in its lane, one among the delayed, one by enqueue, and the event once more for routing.
    redis.zadd("m:deliver:lane:good", {key: 1})
    redis.zadd("m:deliver:active", {"good": 0})
    redis.zadd("m:deliver:delayed", {key: 0})
    stage.queues.ensure([Ensure("deliver", key.decode()), Ensure("route", seq)])
    other = madeira.post("flaky.x")
    madeira.wait_status(other, "succeeded")
    wait_until(lambda: redis.zcard("m:deliver:lane:good") == 0 == redis.zcard("m:deliver:delayed"), what="the copies' end")
    gate.set()
    madeira.wait_status(event_id, "succeeded")
    assert stage.told("put_back") == put_back, "it was given to nobody else, from whom the holder had to take it back"
    wait_until(lambda: all(size == (0, 0, 0, 0) for size in stage.queues.sizes(KEYED).values()), what="empty queues")
    assert calls_by_event(receiver) == {event_id: 1, other: 1}
    assert receiver.overlaps == {}
