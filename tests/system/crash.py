"""What the crash tests share: faults that are put right as a supervisor would, steady traffic, and the count afterwards.

The count is exact. A receiver notes every call with its delivery and the number of the attempt; Postgres notes every claim
that ended, with a verdict or without. Each call must be the one call of one such claim, and a claim that was called and has
no verdict must have been in the hands of a process that was killed or frozen at that very time.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import httpx
import psycopg

from madeira.cli.running import members
from tests.receiver import Answer, Call, Receiver
from tests.servers import OwnPostgres, OwnRedis
from tests.system.harness import Madeira, Process, threading_wait, wait_until

#: Seconds that a call may take, and the rest of the lease: seconds where production has minutes.
TIMEOUT_S: Final = 1.5
MARGIN_S: Final = 1.5
SCALED: Final = {
    "MADEIRA_BEAT_S": "0.2",
    "MADEIRA_SILENCE_S": "1",
    "MADEIRA_LEASE_MARGIN_S": str(MARGIN_S),
    "MADEIRA_RECONCILE_S": "1",
}

THREADS: Final = 8
PROCESSES: Final = 2

#: Seconds that the receiver thinks, so that some calls are always under way.
THINKS_S: Final = 0.15

#: Every so many events, the first attempt is answered with 503.
FLAKY: Final = 10

#: Seconds by which a statement that was sent before a kill may be carried out after it.
AFTERLIFE_S: Final = 0.5


def endpoint(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """One endpoint whose lane keeps several calls under way."""
    return {"a": {"url": receiver.url("/a"), "timeout": TIMEOUT_S, "concurrency": 10, "retry": {"max_attempts": 50}}}


def think(call: Call) -> Answer:
    """A receiver that takes a moment, and refuses some first attempts."""
    flaky = call.json()["payload"]["n"] % FLAKY == 0 and call.headers["x-madeira-attempt"] == "1"
    return Answer(status=503 if flaky else 200, delay_s=THINKS_S)


@dataclass
class Fault:
    """Something that was killed or frozen, when (Unix seconds), and which deliveries it had in its hands."""

    kind: str
    at: float
    hands: frozenset[int] = frozenset()
    until: float = 0.0
    lost: int = 0
    called: int = 0
    late: int = 0

    def explains(self, delivery: int, claimed: float) -> bool:
        """Whether a claim of that time was in the victim's hands."""
        return delivery in self.hands and self.at - TIMEOUT_S - MARGIN_S <= claimed <= self.at + AFTERLIFE_S


class Traffic:
    """Posts events from threads of its own, each until it is accepted, as an upstream does."""

    def __init__(self, madeira: Madeira) -> None:
        self._madeira = madeira
        self._pool = ThreadPoolExecutor(4)
        self._numbers = count()
        self._posts: list[Future[str]] = []
        self._given_up = False

    def post(self, events: int) -> None:
        """Post `events` more, at about eighty a second."""
        self._posts += [self._pool.submit(self._post_one, next(self._numbers)) for _ in range(events)]

    @property
    def accepted(self) -> int:
        return sum(post.done() for post in self._posts)

    def wait_under_way(self) -> None:
        """Wait until some of what was asked for last is accepted."""
        wanted = len(self._posts) - 40
        wait_until(lambda: self.accepted >= wanted, 30, what="the traffic")

    def _post_one(self, n: int) -> str:
        event_id = f"crash-{n}"
        body = b'{"event_id": "%b", "event_type": "a.b", "payload": {"n": %d}}' % (event_id.encode(), n)
        while not self._given_up:
            with contextlib.suppress(httpx.TransportError):
                answer = self._madeira.send(body)
                assert answer.status_code in (200, 202, 503), answer.text
                if answer.status_code != 503:
                    threading_wait(0.05)
                    return event_id
            threading_wait(0.05)
        raise RuntimeError("given up")

    def finish(self, timeout: float) -> list[str]:
        """Wait until all are accepted; returns their ids."""
        return [post.result(timeout) for post in self._posts]

    def close(self) -> None:
        self._given_up = True
        self._pool.shutdown(cancel_futures=True)


