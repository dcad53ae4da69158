"""The API's log: JSON lines, gunicorn's own too, with the names of the event that they are about."""

import json
from collections.abc import Callable

import pytest

from tests.api.serving import Api, event
from tests.system.harness import wait_until


def lines(api: Api) -> list[dict]:
    return [json.loads(line) for line in api.log.read_text().splitlines()]


def test_every_line_is_json_with_a_key(api: Api) -> None:
    """From the start to the end, refused requests and malformed ones between: each line is JSON and says what it is."""
    assert api.post(event("one")).status == 202
    assert api.post(event("one", payload=2), {"X-Trace-Id": "the-second"}).status == 409
    assert api.post(b"{").status == 400
    assert api.post(event("x"), {"X-Madeira-Source": "stranger"}).status == 401
    assert api.raw(b"nonsense\r\n\r\n").status == 400
    api.stop()
    told = lines(api)
    assert all({"event", "level", "logger", "timestamp", "process"} <= line.keys() for line in told)
    assert {line["process"] for line in told} == {"api"}
    conflict = next(line for line in told if line["event"] == "intake.conflict")
    assert (conflict["source"], conflict["event_id"], conflict["trace_id"]) == ("shop", "one", "the-second")
    refused = next(line for line in told if line["event"] == "auth.refused")
    assert (refused["source"], refused["known"]) == ("stranger", False)
    assert {line["status"] for line in told if line["event"] == "http.answered"} == {400, 401, 409}
    assert [line["status"] for line in told if line["event"] == "http.refused"] == [400]


@pytest.mark.long
def test_at_level_debug_every_event_is_told(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """With debug on, each accepted event has a line with its trace."""
    api = serve(database_url, redis_url, MADEIRA_LOG_LEVEL="debug").start()
    assert api.post(event("one", trace_id="the-trace")).status == 202
    wait_until(lambda: "intake.accepted" in api.log.read_text(), what="the line")
    accepted = [line for line in lines(api) if line["event"] == "intake.accepted"]
    assert [(line["event_id"], line["trace_id"], line["duplicate"]) for line in accepted] == [("one", "the-trace", False)]
