"""A source with a limit gets in as much as that allows, over all processes, and is told when to come again."""

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from madeira.api.limits import MOST_AHEAD, Limits
from madeira.api.problems import Problem
from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable
from madeira.records import Source
from tests.api.serving import Api, event, rows, signed
from tests.servers import OwnRedis


class Clock:
    """Monotonic seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def queues(redis_url: str) -> Iterator[Queues]:
    queues = Queues(redis_url=redis_url, namespace="m")
    yield queues
    queues.close()


def limits(queues: Any, *, rate: float | None, burst: int = 1, clock: Any = time.monotonic) -> Limits:
    return Limits(sources=lambda: {"shop": Source("shop", (), rate, burst)}, queues=queues, clock=clock)


def refused(limits: Limits, events: int = 1) -> int:
    """Seconds that the refusal names."""
    with pytest.raises(Problem) as problem:
        limits.take("shop", events)
    assert (problem.value.status_code, problem.value.name) == (429, "over-limit")
    return int(problem.value.headers["Retry-After"])  # type: ignore[index,call-overload]


def detail(limits: Limits, events: int = 1) -> str:
    """What the refusal says."""
    with pytest.raises(Problem) as problem:
        limits.take("shop", events)
    return str(problem.value.description)


class Away:
    """Where Redis should be and is not: every call fails as the client's do."""

    calls = 0

    def run(self, *_: Any) -> Any:
        self.calls += 1
        raise BrokerUnavailable("away")


@pytest.mark.parametrize("where", ["redis", "alone"])
def test_the_burst_gets_in_at_once_and_what_is_above_is_told_how_long_to_wait(queues: Queues, where: str) -> None:
    """With one per hundred seconds and a burst of three: three, then a hundred seconds of waiting."""
    limit = limits(queues if where == "redis" else Away(), rate=0.01, burst=3)
    for _ in range(3):
        limit.take("shop")
    assert 99 <= refused(limit) <= 100
    assert 199 <= refused(limit, 2) <= 200


@pytest.mark.parametrize("where", ["redis", "alone"])
def test_a_refusal_says_when_a_batch_larger_than_the_burst_is_why(queues: Queues, where: str) -> None:
    """Both before it is let in and while it is paid for; a plain refusal says nothing of batches."""
    limit = limits(queues if where == "redis" else Away(), rate=0.1, burst=5)
    limit.take("shop", 5)
    assert "batch" not in detail(limit)
    assert "batch" not in detail(limit, 5)
    assert "a batch larger than the burst, this one of 6, is let in when all of the burst is saved up" in detail(limit, 6)
    queues.client.flushdb()
    limit = limits(queues if where == "redis" else Away(), rate=0.1, burst=5)
    limit.take("shop", 6)
    assert "more than the burst was let in at once, as a batch, and is paid for first" in detail(limit)
    assert "paid for first" in detail(limit, 5)


@pytest.mark.parametrize("where", ["redis", "alone"])
def test_a_batch_is_let_in_as_a_whole_or_not_at_all(queues: Queues, where: str) -> None:
    """One that does not fit takes nothing; one larger than the burst waits for a full bucket and is paid for afterwards."""
    limit = limits(queues if where == "redis" else Away(), rate=0.1, burst=5)
    limit.take("shop", 3)
    assert 9 <= refused(limit, 3) <= 10
    limit.take("shop", 2)
    assert 49 <= refused(limit, 100) <= 50
    fresh = limits(queues, rate=0.1, burst=5)
    queues.client.flushall()
    fresh.take("shop", 100)
    assert 959 <= refused(fresh) <= 960


def test_alone_the_rate_is_kept_on_the_clock_of_the_process() -> None:
    """Ten a second with a burst of two, asked every ten milliseconds for ten seconds: 102 or a little less."""
    clock = Clock()
    limit = limits(Away(), rate=10, burst=2, clock=clock)
    passed = 0
    for _ in range(1000):
        clock.now += 0.01
        try:
            limit.take("shop")
        except Problem:
            continue
        passed += 1
    assert 100 <= passed <= 102


@pytest.mark.alone
def test_the_rate_is_kept_over_all_who_ask(queues: Queues, redis_url: str) -> None:
    """Three processes' worth of limits on one Redis: together what one may let in."""
    others = [Queues(redis_url=redis_url, namespace="m") for _ in range(2)]
    asked = [limits(q, rate=50, burst=10) for q in (queues, *others)]
    began = time.monotonic()
    deadline = began + 1.0

    def ask(limit: Limits) -> int:
        passed = 0
        while time.monotonic() < deadline:
            try:
                limit.take("shop")
            except Problem:
                continue
            passed += 1
        return passed

    with ThreadPoolExecutor(3) as pool:
        passed = sum(pool.map(ask, asked))
    took = time.monotonic() - began
    assert 50 * 0.9 <= passed <= 10 + 50 * took + 1
    for other in others:
        other.close()


