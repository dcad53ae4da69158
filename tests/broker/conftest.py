"""Queues on a real server, with an epoch, and a short way to take turns; and a worker for ordinary messages on them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from madeira.broker.queues import DELIVER, Ensure, Finish, Queues, Turn
from madeira.lanes import LaneSettings
from tests.broker.ordinary import Ordinary, Seen, ordinary


class Player:
    """A process as the scripts see it: it takes turns and finishes."""

    def __init__(self, queues: Queues, name: str, *, threads: int = 20) -> None:
        self.queues = queues
        self.name = name
        self.threads = threads
        self.hands: dict[str, tuple[str, str]] = {}
        self._calls = 0

    def turn(
        self, queue: str = DELIVER, *, room: int = 1, finishes: Sequence[Finish] = (), follow: Sequence[Ensure] = ()
    ) -> Turn:
        """One turn; grants are remembered by key."""
        self._calls += 1
        for finish in finishes:
            self.hands.pop(finish.key, None)
        by_lane: dict[str, int] = {}
        for key, (of, _) in self.hands.items():
            if of == DELIVER:
                lane = key.split(":", 2)[2]
                by_lane[lane] = by_lane.get(lane, 0) + 1
        turn = self.queues.turn(
            queue,
            self.name,
            room=room,
            nonce=str(self._calls),
            version=1 if queue == DELIVER else None,
            threads=self.threads,
            in_hand=sum(by_lane.values()),
            by_lane=by_lane,
            lease_s=60.0,
            finishes=finishes,
            follow=follow,
        )
        for grant in turn.grants:
            self.hands[grant.key] = (queue, grant.token)
        return turn

    def take(self, queue: str = DELIVER, *, room: int = 1) -> list[str]:
        """The keys that a turn brought."""
        return [grant.key for grant in self.turn(queue, room=room).grants]

    def take_soon(self) -> list[str]:
        """What the first turn brings that brings anything."""
        deadline = time.monotonic() + 5
        while not (keys := self.take()):
            assert time.monotonic() < deadline, "nothing came"
        return keys

    def finish(self, key: str, kind: Any = "f", *, due: float = 0.0, room: int = 0, refund: bool = False) -> Turn:
        """Finish a key in hand."""
        queue, token = self.hands[key]
        return self.turn(queue, room=room, finishes=[Finish(key, token, kind, due, b"", refund)])


def lane(name: str, **changes: Any) -> LaneSettings:
    """Settings of a lane without limits that matter."""
    values = {"version": 1, "rate": None, "burst": 1, "concurrency": 1000, "lease_s": 40.0} | changes
    return LaneSettings(lane=name, **values)


@pytest.fixture
def queues(redis_url: str) -> Iterator[Queues]:
    """Queues with an epoch."""
    queues = Queues(redis_url=redis_url, namespace="t")
    assert queues.rebuild_begin("nonce")
    assert queues.rebuild_commit("nonce")
    yield queues
    queues.close()


@pytest.fixture
def process(redis_url: str) -> Iterator[Ordinary]:
    """A process on the shared Redis, whose worker the test starts."""
    with ordinary(redis_url) as process:
        yield process


@pytest.fixture
def seen() -> Seen:
    """What the actors did."""
    return Seen()
