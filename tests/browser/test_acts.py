"""What can be done in the console, done with a mouse in a real browser: by who may, once, and by nobody else."""

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from madeira.states import Role
from madeira.store import job_steps, routing
from tests.api.people import ADMIN, audited, token
from tests.api.serving import Api, event
from tests.browser.conftest import Windows
from tests.browser.window import Window
from tests.console.scenes import died, made_endpoint
from tests.receiver import Answer, Receiver
from tests.store import making

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Connection = psycopg.Connection[Any]


def status(conn: Connection, event_id: str) -> str:
    ((found,),) = conn.execute("SELECT status FROM event WHERE event_id = %s", (event_id,))
    return str(found)


def state(conn: Connection, endpoint: str) -> str:
    ((found,),) = conn.execute("SELECT state FROM endpoint WHERE name = %s", (endpoint,))
    return str(found)


def jobs(conn: Connection, endpoint: str) -> list[tuple[int, str, int]]:
    """The jobs about the dead letters of an endpoint: id, state, and how many they are about."""
    rows = conn.execute("SELECT id, state, total FROM job WHERE selection ->> 'endpoint' = %s ORDER BY id", (endpoint,))
    return rows.fetchall()


def done(page: "Page") -> str:
    """What the page says was done."""
    return page.locator("#done").inner_text()


# -- the way of a newcomer -------------------------------------------------------------------------------------------


def test_from_the_overview_to_a_replayed_dead_letter_are_three_clicks(
    windows: Windows, shared_api: Api, conn: Connection
) -> None:
    name = made_endpoint(shared_api)
    event_id = died(conn, name)
    seen = windows(None)
    seen.sign_in(token(shared_api, Role.OPERATOR)[0])
    assert seen.address == "/console"
    clicks = 0

    def click(what: Any) -> None:
        nonlocal clicks
        clicks += 1
        what.click()

    page = seen.page
    click(page.locator("#dead-table tr", has_text=name).get_by_role("link", name="1", exact=True))
    click(page.locator(".picking .row", has_text="All 1 that match").get_by_role("link", name="Replay…"))
    assert "Sends 1 dead letter again" in seen.text()
    page.get_by_label("Reason").fill("they are back")
    click(page.get_by_role("button", name="Replay 1 dead letter"))
    page.locator("#done").wait_for()
    assert clicks <= 3
    [(number, _, total)] = jobs(conn, name)
    assert total == 1
    job_steps.step(conn, number)
    assert status(conn, event_id) == "delivering"


# -- finding ---------------------------------------------------------------------------------------------------------


def test_a_search_finds_and_chips_take_a_filter_away(windows: Windows, shared_api: Api, conn: Connection) -> None:
    name = made_endpoint(shared_api)
    ids = [died(conn, name, payload=json.dumps({"customer": "Ms Wilhelmina"})) for _ in range(2)]
    seen = windows(Role.VIEWER)
    page = seen.open("/console/events")
    page.get_by_label("An event's id, a trace, or words").fill("wilhelmina")
    page.get_by_text("More filters").click()
    page.get_by_label("Endpoint").fill(name)
    page.get_by_label("Status").select_option("dead")
    page.get_by_role("button", name="Find").click()
    page.locator(".chip").nth(2).wait_for()
    assert page.locator("tbody tr").count() == 2
    assert page.get_by_label("Endpoint").is_visible(), "the filters that are set can be seen"
    for left in (2, 1, 0):
        page.locator(".chip").first.click()
        page.wait_for_function(f"document.querySelectorAll('.chip').length === {left}")
    assert seen.address == "/console/events"
    page.get_by_label("An event's id, a trace, or words").fill(ids[0])
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/events/{ids[0]}?source=shop")
    page.go_back()
    page.get_by_role("link", name="Follow").click()
    page.get_by_role("link", name="Stop following").wait_for()
    assert "follow=1" in seen.address


def test_a_dry_run_says_what_would_become_of_an_event(windows: Windows) -> None:
    page = windows(Role.VIEWER).open("/console/dry-run")
    page.get_by_label("Source").select_option("shop")
    page.get_by_label("Type").fill("order.paid")
    page.get_by_label("Payload").fill('{"n": 1}')
    page.get_by_label("Status of a sample answer").fill("503")
    page.get_by_role("button", name="Try it").click()
    page.get_by_role("heading", name="To sink").wait_for()
    assert "tried again in" in page.locator(".card").inner_text()
    assert '"n": 1' in page.locator(".card pre").inner_text()


