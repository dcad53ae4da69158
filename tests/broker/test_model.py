"""Whatever is done to the scripts in whatever order, they do what a model of twenty lines says.

The model knows per key where it is and who holds it; the machine plays three processes that take, finish, lose answers,
finish again what is not theirs any more, fall silent and come back, while keys are ensured and forgotten. After each
step every key is in exactly one place, the one that the model says; no lane is over its cap, none over its rate, and
each line of a lane hands out in the order of acceptance, and in its turn. A lane that is held hands out nothing; one whose
breaker is open neither, until its time, and then one. At the end everything can be taken and finished: nothing waits for ever.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from madeira.broker.queues import DELIVER, ROUTE, Ensure, Finish, Held, Queues
from madeira.lanes import LaneSettings
from tests.broker.conftest import Player, lane

#: Longer than any run of the machine, in seconds.
FAR: Final = 600.0

#: Milliseconds between two grants of the lane `slow`, which never makes up for any.
GAP_MS: Final = 40.0

CAP: Final = 2

#: The lane `frail` has a breaker that stays open for this long, in milliseconds: longer than any run, unless it is let go.
BROKEN_MS: Final = 900_000

KEYS: Final = {
    DELIVER: [
        f"{n}:{n}:{name}"
        for n, name in enumerate(("free", "cap", "slow", "cap", "frail", "slow", "cap", "slow", "frail", "frail"), start=1)
    ],
    ROUTE: ["21"],
}


ALL: Final = [(queue, key) for queue, keys in KEYS.items() for key in keys]

lines = st.sampled_from(["", "fresh", "retry", "replay"])
verdicts = st.sampled_from(["", "good", "bad", "bad", "bad", "timeout", "throttled"])
names = st.sampled_from(["p", "q", "r"])
delays = st.sampled_from([0.0, FAR])
kinds = st.sampled_from(["f", "d", "k", "b", "s"])
#: Chooses among what there is at the moment. What the machine is told must not depend on that: a paced lane makes it
#: depend on time.
picks = st.integers(0, 11)
some_keys = st.lists(st.sampled_from(ALL), min_size=1, max_size=5, unique=True)
queues = st.sampled_from([DELIVER, DELIVER, ROUTE])

#: What can happen, how often in proportion, and with what. In one rule: Hypothesis leaves rules out of a run at random,
#: and hardly a run would have all that a delivery needs.
HAPPENINGS: Final[dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]]] = {
    "ensure": (2, {"some": some_keys, "delay_s": delays, "line": lines}),
    "ensure_what_is_held": (1, {"pick": picks, "delay_s": delays, "line": lines}),
    "take": (3, {"name": names, "queue": queues, "room": st.integers(1, 4), "answered": st.integers(0, 3).map(bool)}),
    "finish": (
        4,
        {
            "pick": picks,
            "kind": kinds,
            "delay_s": delays,
            "refund": st.booleans(),
            "room": st.integers(0, 3),
            "verdict": verdicts,
        },
    ),
    "finish_again": (1, {"pick": picks, "kind": kinds}),
    "forget": (1, {"some": some_keys}),
    "beat": (1, {"name": names}),
    "fall_silent": (1, {"pick": picks, "returns": st.booleans()}),
    "lose_the_index": (1, {}),
    "hold": (1, {"name": st.sampled_from(["cap", "frail"]), "hold": st.sampled_from(["", "", "paused", "disabled"])}),
    "break_now": (1, {}),
    "let_one_try": (2, {}),
    "lose_what_a_lane_remembers": (1, {"what": st.sampled_from(["breaker", "verdicts", "slot", "until"])}),
    "lose_the_lines": (1, {}),
    "let_time_pass": (1, {}),
}
happenings = st.sampled_from([name for name, (weight, _) in HAPPENINGS.items() for _ in range(weight)]).flatmap(
    lambda name: st.tuples(st.just(name), st.fixed_dictionaries(HAPPENINGS[name][1]))
)


def lane_of(queue: str, key: str) -> str:
    """The lane of a key."""
    return key.split(":", 2)[2] if queue == DELIVER else ROUTE


@dataclass
class Place:
    """Where the model has a key."""

    kind: str = "nowhere"
    token: str = ""
    holder: str = ""
    #: Of a held key: seconds until it is due, as noted by an ensure; None: nothing is noted.
    note: float | None = None
    #: The line of its lane; while it waits, the one in which it does.
    line: str = "fresh"


@dataclass
class Model:
    """What must be true of the keys."""

    places: dict[tuple[str, str], Place] = field(default_factory=lambda: {key: Place() for key in ALL})

    #: The lines as Redis remembers them beside the places; what waits is where it was put.
    lines: dict[tuple[str, str], str] = field(default_factory=dict)

    def put(self, key: tuple[str, str], delay_s: float) -> None:
        self.places[key] = Place("delayed" if delay_s > 0 else "waiting", line=self.lines.get(key, "fresh"))

    def ensure(self, key: tuple[str, str], delay_s: float, line: str) -> None:
        place = self.places[key]
        if line and place.kind != "waiting" and key[0] == DELIVER:
            self.lines[key] = line
        if place.kind == "held":
            place.note = delay_s if place.note is None else min(place.note, delay_s)
        elif place.kind == "nowhere" or (place.kind == "delayed" and delay_s == 0):
            self.put(key, delay_s)

    def finish(self, key: tuple[str, str], token: str, kind: str, delay_s: float, *, refund: bool = False) -> None:
        place = self.places[key]
        if place.kind != "held":
            if kind != "f":
                self.ensure(key, delay_s, "")
        elif place.token == token:
            after = {"f": None, "d": delay_s, "k": 0.0, "b": 0.0, "s": FAR}[kind]
            due = [x for x in (after, None if kind in "bk" else place.note) if x is not None]
            if kind == "d" and not refund and key[0] == DELIVER:
                self.lines[key] = "retry"
            self.places[key] = Place()
            if due:
                self.put(key, min(due))
            else:
                self.lines.pop(key, None)

    def first(self, lane: str, line: str) -> tuple[str, str] | None:
        """The waiting key of a line that was accepted first."""
        return min(self.waiting(lane, line), key=lambda key: int(key[1].split(":")[0]), default=None)

    def waiting(self, lane: str, line: str | None = None) -> list[tuple[str, str]]:
        """What waits in a lane, or in one line of it."""
        return [
            key
            for key in ALL
            if lane_of(*key) == lane and self.places[key].kind == "waiting" and line in (None, self.places[key].line)
        ]


class Machine(RuleBasedStateMachine):
    """Three processes on one Redis; `url` is set by the test."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.queues = Queues(redis_url=self.url, namespace="t")
        self.model = Model()
        self.players: dict[str, Player] = {}
        self.suspects: dict[str, set[str]] = {}
        self.past: list[tuple[str, tuple[str, str], str]] = []
        #: Grants of the lane `slow` that were not given back -> a moment just before them; None once its rate is lifted.
        self.slow: dict[str, float] | None = {}
        self.next_s: float | None = None

    @initialize()
    def begin(self) -> None:
        assert self.queues.rebuild_begin("n")
        assert self.queues.rebuild_commit("n")
        self.versions = dict.fromkeys(("cap", "frail"), 1)
        self.holds = dict.fromkeys(("cap", "frail"), "")
        for name in self.versions:
            self.queues.set_lanes([self.settings_of(name)])
        self.queues.set_lanes([lane("free")])
        self.queues.run("lanes", DELIVER, "slow", 1, GAP_MS, 0, 1000, 40_000, "", 0, 0, "")
        self.players = {name: Player(self.queues, name, threads=1000) for name in ("p", "q", "r")}
        self.suspects = {name: set() for name in self.players}
        for name in self.players:
            self.beat(name)

    @rule(happening=happenings)
    def happen(self, happening: tuple[str, dict[str, Any]]) -> None:
        name, arguments = happening
        getattr(self, name)(**arguments)

    def settings_of(self, name: str) -> LaneSettings:
        limits: dict[str, Any] = {"concurrency": CAP} if name == "cap" else {"broken_s": BROKEN_MS / 1000, "broken_max_s": 1800.0}
        return lane(name, version=self.versions[name], hold=self.holds[name], **limits)

    # -- what can happen ----------------------------------------------------------------------------------------

    def ensure(self, some: list[tuple[str, str]], delay_s: float, line: str) -> None:
        self.queues.ensure([Ensure(queue, key, delay_s, line) for queue, key in some])
        for key in some:
            self.model.ensure(key, delay_s, line)

    def take(self, name: str, queue: str, room: int, answered: bool) -> None:
        """A turn; without `answered` the process never learns of its grants."""
        self.granted(name, queue, self.turn(name, queue, room=room), answered=answered)

    def finish(self, pick: int, kind: Any, delay_s: float, refund: bool, room: int, verdict: Any) -> None:
        """Finish something in hand, and take what may go then, in one turn."""
        hands = [(name, key) for name, player in self.players.items() for key in player.hands]
        if not hands:
            return
        name, key = hands[pick % len(hands)]
        queue, token = self.players[name].hands[key]
        delay_s = delay_s if kind == "d" else 0.0
        self.past.append((name, (queue, key), token))
        finish = Finish(key, token, kind, time.monotonic() + delay_s, b"", refund and kind in "fd", verdict)
        if kind == "b" or finish.refund:
            self.refunded(queue, key, token)
        self.model.finish((queue, key), token, kind, delay_s, refund=finish.refund)
        self.granted(name, queue, self.turn(name, queue, room=room, finishes=[finish]), answered=True)

    def ensure_what_is_held(self, pick: int, delay_s: float, line: str) -> None:
        held = [key for key, place in self.model.places.items() if place.kind == "held"]
        if held:
            self.ensure([held[pick % len(held)]], delay_s, line)

    def let_time_pass(self) -> None:
        """Enough for the next token of the slow lane."""
        time.sleep(GAP_MS / 1000)

    def finish_again(self, pick: int, kind: Any) -> None:
        """A finish whose answer was lost is sent again, maybe much later; the key may be anybody's now."""
        if not self.past:
            return
        name, (queue, key), token = self.past[-1 - pick % len(self.past)]
        self.model.finish((queue, key), token, kind, 0.0)
        held = self.players[name].hands.get(key)
        self.turn(name, queue, room=0, finishes=[Finish(key, token, kind)])
        if held is not None:
            self.players[name].hands[key] = held

    def forget(self, some: list[tuple[str, str]]) -> None:
        for queue, key in some:
            self.queues.forget(queue, [key])
            if self.model.places[queue, key].kind != "held":
                self.model.places[queue, key] = Place()
                self.model.lines.pop((queue, key), None)

    def beat(self, name: str) -> None:
        """A beat lists what is in hand: what is missing is put back, what nobody knows of is given back the second time."""
        hands = self.players[name].hands
        for key, (queue, token) in hands.items():
            if self.model.places[queue, key].kind != "held":
                self.model.places[queue, key] = Place("held", token, name)
        unknown = {
            place.token: key
            for key, place in self.model.places.items()
            if place.kind == "held" and place.holder == name and place.token not in {token for _, token in hands.values()}
        }
        for token in unknown.keys() & self.suspects[name]:
            self.model.put(unknown[token], 0.0)
        self.suspects[name] = unknown.keys() - self.suspects[name]
        listed = [Held(queue, key, token, 40.0, False) for key, (queue, token) in hands.items()]
        self.queues.beat(name, silence_s=60.0, spread_s=0.0, queues=[DELIVER, ROUTE], held=listed)

    def fall_silent(self, pick: int, returns: bool) -> None:
        """A process is not heard of for long; what it held is due when its leases end. It may come back at once, or later."""
        names = sorted(self.players, key=lambda name: not self.players[name].hands)
        name, by = names[pick % max(1, sum(bool(player.hands) for player in self.players.values()))], names[-1]
        if name == by:
            return
        self.client.zadd("t:procs", {name: 1})
        for place in self.model.places.values():
            if place.kind == "held" and place.holder == name:
                place.kind, place.token, place.holder, place.note = "delayed", "", "", None
        self.beat(by)
        if returns:
            self.beat(name)
        else:
            self.client.zadd("t:procs", {name: time.time() * 1000})

    def lose_the_index(self) -> None:
        """The index of lanes is deleted; reconcile asks for all keys, and makes it again."""
        self.client.delete(f"t:{DELIVER}:active", f"t:{ROUTE}:active")
        for queue in KEYS:
            nowhere = {key for key in KEYS[queue] if self.model.places[queue, key].kind == "nowhere"}
            assert self.queues.unknown(queue, [(key, FAR) for key in KEYS[queue]]) == nowhere

    def hold(self, name: str, hold: Any) -> None:
        """A person holds an endpoint or lets it go: Redis is told at once, and the settings follow."""
        self.versions[name] += 1
        self.holds[name] = hold
        self.queues.hold(name, self.versions[name], hold)

    def break_now(self) -> None:
        """Failures enough to open the breaker of the lane `frail`, as if many calls had failed in a row."""
        if not self.client.exists("t:lane:frail:breaker"):
            self.client.hset("t:lane:frail:verdicts", "row", 4)
            self.client.pexpire("t:lane:frail:verdicts", 60_000)

    def let_one_try(self) -> None:
        """The time of an open breaker is over."""
        if float(self.client.hget("t:lane:frail:breaker", "till") or 0) > self.now_ms():
            self.client.hset("t:lane:frail:breaker", "till", 1)
            self.client.zadd(f"t:{DELIVER}:active", {"frail": 1}, xx=True)

    def lose_what_a_lane_remembers(self, what: str) -> None:
        self.client.delete(f"t:lane:frail:{what}", f"t:lane:cap:{what}")

    def lose_the_lines(self) -> None:
        """It costs fairness, and nothing else."""
        self.client.delete(f"t:{DELIVER}:lines")
        self.model.lines.clear()

    # -- what must be true --------------------------------------------------------------------------------------

    @invariant()
    def every_key_is_in_exactly_one_place(self) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            for queue, key in ALL:
                pipe.hget(f"t:{queue}:held", key)
                pipe.zscore(f"t:{queue}:delayed", key)
                pipe.zscore(f"t:{queue}:lane:{lane_of(queue, key) if queue == DELIVER else '-'}", key)
            found = pipe.execute()
        for i, key in enumerate(ALL):
            held, delayed, waiting = found[3 * i : 3 * i + 3]
            where = [name for name, x in (("held", held), ("delayed", delayed), ("waiting", waiting)) if x is not None]
            assert where == [k for k in [self.model.places[key].kind] if k != "nowhere"], key
            if held is not None:
                assert held.split(b" ")[0].decode() == self.model.places[key].token

    @invariant()
    def every_lane_in_which_something_waits_will_be_looked_at(self) -> None:
        for key, place in self.model.places.items():
            if place.kind == "waiting" and key[0] == DELIVER:
                assert self.client.zscore(f"t:{DELIVER}:active", lane_of(*key)) is not None

    @invariant()
    def no_lane_is_over_its_cap(self) -> None:
        held = [key for key, place in self.model.places.items() if place.kind == "held" and lane_of(*key) == "cap"]
        assert len(held) <= CAP

    @invariant()
    def everything_that_a_lane_remembers_has_a_time_to_live(self) -> None:
        for key in self.client.scan_iter("t:lane:*"):
            assert self.client.pttl(key) != -1, key

    # -- how it is done -----------------------------------------------------------------------------------------

    def turn(self, name: str, queue: str, **options: Any) -> list[tuple[str, str]]:
        before = self.now_ms()
        broken = self.broken()
        turn = self.players[name].turn(queue, **options)
        after = self.now_ms()
        for grant in turn.grants:
            if lane_of(queue, grant.key) == "slow" and self.slow is not None:
                assert after - max(self.slow.values(), default=0.0) >= GAP_MS, "two grants of a paced lane are too close"
                self.slow[grant.token] = before
        self.check_what_goes([grant.key for grant in turn.grants], broken, options.get("finishes", ()))
        self.next_s = turn.next_s
        return [(grant.key, grant.token) for grant in turn.grants]

    def broken(self) -> tuple[float, str, bool]:
        """Of the breaker of `frail`: until when it is open, the probe, and whether it is not closed."""
        till, probe, allow = self.client.hmget("t:lane:frail:breaker", "till", "probe", "allow")
        return float(till or 0), (probe or b"").decode(), allow == b"0"

    def check_what_goes(self, keys: list[str], broken: tuple[float, str, bool], finishes: Any) -> None:
        for name, hold in self.holds.items():
            assert not hold or not any(key.endswith(f":{name}") for key in keys), f"{name} is {hold}"
        frail = [key for key in keys if key.endswith(":frail")]
        till, probe, is_broken = broken
        if not is_broken or any(finish.token == probe for finish in finishes):
            return
        if till > self.now_ms() or probe:
            assert frail == [], "nothing goes while a breaker is open, or its probe is under way"
        assert len(frail) <= 1, "one call tries"

    def now_ms(self) -> float:
        seconds, micros = self.client.time()
        return float(seconds) * 1000 + float(micros) / 1000

    def refunded(self, queue: str, key: str, token: str) -> None:
        if self.model.places[queue, key].token == token and self.slow is not None:
            self.slow.pop(token, None)

    def granted(self, name: str, queue: str, grants: list[tuple[str, str]], *, answered: bool) -> None:
        for key, token in grants:
            lane, line = lane_of(queue, key), self.model.places[queue, key].line
            assert self.model.first(lane, line) == (queue, key), "a line hands out its first key"
            self.model.places[queue, key] = Place("held", token, name, line=line)
            if not answered:
                del self.players[name].hands[key]

    def teardown(self) -> None:
        if self.players:
            self.everything_can_be_ended()
        self.queues.close()
        self.client.close()

    def everything_can_be_ended(self) -> None:
        """Bring everything forward, let go of all hands, lift the rate: then take and finish until nothing is left."""
        self.queues.set_lanes([lane("slow", version=2)])
        self.slow = None
        for name in self.holds:
            self.hold(name, "")
        # What it would wait for is longer than a run.
        self.client.delete("t:lane:frail:breaker")
        for name, player in self.players.items():
            player.hands.clear()
            self.beat(name)
            self.beat(name)
        self.ensure(ALL, 0.0, "")
        # The leases of those that fell silent run out; until then their places count, since their calls may go on.
        self.client.delete("t:lane:cap:places")
        # The lane would be looked at when the first of these ends.
        self.queues.look_again()
        self.every_key_is_in_exactly_one_place()
        player = self.players["p"]
        deadline = time.monotonic() + 10
        while any(place.kind != "nowhere" for place in self.model.places.values()):
            assert time.monotonic() < deadline, f"something waits for ever: {self.model.places}"
            for queue in KEYS:
                self.granted("p", queue, self.turn("p", queue, room=20), answered=True)
                waiting = any(place.kind == "waiting" for (q, _), place in self.model.places.items() if q == queue)
                assert player.hands or not waiting or self.next_s is not None, "who is told of no chance waits for ever"
            for key, (queue, token) in list(player.hands.items()):
                self.model.finish((queue, key), token, "f", 0.0)
                self.turn("p", queue, room=0, finishes=[Finish(key, token, "f", verdict="good")])
        self.every_key_is_in_exactly_one_place()


def test_the_scripts_do_what_the_model_says(redis_url: str) -> None:
    Machine.url = redis_url
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25, stateful_step_count=50, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        ),
    )
