"""The queues in Redis: one method per Lua script, no Dramatiq.

Both sides of the system use this: intake to queue what it accepted, the broker to take and to finish. The scripts in
``scripts/`` are the whole truth about what is where; nothing is cached here. Every script may run twice without harm,
so a caller whose call failed may simply call again; the client itself never re-sends silently, since a re-sent fetch
would strand what the first one took.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Literal, NamedTuple

import redis

from madeira.broker.connections import connect
from madeira.errors import BrokerUnavailable
from madeira.lanes import Hold, LaneSettings, LaneState, Limit, Verdict, credit_ms, gap_ms, lane_state
from madeira.lanes.pace import SEPARATOR
from madeira.lanes.state import Breaker
from madeira.records import Accepted, DeliveryRef

#: How long an idempotency mark stays, in milliseconds. The mark decides nothing: Postgres does.
MARK_TTL_MS: Final = 86_400_000

#: Seconds of silence after which a process is not said to be alive; it gives a sign every five.
ALIVE_S: Final = 30.0

#: Keys that one call may carry; a longer list is sent in pages.
PAGE: Final = 500

ROUTE: Final = "route"
DELIVER: Final = "deliver"
DEAD_LETTER: Final = "dead_letter"

#: Queues whose messages are keys of rows in Postgres: they can be rebuilt, and a key is in them at most once.
KEYED: Final = (ROUTE, DELIVER, DEAD_LETTER)

#: The other queues: messages that say "it is time", and of which a lost one costs a minute.
ORDINARY: Final = ("jobs", "notify", "reconcile", "retention", "rollup")

_DELIVERY_KEY: Final = re.compile(r"[0-9]{1,18}:[0-9]{1,18}:.+", re.DOTALL)
_NUMBER_KEY: Final = re.compile(r"[0-9]{1,18}")

#: Parts that are put in front of every script, in this order.
_SHARED: Final = ("common", "breaker")

#: What a finish does with a key; see ``scripts/turn.lua``.
Kind = Literal["f", "d", "k", "b", "s", "x"]


class Ensure(NamedTuple):
    """A key that must be in a queue, due in `delay_s` seconds at the latest.

    `line` is the line of its lane: ``fresh``, ``retry``, ``replay``; empty: the one that is known, or the first.
    """

    queue: str
    key: str
    delay_s: float = 0.0
    line: str = ""


class Finish(NamedTuple):
    """What becomes of a key that was in hand."""

    key: str
    token: str
    kind: Kind
    #: Reading of the monotonic clock at which a delayed key is due: what the finish waits for a call is not added.
    due: float = 0.0
    body: bytes = b""
    #: Whether the rate token goes back.
    refund: bool = False
    verdict: Verdict = ""
    #: Reading of the monotonic clock until which the receiver asked to be left alone; 0: it did not.
    patient: float = 0.0


class Grant(NamedTuple):
    """The right to work on a key now."""

    key: str
    token: str
    lease_s: float
    stumbles: int
    losses: int
    body: bytes


class Turn(NamedTuple):
    """The answer to one turn."""

    #: False when the epoch is missing: nothing is handed out until a rebuild.
    epoch: bool
    #: Seconds to the next chance; None when nothing is in sight.
    next_s: float | None
    #: Lanes whose settings Redis does not have, or has in an older version.
    unset: tuple[str, ...]
    grants: tuple[Grant, ...]


class Held(NamedTuple):
    """A grant as a heartbeat lists it; `lease_s` is what is left of it."""

    queue: str
    key: str
    token: str
    lease_s: float
    renew: bool


class Beat(NamedTuple):
    """The answer to one heartbeat."""

    alive: int
    put_back: int
    strays: int
    taken_over: int


class Place(NamedTuple):
    """Where a key is. `delay_s`: until due, until the lane's next chance, or until the marker runs out.

    `limit` names the limit of its lane that it waits for; empty where it only waits for its turn.
    """

    kind: Literal["held", "waiting", "delayed", "nowhere"]
    delay_s: float
    ahead: int
    limit: Limit = ""
    #: The line of its lane; `ahead` counts those before it in the same.
    line: str = "fresh"


class Opened(NamedTuple):
    """A breaker that has opened, or that was asked about."""

    lane: str
    #: Names this opening; empty when none was noted.
    mark: str
    #: Whether it is not closed (again) at this moment.
    is_open: bool
    #: Why it opened, in words; None while it is closed.
    reason: str | None
    #: Whether a call has succeeded since: only then it is over. Without, it is not open because Redis has lost it.
    has_succeeded: bool


class Connections(NamedTuple):
    """Connections that a pool has made, and how many it may make."""

    made: int
    at_most: int


class Size(NamedTuple):
    """How much is in a queue."""

    ready: int
    delayed: int
    held: int
    rejected: int


def delivery_key(ref: DeliveryRef) -> str:
    """The key of a delivery: all that the broker needs to know of it."""
    return f"{ref.delivery_id}:{ref.seq}:{ref.lane}"


def is_key(queue: str, key: str) -> bool:
    """Whether `key` can be the name of a row in a keyed queue."""
    pattern = _DELIVERY_KEY if queue == DELIVER else _NUMBER_KEY
    return pattern.fullmatch(key) is not None


def lane_of(key: str) -> str:
    """The lane of a key of the queue ``deliver``."""
    return key.split(":", 2)[2]


def ensure_delivery(ref: DeliveryRef) -> Ensure:
    """A delivery that must be queued."""
    return Ensure(DELIVER, delivery_key(ref), ref.delay_s, ref.line)


def ensure_dead_letter(ref: DeliveryRef) -> Ensure:
    """A dead delivery that nobody was told of yet."""
    return Ensure(DEAD_LETTER, str(ref.delivery_id))


class Queues:
    """The queues of one namespace.

    Parameters:
        redis_url: where Redis is.
        namespace: prefix of every key.
        timeout_s: how long one call may take.
        connections: upper limit of open connections.
    """

    def __init__(self, *, redis_url: str, namespace: str, timeout_s: float = 3.0, connections: int = 8) -> None:
        self.namespace = namespace
        self.client = connect(redis_url, timeout_s=timeout_s, connections=connections)
        self._scripts = _load()

    def close(self) -> None:
        """Close all connections."""
        self.client.close()
        # The client leaves a pool that it was given as it is.
        self.client.connection_pool.disconnect()

    def run(self, name: str, *args: Any) -> Any:
        """Run the script `name`.

        Raises:
            BrokerUnavailable: Redis is away or too slow; whether the script ran is unknown.
        """
        script = self._scripts[name]
        with _mapped(f"run {name}"):
            try:
                return self.client.evalsha(script.sha, 1, self.namespace, *args)
            except redis.exceptions.NoScriptError:
                return self.client.eval(script.text, 1, self.namespace, *args)

    def connections(self) -> Connections:
        """The connections of this process's pool, as its gauges tell them."""
        pool: Any = self.client.connection_pool
        return Connections(sum(count for count, _ in pool.get_connection_count()), pool.max_connections)

    def ping(self) -> bool:
        """Whether Redis answers."""
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def accept(self, accepted: Sequence[Accepted]) -> None:
        """Mark events as seen and queue them for routing, in one script per page: either both or neither."""
        fresh = [a for a in accepted if not a.duplicate and not a.conflict]
        for page in _pages(fresh):
            args: list[Any] = [len(page)]
            for a in page:
                args += (f"{a.source}:{a.event_id}", MARK_TTL_MS)
            for a in page:
                args += (ROUTE, a.seq, _ms(a.delay_s), "", "")
            self.run("ensure", *args)

    def ensure(self, items: Sequence[Ensure]) -> int:
        """Make sure that keys are queued; returns how many were nowhere."""
        added = 0
        for page in _pages(items):
            args: list[Any] = [0]
            for queue, key, delay_s, line in page:
                args += (queue, key, _ms(delay_s), "", line)
            added += self.run("ensure", *args)
        return added

    def enqueue(self, queue: str, key: str, body: bytes, delay_s: float = 0.0) -> None:
        """Queue an ordinary message."""
        self.run("ensure", 0, queue, key, _ms(delay_s), body, "")

    def turn(
        self,
        queue: str,
        process: str,
        *,
        room: int,
        nonce: str,
        version: int | None,
        threads: int,
        in_hand: int,
        by_lane: Mapping[str, int],
        lease_s: float,
        finishes: Sequence[Finish],
        follow: Sequence[Ensure],
    ) -> Turn:
        """One turn of a consumer; see ``scripts/turn.lua``."""
        if version is None:
            settings: str | int = "" if queue in KEYED else "-"
        else:
            settings = version
        args: list[Any] = [queue, process, room, nonce, settings, threads, in_hand, _ms(lease_s)]
        args.append(len(by_lane))
        for lane, n in by_lane.items():
            args += (lane, n)
        args.append(len(finishes))
        asked = time.monotonic()
        for key, token, kind, due, body, refund, verdict, patient in finishes:
            args += (key, token, kind, _ms(max(0.0, due - asked)), body, int(refund), verdict, _ms(max(0.0, patient - asked)))
        for other, key, delay_s, line in follow:
            args += (other, key, _ms(delay_s), line)
        epoch, next_ms, unset, flat = self.run("turn", *args)
        grants = tuple(
            Grant(
                flat[i].decode(), flat[i + 1].decode(), float(flat[i + 2]) / 1000, int(flat[i + 3]), int(flat[i + 4]), flat[i + 5]
            )
            for i in range(0, len(flat), 6)
        )
        next_s = float(next_ms) / 1000
        return Turn(epoch == 1, None if next_s < 0 else next_s, tuple(name.decode() for name in unset), grants)

    def beat(self, process: str, *, silence_s: float, spread_s: float, queues: Sequence[str], held: Iterable[Held]) -> Beat:
        """One heartbeat; see ``scripts/beat.lua``."""
        args: list[Any] = [process, _ms(silence_s), _ms(spread_s), len(queues), *queues]
        for queue, key, token, lease_s, renew in held:
            args += (queue, key, token, _ms(lease_s), int(renew))
        return Beat(*self.run("beat", *args))

    def forget(self, queue: str, keys: Sequence[str]) -> int:
        """Take keys out of a queue, unless somebody holds them; returns how many were taken out."""
        return sum(self.run("forget", queue, *page) for page in _pages(keys))

    def where(self, queue: str, keys: Sequence[str]) -> list[Place]:
        """Where keys are."""
        places = []
        for page in _pages(keys):
            for kind, wait, ahead, limit, line in self.run("where", queue, *page):
                places.append(Place(kind.decode(), float(wait) / 1000, ahead, limit.decode(), line.decode()))
        return places

    def unknown(self, queue: str, items: Sequence[tuple[str, float]]) -> set[str]:
        """Which of `items` (key, seconds until due) are nowhere. Brings forward what is delayed too long."""
        missing: set[str] = set()
        for page in _pages(items):
            args = [x for key, delay_s in page for x in (key, _ms(delay_s))]
            missing.update(key.decode() for key in self.run("known", queue, *args))
        return missing

    def set_lanes(self, settings: Sequence[LaneSettings]) -> None:
        """Write the settings of lanes."""
        for page in _pages(settings, 100):
            args: list[Any] = [DELIVER]
            for s in page:
                gap = gap_ms(s.rate) if s.rate else 0.0
                credit = credit_ms(s.rate, s.burst) if s.rate else 0.0
                args += (s.lane, s.version, f"{gap:.6f}", f"{credit:.6f}", s.concurrency, _ms(s.lease_s))
                args += (s.hold, _ms(s.broken_s), _ms(s.broken_max_s), s.era)
            self.run("lanes", *args)

    def hold(self, endpoint: str, version: int, hold: Hold) -> None:
        """Hold the lanes of an endpoint, or let them go, at once; `version` is that of the configuration that says so."""
        self.run("hold", DELIVER, endpoint, version, hold)

    def lanes(self) -> list[str]:
        """The lanes in which something waits."""
        with _mapped("list the lanes"):
            return [_text(lane) for lane in self.client.zrange(f"{self.namespace}:{DELIVER}:active", 0, -1)]

    def lanes_of(self, endpoint: str) -> list[str]:
        """The lanes of an endpoint: its own, and those of the hosts of callback addresses for which something waits."""
        return [endpoint, *(lane for lane in self.lanes() if lane.startswith(endpoint + SEPARATOR))]

    def lane_states(self, lanes: Sequence[str]) -> list[LaneState]:
        """How lanes are."""
        return [lane_state(row) for page in _pages(lanes, 100) for row in self.run("state", DELIVER, *page)]

    def opened(self, lanes: Sequence[str] = ()) -> list[Opened]:
        """The breakers that have opened since `opened_seen` was called for them, and those of `lanes`."""
        return [_opened(row) for row in self.run("opened", "read", *lanes)]

    def opened_seen(self, told: Sequence[Opened]) -> None:
        """Somebody was told of these; one that has opened anew meanwhile is told of again."""
        for page in _pages(told):
            self.run("opened", "seen", *(x for one in page for x in (one.lane, one.mark)))

    def start(self, lane: str, token: str) -> None:
        """Tell that a call of a slow lane begins now: its pace counts from here."""
        self.run("start", lane, token)

    def look_again(self) -> None:
        """Let every lane in which something waits be looked at: settings have changed, and what waits must feel it."""
        self.run("look", DELIVER)

    def rebuild_begin(self, nonce: str) -> bool:
        """Start a rebuild; False when there is an epoch."""
        return bool(self.run("rebuild", "begin", nonce))

    def rebuild_hold(self, nonce: str, places: Sequence[tuple[str, str, float]]) -> bool:
        """Write what is in the hands of workers that may be dead: (key, token, seconds of lease left)."""
        for page in _pages(places):
            args = [x for key, token, left in page for x in (key, token, _ms(left))]
            if not self.run("rebuild", "hold", nonce, DELIVER, *args):
                return False
        return True

    def rebuild_commit(self, nonce: str) -> bool:
        """Make the epoch; False when another rebuild has begun since."""
        return bool(self.run("rebuild", "commit", nonce))

    def has_epoch(self) -> bool:
        """Whether keyed queues hand anything out."""
        with _mapped("tell its epoch"):
            return bool(self.client.exists(f"{self.namespace}:epoch"))

    def sizes(self, queues: Sequence[str] = KEYED) -> dict[str, Size]:
        """How much is in each queue."""
        return {queue: Size(*size) for queue, size in zip(queues, self.run("sizes", *queues), strict=True)}

    def alive(self, within_s: float) -> int:
        """How many worker processes have given a sign of life in the last `within_s` seconds."""
        with _mapped("count the processes"):
            seconds, microseconds = self.client.time()
            since = seconds * 1000 + microseconds // 1000 - int(within_s * 1000)
            return int(self.client.zcount(f"{self.namespace}:procs", since, "+inf"))

    def flush(self, queue: str) -> None:
        """Drop everything in a queue."""
        self.run("flush", queue)

    def some_delayed(self, queue: str, count: int) -> list[str]:
        """Some `count` of the keys that are delayed, for the comparison with Postgres."""
        with _mapped("scan"):
            _, pairs = self.client.zscan(f"{self.namespace}:{queue}:delayed", 0, count=count)
            return [_text(key) for key, _ in pairs]


@dataclass(frozen=True, slots=True)
class _Script:
    text: str
    sha: str


def _load() -> Mapping[str, _Script]:
    folder = resources.files(__package__) / "scripts"
    shared = "\n".join((folder / f"{name}.lua").read_text() for name in _SHARED)
    scripts = {}
    for file in folder.iterdir():
        name = file.name.removesuffix(".lua")
        if file.name.endswith(".lua") and name not in _SHARED:
            text = f"{shared}\n{file.read_text()}"
            scripts[name] = _Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return scripts


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Turns every error of the Redis client into `BrokerUnavailable`."""
    try:
        yield
    except redis.RedisError as e:
        raise BrokerUnavailable(f"Redis did not {what}: {type(e).__name__}: {e}") from e


def _pages(items: Sequence[Any], size: int = PAGE) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"


def _text(value: Any) -> str:
    return bytes(value).decode()


def _opened(row: Sequence[Any]) -> Opened:
    lane, mark, is_open, why, verdicts, failures, has_succeeded = row
    reason = Breaker("open", 0.0, 0.0, _text(why), int(verdicts), int(failures), 0).reason if is_open else None
    return Opened(_text(lane), _text(mark), bool(is_open), reason, bool(has_succeeded))
