"""A Dramatiq worker in this process on `MadeiraBroker`, with ordinary actors: no Postgres, no keyed message.

What the life span of a real worker does (the beat, the waker) is done here too. Actors are declared in the test, and
workers of "other processes" are further brokers on the same queues.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dramatiq
import redis
from dramatiq import Worker
from dramatiq.middleware import (
    AgeLimit,
    Callbacks,
    CurrentMessage,
    Middleware,
    Pipelines,
    Retries,
    ShutdownNotifications,
    TimeLimit,
)

from madeira.broker.broker import MadeiraBroker
from madeira.broker.connections import connect
from madeira.broker.pulse import Pulse
from madeira.broker.queues import Queues

#: The queue of actors that name none.
QUEUE = "default"


class Ordinary:
    """One "process": a broker, its queues, its beat, and the worker once it is started."""

    def __init__(
        self,
        redis_url: str,
        *,
        middleware: Sequence[Middleware] = (),
        beat_s: float = 0.1,
        silence_s: float = 60.0,
        timeout_s: float = 3.0,
        lease_margin_s: float = 0.0,
    ) -> None:
        self.queues = Queues(redis_url=redis_url, namespace="t", timeout_s=timeout_s)
        self.time_limit = TimeLimit(interval=20)
        self.broker = MadeiraBroker(
            queues=self.queues,
            process=f"p.{uuid.uuid4().hex[:8]}",
            silence_s=silence_s,
            lease_margin_s=lease_margin_s,
            lanes=lambda _lanes: [],
            lanes_version=lambda: 0,
            middleware=[
                AgeLimit(),
                self.time_limit,
                ShutdownNotifications(),
                Callbacks(),
                Pipelines(),
                Retries(min_backoff=20, max_backoff=50),
                CurrentMessage(),
                *middleware,
            ],
        )
        self.pulse = Pulse(
            broker=self.broker,
            waiting=connect(redis_url, timeout_s=timeout_s + 2, connections=1),
            beat_s=beat_s,
            after_beat=lambda: None,
            rebuild=lambda: None,
        )
        self.worker: Worker | None = None

    def actor(self, function: Callable[..., Any], **options: Any) -> "dramatiq.Actor[..., Any]":
        """Declare an actor of this broker."""
        return dramatiq.actor(function, broker=self.broker, **options)

    def start(self, *, threads: int = 4, beats: bool = True) -> Worker:
        """Start the worker; with `beats` also what keeps the process in touch with Redis."""
        self.worker = Worker(self.broker, worker_threads=threads, worker_timeout=50)
        self.broker.worker = self.worker
        if beats:
            self.pulse.start()
        self.worker.start()
        return self.worker

    def stop(self) -> None:
        """End the process in order."""
        if self.worker is not None:
            self.broker.stop_fetching()
            self.worker.stop(timeout=10_000)
        stopping = threading.Thread(target=self.pulse.stop)
        stopping.start()
        with contextlib.suppress(redis.RedisError):
            # The waker blocks in Redis for up to a second; this wakes it.
            self.queues.client.rpush(f"t:wake:{self.broker.process}", "")
        stopping.join()
        self.queues.close()

    def body(self, key: str, queue: str = QUEUE) -> "dramatiq.Message[Any] | None":
        """What Redis keeps of a rejected message."""
        stored: Any = self.queues.client.hget(f"t:{queue}:XQ.msgs", key)
        return None if stored is None else dramatiq.Message.decode(stored)

    def rejected(self, queue: str = QUEUE) -> "list[dramatiq.Message[Any]]":
        """The dead queue, oldest first."""
        keys: Any = self.queues.client.zrange(f"t:{queue}:XQ", 0, -1)
        return [message for key in keys if (message := self.body(key.decode(), queue)) is not None]


@contextmanager
def ordinary(redis_url: str, **options: Any) -> Iterator[Ordinary]:
    """A process that ends with the block."""
    process = Ordinary(redis_url, **options)
    try:
        yield process
    finally:
        process.stop()


class Seen:
    """What actors did, in order; tests wait for it."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._changed = threading.Condition()

    def add(self, item: Any) -> None:
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def wait_for(self, count: int, timeout: float = 10.0) -> list[Any]:
        """Wait until `count` things happened."""
        with self._changed:
            happened = self._changed.wait_for(lambda: len(self.items) >= count, timeout)
        assert happened, f"{len(self.items)} of {count} happened within {timeout:g} s: {self.items}"
        return list(self.items)


def leftovers(redis_url: str) -> list[str]:
    """The Redis keys that hold messages, or pointers to some."""
    names = [name.decode() for name in redis.Redis.from_url(redis_url).scan_iter("t:*")]
    return [n for n in names if n.endswith((":msgs", ":held", ":delayed", ":stumbles", ":losses")) or ":lane:" in n]
