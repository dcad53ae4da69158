"""Postgres is restored from a backup beside a Redis that is newer, older or empty: nothing of the backup is lost."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row

from madeira.embedded import _postgres_program
from tests.receiver import Answer, Call, Gate, Receiver
from tests.servers import OwnPostgres, OwnRedis
from tests.system.harness import Madeira, later, running, toml, wait_until

#: A key of Redis as it was: its value and its time to live in milliseconds.
Memory = dict[bytes, tuple[bytes, int]]

#: Seconds until a retry: longer than a backup takes.
LATER_S = 3.0


def remember(madeira: Madeira) -> Memory:
    """All that Redis holds, as a snapshot on disk would have it."""
    with madeira.redis as redis:
        found = {key: (redis.dump(key), max(0, redis.pttl(key))) for key in redis.scan_iter()}
    return {key: (value, ttl) for key, (value, ttl) in found.items() if value}


def go_back(madeira: Madeira, memory: Memory) -> None:
    """Let Redis hold what it held then, and nothing else."""
    with madeira.redis as redis:
        redis.flushall()
        for key, (value, ttl) in memory.items():
            redis.restore(key, ttl, value)


def restore(server: OwnPostgres, dump: Path) -> None:
    """As docs/operations.md says: a new database in the place of the old one."""
    admin = server.url_of("postgres")
    with psycopg.connect(admin, autocommit=True) as conn:
        conn.execute(f"DROP DATABASE {server.database} WITH (FORCE)".encode())
        conn.execute(f"CREATE DATABASE {server.database} ENCODING 'UTF8' TEMPLATE template0".encode())
    subprocess.run([_postgres_program("pg_restore"), "--exit-on-error", f"--dbname={server.url}", str(dump)], check=True)


def statuses(url: str) -> dict[str, str]:
    with psycopg.connect(url, row_factory=dict_row) as conn:
        return {row["event_id"]: row["status"] for row in conn.execute("SELECT event_id, status FROM event")}


@dataclass(frozen=True)
class Events:
    """The events of a backup, and those that came after it."""

    done: set[str]
    unfinished: set[str]
    after: list[str]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("memory", ["newer", "older", "empty"])
def test_what_is_in_the_backup_ends_whatever_redis_remembers(
    own_postgres: OwnPostgres, own_redis: OwnRedis, receiver: Receiver, tmp_path: Path, memory: str
) -> None:
    """What was unfinished then is called once more at most; what came after it is accepted anew when it is sent again."""
    dump = tmp_path / "madeira.dump"
    endpoints = {
        "good": {"url": receiver.url("/good")},
        "slow": {"url": receiver.url("/slow"), "timeout": 20},
        "flaky": {"url": receiver.url("/flaky"), "retry": {"initial": LATER_S, "max": LATER_S}},
    }
    options = {"folder": tmp_path, "database_url": own_postgres.url, "redis_url": own_redis.url, "config": toml(endpoints)}
    with running(**options) as madeira:
        events, past = until_after_the_backup(madeira, receiver, dump)
        madeira.close()
        before = calls_of(receiver)
        change: dict[str, Callable[[], object]] = {
            "newer": lambda: None,
            "older": lambda: go_back(madeira, past),
            "empty": lambda: madeira.redis.flushall(),
        }
        change[memory]()
        restore(own_postgres, dump)
        assert set(statuses(own_postgres.url)) == events.done | events.unfinished

    with running(**options) as madeira:
        madeira.api()
        madeira.worker(threads=12)
        for event_id in events.after:
            madeira.post("good.x", event_id=event_id)
        madeira.wait_all(60)
        receiver.wait_idle()
        calls = calls_of(receiver)
        assert set(statuses(own_postgres.url).values()) == {"succeeded"}
    again = Counter({event: n for event in calls if (n := calls[event] - before[event])})
    print(f"\n{memory}: {told(events, again)}")
    assert not events.done & set(again)
    assert all(again[event] == 1 for event in events.after)
    assert all(1 <= again[event] <= 2 for event in events.unfinished)
    assert receiver.overlaps == {}


def until_after_the_backup(madeira: Madeira, receiver: Receiver, dump: Path) -> tuple[Events, Memory]:
    """Run a system that is backed up in the middle of its work, goes on, and is stopped; and what Redis held before that."""
    gate, failed = Gate(), set[str]()

    def fails_once(call: Call) -> Answer:
        first = call.webhook_id not in failed
        failed.add(call.webhook_id)
        return Answer(status=503 if first else 200)

    receiver.answer("/slow", Answer(hold=gate))
    receiver.answer("/flaky", fails_once)
    api, worker = madeira.api(), madeira.worker(threads=12)
    done = {madeira.post("good.x") for _ in range(10)}
    madeira.wait_all()
    past = remember(madeira)
    unfinished = {madeira.post("slow.x") for _ in range(2)} | {madeira.post("flaky.x") for _ in range(3)}
    unfinished |= {madeira.post("good.x", deliver_at=later(LATER_S)) for _ in range(2)}
    receiver.wait_until(lambda: receiver.count("/slow") == 2 and receiver.count("/flaky") == 3)
    wait_until(lambda: madeira.value("SELECT count(*) FROM delivery WHERE attempt = 1 AND status = 'pending'") == 3)

    dumped = [_postgres_program("pg_dump"), "--format=custom", f"--file={dump}", madeira.database_url]
    subprocess.run(dumped, check=True)
    gate.set()
    after = [madeira.post("good.x") for _ in range(5)] + [madeira.post("flaky.x")]
    receiver.wait_until(lambda: receiver.count("/flaky") >= 4)
    wait_until(lambda: madeira.value("SELECT count(*) FROM delivery WHERE status = 'delivering'") == 0)
    for process in (worker, api):
        assert process.stop() == 0
    return Events(done, unfinished, after), past


def told(events: Events, again: Counter[str]) -> str:
    """How many of each kind were called once more."""
    kinds = {"done": events.done, "unfinished": events.unfinished, "sent again": events.after}
    return ", ".join(f"of {len(ids)} {kind} {sum(again[e] for e in ids)} were called again" for kind, ids in kinds.items())


def calls_of(receiver: Receiver) -> Counter[str]:
    """How often each event was called."""
    return Counter(json.loads(call.body)["event_id"] for call in receiver.calls)
