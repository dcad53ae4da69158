"""Every page, for everybody: what it says, how large it is, and that it is well-formed."""

import json
import time
import uuid
from typing import Any

import psycopg
import pytest

from madeira.states import Role
from madeira.store import audit
from tests.api.serving import Api
from tests.console.browser import Browser, administrator, somebody
from tests.console.scenes import HOSTILE, LARGEST, died, made_endpoint
from tests.store import making


def addresses(event_id: str) -> list[str]:
    return [
        "/console",
        "/console/events",
        f"/console/events/{event_id}?source=shop",
        "/console/dead-letters",
        "/console/jobs",
        "/console/endpoints",
        "/console/endpoints/sink",
        "/console/endpoints/callback",
        "/console/routes",
        "/console/routes/all",
        "/console/sources",
        "/console/sources/shop",
        "/console/dry-run",
        "/console/audit",
    ]


@pytest.mark.parametrize("role", list(Role))
def test_every_page_is_there_for_every_role_and_small_and_has_one_heading(
    shared_api: Api, conn: psycopg.Connection[Any], role: Role
) -> None:
    browser = somebody(shared_api, role)
    for address in addresses(died(conn)):
        seen = browser.get(address)
        assert seen.status == 200, (address, seen.text)
        assert len(seen.reply.body) < LARGEST, address
        assert len(seen.root.all("h1")) == 1, address
        assert [a.text for a in seen.root.all("a", aria_current="page")] == [section_of(address)]


def section_of(address: str) -> str:
    return address.removeprefix("/console").split("?")[0].strip("/").split("/")[0].replace("-", " ").capitalize() or "Overview"


def test_no_page_holds_a_script_or_a_style_of_its_own_or_loads_what_is_not_ours(
    shared_api: Api, conn: psycopg.Connection[Any]
) -> None:
    browser = somebody(shared_api, Role.OPERATOR)
    for address in [*addresses(died(conn)), "/console/nothing"]:
        root = browser.get(address).root
        assert all(not script.children for script in root.all("script"))
        assert not root.all("style")
        for element in root.all():
            assert not [n for n in element.attributes if n.startswith("on") or n == "style"], (address, element)
            for name in ("src", "href", "action"):
                assert element.attributes.get(name, "/console").startswith(("/console", "#")), (address, element)


