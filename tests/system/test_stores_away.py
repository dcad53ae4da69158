"""What is in the logs when a store goes away under everything: lines that say so, and no traceback."""

import json
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.receiver import Answer, Receiver
from tests.servers import OwnPostgres, OwnRedis
from tests.system.conftest import Launch
from tests.system.crash import rows
from tests.system.harness import Madeira, Process, threading_wait, wait_until

#: Asks for all periodic work again and again, so that each kind of it is at work whatever happens.
ASKING = """
import contextlib, logging, time
import madeira.actors
from dramatiq import get_broker
from dramatiq.errors import ConnectionClosed
logging.disable(logging.CRITICAL)
actors = [actor for actor in get_broker().actors.values() if "periodic" in actor.options]
while True:
    for actor in actors:
        with contextlib.suppress(ConnectionClosed):
            actor.send()
    time.sleep(0.2)
"""

#: Seconds for which a store is away.
AWAY_S = 6.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_store_that_goes_away_is_told_in_lines_and_without_a_traceback(
    launch: Launch, receiver: Receiver, own_postgres: OwnPostgres, own_redis: OwnRedis
) -> None:
    """Sessions that are ended, servers that are killed, frozen and stopped, whatever periodic work is under way."""
    receiver.default(Answer(delay_s=0.05))
    madeira = launch({"a": {"url": receiver.url("/a")}}, database_url=own_postgres.url, redis_url=own_redis.url)
    madeira.api()
    madeira.worker(processes=2)
    scheduler = madeira.start("scheduler", ["periodiq", "-v", "madeira.actors"])
    madeira.start("asking", [sys.executable, "-c", ASKING])
    wait_until(lambda: madeira.value("SELECT count(*) FROM reconcile_run") > 1, what="the periodic work")

    for _ in range(5):
        with psycopg.connect(own_postgres.url, autocommit=True) as conn:
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        work(madeira)
    for server in (own_postgres, own_redis):
        for go, come in ((server.kill, server.start), (server.stop, server.start), (server.stall, server.resume)):
            go()
            threading_wait(AWAY_S)
            come()
            work(madeira)
    own_redis.kill()
    again = madeira.start("scheduler", ["periodiq", "madeira.actors"])
    wait_until(lambda: "broker.away" in again.tail(), what="the line of a scheduler that starts without Redis")
    own_redis.start()
    assert [process.popen.poll() for process in (scheduler, again)] == [None, None]
    assert [told for process in madeira.processes for told in tracebacks(process)] == []


def work(madeira: Madeira) -> None:
    """Wait until events are taken and delivered again."""
    wait_until(lambda: taken(madeira), 60, what="an event that is taken")
    unfinished = "SELECT seq FROM event WHERE status IN ('pending', 'delivering')"
    wait_until(lambda: rows(madeira, unfinished) == [], 60, what="the end of all events")


def taken(madeira: Madeira) -> bool:
    body = json.dumps({"event_id": f"e{time.time_ns()}", "event_type": "a.b", "payload": 1}).encode()
    return madeira.send(body).status_code == 202


def tracebacks(process: Process) -> list[str]:
    """The lines of a log that have one."""
    return [line for line in Path(process.log).read_text(errors="replace").splitlines() if "Traceback" in line]


@pytest.mark.long
def test_a_scheduler_that_met_no_redis_ticks_in_the_next_minute(launch: Launch, receiver: Receiver, own_redis: OwnRedis) -> None:
    """It says once that Redis is away, and goes on by itself."""
    madeira = launch({"a": {"url": receiver.url("/a")}}, redis_url=own_redis.url)
    own_redis.kill()
    scheduler = madeira.start("scheduler", ["periodiq", "madeira.actors"])
    wait_until(lambda: "broker.away" in scheduler.tail(), what="the line")
    own_redis.start()
    wait_until(lambda: b"m:reconcile:msgs" in madeira.redis.keys("*"), 75, what="the tick of the next minute")
    assert scheduler.tail().count("broker.away") == 1
    assert "broker.back" in scheduler.tail()
