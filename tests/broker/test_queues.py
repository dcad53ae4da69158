"""What the scripts promise, one promise per test."""

import itertools
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Finish, Queues
from madeira.errors import BrokerUnavailable
from madeira.records import Accepted
from madeira.states import EventStatus
from tests.broker.conftest import Player, lane
from tests.broker.keys import ensure, key, kinds


def test_a_key_that_is_ensured_twice_is_handed_out_once(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    assert ensure(queues, key(1)) == 1
    assert ensure(queues, key(1)) == 0
    player = Player(queues, "p")
    assert player.take(room=5) == [key(1)]
    assert ensure(queues, key(1)) == 0, "held is somewhere too"


def test_a_lane_hands_out_in_the_order_of_acceptance(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, *(key(n) for n in (9, 3, 100, 20)))
    assert Player(queues, "p").take(room=9) == [key(n) for n in (3, 9, 20, 100)]


def test_a_delayed_key_is_handed_out_when_it_is_due_whatever_is_due_later(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, *(key(n) for n in range(100, 200)), delay_s=600)
    ensure(queues, key(1), delay_s=0.2)
    player = Player(queues, "p")
    turn = player.turn()
    assert turn.grants == ()
    assert turn.next_s is not None
    assert 0 < turn.next_s <= 0.2
    assert player.take_soon() == [key(1)]


def test_ensure_brings_a_due_time_forward_but_never_back(queues: Queues) -> None:
    ensure(queues, key(1), delay_s=100)
    ensure(queues, key(1), delay_s=50)
    ensure(queues, key(1), delay_s=300)
    assert 45 < queues.where(DELIVER, [key(1)])[0].delay_s <= 50


def test_ensure_of_a_held_key_outlives_a_finish_that_forgets(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    ensure(queues, key(1))
    player.finish(key(1), "f")
    assert kinds(queues, key(1)) == ["waiting"]


def test_of_a_retry_and_a_note_the_earlier_one_counts(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    ensure(queues, key(1), delay_s=10)
    player.finish(key(1), "d", due=time.monotonic() + 60)
    place = queues.where(DELIVER, [key(1)])[0]
    assert place.kind == "delayed"
    assert place.delay_s <= 10


def test_a_finish_with_a_foreign_token_changes_nothing(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    Player(queues, "q").turn(room=0, finishes=[Finish(key(1), "q#1.1", "f")])
    assert kinds(queues, key(1)) == ["held"]


def test_a_retry_whose_key_is_nowhere_is_queued_all_the_same(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    redis.Redis.from_url(redis_url).delete("t:deliver:held")
    player.finish(key(1), "d", due=time.monotonic() + 60)
    place = queues.where(DELIVER, [key(1)])[0]
    assert place.kind == "delayed"
    assert 55 < place.delay_s <= 60


def test_without_a_verdict_a_key_comes_back_after_five_seconds_doubling_to_five_minutes(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    client = redis.Redis.from_url(redis_url)
    player = Player(queues, "p")
    delays = []
    ensure(queues, key(1))
    for _ in range(9):
        assert player.take() == [key(1)]
        player.finish(key(1), "s")
        delays.append(round(queues.where(DELIVER, [key(1)])[0].delay_s))
        client.zadd("t:deliver:delayed", {key(1): 1})
    assert delays == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_what_is_given_back_is_first_again_with_its_rate_token(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=1.0)])
    ensure(queues, key(1), key(2))
    player = Player(queues, "p")
    assert player.take() == [key(1)]
    assert player.finish(key(1), "b", room=1).grants[0].key == key(1)


def test_a_refused_claim_costs_no_rate_token(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=1.0)])
    ensure(queues, key(1), key(2))
    player = Player(queues, "p")
    assert player.take() == [key(1)]
    assert player.finish(key(1), "f", room=1, refund=True).grants[0].key == key(2)


def test_the_token_of_a_grant_before_the_last_one_is_gone_where_no_two_may_be_closer_than_the_pace(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=4.0)])
    ensure(queues, key(1), key(2), key(3))
    player = Player(queues, "p")
    assert player.take() == [key(1)]
    assert player.take_soon() == [key(2)]
    turn = player.finish(key(1), "b", room=1)
    assert turn.grants == (), "key 2 has just been granted"
    assert player.finish(key(2), "b", room=1).grants != (), "now nobody has"


