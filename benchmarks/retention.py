"""What removing a million finished events costs whoever posts meanwhile: ``python -m benchmarks.retention``. Quote the ratio.

A million events that have ended, with a delivery and an attempt each, are made in the database (posting them would take the
better part of an hour). Then the same number of posts a second is sent throughout: first while nothing else goes on, then minute
after minute as the actor works, which removes for 45 seconds of each and leaves 15. Printed are the times that posts took with
and without, also as the ratio minute by minute, since whatever else the machine does falls upon both; then the sizes before and
after, whether new events take the place of those that went, and what became of an id that was posted again.
"""

import argparse
import asyncio
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.load import requests
from benchmarks.run import ROOT, SECRET, Bench
from madeira.embedded import free_port
from madeira.records import NewEvent
from madeira.store import events

#: Make finished events of 200 days ago; triggers and foreign keys, which only check, are left out.
FILL = (
    "SET session_replication_role = replica",
    """
    INSERT INTO event (seq, source, event_id, event_type, payload, body_sha256, trace_id, status, routed_at, deliveries,
                       created_at, updated_at)
    SELECT n, %(source)s, 'old-' || n, 'bench0.event', '{"amount": ' || n || ', "note": "' || repeat('x', 300) || '"}',
           sha256(n::text::bytea), 'trace-' || n, 'succeeded', t, 1, t, t
    FROM generate_series(1, %(count)s) n, LATERAL (SELECT now() - interval '200 days' + n * interval '1 ms' AS t) at
    """,
    """
    INSERT INTO delivery (id, event_seq, endpoint, lane, status, attempt, finished_at, trace_id, created_at, updated_at)
    SELECT n, n, 'bench0', 'bench0', 'succeeded', 1, t, 'trace-' || n, t, t
    FROM generate_series(1, %(count)s) n, LATERAL (SELECT now() - interval '200 days' + n * interval '1 ms' AS t) at
    """,
    """
    INSERT INTO delivery_log (id, delivery_id, attempt, token, started_at, duration_s, url, status_code, outcome, settled_as,
                              excerpt, length, sha256, worker, recorded_at)
    SELECT n, n, 1, gen_random_uuid(), t, 0.1, 'http://receiver.example/hook', 200, 'succeeded', 'succeeded',
           convert_to(repeat('y', 200), 'UTF8'), 200, sha256(n::text::bytea), 'worker:1', t
    FROM generate_series(1, %(count)s) n, LATERAL (SELECT now() - interval '200 days' + n * interval '1 ms' AS t) at
    """,
    """
    SELECT setval(pg_get_serial_sequence(t, c), %(count)s)
    FROM (VALUES ('event', 'seq'), ('delivery', 'id'), ('delivery_log', 'id')) AS s (t, c)
    """,
    "UPDATE rollup_cursor SET done = %(count)s, fence = NULL, fence_xmax = NULL, fenced_at = NULL",
    "SET session_replication_role = origin",
)

#: A part for the day of the attempts that are made, which the migration could not foresee.
OLD_PART = """
DO $$
DECLARE
    day date := ((now() - interval '200 days') AT TIME ZONE 'UTC')::date;
    part text := 'delivery_log_' || to_char(day + 1, 'YYYYMMDD');
    first regclass := (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'delivery_log'::regclass
                       AND inhrelid <> 'delivery_log_rest'::regclass);
    until text := (SELECT substring(pg_get_expr(relpartbound, oid) FROM 'TO \\(''([^'']+)') FROM pg_class WHERE oid = first);
BEGIN
    EXECUTE format('ALTER TABLE delivery_log DETACH PARTITION %s', first);
    EXECUTE format('CREATE TABLE %I (LIKE delivery_log INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)', part);
    EXECUTE format('CREATE UNIQUE INDEX %I ON %I (delivery_id, token, (outcome = ''late''))', part || '_one_verdict', part);
    EXECUTE format('ALTER TABLE delivery_log ATTACH PARTITION %I FOR VALUES FROM (MINVALUE) TO (%L)',
                   part, (day + 2)::timestamp AT TIME ZONE 'UTC');
    EXECUTE format('ALTER TABLE delivery_log ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)',
                   first, (day + 2)::timestamp AT TIME ZONE 'UTC', until);
END $$
"""

