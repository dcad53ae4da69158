"""What a process or Redis loses comes back: the epoch, what is held, the lists; one promise per test."""

import time

import pytest
import redis

from madeira.broker.queues import DELIVER, Queues
from tests.broker.conftest import Player, lane
from tests.broker.keys import beat, ensure, held, key, kinds


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


def test_the_index_of_lanes_is_made_again_from_what_waits(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, key(1))
    redis.Redis.from_url(redis_url).delete("t:deliver:active")
    player = Player(queues, "p")
    assert player.take() == []
    assert queues.unknown(DELIVER, [(key(1), 0.0)]) == set()
    assert player.take() == [key(1)]


@pytest.mark.parametrize("name", ["held", "delayed", "active", "idle", "stumbles", "losses", "lane:a"])
def test_a_structure_of_the_wrong_type_is_cleared_by_the_next_beat(queues: Queues, redis_url: str, name: str) -> None:
    queues.set_lanes([lane("a")])
    redis.Redis.from_url(redis_url).set(f"t:deliver:{name}", "junk")
    beat(queues, "p")
    assert queues.unknown(DELIVER, [(key(1), 0.0)]) == {key(1)}
    ensure(queues, key(1))
    assert Player(queues, "p").take() == [key(1)]
