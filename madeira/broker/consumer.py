"""One queue's consumer in one process: the only thread that talks to Redis about that queue.

Worker threads never wait for Redis: an acknowledgement is put on a list, and the consumer's next call carries out all
that has gathered there, and fetches what the freed threads may do next. So neighbouring threads share calls without
any timer, and an acknowledgement never raises.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from dramatiq import Message
from dramatiq.broker import Consumer, MessageProxy
from dramatiq.errors import DecodeError

from madeira.broker.gate import Gate
from madeira.broker.hands import Hand, Hands, InHand
from madeira.broker.queues import DELIVER, KEYED, Ensure, Finish, Grant, Queues, is_key
from madeira.errors import BrokerUnavailable
from madeira.lanes import LaneSettings
from madeira.log import get

log = get(__name__)

#: Seconds between two lines about lanes whose endpoint is not configured, or cannot be used here.
_TELL_UNKNOWN_S: Final = 60.0

#: Lanes that such a line names, at most.
_TOLD: Final = 10

#: Seconds that finishes may gather under load, so that neighbouring threads share a call.
_GATHER_S: Final = 0.003

#: Seconds between two tries while Redis is away.
_RETRY_S: Final = 0.5

#: Keys of `route` and `dead_letter` that one message may carry.
BATCH: Final = 16

#: What a consumer calls when lanes have no settings: lane names in, their settings out (unknown lanes are left out).
LaneLookup = Callable[[Sequence[str]], Sequence[LaneSettings]]


class Owner(Protocol):
    """What a consumer goes by of the broker that made it, and shares with the other consumers of its process."""

    wire: Queues
    process: str
    silence_s: float
    hands: Hands
    gate: Gate
    stopping: bool
    lanes: LaneLookup
    lanes_version: Callable[[], int]
    unusable: Callable[[str], str | None]
    on_lost_epoch: Callable[[], None]

    def budget(self, queue: str, prefetch: int) -> int:
        """Messages of `queue` that the process may have in hand."""


class QueueConsumer(Consumer):
    """Fetches messages of `queue`, and finishes them.

    Parameters:
        prefetch: messages of an ordinary queue that may be in memory.
        timeout_s: longest time that `__next__` waits before it returns None.
    """

    def __init__(self, broker: Owner, queue: str, *, prefetch: int, timeout_s: float) -> None:
        self.broker = broker
        self.queue = queue
        self.prefetch = prefetch
        self.timeout_s = timeout_s
        self.keyed = queue in KEYED
        #: Held during a call about this queue; a heartbeat takes it, so that it never lists what is being finished.
        self.lock = threading.Lock()
        self._wakeup = threading.Condition()
        self._nudged = False
        self._finishes: list[Finish] = []
        self._follow: list[Ensure] = []
        self._ready: deque[MessageProxy] = deque()
        self._calls = 0
        self._down = False
        #: The version of the lanes' settings that what waits has felt; see `_feel_changes`.
        self._felt: int | None = None
        self._unknown_next = 0.0
        #: Whether the last call finished several messages at once.
        self._shared = False

    # -- what Dramatiq calls ------------------------------------------------------------------------------------

    def __next__(self) -> MessageProxy | None:
        if not self._ready:
            wait_s = self._turn()
            if self.broker.stopping:
                self._give_back()
            if not self._ready and wait_s > 0:
                self._wait(wait_s)
        return self._ready.popleft() if self._ready else None

    def ack(self, message: MessageProxy) -> None:
        """Finish a message: by what was said of its grants, or for ordinary messages because it is done."""
        self._finish(message, failed=False)

    def nack(self, message: MessageProxy) -> None:
        """Reject a message. A keyed one has no verdict then, and comes back."""
        self._finish(message, failed=True)

    def requeue(self, messages: Any) -> None:
        """Give back, to the front, what was not started."""
        for message in messages:
            hand = self.broker.hands.get(message.options.get("redis_message_id"))
            if hand is not None:
                hand.give_back()
                self.ack(message)

    def close(self) -> None:
        """Send what is finished; what cannot be sent is taken over by others when its markers run out."""
        self._give_back()
        with self.lock:
            try:
                self._call(room=0, leaving=True)
            except BrokerUnavailable as e:
                log.warning("broker.finish_unsent", queue=self.queue, count=len(self._finishes), error=str(e))

    # -- what the rest of the broker calls ----------------------------------------------------------------------

    def inherit(self, previous: "QueueConsumer") -> None:
        """Take over what an earlier consumer of the queue had not sent yet."""
        with previous._wakeup:
            self._finishes, previous._finishes = previous._finishes, []
            self._follow, previous._follow = previous._follow, []
        self._calls = previous._calls

    def nudge(self) -> None:
        """Wake the consumer: there may be something to do."""
        with self._wakeup:
            self._nudged = True
            self._wakeup.notify()

    # -- own ----------------------------------------------------------------------------------------------------

    def _give_back(self) -> None:
        """Give back what was fetched and not passed on."""
        self.requeue(self._ready)
        self._ready.clear()

    def _finish(self, message: MessageProxy, *, failed: bool) -> None:
        hand = self.broker.hands.pop(message.options.get("redis_message_id"))
        if hand is None:
            return
        finishes = hand.finishes(failed=failed)
        with self._wakeup:
            self._finishes += finishes
            self._follow += hand.follow
            self._wakeup.notify()

    def _wait(self, seconds: float) -> None:
        with self._wakeup:
            if not self._nudged and not self._finishes:
                self._wakeup.wait(seconds)
            self._nudged = False

    def _turn(self) -> float:
        """Finish and fetch; returns the seconds to wait when nothing came."""
        self._gather()
        with self.lock:
            try:
                self._feel_changes()
                wait_s = self._call(room=self._room())
            except BrokerUnavailable as e:
                if not self._down:
                    log.error("broker.away", queue=self.queue, error=str(e))
                self._down = True
                return _RETRY_S
        if self._down:
            log.info("broker.back", queue=self.queue)
            self._down = False
        return wait_s

    def _feel_changes(self) -> None:
        """After a change of the lanes' settings, let each lane be looked at: one that waits for its pace may wait long."""
        if self.queue != DELIVER or self.broker.lanes_version() == self._felt:
            return
        version = self.broker.lanes_version()
        self.broker.wire.look_again()
        self._felt = version

    def _room(self) -> int:
        """Grants to ask for."""
        if self.broker.stopping or not self.broker.gate.is_open():
            return 0
        free = self.broker.budget(self.queue, self.prefetch) - len(self.broker.hands.of(self.queue))
        return max(0, free) * (1 if self.queue == DELIVER or not self.keyed else BATCH)

    def _gather(self) -> None:
        """Under load give neighbouring threads a moment to finish too; a lone finish never waits."""
        if self._shared and not self.broker.stopping:
            time.sleep(_GATHER_S)

    def _call(self, *, room: int, leaving: bool = False) -> float:
        with self._wakeup:
            finishes, follow = self._finishes, self._follow
            self._finishes, self._follow = [], []
        self._shared = len(finishes) > 1
        if room == 0 and not finishes and not follow and not leaving:
            return self.timeout_s
        self._calls += 1
        by_lane = self.broker.hands.by_lane(self.queue) if self.queue == DELIVER else Counter[str]()
        asked = time.monotonic()
        try:
            turn = self.broker.wire.turn(
                self.queue,
                self.broker.process,
                room=room,
                # With the queue in it: the tokens of all queues of a process lie in one hand.
                nonce=f"{self.queue}-{self._calls}",
                version=self.broker.lanes_version() if self.queue == DELIVER else None,
                threads=self.broker.budget(self.queue, self.prefetch),
                in_hand=sum(by_lane.values()),
                by_lane=by_lane,
                lease_s=self.broker.silence_s,
                finishes=finishes,
                follow=follow,
            )
        except BaseException:
            # Whatever it was: what is finished must be told, and telling it twice does no harm.
            with self._wakeup:
                self._finishes[:0] = finishes
                self._follow[:0] = follow
            raise
        if not turn.epoch and self.keyed:
            self.broker.on_lost_epoch()
            return self.timeout_s
        self._take(turn.grants, asked)
        if turn.unset and self._restore(turn.unset):
            return 0.0
        return self.timeout_s if turn.next_s is None else min(turn.next_s, self.timeout_s)

    def _restore(self, lanes: Sequence[str]) -> bool:
        settings = self.broker.lanes(lanes)
        unknown = sorted(set(lanes) - {s.lane for s in settings})
        if unknown and time.monotonic() >= self._unknown_next:
            self._unknown_next = time.monotonic() + _TELL_UNKNOWN_S
            self._tell_unknown(unknown)
        self.broker.wire.set_lanes(settings)
        return bool(settings)

    def _tell_unknown(self, lanes: Sequence[str]) -> None:
        unusable = {lane: reason for lane in lanes if (reason := self.broker.unusable(lane)) is not None}
        if unusable:
            log.warning(
                "lane.unusable",
                lanes=dict(list(unusable.items())[:_TOLD]),
                detail="deliveries wait for an endpoint that cannot be used in this process, and go on once it can",
            )
        gone = [lane for lane in lanes if lane not in unusable]
        if gone:
            log.warning(
                "lane.unknown",
                lanes=gone[:_TOLD],
                detail="deliveries wait for an endpoint that is not configured (any more): add it, or cancel their events",
            )

    def _take(self, grants: Sequence[Grant], asked: float) -> None:
        if not self.keyed:
            for grant in grants:
                self._take_ordinary(grant, asked)
            return
        batch: list[Grant] = []
        for grant in grants:
            if not is_key(self.queue, grant.key):
                # Put there by hand: it names no row, so nobody waits for it.
                log.error("key.rejected", queue=self.queue, key=grant.key)
                self._say(Finish(grant.key, grant.token, "f"))
            elif self.queue == DELIVER or grant.stumbles or grant.losses:
                # One that failed or took its worker down before must not take its neighbours with it.
                self._receive([grant], asked)
            else:
                batch.append(grant)
        for start in range(0, len(batch), BATCH):
            self._receive(batch[start : start + BATCH], asked)

    def _take_ordinary(self, grant: Grant, asked: float) -> None:
        """Take a message with a body; one that is none of this queue's is rejected, or it would come back for ever."""
        message = _decoded(grant.body)
        if message is not None and message.queue_name == self.queue:
            self._receive([grant], asked, MessageProxy(message))
            return
        log.error("message.rejected", queue=self.queue, key=grant.key, of=message and message.queue_name)
        self._say(Finish(grant.key, grant.token, "x"))

    def _say(self, finish: Finish) -> None:
        with self._wakeup:
            self._finishes.append(finish)

    def _receive(self, grants: Sequence[Grant], asked: float, message: MessageProxy | None = None) -> None:
        if message is None:
            message = _message_for(self.queue, grants)
        hand = Hand(
            queue=self.queue,
            handed_out=time.monotonic(),
            expires=asked + min(g.lease_s for g in grants),
            grants={g.key: InHand(g) for g in grants},
            keyed=self.keyed,
        )
        message.options["redis_message_id"] = grants[0].key if not self.keyed else grants[0].token
        self.broker.hands.add(message.options["redis_message_id"], hand)
        self._ready.append(message)


def _decoded(body: bytes) -> Message[Any] | None:
    try:
        return Message.decode(body)
    except DecodeError:
        return None


def _message_for(queue: str, grants: Sequence[Grant]) -> MessageProxy:
    args: tuple[Any, ...]
    if queue == DELIVER:
        delivery_id, seq, lane = grants[0].key.split(":", 2)
        args = (int(delivery_id), int(seq), lane)
    else:
        args = tuple(int(g.key) for g in grants)
    return MessageProxy(Message(queue_name=queue, actor_name=queue, args=args, kwargs={}, options={}, message_id=grants[0].token))