#: Events that come afterwards, to see whether they take the place of those that went.
AGAIN = (
    """
    INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at)
    SELECT 'bench', 'new-' || n, 'bench0.event', '{"amount": ' || n || ', "note": "' || repeat('x', 300) || '"}',
           sha256(n::text::bytea), 'trace-' || n, now()
    FROM generate_series(1, %(count)s) n
    """,
    """
    INSERT INTO delivery (event_seq, endpoint, lane, trace_id)
    SELECT seq, 'bench0', 'bench0', trace_id FROM event WHERE event_id LIKE 'new-%%' AND 0 < %(count)s
    """,
)

#: Seconds of each minute that the actor works, and that it leaves.
WORKS_S, LEAVES_S = 45.0, 15.0

SIZES = """
    SELECT pg_database_size(current_database()), pg_table_size('event'), pg_indexes_size('event'),
           pg_table_size('delivery'), pg_indexes_size('delivery'),
           (SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent = 'delivery_log'::regclass)::bigint,
           pg_total_relation_size('tombstone')
"""


def fill(conn: "psycopg.Connection[Any]", count: int, source: str = "bench") -> None:
    """Make `count` events of `source` that ended long ago."""
    conn.execute(OLD_PART)
    for statement in FILL:
        conn.execute(statement.encode(), {"count": count, "source": source} if "%(count)s" in statement else None)
    conn.execute("VACUUM ANALYZE")
    conn.execute("CHECKPOINT")


class Driver:
    """Posts so many events a second, come what may, and notes how long each took."""

    def __init__(self, port: int, rate: float) -> None:
        self._port = port
        self._rate = rate
        self.bad = 0

    def run(self, until: Callable[[], bool], prefix: str) -> list[float]:
        """Post until told to stop; seconds of each."""
        return asyncio.run(self._run(until, prefix))

    async def _run(self, until: Callable[[], bool], prefix: str) -> list[float]:
        took: list[float] = []
        idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        begun, sent = time.monotonic(), 0
        while not until():
            batch = requests(int(self._rate), SECRET, f"{prefix}{sent}")
            for request in batch:
                await asyncio.sleep(max(0.0, begun + sent / self._rate - time.monotonic()))
                tasks.add(task := asyncio.create_task(self._post(request, idle, took, begun + sent / self._rate)))
                task.add_done_callback(tasks.discard)
                sent += 1
        await asyncio.gather(*tasks)
        return took

    async def _post(self, request: bytes, idle: Any, took: list[float], due: float) -> None:
        """Post one; its time counts from when it was due, so that nobody waits unseen."""
        reader, writer = idle.get_nowait() if not idle.empty() else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            await reader.readexactly(int(head[at + 15 :].split(b"\r\n", 1)[0]))
        except (OSError, asyncio.IncompleteReadError):
            self.bad += 1
            return
        took.append(time.monotonic() - due)
        self.bad += not head.startswith(b"HTTP/1.1 202")
        idle.put_nowait((reader, writer))