@dataclass
class Cast:
    """Everything that runs, and the ways to break it. Each fault is over when its victim runs again."""

    madeira: Madeira
    receiver: Receiver
    redis: OwnRedis
    postgres: OwnPostgres
    api: Process = field(init=False)
    worker: Process = field(init=False)
    scheduler: Process = field(init=False)

    def start(self) -> None:
        self.api = self.madeira.api(workers=2)
        self.worker = self._new_worker()
        self.scheduler = self._new_scheduler()

    def _new_worker(self) -> Process:
        return self.madeira.worker(processes=PROCESSES, threads=THREADS)

    def _new_scheduler(self) -> Process:
        return self.madeira.start("scheduler", ["periodiq", "madeira.actors"])

    def assert_whole(self) -> None:
        """Nothing has ended that was not killed."""
        for process in (self.api, self.worker, self.scheduler):
            assert process.popen.poll() is None, process.tail()

    def in_hand(self, *pids: int) -> frozenset[int]:
        """The deliveries in the hands of processes that do nothing any more, as Redis has it."""
        held = self.madeira.redis.hgetall(f"{self.madeira.namespace}:deliver:held")
        return frozenset(_delivery_of(key) for key, note in held.items() if _pid_of(note) in pids)

    def kill_api_worker(self, fault: Fault) -> None:
        before = self.api.children()
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(set(self.api.children()) - set(before)) == 1, what="gunicorn's new worker")

    def kill_api_master(self, fault: Fault) -> None:
        """Its workers end by themselves; as long as one holds the port, a new master gives up and is started again."""
        os.kill(self.api.pid, signal.SIGKILL)
        self.api.popen.wait(10)
        wait_until(self._api_serves, 60, what="the API's new master")

    def _api_serves(self) -> bool:
        if self.api.popen.poll() is not None:
            args = ["gunicorn", "-c", "deploy/gunicorn.conf.py", "madeira.api:app"]
            self.api = self.madeira.start("api", args, {"MADEIRA_PROCESSES": "2"})
        return "Listening at" in self.api.tail()

    def _busiest_worker(self) -> int:
        """The worker process that holds most deliveries now."""
        return max(worker_processes(self.worker), key=lambda pid: len(self.in_hand(pid)))

    def kill_worker_process(self, fault: Fault) -> None:
        pid = self._busiest_worker()
        os.kill(pid, signal.SIGKILL)
        fault.hands = self.in_hand(pid)
        assert self.worker.popen.wait(20) != 0, "a supervisor that restarts on failure must see one"
        self.worker = self._new_worker()

    def kill_worker_master(self, fault: Fault) -> None:
        """What it has left finishes what it has in hand, beside the processes of the next one, and ends."""
        killed = self.worker
        os.kill(killed.pid, signal.SIGKILL)
        killed.popen.wait(10)
        self.worker = self._new_worker()
        wait_until(lambda: not members(killed.pid), what="the end of what the master has left")

    def kill_scheduler(self, fault: Fault) -> None:
        self.scheduler.kill()
        self.scheduler = self._new_scheduler()

    def kill_redis(self, fault: Fault) -> None:
        self.redis.kill()
        self.redis.start()

    def kill_postgres(self, fault: Fault) -> None:
        self.postgres.kill()
        self.postgres.start()

    def freeze_worker(self, fault: Fault) -> None:
        """One of two worker processes stops until others have taken over what it had, then goes on."""
        pid = self._busiest_worker()
        os.kill(pid, signal.SIGSTOP)
        try:
            fault.hands = self.in_hand(pid)
            wait_until(lambda: claims_older_than(self.madeira, fault.at) == 0, 30, what="the takeover")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: all_late(self, fault), what="a row for each outcome that came too late")


#: The faults in their order.
FAULTS: Final[Sequence[tuple[str, Callable[[Cast, Fault], None]]]] = (
    ("API worker", Cast.kill_api_worker),
    ("worker process", Cast.kill_worker_process),
    ("Redis", Cast.kill_redis),
    ("frozen worker", Cast.freeze_worker),
    ("API master", Cast.kill_api_master),
    ("worker master", Cast.kill_worker_master),
    ("Postgres", Cast.kill_postgres),
    ("scheduler", Cast.kill_scheduler),
)


def worker_processes(master: Process, processes: int = PROCESSES) -> list[int]:
    """The pids of a Dramatiq master's worker processes; what it starts after them serves metrics."""
    return master.children()[:processes]


def _delivery_of(key: bytes) -> int:
    """The number of the delivery that a key of the queue names."""
    return int(key.split(b":")[0])


def _pid_of(note: bytes) -> int:
    """Whose a held key is: the note says "token process until …", and a process is "host.pid.random"."""
    return int(note.split()[1].split(b".")[-2])


def rows(madeira: Madeira, statement: str, *params: Any) -> list[dict[str, Any]]:
    """Read from a Postgres that may have been killed since the last time."""
    try:
        return madeira.rows(statement, *params)
    except psycopg.OperationalError:
        return madeira.rows(statement, *params)


def attempts(madeira: Madeira, event_id: str) -> list[dict[str, Any]]:
    """The attempts of an event, also from a Postgres that may have been killed since the last time."""
    with contextlib.suppress(psycopg.OperationalError):
        return madeira.attempts(event_id)
    return madeira.attempts(event_id)


def claims_older_than(madeira: Madeira, moment: float) -> int:
    """Deliveries that are still in the hands that took them before `moment` (Unix seconds)."""
    statement = "SELECT count(*) FROM delivery WHERE status = 'delivering' AND claimed_at < to_timestamp(%s)"
    (row,) = rows(madeira, statement, moment)
    found: int = row["count"]
    return found


@dataclass(frozen=True)
class Claim:
    """One claim that ended: what became of it, and how many calls were made for it."""

    delivery: int
    attempt: int
    claimed: float
    outcome: str
    late: bool
    calls: int

    @property
    def lost(self) -> bool:
        return self.outcome == "lost"


def claims(madeira: Madeira, receiver: Receiver) -> list[Claim]:
    """All claims so far that have ended, beside the receiver's account of them."""
    return _claims(madeira, receiver)[0]


