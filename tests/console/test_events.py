"""Events are found, filtered and turned page by page, and each tells its story."""

import json
import uuid
from typing import Any

import psycopg
import pytest

from madeira.states import Role
from tests.api.serving import Api, event
from tests.console.browser import Element, Seen, queried, somebody
from tests.console.scenes import died
from tests.store import making


def found(seen: Seen) -> list[str]:
    """The ids of the events on a page."""
    return [row.one("span", class_="id").attributes["title"] for row in seen.root.all("tr") if row.all("span", class_="id")]


def test_an_event_is_found_by_its_id_and_shown_at_once(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    event_id = died(conn)
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/events?q={event_id}")
    assert seen.address == f"/console/events/{event_id}?source=shop"


def test_events_are_found_by_their_trace_and_by_words(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    trace, word = uuid.uuid4().hex, uuid.uuid4().hex[:12]
    ids = [died(conn, trace_id=trace, payload=json.dumps({"n": n, "customer": f"Ms {word.upper()}"})) for n in range(2)]
    assert sorted(found(browser.get(f"/console/events?q={trace}"))) == sorted(ids)
    assert sorted(found(browser.get(f"/console/events?trace_id={trace}"))) == sorted(ids)
    assert sorted(found(browser.get(f"/console/events?q=ms+{word}"))) == sorted(ids)
    assert found(browser.get(f"/console/events?q={word}&status=succeeded")) == []
    assert "No event matches" in browser.get(f"/console/events?q=no-{word}").text


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("status=dead", True), ("status=succeeded", False), ("event_type=order.*", True), ("event_type=user.*", False),
        ("source=shop", True), ("source=other", False), ("since=2020-01-01T00:00", True), ("until=2020-01-01T00:00", False),
        ("since=2020-01-01T00:00:00%2B01:00", True),
    ],
)  # fmt: skip
def test_a_filter_narrows_and_is_a_chip_that_takes_it_away(
    shared_api: Api, conn: psycopg.Connection[Any], query: str, expected: bool
) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    name = f"e-{uuid.uuid4().hex[:8]}"
    event_id = died(conn, name)
    # As a form sends it: what was left empty comes along.
    seen = browser.get(f"/console/events?endpoint={name}&q=&trace_id=&{query}")
    assert found(seen) == [event_id] * expected
    chips = seen.root.all("a", class_="chip")
    assert [queried(chip.attributes["href"]) for chip in chips if "endpoint" not in chip.text] == [{"endpoint": name}]


@pytest.mark.parametrize(
    "query", ["status=odd", "colour=red", "since=yesterday", "before=x", "follow=2", "status=dead&status=dead"]
)
def test_a_filter_that_cannot_be_is_told_in_words_and_does_not_show_everything(shared_api: Api, query: str) -> None:
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/events?{query}")
    assert seen.status == 422
    assert seen.root.one("main").all("li")
    assert not seen.root.all("table")


def test_pages_of_events_go_on_from_a_place_and_miss_none(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    source = f"s{uuid.uuid4().hex[:8]}"
    ids = [uuid.uuid4().hex for _ in range(120)]
    for event_id in ids:
        making.accept(conn, source=source, event_id=event_id)
    seen, met = browser.get(f"/console/events?source={source}"), []
    while True:
        met += found(seen)
        # Accepted while somebody turns the pages.
        making.accept(conn, source=source)
        older = [a for a in seen.root.all("a") if a.attributes.get("rel") == "next"]
        if not older:
            break
        assert len(found(seen)) == 50
        seen = browser.get(older[0].attributes["href"])
    assert met == ids[::-1]


def test_following_marks_the_list_as_a_whole_and_otherwise_each_row(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    """So that nothing moves under one's eyes unless one asks for it."""
    died(conn)
    browser = somebody(shared_api, Role.VIEWER)
    seen = browser.get("/console/events")
    assert {row.attributes["data-live"] for row in seen.root.one("tbody").all("tr")} == {"row"}
    assert "data-live" not in seen.root.one("tbody").attributes
    followed = browser.get("/console/events?follow=1")
    assert followed.root.one("tbody").attributes["data-live"] == "whole"
    for page in (seen, followed, browser.get("/console")):
        assert all(e.attributes.get("id") for e in page.root.all() if "data-live" in e.attributes)


def steps(seen: Seen) -> list[Element]:
    return seen.root.one("ol", class_="line").all("li")


def test_the_timeline_tells_each_step_from_post_to_outcome(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    event_id = died(conn)
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/events/{event_id}?source=shop")
    line = [step.one("b").text if len(step.all("b")) == 1 else "" for step in steps(seen) if step.all("div", class_="when")]
    assert line == [
        "Accepted from shop",
        "Routed to sink",
        "Attempt 1 to sink: HTTP 503 in 0.2 s",
        "Attempt 2 to sink: HTTP 503 in 0.2 s",
        "dead",
    ]
    told = seen.root.one("ol", class_="line").text
    for words in ("sink by some route", "503 Service Unavailable", "tried again", "given up (receiver)", "waits for a person"):
        assert words in told
    folded = [d.one("pre").text for d in seen.root.one("ol", class_="line").all("details") if d.all("pre")]
    assert folded == ["ok", "ok"]
    assert not [d for d in seen.root.all("details") if "open" in d.attributes]


def test_what_is_unfinished_says_what_it_waits_for(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    event_id = uuid.uuid4().hex
    [ref] = making.routed(conn, ("sink",), event_id=event_id)
    browser = somebody(shared_api, Role.VIEWER)
    address = f"/console/events/{event_id}?source=shop"
    assert "in no queue at this moment" in steps(browser.get(address))[-1].text
    assert "reconcile puts it there" in steps(browser.get(address))[-1].text
    held = making.claimed(conn, ref)
    assert "sink is being called" in steps(browser.get(address))[-1].text
    making.settled(conn, held)
    assert "nothing is left to be done" in steps(browser.get(address))[-1].text


def test_an_event_posted_to_the_api_waits_in_its_queue_and_its_json_is_the_one_of_the_api(shared_api: Api) -> None:
    event_id = uuid.uuid4().hex
    assert shared_api.post(event(event_id, payload={"big": 10**19})).status == 202
    browser = somebody(shared_api, Role.VIEWER)
    seen = browser.get(f"/console/events/{event_id}?source=shop")
    assert "Waits to be routed" in steps(seen)[-1].text
    whole = browser.ask("GET", f"/console/events/{event_id}/json?source=shop")
    assert whole.headers["content-type"] == "application/json"
    assert whole.json == shared_api.get(f"/v1/events/{event_id}?source=shop", admin=True).json | {"waits": whole.json["waits"]}
    assert b'"big": 10000000000000000000' in whole.body
    assert f"/v1/events/{event_id}?source=shop" in seen.root.one("pre", id="curl").text


def test_an_event_that_is_not_there_is_told_in_words(shared_api: Api) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    assert browser.get("/console/events/nothing?source=shop").status == 404
    assert browser.get("/console/events/nothing").status == 422
    assert browser.get("/console/events/%00%3Cb%3E?source=shop").status == 404