# -- acting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["replay", "cancel", "reroute"])
def test_one_event_is_acted_upon_for_a_reason(windows: Windows, conn: Connection, action: str) -> None:
    event_id = f"one-to-{action}"
    if action == "replay":
        died(conn, event_id=event_id)
    elif action == "cancel":
        making.routed(conn, ("sink",), event_id=event_id)
    else:
        routing.route(conn, [(making.accept(conn, event_id=event_id), [])])
    seen = windows()
    page = seen.open(f"/console/events/{event_id}?source=shop")
    form = page.locator(f"form[action*='/{action}']")
    form.get_by_role("button").click()
    assert page.locator("#done").count() == 0, "the browser asks for the reason"
    form.get_by_label("Reason").fill("as agreed")
    form.get_by_role("button").click()
    page.locator("#done").wait_for()
    assert status(conn, event_id) == {"replay": "delivering", "cancel": "cancelled", "reroute": "pending"}[action]
    page.locator("#done").get_by_role("link", name="On record").click()
    page.get_by_role("heading", name="Audit").wait_for()
    assert "as agreed" in seen.text()


def test_what_is_ticked_is_acted_upon_after_a_preview_and_a_double_click_makes_one_job(
    windows: Windows, shared_api: Api, conn: Connection
) -> None:
    name = made_endpoint(shared_api)
    ids = [died(conn, name) for _ in range(3)]
    seen = windows()
    page = seen.open(f"/console/dead-letters?endpoint={name}")
    for event_id in ids[:2]:
        page.locator("#letters tr", has=page.locator(f"[title='{event_id}']")).get_by_role("checkbox").check()
    page.locator("#pick").get_by_role("button", name="Cancel…").click()
    page.get_by_role("heading", name="Cancel 2 dead letters?").wait_for()
    assert [status(conn, one) for one in ids] == ["dead"] * 3, "nothing was done yet"
    page.get_by_label("Reason").fill("they must go")
    before = audited(shared_api)
    page.get_by_role("button", name="Cancel 2 dead letters").dblclick()
    page.locator("#done").wait_for()
    [(number, _, total)] = jobs(conn, name)
    assert total == 2
    assert audited(shared_api) == before + 1
    while not job_steps.step(conn, number).is_over:
        pass
    assert [status(conn, one) for one in ids] == ["cancelled", "cancelled", "dead"]


def test_a_job_is_paused_resumed_and_cancelled(windows: Windows, shared_api: Api, conn: Connection) -> None:
    name = made_endpoint(shared_api)
    for _ in range(3):
        died(conn, name)
    seen = windows()
    page = seen.open(f"/console/jobs/new?action=replay&endpoint={name}")
    page.get_by_label("Order").select_option("0")
    page.get_by_label("Pace, per second at most").fill("2.5")
    page.get_by_label("Reason").fill("they are back")
    page.get_by_role("button", name="Replay 3 dead letters").click()
    page.locator("#done").wait_for()
    for steer, after in (("Pause", "paused"), ("Resume", "running"), ("Cancel", "cancelled")):
        form = page.locator(f"form[action$='/{steer.lower()}']")
        form.get_by_label("Reason").fill("as agreed")
        form.get_by_role("button", name=f"{steer} the job").click()
        page.locator("#progress .state", has_text=after).wait_for()
        assert jobs(conn, name)[0][1] == after


def test_an_endpoint_is_held_let_go_and_tried(windows: Windows, shared_api: Api, conn: Connection) -> None:
    with Receiver() as receiver:
        receiver.default(Answer(status=503, body="<b>closed</b>"))
        name = made_endpoint(shared_api, url=receiver.url("/hook"))
        page = windows().open(f"/console/endpoints/{name}")
        for action, after in (("Pause", "paused"), ("Resume", "active"), ("Disable", "disabled"), ("Enable", "active")):
            form = page.locator(f"form[action$='/{action.lower()}']")
            form.get_by_label("Reason").fill("as agreed")
            form.get_by_role("button", name=action).click()
            page.locator("#done").wait_for()
            assert state(conn, name) == after
        page.get_by_label("Payload").fill('{"hello": 1}')
        page.get_by_role("button", name="Call it").click()
        page.get_by_role("heading", name="The test call").wait_for()
        assert "<b>closed</b>" in page.locator("#tried + .card").inner_text()
        assert len(receiver.calls) == 1


# -- who may not -----------------------------------------------------------------------------------------------------


