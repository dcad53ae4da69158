"""A Dramatiq broker whose messages cannot get lost between Redis and a worker.

It is a `RedisBroker` to everything that Dramatiq does, and replaces what lies underneath. The stock one keeps delayed
messages in the memory of workers, takes over a dead worker's messages by chance, sends heartbeats as a by-product of
traffic, re-sends fetches silently and polls; each of these loses, doubles or delays messages.

Messages of the *keyed* actors (route, deliver, dead_letter) are names of rows in Postgres: enqueueing one twice has no
effect, and the whole queue can be rebuilt. Every other message is an ordinary Dramatiq message with a body.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from queue import Empty
from typing import Any, Final

from dramatiq import Message, Worker
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware

from madeira.broker.consumer import LaneLookup, QueueConsumer
from madeira.broker.gate import Gate
from madeira.broker.hands import Hand, Hands
from madeira.broker.queues import DELIVER, KEYED, Beat, Ensure, Queues, is_key
from madeira.errors import BrokerUnavailable
from madeira.log import get

log = get(__name__)

#: Messages of a batch queue that a process holds at most, unless it is dedicated to that queue: two threads are kept
#: free of deliveries, and routing may take both.
BATCH_MESSAGES: Final = 2


@contextmanager
def _as_dramatiq() -> Iterator[None]:
    """Turns our error into the one that Dramatiq and its users handle."""
    try:
        yield
    except BrokerUnavailable as e:
        raise ConnectionClosed(e) from None


class MadeiraBroker(RedisBroker):
    """The broker of one process.

    Parameters:
        queues: the queues in Redis, for everything but waiting.
        process: a name that no other process has.
        silence_s: silence after which a process counts as gone.
        lease_margin_s: spread of what is taken over, per loss.
        lanes: settings of lanes that Redis does not know.
        unusable: why a lane that is configured cannot be used in this process; None for every other one.
        lanes_version: version of those settings; higher replaces lower.
        trouble: why Postgres cannot be used; None when it can.
        middleware: as for any Dramatiq broker.
    """

    def __init__(
        self,
        *,
        queues: Queues,
        process: str,
        silence_s: float,
        lease_margin_s: float,
        lanes: LaneLookup,
        lanes_version: Callable[[], int],
        trouble: Callable[[], str | None] = lambda: None,
        unusable: Callable[[str], str | None] = lambda _lane: None,
        middleware: list[Middleware] | None = None,
    ) -> None:
        super().__init__(client=queues.client, namespace=queues.namespace, middleware=middleware)  # type: ignore[no-untyped-call]
        self.wire = queues
        self.process = process
        self.silence_s = silence_s
        self.lease_margin_s = lease_margin_s
        self.lanes = lanes
        self.lanes_version = lanes_version
        self.unusable = unusable
        self.hands = Hands()
        self.gate = Gate(trouble=trouble)
        #: Processes that beat, this one among them, as of the last beat.
        self.alive = 1
        #: Called (by a consumer) when the epoch is missing.
        self.on_lost_epoch: Callable[[], None] = lambda: None
        self.consumers: dict[str, QueueConsumer] = {}
        self.worker: Worker | None = None
        self.stopping = False
        #: What the actors of this process work with; see `madeira.broker.tools`.
        self.tools: object = None

    # -- what Dramatiq calls ------------------------------------------------------------------------------------

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. There are no delay queues: a delayed message waits in Redis, in no worker's memory."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message; `delay` is in milliseconds.

        A message that this process has in hand is not enqueued a second time: the delay is noted, and the
        acknowledgement carries it out in one step. (What an actor sends to other queues, or a second time, with its own
        message's options is a new message.) For a keyed actor, enqueueing makes sure that the key is queued.

        Raises:
            dramatiq.errors.ConnectionClosed: Redis is away.
        """
        self.emit_before("enqueue", message, delay)
        delay_s = (delay or 0) / 1000
        hand = self.hands.get(message.options.get("redis_message_id"))
        if hand is None or hand.queue != message.queue_name or not self._put_off(hand, message, delay_s):
            message = self._send(message, delay_s)
        self.emit_after("enqueue", message, delay)
        return message

    def _put_off(self, hand: Hand, message: Message[Any], delay_s: float) -> bool:
        return hand.decide_rest(delay_s, b"" if hand.keyed else message.encode())

    @_as_dramatiq()
    def _send(self, message: Message[Any], delay_s: float) -> Message[Any]:
        if message.queue_name in KEYED:
            self.wire.ensure([Ensure(message.queue_name, key, delay_s) for key in keys_of(message)])
            return message
        message = message.copy(options={"redis_message_id": message.message_id + "." + str(time.time_ns())})
        self.wire.enqueue(message.queue_name, message.options["redis_message_id"], message.encode(), delay_s)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        """A consumer of a queue; `timeout` (ms) bounds how long it waits before it returns None."""
        previous = self.consumers.get(queue_name)
        consumer = QueueConsumer(self, queue_name, prefetch=prefetch, timeout_s=min(timeout / 1000, 1.0))
        if previous is not None:
            consumer.inherit(previous)
        self.consumers[queue_name] = consumer
        return consumer

    @_as_dramatiq()
    def do_qsize(self, queue_name: str) -> int:
        """Messages of a queue that are not done: `join` waits for none."""
        size = self.wire.sizes([queue_name])[queue_name]
        return size.ready + size.delayed + size.held

    @_as_dramatiq()
    def flush(self, queue_name: str) -> None:
        """Drop all messages of a queue."""
        self.wire.flush(queue_name)

    # -- what the process's life span calls ---------------------------------------------------------------------

    def budget(self, queue: str, prefetch: int) -> int:
        """Messages of `queue` that this process may have in hand."""
        if self.worker is None:
            return prefetch
        threads: int = self.worker.worker_threads
        if self.worker.consumer_whitelist == {queue}:
            return threads
        if queue == DELIVER:
            return max(1, threads - 2)
        return min(BATCH_MESSAGES, threads) if queue in KEYED else prefetch

    def beat(self) -> Beat:
        """Tell Redis that this process lives and what it holds.

        Raises:
            BrokerUnavailable: Redis is away.
        """
        consumers = [self.consumers[name] for name in sorted(self.consumers)]
        with ExitStack() as locked:
            for consumer in consumers:
                locked.enter_context(consumer.lock)
            beat = self.wire.beat(
                self.process,
                silence_s=self.silence_s,
                spread_s=self.lease_margin_s,
                queues=sorted(self.queues),
                held=list(self.hands.listed()),
            )
        self.alive = beat.alive
        if beat.put_back or beat.strays or beat.taken_over:
            log.warning("broker.beat", put_back=beat.put_back, strays=beat.strays, taken_over=beat.taken_over)
        return beat

    def nudge(self, queue: str) -> None:
        """There may be something to do in `queue`."""
        consumer = self.consumers.get(queue)
        if consumer is not None:
            consumer.nudge()

    def stop_fetching(self) -> None:
        """End fetching, and give back to the front what no thread has started."""
        self.stopping = True
        if self.worker is not None:
            for message in drain(self.worker):
                hand = self.hands.get(message.options.get("redis_message_id"))
                if hand is not None:
                    hand.give_back()
                    self.consumers[message.queue_name].ack(message)
        for consumer in list(self.consumers.values()):
            consumer.nudge()


def drain(worker: Worker) -> Iterable[MessageProxy]:
    """Takes out of a worker's memory what none of its threads has started."""
    while True:
        try:
            item = worker.work_queue.get_nowait()
        except Empty:
            return
        worker.work_queue.task_done()
        yield item.message


def keys_of(message: Message[Any] | MessageProxy) -> list[str]:
    """The keys that a message of a keyed actor names.

    Raises:
        ValueError: its arguments are no names of rows.
    """
    args = [str(arg) for arg in message.args]
    keys = [":".join(args)] if message.queue_name == DELIVER else args
    for key in keys:
        if not is_key(message.queue_name, key):
            raise ValueError(f"{key!r} is no key of the queue {message.queue_name}: see the arguments of its actor")
    return keys