def test_the_cap_counts_over_all_processes_and_a_finish_lets_the_next_one_go(queues: Queues) -> None:
    queues.set_lanes([lane("a", concurrency=2)])
    ensure(queues, *(key(n) for n in range(1, 6)))
    p, q = Player(queues, "p"), Player(queues, "q")
    assert p.take(room=5) == [key(1), key(2)]
    assert q.take(room=5) == []
    p.finish(key(1))
    assert q.take(room=5) == [key(3)]


def test_a_place_whose_holder_is_gone_is_free_when_its_lease_has_run_out(queues: Queues) -> None:
    queues.set_lanes([lane("a", concurrency=1, lease_s=0.15)])
    ensure(queues, key(1), key(2))
    assert Player(queues, "p").take() == [key(1)]
    q = Player(queues, "q")
    assert q.take_soon() == [key(2)]


@pytest.mark.alone
def test_the_rate_is_evenly_spaced_over_all_processes(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=50.0)])
    ensure(queues, *(key(n) for n in range(1, 100)))
    players = [Player(queues, "p", threads=1000), Player(queues, "q", threads=1000)]
    starts: list[float] = []
    begin = time.monotonic()
    while time.monotonic() < begin + 1.0:
        for player in players:
            starts += [time.monotonic() - begin] * len(player.take(room=5))
    assert 48 <= len(starts) <= 52
    for i in range(len(starts) - 2):
        assert starts[i + 2] - starts[i] > 0.019, "at most one gap is made up for"


@pytest.mark.alone
def test_a_slow_lane_never_makes_up_for_anything(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=5.0)])
    ensure(queues, *(key(n) for n in range(1, 6)))
    player = Player(queues, "p")
    times = []
    deadline = time.monotonic() + 5
    while len(times) < 5 and time.monotonic() < deadline:
        if player.take(room=5):
            times.append(time.monotonic())
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert all(gap >= 0.195 for gap in gaps), gaps


