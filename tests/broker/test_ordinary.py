"""For every message that is not Madeira's own, the broker is a Dramatiq broker like any other."""

import itertools
import time
from datetime import timedelta
from threading import Event
from typing import Any

import dramatiq
import pytest
from dramatiq import Message, Retry
from dramatiq.errors import QueueJoinTimeout
from dramatiq.middleware import CurrentMessage, GroupCallbacks
from dramatiq.middleware.time_limit import TimeLimitExceeded
from dramatiq.rate_limits.backends import RedisBackend as RateLimits
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from tests.broker.ordinary import QUEUE, Ordinary, Seen, leftovers, ordinary
from tests.system.harness import wait_until

# -- sending, delaying, waiting for the end ------------------------------------------------------------------------------


def test_a_message_runs_once_and_leaves_nothing_behind(process: Ordinary, seen: Seen, redis_url: str) -> None:
    add = process.actor(lambda a, *, b: seen.add((a, b)), actor_name="add")
    process.start()
    add.send(1, b="two")
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == [(1, "two")]
    assert leftovers(redis_url) == []


def test_the_same_message_enqueued_twice_runs_twice(process: Ordinary, seen: Seen) -> None:
    note = process.actor(lambda: seen.add(1), actor_name="note")
    message = process.broker.enqueue(note.message())
    process.broker.enqueue(message)
    process.start()
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == [1, 1]


def test_a_delayed_message_runs_when_it_is_due(process: Ordinary, seen: Seen) -> None:
    note = process.actor(lambda: seen.add(time.monotonic()), actor_name="note")
    process.start()
    sent = time.monotonic()
    note.send_with_options(delay=timedelta(milliseconds=400))
    (ran,) = seen.wait_for(1)
    assert 0.4 <= ran - sent < 2


def test_delayed_messages_stay_out_of_the_worker_however_many_there_are(process: Ordinary, seen: Seen) -> None:
    note = process.actor(lambda n: seen.add((n, time.monotonic())), actor_name="note")
    pages = [[note.message(page * 500 + n) for n in range(500)] for page in range(60)]
    for page in pages:
        args = [x for m in page for x in (QUEUE, f"{m.message_id}.1", "600000.000", m.encode(), "")]
        process.queues.run("ensure", 0, *args)
    worker = process.start()
    sent = time.monotonic()
    for n in range(200):
        note.send_with_options(args=(n,), delay=300)
    ran = seen.wait_for(200)
    assert sorted(n for n, _ in ran) == list(range(200))
    assert max(at for _, at in ran) - sent < 5, "30,000 that are due later hold up nobody"
    assert worker.consumers.keys() == {QUEUE}, "there are no consumers of delay queues"
    assert worker.consumers[QUEUE].delay_queue.empty()
    assert worker.work_queue.empty()
    wait_until(lambda: process.broker.hands.of(QUEUE) == [], what="the end of what was due")
    assert process.queues.sizes([QUEUE])[QUEUE].delayed == 30_000


def test_join_waits_for_what_is_delayed_in_hand_or_to_be_retried(process: Ordinary) -> None:
    go, started = Event(), Event()

    def work() -> None:
        started.set()
        if not go.wait(10):
            raise TimeoutError
        if CurrentMessage.get_current_message().options.get("retries", 0) == 0:  # type: ignore[union-attr]
            raise ValueError("the first time")

    process.start()
    process.actor(work, actor_name="work").send_with_options(delay=200)
    with pytest.raises(QueueJoinTimeout):
        process.broker.join(QUEUE, interval=10, timeout=100)
    assert started.wait(5)
    with pytest.raises(QueueJoinTimeout):
        process.broker.join(QUEUE, interval=10, timeout=100)
    go.set()
    process.broker.join(QUEUE, interval=5, timeout=5000)
    assert process.rejected() == []


def test_flush_drops_one_queue_and_flush_all_every_queue(process: Ordinary, seen: Seen, redis_url: str) -> None:
    first = process.actor(lambda: seen.add("first"), actor_name="first", queue_name="first")
    second = process.actor(lambda: seen.add("second"), actor_name="second", queue_name="second")
    for actor in (first, second):
        actor.send()
        actor.send_with_options(delay=60_000)
    process.broker.flush("first")
    sizes = process.queues.sizes(["first", "second"])
    assert (sizes["first"][:3], sizes["second"][:3]) == ((0, 0, 0), (1, 1, 0))
    process.broker.flush_all()
    assert leftovers(redis_url) == []
    process.start()
    first.send()
    assert seen.wait_for(1) == ["first"], "the queue still works"


def test_queues_are_independent_and_a_worker_serves_those_that_it_is_told(redis_url: str, seen: Seen) -> None:
    with ordinary(redis_url) as process:
        for name in ("red", "green", "blue"):
            process.actor(seen.add, actor_name=name, queue_name=name).send(name)
        process.worker = dramatiq.Worker(process.broker, queues={"red", "blue"}, worker_threads=2, worker_timeout=50)
        process.pulse.start()
        process.worker.start()
        assert sorted(seen.wait_for(2)) == ["blue", "red"]
        process.broker.join("red", interval=10, timeout=5000)
        assert process.queues.sizes(["green"])["green"].ready == 1


