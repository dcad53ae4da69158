"""What machines ask: alive, ready, and the numbers."""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from madeira.records import PlannedDelivery
from madeira.states import FailureClass
from madeira.store import routing
from madeira.store.migrate import migrate
from tests.api.serving import CONFIG, Api, event
from tests.system.harness import wait_until


def number(api: Api, name: str, **labels: str) -> float | None:
    """The value of one series, None when it is not on the page."""
    reply = api.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    wanted = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
    found = re.search(rf"^{name}{{{wanted}}} (\S+)$" if wanted else rf"^{name} (\S+)$", reply.body.decode(), re.MULTILINE)
    return float(found[1]) if found else None


def test_with_all_servers_there_it_is_ready(shared_api: Api) -> None:
    """Alive and ready, each told in JSON."""
    assert shared_api.get("/healthz").json == {"status": "ok"}
    assert shared_api.get("/readyz").json == {"status": "ok", "postgres": "ok", "redis": "ok"}


def test_the_counts_of_all_processes_are_one_count(api: Api) -> None:
    """Twenty scrapes tell the same sums, by outcome, whichever process answers; strangers make no series of their own."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: api.post(event(f"e{n}")), range(100)))
    for n in range(5):
        api.post(event(f"e{n}"))
        api.post(b"{")
        api.post(event("x"), {"X-Madeira-Source": f"stranger{n}"})
    api.post(event("e0", payload=2))
    for _ in range(20):
        assert number(api, "madeira_ingress_requests_total", outcome="accepted", source="shop") == 100
    assert number(api, "madeira_ingress_requests_total", outcome="duplicate", source="shop") == 5
    assert number(api, "madeira_ingress_requests_total", outcome="malformed", source="shop") == 5
    assert number(api, "madeira_ingress_requests_total", outcome="unauthorized", source="unknown") == 5
    assert number(api, "madeira_ingress_requests_total", outcome="conflict", source="shop") == 1
    assert number(api, "madeira_ingress_request_duration_seconds_count") == 116
    assert b"stranger" not in api.get("/metrics").body


@pytest.mark.long
def test_counts_survive_a_killed_process_and_a_reload(api: Api) -> None:
    """After kill -9 of a worker, a reload, and a torn file the page is there, and no count is lower."""
    for n in range(20):
        assert api.post(event(f"e{n}")).status == 202
    old = api.worker_pids
    os.kill(old[0], signal.SIGKILL)
    wait_until(lambda: len(api.worker_pids) == 2 and old[0] not in api.worker_pids, what="a new worker")
    assert number(api, "madeira_ingress_requests_total", outcome="accepted", source="shop") == 20
    before = api.worker_pids
    os.kill(api.pid, signal.SIGHUP)
    wait_until(lambda: len(api.worker_pids) == 2 and not set(before) & set(api.worker_pids), what="the reload", timeout=30)
    assert number(api, "madeira_ingress_requests_total", outcome="accepted", source="shop") == 20
    torn = Path(api.env["MADEIRA_DATA_DIR"]) / "metrics" / "api" / "counter_999999.db"
    torn.write_bytes(b"\xff" * 100)
    assert number(api, "madeira_ingress_requests_total", outcome="accepted", source="shop") == 20


@pytest.mark.long
def test_workers_that_come_and_go_leave_no_files_behind(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """Processes replaced every few requests: the count stays exact at every scrape, and the number of files is bounded."""
    often = serve(database_url, redis_url).start("--max-requests", "5")
    folder = Path(often.env["MADEIRA_DATA_DIR"]) / "metrics" / "api"
    seen: set[int] = set()
    accepted = 0
    while len(seen) < 12:
        assert often.post(event(f"e{accepted}")).status == 202
        accepted += 1
        seen.update(often.worker_pids)
    for _ in range(10):
        assert number(often, "madeira_ingress_requests_total", outcome="accepted", source="shop") == accepted
    assert len(list(folder.glob("*.db"))) <= 5 * 4


@pytest.mark.long
def test_a_new_start_begins_anew(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """The files of a former run do not pile up, nor do its counts."""
    api = serve(database_url, redis_url).start()
    assert api.post(event("one")).status == 202
    api.stop()
    api.start()
    assert number(api, "madeira_ingress_requests_total", outcome="accepted", source="shop") == 0


def test_gauges_tell_the_state_of_the_whole(api: Api) -> None:
    """Lengths of queues, dead letters and the age of what waits are asked for at the scrape, once, not per process."""
    for n in range(5):
        assert api.post(event(f"e{n}")).status == 202
    assert api.post(event("later", deliver_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)))).status == 202
    assert number(api, "madeira_queue_messages", queue="route", state="ready") == 5
    assert number(api, "madeira_queue_messages", queue="route", state="delayed") == 1
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        ((seq,),) = c.execute("SELECT seq FROM event WHERE event_id = 'e0'").fetchall()
        dead = PlannedDelivery("broken", "broken", (), FailureClass.TEMPLATE, "no such field")
        routing.route(c, [(seq, [dead, PlannedDelivery("sink", "sink", ("all",))])])
        c.execute("UPDATE event SET route_at = now() - interval '1 minute' WHERE event_id = 'e1'")
    assert number(api, "madeira_dead_letters", endpoint="broken") == 1
    assert number(api, "madeira_deliveries_waiting", endpoint="sink", retries="0") == 1
    first = number(api, "madeira_queue_oldest_age_seconds", queue="route")
    assert first is not None
    assert first >= 60
    wait_until(
        lambda: (number(api, "madeira_queue_oldest_age_seconds", queue="route") or 0) >= first + 0.5, what="the age to rise"
    )


@pytest.mark.long
def test_a_database_without_tables_is_told_with_its_remedy(
    serve: Callable[..., Api], empty_database_url: str, redis_url: str
) -> None:
    """Not ready, posts are 503 and not an error inside; with the tables it serves, without a new start."""
    api = serve(empty_database_url, redis_url, config=None).start()
    ready = api.get("/readyz")
    assert ready.status == 503
    assert "madeira migrate" in ready.json["postgres"]
    # What first appears as 1 is no increase to Prometheus.
    assert number(api, "madeira_ingress_requests_total", outcome="unavailable", source="unknown") == 0
    for reply in (api.post(event("early")), api.get("/v1/events/early", source="shop")):
        assert (reply.status, reply.headers["content-type"]) == (503, "application/problem+json")
        assert "madeira migrate" in reply.json["detail"]
    migrate(empty_database_url)
    assert api.get("/readyz").status == 200
    api.configure(CONFIG)
    wait_until(lambda: api.post(event("early")).status == 202, what="the rules to be read")
