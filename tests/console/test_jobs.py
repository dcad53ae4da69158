"""A job is previewed, made once, watched and steered, by who may, with one row on record each."""

from typing import Any

import psycopg
import pytest

from madeira.records import PlannedDelivery
from madeira.states import FailureClass, Role
from madeira.store import erase, job_steps, jobs, routing
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.api.people import audited, token
from tests.api.serving import Api
from tests.console.browser import Browser, Seen, administrator, filled, queried, somebody
from tests.console.scenes import HOSTILE, LARGEST, made_endpoint
from tests.console.test_dead_letters import letters, name
from tests.store import making

Connection = psycopg.Connection[Any]


def born_dead(conn: Connection, endpoint: str) -> int:
    """A delivery whose template failed."""
    plan = PlannedDelivery(endpoint, endpoint, ("all",), failure_class=FailureClass.TEMPLATE, last_error="no such field")
    return routing.route(conn, [(making.accept(conn), [plan])])[0].dead[0].delivery_id


def preview(browser: Browser, endpoint: str, action: str = "replay") -> Seen:
    """What of all dead letters of an endpoint would be done, as one comes to it."""
    listed = browser.get(f"/console/dead-letters?endpoint={endpoint}")
    [link] = [a for a in listed.root.one("div", class_="picking").all("a") if f"action={action}" in a.attributes["href"]]
    return browser.get(link.attributes["href"])


def job_of(seen: Seen) -> int:
    """The job that a page shows."""
    return int(seen.address.removeprefix("/console/jobs/"))


def made(conn: Connection, endpoint: str, **fields: Any) -> int:
    """A job about the dead letters of an endpoint."""
    job = NewJob(**{"action": "replay", "selection": Selection(endpoint=endpoint), "reason": "they are back"} | fields)
    return int(jobs.create(conn, job, "token somebody")[0]["id"])


# -- a preview -------------------------------------------------------------------------------------------------------


def test_a_preview_says_how_many_which_in_what_order_and_what_is_skipped_and_does_nothing(
    shared_api: Api, conn: Connection
) -> None:
    endpoint = name()
    letters(conn, endpoint, 4)
    born_dead(conn, endpoint)
    making.died(conn, "to-be-erased", endpoint, "http_503", "no")
    erase.erase(conn, "shop", "to-be-erased", "ann", "asked to")
    browser = somebody(shared_api, Role.OPERATOR)
    before = audited(shared_api)
    seen = preview(browser, endpoint)
    assert seen.title == "Replay 6 dead letters?"
    for words in (
        f"endpoint {endpoint}",
        "Sends 4 dead letters again",
        "1 would be skipped: never had a body or an address",
        "1 would be skipped: the payload was erased",
        f"Not configured: {endpoint}. What goes there waits until it is, or is cancelled.",
        "as accepted, one per endpoint",
    ):
        assert words in seen.text
    assert len(seen.root.one("table", id="examples").one("tbody").all("tr")) == 3
    assert audited(shared_api) == before
    assert conn.execute("SELECT count(*) FROM delivery WHERE endpoint = %s AND status = 'dead'", (endpoint,)).fetchone() == (6,)


def test_a_reroute_is_about_what_never_could_be_sent(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 2)
    browser = somebody(shared_api, Role.OPERATOR)
    none = preview(browser, endpoint, "reroute")
    assert none.title == "Nothing matches"
    assert "no such event that could be routed again" in none.text
    assert not none.root.all("form", action="/console/jobs")
    born_dead(conn, endpoint)
    assert preview(browser, endpoint, "reroute").title == "Reroute 1 event?"


def test_a_job_about_nothing_is_not_made_and_the_page_says_so(shared_api: Api, conn: Connection) -> None:
    """Neither when nothing matches at first, nor when somebody else was quicker than the form."""
    endpoint = name()
    letters(conn, endpoint, 1)
    browser = somebody(shared_api, Role.OPERATOR)
    seen = preview(browser, endpoint)
    quicker = made(conn, endpoint, action="cancel")
    while not job_steps.step(conn, quicker).is_over:
        pass
    before = audited(shared_api)
    refused = browser.submit(seen, "/console/jobs", reason="they are back")
    assert refused.status == 409
    assert "Nothing matches: there is no such dead letter; no job was made" in refused.text
    assert audited(shared_api) == before
    assert browser.get(f"/console/jobs/new?action=replay&endpoint={endpoint}").title == "Nothing matches"


