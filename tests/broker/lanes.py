"""Lanes and their breakers in the hands of a player: what is queued, called, and what it comes back with."""

import time
from typing import Any

from madeira.broker.queues import DELIVER, Ensure, Finish, Queues
from tests.broker.conftest import Player, lane

#: Settings of a lane with a breaker that opens for half a second at first, and for a second at the longest.
BREAKER: dict[str, Any] = {"broken_s": 0.5, "broken_max_s": 1.0}

#: Settings of one that stays open for as long as a test takes.
LONG: dict[str, Any] = {"broken_s": 20.0, "broken_max_s": 60.0}

#: How a breaker is that has opened; on a busy machine its time may be over when it is asked.
OPEN = ("open", "half_open")


def ensure(queues: Queues, *numbers: int, of: str = "a", line: str = "", delay_s: float = 0.0) -> None:
    queues.ensure([Ensure(DELIVER, f"{n}:{n}:{of}", delay_s, line) for n in numbers])


def end(player: Player, key: str, verdict: Any, kind: Any = "f", *, refund: bool = False, patient_s: float = 0.0) -> None:
    """Finish a key with a verdict; nothing is taken."""
    _, token = player.hands[key]
    until = time.monotonic() + patient_s if patient_s else 0.0
    player.turn(room=0, finishes=[Finish(key, token, kind, 0.0, b"", refund, verdict, until)])


def call(player: Player, verdict: Any) -> str:
    """Take one, and come back with a verdict."""
    (key,) = player.take()
    end(player, key, verdict)
    return key


def breaker(queues: Queues, name: str = "a") -> str:
    (state,) = queues.lane_states([name])
    return state.breaker.state


def opened(queues: Queues, **settings: Any) -> Player:
    """A player whose lane's breaker has just opened; fifty keys wait."""
    queues.set_lanes([lane("a", **{**BREAKER, **settings})])
    ensure(queues, *range(1, 56))
    player = Player(queues, "p", threads=1000)
    for _ in range(5):
        call(player, "bad")
    assert breaker(queues) in OPEN
    assert not queues.opened()[0].has_succeeded
    return player
