"""Everything can be reached by keys, and one sees where one is."""

from typing import Any

import psycopg
import pytest

from madeira.states import Role
from tests.browser.conftest import Windows
from tests.store import making

Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def letters(conn: Connection) -> list[int]:
    """Some dead letters, the earliest first."""
    return [making.died(conn, f"event-{n}", "sink", "http_503", "503 Service Unavailable") for n in range(5)]


def test_slash_goes_to_the_search_and_what_is_typed_there_is_no_command(windows: Windows, letters: list[int]) -> None:
    page = windows(Role.VIEWER).open("/console/events")
    page.keyboard.press("/")
    page.keyboard.type("jk?x/")
    field = page.get_by_label("An event's id, a trace, or words")
    assert field.input_value() == "jk?x/"
    assert page.locator("tr.here").count() == 0
    assert not page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    assert page.locator("tr.here").count() == 1


def test_j_and_k_go_through_the_rows_and_enter_opens_the_one(windows: Windows, letters: list[int]) -> None:
    seen = windows(Role.VIEWER)
    page = seen.open("/console/events")
    for key in "jjjk":
        page.keyboard.press(key)
    here = page.locator("tr.here")
    assert here.locator(".id").first.get_attribute("title") == "event-3"
    page.keyboard.press("Enter")
    page.wait_for_url("**/events/event-3?source=shop")
    page.go_back()
    for _ in range(9):
        page.keyboard.press("j")
    assert page.locator("tr.here .id").get_attribute("title") == "event-0", "the last one is the last one"


def test_keys_go_on_after_a_box_was_ticked_with_the_mouse(windows: Windows, letters: list[int]) -> None:
    page = windows(Role.OPERATOR).open("/console/dead-letters")
    page.locator("#letters").get_by_role("checkbox").first.click()
    page.keyboard.press("j")
    assert page.locator("tr.here").count() == 1
    page.locator("#letters").get_by_role("checkbox").first.click()
    page.keyboard.press("?")
    assert page.get_by_role("heading", name="Keys").is_visible()


def test_x_ticks_the_row_and_the_page_counts_what_is_ticked(windows: Windows, letters: list[int]) -> None:
    page = windows(Role.OPERATOR).open("/console/dead-letters")
    replay = page.locator("#pick").get_by_role("button", name="Replay…")
    assert replay.is_disabled()
    # The group first, then each.
    for key in "jjxjx":
        page.keyboard.press(key)
    assert page.locator("[data-ticked]").inner_text() == "2 ticked"
    assert replay.is_enabled()
    page.keyboard.press("x")
    assert page.locator("[data-ticked]").inner_text() == "1 ticked"
    page.get_by_label("tick all").check()
    assert page.locator("[data-ticked]").inner_text() == "5 ticked"
    page.get_by_label("tick all").uncheck()
    assert replay.is_disabled()


def test_a_question_mark_tells_the_keys_and_escape_goes_back(windows: Windows, letters: list[int]) -> None:
    page = windows(Role.VIEWER).open("/console/events")
    page.keyboard.press("j")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    assert dialog.is_visible()
    page.keyboard.press("j")
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert page.locator("tr.here .id").get_attribute("title") == "event-4", "the page behind has not moved"


#: Where the focus is, and how it shows: the outline's width and style, and whether the element is in the window.
_FOCUS = """() => {
  const e = document.activeElement, s = getComputedStyle(e), r = e.getBoundingClientRect();
  const name = `${e.tagName} ${e.getAttribute("href") ?? e.getAttribute("name") ?? e.textContent.trim()}`;
  const isSeen = r.width > 0 && r.right > 0 && r.left < innerWidth && r.bottom > 0 && r.top < innerHeight;
  return [e === document.body ? "" : name, parseFloat(s.outlineWidth), s.outlineStyle, isSeen];
}"""


@pytest.mark.parametrize("address", ["/console", "/console/dead-letters", "/console/endpoints/sink", "/console/dry-run"])
def test_the_focus_meets_every_control_in_turn_and_is_always_seen(windows: Windows, letters: list[int], address: str) -> None:
    page = windows(Role.OPERATOR).open(address)
    wanted = page.locator(
        "a[href]:visible, button:visible:enabled, input:visible:not([type=hidden]), select:visible, textarea:visible,"
        " summary:visible"
    ).count()
    met = []
    while True:
        page.keyboard.press("Tab")
        name, width, style, is_seen = page.evaluate(_FOCUS)
        if not name or len(met) > 2 * wanted:
            break
        assert style not in ("none", "auto"), name
        assert width >= 2, name
        assert is_seen, name
        met.append(name)
    assert met[0].startswith("A #main"), "a way past the navigation comes first"
    assert len(met) >= wanted
