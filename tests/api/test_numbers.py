"""The API's page of numbers: who may read it, and what of it is left when a part cannot be told."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import falcon
import psycopg
import pytest
import redis
from falcon import testing
from structlog.testing import capture_logs

from madeira import metrics_page
from madeira.api import numbers, problems
from madeira.api.numbers import Numbers
from madeira.broker.queues import KEYED, ORDINARY, Queues
from madeira.embedded import free_port
from madeira.store.database import Database
from madeira.store.replica import Lists

Client = Callable[..., testing.TestClient]

#: What the page asks each store for, and what it asks both for.
FIGURES = {
    "redis": {"queue_messages", "dramatiq_dead_messages", "workers"},
    "postgres": {"queue_oldest_age_seconds", "reconcile_last_success_timestamp_seconds", "dead_letters", "deliveries_waiting"},
    "both": {"lane_state"},
}


def told(page: str, metric: str) -> dict[str, float]:
    """The series of a metric with one label, by its value."""
    return {value: float(number) for value, number in re.findall(rf'^madeira_{metric}{{\w+="(\w+)"}} (\S+)$', page, re.MULTILINE)}


def lacks(page: str) -> set[str]:
    """The figures that a page says it does not have; it has all others."""
    missing = told(page, "numbers_missing")
    assert set(missing) == set.union(*FIGURES.values())
    assert set(missing.values()) <= {0.0, 1.0}
    for name, value in missing.items():
        assert (f"# TYPE madeira_{name} gauge" in page) == (value == 0), name
    return {name for name, value in missing.items() if value}


@pytest.fixture
def client(database_url: str, redis_url: str) -> Iterator[Client]:
    """Makes something that asks the page, in the process of the test."""
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    with contextlib.ExitStack() as stack:

        def make(token: str = "", **urls: str) -> testing.TestClient:
            url = {"postgres": database_url, "redis": redis_url} | urls
            queues = stack.enter_context(contextlib.closing(Queues(redis_url=url["redis"], namespace="m", timeout_s=2.0)))
            database = stack.enter_context(contextlib.closing(Database(url=url["postgres"], application="tests", pool_max=2)))
            database.open()
            lists = Lists(primary=database)
            numbers = Numbers(database=database, lists=lists, queues=queues, silence_s=60.0, token=token)
            app = falcon.App()
            problems.install(app)
            app.add_route("/metrics", numbers)
            return testing.TestClient(app)

        yield make


def test_the_state_of_the_whole_is_told(client: Client, database_url: str, redis_url: str) -> None:
    """Of every queue, of Dramatiq's dead ones, of living workers, and of reconcile once it has run."""
    page = client().simulate_get("/metrics").text
    for queue in (*KEYED, *ORDINARY):
        assert f'madeira_queue_messages{{queue="{queue}",state="ready"}} 0.0' in page
        assert f'madeira_dramatiq_dead_messages{{queue="{queue}"}} 0.0' in page
    assert "\nmadeira_workers 0.0" in page
    assert "\nmadeira_reconcile_last_success_timestamp_seconds " not in page
    assert "madeira_replica" not in page
    assert told(page, "store_up") == {"postgres": 1, "redis": 1}
    assert lacks(page) == set()
    with psycopg.connect(database_url, autocommit=True) as c:
        c.execute("INSERT INTO reconcile_run (finished_at, duration_s, holder, counts) VALUES (to_timestamp(1e9), 1, 'h', '{}')")
    with redis.Redis.from_url(redis_url) as r:
        seconds, _ = r.time()
        r.zadd("m:procs", {"alive": seconds * 1000, "gone": (seconds - 120) * 1000})
    page = client().simulate_get("/metrics").text
    assert "\nmadeira_workers 1.0" in page
    assert "\nmadeira_reconcile_last_success_timestamp_seconds 1e+09" in page