def test_of_what_is_in_memory_the_lowest_priority_number_runs_first(process: Ordinary, seen: Seen) -> None:
    go = Event()
    block = process.actor(lambda: go.wait(10) and None, actor_name="block")
    low = process.actor(lambda: seen.add("low"), actor_name="low", priority=10)
    high = process.actor(lambda: seen.add("high"), actor_name="high", priority=1)
    memory = process.start(threads=1).work_queue
    block.send()
    wait_until(lambda: len(process.broker.hands.of(QUEUE)) == 1 and memory.empty(), what="the thread at work")
    low.send()
    wait_until(lambda: memory.qsize() == 1, what="low in memory")
    # Twice as many messages as threads are taken; a third one would wait in Redis.
    process.broker.consumers[QUEUE].prefetch = 3
    high.send()
    wait_until(lambda: memory.qsize() == 2, what="high in memory")
    go.set()
    assert seen.wait_for(2) == ["high", "low"]


# -- failing -------------------------------------------------------------------------------------------------------------


def test_what_fails_is_retried_with_back_off_until_it_succeeds(process: Ordinary, seen: Seen) -> None:
    def flaky() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        retries = message.options.get("retries", 0)
        seen.add((time.monotonic(), retries))
        if retries < 3:
            raise ValueError("not yet")

    process.start()
    process.actor(flaky, actor_name="flaky", min_backoff=100, max_backoff=400).send()
    ran = seen.wait_for(4)
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert [retries for _, retries in ran] == [0, 1, 2, 3]
    assert all(later - earlier >= 0.1 for (earlier, _), (later, _) in itertools.pairwise(ran))
    assert process.rejected() == []


def test_what_fails_too_often_ends_in_the_dead_queue_with_its_traceback(process: Ordinary, seen: Seen) -> None:
    def fail(n: int) -> None:
        seen.add(n)
        raise ValueError(f"never {n}")

    process.start()
    process.actor(fail, actor_name="fail", max_retries=2, min_backoff=1, max_backoff=2).send(7)
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == [7, 7, 7]
    (dead,) = process.rejected()
    assert (dead.actor_name, dead.args) == ("fail", (7,))
    assert dead.options["retries"] == 2, "as it was handed out the last time"
    assert "never 7" in dead.options["traceback"]


@pytest.mark.parametrize("options", [{"max_retries": 0}, {"throws": ValueError}], ids=["max_retries", "throws"])
def test_what_may_not_be_retried_is_dead_at_once(process: Ordinary, seen: Seen, options: dict[str, Any]) -> None:
    def fail() -> None:
        seen.add(1)
        raise ValueError

    process.start()
    process.actor(fail, actor_name="fail", **options).send()
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == [1]
    assert len(process.rejected()) == 1


def test_an_actor_may_say_when_it_wants_to_be_retried(process: Ordinary, seen: Seen) -> None:
    def later() -> None:
        seen.add(time.monotonic())
        if len(seen.items) == 1:
            raise Retry(delay=300)

    process.start()
    process.actor(later, actor_name="later").send()
    first, second = seen.wait_for(2)
    assert 0.3 <= second - first < 2


def test_a_message_for_an_unknown_actor_ends_in_the_dead_queue_and_holds_up_nobody(process: Ordinary, seen: Seen) -> None:
    note = process.actor(seen.add, actor_name="note")
    process.start()
    process.broker.enqueue(Message(queue_name=QUEUE, actor_name="nobody", args=(), kwargs={}, options={}))
    note.send(1)
    seen.wait_for(1)
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert [m.actor_name for m in process.rejected()] == ["nobody"]


def test_a_body_that_is_no_message_of_the_queue_is_rejected_and_holds_up_nobody(process: Ordinary, seen: Seen) -> None:
    note = process.actor(seen.add, actor_name="note")
    process.queues.enqueue(QUEUE, "bad.1", b"\x00 not JSON")
    process.queues.enqueue(QUEUE, "foreign.1", note.message(9).copy(queue_name="deliver", actor_name="deliver").encode())
    note.send(1)
    process.start()
    seen.wait_for(1)
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == [1]
    assert process.queues.sizes([QUEUE])[QUEUE].rejected == 2


def test_rejected_messages_are_kept_for_a_week(process: Ordinary) -> None:
    fail = process.actor(lambda: 1 / 0, actor_name="fail", max_retries=0)
    process.start()
    fail.send()
    process.broker.join(QUEUE, interval=10, timeout=5000)
    (key,) = process.queues.client.zrange(f"t:{QUEUE}:XQ", 0, -1)  # type: ignore[misc]
    process.queues.client.zadd(f"t:{QUEUE}:XQ", {key: time.time() * 1000 - 8 * 86_400_000})
    fail.send()
    process.broker.join(QUEUE, interval=10, timeout=5000)
    (dead,) = process.rejected()
    assert not process.queues.client.hexists(f"t:{QUEUE}:XQ.msgs", key), "its body goes with it"
    assert dead.actor_name == "fail"


