"""What is done in the console is what the API would do: once, with one row on record, by whom and why."""

import json
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import psycopg
import pytest

from madeira.console.words import exact
from madeira.records import PlannedDelivery
from madeira.states import FailureClass, Role
from madeira.store import routing
from tests.api.people import ADMIN, audited, token
from tests.api.serving import Api
from tests.console.browser import Browser, Seen, administrator, filled, queried, somebody
from tests.console.scenes import died, made_endpoint
from tests.receiver import Answer, Receiver
from tests.store import making

Connection = psycopg.Connection[Any]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def unrouted(c: Connection) -> str:
    """The id of an event that no route matched."""
    event_id = uuid.uuid4().hex
    routing.route(c, [(making.accept(c, event_id=event_id), [])])
    return event_id


def born_dead(c: Connection) -> str:
    """The id of an event whose template failed."""
    event_id = uuid.uuid4().hex
    plan = PlannedDelivery("sink", "sink", ("all",), failure_class=FailureClass.TEMPLATE, last_error="no such field")
    routing.route(c, [(making.accept(c, event_id=event_id), [plan])])
    return event_id


def waiting(c: Connection, endpoints: tuple[str, ...] = ("sink",)) -> str:
    """The id of an event that waits."""
    event_id = uuid.uuid4().hex
    making.routed(c, endpoints, event_id=event_id)
    return event_id


def succeeded(c: Connection) -> str:
    """The id of an event that was delivered."""
    event_id = uuid.uuid4().hex
    [ref] = making.routed(c, ("sink",), event_id=event_id)
    making.settled(c, making.claimed(c, ref))
    return event_id


def page(browser: Browser, event_id: str) -> Seen:
    return browser.get(f"/console/events/{event_id}?source=shop")


def last(c: Connection) -> tuple[Any, ...]:
    """The latest row on record."""
    row = c.execute("SELECT who, action, what, why FROM audit ORDER BY id DESC LIMIT 1").fetchone()
    assert row is not None
    return row


def status(c: Connection, event_id: str) -> str:
    ((found,),) = c.execute("SELECT status FROM event WHERE event_id = %s", (event_id,))
    return str(found)


@pytest.mark.parametrize(
    ("make", "action", "after", "told"),
    [
        (died, "replay", "delivering", "Sent again to sink"),
        (waiting, "cancel", "cancelled", "Cancelled 1 delivery"),
        (unrouted, "reroute", "pending", "routed again"),
        (born_dead, "reroute", "pending", "routed again"),
        (succeeded, "replay", "delivering", "Sent again to sink"),
    ],
    ids=["replay", "cancel", "reroute", "reroute of one born dead", "replay of a success"],
)
def test_an_act_does_what_it_says_and_leaves_one_row_that_the_page_links_to(
    shared_api: Api,
    conn: Connection,
    make: Any,
    action: str,
    after: str,
    told: str,
) -> None:
    text, name = token(shared_api, Role.OPERATOR)
    browser = Browser(shared_api)
    browser.sign_in(text)
    event_id = make(conn)
    before = audited(shared_api)
    seen = browser.submit(page(browser, event_id), f"/{action}", reason="as agreed <b>")
    assert seen.address == f"/console/events/{event_id}?source=shop"
    assert status(conn, event_id) == after
    assert audited(shared_api) == before + 1
    assert last(conn) == (f"token {name}", action, f"event shop/{event_id}", "as agreed <b>")
    notice = seen.root.one(id="done")
    assert told in notice.text
    link = notice.one("a").attributes["href"]
    assert queried(link) == {"what": f"event shop/{event_id}"}
    assert "as agreed <b>" in browser.get(link).text
    assert "as agreed <b>" in seen.root.one("ol", class_="line").text, "and it is a step of the event"
    assert not page(browser, event_id).root.all(id="done"), "told once"


def test_a_notice_is_not_taken_away_by_what_refreshes_the_page(shared_api: Api, conn: Connection) -> None:
    browser = administrator(shared_api)
    event_id = waiting(conn)
    form = page(browser, event_id).form("/cancel")
    reply = browser.ask("POST", form.attributes["action"], filled(form) | {"reason": "x"})
    assert reply.status == 303
    assert not browser.get("/console", **{"X-Madeira-Refresh": "1"}).root.all(id="done")
    assert page(browser, event_id).root.all(id="done")


def test_a_second_click_changes_nothing_and_is_told_so(shared_api: Api, conn: Connection) -> None:
    browser = administrator(shared_api)
    event_id = died(conn)
    seen = page(browser, event_id)
    browser.submit(seen, "/replay", reason="one")
    before = audited(shared_api)
    again = browser.submit(seen, "/replay", reason="one")
    assert again.status == 409
    assert "on its way" in again.text
    assert audited(shared_api) == before