def all_claims(madeira: Madeira, receiver: Receiver) -> list[Claim]:
    """The same when everything has ended.

    Raises:
        AssertionError: the receiver saw a call that no claim accounts for.
    """
    ended, strays = _claims(madeira, receiver)
    assert not strays, f"calls that no claim accounts for: {strays}"
    return ended


def _claims(madeira: Madeira, receiver: Receiver) -> tuple[list[Claim], Counter[tuple[int, int]]]:
    log = rows(madeira, "SELECT *, extract(epoch FROM started_at)::float8 AS claimed FROM delivery_log ORDER BY id")
    late = {(row["delivery_id"], row["attempt"]) for row in log if row["outcome"] == "late"}
    calls = Counter(_claim_of(call) for call in receiver.calls)
    ended = {}
    for row in log:
        if row["outcome"] != "late":
            key = (row["delivery_id"], row["attempt"])
            assert key not in ended, f"two verdicts for {key}"
            ended[key] = Claim(*key, row["claimed"], row["outcome"], key in late, calls.pop(key, 0))
    return list(ended.values()), calls


def _claim_of(call: Call) -> tuple[int, int]:
    return int(call.webhook_id.split("_")[1]), int(call.headers["x-madeira-attempt"])


def all_late(cast: Cast, fault: Fault) -> bool:
    """Whether each call that was in frozen hands, and was taken over, has its late row."""
    return all(
        c.late for c in claims(cast.madeira, cast.receiver) if c.lost and c.calls and fault.explains(c.delivery, c.claimed)
    )


def blame(ended: Sequence[Claim], faults: Sequence[Fault]) -> list[Claim]:
    """Count lost claims at the fault that took them; returns those that were called and that no fault explains."""
    unexplained = []
    for claim in ended:
        fault = next((f for f in faults if f.explains(claim.delivery, claim.claimed)), None)
        if claim.late and fault:
            fault.late += 1
        if not claim.lost:
            continue
        if fault:
            fault.lost += 1
            fault.called += claim.calls
        elif claim.calls:
            unexplained.append(claim)
    return unexplained


def table(faults: Sequence[Fault], ended: Sequence[Claim], accepted: int, finished: Counter[str]) -> Iterator[str]:
    """The count, to be printed."""
    yield f"{'killed or frozen':<18}{'times':>6}{'in hand':>9}{'lost':>6}{'called':>8}{'late':>6}{'mean s':>8}"
    for kind in dict.fromkeys(f.kind for f in faults):
        group = [f for f in faults if f.kind == kind]
        in_hand = sum(len(f.hands) for f in group)
        lost, called, late = (sum(getattr(f, name) for f in group) for name in ("lost", "called", "late"))
        mean = sum(f.until - f.at for f in group) / len(group)
        yield f"{kind:<18}{len(group):>6}{in_hand:>9}{lost:>6}{called:>8}{late:>6}{mean:>8.1f}"
    calls = sum(c.calls for c in ended)
    again = sum(c.calls for c in ended if c.lost)
    yield f"events: {accepted} accepted, {sum(finished.values())} ended ({', '.join(f'{n} {s}' for s, n in finished.items())})"
    yield f"calls: {calls} = {calls - again} with a verdict + {again} in killed or frozen hands"
    yield f"claims lost before their call was made: {sum(c.lost and not c.calls for c in ended)}"


class Kept:
    """Dramatiq masters that are started again whenever one ends, as a supervisor does."""

    def __init__(self, madeira: Madeira, **commands: Sequence[str]) -> None:
        self._madeira = madeira
        self._commands = commands
        self.processes = {name: madeira.start(name, command) for name, command in commands.items()}
        self.restarts: Counter[str] = Counter()

    def tend(self) -> None:
        """Start again what has ended."""
        for name, process in self.processes.items():
            if process.popen.poll() is not None:
                assert process.popen.returncode != 0, f"a supervisor that restarts on failure would not see {name} end"
                self.restarts[name] += 1
                self.processes[name] = self._madeira.start(name, self._commands[name])


def dramatiq(*options: str, modules: Sequence[str] = ("madeira.actors",), threads: int = 4) -> list[str]:
    """The command line of a Dramatiq master with one process."""
    return ["dramatiq", *modules, "-p", "1", "-t", str(threads), *options]


def holders(madeira: Madeira, delivery: int) -> set[int]:
    """The worker process that has a delivery in its hands now, as Redis has it."""
    held = madeira.redis.hgetall(f"{madeira.namespace}:deliver:held")
    ours = {pid for process in madeira.processes if process.popen.poll() is None for pid in process.children()}
    return {_pid_of(note) for key, note in held.items() if _delivery_of(key) == delivery} & ours


def killing(madeira: Madeira) -> Callable[[Call], Answer]:
    """A script that kills the worker process that makes the call, and would answer 200 if that failed."""

    def kill(call: Call) -> Answer:
        for pid in holders(madeira, _claim_of(call)[0]):
            os.kill(pid, signal.SIGKILL)
        return Answer()

    return kill
