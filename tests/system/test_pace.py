"""Rate and cap hold over all processes and all ways to a receiver; waiting for them costs nothing; they heal and can be changed.

Whatever is measured is measured at the receiver, with the beginning of a call from its worker where that is what counts. Lanes do
not touch each other, so those that take their time take it together.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import redis

from tests.receiver import Answer, Call, Gate, Receiver
from tests.system.bulk import Site, site
from tests.system.harness import toml, wait_until
from tests.system.states import most_at_once

#: What is measured here is time.
pytestmark = pytest.mark.alone

#: Deliveries per second of the lane that is watched closely, the most that a sliding second may see, and the least.
RATE = 30
MOST = 31
LEAST = 28

#: Seconds within which a changed limit counts.
CHANGE_S = 2.0

#: Seconds between two calls of the lane where every kind of call is mixed.
GAP_S = 1.25

#: Lanes whose limits are changed.
CHANGED = ("faster", "slower", "wider", "narrower")

#: What is written over every number that a limiter remembers, by the name of the lane that is spoilt; None: another type of key.
SPOILT: dict[str, str | None] = {"huge": "1e14", "endless": "inf", "garbage": "nan", "foreign": None}


def endpoints(receiver: Receiver) -> dict[str, dict[str, Any]]:
    def at(name: str, **limits: Any) -> dict[str, Any]:
        return {"url": receiver.url(f"/{name}"), **limits}

    return {
        "warm": at("warm"),
        "brisk": at("brisk", rate=RATE, concurrency=2),
        "single": at("single", rate=1, retry={"max_attempts": 1}),
        "mixed": at("mixed", rate=1 / GAP_S, retry={"max_attempts": 2, "initial": 0.1, "max": 0.1}),
        "faster": at("faster", rate=0.02),
        "slower": at("slower", rate=50),
        "wider": at("wider", concurrency=1),
        "narrower": at("narrower", concurrency=4),
        **{name: at(name, rate=2, concurrency=2) for name in SPOILT},
    }


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, postgres_url: str, template_database: str, shared_redis_url: str
) -> Iterator[Site]:
    with site(
        folder=tmp_path_factory.mktemp("pace"),
        postgres_url=postgres_url,
        template_database=template_database,
        redis_url=shared_redis_url,
        endpoints=endpoints,
        threads=16,
        # Whatever heals or changes does so without its help.
        env={"MADEIRA_RECONCILE_S": "60"},
    ) as shared:
        # A process's first calls take longer than all others.
        shared.bulk.post(40, "warm.x")
        shared.receiver.wait_for(40, 20, path="/warm")
        yield shared


def gaps(calls: list[Call]) -> list[float]:
    return [later.at - sooner.at for sooner, later in pairwise(calls)]


def gaps_from_the_beginning(shared: Site, calls: list[Call]) -> list[float]:
    """Seconds from the beginning of each call, as its worker logged it, to the arrival of the next one.

    The pace of a slow lane counts from there. What a call needs to arrive on a busy machine is nobody's gap: it would seem
    shorter by that.
    """
    began = {
        (row["event_id"], row["attempt"]): row["started_at"].timestamp()
        for row in shared.madeira.rows(
            "SELECT e.event_id, l.attempt, l.started_at FROM delivery_log l JOIN delivery d ON d.id = l.delivery_id "
            "JOIN event e ON e.seq = d.event_seq"
        )
    }
    begun = [began[call.json()["event_id"], int(call.headers["x-madeira-attempt"])] for call in calls]
    return [later.wall - sooner for sooner, later in zip(begun, calls[1:], strict=False)]


# -- rate and cap ---------------------------------------------------------------------------------------------------


def test_two_processes_keep_one_rate_and_one_cap_and_use_them(shared: Site) -> None:
    """Never three calls at once, never 32 within a second, and at least 28 in each second in which there is work."""
    shared.receiver.answer("/brisk", Answer(delay_s=0.04))
    shared.bulk.post(4 * RATE + 5, "brisk.x")
    calls = shared.receiver.wait_for(4 * RATE + 5, 20, path="/brisk")
    shared.bulk.wait_done("brisk")

    assert most_at_once(shared.receiver.calls_to("/brisk")) == 2
    starts = [call.at - calls[0].at for call in calls]
    assert min(starts[i + MOST] - starts[i] for i in range(len(starts) - MOST)) >= 1.0
    per_second = [sum(second <= start < second + 1 for start in starts) for second in range(int(starts[-1]))]
    assert len(per_second) >= 4
    assert min(per_second) >= LEAST, per_second
    workers = shared.madeira.value(
        "SELECT count(DISTINCT l.worker) FROM delivery_log l JOIN delivery d ON d.id = l.delivery_id WHERE d.endpoint = 'brisk'"
    )
    assert workers == 2, "both processes took part"


# -- slow lanes -----------------------------------------------------------------------------------------------------


@dataclass
class Slow:
    """What was seen while the slow lanes ran, all at the same time."""

    #: An event that waits behind others, as the API shows it.
    waiting: dict[str, Any] = field(default_factory=dict)
    single: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    #: Time (monotonic) at which the lanes were spoilt.
    spoilt_at: float = 0.0


@pytest.fixture(scope="module")
def slow(shared: Site) -> Slow:
    """Runs the slow lanes to their end."""
    seen = Slow()
    madeira, receiver = shared.madeira, shared.receiver
    receiver.queue("/mixed", Answer(status=503))
    seen.single = [madeira.post("single.x") for _ in range(6)]
    seen.mixed = [madeira.post("mixed.x") for _ in range(4)]
    for name in SPOILT:
        shared.bulk.post(8, f"{name}.x")
    receiver.wait_for(1, path="/single")
    receiver.wait_for(1, path="/mixed")
    seen.waiting = shown(shared, seen.single[-1])

    forgotten = madeira.delivery(seen.mixed[-1])
    key = f"{forgotten['id']}:{forgotten['event_seq']}:mixed"
    assert shared.redis.zrem("m:deliver:lane:mixed", key) == 1
    reconcile = madeira.start("reconcile", ["madeira", "reconcile"], {"MADEIRA_RECONCILE_S": "0.2"})

    for name in SPOILT:
        receiver.wait_for(2, path=f"/{name}")
    seen.spoilt_at = time.monotonic()
    for name, value in SPOILT.items():
        spoil(shared.redis, name, value)
    shared.bulk.wait_done("single", "mixed", *SPOILT)
    assert reconcile.popen.wait(20) == 0
    assert "delivery_not_queued: 1" in reconcile.tail()
    return seen


def shown(shared: Site, event_id: str) -> dict[str, Any]:
    answer = shared.madeira.http.get(f"/v1/events/{event_id}", headers=shared.madeira.sign(b""))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def spoil(client: "redis.Redis", lane: str, value: str | None) -> None:
    """Overwrite everything that the limiters of a lane remember, and let it never expire."""
    keys = [key.decode() for key in client.scan_iter(f"m:lane:{lane}:*")]
    assert len(keys) == 4, keys
    for key in keys:
        kind = client.type(key)
        # At once: else a key that is mended in between would lose the time to live that it was given.
        with client.pipeline() as p:
            if value is None:
                p.delete(key)
                p.rpush(key, "x")
            elif kind == b"string":
                p.set(key, value)
            elif kind == b"hash":
                p.hset(key, mapping=dict.fromkeys(client.hkeys(key), value))
            else:
                members = [*client.zrange(key, 0, -1), *(f"nobody-{n}" for n in range(9))]
                p.zadd(key, dict.fromkeys(members, "inf" if value == "nan" else value))
            p.persist(key)
            p.execute()


def test_waiting_for_the_rate_uses_up_no_attempt_and_reads_as_waiting(shared: Site, slow: Slow) -> None:
    """One attempt is all that each has: each has it, a second apart."""
    assert slow.waiting["status"] == "delivering"
    (delivery,) = slow.waiting["deliveries"]
    assert (delivery["status"], delivery["attempt"], delivery["attempts"]) == ("pending", 0, [])
    assert (delivery["waits"]["where"], delivery["waits"]["for"]) == ("waiting", "rate")
    assert delivery["waits"]["ahead"] >= 3

    rows = shared.madeira.rows(
        "SELECT e.status, d.attempt, d.failures, d.lost, e.retry_count, (SELECT count(*) FROM delivery_log l WHERE "
        "l.delivery_id = d.id) AS log FROM event e JOIN delivery d ON d.event_seq = e.seq WHERE e.event_id = ANY(%s)",
        slow.single,
    )
    assert [tuple(row.values()) for row in rows] == [("succeeded", 1, 0, 0, 0, 1)] * 6
    calls = shared.receiver.calls_to("/single")
    first, *rest = [call.json()["event_id"] for call in calls]
    assert rest == [event for event in slow.single if event != first], "what waited went in the order of acceptance"
    assert min(gaps_from_the_beginning(shared, calls)) >= 1.0, "never two within a second"


def test_first_calls_retries_and_what_reconcile_queued_again_share_one_rate(shared: Site, slow: Slow) -> None:
    calls = shared.receiver.calls_to("/mixed")
    assert sorted(len(shared.madeira.attempts(event)) for event in slow.mixed) == [1, 1, 1, 2]
    assert len(calls) == 5
    assert min(gaps_from_the_beginning(shared, calls)) >= GAP_S


@pytest.mark.parametrize("lane", SPOILT)
def test_a_limiter_whose_memory_is_spoilt_heals_and_lets_nothing_through_meanwhile(shared: Site, slow: Slow, lane: str) -> None:
    calls = shared.receiver.calls_to(f"/{lane}")
    assert len(calls) == 8
    assert min(gaps(calls)) >= 0.4, "none at once"
    assert max(gaps(calls)) <= 2.0, "bounded"
    assert [key for key in shared.redis.scan_iter(f"m:lane:{lane}:*") if shared.redis.pttl(key) == -1] == []


# -- changed limits -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_changed_limit_counts_at_once_for_what_waits(shared: Site) -> None:
    """Rates and caps, up and down, all in one new version of the file."""
    madeira, receiver = shared.madeira, shared.receiver
    gate = Gate()
    receiver.answer("/wider", Answer(hold=gate))
    receiver.answer("/narrower", Answer(delay_s=0.05))
    for name, count in (("faster", 20), ("slower", 400), ("wider", 4), ("narrower", 400)):
        shared.bulk.post(count, f"{name}.x")
    for name in CHANGED:
        receiver.wait_for(1, path=f"/{name}")
    wait_until(lambda: most_at_once(receiver.calls_to("/narrower")) == 4, what="four calls at once")
    waiting = {name: receiver.count(f"/{name}") for name in ("faster", "wider")}
    assert waiting == {"faster": 1, "wider": 1}

    changed = endpoints(receiver)
    changed["faster"]["rate"] = 100
    changed["slower"]["rate"] = 0.5
    changed["wider"]["concurrency"] = 4
    changed["narrower"]["concurrency"] = 1
    madeira.configure(toml(changed))
    at = time.monotonic()

    try:
        receiver.wait_for(20, CHANGE_S + 0.5, path="/faster")
        receiver.wait_until(lambda: receiver.count("/wider") == 4, CHANGE_S, what="the wider cap")
        wait_until(lambda: time.monotonic() > at + CHANGE_S + 2.5)
        late = {name: [call for call in receiver.calls_to(f"/{name}") if call.at > at + CHANGE_S] for name in CHANGED}
        assert len(late["slower"]) <= 2
        assert most_at_once(late["narrower"]) == 1
    finally:
        gate.set()
        for name in CHANGED:
            shared.bulk.call_off(name)