def test_a_viewer_is_offered_nothing_and_what_he_posts_all_the_same_is_refused(
    windows: Windows, shared_api: Api, conn: Connection
) -> None:
    name = made_endpoint(shared_api)
    event_id = died(conn, name)
    ((letter,),) = conn.execute("SELECT id FROM delivery WHERE endpoint = %s", (name,))
    seen = windows(Role.VIEWER)
    for address in ("/console", f"/console/endpoints/{name}", f"/console/events/{event_id}?source=shop",
                    f"/console/dead-letters/{letter}", "/console/dead-letters", "/console/jobs"):  # fmt: skip
        page = seen.open(address)
        assert page.get_by_role("button", name="Sign out").count() == 1
        offered = page.locator("main button:visible, main .button:visible").all_inner_texts()
        assert set(offered) <= {"Find", "Filter", "copy"}, address
    before = audited(shared_api)
    csrf = page.locator("input[name=csrf]").first.input_value()
    answers = page.evaluate(
        """async ([csrf, addresses]) => Promise.all(addresses.map(async (address) => (await fetch(address, {
             method: "POST", body: new URLSearchParams({csrf, reason: "x", key: "k", action: "cancel", filter: "{}"}),
           })).status))""",
        [csrf, [f"/console/endpoints/{name}/pause", f"/console/events/{event_id}/replay?source=shop", "/console/jobs"]],
    )
    assert answers == [403, 403, 403]
    assert audited(shared_api) == before
    assert (state(conn, name), status(conn, event_id), jobs(conn, name)) == ("active", "dead", [])


@pytest.mark.parametrize("site", ["http://evil.example", "http://127.0.0.1:8999"], ids=["another site", "another port"])
def test_a_form_on_a_page_of_another_origin_does_nothing(windows: Windows, shared_api: Api, conn: Connection, site: str) -> None:
    name = made_endpoint(shared_api)
    seen = windows(Role.ADMIN)
    seen.open("/console")
    before = audited(shared_api)
    target = f"{seen.base}/console/endpoints/{name}/pause"
    fields = "<input name=reason value=gotcha><input name=csrf value=x><button>Win</button>"
    form = f"<form method=post action='{target}'>{fields}</form>"

    def trap(route: "Route") -> None:
        route.fulfill(content_type="text/html", body=form)

    seen.context.route(f"{site}/**", trap)
    other = seen.context.new_page()
    other.goto(f"{site}/prize")
    with other.expect_response(target) as answer:
        other.get_by_role("button").click()
    assert answer.value.status in (303, 403)
    assert audited(shared_api) == before
    assert state(conn, name) == "active"
    other.close()
    seen.open("/console")
    assert seen.title == "Overview", "and the session goes on"


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_told_so_and_signing_out_ends_the_session(windows: Windows, shared_api: Api) -> None:
    seen = windows(None)
    page = seen.sign_in("wrong")
    assert "does not hold" in page.get_by_role("alert").inner_text()
    seen.picture("sign-in-refused")
    assert seen.looked_over("sign-in") == []
    seen.sign_in(token(shared_api, Role.VIEWER)[0])
    assert seen.address == "/console"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in*")
    seen.open("/console/audit")
    assert seen.title == "Sign in"


def test_a_revoked_session_stops_refreshing_leads_to_sign_in_and_then_to_the_page_asked_for(
    windows: Windows, shared_api: Api, conn: Connection
) -> None:
    name = made_endpoint(shared_api)
    text, who = token(shared_api, Role.OPERATOR)
    seen = windows(None)
    seen.sign_in(text)
    page = seen.open(f"/console/endpoints/{name}")
    assert shared_api.request("DELETE", f"/v1/tokens/{who}", None, ADMIN).status == 200
    page.get_by_text("What you see is not refreshed any more").wait_for()
    seen.picture("session-ended")
    form = page.locator("form[action$='/pause']")
    form.get_by_label("Reason").fill("as agreed")
    form.get_by_role("button").click()
    page.wait_for_url("**/sign-in*")
    assert state(conn, name) == "active"
    page.get_by_label("Token of the API").fill(token(shared_api, Role.OPERATOR)[0])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"**/console/endpoints/{name}")
    # What the browser said of the redirects that a refresh does not follow.
    seen.errors[:] = [error for error in seen.errors if "redirect" not in error.lower() and "ERR_FAILED" not in error]


# -- without scripts -------------------------------------------------------------------------------------------------


def test_without_javascript_everything_can_be_read_and_done(windows: Windows, shared_api: Api, conn: Connection) -> None:
    name = made_endpoint(shared_api)
    event_id = died(conn, name)
    assert shared_api.post(event("posted-without-a-script")).status == 202
    seen: Window = windows(width=375, java_script_enabled=False)
    for address, words in (
        ("/console", name), ("/console/events", "order.paid"), (f"/console/events/{event_id}?source=shop", "Attempt 2"),
        ("/console/dead-letters", "http_503"), ("/console/jobs", "There was no job" if not jobs(conn, name) else "replay"),
        ("/console/endpoints", name), ("/console/routes", "all"), ("/console/sources", "shop"), ("/console/audit", "admin"),
    ):  # fmt: skip
        page = seen.open(address)
        assert words in seen.text() or address == "/console/jobs", address
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), address
    seen.open(f"/console/endpoints/{name}")
    form = page.locator("form[action$='/pause']")
    form.get_by_label("Reason").fill("as agreed")
    form.get_by_role("button").click()
    assert f"The endpoint {name} is paused" in done(page)
    assert state(conn, name) == "paused"
