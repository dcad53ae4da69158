"""Reconcile finds exactly what is missing, and does no harm whenever, however often and by whomever it is run.

No scheduler runs in these tests: the workers' own safety net asks for each reconcile.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from dramatiq import Message

from madeira.broker.queues import DELIVER, KEYED, ROUTE, Ensure
from tests.receiver import Answer, Gate
from tests.system.conftest import Stage
from tests.system.harness import wait_until
from tests.system.states import BRISK, CAP, calls_by_event

#: What a scheduler sends each minute.
TICK: Message[Any] = Message(queue_name="reconcile", actor_name="reconcile", args=(), kwargs={}, options={})

#: How exactly the beginning of a run is known, from its end and its duration.
JITTER = timedelta(milliseconds=5)


def found(stage: Stage, since: datetime) -> dict[str, int]:
    """What all reconciles since a moment of Postgres' clock found, by kind."""
    rows = stage.madeira.rows(
        "SELECT key, sum(value::int)::int AS n FROM reconcile_run, jsonb_each_text(counts) WHERE finished_at > %s GROUP BY key",
        since,
    )
    return {row["key"]: row["n"] for row in rows}


def database_now(stage: Stage) -> Any:
    """The moment by Postgres' clock."""
    return stage.madeira.value("SELECT clock_timestamp()")


def test_reconcile_finds_exactly_what_is_missing_and_nothing_else(stage: Stage) -> None:
    redis = stage.madeira.redis
    cast = stage.cast()
    cast.outlast_a_reconcile()
    since = database_now(stage)
    cast.outlast_a_reconcile()
    assert found(stage, since) == {}, "events in every state, and nothing is missing"
    (waiting, *_), (unrouted, *_) = redis.zrange("m:deliver:lane:capped", 0, -1), redis.zrange("m:route:lane:-", 0, -1)
    assert redis.zrem("m:deliver:lane:capped", waiting)
    assert redis.zrem("m:route:lane:-", unrouted)
    cast.outlast_a_reconcile()
    assert found(stage, since) == {"delivery_not_queued": 1, "event_not_queued": 1}
    assert redis.zscore("m:deliver:lane:capped", waiting) is not None
    cast.leave()
    cast.outlast_a_reconcile()
    assert found(stage, since) == {"delivery_not_queued": 1, "event_not_queued": 1}


def test_a_delayed_delivery_is_due_in_redis_when_it_is_due_in_postgres(stage: Stage) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    receiver.forget()
    receiver.answer("/flaky", Answer(status=503))
    madeira.post_many(40, "flaky.x")
    apart_ms = clocks_apart_ms(stage)
    late: dict[bytes, float] = {}

    def look() -> bool:
        postgres = due_in_postgres_ms(stage)
        in_redis = dict(redis.zrange("m:deliver:delayed", 0, -1, withscores=True))
        # What has not moved in the meantime can be compared.
        same = dict(postgres.items() & due_in_postgres_ms(stage).items())
        late.update({key: in_redis[key] - due - apart_ms for key, due in same.items() if key in in_redis})
        return len(late) >= 30

    wait_until(look, what="thirty retries", every=0.01)
    receiver.answer("/flaky", Answer())
    madeira.wait_all()
    least, middle, most = min(late.values()), median(late.values()), max(late.values())
    print(
        f"due in Redis later than in Postgres by {least:.2f} to {most:.2f} ms, in the middle {middle:.2f}; clocks {apart_ms:.3f}"
    )
    assert least > -5
    # A busy machine lets one wait on the way from Postgres to Redis.
    assert middle < 20
    assert most < 200


def due_in_postgres_ms(stage: Stage) -> dict[bytes, float]:
    """When each delivery that waits for a retry is due, by the broker's key."""
    rows = stage.madeira.rows(
        "SELECT id || ':' || event_seq || ':' || lane AS key, extract(epoch FROM next_attempt_at)::float8 * 1000 AS due "
        "FROM delivery WHERE status = 'pending' AND attempt > 0"
    )
    return {row["key"].encode(): row["due"] for row in rows}


def clocks_apart_ms(stage: Stage) -> float:
    """Redis' clock minus Postgres', from the closest of several readings."""
    readings, redis = [], stage.madeira.redis
    for _ in range(20):
        before = time.monotonic()
        seconds, micros = redis.time()
        between = time.monotonic()
        postgres = stage.madeira.value("SELECT extract(epoch FROM clock_timestamp())::float8")
        readings.append((time.monotonic() - before, (seconds + micros / 1e6 + (between - before) / 2 - postgres) * 1000))
    return min(readings)[1]


