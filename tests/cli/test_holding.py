"""Whoever looks from a terminal sees what is held, by whom and why, and what a delivery waits for."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from madeira.broker.queues import Queues, ensure_delivery
from madeira.lanes import LaneSettings
from madeira.records import PlannedDelivery
from madeira.store import routing
from tests.store import making
from tests.system.harness import configure, toml
from tests.terminal import NAMESPACE, beside, run

#: More than fits beside the rest into a line of 80 characters.
WHY = "they move house, and until Friday nobody there can say where to"

pytestmark = pytest.mark.long


class Terminal:
    """Runs commands against the servers of a test."""

    def __init__(self, env: dict[str, str], conn: "psycopg.Connection[Any]", queues: Queues) -> None:
        self.env = env
        self.conn = conn
        self.queues = queues

    def run(self, *arguments: str, **env: str) -> str:
        return run(self.env | env, *arguments).stdout

    def waiting(self, event_id: str, endpoint: str = "a", lane: str = "a") -> None:
        """A queued delivery of an event of its own."""
        seq = making.accept(self.conn, event_id=event_id)
        [ref] = routing.route(self.conn, [(seq, [PlannedDelivery(endpoint, lane)])])[0].refs
        self.queues.ensure([ensure_delivery(ref)])


@pytest.fixture
def terminal(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Terminal]:
    """A terminal, with the endpoint `a` held for a reason, and three events that wait for it."""
    configure(database_url, toml({"a": {"url": "http://receiver.test/a"}}))
    env = beside(database_url, redis_url, folder=tmp_path / "data")
    queues = Queues(redis_url=redis_url, namespace=NAMESPACE)
    with psycopg.connect(database_url, autocommit=True) as conn:
        terminal = Terminal(env, conn, queues)
        assert queues.rebuild_begin("test")
        assert queues.rebuild_commit("test")
        queues.set_lanes([LaneSettings(lane="a", version=1, rate=None, burst=1, concurrency=10, lease_s=60.0)])
        for event_id in ("one", "two", "three"):
            terminal.waiting(event_id)
        terminal.run("endpoints", "pause", "a", "--reason", WHY)
        yield terminal
    queues.close()


def test_an_endpoint_is_shown_with_who_holds_it_and_its_lane(terminal: Terminal) -> None:
    """For a person and for a program."""
    found = json.loads(terminal.run("endpoints", "show", "a", "--json"))
    assert (found["state"], found["reason"], found["unfinished"]) == ("paused", WHY, 3)
    assert found["by"].startswith("cli ")
    assert (found["lane"]["state"], found["lane"]["waiting"]["fresh"]) == ("paused", 3)
    assert WHY in terminal.run("endpoints", "show", "a")


def test_an_endpoint_that_is_held_already_is_told_so(terminal: Terminal) -> None:
    before = json.loads(terminal.run("endpoints", "show", "a", "--json"))
    told = (
        f"endpoint a is paused already, since {datetime.fromisoformat(before['since']).astimezone():%F %T %z} by {before['by']}"
    )
    assert terminal.run("endpoints", "pause", "a", "--reason", WHY) == f"{told}\n"
    assert terminal.run("endpoints", "pause", "a", "--reason", "all week") == f"{told}; the reason is new\n"
    now = json.loads(terminal.run("endpoints", "pause", "a", "--reason", "all week", "--json"))
    assert (now["already"], now["changed"], now["since"], now["reason"]) == (True, False, before["since"], "all week")
    assert terminal.run("endpoints", "resume", "a") == "endpoint a is active\n"
    assert terminal.run("endpoints", "resume", "a").startswith("endpoint a is active already, since ")


@pytest.mark.parametrize(
    ("name", "told"), [("callback", "the endpoint callback is built in: it cannot be held"), ("aa", "there is no endpoint 'aa'")]
)
def test_an_endpoint_that_cannot_be_held_is_told_why(terminal: Terminal, name: str, told: str) -> None:
    assert told in run(terminal.env, "endpoints", "pause", name, "--reason", WHY, code=1).stderr


def test_without_redis_it_is_shown_how_an_endpoint_is_held(terminal: Terminal) -> None:
    """Postgres knows that; of the lane nobody knows anything."""
    found = json.loads(terminal.run("endpoints", "show", "a", "--json", MADEIRA_REDIS_URL=""))
    assert (found["state"], found["reason"], found["lane"]) == ("paused", WHY, None)
    [row] = json.loads(terminal.run("endpoints", "lanes", "--json", MADEIRA_REDIS_URL=""))
    assert (row["state"], row["reason"]) == ("paused", WHY)


def test_lanes_are_told_with_their_reasons_and_those_of_hosts_too(terminal: Terminal) -> None:
    """A slow host of a callback address would be found nowhere else; into a pipe each has one line, whatever is to be said."""
    terminal.waiting("four", "callback", "callback@slow.test:80")
    rows = {row["endpoint"]: row for row in json.loads(terminal.run("endpoints", "lanes", "--json"))}
    assert sorted(rows) == ["a", "callback@slow.test:80"]
    assert [rows["a"][k] for k in ("state", "lane", "reason", "waiting")] == ["paused", "paused", WHY, 3]
    assert [rows["callback@slow.test:80"][k] for k in ("state", "lane", "waiting")] == ["active", "active", 1]
    told = terminal.run("endpoints", "lanes", COLUMNS="80")
    assert [WHY in line for line in told.splitlines() if line.split()[0] == "a"] == [True]
    assert "callback@slow.test:80" in told
    shown = json.loads(terminal.run("endpoints", "show", "callback", "--json"))
    assert shown["lane"]["waiting"]["fresh"] == 1


@pytest.mark.parametrize("command", [("trace",), ("events", "show")], ids=" ".join)
def test_a_delivery_is_told_to_wait_for_whoever_holds_its_endpoint(terminal: Terminal, command: tuple[str, ...]) -> None:
    """Not for a time that is over."""
    told = terminal.run(*command, "three")
    assert "waits: its endpoint is paused, 2 before it" in told
    assert "next attempt" not in told
    found = json.loads(terminal.run(*command, "three", "--json"))
    [event] = found if isinstance(found, list) else [found]
    assert (event["deliveries"][0]["waits"]["for"], event["deliveries"][0]["waits"]["ahead"]) == ("paused", 2)