def test_a_source_without_a_limit_is_not_asked_for(queues: Queues) -> None:
    """No call to Redis, whatever comes."""
    away = Away()
    limits(away, rate=None).take("shop", 10_000)
    limits(away, rate=1).take("unknown", 10_000)
    limits(away, rate=1).take("shop", 0)
    assert away.calls == 0


def test_what_redis_remembers_goes_by_itself_and_what_cannot_be_true_does_not_count(queues: Queues) -> None:
    """The key expires when the bucket is full again; rubbish in it is no limit; a limit that was raised counts at once."""
    limit = limits(queues, rate=10, burst=2)
    limit.take("shop")
    assert queues.client.keys("*") == [b"m:limit:shop"]
    assert 1000 < queues.client.pttl("m:limit:shop") <= 1101
    for rubbish in ("x", "-5", "1e99", "nan"):
        queues.client.set("m:limit:shop", rubbish)
        limit.take("shop")
    queues.client.delete("m:limit:shop")
    queues.client.lpush("m:limit:shop", "x")
    limit.take("shop")
    assert queues.client.type("m:limit:shop") == b"string"
    queues.client.delete("m:limit:shop")
    limits(queues, rate=0.001).take("shop", 2)
    slow = refused(limits(queues, rate=0.001))
    assert slow > 1000
    assert refused(limits(queues, rate=1000)) <= MOST_AHEAD / 1000


def test_while_redis_is_away_it_is_not_asked_by_every_request() -> None:
    """After a failure the process limits by itself for a second, then asks again."""
    clock, away = Clock(), Away()
    limit = limits(away, rate=1000, burst=1000, clock=clock)
    for _ in range(5):
        limit.take("shop")
    assert away.calls == 1
    clock.now += 1.01
    limit.take("shop")
    assert away.calls == 2


LIMITED = '\n[[source]]\nname = "limited"\nsecrets = ["s-limited"]\nrate = 0.01\nburst = 4\n'


@pytest.fixture
def limited(serve: Callable[..., Api], database_url: str, redis_url: str) -> Api:
    """An API of two processes with a source that may send four events and then one per hundred seconds."""
    api = serve(database_url, redis_url)
    api.configure(api.config + LIMITED)
    return api.start()


def test_over_its_limit_a_source_gets_429_in_every_process_and_others_get_in(limited: Api) -> None:
    """Of twenty posts at once four are accepted; the rest are told to wait; the other source is not held up."""
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda n: limited.post(event(f"l{n}"), source="limited", secret="s-limited"), range(20)))
    assert Counter(r.status for r in replies) == {202: 4, 429: 16}
    over = next(r for r in replies if r.status == 429)
    assert over.json["type"] == "urn:madeira:problem:over-limit"
    assert 1 <= int(over.headers["retry-after"]) <= 100
    assert limited.post(event("shop")).status == 202
    assert rows(limited.env["MADEIRA_DATABASE_URL"]) == 5
    shown = limited.get("/metrics").body.decode()
    assert 'madeira_ingress_requests_total{outcome="limited",source="limited"} 16.0' in shown


def test_a_batch_costs_its_lines(limited: Api) -> None:
    """Empty lines cost nothing; what does not fit is refused as a whole."""

    def send(n: int) -> Any:
        body = b"\n\n".join(event(uuid.uuid4().hex) for _ in range(n))
        headers = signed(body, source="limited", secret="s-limited") | {"Content-Type": "application/x-ndjson"}
        return limited.request("POST", "/v1/events/batch", body, headers)

    assert send(3).json["accepted"] == 3
    assert send(2).status == 429
    assert send(1).json["accepted"] == 1
    assert rows(limited.env["MADEIRA_DATABASE_URL"]) == 4


def test_who_cannot_sign_uses_up_nobodys_limit(limited: Api) -> None:
    """Fifty posts with a wrong signature leave the source its whole burst."""
    for n in range(50):
        assert limited.post(event(f"w{n}"), source="limited", secret="wrong").status == 401
    assert [limited.post(event(f"r{n}"), source="limited", secret="s-limited").status for n in range(4)] == [202] * 4
    client = redis.Redis.from_url(limited.env["MADEIRA_REDIS_URL"])
    assert [key for key in client.keys("*limit*") if b"limited" not in key] == []


@pytest.mark.long
def test_the_limit_holds_in_each_process_while_redis_is_away(
    serve: Callable[..., Api], database_url: str, own_redis: OwnRedis
) -> None:
    """Two processes by themselves let in at most twice the burst, and at least once."""
    api = serve(database_url, own_redis.url)
    api.configure(api.config + LIMITED)
    api.start()
    own_redis.kill()
    statuses = Counter(api.post(event(f"a{n}"), source="limited", secret="s-limited").status for n in range(30))
    assert 4 <= statuses[202] <= 8
    assert statuses[202] + statuses[429] == 30