def test_a_preview_of_what_would_all_be_skipped_says_why_and_has_no_form(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    born_dead(conn, endpoint)
    seen = preview(somebody(shared_api, Role.OPERATOR), endpoint)
    assert "None of them can be replayed. Nothing was done." in seen.text
    assert "1 would be skipped: never had a body or an address" in seen.text
    assert not seen.root.all("form", action="/console/jobs")


def test_ticked_rows_are_taken_and_no_others_also_of_an_event_that_died_twice(shared_api: Api, conn: Connection) -> None:
    endpoint, other = name(), name()
    refs = making.routed(conn, (endpoint, other))
    for ref in refs:
        making.settled(conn, making.claimed(conn, ref), making.GIVE_UP)
    [another, _] = letters(conn, endpoint, 2)
    browser = somebody(shared_api, Role.OPERATOR)
    form = browser.get(f"/console/dead-letters?endpoint={endpoint}").root.one("form", id="pick")
    assert form.attributes["action"] == "/console/jobs/new"
    hidden = "&".join(f"{n}={v}" for n, v in filled(form).items())
    assert hidden == f"ticked=1&endpoint={endpoint}"
    [of_both] = [ref.delivery_id for ref in refs if ref.lane == endpoint]
    ticked = [of_both, another]
    seen = browser.get(f"/console/jobs/new?{hidden}&action=cancel&" + "&".join(f"id={one}" for one in ticked))
    assert seen.title == "Cancel 2 dead letters?"
    number = job_of(browser.submit(seen, "/console/jobs", reason="they must go"))
    while not job_steps.step(conn, number).is_over:
        pass
    rows = conn.execute("SELECT id FROM delivery WHERE endpoint = ANY(%s) AND status = 'cancelled'", ([endpoint, other],))
    assert sorted(row[0] for row in rows) == sorted(ticked)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("action=replay&ticked=1", "tick at least one row"),
        ("", "action"),
        ("action=destroy", "must be one of"),
        ("action=replay&id=x", "must be ids"),
        ("action=replay&id=1&id=1%0A", "must be ids"),
        ("action=replay&" + "&".join(f"id={n}" for n in range(1, 300)), "200 at most"),
        ("action=replay&error=odd", "error"),
        ("action=replay&colour=red", "colour"),
    ],
    ids=str,
)
def test_a_preview_of_what_cannot_be_is_refused_and_never_taken_for_everything(shared_api: Api, query: str, words: str) -> None:
    seen = somebody(shared_api, Role.OPERATOR).get(f"/console/jobs/new?{query}")
    assert seen.status == 422
    assert words in seen.text
    assert not seen.root.all("form", action="/console/jobs")


# -- making one ------------------------------------------------------------------------------------------------------


def test_a_job_is_made_with_one_row_on_record_and_shown(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 3)
    text, who = token(shared_api, Role.OPERATOR)
    browser = Browser(shared_api)
    browser.sign_in(text)
    before = audited(shared_api)
    seen = browser.submit(preview(browser, endpoint), "/console/jobs", reason="back <b>", ordered="0", rate="2.5")
    number = job_of(seen)
    job = jobs.find(conn, number)
    assert job is not None
    wanted = {"action": "replay", "filter": {"endpoint": endpoint}, "reason": "back <b>", "who": f"token {who}", "total": 3}
    assert {name: job[name] for name in wanted} == wanted
    assert (job["ordered"], job["rate"], job["among"]) == (False, 2.5, "dead")
    assert audited(shared_api) == before + 1
    notice = seen.root.one(id="done")
    assert queried(notice.one("a").attributes["href"]) == {"what": f"job {number}"}
    assert "back <b>" in browser.get(notice.one("a").attributes["href"]).text
    for words in (f"endpoint {endpoint}", "back <b>", f"token {who}", "0 of 3", "2.5/s at most", "none is kept"):
        assert words in seen.text
    assert f"Not configured: {endpoint}. What goes there waits until it is, or is cancelled. Until then" in seen.text