def test_a_limiter_key_with_an_absurd_value_heals_itself(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", rate=20.0, concurrency=1)])
    ensure(queues, key(1), key(2))
    client = redis.Redis.from_url(redis_url)
    client.set("t:lane:a:tat", "99999999999999")
    client.zadd("t:lane:a:places", {"nobody": 10**16})
    player = Player(queues, "p")
    assert player.take_soon() == [key(1)]


def test_a_lane_without_settings_hands_out_nothing_and_says_so(queues: Queues) -> None:
    ensure(queues, key(1))
    player = Player(queues, "p")
    turn = player.turn()
    assert (turn.grants, turn.unset) == ((), ("a",))
    queues.set_lanes([lane("a")])
    assert player.take() == [key(1)]


def test_newer_settings_replace_older_ones_and_count_at_once(queues: Queues) -> None:
    queues.set_lanes([lane("a", concurrency=1)])
    ensure(queues, key(1), key(2), key(3))
    player = Player(queues, "p")
    assert player.take(room=5) == [key(1)]
    queues.set_lanes([lane("a", concurrency=3, version=2)])
    queues.set_lanes([lane("a", concurrency=1, version=1)])
    assert player.take(room=5) == [key(2), key(3)]


def test_one_lane_gets_at_most_half_of_a_process_and_the_last_quarter_is_for_new_lanes(queues: Queues) -> None:
    queues.set_lanes([lane("a"), lane("b"), lane("c")])
    ensure(queues, *(key(n) for n in range(1, 31)))
    player = Player(queues, "p", threads=20)
    assert len(player.take(room=20)) == 10
    ensure(queues, *(key(n, "b") for n in range(31, 61)))
    assert len(player.take(room=10)) == 5, "until only a quarter is free"
    ensure(queues, *(key(n, "c") for n in range(61, 91)))
    assert player.take(room=5) == [key(61, "c")]


def test_lanes_are_served_in_turn(queues: Queues) -> None:
    queues.set_lanes([lane("a"), lane("b")])
    ensure(queues, *(key(n) for n in range(1, 4)), *(key(n, "b") for n in range(4, 7)))
    player = Player(queues, "p")
    order = []
    for _ in range(6):
        (got,) = player.take()
        order.append(got[-1])
        player.finish(got)
    assert order in (["a", "b"] * 3, ["b", "a"] * 3)


def test_an_idle_process_is_woken_by_what_comes(queues: Queues, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    Player(queues, "p").turn(ROUTE)
    queues.ensure([Ensure(ROUTE, "1")])
    woken = client.blpop(["t:wake:p"], timeout=2)
    assert woken is not None
    assert woken[1] == b"route"


def test_two_processes_that_cannot_take_a_lane_do_not_wake_each_other_for_ever(queues: Queues, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    queues.set_lanes([lane("a")])
    ensure(queues, *(key(n) for n in range(1, 50)))
    p, q = Player(queues, "p", threads=4), Player(queues, "q", threads=4)
    p.take(room=4), q.take(room=4)
    client.delete("t:wake:p", "t:wake:q")
    for _ in range(3):
        assert p.take(room=2) == q.take(room=2) == []
    assert client.llen("t:wake:p") + client.llen("t:wake:q") == 0


def test_unknown_tells_exactly_what_is_nowhere(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1), key(2))
    ensure(queues, key(3), delay_s=60)
    Player(queues, "p").take()
    asked = [(key(n), 60.0) for n in range(1, 6)]
    assert queues.unknown(DELIVER, asked) == {key(4), key(5)}


def test_forget_leaves_held_keys_to_their_holders(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1), key(2))
    ensure(queues, key(3), delay_s=60)
    Player(queues, "p").take()
    assert queues.forget(DELIVER, [key(1), key(2), key(3)]) == 2
    assert kinds(queues, key(1), key(2), key(3)) == ["held", "nowhere", "nowhere"]


def test_intake_marks_and_queues_in_one_step(queues: Queues, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    base = {"trace_id": "t", "status": EventStatus.PENDING, "created_at": None}
    queues.accept(
        [
            Accepted(seq=7, event_id="e7", source="s", **base),  # type: ignore[arg-type]
            Accepted(seq=8, event_id="e8", source="s", delay_s=60, **base),  # type: ignore[arg-type]
            Accepted(seq=6, event_id="e6", source="s", duplicate=True, **base),  # type: ignore[arg-type]
        ]
    )
    assert kinds(queues, "6", "7", "8", queue=ROUTE) == ["nowhere", "waiting", "delayed"]
    assert 86_000 < client.ttl("t:seen:s:e7") <= 86_400
    assert not client.exists("t:seen:s:e6")


def test_a_copy_put_into_a_lane_by_hand_while_the_key_is_held_has_no_effect(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    p = Player(queues, "p")
    p.take()
    redis.Redis.from_url(redis_url).zadd("t:deliver:lane:a", {key(1): 1})
    redis.Redis.from_url(redis_url).zadd("t:deliver:active", {"a": 1})
    assert Player(queues, "q").take(room=5) == []


def test_a_waiting_delivery_costs_little_memory(queues: Queues, redis_url: str) -> None:
    client = redis.Redis.from_url(redis_url)
    before = client.info("memory")["used_memory"]
    ensure(queues, *(key(n, "partner-ledger") for n in range(1_000_000, 1_020_000)))
    assert (client.info("memory")["used_memory"] - before) / 20_000 < 200


def test_a_connection_asks_whether_it_lives_before_a_network_forgets_it(queues: Queues) -> None:
    """Within half a minute, with whatever address it was made."""
    assert queues.ping()
    pool: Any = queues.client.connection_pool
    connection = pool.get_connection()
    try:
        at, every, count = (
            connection._sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert at + every * count < 30
    finally:
        pool.release(connection)


def test_errors_of_the_client_are_mapped(tmp_path: Path) -> None:
    queues = Queues(redis_url=f"unix://{tmp_path}/nobody", namespace="t", timeout_s=0.2)
    with pytest.raises(BrokerUnavailable, match="Redis did not run ensure"):
        ensure(queues, key(1))
    assert not queues.ping()
