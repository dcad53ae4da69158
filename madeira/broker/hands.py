"""What a process has in its hands: grants handed out by Redis and not finished yet.

A `Hand` is one Dramatiq message: one grant for a delivery, up to sixteen for routing. Whoever works on the message says
per grant what becomes of it; a grant about which nobody said anything has no verdict and comes back.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from madeira.broker.queues import DELIVER, Ensure, Finish, Grant, Held, Kind, lane_of
from madeira.lanes import Verdict

#: Seconds after its hand-out within which a grant must be started, or others could have done it sooner.
START_WITHIN_S: Final = 1.0


@dataclass(slots=True)
class InHand:
    """One grant in hand, and what was said of it so far."""

    grant: Grant
    kind: Kind | None = None
    #: Reading of the monotonic clock at which a delayed key is due.
    due: float = 0.0
    body: bytes = b""


@dataclass(slots=True)
class Hand:
    """One message's grants.

    `handed_out` and `expires` are readings of the monotonic clock in seconds; `expires` counts from before the call
    that brought the grants, so that it is never later than what Redis thinks.
    """

    queue: str
    handed_out: float
    expires: float
    grants: dict[str, InHand]
    #: What must be queued together with the finish.
    follow: list[Ensure] = field(default_factory=list)
    #: Set while the outcome of a call is in hand and not settled: only then does a beat renew the marker.
    renewing: bool = False
    #: Set when nothing was called: the rate token goes back too.
    refund: bool = False
    #: What the call says about its receiver.
    verdict: Verdict = ""
    #: Reading of the monotonic clock until which the receiver asked to be left alone; 0: it did not.
    patient: float = 0.0
    #: False for ordinary messages, which are done once their actor returned.
    keyed: bool = True

    @property
    def keys(self) -> list[str]:
        """The keys in hand."""
        return list(self.grants)

    @property
    def is_live(self) -> bool:
        """Whether the marker has not run out."""
        return time.monotonic() < self.expires

    @property
    def waited_s(self) -> float:
        """Seconds since the hand-out."""
        return time.monotonic() - self.handed_out

    def only(self) -> Grant:
        """The one grant of a delivery."""
        return next(iter(self.grants.values())).grant

    def forget(self, key: str | None = None) -> None:
        """A verdict is recorded: the key leaves the broker."""
        self._say("f", key)

    def delay(self, delay_s: float, key: str | None = None) -> None:
        """A verdict is recorded: the key comes back in `delay_s` seconds."""
        self._say("d", key, delay_s)

    def keep(self, key: str | None = None) -> None:
        """A verdict is recorded by which nothing changes: the key goes back to its place."""
        self._say("k", key)

    def give_back(self, key: str | None = None) -> None:
        """Nothing was done: the key goes back to the front, with its rate token."""
        self._say("b", key)

    def _say(self, kind: Kind, key: str | None, delay_s: float = 0.0) -> None:
        for k in self.grants if key is None else (key,):
            held = self.grants[k]
            held.kind, held.due = kind, time.monotonic() + delay_s

    def decide_rest(self, delay_s: float, body: bytes = b"") -> bool:
        """Note a delay for whatever nothing was said of yet; False when there was nothing to be said any more."""
        rest = [held for held in self.grants.values() if held.kind is None]
        for held in rest:
            held.kind, held.due, held.body = "d", time.monotonic() + delay_s, body
        return bool(rest)

    def finishes(self, *, failed: bool) -> list[Finish]:
        """What the acknowledgement carries out."""
        rest: Kind = "s" if self.keyed else ("x" if failed else "f")
        return [
            Finish(h.grant.key, h.grant.token, h.kind or rest, h.due, h.body, self.refund, self.verdict, self.patient)
            for h in self.grants.values()
        ]


class Hands:
    """All hands of a process, by the message's ``redis_message_id``. Safe for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hands: dict[str, Hand] = {}

    def add(self, message_id: str, hand: Hand) -> None:
        """Take a hand."""
        with self._lock:
            self._hands[message_id] = hand

    def get(self, message_id: str | None) -> Hand | None:
        """The hand of a message; None when there is no grant for it."""
        return self._hands.get(message_id) if message_id else None

    def pop(self, message_id: str | None) -> Hand | None:
        """Let go of a hand."""
        with self._lock:
            return self._hands.pop(message_id, None) if message_id else None

    def of(self, queue: str) -> list[Hand]:
        """All hands of a queue."""
        with self._lock:
            return [hand for hand in self._hands.values() if hand.queue == queue]

    def by_lane(self, queue: str) -> Counter[str]:
        """Grants in hand by lane."""
        return Counter(lane_of(key) for hand in self.of(queue) for key in hand.grants)

    def listed(self) -> Iterable[Held]:
        """What a heartbeat lists. Ordinary messages and routing are renewed as long as the process lives."""
        now = time.monotonic()
        with self._lock:
            hands = list(self._hands.values())
        for hand in hands:
            renew = hand.renewing or not (hand.keyed and hand.queue == DELIVER)
            for held in hand.grants.values():
                left = held.grant.lease_s if renew else max(0.0, hand.expires - now)
                if renew:
                    hand.expires = now + left
                yield Held(hand.queue, held.grant.key, held.grant.token, left, renew)
