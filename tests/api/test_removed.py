"""What is told of an event that is gone, or whose payload is, by every door."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from madeira.store import retention
from madeira.store.retention import Ages
from tests.api.people import ADMIN, in_json
from tests.api.serving import Api, event, signed
from tests.api.test_events import accepted, claimed, routed, settled
from tests.console.browser import administrator
from tests.store.making import SUCCESS, attempt

DAY = timedelta(days=1)


def ended_long_ago(api: Api, conn: "psycopg.Connection[Any]") -> str:
    """An event that succeeded two days ago, and that the charts know of."""
    name, seq = accepted(api)
    [ref] = routed(api, seq, "sink")
    settled(api, claimed(api, ref), attempt(), SUCCESS)
    conn.execute("UPDATE event SET created_at = created_at - %(b)s, updated_at = updated_at - %(b)s", {"b": 2 * DAY})
    conn.execute("UPDATE rollup_cursor SET done = 1000000")
    return name


def remove(conn: "psycopg.Connection[Any]") -> None:
    ages = Ages(succeeded=DAY)
    while retention.bury(conn, ages).more:
        pass
    while retention.remove(conn, ages, wait=timedelta(0)) is not None:
        pass


def test_an_event_that_is_gone_is_told_as_such(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    """To people and to its source: when it was accepted, how and when it ended, since when it is gone. To others it never was."""
    name = ended_long_ago(shared_api, conn)
    before = shared_api.get(f"/v1/events/{name}?source=shop", admin=True).json
    remove(conn)

    for reply in (
        shared_api.get(f"/v1/events/{name}?source=shop", admin=True),
        shared_api.request("GET", f"/v1/events/{name}", b"", signed(b"")),
    ):
        assert (reply.status, reply.json["type"]) == (410, "urn:madeira:problem:removed")
        assert (reply.json["status_was"], reply.json["accepted_at"]) == ("succeeded", before["created_at"])
        assert reply.json["removed_at"] > reply.json["ended_at"]
    assert shared_api.get(f"/v1/events/{name}?source=other", admin=True).status == 404
    seen = administrator(shared_api).get(f"/console/events/{name}?source=shop")
    assert seen.status == 410
    assert "removed because of its age" in seen.text


@pytest.mark.parametrize("action", ["cancel", "replay", "reroute", "erase"])
def test_who_acts_on_an_event_that_is_gone_is_told_so(shared_api: Api, conn: "psycopg.Connection[Any]", action: str) -> None:
    name = ended_long_ago(shared_api, conn)
    remove(conn)
    for body in ({"reason": "why"}, {"reason": "why", "endpoint": "sink"})[: 2 if action in ("cancel", "replay") else 1]:
        for known, status in ((name, 410), (f"{name}-never", 404)):
            path = f"/v1/events/{known}/{action}?source=shop"
            assert shared_api.request("POST", path, json.dumps(body).encode(), in_json(ADMIN)).status == status


def test_a_post_of_an_id_that_is_gone_is_a_duplicate(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    """The same bytes are told how the event had ended, alone or in a batch; other ones are a conflict. Nothing is accepted."""
    name = ended_long_ago(shared_api, conn)
    remove(conn)
    again = shared_api.post(event(name))
    assert (again.status, again.json["duplicate"], again.json["status"]) == (200, True, "succeeded")
    other = shared_api.post(event(name, payload={"n": 2}))
    assert (other.status, other.json["type"]) == (409, "urn:madeira:problem:conflict")
    lines = event(name) + b"\n" + event(name, payload={"n": 3})
    batch = shared_api.request("POST", "/v1/events/batch", lines, signed(lines) | {"Content-Type": "application/x-ndjson"})
    assert (batch.json["accepted"], batch.json["duplicates"]) == (0, 1)
    assert [line["line"] for line in batch.json["rejected"]] == [2]
    assert conn.execute("SELECT count(*) FROM event WHERE event_id = %s", (name,)).fetchone() == (0,)


def test_a_payload_that_is_gone_says_whether_time_or_a_person_took_it(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    """In the API and in the console; a person may have the rest erased later."""
    name = ended_long_ago(shared_api, conn)
    while retention.strip(conn, Ages(payload=DAY)).more:
        pass
    path = f"/v1/events/{name}?source=shop"
    shown = shared_api.get(path, admin=True).json
    assert (shown["payload"], shown["erased_by"]) == (None, "retention")
    browser = administrator(shared_api)
    assert "It was removed because of its age" in browser.get(f"/console/events/{name}?source=shop").text
    erased = shared_api.request(
        "POST", f"/v1/events/{name}/erase?source=shop", json.dumps({"reason": "asked for"}).encode(), in_json(ADMIN)
    )
    assert erased.status == 200
    assert shared_api.get(path, admin=True).json["erased_by"] == "person"
    assert "It was erased" in browser.get(f"/console/events/{name}?source=shop").text


def test_the_console_says_how_many_attempts_are_gone(shared_api: Api, conn: "psycopg.Connection[Any]") -> None:
    """Those that the delivery has made and the log has no more."""
    name = ended_long_ago(shared_api, conn)
    browser = administrator(shared_api)
    assert "attempts were removed" not in browser.get(f"/console/events/{name}?source=shop").text
    conn.execute("DELETE FROM delivery_log USING delivery d JOIN event e ON e.seq = d.event_seq "
                 "WHERE d.id = delivery_id AND e.event_id = %s", (name,))  # fmt: skip
    assert "1 of its attempts were removed" in browser.get(f"/console/events/{name}?source=shop").text


def test_the_level_of_the_log_is_asked_for(shared_api: Api) -> None:
    """By an administrator, with a reason; what is wrong is named by its field."""
    asked = shared_api.request("PUT", "/v1/log-level", b'{"level": "debug", "for_s": 60, "reason": "why"}', in_json(ADMIN))
    assert (asked.status, asked.json["level"]) == (200, "debug")
    assert shared_api.get("/v1/log-level", admin=True).json == asked.json
    assert asked.json["until"] is not None
    for body, field in (
        (b'{"reason": "r"}', "level"),
        (b'{"level": "loud", "reason": "r"}', "level"),
        (b'{"level": null}', "reason"),
        (b'{"level": null, "reason": "r", "for_s": 0}', "for_s"),
        (b'{"level": null, "reason": "r", "for_s": 1.5}', "for_s"),
        (b'{"level": null, "reason": "r", "for_s": true}', "for_s"),
        (b'{"level": null, "reason": "r", "why": 1}', "why"),
    ):
        reply = shared_api.request("PUT", "/v1/log-level", body, in_json(ADMIN))
        assert (reply.status, [e["field"] for e in reply.json["errors"]]) == (422, [field])
    own = shared_api.request("PUT", "/v1/log-level", b'{"level": null, "for_s": 9.0, "reason": "why"}', in_json(ADMIN))
    assert own.json == {"level": None, "until": None}