def test_a_form_that_is_sent_twice_makes_one_job(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 2)
    browser = somebody(shared_api, Role.OPERATOR)
    shown = preview(browser, endpoint)
    first = browser.submit(shown, "/console/jobs", reason="they are back")
    before = audited(shared_api)
    again = browser.submit(shown, "/console/jobs", reason="they are back")
    assert again.address == first.address
    assert "there is no second one" in again.root.one(id="done").text
    other = browser.submit(shown, "/console/jobs", reason="for another reason")
    assert other.status == 409
    assert "load the preview again" in other.text
    assert audited(shared_api) == before
    assert conn.execute("SELECT count(*) FROM job WHERE selection ->> 'endpoint' = %s", (endpoint,)).fetchone() == (1,)
    assert job_of(browser.submit(preview(browser, endpoint), "/console/jobs", reason="once more")) > job_of(first)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reason": " "}, "reason"),
        ({"rate": "quick"}, "rate"),
        ({"rate": "nan"}, "rate"),
        ({"rate": "1_0"}, "rate"),
        ({"rate": "\u0661"}, "rate"),
        ({"rate": "0"}, "rate"),
        ({"filter": "{"}, "load the preview again"),
        ({"filter": "[" * 9000}, "load the preview again"),
        ({"filter": '{"endpoint": "nobody", "endpoint": "somebody"}'}, "load the preview again"),
        ({"filter": "[]"}, "filter must be an object"),
        ({"filter": '{"endpoint": 3}'}, "filter.endpoint"),
        ({"filter": '{"colour": "red"}'}, "filter.colour"),
        ({"action": "destroy"}, "action"),
        ({"key": "a b"}, "key"),
    ],
    ids=lambda one: str(one)[:40],
)
def test_nothing_is_made_of_a_form_that_is_wrong(shared_api: Api, conn: Connection, wrong: dict[str, str], words: str) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    browser = somebody(shared_api, Role.OPERATOR)
    before = audited(shared_api)
    seen = browser.submit(preview(browser, endpoint), "/console/jobs", **{"reason": "back", **wrong})
    assert seen.status == 422
    assert words in seen.text
    assert audited(shared_api) == before
    assert conn.execute("SELECT count(*) FROM job WHERE reason = 'back' AND total = 0").fetchone() == (0,)