# -- the stock middleware ------------------------------------------------------------------------------------------------


def test_a_message_past_its_age_limit_is_rejected(process: Ordinary, seen: Seen) -> None:
    note = process.actor(lambda: seen.add(1), actor_name="note", max_age=50)
    process.broker.enqueue(note.message().copy(message_timestamp=int(time.time() * 1000) - 1000))
    process.start()
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert seen.items == []
    assert len(process.rejected()) == 1


def test_an_actor_past_its_time_limit_is_interrupted(process: Ordinary, seen: Seen) -> None:
    def run_on() -> None:
        try:
            end = time.monotonic() + 10
            while time.monotonic() < end:
                time.sleep(0.01)
        except TimeLimitExceeded:
            seen.add("interrupted")
            raise

    process.start()
    process.broker.emit_after("process_boot")
    process.actor(run_on, actor_name="run_on", time_limit=100, max_retries=0).send()
    assert seen.wait_for(1) == ["interrupted"]
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert len(process.rejected()) == 1


def test_callbacks_are_told_of_success_and_failure(process: Ordinary, seen: Seen) -> None:
    process.actor(lambda data, result: seen.add((data["args"], result)), actor_name="on_success")
    process.actor(lambda data, error: seen.add((data["args"], error["type"])), actor_name="on_failure")
    work = process.actor(lambda n: 10 // n, actor_name="work", max_retries=0)
    process.start()
    work.send_with_options(args=(2,), on_success="on_success", on_failure="on_failure")
    work.send_with_options(args=(0,), on_success="on_success", on_failure="on_failure")
    assert sorted(seen.wait_for(2), key=str) == [([0], "ZeroDivisionError"), ([2], 5)]


def test_a_pipeline_hands_results_on_through_several_queues(process: Ordinary, seen: Seen) -> None:
    double = process.actor(lambda n: n * 2, actor_name="double", queue_name="first")
    add = process.actor(lambda a, b: a + b, actor_name="add", queue_name="second")
    note = process.actor(seen.add, actor_name="note")
    process.start()
    dramatiq.pipeline([double.message(5), add.message(1), double.message(), note.message()], broker=process.broker).run(delay=50)
    assert seen.wait_for(1) == [22]


def test_a_group_runs_all_and_calls_back_once_at_the_end(process: Ordinary, seen: Seen, redis_url: str) -> None:
    process.broker.add_middleware(GroupCallbacks(RateLimits(url=redis_url)))
    work = process.actor(lambda n: seen.add(n), actor_name="work")
    done = process.actor(lambda: seen.add("done"), actor_name="done")
    process.start()
    group = dramatiq.group([work.message(n) for n in range(5)], broker=process.broker)
    group.add_completion_callback(done.message())
    group.run()
    ran = seen.wait_for(6)
    assert (sorted(ran[:5]), ran[5]) == ([0, 1, 2, 3, 4], "done")


def test_results_and_failures_are_stored_under_the_message_that_was_sent(process: Ordinary, redis_url: str) -> None:
    backend = RedisBackend(url=redis_url)
    process.broker.add_middleware(Results(backend=backend, store_results=True))
    divide = process.actor(lambda a, b: a // b, actor_name="divide", max_retries=1, min_backoff=1, max_backoff=2)
    process.start()
    good, delayed, bad = divide.send(6, 3), divide.send_with_options(args=(8, 2), delay=50), divide.send(1, 0)
    assert good.get_result(backend=backend, block=True, timeout=5000) == 2
    assert delayed.get_result(backend=backend, block=True, timeout=5000) == 4
    with pytest.raises(dramatiq.results.errors.ResultFailure, match="ZeroDivisionError"):
        bad.get_result(backend=backend, block=True, timeout=5000)


def test_an_actor_may_pass_its_own_message_on_as_often_as_it_likes(process: Ordinary, seen: Seen) -> None:
    """Its options name the message in hand, but what goes elsewhere, or a second time, is a message of its own."""

    def spread(n: int) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        if n == 0:
            for k in (1, 2, 3):
                process.broker.enqueue(message.copy(args=(k,)), delay=k * 10)
            process.broker.enqueue(message.copy(actor_name="other", queue_name="other"))
        else:
            seen.add(n)

    process.actor(lambda n: seen.add("other"), actor_name="other", queue_name="other")
    process.start()
    process.actor(spread, actor_name="spread").send(0)
    assert sorted(map(str, seen.wait_for(4))) == ["1", "2", "3", "other"]
    process.broker.join(QUEUE, interval=10, timeout=5000)
    assert process.rejected() == []