@pytest.mark.parametrize(
    ("make", "impossible"),
    [
        (waiting, {"Replay": "on its way still", "Reroute": "wait for its end"}),
        (
            succeeded,
            {
                "Replay": "nothing of it is dead; what succeeded goes out once more by the form named Send again",
                "Reroute": "delivered to all",
                "Cancel": "succeeded already",
            },
        ),
        (unrouted, {"Replay": "mend the rules and reroute", "Cancel": "dead already"}),
        (died, {"Reroute": "replay them instead", "Cancel": "dead already"}),
        (born_dead, {"Replay": "mend the endpoint and reroute", "Cancel": "dead already"}),
    ],
    ids=["waiting", "succeeded", "unrouted", "died", "born dead"],
)
def test_an_act_that_is_not_possible_says_why_instead_of_offering_itself(
    shared_api: Api,
    conn: Connection,
    make: Any,
    impossible: dict[str, str],
) -> None:
    card = page(somebody(shared_api, Role.OPERATOR), make(conn)).root.one("div", class_="card")
    told = dict(zip([h.text for h in card.all("h3")], _sections(card), strict=True))
    for title, why in impossible.items():
        assert why in told[title], title
        assert "Not possible" in told[title]
    assert [t for t in ("Replay", "Reroute", "Cancel") if t not in impossible] == [
        t for t in ("Replay", "Reroute", "Cancel") if "Not possible" not in told[t]
    ]


def _sections(card: Any) -> list[str]:
    """The text below each heading of a card."""
    found: list[str] = []
    for child in card.children:
        if isinstance(child, str):
            continue
        if child.tag == "h3":
            found.append("")
        else:
            found[-1] += child.text
    return found


def test_one_delivery_of_several_is_cancelled_alone(shared_api: Api, conn: Connection) -> None:
    browser = administrator(shared_api)
    event_id = waiting(conn, ("sink", "other"))
    seen = page(browser, event_id)
    assert "Ends 2 deliveries: other and sink" in seen.text.replace("sink and other", "other and sink")
    browser.submit(seen, "/cancel", reason="x", endpoint="other")
    rows = conn.execute(
        "SELECT d.endpoint, d.status FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE e.event_id = %s", (event_id,)
    )
    assert dict(rows.fetchall()) == {"sink": "pending", "other": "cancelled"}


@pytest.mark.parametrize("reason", ["", "   ", "a\nb", "x" * 501])
def test_nothing_is_done_without_a_reason_that_can_be_shown(shared_api: Api, conn: Connection, reason: str) -> None:
    browser = administrator(shared_api)
    event_id, name = died(conn), made_endpoint(shared_api)
    before = audited(shared_api)
    for seen, action in ((page(browser, event_id), "/replay"), (browser.get(f"/console/endpoints/{name}"), "/pause")):
        told = browser.submit(seen, action, reason=reason)
        assert told.status == 422
        assert "reason" in told.text
    assert audited(shared_api) == before
    assert status(conn, event_id) == "dead"


POSTS = ["events/{id}/cancel?source=shop", "events/{id}/replay?source=shop", "events/{id}/reroute?source=shop"] + [
    f"endpoints/{{name}}/{action}" for action in ("pause", "resume", "disable", "enable", "test")
]


@pytest.mark.parametrize("who", ["viewer", "operator from another site", "operator with the form of another", "nobody"])
def test_who_may_not_act_does_not_act(shared_api: Api, conn: Connection, who: str) -> None:
    event_id, name = died(conn), made_endpoint(shared_api)
    browser = somebody(shared_api, Role.VIEWER if who == "viewer" else Role.OPERATOR)
    form = filled(browser.get("/console").form("/sign-out")) | {"reason": "x"}
    headers = {}
    match who:
        case "operator from another site":
            headers = {"Sec-Fetch-Site": "cross-site"}
        case "operator with the form of another":
            form |= filled(administrator(shared_api).get("/console").form("/sign-out"))
        case "nobody":
            browser.cookies.clear()
    before = audited(shared_api)
    for path in POSTS:
        seen = browser.post("/console/" + path.format(id=event_id, name=name), form, **headers)
        assert (seen.status, seen.title) == ((200, "Sign in") if who == "nobody" else (403, "You may not")), path
    assert audited(shared_api) == before
    assert status(conn, event_id) == "dead"


def test_a_link_acts_nothing(shared_api: Api, conn: Connection) -> None:
    event_id, name = died(conn), made_endpoint(shared_api)
    browser = administrator(shared_api)
    before = audited(shared_api)
    for path in POSTS:
        assert browser.get("/console/" + path.format(id=event_id, name=name)).status == 200, path
    assert audited(shared_api) == before


def test_an_endpoint_is_held_and_let_go_with_a_row_each(shared_api: Api, conn: Connection) -> None:
    browser = somebody(shared_api, Role.OPERATOR)
    name = made_endpoint(shared_api)
    address = f"/console/endpoints/{name}"
    for action, state in (("pause", "paused"), ("resume", "flowing"), ("disable", "disabled"), ("enable", "flowing")):
        before = audited(shared_api)
        seen = browser.submit(browser.get(address), f"/{action}", reason=f"to {action} it")
        assert seen.address == address
        assert name in seen.root.one(id="done").text
        assert seen.root.one(id="state").all("span", class_="state")[0].text == state
        assert audited(shared_api) == before + 1
        assert last(conn)[1:] == (action, f"endpoint {name}", f"to {action} it")
    offered = [
        f.attributes["action"].split("#")[0].rsplit("/", 1)[1]
        for f in browser.get(address).root.one("div", class_="card").all("form")
    ]
    assert offered == ["pause", "disable", "test"]


