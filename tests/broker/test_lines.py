"""The lines of a lane: how they take turns, what waits in which, and a long backlog keeps its order. One promise per test."""

from collections import Counter

import pytest
import redis

from madeira.broker.queues import DELIVER, Ensure, Queues
from tests.broker.conftest import Player, lane
from tests.broker.lanes import end, ensure


def lines_of(keys: list[str]) -> list[str]:
    return ["fresh" if int(k.split(":")[0]) < 100 else "retry" if int(k.split(":")[0]) < 200 else "replay" for k in keys]


def test_three_lines_are_served_four_to_two_to_one_each_in_the_order_of_acceptance(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, *range(250, 200, -1), line="replay")
    ensure(queues, *range(150, 100, -1), line="retry")
    ensure(queues, *range(50, 0, -1), line="fresh")
    player = Player(queues, "p", threads=1000)
    order = [key for _ in range(14) for key in player.take(room=5)]
    assert Counter(lines_of(order)) == {"fresh": 40, "retry": 20, "replay": 10}
    for name in ("fresh", "retry", "replay"):
        numbers = [int(k.split(":")[0]) for k in order if lines_of([k]) == [name]]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("missing", "shares"), [("fresh", {"retry": 20, "replay": 10}), ("retry", {"fresh": 24, "replay": 6})], ids=["fresh", "retry"]
)
def test_a_line_in_which_nothing_waits_leaves_its_turns_to_the_others(
    queues: Queues, missing: str, shares: dict[str, int]
) -> None:
    queues.set_lanes([lane("a")])
    for start, name in ((0, "fresh"), (100, "retry"), (200, "replay")):
        if name != missing:
            ensure(queues, *range(start + 1, start + 50), line=name)
    player = Player(queues, "p", threads=1000)
    assert Counter(lines_of([key for _ in range(30) for key in player.take()])) == shares


def test_a_key_that_failed_waits_in_the_line_of_the_retries_also_after_its_delay_and_a_takeover(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1)
    player = Player(queues, "p")
    player.take()
    end(player, "1:1:a", "bad", "d")
    ensure(queues, 2)
    (first, second) = queues.where(DELIVER, ["1:1:a", "2:2:a"])
    assert (first.line, first.ahead, second.line, second.ahead) == ("retry", 0, "fresh", 0)
    assert sorted(player.take(room=2)) == ["1:1:a", "2:2:a"]
    player.finish("1:1:a", "b")
    assert queues.where(DELIVER, ["1:1:a"])[0].line == "retry", "given back, to where it was"
    player.take()
    end(player, "1:1:a", "bad", "s")
    assert queues.where(DELIVER, ["1:1:a"])[0].kind == "delayed"
    ensure(queues, 1)
    assert queues.where(DELIVER, ["1:1:a"])[0].line == "retry"


def test_what_follows_a_finish_waits_in_the_line_that_is_told_with_it(queues: Queues) -> None:
    """The next delivery of an ordering key may have failed or been replayed before its turn came."""
    queues.set_lanes([lane("a")])
    player = Player(queues, "p")
    player.turn(room=0, follow=[Ensure(DELIVER, "1:1:a", 0.0, "retry"), Ensure(DELIVER, "2:2:a", 0.0, "replay")])
    player.turn(room=0, follow=[Ensure(DELIVER, "3:3:a")])
    assert [place.line for place in queues.where(DELIVER, ["1:1:a", "2:2:a", "3:3:a"])] == ["retry", "replay", "fresh"]


def test_what_is_kept_goes_back_to_its_place_and_its_line(queues: Queues) -> None:
    queues.set_lanes([lane("a", rate=50.0)])
    ensure(queues, 1, 2)
    player = Player(queues, "p")
    player.take()
    end(player, "1:1:a", "good", "k")
    (place,) = queues.where(DELIVER, ["1:1:a"])
    assert (place.kind, place.line, place.ahead) == ("waiting", "fresh", 0)
    assert player.take_soon() == ["1:1:a"]


def test_nothing_is_remembered_of_a_key_that_is_gone(queues: Queues, redis_url: str) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1, 2, line="retry")
    player = Player(queues, "p")
    player.take()
    end(player, "1:1:a", "good")
    queues.forget(DELIVER, ["2:2:a"])
    assert redis.Redis.from_url(redis_url).hlen("t:deliver:lines") == 0


def test_a_replay_that_meets_a_finishing_worker_waits_in_the_line_of_the_replays(queues: Queues) -> None:
    queues.set_lanes([lane("a")])
    ensure(queues, 1)
    player = Player(queues, "p")
    player.take()
    ensure(queues, 1, line="replay")
    end(player, "1:1:a", "good")
    (place,) = queues.where(DELIVER, ["1:1:a"])
    assert (place.kind, place.line) == ("waiting", "replay")


@pytest.mark.long
@pytest.mark.parametrize("line", ["fresh", "retry"])
def test_a_hundred_thousand_that_wait_cost_less_than_300_bytes_each_and_go_in_exact_order(
    queues: Queues, redis_url: str, line: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    queues.set_lanes([lane("partner-ledger.example", concurrency=10**6)])
    before = int(client.info("memory")["used_memory"])
    base = 10**9
    for start in range(0, 100_000, 500):
        numbers = [base + (7919 * n) % 100_000 for n in range(start, start + 500)]
        ensure(queues, *numbers, of="partner-ledger.example", line=line)
    each = (int(client.info("memory")["used_memory"]) - before) / 100_000
    print(f"{each:.0f} bytes each")
    assert each < 300
    player = Player(queues, "p", threads=10**6)
    taken: list[int] = []
    while len(taken) < 5_000:
        taken += [int(key.split(":")[0]) for key in player.take(room=500)]
    assert taken == list(range(base, base + 5_000))
