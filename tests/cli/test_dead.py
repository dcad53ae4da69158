"""`madeira dead`: dead letters listed, grouped and shown, for a person and for a script."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from madeira.states import Outcome
from madeira.store.deliveries import SettleRequest, settle
from tests import terminal
from tests.store import making
from tests.store.making import GIVE_UP, Connection, died, routed

pytestmark = pytest.mark.long


@pytest.fixture
def conn(database_url: str) -> Iterator[Connection]:
    """Three dead letters, two of which are of one kind; the name of one tries to drive the terminal."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        died(conn, "one", "ledger", "http_503", "gave up: the receiver answered 503")
        died(conn, "two", "ledger", "http_503", "gave up: the receiver answered 503", event_type="order.sent")
        died(conn, "three", "shop", "dns", "dns: no such\thost\x1b[2J", source="other")
        yield conn


@pytest.fixture
def environ(tmp_path: Path, database_url: str) -> dict[str, str]:
    return terminal.environ(MADEIRA_DATA_DIR=str(tmp_path / "data"), MADEIRA_DATABASE_URL=database_url, COLUMNS="200")


def run(environ: dict[str, str], *arguments: str, code: int = 0) -> "subprocess.CompletedProcess[str]":
    return terminal.run(environ, "dead", *arguments, code=code)


def test_a_script_gets_a_line_each_with_tabs_between(conn: Connection, environ: dict[str, str]) -> None:
    """The latest first; no header, and nothing that drives a terminal."""
    lines = [line.split("\t") for line in run(environ).stdout.splitlines()]
    assert [line[2:] for line in lines] == [
        ["other", "three", "shop", "dns", "1", "no such\ufffdhost\ufffd[2J"],
        ["shop", "two", "ledger", "http_503", "1", "gave up: the receiver answered 503"],
        ["shop", "one", "ledger", "http_503", "1", "gave up: the receiver answered 503"],
    ]
    narrowed = run(environ, "--endpoint", "ledger", "--type", "order.*", "--error", "http_503", "--text", "two", "--json").stdout
    [item] = [json.loads(line) for line in narrowed.splitlines()]
    assert (item["event_id"], item["failure_class"], item["error_code"]) == ("two", "receiver", "http_503")


def test_groups_are_counted_with_the_same_filters(conn: Connection, environ: dict[str, str]) -> None:
    """The largest first; as JSON with an example."""
    lines = [line.split("\t") for line in run(environ, "--groups").stdout.splitlines()]
    assert [(line[0], line[1], line[2]) for line in lines] == [("2", "ledger", "http_503"), ("1", "shop", "dns")]
    [group] = [json.loads(line) for line in run(environ, "--groups", "--source", "other", "--json").stdout.splitlines()]
    assert (group["count"], group["endpoint"], group["last_error"]) == (1, "shop", "dns: no such\thost\x1b[2J")


def test_on_a_terminal_it_is_a_table(conn: Connection, environ: dict[str, str]) -> None:
    """With a header."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*terminal.MADEIRA, "dead", "--groups"], env=environ, cwd=terminal.ROOT, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                # What Linux says when the other side is closed.
                break
            if not part:
                break
            shown += part
    os.close(ours)
    assert process.returncode == 0
    head, first = shown.decode().splitlines()[:2]
    assert [word for word in ("count", "endpoint", "last died") if word not in head] == []
    assert "\t" not in shown.decode()
    assert first.split()[:3] == ["2", "ledger", "http_503"]


def test_one_is_shown_with_what_was_sent_and_what_came_back(conn: Connection, environ: dict[str, str]) -> None:
    [ref] = routed(conn, ("ledger",), event_id="four")
    held = making.claimed(conn, ref)
    sent = {"method": "POST", "headers": [["X-Token", "***"]], "body_length": 17, "body_sha256": "abcd"}
    exchange = {"request": sent, "answer": {"headers": [["server", "nginx"]], "complete": True}}
    failed = making.attempt(Outcome.PERMANENT, exchange=json.dumps(exchange), excerpt=b"no\x1b[2J", sha256=b"\x01" * 32)
    settle(conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, GIVE_UP, "worker:1")])
    shown = run(environ, str(ref.delivery_id)).stdout
    told = (
        "four of shop",
        "POST http://receiver.test/hook",
        "X-Token: ***",
        "body of 17 bytes",
        "503",
        "server: nginx",
        "no\ufffd[2J",
    )
    assert [words for words in told if words not in shown] == []
    as_json = json.loads(run(environ, str(ref.delivery_id), "--json").stdout)
    assert (as_json["attempts"][0]["exchange"], as_json["attempts"][0]["sha256"]) == (exchange, "01" * 32)


def test_what_cannot_be_shown_is_told_with_an_exit_code(conn: Connection, environ: dict[str, str]) -> None:
    """Nothing found is no error; a letter that is not there is one, and so is a filter that cannot be."""
    none = run(environ, "--endpoint", "nobody")
    assert (none.stdout, none.stderr) == ("", "no dead letters\n")
    assert "no dead letter 999" in run(environ, "999", code=1).stderr
    assert "http_503" in run(environ, "--error", "503", code=2).stderr
    assert "without --groups" in run(environ, "1", "--groups", code=2).stderr