@pytest.mark.parametrize("away", ["postgres", "redis"])
def test_a_store_that_is_away_is_named_and_what_only_it_knows_is_left_out(client: Client, away: str) -> None:
    """What the other one knows stands there as ever."""
    nobody = {"postgres": "postgresql", "redis": "redis"}[away] + f"://127.0.0.1:{free_port()}/0"
    with capture_logs() as lines:
        page = client(**{away: nobody}).simulate_get("/metrics")
    assert page.status_code == 200
    # It is asked once: whoever waits for it at each figure comes too late for Prometheus.
    assert [(line["event"], line["part"]) for line in lines if line["event"].startswith("metrics.")] == [
        ("metrics.numbers_missing", away)
    ]
    assert told(page.text, "store_up") == {"postgres": away != "postgres", "redis": away != "redis"}
    assert lacks(page.text) == FIGURES[away] | FIGURES["both"]


def test_a_store_that_fails_in_another_way_than_by_an_outage_is_named_too(client: Client, database_url: str) -> None:
    """Here the list of what was applied to the tables cannot be read; the page is served."""
    api = client()
    assert told(api.simulate_get("/metrics").text, "store_up") == {"postgres": 1, "redis": 1}
    with psycopg.connect(database_url) as c:
        c.execute("ALTER TABLE schema_migration RENAME COLUMN name TO spoilt")
    page = api.simulate_get("/metrics")
    assert page.status_code == 200
    assert told(page.text, "store_up") == {"postgres": 0, "redis": 1}


def test_a_gauge_that_takes_too_long_spoils_no_other(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statement is cut off; those before it and behind it are told."""

    def slow(conn: psycopg.Connection[Any]) -> dict[tuple[str, ...], float]:
        conn.execute("SET LOCAL statement_timeout = 20")
        conn.execute("SELECT pg_sleep(5)")
        return {}

    (first, count), *others = numbers._GAUGES
    monkeypatch.setattr(numbers, "_GAUGES", ((first, count), (others[0][0], slow), *others[1:]))
    page = client().simulate_get("/metrics")
    assert page.status_code == 200
    assert 'madeira_queue_oldest_age_seconds{queue="route"} 0.0' in page.text
    assert lacks(page.text) == {"reconcile_last_success_timestamp_seconds"}
    assert told(page.text, "store_up") == {"postgres": 1, "redis": 1}


def test_whatever_is_wrong_with_one_part_the_page_is_served(client: Client, redis_url: str) -> None:
    """A key of another type, as somebody's hand leaves it, costs what depends on it and no more: workers are counted."""
    with redis.Redis.from_url(redis_url) as r:
        r.set("m:deliver:active", "nonsense")
    page = client().simulate_get("/metrics")
    assert page.status_code == 200
    assert lacks(page.text) == {"queue_messages", "dramatiq_dead_messages", "lane_state"}
    assert told(page.text, "store_up") == {"postgres": 1, "redis": 1}
    assert "# TYPE madeira_ingress_requests_total counter" in page.text


@pytest.mark.parametrize(
    ("given", "status"),
    [(None, 401), ("Bearer", 401), ("Bearer wrong", 401), ("Basic right", 401), ("Bearer right", 200), ("bearer  right ", 200)],
)
def test_with_a_token_only_whoever_has_it_sees_the_page(client: Client, given: str | None, status: int) -> None:
    """And the refusal is a problem document like all others."""
    headers = {"Authorization": given} if given else {}
    reply = client("right").simulate_get("/metrics", headers=headers)
    assert reply.status_code == status
    assert ("madeira_queue_messages" in reply.text) == (status == 200)
    if status == 401:
        assert reply.headers["content-type"] == "application/problem+json"


def test_head_gets_the_headers_of_get(client: Client) -> None:
    """Whether it may see the page or not; the length may differ, since numbers go on."""
    asked = client("right")
    for headers in ({}, {"Authorization": "Bearer right"}):
        got, told = (asked.simulate_request(method, "/metrics", headers=headers) for method in ("GET", "HEAD"))
        assert (told.status_code, [*told.headers], told.content) == (got.status_code, [*got.headers], b"")
        assert int(got.headers["content-length"]) == len(got.content) > 0
        assert int(told.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("given", "seen"), [("", False), ("Bearer wrong", False), ("Bearer rïght", False), ("Bearer right", True)]
)
def test_the_other_pages_ask_for_the_same_token(given: str, seen: bool) -> None:
    """Those of workers and scheduler."""
    assert metrics_page.is_allowed(given, "right") is seen
    assert metrics_page.is_allowed(given, "")
