"""What limits remember in Redis: how long, what of it is believed, and from when a pace counts."""

import time

import pytest
import redis

from madeira.broker.queues import DELIVER, Ensure, Finish, Held, Queues
from madeira.lanes import gap_ms
from tests.broker.conftest import Player, lane


def queue(queues: Queues, *numbers: int, of: str = "a") -> None:
    queues.ensure([Ensure(DELIVER, f"{n}:{n}:{of}") for n in numbers])


def test_the_next_grant_of_a_slow_lane_counts_from_the_beginning_of_the_call(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=5.0)])
    queue(queues, 1, 2)
    player = Player(queues, "p")
    player.take_soon()
    granted = time.monotonic()
    while time.monotonic() < granted + 0.15:
        pass
    called = time.monotonic()
    queues.start("a", player.hands["1:1:a"][1])
    player.take_soon()
    assert time.monotonic() - called >= gap_ms(5.0) / 1000


def test_the_beginning_of_a_call_with_another_grant_than_the_last_changes_nothing(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", rate=5.0)])
    queue(queues, 1)
    Player(queues, "p").take()
    client = redis.Redis.from_url(redis_url)
    before = client.get("t:lane:a:tat")
    queues.start("a", "somebody else's")
    queues.start("never seen", "x")
    assert client.get("t:lane:a:tat") == before


def test_everything_that_limits_remember_has_a_time_to_live(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", rate=5.0)])
    queue(queues, 1)
    player = Player(queues, "p")
    player.take()
    client = redis.Redis.from_url(redis_url)
    lives = {key.decode(): client.pttl(key) for key in client.scan_iter("t:lane:*")}
    assert set(lives) == {"t:lane:a:cfg", "t:lane:a:tat", "t:lane:a:places", "t:lane:a:era"}
    assert min(lives.values()) > 0
    assert lives["t:lane:a:cfg"] <= 60_000
    client.delete("t:lane:a:places")
    held = Held(DELIVER, "1:1:a", player.hands["1:1:a"][1], 40.0, False)
    queues.beat("p", silence_s=60, spread_s=0, queues=[DELIVER], held=[held])
    assert client.pttl("t:lane:a:places") > 0, "a heartbeat puts it back with one"


@pytest.mark.parametrize("spoil", ["persist", "strange"])
def test_settings_that_would_last_for_ever_are_not_believed_and_can_be_replaced(
    queues: Queues, redis_url: str, spoil: str
) -> None:
    queues.set_lanes([lane("a", version=9)])
    client = redis.Redis.from_url(redis_url)
    if spoil == "persist":
        client.persist("t:lane:a:cfg")
    else:
        client.set("t:lane:a:cfg", "7")
    queue(queues, 1)
    player = Player(queues, "p")
    assert player.turn().unset == ("a",)
    queues.set_lanes([lane("a", version=1)])
    assert player.take() == ["1:1:a"]


def test_a_key_of_another_type_where_a_limit_remembers_stops_no_other_lane(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", rate=50.0), lane("b")])
    queue(queues, 1)
    player = Player(queues, "p")
    player.take()
    queue(queues, 2)
    queue(queues, 3, of="b")
    client = redis.Redis.from_url(redis_url)
    for name in ("tat", "places"):
        client.delete(f"t:lane:a:{name}")
        client.rpush(f"t:lane:a:{name}", "x")
    _, token = player.hands["1:1:a"]
    turn = player.turn(room=5, finishes=[Finish("1:1:a", token, "f")])
    assert "3:3:b" in [grant.key for grant in turn.grants]
    if "2:2:a" not in player.hands:
        player.take_soon()
    assert "2:2:a" in player.hands


def test_what_is_given_back_after_its_lanes_settings_were_forgotten_goes_again_at_once(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a", rate=0.01)])
    queue(queues, 1)
    player = Player(queues, "p")
    assert player.take() == ["1:1:a"]
    redis.Redis.from_url(redis_url).delete("t:lane:a:cfg")
    player.finish("1:1:a", "b")
    assert queues.where(DELIVER, ["1:1:a"])[0].limit == ""
    queues.set_lanes([lane("a", rate=0.01)])
    assert player.take() == ["1:1:a"]


def test_what_waits_says_for_which_limit(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=0.1), lane("b", concurrency=1), lane("c")])
    for name in "abc":
        queue(queues, 1, 2, of=name)
    player = Player(queues, "p", threads=3)
    assert len(player.take(room=3)) == 3
    places = queues.where(DELIVER, ["2:2:a", "2:2:b", "2:2:c", "1:1:a", "9:9:a"])
    assert [(place.kind, place.limit) for place in places] == [
        ("waiting", "rate"),
        ("waiting", "cap"),
        ("waiting", ""),
        ("held", ""),
        ("nowhere", ""),
    ]
    assert 9 < places[0].delay_s <= 10.1


def test_after_a_change_each_lane_that_waits_is_looked_at(queues: Queues, redis_url: str) -> None:
    """A lane that would be looked at in a minute and a half asks for its new settings now."""
    queues.set_lanes([lane("a", rate=0.01)])
    queue(queues, 1, 2)
    player = Player(queues, "p")
    assert player.take(room=2) == ["1:1:a"]
    redis.Redis.from_url(redis_url).delete("t:lane:a:cfg")
    assert player.turn().unset == ()
    queues.look_again()
    assert player.turn().unset == ("a",)