def test_a_queue_that_is_waited_in_longer_than_the_grace_makes_no_duplicates(stage: Stage) -> None:
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    gate = Gate()
    receiver.answer("/capped", Answer(hold=gate))
    since = database_now(stage)
    ids = madeira.post_many(100, "capped.x")
    receiver.wait_for(CAP)
    # Young rows are not asked for; these are old by now, and wait all the same.
    grace_is_over = time.monotonic() + 3 * float(BRISK["MADEIRA_RECONCILE_S"])
    wait_until(lambda: time.monotonic() > grace_is_over, what="three times the grace")
    # The routing of an event and its delivery are two keys for a moment.
    wait_until(lambda: keys_of_all_queues(stage) == 100, what="a key each")
    gate.set()
    madeira.wait_all()
    receiver.wait_idle()
    assert found(stage, since) == {}
    assert calls_by_event(receiver) == dict.fromkeys(ids, 1)


def keys_of_all_queues(stage: Stage) -> int:
    """How many keys wait, are delayed or are in a worker's hands."""
    return sum(size.ready + size.delayed + size.held for size in stage.queues.sizes(KEYED).values())


@pytest.mark.long
def test_many_reconciles_at_once_find_what_is_missing_once_and_take_turns(stage: Stage) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    receiver.forget()
    receiver.answer("/good", Answer())
    since = database_now(stage)
    stage.worker.freeze()
    ids = madeira.post_many(100, "good.x")
    wait_until(lambda: stage.queues.sizes([DELIVER])[DELIVER].ready == 100, what="a hundred deliveries that wait")
    # The ticks of ten schedulers, while three persons run it by hand.
    for n in range(10):
        stage.queues.enqueue("reconcile", f"tick-{n}", TICK.encode())
    redis.delete("m:deliver:lane:good")
    by_hand = [madeira.start(f"by-hand-{n}", ["madeira", "reconcile", "--json"]) for n in range(3)]
    stage.worker.thaw()
    madeira.wait_all()
    receiver.wait_idle()
    # One that comes while it is another's turn says so, and fails.
    assert {process.popen.wait(20) for process in by_hand} <= {0, 1}
    assert calls_by_event(receiver) == dict.fromkeys(ids, 1)
    assert receiver.overlaps == {}
    assert found(stage, since) == {"delivery_not_queued": 100}
    wait_until(lambda: stage.queues.sizes(["reconcile"])["reconcile"].ready == 0, what="the ticks' end")
    runs = madeira.rows("SELECT finished_at - duration_s * interval '1 s' AS began, finished_at FROM reconcile_run ORDER BY id")
    assert all(earlier["finished_at"] <= later["began"] + JITTER for earlier, later in pairwise(runs)), "one at a time"


def test_an_event_whose_commit_comes_after_its_key_is_routed(stage: Stage) -> None:
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    receiver.answer("/good", Answer())
    model = madeira.post("good.x")
    madeira.wait_all()
    copied = "source, event_type, payload, body_sha256, trace_id"
    with stage.database.connection() as conn:
        inserted = conn.execute(
            f"INSERT INTO event ({copied}, event_id, route_at) "
            f"SELECT {copied}, 'e-late', clock_timestamp() FROM event WHERE event_id = %s RETURNING seq",
            [model],
        )
        (row,) = inserted.fetchall()
        stage.queues.ensure([Ensure(ROUTE, str(row[0]))])
        # It is delayed until another try, or a reconcile that came just then has taken it away as nobody's.
        tried = ("delayed", "nowhere")
        wait_until(lambda: stage.queues.where(ROUTE, [str(row[0])])[0].kind in tried, what="a try")
    madeira.wait_status("e-late", "succeeded")
    assert calls_by_event(receiver) == {model: 1, "e-late": 1}


def test_a_worker_whose_threads_are_busy_keeps_its_calls_and_reconcile_runs_beside_them(stage: Stage) -> None:
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    gate = Gate()
    for lane in stage.lanes:
        receiver.answer(f"/{lane}", Answer(hold=gate))
    # All calls begin at once: each must last for as long as the test looks at them.
    stage.worker.freeze()
    with ThreadPoolExecutor(4) as pool:
        ids = [e for page in pool.map(lambda lane: madeira.post_many(8, f"{lane}.x", threads=2), stage.lanes) for e in page]
    wait_until(lambda: stage.queues.sizes([DELIVER])[DELIVER].ready == len(ids), what="deliveries that wait")
    stage.worker.thaw()
    # Of eight threads a process deliveries may use six; the last of those is for a lane that holds none.
    receiver.wait_for(10)
    newest, taken_over = "SELECT coalesce(max(id), 0) FROM reconcile_run", stage.told("taken_over")
    reconciled, silent = madeira.value(newest), time.monotonic() + 1.4 * float(BRISK["MADEIRA_SILENCE_S"])
    wait_until(lambda: time.monotonic() > silent, what="the silence of a process that is gone")
    assert madeira.value(newest) > reconciled + 2
    receiver.wait_until(lambda: receiver.count() == receiver.in_progress, what="every call under way")
    assert receiver.count() <= 12
    assert stage.told("taken_over") == taken_over, "nobody took a busy process for gone"
    gate.set()
    madeira.wait_all()
    receiver.wait_idle()
    assert calls_by_event(receiver) == dict.fromkeys(ids, 1)
    assert receiver.overlaps == {}
