"""The breaker of a lane: what opens it, whom it lets try, how it closes, and what makes it forget. One promise per test."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from madeira.broker.queues import DELIVER, Finish, Queues
from tests.broker.conftest import Player, lane
from tests.broker.lanes import BREAKER, LONG, OPEN, breaker, call, end, ensure, opened


def test_five_failures_in_a_row_open_it_and_a_success_between_them_does_not(queues: Queues) -> None:
    queues.set_lanes([lane("a", **BREAKER)])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p")
    for verdict in ("bad", "bad", "bad", "bad", "good", "bad", "bad", "bad", "bad"):
        call(player, verdict)
    assert breaker(queues) == "closed"


@pytest.mark.parametrize(
    ("verdicts", "opens"),
    [
        (["bad", "bad", "good"] * 3 + ["bad"], True),  # 7 of 10
        (["bad", "good"] * 10, False),
        (["bad", "bad", "good"] * 3, False),  # nine verdicts are not enough
        (["timeout", "timeout", "good"] * 2 + ["timeout"], True),  # 10 of 12
        (["good"] * 30 + ["bad", "bad", "bad", "bad", "good"] * 3, False),  # what went well counts too
    ],
)
def test_it_opens_when_seven_of_ten_verdicts_of_a_minute_are_failures_and_a_timeout_counts_double(
    queues: Queues, verdicts: list[str], opens: bool
) -> None:
    queues.set_lanes([lane("a", **LONG)])
    ensure(queues, *range(1, len(verdicts) + 2))
    player = Player(queues, "p")
    for verdict in verdicts:
        call(player, verdict)
    assert (breaker(queues) in OPEN) is opens
    assert (player.take() == []) is opens


@pytest.mark.parametrize("verdict", ["", "throttled"])
def test_what_is_no_failure_of_the_receiver_does_not_open_it(queues: Queues, verdict: str) -> None:
    queues.set_lanes([lane("a", **BREAKER)])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p")
    for _ in range(20):
        call(player, verdict)
    assert breaker(queues) == "closed"


@pytest.mark.parametrize(("kind", "refund"), [("b", False), ("d", True), ("f", True)])
def test_what_was_not_called_feeds_nothing(queues: Queues, kind: str, refund: bool) -> None:
    queues.set_lanes([lane("a", **BREAKER)])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p")
    for _ in range(10):
        (key,) = player.take()
        end(player, key, "bad", kind, refund=refund)
    assert breaker(queues) == "closed"


def test_a_finish_that_is_sent_twice_is_heard_once(queues: Queues) -> None:
    queues.set_lanes([lane("a", **BREAKER)])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p")
    (key,) = player.take()
    token = player.hands[key][1]
    for _ in range(9):
        player.turn(room=0, finishes=[Finish(key, token, "f", verdict="bad")])
    assert breaker(queues) == "closed"


def test_without_a_breaker_failures_hold_nothing(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p")
    for _ in range(20):
        call(player, "timeout")


@pytest.mark.long
@pytest.mark.alone
def test_an_open_one_lets_one_try_and_stays_open_twice_as_long_each_time_that_fails(queues: Queues) -> None:
    player = opened(queues)
    held = []
    for _ in range(3):
        began = time.monotonic()
        (probe,) = player.take_soon()
        held.append(time.monotonic() - began)
        assert player.take(room=9) == [], "one, and not more"
        assert breaker(queues) == "half_open"
        end(player, probe, "bad")
        assert breaker(queues) == "open"
    assert 0.45 < held[0] < 0.8
    assert 0.95 < held[1] < 1.3
    assert 0.95 < held[2] < 1.3, "not longer than the longest"


def test_while_it_is_open_what_waits_says_so_and_until_when(queues: Queues) -> None:
    player = opened(queues, **LONG)
    turn = player.turn()
    assert turn.grants == ()
    (place,) = queues.where(DELIVER, ["50:50:a"])
    assert (place.kind, place.limit) == ("waiting", "breaker")
    assert 15 < place.delay_s <= 20
    (state,) = queues.lane_states(["a"])
    assert (state.name, state.breaker.reason, state.fresh) == ("open", "5 failures in a row", 50)


def test_a_success_closes_it_step_by_step(queues: Queues) -> None:
    player = opened(queues, concurrency=6)
    end(player, player.take_soon()[0], "good")
    steps = []
    while breaker(queues) == "ramp":
        keys = player.take(room=20)
        steps.append(len(keys))
        for key in keys:
            end(player, key, "good")
        (seen,) = queues.opened()
        assert (seen.is_open, seen.has_succeeded) == (breaker(queues) != "closed", True)
    assert steps == [1, 2, 4]
    assert len(player.take(room=20)) == 6


def test_failures_while_it_closes_open_it_again_for_twice_as_long(queues: Queues, redis_url: str) -> None:
    player = opened(queues)
    end(player, player.take_soon()[0], "good")
    for _ in range(5):
        call(player, "bad")
    assert breaker(queues) in OPEN
    assert float(redis.Redis.from_url(redis_url).hget("t:lane:a:breaker", "hold")) == 1000


@pytest.mark.parametrize(("kind", "refund"), [("b", False), ("d", True), ("s", False)])
def test_a_probe_that_was_not_called_leaves_its_place_to_the_next(queues: Queues, kind: str, refund: bool) -> None:
    player = opened(queues)
    (probe,) = player.take_soon()
    end(player, probe, "", kind, refund=refund)
    assert len(player.take(room=9)) == 1


@pytest.mark.alone
def test_a_probe_whose_worker_died_opens_it_again_and_another_tries_later(queues: Queues) -> None:
    opened(queues, lease_s=0.4)
    dead = Player(queues, "q", threads=1000)
    dead.take_soon()
    began = time.monotonic()
    living = Player(queues, "r", threads=1000)
    (probe,) = living.take_soon()
    assert 0.4 + 0.5 - 0.05 < time.monotonic() - began < 1.4
    end(living, probe, "good")
    assert breaker(queues) == "ramp"


def test_what_was_under_way_when_it_opened_says_nothing_new(queues: Queues) -> None:
    queues.set_lanes([lane("a", **LONG)])
    ensure(queues, *range(1, 30))
    player = Player(queues, "p", threads=1000)
    keys = player.take(room=10)
    for key in keys[:5]:
        end(player, key, "bad")
    for key, verdict in zip(keys[5:], ["good", "bad", "timeout", "", "throttled"], strict=True):
        end(player, key, verdict)
    (state,) = queues.lane_states(["a"])
    assert state.breaker.state == "open"
    assert 15 < state.breaker.left_s <= 20


@pytest.mark.parametrize("name", ["breaker", "verdicts"])
@pytest.mark.parametrize("how", ["deleted", "persisted", "of another type", "nonsense"])
def test_a_breaker_whose_memory_is_lost_or_spoilt_is_closed_and_works_again(
    queues: Queues, redis_url: str, name: str, how: str
) -> None:
    player = opened(queues, **LONG)
    client = redis.Redis.from_url(redis_url)
    key = f"t:lane:a:{name}"
    spoil: dict[str, Callable[[], Any]] = {
        "deleted": lambda: client.delete(key),
        "persisted": lambda: client.persist(key),
        "of another type": lambda: (client.delete(key), client.set(key, "7", px=50_000)),
        "nonsense": lambda: (
            client.hset(key, mapping={"till": "never", "row": "x", "n1": "y", "f1": "z"}) and client.pexpire(key, 60_000)
        ),
    }
    spoil[how]()
    queues.look_again()
    if name == "breaker":
        assert len(player.take()) == 1, "it is closed"
        player.finish(next(iter(player.hands)))
    else:
        client.delete("t:lane:a:breaker")
        queues.look_again()
    for _ in range(5):
        call(player, "bad")
    assert breaker(queues) == "open"


# -- another receiver, or another word of a person --------------------------------------------------------------------


def wished(queues: Queues) -> Player:
    """A player whose lane has an open breaker, and a receiver that asked to be left alone."""
    player = opened(queues, **LONG)
    queues.client.set("t:lane:a:until", f"{time.time() * 1000 + 60_000:.3f}", px=60_000)
    (state,) = queues.lane_states(["a"])
    assert state.retry_after_s > 50
    return player


def test_what_a_person_lets_go_begins_with_a_closed_breaker_and_without_a_wish(queues: Queues) -> None:
    player = wished(queues)
    queues.hold("a", 2, "disabled")
    assert breaker(queues) in OPEN, "holding it forgets nothing"
    queues.hold("a", 3, "")
    (state,) = queues.lane_states(["a"])
    assert (state.name, state.retry_after_s) == ("active", 0.0)
    assert len(player.take(room=9)) == 9
    call(player, "bad")
    assert breaker(queues) == "closed", "nor does it remember the failures from before"


def test_a_callback_lane_in_which_nothing_waits_is_let_go_by_its_settings(queues: Queues) -> None:
    """Nobody knows its name when its endpoint is let go; its settings come before anything goes."""
    name = "cb@host:80"
    queues.set_lanes([lane(name, **LONG, era="one")])
    ensure(queues, *range(1, 6), of=name)
    player = Player(queues, "p", threads=1000)
    for _ in range(5):
        call(player, "bad")
    assert breaker(queues, name) == "open"
    assert player.take() == []
    queues.hold("cb", 2, "")
    queues.set_lanes([lane(name, **LONG, era="two", version=2)])
    ensure(queues, 7, of=name)
    assert player.take() == [f"7:7:{name}"]


def test_a_changed_receiver_begins_with_a_closed_breaker_and_the_same_one_keeps_it(queues: Queues, redis_url: str) -> None:
    """Also when the settings were forgotten meanwhile, as those of a lane are in which nothing waits for a minute."""
    player = wished(queues)
    queues.set_lanes([lane("a", **LONG, version=2)])
    assert breaker(queues) in OPEN
    redis.Redis.from_url(redis_url).delete("t:lane:a:cfg")
    queues.set_lanes([lane("a", **LONG, version=3, era="moved")])
    (state,) = queues.lane_states(["a"])
    assert (state.name, state.retry_after_s) == ("active", 0.0)
    assert len(player.take(room=9)) == 9


def test_a_breaker_is_open_no_longer_than_the_settings_allow_now(queues: Queues) -> None:
    opened(queues, **LONG)
    queues.set_lanes([lane("a", version=2, broken_s=1.0, broken_max_s=2.0)])
    (state,) = queues.lane_states(["a"])
    assert state.breaker.left_s <= 2.0
    (place,) = queues.where(DELIVER, ["50:50:a"])
    assert place.delay_s <= 2.0
