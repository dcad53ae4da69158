"""What is answered, and how soon, while Redis or Postgres is away, frozen, or comes back."""

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import redis

from tests.api.serving import Api, Reply, event, rows
from tests.servers import OwnPostgres, OwnRedis
from tests.system.harness import wait_until

#: What an answer may take with Redis away, in seconds, as the promise says.
REDIS_AWAY_S = 0.3
POSTGRES_AWAY_S = 2.0


def post_all(api: Api, names: list[str], parallel: int = 20) -> list[Reply]:
    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(lambda name: api.post(event(name)), names))


@pytest.fixture
def redis_api(serve: Callable[..., Api], database_url: str, own_redis: OwnRedis) -> Api:
    """An API with a Redis of its own, warm."""
    api = serve(database_url, own_redis.url).start()
    assert {r.status for r in post_all(api, [f"warm{n}" for n in range(40)])} == {202}
    return api


@pytest.mark.alone
@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.long) for how in ("stop", "kill")), "stall"])
def test_without_redis_events_are_accepted_at_once(redis_api: Api, own_redis: OwnRedis, how: str) -> None:
    """Redis stopped, killed or frozen: 202 within 300 ms, the second post is a duplicate, and queueing resumes after."""
    getattr(own_redis, how)()
    replies = [redis_api.post(event(f"away{n}")) for n in range(40)]
    replies += post_all(redis_api, [f"crowd{n}" for n in range(40)], parallel=8)
    assert {r.status for r in replies} == {202}
    slowest = max(r.duration_s for r in replies)
    assert slowest < REDIS_AWAY_S, f"the slowest took {slowest:.3f} s"
    again = redis_api.post(event("away0"))
    assert (again.status, again.json["duplicate"]) == (200, True)
    if how == "stall":
        own_redis.resume()
    else:
        own_redis.start()
    client = redis.Redis.from_url(own_redis.url)
    wait_until(lambda: _is_queued_again(redis_api, client), what="an event to be queued again")
    assert rows(redis_api.env["MADEIRA_DATABASE_URL"]) > 120


def _is_queued_again(api: Api, client: "redis.Redis[bytes]") -> bool:
    name = f"back{os.urandom(4).hex()}"
    assert api.post(event(name)).status == 202
    return bool(client.exists(*_mark_names(client, name))) if _mark_names(client, name) else False


def _mark_names(client: "redis.Redis[bytes]", name: str) -> list[bytes]:
    return [key for key in client.scan_iter("*", count=1000) if name.encode() in key]


def test_a_worker_killed_between_commit_and_queueing_loses_nothing(redis_api: Api, own_redis: OwnRedis) -> None:
    """Killed after the commit: the row is there for reconcile, and the sender's next try is told that it is known."""
    own_redis.stall()
    database = redis_api.env["MADEIRA_DATABASE_URL"]
    before = rows(database)
    outcome: list[int | str] = []
    body = event("cut-off")
    thread = threading.Thread(target=lambda: _note(outcome, lambda: redis_api.post(body).status))
    thread.start()
    wait_until(lambda: rows(database) > before, what="the commit")
    for pid in redis_api.worker_pids:
        os.kill(pid, signal.SIGKILL)
    thread.join(20)
    own_redis.resume()
    wait_until(lambda: len(redis_api.worker_pids) == 2, what="new workers")
    again = redis_api.post(body)
    assert (again.status, again.json["duplicate"]) == (200, True)
    with psycopg.connect(database) as c:
        assert c.execute("SELECT status, routed_at FROM event WHERE event_id = 'cut-off'").fetchall() == [("pending", None)]


def _note(outcome: list[int | str], act: Callable[[], int]) -> None:
    try:
        outcome.append(act())
    except OSError as e:
        outcome.append(type(e).__name__)


