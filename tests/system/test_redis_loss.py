"""Redis loses its memory, in whole or in part, with events in every state: all end, each called once per attempt.

One system serves all tests of this file, since it must survive them one after another anyway; each brings a cast of
events of its own.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from madeira.broker.queues import DELIVER
from madeira.broker.rebuild import LEASE, Stopper, rebuild
from madeira.embedded import free_port
from madeira.store import leases
from tests.receiver import Answer, Gate
from tests.system.conftest import Stage
from tests.system.harness import Process, wait_until
from tests.system.states import BRISK, CAP, calls_by_event, most_at_once

#: Every kind of key that the cast of a test makes, as `kind_of` names it; each is deleted alone.
KINDS = (
    "epoch",
    "procs",
    "seen",
    "route:lane",
    "route:active",
    "route:delayed",
    "deliver:lane",
    "deliver:active",
    "deliver:delayed",
    "deliver:held",
    "deliver:stumbles",
    "deliver:losses",
    "deliver:lines",
    "deliver:idle",
    "dead_letter:idle",
    "reconcile:idle",
    "lane:cfg",
    "lane:tat",
    "lane:places",
    "lane:until",
    "lane:verdicts",
    "lane:breaker",
    "lane:era",
    "hold",
    "opened",
)

#: Kinds that exist for an instant, or after a mishap, only.
FLEETING = (
    "rebuild",
    "wake",
    "strays",
    "route:held",
    "route:idle",
    "route:stumbles",
    "route:losses",
    "dead_letter:lane",
    "dead_letter:active",
    "dead_letter:held",
    "reconcile:lane",
    "reconcile:active",
    "reconcile:held",
    "reconcile:msgs",
    "limit",
    "lane:slot",
)


def kind_of(key: str) -> str:
    """The kind of a key: its name without namespace, lane, process and event."""
    name = key.split(":", 1)[1]
    name = re.sub(r"^(seen|wake|strays|limit|hold):.*", r"\1", name)
    name = re.sub(r"^(\w+):lane:.*", r"\1:lane", name)
    return re.sub(r"^lane:.*:(\w+)$", r"lane:\1", name)


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_of_a_kind_and_the_whole_kind_may_be_deleted_alone(stage: Stage, kind: str) -> None:
    keys = lose(stage, kind, lambda mine: [mine])
    if 1 < len(keys) <= len(stage.lanes):
        lose(stage, kind, lambda mine: [[key] for key in mine])


def lose(stage: Stage, kind: str, groups: Callable[[list[str]], list[list[str]]]) -> list[str]:
    """Delete the keys of `kind`, one group after the other, under a cast of its own; gives the keys there were."""
    redis = stage.madeira.redis
    cast = stage.cast()
    # As if what is in flight had been given up, and its worker been lost, before.
    for key in redis.hkeys("m:deliver:held"):
        redis.hincrby("m:deliver:stumbles", key, 1)
        redis.hincrby("m:deliver:losses", key, 1)
    keys = stage.madeira.keys
    assert {kind_of(key) for key in keys()} <= {*KINDS, *FLEETING}, "a kind of key that this test does not know"
    # Some come and go: who is idle is woken for a moment.
    mine = wait_until(lambda: [key for key in keys() if kind_of(key) == kind], what=f"a key of the kind {kind}")
    first, *later = groups(mine)
    wait_until(lambda: redis.delete(*first), what=f"{first} to delete", every=0.002)
    cast.outlast_a_reconcile()
    for gone in later:
        # It may be gone of itself by now: what needed it has ended.
        redis.delete(*gone)
        cast.outlast_a_reconcile()
    cast.leave()
    cast.post_again()
    return mine


def test_after_a_flushall_every_event_ends_and_a_repeated_post_is_a_duplicate(stage: Stage) -> None:
    cast = stage.cast()
    stage.madeira.redis.flushall()
    cast.outlast_a_reconcile()
    cast.leave()
    cast.post_again()


def test_a_rebuild_that_loses_its_nonce_starts_over_and_one_that_is_wiped_too(stage: Stage) -> None:
    redis = stage.madeira.redis
    cast = stage.cast()
    redis.flushall()
    began = wait_until(lambda: redis.get("m:rebuild"), what="a rebuild", every=0.002)
    redis.delete("m:rebuild")
    again = wait_until(lambda: (nonce := redis.get("m:rebuild")) != began and nonce, what="another rebuild", every=0.002)
    assert redis.get("m:epoch") is None
    wait_until(lambda: redis.get("m:epoch"), what="the epoch", every=0.002)
    assert redis.get("m:epoch") == again
    # And once more, while the keys come in, page by page.
    redis.flushall()
    cast.outlast_a_reconcile()
    cast.leave()


def test_of_two_rebuilds_at_once_the_later_one_counts(stage: Stage) -> None:
    madeira, redis = stage.madeira, stage.madeira.redis
    cast = stage.cast()
    given_up = stage.logs().count("rebuild.again")
    redis.flushall()
    first = wait_until(lambda: redis.get("m:rebuild"), what="a rebuild", every=0.002)
    # As if the first one's lease had run out: it was frozen, or had lost Postgres.
    madeira.rows("UPDATE lease SET holder = 'the later one' WHERE name = 'rebuild' RETURNING 1")
    assert rebuild(queues=stage.queues, database=stage.database, holder="the later one", beat_s=0.5, stopped=Stopper())
    assert redis.get("m:epoch") != first
    wait_until(lambda: stage.logs().count("rebuild.again") > given_up, what="the first one's word that it begins again")
    cast.outlast_a_reconcile()
    cast.leave()


def test_a_rebuild_whose_process_is_frozen_does_not_stop_the_others(stage: Stage) -> None:
    redis = stage.madeira.redis
    cast = stage.cast()
    frozen, thawed = threading.Event(), threading.Event()

    def freeze(_: float) -> bool:
        frozen.set()
        return not thawed.wait(30)

    beat_s, name = float(BRISK["MADEIRA_BEAT_S"]), "the frozen one"
    with stage.database.connection() as conn:
        assert leases.take(conn, LEASE, name, 5.0)
    redis.flushall()
    with ThreadPoolExecutor(1) as pool:
        rebuilding = pool.submit(
            rebuild, queues=stage.queues, database=stage.database, holder=name, beat_s=beat_s, stopped=freeze
        )
        try:
            assert frozen.wait(5)
            wait_until(lambda: redis.get("m:epoch"), 8, what="the epoch, by another process")
        finally:
            thawed.set()
        assert rebuilding.result() is False
    cast.outlast_a_reconcile()
    cast.leave()


@contextlib.contextmanager
def nobody_rebuilds(stage: Stage) -> Iterator[None]:
    """Within the block the epoch stays away, as long as that may take."""
    with stage.database.connection() as conn:
        assert leases.take(conn, LEASE, "the test", 60.0)
    try:
        yield
    finally:
        with stage.database.connection() as conn:
            leases.release(conn, LEASE, "the test")


@pytest.mark.parametrize("moment", ["before the epoch is made", "after the epoch is made"])
def test_a_grant_from_before_a_wipe_finishes_after_it(stage: Stage, moment: str) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    receiver.forget()
    gate = Gate()
    receiver.answer("/good", Answer(hold=gate))
    receiver.answer("/flaky", Answer())
    receiver.queue("/flaky", Answer(status=503, hold=gate))
    good, retried = madeira.post("good.x"), madeira.post("flaky.x")
    receiver.wait_for(2)
    with contextlib.ExitStack() as before:
        before.enter_context(nobody_rebuilds(stage))
        redis.flushall()
        if moment == "after the epoch is made":
            before.close()
            wait_until(lambda: redis.get("m:epoch"), what="the epoch")
        gate.set()
        wait_until(lambda: len(madeira.attempts(retried)) == 1, what="the first verdict")
        assert (redis.get("m:epoch") is None) == (moment == "before the epoch is made")
    madeira.wait_all()
    assert madeira.event(good)["status"] == madeira.event(retried)["status"] == "succeeded"
    assert calls_by_event(receiver) == {good: 1, retried: 2}
    assert [a["outcome"] for a in madeira.attempts(retried)] == ["retryable", "succeeded"]
    assert receiver.overlaps == {}


def test_a_wipe_never_admits_more_than_the_cap_though_a_caller_is_frozen(stage: Stage) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    cast = stage.cast()
    held = redis.hgetall("m:deliver:held")
    # Beside them a retry that came due, or the try of a breaker, may be under way.
    (key, value), *others = [(key, value) for key, value in held.items() if key.endswith(b":capped")]
    assert len(others) == CAP - 1
    token = value.split()[0]
    frozen = int(token.split(b".")[-3])
    # Not in the middle of a reconcile, whose lease would keep the others from theirs for longer than the calls may take.
    cast.outlast_a_reconcile()
    os.kill(frozen, signal.SIGSTOP)
    try:
        redis.flushall()
        wait_until(lambda: redis.get("m:epoch"), what="the epoch")
        cast.router.thaw()
        cast.outlast_a_reconcile()
        assert most_at_once(receiver.calls_to("/capped")) == CAP
    finally:
        os.kill(frozen, signal.SIGCONT)
    # What Postgres had told of is the thawed process's own again, before the lease ends: after that it would be somebody else's.
    wait_until(lambda: (redis.hget("m:deliver:held", key) or b"").startswith(token), what="the holder's return")
    cast.leave()
    assert madeira.value("SELECT count(*) FROM delivery_log WHERE outcome = 'lost'") == 0


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_a_retry_survives_that_redis_dies_at_the_moment_of_its_rescheduling(stage: Stage, memory: str) -> None:
    madeira, receiver = stage.madeira, stage.receiver
    receiver.forget()
    gate = Gate()
    receiver.answer("/flaky", Answer())
    receiver.queue("/flaky", Answer(status=500, hold=gate))
    event_id = madeira.post("flaky.x")
    receiver.wait_for(1)
    stage.server.kill()
    gate.set()
    wait_until(lambda: len(madeira.attempts(event_id)) == 1, what="the verdict in Postgres")
    accepted_without_redis = madeira.post("good.x")
    restart(stage, memory)
    assert madeira.wait_status(event_id, "succeeded")["retry_count"] == 1
    madeira.wait_status(accepted_without_redis, "succeeded")
    assert calls_by_event(receiver) == {event_id: 2, accepted_without_redis: 1}
    assert receiver.overlaps == {}


@pytest.mark.alone
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_what_came_due_while_redis_was_away_is_called_when_it_is_back(stage: Stage, memory: str) -> None:
    cast = stage.cast()
    stage.server.kill()
    overdue = "SELECT count(*) FROM delivery WHERE status = 'pending' AND next_attempt_at < now() AND attempt > 0"
    wait_until(lambda: stage.madeira.value(overdue), what="a due retry")
    restart(stage, memory)
    back = time.monotonic()
    cast.leave()
    (_, second) = stage.receiver.calls_to("/flaky")[-2:]
    assert second.at - back < 3.0
    assert stage.madeira.value(overdue) == 0


def restart(stage: Stage, memory: str) -> None:
    """Start Redis again, with what it had written down or with nothing."""
    if memory == "lost":
        shutil.rmtree(stage.server.data / "appendonlydir")
    stage.server.start()


@pytest.mark.alone
def test_a_lost_wake_up_costs_a_second_at_most(stage: Stage) -> None:
    madeira, receiver, redis = stage.madeira, stage.receiver, stage.madeira.redis
    receiver.forget()
    receiver.answer("/good", Answer())
    waits = []
    for n in range(2):
        idle = wait_until(lambda: len(keys := redis.keys("m:*:idle")) >= 3 and keys, what="idle processes")
        redis.delete(*idle, *redis.keys("m:wake:*"))
        posted = time.monotonic()
        madeira.post("good.x")
        waits.append(receiver.wait_for(n + 1)[-1].at - posted)
    # Two queues are passed, and either may have lost its wake-up.
    assert max(waits) < 2.5
    madeira.wait_all()


def test_a_place_counts_against_the_cap_though_the_list_of_places_is_lost(stage: Stage) -> None:
    cast = stage.cast()
    rows = stage.madeira.rows(
        "SELECT id || ':' || event_seq || ':' || lane AS key FROM delivery WHERE lane = 'capped' AND status = 'pending'"
    )
    for _ in range(2):
        stage.madeira.redis.delete("m:lane:capped:places")
        # What reconcile does too: it has the lanes of those that wait looked at again.
        assert stage.queues.unknown(DELIVER, [(row["key"], 0.0) for row in rows]) == set()
        cast.outlast_a_reconcile()
        assert most_at_once(stage.receiver.calls_to("/capped")) == CAP
    cast.leave()


def test_a_redis_that_evicts_is_named_by_every_process_that_starts(stage: Stage) -> None:
    madeira, redis = stage.madeira, stage.madeira.redis
    assert "redis.evicts" not in stage.logs()
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        env = {"MADEIRA_PORT": str(free_port()), "MADEIRA_PROCESSES": "1"}
        worker = madeira.start("warned", ["dramatiq", "madeira.actors", "-p", "1", "-t", "2", "-Q", "unused"])
        api = madeira.start("warned", ["gunicorn", "-c", "deploy/gunicorn.conf.py", "madeira.api:app"], env)
        for process in (worker, api):
            wait_until(lambda p=process: evictions(p), what=f"the warning of {process.log}")
            line = evictions(process)[0]
            assert line["level"] == "error"
            assert line["policy"] == "allkeys-lru"
            assert "noeviction" in line["remedy"]
            process.kill()
    finally:
        redis.config_set("maxmemory-policy", "noeviction")


def evictions(process: Process) -> list[dict[str, str]]:
    """What a process logged about a Redis that evicts."""
    lines = [json.loads(line) for line in process.tail(10**8).splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == "redis.evicts"]
