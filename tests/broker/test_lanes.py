"""What holds a lane: a person, its breaker, a wish of its receiver; and how its lines take turns. One promise per test."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis

from madeira.broker.queues import DELIVER, Ensure, Finish, Queues
from tests.broker.conftest import Player, lane

#: Settings of a lane with a breaker that opens for half a second at first, and for a second at the longest.
BREAKER: dict[str, Any] = {"broken_s": 0.5, "broken_max_s": 1.0}

#: Settings of one that stays open for as long as a test takes.
LONG: dict[str, Any] = {"broken_s": 20.0, "broken_max_s": 60.0}

#: How a breaker is that has opened; on a busy machine its time may be over when it is asked.
OPEN = ("open", "half_open")


def ensure(queues: Queues, *numbers: int, of: str = "a", line: str = "", delay_s: float = 0.0) -> None:
    queues.ensure([Ensure(DELIVER, f"{n}:{n}:{of}", delay_s, line) for n in numbers])


def end(player: Player, key: str, verdict: Any, kind: Any = "f", *, refund: bool = False, patient_s: float = 0.0) -> None:
    """Finish a key with a verdict; nothing is taken."""
    _, token = player.hands[key]
    until = time.monotonic() + patient_s if patient_s else 0.0
    player.turn(room=0, finishes=[Finish(key, token, kind, 0.0, b"", refund, verdict, until)])


def call(player: Player, verdict: Any) -> str:
    """Take one, and come back with a verdict."""
    (key,) = player.take()
    end(player, key, verdict)
    return key


def breaker(queues: Queues, name: str = "a") -> str:
    (state,) = queues.lane_states([name])
    return state.breaker.state


def opened(queues: Queues, **settings: Any) -> Player:
    """A player whose lane's breaker has just opened; fifty keys wait."""
    queues.set_lanes([lane("a", **{**BREAKER, **settings})])
    ensure(queues, *range(1, 56))
    player = Player(queues, "p", threads=1000)
    for _ in range(5):
        call(player, "bad")
    assert breaker(queues) in OPEN
    assert not queues.opened()[0].has_succeeded
    return player


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


# -- the breaker ------------------------------------------------------------------------------------------------------


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


# -- lines ------------------------------------------------------------------------------------------------------------


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


# -- a long backlog ---------------------------------------------------------------------------------------------------


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
