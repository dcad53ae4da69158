"""Jobs from the terminal: previewed, made by a filter, listed, held, followed to their end."""

import json
import os
import pty
import subprocess
import sys
import threading
from typing import Any

import pytest

from madeira.broker.waking import JOBS
from madeira.records import DeliveryRef
from madeira.store import job_steps
from madeira.store.jobs import find
from tests.cli.test_acting import ROOT, WHO, Terminal, terminal
from tests.store.making import GIVE_UP, claimed, delivery, routed, settled

__all__ = ["terminal"]

pytestmark = pytest.mark.long


def dead(terminal: Terminal, number: int, endpoint: str = "a", **fields: Any) -> list[DeliveryRef]:
    refs = [routed(terminal.conn, (endpoint,), **fields)[0] for _ in range(number)]
    for ref in refs:
        settled(terminal.conn, claimed(terminal.conn, ref), GIVE_UP)
    return refs


def test_a_replay_with_a_filter_is_previewed_and_then_made_as_a_job(terminal: Terminal) -> None:
    dead(terminal, 2, "b")
    dead(terminal, 4)
    many = ("replay", "--endpoint", "a", "--reason", "the partner is back")
    told = terminal.run(*many, "--dry-run").stdout
    assert "about 4" in told
    assert told.count(" shop/") == 3
    assert "not configured: a; what goes there waits until it is, or is cancelled" in told
    assert json.loads(terminal.run(*many, "--dry-run", "--json").stdout)["missing"] == ["a"]
    assert terminal.audited() == []
    done = json.loads(terminal.run(*many, "--rate", "5", "--key", "k", "--json").stdout)
    assert (done["total"], done["rate"], done["ordered"], done["filter"]) == (4, 5.0, True, {"endpoint": "a"})
    assert json.loads(terminal.run(*many, "--rate", "5", "--key", "k", "--json").stdout)["id"] == done["id"]
    assert "not configured: a; " in terminal.run("jobs", "show", str(done["id"])).stdout
    assert terminal.audited() == [(WHO, "replay", f"job {done['id']}", "the partner is back")]
    assert terminal.queues.sizes([JOBS])[JOBS].ready == 1
    other = terminal.run("replay", "--endpoint", "b", "--key", "k", "--reason", "x", code=1)
    assert "another key" in other.stderr


def test_many_are_not_meant_by_leaving_something_out(terminal: Terminal) -> None:
    """All are meant by --all only, and what is for one event is not for many."""
    for wrong in (
        ["replay"],
        ["replay", "--all", "--endpoint", "a"],
        ["replay", "--all", "--force"],
        ["replay", "one", "--source", "shop", "--class", "receiver"],
        ["replay", "one"],
        ["replay", "--error", "http_9"],
        ["reroute", "one", "--source", "shop", "--endpoint", "a"],
        ["cancel", "--all", "--rate", "5"],
        ["cancel", "one", "--source", "shop", "--dead"],
        ["cancel", "--dead"],
    ):
        terminal.run(*wrong, "--reason", "x", code=2)
    assert terminal.audited() == []


def test_a_variable_that_is_empty_does_not_widen_what_is_meant(terminal: Terminal) -> None:
    """Of `cancel --endpoint a --type "$TYPE"`, all of the endpoint is not what is left."""
    routed(terminal.conn)
    for option in ("--type", "--text", "--error", "--source", "--key"):
        for wrong in (["cancel", "--endpoint", "a"], ["replay", "--endpoint", "a"]):
            terminal.run(*wrong, option, "", "--reason", "x", code=2)
    terminal.run("cancel", "one", "--source", "shop", "--type", "", "--reason", "x", code=2)
    assert terminal.audited() == []


def test_classes_are_typed_as_they_are_shown(terminal: Terminal) -> None:
    dead(terminal, 2)
    for command in ("replay", "cancel", "reroute"):
        terminal.run(command, "--class", "receiver", "--reason", "x", "--dry-run")
    assert "about 2" in terminal.run("replay", "--class", "receiver", "--reason", "x", "--dry-run").stdout


def test_a_number_a_key_or_a_time_that_cannot_be_is_refused(terminal: Terminal) -> None:
    for wrong in (["--rate", "nan"], ["--key", "k" * 129], ["--key", "a b"]):
        told = terminal.run("replay", "--all", *wrong, "--reason", "x", code=2)
        assert wrong[0] in told.stderr
    environ = terminal.env
    # In one zone the first midnight of the calendar is before it, in the other the last one behind it.
    for zone, moment in (("Pacific/Kiritimati", "0001-01-01"), ("America/Los_Angeles", "9999-12-31T23:00:00")):
        terminal.env = environ | {"TZ": zone}
        for command in (["replay", "--reason", "x"], ["dead"], ["events", "list"]):
            for option in ("--since", "--until"):
                assert option in terminal.run(*command, option, moment, code=2).stderr
    assert terminal.audited() == []


