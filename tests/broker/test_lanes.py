"""What holds a lane: a person, or a wish of its receiver. One promise per test."""

import time
from typing import Any

import pytest
import redis

from madeira.broker.queues import DELIVER, Queues
from tests.broker.conftest import Player, lane
from tests.broker.lanes import end, ensure

# -- a person ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["paused", "disabled"])
def test_nothing_goes_from_a_lane_that_is_held_and_all_of_it_in_order_when_it_is_let_go(queues: Queues, hold: Any) -> None:
    queues.set_lanes([lane("a"), lane("b")])
    ensure(queues, 3, 1, 2)
    ensure(queues, 4, of="b")
    queues.hold("a", 2, hold)
    player = Player(queues, "p")
    assert player.take(room=9) == ["4:4:b"]
    assert [(p.kind, p.limit) for p in queues.where(DELIVER, ["1:1:a"])] == [("waiting", hold)]
    queues.hold("a", 3, "")
    assert player.take(room=9) == ["1:1:a", "2:2:a", "3:3:a"]


def test_what_is_held_and_told_once_more_by_older_settings_stays_held(queues: Queues) -> None:
    """A process that has not heard of it yet writes its settings again; one that heard of something newer wins."""
    queues.set_lanes([lane("a")])
    ensure(queues, 1)
    player = Player(queues, "p")
    queues.hold("a", 3, "paused")
    queues.hold("a", 2, "")
    assert player.take() == [], "of two that come in the wrong order the later one counts"
    queues.set_lanes([lane("a", version=4)])
    queues.hold("a", 3, "paused")
    assert player.take() == ["1:1:a"]


def test_a_lane_without_settings_is_held_too_whoever_writes_them_meanwhile(queues: Queues) -> None:
    """A callback lane, and one of an endpoint that nobody has called yet."""
    queues.hold("a", 5, "paused")
    queues.hold("a", 4, "")
    ensure(queues, 1)
    ensure(queues, 2, of="a@host:8080")
    queues.set_lanes([lane("a", version=4), lane("a@host:8080", version=4)])
    player = Player(queues, "p")
    assert player.take(room=9) == []
    queues.set_lanes([lane("a", version=6), lane("a@host:8080", version=6)])
    assert sorted(player.take(room=9)) == ["1:1:a", "2:2:a@host:8080"]


def test_all_lanes_of_an_endpoint_are_held_at_once_and_those_of_its_namesakes_are_not(queues: Queues) -> None:
    names = ["cb@one.example", "cb@two.example:81", "cbx@one.example", "cbx"]
    queues.set_lanes([lane(name) for name in names])
    for n, name in enumerate(names, 1):
        ensure(queues, n, of=name)
    queues.hold("cb", 2, "paused")
    assert sorted(Player(queues, "p").take(room=9)) == ["3:3:cbx@one.example", "4:4:cbx"]


def test_a_lane_that_is_let_go_wakes_a_process_that_sleeps(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1)
    queues.hold("a", 2, "paused")
    assert Player(queues, "p").take() == []
    queues.hold("a", 3, "")
    assert redis.Redis.from_url(redis_url).lrange("t:wake:p", 0, -1) == [b"deliver"]


# -- a wish of the receiver -------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_receiver_that_asks_to_be_left_alone_is_and_the_later_of_two_wishes_counts(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1, 2, 3)
    player = Player(queues, "p")
    assert len(player.take(room=2)) == 2
    asked = time.monotonic()
    end(player, "1:1:a", "throttled", "d", patient_s=0.5)
    end(player, "2:2:a", "throttled", patient_s=0.1)
    (place,) = queues.where(DELIVER, ["3:3:a"])
    assert place.limit == "retry_after"
    assert 0.3 < place.delay_s <= 0.5
    player.take_soon()
    assert 0.49 < time.monotonic() - asked < 0.9


def test_a_receiver_is_left_alone_for_five_minutes_at_a_time(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1, 2)
    player = Player(queues, "p")
    player.take()
    end(player, "1:1:a", "throttled", patient_s=999_999.0)
    (place,) = queues.where(DELIVER, ["2:2:a"])
    assert 290 < place.delay_s <= 300