def test_a_replay_to_an_endpoint_that_was_removed_is_told_to_wait(shared_api: Api, conn: Connection) -> None:
    browser = somebody(shared_api, Role.OPERATOR)
    for endpoint, waits in ((made_endpoint(shared_api), False), ("removed-long-ago", True)):
        seen = browser.submit(page(browser, died(conn, endpoint)), "/replay", reason="x")
        told = seen.root.one(id="done").text
        assert f"Sent again to {endpoint}." in told
        assert (f"Not configured: {endpoint}. What goes there waits until it is, or is cancelled." in told) is waits


@pytest.mark.parametrize(("action", "held"), [("pause", "paused"), ("disable", "disabled")])
def test_an_endpoint_that_is_held_already_is_not_told_as_held_just_now(shared_api: Api, action: str, held: str) -> None:
    browser = somebody(shared_api, Role.OPERATOR)
    address = f"/console/endpoints/{made_endpoint(shared_api)}"

    def said(why: str) -> str:
        form = filled(browser.get("/console").form("/sign-out")) | {"reason": why}
        return browser.post(f"{address}/{action}", form).root.one(id="done").text

    first, same, other = said("x"), said("x"), said("y")
    assert f"is {held}" in first
    assert "already" not in first
    since = shared_api.request("GET", address.replace("/console", "/v1"), None, ADMIN).json["since"]
    told = f"is {held} already, since {exact(datetime.fromisoformat(since))} by "
    assert told in same
    assert told in other, "the reason is new, the state is as old as it was"
    assert ["only the reason is new" in said for said in (first, same, other)] == [False, False, True]


def test_a_paused_endpoint_is_resumed_from_the_overview(shared_api: Api) -> None:
    browser = somebody(shared_api, Role.OPERATOR)
    name = made_endpoint(shared_api)
    browser.submit(browser.get(f"/console/endpoints/{name}"), "/pause", reason="x")
    seen = browser.submit(browser.get("/console"), f"/{name}/resume")
    assert "goes on" in seen.root.one(id="done").text


def test_the_built_in_endpoint_offers_no_hold_and_refuses_one(shared_api: Api) -> None:
    browser = administrator(shared_api)
    seen = browser.get("/console/endpoints/callback")
    assert "built in" in seen.text
    form = filled(browser.get("/console").form("/sign-out")) | {"reason": "x"}
    assert browser.post("/console/endpoints/callback/pause", form).status == 409


def test_a_test_call_shows_the_request_the_answer_and_the_verdict_and_is_on_record(
    shared_api: Api,
    conn: Connection,
    receiver: Receiver,
) -> None:
    secret = "whsec_" + "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"
    receiver.default(Answer(status=503, body=b"<script>no</script>"))
    name = made_endpoint(shared_api, url=receiver.url(), secrets=[secret])
    browser = somebody(shared_api, Role.OPERATOR)
    before = audited(shared_api)
    seen = browser.submit(browser.get(f"/console/endpoints/{name}"), "/test", payload='{"n": 7}', reason="is it back?")
    assert seen.status == 200
    told = seen.root.all("div", class_="card")[0].text
    for words in ("retryable", "http_503", "Answer 503", "<script>no</script>", "POST " + receiver.url(), '"n": 7'):
        assert words in told
    assert secret not in seen.reply.body.decode()
    assert len(receiver.calls) == 1
    assert audited(shared_api) == before + 1
    assert last(conn)[1:] == ("test", f"endpoint {name}", "is it back?")
    assert browser.submit(browser.get(f"/console/endpoints/{name}"), "/test", payload="{").status == 422
    assert len(receiver.calls) == 1


def test_a_test_call_takes_credentials_to_another_address_for_an_admin_only(shared_api: Api, receiver: Receiver) -> None:
    name = made_endpoint(shared_api, url="{+target_uri}", secrets=["a-secret-of-it-that-is-long"])
    for role, expected in ((Role.OPERATOR, 403), (Role.ADMIN, 200)):
        browser = somebody(shared_api, role)
        seen = browser.submit(browser.get(f"/console/endpoints/{name}"), "/test", target_uri=receiver.url())
        assert seen.status == expected
    assert len(receiver.calls) == 1


def test_what_is_not_a_form_is_refused(shared_api: Api) -> None:
    browser = administrator(shared_api)
    for body, media_type, expected in (
        (json.dumps({"a": 1}).encode(), "application/json", 415),
        (b"a=1&a=2", "application/x-www-form-urlencoded", 400),
        (b"a=%ff", "application/x-www-form-urlencoded", 400),
        (b"&".join(b"a%d=1" % n for n in range(501)), "application/x-www-form-urlencoded", 400),
    ):
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        reply = shared_api.request("POST", "/console/endpoints/sink/pause", body, {"Cookie": cookie, "Content-Type": media_type})
        assert reply.status == expected, body
