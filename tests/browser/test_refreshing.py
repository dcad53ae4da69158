"""A page refreshes itself while it is looked at, and never moves what somebody reads or types."""

import json
import time
from typing import TYPE_CHECKING, Any

import psycopg

from tests.api.people import ADMIN, in_json
from tests.api.serving import Api
from tests.browser.conftest import Windows
from tests.browser.window import Window
from tests.console.scenes import made_endpoint
from tests.store import making
from tests.system.harness import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Connection = psycopg.Connection[Any]


def opened(seen: Window, address: str) -> "Page":
    """A page whose clock stands still, so that a test lets the seconds pass."""
    seen.page.clock.install()
    seen.page.clock.pause_at(time.time() + 1)
    return seen.open(address)


def refreshed(page: "Page") -> None:
    """Let it refresh itself once, to the end."""
    with page.expect_response(lambda answer: "x-madeira-refresh" in answer.request.headers) as answer:
        page.clock.run_for(2000)
    answer.value.finished()
    # The page goes on once it has read the answer: the next time is set then.
    page.evaluate("() => new Promise((done) => queueMicrotask(done))")


def act(api: Api, endpoint: str, action: str) -> None:
    body = json.dumps({"reason": "as agreed"}).encode()
    assert api.request("POST", f"/v1/endpoints/{endpoint}/{action}", body, in_json(ADMIN)).status == 200


def asked(seen: Window, page_address: str) -> int:
    """How often the page itself was asked for."""
    return seen.asked.count(seen.base + page_address)


def test_what_changes_is_shown_while_somebody_types_and_his_text_stays(windows: Windows, shared_api: Api) -> None:
    name = made_endpoint(shared_api)
    seen = windows()
    page = opened(seen, f"/console/endpoints/{name}")
    field = page.locator("form[action$='/pause'] input[name=reason]")
    field.fill("their migr")
    act(shared_api, name, "disable")
    refreshed(page)
    page.locator("#state .state", has_text="disabled").wait_for()
    page.keyboard.type("ation")
    assert field.input_value() == "their migration"


def test_what_was_unfolded_or_is_selected_stays_so(windows: Windows, conn: Connection) -> None:
    event_id = "unfolded"
    [ref] = making.routed(conn, ("sink",), event_id=event_id)
    making.settled(conn, making.claimed(conn, ref), making.RETRY)
    seen = windows()
    page = opened(seen, f"/console/events/{event_id}?source=shop")
    page.locator("#line summary").nth(1).click()
    assert page.locator("#line details[open]").count() == 1
    making.make_due(conn, ref.delivery_id)
    making.settled(conn, making.claimed(conn, ref), making.RETRY)
    refreshed(page)
    page.locator("#line b", has_text="Attempt 2").wait_for()
    assert page.locator("#line details[open]").count() == 1
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#line li b'))")
    chosen = page.evaluate("getSelection().toString()")
    making.make_due(conn, ref.delivery_id)
    making.settled(conn, making.claimed(conn, ref))
    refreshed(page)
    assert page.evaluate("getSelection().toString()") == chosen == "Accepted from shop"
    page.evaluate("getSelection().removeAllRanges()")
    refreshed(page)
    page.locator("#line b", has_text="Attempt 3").wait_for()


def test_who_follows_sees_new_events_on_top_and_the_row_that_he_reads_stays_in_its_place(
    windows: Windows, conn: Connection
) -> None:
    for n in range(45):
        making.routed(conn, ("sink",), event_id=f"before-{n}")
    seen = windows(height=600)
    page = opened(seen, "/console/events?follow=1")
    making.routed(conn, ("sink",), event_id="a-new-one")
    refreshed(page)
    page.locator("#events tr").first.get_by_text("a-new-one").wait_for()
    for _ in range(20):
        page.keyboard.press("j")
    here = page.locator("tr.here .id").get_attribute("title")
    page.mouse.wheel(0, 300)
    wait_until(lambda: page.evaluate("scrollY") >= 300, what="the page to be scrolled")
    before = page.locator("tr.here").bounding_box()
    for n in range(5):
        making.routed(conn, ("sink",), event_id=f"newer-{n}")
    refreshed(page)
    page.locator("#events tr").first.get_by_text("newer-4").wait_for()
    after = page.locator("tr.here").bounding_box()
    assert before
    assert after
    assert page.locator("tr.here .id").get_attribute("title") == here
    assert abs(after["y"] - before["y"]) < 2, (before, after)


def test_nothing_is_asked_for_while_nobody_looks(windows: Windows) -> None:
    seen = windows()
    seen.page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => Boolean(window.away) })")
    page = opened(seen, "/console")
    refreshed(page)
    asked_before = asked(seen, "/console")
    assert asked_before == 2
    page.evaluate("window.away = true")
    page.clock.run_for(60_000)
    assert asked(seen, "/console") == asked_before
    page.evaluate("window.away = false")
    refreshed(page)
    assert asked(seen, "/console") == asked_before + 1


def test_a_page_without_anything_that_changes_is_not_asked_for_again(windows: Windows) -> None:
    seen = windows()
    page = opened(seen, "/console/routes")
    page.clock.run_for(60_000)
    assert asked(seen, "/console/routes") == 1


def test_on_a_phone_rows_say_their_headings_also_after_they_were_refreshed(windows: Windows, conn: Connection) -> None:
    [ref] = making.routed(conn, ("sink",), event_id="on-a-phone")
    seen = windows(width=375)
    page = opened(seen, "/console/events")
    row = page.locator("tr", has_text="on-a-phone")
    labels = row.locator("td").evaluate_all("cells => cells.map((cell) => cell.dataset.label ?? '')")
    assert labels == ["", "Status", "Type", "Source → endpoints", "Attempts", "Accepted"]
    making.settled(conn, making.claimed(conn, ref))
    refreshed(page)
    row.get_by_text("succeeded").wait_for()
    assert row.locator("td").evaluate_all("cells => cells.map((cell) => cell.dataset.label ?? '')") == labels
    assert seen.faults() == []
