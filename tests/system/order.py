"""What the tests of order share: traffic of many keys, workers that are killed and replaced, and what a receiver saw of it."""

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from zlib import crc32

from madeira.records import DeliveryRef
from tests.receiver import Answer, Call, Receiver
from tests.system import crash
from tests.system.crash import Fault
from tests.system.harness import Madeira, Process

#: Of so many calls, one is refused with 503.
FLAKY = 20

#: Seconds that the receiver thinks.
THINKS_S = 0.05


def endpoint(receiver: Receiver, **fields: Any) -> dict[str, dict[str, Any]]:
    """An endpoint that is called in the order of keys."""
    retry = {"max_attempts": 50, "initial": 0.1, "max": 0.5}
    return {"a": {"url": receiver.url("/a"), "ordering": "payload.key", "timeout": crash.TIMEOUT_S, "retry": retry, **fields}}


def flaky(call: Call) -> Answer:
    """A receiver that refuses a twentieth of all calls, the same ones in each run."""
    payload = call.json()["payload"]
    name = f"{payload['key']} {payload['n']} {call.headers['x-madeira-attempt']}"
    return Answer(status=503 if crc32(name.encode()) % FLAKY == 0 else 200, delay_s=THINKS_S)


class Traffic:
    """Posts the events of many keys; those of one key one after another, each after the answer to the one before it."""

    def __init__(self, madeira: Madeira, *, keys: int, events: int, threads: int = 4) -> None:
        self._madeira = madeira
        self._pool = ThreadPoolExecutor(threads)
        shares = [[f"key-{k}" for k in range(start, keys, threads)] for start in range(threads)]
        self._posts: list[Future[None]] = [self._pool.submit(self._post, share, events) for share in shares]

    def _post(self, keys: Sequence[str], events: int) -> None:
        for n in range(events):
            for key in keys:
                self._madeira.post("a.b", {"key": key, "n": n}, event_id=f"{key}-{n}")

    @property
    def is_done(self) -> bool:
        return all(post.done() for post in self._posts)

    def close(self) -> None:
        """Wait until all are posted; every one was accepted."""
        self._pool.shutdown(cancel_futures=True)
        for post in self._posts:
            post.result()


class Crew:
    """Worker processes that are replaced when they are killed.

    A new one takes seconds to begin. So that there is one to kill every second, `starting` more are on their way, a second apart.
    """

    def __init__(self, madeira: Madeira, *, starting: int = 0, threads: int = 16) -> None:
        self._madeira = madeira
        self._threads = threads
        self.workers = [self._new() for _ in range(2 + starting)]
        self.faults: list[Fault] = []

    def _new(self) -> Process:
        return self._madeira.start("worker", crash.dramatiq(threads=self._threads))

    @property
    def ready(self) -> list[Process]:
        """Those that have begun to work."""
        return [w for w in self.workers if "ready for action" in w.tail(10**6)]

    def kill_one(self) -> bool:
        """Kill -9 the one with most in its hands, and start another; False when there is only one that has begun to work.

        On a busy machine a new one takes seconds to begin: without one that stays nothing would ever be done.
        """
        ready = self.ready
        if len(ready) < 2:
            return False
        victim = max(ready, key=lambda w: len(self._in_hand(w)))
        fault = Fault("worker", time.time())
        # Stopped first, so that what it has in its hands can be told.
        os.kill(crash.worker_processes(victim, 1)[0], signal.SIGSTOP)
        fault.hands = self._in_hand(victim) if self._madeira.redis.exists("m:epoch") else self._delivering()
        victim.kill()
        fault.until = time.time()
        self.faults.append(fault)
        self.workers[self.workers.index(victim)] = self._new()
        return True

    def _in_hand(self, worker: Process) -> frozenset[int]:
        """What a worker holds, by Redis' account; after a wipe it may not know whose something is."""
        (pid,) = crash.worker_processes(worker, 1)
        owners = {key: note.split()[1].split(b".")[-2:-1] for key, note in self._madeira.redis.hgetall("m:deliver:held").items()}
        return frozenset(crash._delivery_of(key) for key, owner in owners.items() if owner in ([b"%d" % pid], []))

    def _delivering(self) -> frozenset[int]:
        """What anybody holds, by Postgres' account: a Redis that was just wiped does not know whose it is."""
        return frozenset(row["id"] for row in self._madeira.rows("SELECT id FROM delivery WHERE status = 'delivering'"))


def some_pending(madeira: Madeira, most: int = 50) -> list[DeliveryRef]:
    """Some deliveries that are not finished, whether or not it is their turn."""
    found = madeira.rows("SELECT id, event_seq, lane FROM delivery WHERE status = 'pending' ORDER BY random() LIMIT %s", most)
    return [DeliveryRef(row["id"], row["event_seq"], row["lane"]) for row in found]


def first_successes(receiver: Receiver) -> Mapping[str, list[int]]:
    """The numbers of each key's events in the order in which the receiver first took them."""
    taken: defaultdict[str, list[int]] = defaultdict(list)
    for call in sorted(receiver.calls, key=lambda c: c.at):
        payload = json.loads(call.body)["payload"]
        if call.status == 200 and payload["n"] not in taken[payload["key"]]:
            taken[payload["key"]].append(payload["n"])
    return taken


def inversions(taken: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    """The keys whose events were not taken in order."""
    return {key: found for key, numbers in taken.items() if (found := list(numbers)) != sorted(found)}


def overlaps(receiver: Receiver) -> list[tuple[str, int, int]]:
    """Calls of one key that began before the one before them had ended: key, and the numbers of both."""
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in sorted(receiver.calls, key=lambda c: c.at):
        by_key[json.loads(call.body)["payload"]["key"]].append(call)
    return [
        (key, one.json()["payload"]["n"], two.json()["payload"]["n"])
        for key, calls in by_key.items()
        for one, two in pairwise(calls)
        if one.ended is None or two.at < one.ended
    ]


def taken_twice(receiver: Receiver) -> frozenset[int]:
    """The deliveries that the receiver took more than once."""
    times = Counter(call.webhook_id for call in receiver.calls if call.status == 200)
    return frozenset(int(webhook_id.split("_")[1]) for webhook_id, n in times.items() if n > 1)