def test_a_viewer_is_offered_nothing_that_he_may_not_do(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    for address in addresses(died(conn)):
        posts = [f.attributes["action"] for f in browser.get(address).root.all("form", method="post")]
        assert [action for action in posts if action != "/console/dry-run"] == ["/console/sign-out"], address
    assert "sign in with one of an operator" in browser.get("/console/endpoints/sink").text


def test_ids_are_shortened_and_hold_the_whole(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    event_id = died(conn)
    seen = somebody(shared_api, Role.VIEWER).get("/console/events?endpoint=sink")
    shown = seen.root.one(title=event_id)
    assert shown.text == f"{event_id[:10]}…{event_id[-8:]}"


# -- endpoints, routes, sources --------------------------------------------------------------------------------------


def test_configurations_are_shown_without_their_secrets(shared_api: Api) -> None:
    secret = f"secret-{uuid.uuid4().hex}"
    name = made_endpoint(shared_api, secrets=[secret], headers={"Authorization": f"Bearer {secret}"})
    browser = somebody(shared_api, Role.ADMIN)
    for address in (f"/console/endpoints/{name}", "/console/sources/shop", "/console/audit"):
        body = browser.ask("GET", address).body.decode()
        assert secret not in body
        assert "a-secret-of-the-tests" not in body
    assert "hidden" in browser.get(f"/console/endpoints/{name}").text


def test_an_endpoint_shows_its_history(shared_api: Api) -> None:
    browser = administrator(shared_api)
    name = made_endpoint(shared_api)
    browser.submit(browser.get(f"/console/endpoints/{name}"), "/disable", reason="gone for good")
    seen = browser.get(f"/console/endpoints/{name}")
    latest, made = (row.text for row in seen.root.all("table")[-1].one("tbody").all("tr"))
    assert "admin disable gone for good" in latest
    assert "admin create" in made
    assert "disabled" in seen.root.one(id="state").text


@pytest.mark.parametrize(
    "address", ["/console/endpoints/nobody", "/console/routes/nobody", "/console/sources/a%20b", "/console/routes/x%2Fy"]
)
def test_what_is_not_configured_is_told_in_words(shared_api: Api, address: str) -> None:
    seen = somebody(shared_api, Role.VIEWER).get(address)
    assert seen.status == 404
    assert len(seen.text) > 20


def test_an_endpoint_that_is_not_configured_says_so_and_does_not_flow(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    name = f"e-{uuid.uuid4().hex[:8]}"
    [ref] = making.routed(conn, (name,))
    seen = somebody(shared_api, Role.VIEWER).get("/console/endpoints")
    conn.execute("DELETE FROM event WHERE seq = %s", (ref.seq,))
    [row] = [row for row in seen.root.one(id="endpoints-table").one("tbody").all("tr") if name in row.text]
    assert row.text.startswith(f"{name} not configured 1 ")
    assert "bad" in row.one("span", class_="state").attributes["class"]


# -- strangers -------------------------------------------------------------------------------------------------------


def test_whatever_came_from_outside_is_text_on_every_page(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    """In every field that the database lets through, whether or not a door would have refused it."""
    fields = {"event_type": HOSTILE, "trace_id": HOSTILE[:60], "routing_key": HOSTILE, "target_uri": f"http://x/{HOSTILE}"}
    event_id = died(conn, payload=json.dumps(HOSTILE), parameters=json.dumps({HOSTILE: HOSTILE}), **fields)
    conn.execute("UPDATE event SET reason = %s WHERE event_id = %s", (HOSTILE, event_id))
    conn.execute("UPDATE delivery SET last_error = %s, endpoint = %s WHERE trace_id = %s", (HOSTILE, HOSTILE, HOSTILE[:60]))
    conn.execute(
        "UPDATE delivery_log SET reason = %s, url = %s, worker = %s, excerpt = %s", (HOSTILE, HOSTILE, HOSTILE, HOSTILE.encode())
    )
    audit.record(conn, HOSTILE, "replay", f"event shop/{event_id}", HOSTILE, {HOSTILE: HOSTILE})
    audit.record(conn, HOSTILE, "pause", "endpoint sink", HOSTILE, {HOSTILE: HOSTILE})
    browser = somebody(shared_api, Role.OPERATOR)
    pages = {address: browser.get(address) for address in [*addresses(event_id), f"/console/events?q={'%3C'}script"]}
    for address, seen in pages.items():
        assert b"alert(1)</script>" not in seen.reply.body, address
        assert b"<img" not in seen.reply.body, address
        assert len(seen.root.all("script")) == 1, address
        assert "49" not in [e.text for e in seen.root.all("b")], address
    told = pages[f"/console/events/{event_id}?source=shop"].text
    assert told.count("<script>alert(1)</script>") > 5, "it is shown, as what it is"
    conn.execute("DELETE FROM event WHERE event_id = %s", (event_id,))


def test_what_is_asked_for_in_an_address_is_text_too(shared_api: Api) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    for address in (
        '/console/events?q="><script>alert(1)</script>'.replace("<", "%3C").replace(">", "%3E").replace('"', "%22"),
        "/console/audit?who=%22%3E%3Cscript%3Ealert(1)%3C/script%3E",
        "/console/endpoints/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/console/events?%3Cscript%3E=1",
        "/console/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    ):
        seen = browser.get(address)
        assert b"<script>" not in seen.reply.body
        assert len(seen.root.all("script")) == 1
    out = Browser(shared_api).get("/console/audit?who=%22%3E%3Cscript%3E")
    assert b"<script>" not in out.reply.body


@pytest.mark.alone
def test_a_page_takes_less_than_200_ms(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    """The best of five each: what a page needs, not what the machine does beside."""
    browser = somebody(shared_api, Role.OPERATOR)
    for address in addresses(died(conn)):
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            browser.ask("GET", address)
            times.append(time.perf_counter() - begun)
        assert min(times) < 0.2, (address, times)
