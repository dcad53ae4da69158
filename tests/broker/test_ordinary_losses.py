"""What breaks loses no ordinary message: Redis that is away, full or frozen, a process that falls silent or stops."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import Event

import dramatiq
import pytest
import redis
from dramatiq import Message
from dramatiq.errors import BrokerConnectionError

from madeira.broker.broker import MadeiraBroker
from madeira.broker.queues import Queues
from tests.broker.ordinary import QUEUE, Ordinary, Seen, ordinary
from tests.servers import OwnRedis
from tests.system.harness import wait_until


def test_the_index_of_a_queue_can_get_lost_without_harm(process: Ordinary, seen: Seen, redis_url: str) -> None:
    process.actor(seen.add, actor_name="note").send(1)
    redis.Redis.from_url(redis_url).delete(f"t:{QUEUE}:active")
    assert process.broker.do_qsize(QUEUE) == 1
    process.start()
    assert seen.wait_for(1) == [1]


def test_a_retry_that_comes_up_while_redis_is_away_is_not_lost(own_redis: OwnRedis, seen: Seen) -> None:
    go, started = Event(), Event()

    def work() -> None:
        started.set()
        if not seen.items:
            go.wait(10)
            seen.add("failed")
            raise ValueError("while Redis is away")
        seen.add("succeeded")

    with ordinary(own_redis.url, timeout_s=1.0) as process:
        process.start()
        process.actor(work, actor_name="work").send()
        assert started.wait(5)
        own_redis.kill()
        go.set()
        wait_until(lambda: process.broker.hands.of(QUEUE) == [], what="the acknowledgement, which waits for nobody")
        own_redis.start()
        assert seen.wait_for(2) == ["failed", "succeeded"]
        process.broker.join(QUEUE, interval=10, timeout=5000)


def test_what_a_process_held_that_fell_silent_is_run_by_another(redis_url: str, seen: Seen) -> None:
    with ordinary(redis_url, silence_s=0.4) as dead, ordinary(redis_url, silence_s=0.4) as living:
        dead.actor(seen.add, actor_name="note").send(1)
        assert next(dead.broker.consume(QUEUE, timeout=100)) is not None, "it took the message, and is heard of no more"
        living.actor(seen.add, actor_name="note")
        living.start()
        assert seen.wait_for(1) == [1]
        living.broker.join(QUEUE, interval=10, timeout=5000)


def test_a_job_that_takes_longer_than_the_silence_stays_with_its_living_worker(redis_url: str, seen: Seen) -> None:
    go = Event()

    def work() -> None:
        seen.add("started")
        go.wait(10)

    with ordinary(redis_url, silence_s=0.8) as busy, ordinary(redis_url, silence_s=0.8) as idle:
        for process in (busy, idle):
            process.actor(work, actor_name="work")
        busy.start(threads=1)
        busy.broker.actors["work"].send()
        seen.wait_for(1)
        idle.start()
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert idle.broker.beat().taken_over == 0
            go.wait(0.05)
        go.set()
        busy.broker.join(QUEUE, interval=10, timeout=5000)
        assert seen.items == ["started"]


def test_a_worker_that_stops_gives_back_what_it_has_not_started(redis_url: str, seen: Seen) -> None:
    go = Event()

    def work(n: int) -> None:
        seen.add(n)
        go.wait(10)

    with ordinary(redis_url) as stopping:
        stopping.actor(work, actor_name="work")
        for n in range(4):
            stopping.broker.actors["work"].send(n)
        stopping.start(threads=2)
        seen.wait_for(2)
        assert stopping.worker is not None
        wait_until(lambda: len(stopping.broker.hands.of(QUEUE)) == 4, what="two more in memory")
        stopping.broker.stop_fetching()
        size = wait_until(
            lambda: (s := stopping.queues.sizes([QUEUE])[QUEUE]).ready == 2 and s, 5, what="two given back while two run"
        )
        assert size.held == 2
        go.set()
    with ordinary(redis_url) as next_one:
        next_one.actor(seen.add, actor_name="work")
        next_one.start()
        assert sorted(seen.wait_for(4)) == [0, 1, 2, 3]


def stopped(server: OwnRedis) -> str:
    server.kill()
    return server.url


def frozen(server: OwnRedis) -> str:
    server.stall()
    return server.url


def locked(server: OwnRedis) -> str:
    redis.Redis.from_url(server.url).config_set("requirepass", "changed")
    return server.url


def full(server: OwnRedis) -> str:
    redis.Redis.from_url(server.url).config_set("maxmemory", "100kb")
    return server.url


def read_only(server: OwnRedis) -> str:
    redis.Redis.from_url(server.url).execute_command("REPLICAOF", "127.0.0.1", "1")
    return server.url


@pytest.mark.parametrize("broken", [stopped, frozen, locked, full, read_only])
def test_whatever_redis_does_enqueue_raises_what_dramatiq_handles(own_redis: OwnRedis, broken: Callable[[OwnRedis], str]) -> None:
    with ordinary(broken(own_redis), timeout_s=0.3) as process:
        note = process.actor(print, actor_name="note")
        keyed = Message(queue_name="deliver", actor_name="deliver", args=(1, 1, "a"), kwargs={}, options={})
        for enqueue in (note.send, lambda: note.send_with_options(delay=10), lambda: process.broker.enqueue(keyed)):
            before = time.monotonic()
            with pytest.raises(BrokerConnectionError):
                enqueue()
            assert time.monotonic() - before < 2, "at once, not after ten retries"


def test_a_pool_without_a_free_connection_is_mapped_too(redis_url: str) -> None:
    queues = Queues(redis_url=redis_url, namespace="t", connections=1)
    broker = MadeiraBroker(
        queues=queues, process="p", silence_s=60, lease_margin_s=0, lanes=lambda _: [], lanes_version=lambda: 0, middleware=[]
    )
    note = dramatiq.actor(print, actor_name="note", broker=broker)
    taken = queues.client.connection_pool.get_connection()
    with pytest.raises(BrokerConnectionError):
        note.send()
    queues.client.connection_pool.release(taken)
    note.send()
    queues.close()


def test_closed_queues_have_no_connection_open(redis_url: str) -> None:
    queues, client = Queues(redis_url=redis_url, namespace="t"), redis.Redis.from_url(redis_url)
    mine = queues.client.client_id()
    queues.close()
    wait_until(lambda: mine not in {int(c["id"]) for c in client.client_list()}, what="the end of the connection")


def test_a_send_whose_answer_is_lost_is_one_message_at_most(own_redis: OwnRedis, seen: Seen) -> None:
    with ordinary(own_redis.url, timeout_s=0.3) as process:
        note = process.actor(seen.add, actor_name="note")
        note.send("before")
        with frozen_for_a_while(own_redis), pytest.raises(BrokerConnectionError):
            note.send("unknown")
        process.start()
        note.send("after")
        process.broker.join(QUEUE, interval=10, timeout=5000)
        assert seen.items.count("unknown") <= 1
        assert (seen.items.count("before"), seen.items.count("after")) == (1, 1)


def frozen_for_a_while(server: OwnRedis) -> AbstractContextManager[None]:
    @contextlib.contextmanager
    def frozen() -> Iterator[None]:
        server.stall()
        try:
            yield
        finally:
            server.resume()

    return frozen()