@pytest.mark.alone
@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.long), "stall"])
def test_without_postgres_nothing_is_promised(
    serve: Callable[..., Api], own_postgres: OwnPostgres, redis_url: str, how: str
) -> None:
    """Postgres killed or frozen: 503 with Retry-After within 2 s, also when all wait; then it recovers by itself."""
    api = serve(own_postgres.url, redis_url).start()
    assert {r.status for r in post_all(api, [f"warm{n}" for n in range(40)])} == {202}
    getattr(own_postgres, how)()
    replies = post_all(api, [f"away{n}" for n in range(60)], parallel=20)
    slowest = max(r.duration_s for r in replies)
    assert slowest < POSTGRES_AWAY_S, f"the slowest post took {slowest:.3f} s"
    looks = [api.get("/v1/events/warm0?source=shop", admin=True) for _ in range(2)]
    slowest = max(r.duration_s for r in looks)
    assert slowest < POSTGRES_AWAY_S, f"the slowest look took {slowest:.3f} s"
    replies += looks
    assert {r.status for r in replies} == {503}
    assert {r.headers["retry-after"].isdigit() for r in replies} == {True}
    assert {r.headers["content-type"] for r in replies} == {"application/problem+json"}
    ready = api.get("/readyz")
    assert (ready.status, ready.json["postgres"], ready.duration_s < 3) == (503, "unavailable", True)
    assert api.get("/healthz").status == 200
    metrics = api.get("/metrics")
    assert metrics.status == 200
    assert b'madeira_ingress_requests_total{outcome="unavailable",source="shop"} 60.0' in metrics.body
    if how == "stall":
        own_postgres.resume()
    else:
        own_postgres.start()
    # Each process finds out by itself: many posts at once meet all of them, where one after the other may always meet the same.
    bursts = itertools.count()

    def is_used() -> bool:
        names = [f"back{next(bursts)}-{n}" for n in range(40)]
        return {r.status for r in post_all(api, names)} == {202}

    wait_until(is_used, what="Postgres to be used again", timeout=15)
    assert Counter(r.status for r in post_all(api, [f"after{n}" for n in range(40)]))[202] == 40
    assert api.get("/readyz").status == 200


@pytest.mark.long
def test_a_restart_of_postgres_costs_no_restart_of_ours(
    serve: Callable[..., Api], own_postgres: OwnPostgres, redis_url: str
) -> None:
    """Restarted, or all connections ended: what was answered 2xx is there, and fifty posts right after it all pass."""
    api = serve(own_postgres.url, redis_url).start()
    names = [f"before{n}" for n in range(40)]
    assert {r.status for r in post_all(api, names)} == {202}
    pids = api.worker_pids
    for turn in ("restart", "terminate"):
        if turn == "restart":
            own_postgres.stop()
            own_postgres.start()
        else:
            with psycopg.connect(own_postgres.url, autocommit=True) as c:
                c.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        wanted = [f"{turn}{n}" for n in range(50)]
        replies = post_all(api, wanted)
        # A group that met the dead connection is told 503: whether it took effect is unknown to it.
        assert set(Counter(r.status for r in replies)) <= {202, 503}
        failed = [name for name, r in zip(wanted, replies, strict=True) if r.status == 503]
        assert len(failed) <= 20
        assert {r.status for r in post_all(api, wanted)} <= {200, 202}
        assert [r.status for r in (api.get(f"/v1/events/{name}?source=shop", admin=True) for name in names[:8])] == [200] * 8
    assert api.worker_pids == pids
    assert rows(own_postgres.url) == 140


@pytest.mark.long
def test_preloaded_workers_have_pools_of_their_own(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """Loaded before the fork, four workers: 200 parallel posts, reads among them, and not one error."""
    api = serve(database_url, redis_url, MADEIRA_PROCESSES="4").start("--preload")

    def post_and_read(n: int) -> tuple[int, int]:
        posted = api.post(event(f"e{n}"))
        return posted.status, api.get(f"/v1/events/e{n}?source=shop", admin=n % 2 == 0, source="shop").status

    with ThreadPoolExecutor(200) as pool:
        assert Counter(pool.map(post_and_read, range(200))) == {(202, 200): 200}
    assert rows(database_url) == 200
    assert "another command is already in progress" not in api.log.read_text()


def test_a_frozen_redis_does_not_hold_up_what_looks(redis_api: Api, own_redis: OwnRedis) -> None:
    """With Redis frozen an event is shown without its place, readiness is degraded, metrics go on, all within bounds."""
    own_redis.stall()
    shown = redis_api.get("/v1/events/warm0?source=shop", admin=True)
    assert (shown.status, shown.json["waits"]) == (200, {"where": "unknown"})
    ready = redis_api.get("/readyz")
    assert (ready.status, ready.json) == (200, {"status": "degraded", "postgres": "ok", "redis": "unavailable"})
    numbers = redis_api.get("/metrics")
    assert (numbers.status, b"madeira_queue_messages" in numbers.body) == (200, False)
    assert max(shown.duration_s, ready.duration_s, numbers.duration_s) < 3
