"""Processes that are started before the tables are there: every line says what to do, and they go on once it is done."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from madeira.store.migrate import migrate
from madeira.store.schema import NO_TABLES
from tests import terminal
from tests.receiver import Receiver
from tests.system.harness import Madeira, Process, running, toml, wait_until

ADMIN = {"Authorization": "Bearer the-token-of-the-tests"}


def lines_of(process: Process) -> list[dict[str, Any]]:
    """What it logged, but for what its programs say before they can."""
    return [json.loads(line) for line in process.tail(10**7).splitlines() if line.startswith("{")]


def trouble_of(line: Mapping[str, Any]) -> str | None:
    """What a line says to be in the way."""
    return line.get("error") or line.get("reason")


def asked(madeira: Madeira, *arguments: str) -> str:
    """What the terminal shows in place of an answer."""
    done = terminal.run(madeira.env, *arguments, code=1)
    return (done.stdout + done.stderr).strip()


@pytest.mark.long
def test_an_empty_database_is_told_with_its_remedy_and_waited_for(
    empty_database_url: str, redis_url: str, receiver: Receiver, tmp_path: Path
) -> None:
    """API, worker, scheduler and terminal say `madeira migrate` and nothing else; after it an event comes through."""
    with running(folder=tmp_path, database_url=empty_database_url, redis_url=redis_url, config="") as madeira:
        scheduler = madeira.start("scheduler", ["periodiq", "madeira.actors"])
        processes = [madeira.api(), madeira.worker(), scheduler]
        body = b'{"event_id": "early", "event_type": "a.x", "payload": 1}'
        answers = [madeira.http.get(path, headers=ADMIN) for path in ("/readyz", "/v1/events", "/v1/endpoints", "/v1/tokens")]
        for answer in (*answers, madeira.send(body)):
            assert (answer.status_code, "madeira migrate" in answer.text) == (503, True), answer.text
        assert madeira.http.get("/metrics").status_code == 200
        assert asked(madeira, "endpoints", "list") == f"Error: {NO_TABLES}"
        assert "run `madeira migrate`" in asked(madeira, "doctor")
        wait_until(lambda: any("Scheduling" in line["event"] for line in lines_of(scheduler)), what="a tick")

        told = [line for process in processes for line in lines_of(process) if line["level"] in ("warning", "error")]
        assert {line["event"] for line in told} >= {"rules.not_followed", "store.away", "http.unavailable"}
        assert {trouble_of(line) for line in told if line["event"] != "http.answered"} == {NO_TABLES}
        assert not any("does not exist" in process.tail(10**7) for process in processes)

        migrate(empty_database_url)
        madeira.configure(toml({"a": {"url": receiver.url("/a")}}))
        wait_until(lambda: madeira.send(body).status_code == 202, what="the rules to be read")
        madeira.wait_status("early", "succeeded")