class Remover:
    """The process that removes."""

    def __init__(self, bench: Bench) -> None:
        args = [sys.executable, "-m", "benchmarks.removing"]
        self._process = subprocess.Popen(args, env=bench.env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        bench.stack.callback(self._process.kill)
        #: What went, by kind.
        self.counts: Counter[str] = Counter()
        self.is_over = False

    def turn(self, seconds: float) -> threading.Thread:
        """Let it remove for `seconds`; the thread ends when it has."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        thread = threading.Thread(target=self._await, daemon=True)
        thread.start()
        return thread

    def _await(self) -> None:
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.counts.update(told["counts"])
        self.is_over = told["over"]


def p99(took: list[float]) -> float:
    """Seconds within which 99 of 100 were done."""
    ordered = sorted(took)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def show(name: str, took: list[float]) -> None:
    """Print how long posts took."""
    ordered = sorted(took)
    at = {p: ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in (50, 95, 99)}
    print(f"{name:<24}{len(took):>8} posts  " + "  ".join(f"p{p} {s * 1000:6.1f} ms" for p, s in at.items()), flush=True)


def minutes(driver: Driver, remover: Remover) -> tuple[list[list[float]], list[list[float]]]:
    """Post minute after minute until all is gone: what posts took while things were removed, and in the rests in between."""
    busy: list[list[float]] = []
    rests: list[list[float]] = []
    while not remover.is_over:
        minute = len(busy)
        before = sum(n for kind, n in remover.counts.items() if kind.startswith("events_"))
        turn = remover.turn(WORKS_S)
        busy.append(driver.run(lambda turn=turn: not turn.is_alive(), f"busy{minute}-"))  # type: ignore[misc]
        rests.append(driver.run(_after(LEAVES_S), f"rest{minute}-"))
        gone = sum(n for kind, n in remover.counts.items() if kind.startswith("events_")) - before
        print(
            f"minute {minute + 1:3}  {gone:7,} events gone  p99 with {p99(busy[-1]) * 1000:6.1f} ms  "
            f"without {p99(rests[-1]) * 1000:6.1f} ms",
            flush=True,
        )
    return busy, rests


def report(bench: Bench, count: int, rate: float, quiet_s: float) -> None:
    """Fill, drive, remove, and print."""
    port = free_port()
    with psycopg.connect(bench.postgres.url, autocommit=True) as conn:
        begun = time.monotonic()
        fill(conn, count)
        print(f"made {count:,} finished events in {time.monotonic() - begun:.0f} s", flush=True)
        sizes = [_sizes(conn)]
        with bench.api(port):
            driver = Driver(port, rate)
            remover = Remover(bench)
            driver.run(_after(5), "warm")
            quiet = driver.run(_after(quiet_s), "quiet")
            show("before", quiet)
            begun = time.monotonic()
            busy, rests = minutes(driver, remover)
            took_s = time.monotonic() - begun
        show_ratio(quiet, busy, rests)
        print(f"removed in {took_s:.0f} s: {dict(remover.counts)}; {driver.bad} posts not accepted", flush=True)
        sizes.append(_sizes(conn))
        conn.execute("VACUUM")
        sizes.append(_sizes(conn))
        for statement in AGAIN:
            conn.execute(statement.encode(), {"count": count * 3 // 4})
        sizes.append(_sizes(conn))
        names = ("database", "event", "  its indexes", "delivery", "  its indexes", "delivery_log", "tombstone")
        print(f"{'MiB':<16}{'before':>9}{'after':>9}{'vacuumed':>9}   and with {count * 3 // 4:,} new events")
        for name, *of in zip(names, *sizes, strict=True):
            print(f"{name:<16}" + "".join(f"{size / 2**20:9.0f}" for size in of), flush=True)
        show_resent(conn)


def show_ratio(quiet: list[float], busy: list[list[float]], rests: list[list[float]]) -> None:
    """Print what it all comes to."""
    with_, without = [s for took in busy for s in took], [s for took in rests for s in took]
    show("while it removes", with_)
    show("in the rests between", without)
    ratios = [p99(a) / p99(b) for a, b in zip(busy, rests, strict=True)]
    print(
        f"p99 with / without: {p99(with_) / p99(without):.2f} of all, {statistics.median(ratios):.2f} in the median minute; "
        f"against the time before: {p99(with_) / p99(quiet):.2f}"
    )


def _sizes(conn: "psycopg.Connection[Any]") -> tuple[int, ...]:
    row = conn.execute(SIZES).fetchone()
    assert row is not None
    return tuple(row)


def show_resent(conn: "psycopg.Connection[Any]") -> None:
    """Post an id again whose event is gone."""
    digest = hashlib.sha256(b"7").digest()
    resent = NewEvent("bench", "old-7", "bench0.event", '{"amount": 7}', digest, "trace")
    [answer] = events.insert(conn, [resent])
    print(f"an id that is gone, posted again: duplicate={answer.duplicate}, it was {answer.status}")


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=50.0, help="posts a second")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds of the measurement without retention")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="madeira-retention-", dir="/tmp"))
    try:
        with ExitStack() as stack:
            bench = Bench(folder=folder, events=0, processes=2, threads=8, stack=stack)
            report(bench, options.events, options.rate, options.quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
