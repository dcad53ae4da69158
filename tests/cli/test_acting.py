"""What a person does with events from the terminal: listed, shown, replayed, rerouted, cancelled; who did it is on record."""

import getpass
import json
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key, ensure_delivery
from madeira.records import PlannedDelivery
from madeira.states import FailureClass
from madeira.store import routing
from tests.store.making import GIVE_UP, accept, claimed, event, routed, settled
from tests.terminal import NAMESPACE, ROOT, beside, run

pytestmark = pytest.mark.long


class Terminal:
    """Runs commands against the servers of a test."""

    def __init__(self, env: dict[str, str], conn: "psycopg.Connection[object]", queues: Queues) -> None:
        self.env = env
        self.conn = conn
        self.queues = queues

    def run(self, *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
        return run(self.env, *arguments, code=code)

    def audited(self) -> list[tuple[object, ...]]:
        return self.conn.execute("SELECT who, action, what, why FROM audit ORDER BY id").fetchall()


@pytest.fixture
def terminal(tmp_path: Path, database_url: str, redis_url: str) -> Iterator[Terminal]:
    """A terminal, a connection and the queues."""
    env = beside(database_url, redis_url, folder=tmp_path / "data")
    queues = Queues(redis_url=redis_url, namespace=NAMESPACE)
    with psycopg.connect(database_url, autocommit=True) as conn:
        yield Terminal(env, conn, queues)
    queues.close()


WHO = f"cli {getpass.getuser()}"


def test_a_dead_event_is_replayed_queued_and_on_record(terminal: Terminal) -> None:
    """Once; the second time the refusal is one line with its code, exit code 1."""
    [ref] = routed(terminal.conn, event_id="one")
    settled(terminal.conn, claimed(terminal.conn, ref), GIVE_UP)
    done = terminal.run("replay", "one", "--source", "shop", "--reason", "mended", "--json")
    assert json.loads(done.stdout) == {
        "event_id": "one",
        "source": "shop",
        "status": "delivering",
        "replayed": 1,
        "endpoints": ["a"],
        "missing": ["a"],
    }
    assert terminal.queues.where(DELIVER, [delivery_key(ref)])[0].kind == "waiting"
    again = terminal.run("replay", "one", "--source", "shop", "--reason", "mended", code=1)
    assert "[unfinished]" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    assert terminal.audited() == [(WHO, "replay", "event shop/one", "mended")]
    terminal.run("replay", "two", "--source", "shop", "--reason", "mended", code=1)
    terminal.run("replay", "one", "--source", "shop", code=2)


def test_an_event_that_waits_for_its_time_tells_which(terminal: Terminal) -> None:
    """As the console does; one that is due at once tells none."""
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    accept(terminal.conn, event_id="later", deliver_at=at)
    accept(terminal.conn, event_id="now")
    assert f"  due      {at.astimezone().isoformat(sep=' ', timespec='milliseconds')}\n" in terminal.run("trace", "later").stdout
    assert "  due " not in terminal.run("trace", "now").stdout


def test_an_unrouted_event_is_rerouted(terminal: Terminal) -> None:
    seq = accept(terminal.conn, event_id="one")
    routing.route(terminal.conn, [(seq, [])])
    assert "pending" in terminal.run("reroute", "one", "--source", "shop", "--reason", "mended").stdout
    assert terminal.queues.where(ROUTE, [str(seq)])[0].kind == "waiting"
    assert terminal.audited() == [(WHO, "reroute", "event shop/one", "mended")]


def test_an_event_a_delivery_and_all_of_an_endpoint_are_cancelled(terminal: Terminal) -> None:
    """Each with the number of what ended; what was cancelled is off the queue."""
    pairs = [routed(terminal.conn, ("a", "b"), event_id=f"e{n}") for n in range(4)]
    terminal.queues.ensure([ensure_delivery(ref) for pair in pairs for ref in pair])
    done = terminal.run("cancel", "e0", "--source", "shop", "--reason", "x", "--json")
    assert json.loads(done.stdout) == {"event_id": "e0", "source": "shop", "status": "cancelled", "cancelled": 2, "requested": 0}
    assert "1 delivery cancelled" in terminal.run("cancel", "e1", "--source", "shop", "--endpoint", "a", "--reason", "x").stdout
    assert "2 deliveries" in terminal.run("cancel", "--endpoint", "a", "--reason", "x").stdout
    gone = [terminal.queues.where(DELIVER, [delivery_key(pair[0])])[0].kind for pair in pairs]
    kept = [terminal.queues.where(DELIVER, [delivery_key(pair[1])])[0].kind for pair in pairs]
    assert (gone, kept) == (["nowhere"] * 4, ["nowhere"] + ["waiting"] * 3)
    assert [what for _, _, what, _ in terminal.audited()] == ["event shop/e0", "event shop/e1", "endpoint a"]
    assert "no endpoint" in terminal.run("cancel", "--endpoint", "nobody", "--reason", "x", code=1).stderr
    terminal.run("cancel", "--reason", "x", code=2)
    terminal.run("cancel", "e1", "--reason", "x", code=2)


def test_whoever_has_no_name_is_on_record_by_number(terminal: Terminal) -> None:
    """In a container, say: whatever the command, the audit has the same word for the same person."""
    routed(terminal.conn, event_id="one")
    script = "import os; os.getuid = lambda: 54321; from madeira.cli.main import main; main()"
    env = {k: v for k, v in terminal.env.items() if k not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    for arguments in (
        ["cancel", "one", "--source", "shop", "--reason", "x"],
        ["token", "create", "ci", "--role", "viewer"],
    ):
        command = [sys.executable, "-c", script, *arguments]
        subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert [(who, action) for who, action, _, _ in terminal.audited()] == [
        ("cli uid 54321", "cancel"),
        ("cli uid 54321", "create"),
    ]


def test_without_redis_the_action_is_done_and_reconcile_is_left_to_tell_the_queues(terminal: Terminal) -> None:
    [ref] = routed(terminal.conn, event_id="one")
    settled(terminal.conn, claimed(terminal.conn, ref), GIVE_UP)
    terminal.env["MADEIRA_REDIS_URL"] = "redis://127.0.0.1:9/0"
    done = terminal.run("replay", "one", "--source", "shop", "--reason", "mended")
    assert "reconcile" in done.stderr
    assert event(terminal.conn, ref.seq)["status"] == "delivering"


def test_events_are_listed_by_each_filter(terminal: Terminal) -> None:
    """Newest first, as many as asked for, one object a line for a program."""
    for n in range(5):
        accept(terminal.conn, event_id=f"e{n}", event_type="order.paid", trace_id="t")
    routed(terminal.conn, event_id="other", event_type="invoice.sent", source="bank")

    def listed(*options: str) -> list[str]:
        return [json.loads(line)["event_id"] for line in terminal.run("events", "list", "--json", *options).stdout.splitlines()]

    assert listed() == ["other", "e4", "e3", "e2", "e1", "e0"]
    assert listed("--limit", "2") == ["other", "e4"]
    assert listed("--source", "bank") == listed("--endpoint", "a") == listed("--status", "delivering") == ["other"]
    assert listed("--type", "order.*", "--trace", "t", "--limit", "1") == ["e4"]
    assert listed("--since", "2000-01-01", "--until", "2001-01-01T00:00:00+00:00") == []
    none = terminal.run("events", "list", "--source", "nobody")
    assert (none.stdout, none.stderr) == ("", "no events\n")
    plain = terminal.run("events", "list").stdout.splitlines()
    assert len(plain) == 6
    assert "bank" in plain[0]
    assert "a: pending" in plain[0]
    terminal.run("events", "list", "--status", "odd", code=2)


def test_events_are_followed_as_they_come(terminal: Terminal) -> None:
    """What was there before is not shown; what comes is shown once, in its order, with a narrowing filter too."""
    accept(terminal.conn, event_id="before")
    command = [sys.executable, "-u", "-m", "madeira.cli", "events", "list", "--follow", "--json", "--type", "order.*"]
    with subprocess.Popen(command, env=terminal.env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            shown = []
            # It begins with its first look; until then nothing that comes is its own.
            while not shown:
                accept(terminal.conn, event_id=f"first-{uuid.uuid4()}")
                if select.select([process.stdout], [], [], 0.2)[0]:
                    shown.append(json.loads(process.stdout.readline())["event_id"])
            accept(terminal.conn, event_id="else", event_type="invoice.sent")
            accept(terminal.conn, event_id="last")
            while shown[-1] != "last":
                shown.append(json.loads(process.stdout.readline())["event_id"])
        finally:
            process.kill()
    assert len(set(shown)) == len(shown)
    assert "before" not in shown
    assert "else" not in shown
    assert all(name.startswith("first") for name in shown[:-1])


def test_a_born_dead_delivery_is_told_to_be_rerouted(terminal: Terminal) -> None:
    plan = [PlannedDelivery("a", "a", failure_class=FailureClass.TEMPLATE, last_error="no such field")]
    routing.route(terminal.conn, [(accept(terminal.conn, event_id="one"), plan)])
    refused = terminal.run("replay", "one", "--source", "shop", "--reason", "x", code=1)
    assert "reroute" in refused.stderr
    assert "taken away: a" in terminal.run("reroute", "one", "--source", "shop", "--reason", "x").stdout