def test_a_cancel_and_a_reroute_of_many_are_jobs_too(terminal: Terminal) -> None:
    dead(terminal, 1, event_type="order.refused")
    routed(terminal.conn)
    totals = [
        json.loads(terminal.run(*command, "--reason", "x", "--json").stdout)["total"]
        for command in (
            ["cancel", "--source", "shop"],
            ["cancel", "--dead", "--type", "order.r*"],
        )
    ]
    assert totals == [1, 1]


def test_a_job_about_nothing_is_not_made_and_the_terminal_says_so(terminal: Terminal) -> None:
    dead(terminal, 1)
    for command, words in (
        (["replay", "--endpoint", "b"], "there is no such dead letter"),
        (["reroute", "--all"], "what a receiver refused is replayed"),
        (["cancel", "--source", "shop"], "nothing of this kind is unfinished"),
    ):
        assert terminal.run(*command, "--reason", "x", "--dry-run").stdout.startswith("nothing matches: ")
        told = terminal.run(*command, "--reason", "x", code=1).stderr
        assert words in told
        assert "no job was made" in told
    assert terminal.audited() == []


def test_jobs_are_listed_shown_paused_resumed_and_cancelled(terminal: Terminal) -> None:
    dead(terminal, 2)
    job = json.loads(terminal.run("replay", "--all", "--reason", "x", "--json").stdout)["id"]
    assert "running" in terminal.run("jobs", "list").stdout
    assert json.loads(terminal.run("jobs", "list", "--state", "done", "--json").stdout) == []
    assert "paused" in terminal.run("jobs", "pause", str(job), "--reason", "wait").stdout
    assert "it is paused already, since " in terminal.run("jobs", "pause", str(job), "--reason", "wait").stdout
    assert "2 left" in terminal.run("jobs", "show", str(job)).stdout
    assert json.loads(terminal.run("jobs", "resume", str(job), "--json").stdout)["state"] == "running"
    assert "cancelled" in terminal.run("jobs", "cancel", str(job), "--reason", "enough").stdout
    assert "already" in terminal.run("jobs", "resume", str(job), code=1).stderr
    assert "no job" in terminal.run("jobs", "show", "99", code=1).stderr
    assert [row[1] for row in terminal.audited()] == ["replay", "pause", "resume", "cancel"]


def follow(terminal: Terminal, job: int, stdout: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "madeira.cli", "jobs", "follow", str(job)]
    return subprocess.Popen(command, env=terminal.env, cwd=ROOT, stdout=stdout)


def carry_out(terminal: Terminal, job: int, *, failing: bool = False) -> None:
    """What the workers do."""
    while not (step := job_steps.step(terminal.conn, job)).is_over:
        for ref in step.begun:
            assert delivery(terminal.conn, ref.delivery_id)["status"] == "pending"
            settled(terminal.conn, claimed(terminal.conn, ref), *([GIVE_UP] if failing else []))


def test_a_job_is_followed_to_its_end_and_the_exit_code_says_how_that_was(terminal: Terminal) -> None:
    for failing in (False, True):
        dead(terminal, 2)
        job = json.loads(terminal.run("replay", "--all", "--reason", "x", "--json").stdout)["id"]
        following = follow(terminal, job, subprocess.PIPE)
        carry_out(terminal, job, failing=failing)
        out, _ = following.communicate(timeout=20)
        assert following.returncode == int(failing)
        assert ("2 failed" if failing else "2 done").encode() in out
        assert out.count(b"\n") == 1, "plain when piped"


def test_on_a_terminal_the_progress_of_a_job_is_shown(terminal: Terminal) -> None:
    dead(terminal, 3)
    job = json.loads(terminal.run("replay", "--all", "--reason", "x", "--json").stdout)["id"]
    ours, theirs = pty.openpty()
    following = follow(terminal, job, theirs)
    os.close(theirs)
    shown = b""
    while b"0/3" not in shown:
        shown += os.read(ours, 4096)
    working = threading.Thread(target=carry_out, args=(terminal, job))
    working.start()
    while b"3 done" not in shown:
        shown += os.read(ours, 4096)
    assert following.wait(20) == 0
    working.join()
    os.close(ours)
    found = find(terminal.conn, job)
    assert found is not None
    assert found["state"] == "done"
