"""What the scripts promise, one promise per test."""

import itertools
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Finish, Held, Queues
from madeira.errors import BrokerUnavailable
from madeira.records import Accepted
from madeira.states import EventStatus
from tests.broker.conftest import Player, lane


def key(n: int, name: str = "a") -> str:
    return f"{n}:{n}:{name}"


def ensure(queues: Queues, *keys: str, delay_s: float = 0.0) -> int:
    return queues.ensure([Ensure(DELIVER, k, delay_s) for k in keys])


def kinds(queues: Queues, *keys: str, queue: str = DELIVER) -> list[str]:
    return [place.kind for place in queues.where(queue, keys)]


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


def test_without_an_epoch_keyed_queues_hand_out_nothing(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    redis.Redis.from_url(redis_url).delete("t:epoch")
    turn = Player(queues, "p").turn()
    assert not turn.epoch
    assert turn.grants == ()


def test_of_two_rebuilds_only_the_later_one_makes_the_epoch(redis_url: str) -> None:
    queues = Queues(redis_url=redis_url, namespace="t")
    assert queues.rebuild_begin("first")
    assert queues.rebuild_begin("second")
    assert not queues.rebuild_hold("first", [(key(1), "pg:x", 30.0)])
    assert not queues.rebuild_commit("first")
    assert queues.rebuild_commit("second")
    assert not queues.rebuild_begin("third"), "there is an epoch"
    queues.close()


def test_places_of_calls_from_before_a_wipe_count_against_the_cap(redis_url: str) -> None:
    queues = Queues(redis_url=redis_url, namespace="t")
    queues.rebuild_begin("n")
    queues.rebuild_hold("n", [(key(1), "pg:x", 30.0)])
    queues.rebuild_commit("n")
    queues.set_lanes([lane("a", concurrency=1)])
    ensure(queues, key(1), key(2))
    assert kinds(queues, key(1), key(2)) == ["held", "waiting"]
    assert Player(queues, "p").take() == []
    queues.close()


def beat(queues: Queues, name: str, *held: Held, silence_s: float = 60.0) -> tuple[int, int, int, int]:
    return queues.beat(name, silence_s=silence_s, spread_s=0.0, queues=[ROUTE, DELIVER], held=held)


def held(player: Player, k: str, *, lease_s: float = 40.0, renew: bool = False) -> Held:
    queue, token = player.hands[k]
    return Held(queue, k, token, lease_s, renew)


def test_a_grant_whose_answer_was_lost_comes_back_after_two_beats(queues: Queues) -> None:
    queues.set_lanes([lane("a", concurrency=1)])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    assert beat(queues, "p")[2] == 0
    assert beat(queues, "p")[2] == 1
    assert kinds(queues, key(1)) == ["waiting"]
    assert Player(queues, "q").take() == [key(1)], "its place is free too"


def test_a_beat_puts_back_what_it_lists_and_redis_forgot(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", concurrency=1)])
    ensure(queues, key(1), key(2))
    player = Player(queues, "p")
    player.take()
    redis.Redis.from_url(redis_url).delete("t:deliver:held", "t:lane:a:places")
    ensure(queues, key(1))
    assert beat(queues, "p", held(player, key(1)))[1] == 1
    assert kinds(queues, key(1)) == ["held"]
    assert Player(queues, "q").take(room=5) == [], "its place counts again"


def frozen_through_a_rebuild(queues: Queues, redis_url: str) -> Player:
    """A process that holds the one place of a lane, and that was frozen while Redis was wiped and rebuilt."""
    settings = lane("a", concurrency=1)
    queues.set_lanes([settings])
    ensure(queues, key(1))
    player = Player(queues, "p")
    assert player.take() == [key(1)]
    redis.Redis.from_url(redis_url).flushall()
    assert queues.rebuild_begin("n")
    assert queues.rebuild_hold("n", [(key(1), "pg:claim", 30.0)])
    assert queues.rebuild_commit("n")
    queues.set_lanes([settings])
    ensure(queues, key(2))
    assert Player(queues, "q").take() == [], "its place counts"
    return player


def test_a_holder_that_comes_back_after_a_rebuild_has_its_key_and_its_place_again(queues: Queues, redis_url: str) -> None:
    player = frozen_through_a_rebuild(queues, redis_url)
    assert beat(queues, "p", held(player, key(1)))[1] == 1
    assert Player(queues, "q").take() == [], "it has one place, not none"
    player.finish(key(1))
    assert Player(queues, "q").take() == [key(2)], "nor two"


def test_a_verdict_ends_the_claim_that_a_rebuild_was_told_of(queues: Queues, redis_url: str) -> None:
    player = frozen_through_a_rebuild(queues, redis_url)
    player.finish(key(1), "d", due=time.monotonic() + 5)
    (place,) = queues.where(DELIVER, [key(1)])
    assert place.kind == "delayed"
    assert place.delay_s == pytest.approx(5, abs=0.5)
    assert Player(queues, "q").take() == [key(2)]


def test_a_refused_claim_leaves_the_place_of_the_claim_that_a_rebuild_was_told_of(queues: Queues, redis_url: str) -> None:
    player = frozen_through_a_rebuild(queues, redis_url)
    player.finish(key(1), "d", due=time.monotonic() + 5, refund=True)
    assert kinds(queues, key(1)) == ["held"]
    assert Player(queues, "q").take() == []


def test_the_list_of_places_is_made_again_from_what_is_held(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", concurrency=2), lane("b")])
    ensure(queues, key(1, "b"), *(key(n) for n in range(2, 6)))
    player = Player(queues, "p")
    assert set(player.take(room=9)) == {key(1, "b"), key(2), key(3)}
    redis.Redis.from_url(redis_url).delete("t:lane:a:places")
    assert queues.unknown(DELIVER, [(key(4), 0.0)]) == set()
    assert Player(queues, "q").take(room=9) == []
    player.finish(key(2))
    assert Player(queues, "q").take(room=9) == [key(4)]


def test_a_beat_leaves_a_key_to_another_holder(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    p, q = Player(queues, "p"), Player(queues, "q")
    p.take()
    redis.Redis.from_url(redis_url).delete("t:deliver:held")
    ensure(queues, key(1))
    assert q.take() == [key(1)]
    beat(queues, "p", held(p, key(1)))
    q.finish(key(1))
    assert kinds(queues, key(1)) == ["nowhere"]


def test_what_a_silent_process_held_is_taken_over_at_the_end_of_its_lease(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", lease_s=30.0)])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    beat(queues, "p", held(player, key(1)))
    redis.Redis.from_url(redis_url).zadd("t:procs", {"p": 1})
    assert beat(queues, "q")[3] == 1
    assert beat(queues, "q")[3] == 0, "twice changes nothing"
    place = queues.where(DELIVER, [key(1)])[0]
    assert place.kind == "delayed"
    assert 25 < place.delay_s <= 30


def test_a_marker_that_ran_out_is_taken_over_though_its_process_lives(queues: Queues) -> None:
    queues.set_lanes([lane("a", lease_s=0.0)])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    listed = held(player, key(1), lease_s=0.0)
    assert beat(queues, "p", listed)[3] == 1
    assert [g.losses for g in player.turn().grants] == [1]


def test_an_outcome_in_hand_keeps_its_marker(queues: Queues) -> None:
    queues.set_lanes([lane("a", lease_s=0.0)])
    ensure(queues, key(1))
    player = Player(queues, "p")
    player.take()
    assert beat(queues, "p", held(player, key(1), lease_s=30.0, renew=True))[3] == 0
    assert kinds(queues, key(1)) == ["held"]


def test_losing_the_list_of_processes_takes_nothing_from_the_living(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    Player(queues, "p").take()
    redis.Redis.from_url(redis_url).delete("t:procs")
    assert beat(queues, "q")[3] == 0


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


def test_the_index_of_lanes_is_made_again_from_what_waits(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    redis.Redis.from_url(redis_url).delete("t:deliver:active")
    player = Player(queues, "p")
    assert player.take() == []
    assert queues.unknown(DELIVER, [(key(1), 0.0)]) == set()
    assert player.take() == [key(1)]


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


@pytest.mark.parametrize("name", ["held", "delayed", "active", "idle", "stumbles", "losses", "lane:a"])
def test_a_structure_of_the_wrong_type_is_cleared_by_the_next_beat(queues: Queues, redis_url: str, name: str) -> None:
    queues.set_lanes([lane("a")])
    redis.Redis.from_url(redis_url).set(f"t:deliver:{name}", "junk")
    beat(queues, "p")
    assert queues.unknown(DELIVER, [(key(1), 0.0)]) == {key(1)}
    ensure(queues, key(1))
    assert Player(queues, "p").take() == [key(1)]
