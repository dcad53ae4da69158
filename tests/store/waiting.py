"""Waits for what another thread or the server does, without guessing how long it takes."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from madeira.store import rollups


def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    """Give way to others until `condition` holds; fail when it takes longer than anything here should."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} does not hold after {within_s:g} s"
        os.sched_yield()


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each job in a thread of its own, all let go at the same moment; their results or errors, in order."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def run(i: int, job: Callable[[], Any]) -> None:
        start.wait()
        try:
            results[i] = job()
        except Exception as e:  # noqa: BLE001 - handed on to whoever asked
            results[i] = e

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def good(results: list[Any]) -> list[Any]:
    """The results, none of which may be an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def passed_fences(conn: psycopg.Connection[Any]) -> None:
    """Set the roll-ups' fences and wait until they are passed: every transaction of the whole server counts."""
    rollups.set_fences(conn)
    under_way = "SELECT count(*) FROM rollup_cursor WHERE fence_xmax > pg_snapshot_xmin(pg_current_snapshot())"
    until(lambda: conn.execute(under_way).fetchall() == [(0,)])


def waits_for_a_lock(conn: psycopg.Connection[Any], application: str) -> bool:
    """Whether a session of `application` waits for a lock that another one holds."""
    row = conn.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s "
        "AND wait_event_type = 'Lock'",
        (application,),
    ).fetchone()
    return row is not None and row[0] > 0


def terminate(url: str, application: str) -> int:
    """End the sessions of `application` as an administrator would; returns how many there were."""
    with psycopg.connect(url, autocommit=True) as c:
        row = c.execute(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = %s",
            (application,),
        ).fetchone()
    assert row is not None
    return int(row[0])