def test_a_form_without_its_key_would_make_two_jobs_by_a_double_click_and_makes_none(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    browser = somebody(shared_api, Role.OPERATOR)
    form = filled(preview(browser, endpoint).form("/console/jobs")) | {"reason": "back"}
    del form["key"]
    before = audited(shared_api)
    seen = browser.post("/console/jobs", form)
    assert seen.status == 422
    assert "key is missing, which makes a form that is sent twice one job: load the preview again" in seen.text
    assert audited(shared_api) == before


# -- watching and steering -------------------------------------------------------------------------------------------


def test_a_job_tells_how_far_it_is_and_what_was_skipped(shared_api: Api, conn: Connection) -> None:
    endpoint = made_endpoint(shared_api)
    letters(conn, endpoint, 5)
    born_dead(conn, endpoint)
    number = made(conn, endpoint, ordered=False)
    [first, second, *_] = job_steps.step(conn, number).begun
    making.settled(conn, making.claimed(conn, first))
    making.settled(conn, making.claimed(conn, second), making.GIVE_UP)
    job_steps.step(conn, number)
    # As if it had gone on for a minute.
    conn.execute("UPDATE job SET created_at = clock_timestamp() - interval '60 s' WHERE id = %s", (number,))
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/jobs/{number}")
    progress = seen.root.one(id="progress")
    assert progress.attributes["data-live"] == "whole"
    facts = dict(zip([e.text for e in progress.all("dt")], [e.text for e in progress.all("dd")], strict=True))
    assert facts == {
        "Done": "1 delivered",
        "Failed": "1 dead again",
        "Skipped": "1: 1 never had a body or an address: mend the rules and reroute",
        "Begun": "3 on their way",
        "Left": "0",
        "Rate": "3.0/min on average since it was made",
    }
    assert "running 3 of 6 are over, 50 %" in progress.text
    assert "The end is expected in" in progress.text
    assert "Not configured" not in progress.text
    bar = [(r.attributes["class"], r.attributes["x"], r.attributes["width"]) for r in progress.all("rect")]
    assert bar == [
        ("done", "0.0", "16.67"), ("failed", "16.67", "16.67"), ("skipped", "33.33", "16.67"), ("begun", "50.0", "50.0")
    ]  # fmt: skip


def test_a_job_is_paused_resumed_and_cancelled_with_a_row_each(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 2)
    number = made(conn, endpoint)
    browser = somebody(shared_api, Role.OPERATOR)
    address = f"/console/jobs/{number}"
    for steer, state in (("pause", "paused"), ("resume", "running"), ("cancel", "cancelled")):
        before = audited(shared_api)
        seen = browser.submit(browser.get(address), f"/{steer}", reason=f"to {steer} it")
        assert seen.address == address
        assert f"Job {number}" in seen.root.one(id="done").text
        assert seen.root.one(id="progress").all("span", class_="state")[0].text == state
        form = filled(browser.get("/console").form("/sign-out")) | {"reason": "once more"}
        again = browser.post(f"{address}/{steer}", form).root.one(id="done").text
        assert f"Job {number} is {state} already, since " in again
        assert audited(shared_api) == before + 1
        *row, who = conn.execute("SELECT action, what, why, who FROM audit ORDER BY id DESC LIMIT 1").fetchone() or ()
        assert row == [steer, f"job {number}", f"to {steer} it"]
        assert f" by {who}." in again
    assert "Nothing: it is cancelled" in browser.get(address).text
    form = filled(browser.get("/console").form("/sign-out")) | {"reason": "x"}
    late = browser.post(f"{address}/resume", form)
    assert late.status == 409
    assert "cancelled already" in late.text


def test_to_pause_or_cancel_a_job_needs_a_reason(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    number = made(conn, endpoint)
    browser = somebody(shared_api, Role.OPERATOR)
    before = audited(shared_api)
    for steer in ("pause", "cancel"):
        assert browser.submit(browser.get(f"/console/jobs/{number}"), f"/{steer}", reason="").status == 422
    assert audited(shared_api) == before


def test_jobs_are_listed_latest_first_filtered_and_turned_page_by_page(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    numbers = [made(conn, endpoint, action="cancel", reason=HOSTILE[:60]) for _ in range(30)]
    for number in numbers:
        jobs.steer(conn, number, "pause", "ann", "wait")
    browser = somebody(shared_api, Role.VIEWER)
    seen, met = browser.get("/console/jobs?state=paused&action="), []
    assert [queried(chip.attributes["href"]) for chip in seen.root.all("a", class_="chip")] == [{}]
    while True:
        assert len(seen.reply.body) < LARGEST
        assert b"<script>alert" not in seen.reply.body
        rows = seen.root.one("tbody").all("tr")
        assert {row.attributes["data-live"] for row in rows} == {"row"}
        met += [int(row.attributes["id"].removeprefix("j")) for row in rows]
        older = [a for a in seen.root.all("a") if a.attributes.get("rel") == "next"]
        if not older:
            break
        seen = browser.get(older[0].attributes["href"])
    assert met == numbers[::-1]
    assert "No job matches" in browser.get("/console/jobs?state=failed").text
    for number in numbers:
        jobs.steer(conn, number, "cancel", "ann", "enough")


@pytest.mark.parametrize("number", ["nobody", "0", "9" * 18, "9" * 40, "%3Cb%3E"])
def test_a_job_that_is_not_there_is_told_in_words(shared_api: Api, number: str) -> None:
    browser = administrator(shared_api)
    assert browser.get(f"/console/jobs/{number}").status == 404
    form = filled(browser.get("/console").form("/sign-out")) | {"reason": "x"}
    assert browser.post(f"/console/jobs/{number}/pause", form).status == 404


# -- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["viewer", "operator from another site", "operator with the form of another", "nobody"])
def test_who_may_not_make_or_steer_a_job_does_not(shared_api: Api, conn: Connection, who: str) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    number = made(conn, endpoint)
    shown = filled(preview(administrator(shared_api), endpoint).form("/console/jobs")) | {"reason": "x"}
    browser = somebody(shared_api, Role.VIEWER if who == "viewer" else Role.OPERATOR)
    own = filled(browser.get("/console").form("/sign-out"))
    headers = {"Sec-Fetch-Site": "cross-site"} if who == "operator from another site" else {}
    form = shown if who == "operator with the form of another" else shown | own
    if who == "nobody":
        browser.cookies.clear()
    before = audited(shared_api)
    for path in ("", f"/{number}/pause", f"/{number}/resume", f"/{number}/cancel"):
        seen = browser.post(f"/console/jobs{path}", form, **headers)
        assert (seen.status, seen.title) == ((200, "Sign in") if who == "nobody" else (403, "You may not")), path
    assert audited(shared_api) == before
    assert conn.execute("SELECT count(*) FROM job WHERE selection ->> 'endpoint' = %s", (endpoint,)).fetchone() == (1,)


def test_a_viewer_sees_jobs_and_is_offered_nothing(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    [one] = letters(conn, endpoint, 1)
    number = made(conn, endpoint)
    browser = somebody(shared_api, Role.VIEWER)
    for address in ("/console/jobs", f"/console/jobs/{number}", f"/console/dead-letters/{one}"):
        seen = browser.get(address)
        assert seen.status == 200
        assert [f.attributes["action"] for f in seen.root.all("form", method="post")] == ["/console/sign-out"], address
    assert browser.get("/console/jobs/new?action=replay").status == 403


def test_a_link_makes_and_steers_nothing(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 1)
    number = made(conn, endpoint)
    browser = administrator(shared_api)
    before = audited(shared_api)
    for path in (f"/{number}/pause", f"/{number}/cancel", f"/{number}/resume", f"/new?action=cancel&endpoint={endpoint}"):
        assert browser.get(f"/console/jobs{path}").status == 200
    assert audited(shared_api) == before
