"""What died is told by its cause, page by page, and one by one with all that was sent and what came back."""

import json
import uuid
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.states import Outcome, Role
from madeira.store.deliveries import SettleRequest, settle
from tests.api.serving import Api
from tests.console.browser import Seen, queried, somebody
from tests.console.scenes import HOSTILE, LARGEST
from tests.store import making

Connection = psycopg.Connection[Any]


def name() -> str:
    return f"e-{uuid.uuid4().hex[:8]}"


def letters(conn: Connection, endpoint: str, count: int, code: str = "http_503", **fields: Any) -> list[int]:
    """Dead deliveries, the earliest first."""
    return [making.died(conn, uuid.uuid4().hex, endpoint, code, f"{code} of {n}", **fields) for n in range(count)]


def ids(seen: Seen) -> list[int]:
    """The dead letters of a page, in its order."""
    return [int(row.attributes["id"].removeprefix("d")) for row in seen.root.one("tbody", id="letters").all("tr")]


def test_what_died_is_told_by_its_cause_first_and_each_cause_leads_to_its_own(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 3)
    gone = letters(conn, endpoint, 2, "dns")
    browser = somebody(shared_api, Role.VIEWER)
    seen = browser.get(f"/console/dead-letters?endpoint={endpoint}&source=shop")
    rows = seen.root.one("table", id="groups").one("tbody").all("tr")
    told = [row.all("td")[0].text.replace("\N{MULTIPLICATION SIGN}", "*") for row in rows]
    assert told == [f"3 * {endpoint} * http_503", f"2 * {endpoint} * dns"]
    assert all(len(row.all("time")) == 2 for row in rows), "the first, and the last"
    link = rows[1].all("a")[0].attributes["href"]
    assert queried(link) == {"endpoint": endpoint, "source": "shop", "error": "dns"}
    assert ids(browser.get(link)) == gone[::-1]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("error=http_503", True), ("error=http_404", False), ("failure_class=receiver", True), ("failure_class=policy", False),
        ("source=shop", True), ("source=other", False), ("event_type=order.*", True), ("event_type=user.*", False),
        ("text=HTTP_503+OF", True), ("text=nothing+like+it", False), ("since=2020-01-01T00:00", True),
        ("until=2020-01-01T00:00", False), ("until=2020-01-01T00:00:00%2B01:00", False),
    ],
)  # fmt: skip
def test_a_filter_narrows_and_is_a_chip_that_takes_it_away(shared_api: Api, conn: Connection, query: str, expected: bool) -> None:
    endpoint = name()
    [one] = letters(conn, endpoint, 1)
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/dead-letters?endpoint={endpoint}&{query}")
    if expected:
        assert ids(seen) == [one]
    else:
        assert "No dead letter matches" in seen.text
    chips = seen.root.all("a", class_="chip")
    assert [queried(chip.attributes["href"]) for chip in chips if "endpoint" not in chip.text] == [{"endpoint": endpoint}]


@pytest.mark.parametrize("query", ["error=http_9", "failure_class=odd", "colour=red", "since=yesterday", "before=x"])
def test_a_filter_that_cannot_be_is_told_in_words_and_does_not_show_everything(shared_api: Api, query: str) -> None:
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/dead-letters?{query}")
    assert seen.status == 422
    assert seen.root.one("main").all("li")
    assert not seen.root.all("table")


def test_pages_go_on_from_a_place_and_miss_none_though_more_die_meanwhile(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    expected = letters(conn, endpoint, 60)
    browser = somebody(shared_api, Role.VIEWER)
    seen, met = browser.get(f"/console/dead-letters?endpoint={endpoint}"), []
    while len(met) <= len(expected):
        met += ids(seen)
        letters(conn, endpoint, 1)
        older = [a for a in seen.root.all("a") if a.attributes.get("rel") == "next"]
        if not older:
            break
        assert len(ids(seen)) == 25
        seen = browser.get(older[0].attributes["href"])
    assert met == expected[::-1]


def test_the_bar_tells_those_of_the_page_from_all_that_match(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    letters(conn, endpoint, 31)
    address = f"/console/dead-letters?endpoint={endpoint}&error=http_503"
    bar = somebody(shared_api, Role.OPERATOR).get(address).root.one("div", class_="picking")
    assert "of the 25 on this page" in bar.text
    assert "All 31 that match these filters" in bar.text
    of_all = [queried(a.attributes["href"]) for a in bar.all("a")]
    assert of_all == [{"endpoint": endpoint, "error": "http_503", "action": a} for a in ("replay", "reroute", "cancel")]
    viewer = somebody(shared_api, Role.VIEWER).get(address)
    assert "All 31 that match" in viewer.text
    assert not viewer.root.all("input", type="checkbox")
    assert not [link for link in viewer.links() if "/jobs/new" in link]


def test_the_overview_leads_to_the_dead_letters_of_a_group(shared_api: Api, conn: Connection) -> None:
    endpoint = name()
    found = letters(conn, endpoint, 2)
    browser = somebody(shared_api, Role.VIEWER)
    table = browser.get("/console").root.one(id="dead-table")
    [row] = [row for row in table.one("tbody").all("tr") if endpoint in row.text]
    assert ids(browser.get(row.all("a")[0].attributes["href"])) == found[::-1]
    assert ids(browser.get(f"/console/dead-letters?endpoint={endpoint}")) == found[::-1]


# -- one of them -----------------------------------------------------------------------------------------------------


def exchanged(conn: Connection, attempts: int, words: str) -> int:
    """A dead delivery of so many attempts, with what was sent and what came back at each."""
    [ref] = making.routed(conn, ("sink",))
    kept = json.dumps({
        "request": {"method": "POST", "headers": [["X-Of-Event", words]], "body_length": 1234, "body_sha256": "ab" * 32},
        "answer": {"headers": [["Retry-After", words]], "complete": True},
    })  # fmt: skip
    for n in range(attempts):
        held = making.claimed(conn, ref)
        last = n == attempts - 1
        failed = making.attempt(
            Outcome.PERMANENT if last else Outcome.RETRYABLE, exchange=kept, excerpt=f"answer {n} {words}".encode(), length=5000
        )
        decision = replace(making.GIVE_UP, last_error=words) if last else making.RETRY
        settle(conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, decision, worker="w:1")])
        if not last:
            making.make_due(conn, ref.delivery_id)
    return ref.delivery_id


def test_one_shows_every_attempt_with_request_and_answer_folded(shared_api: Api, conn: Connection) -> None:
    one = exchanged(conn, 3, "as we agreed")
    seen = somebody(shared_api, Role.OPERATOR).get(f"/console/dead-letters/{one}")
    steps = seen.root.one("ol", class_="line").all("li")
    assert [step.all("b")[0].text for step in steps] == [f"Attempt {n}: HTTP 503 in 0.2 s" for n in (3, 2, 1)]
    assert "became dead" in steps[0].text
    folded = steps[0].one("details")
    assert "open" not in folded.attributes
    request, answer = (pre.text for pre in folded.all("pre"))
    assert request == "POST http://receiver.test/hook X-Of-Event: as we agreed"
    assert answer == "HTTP 503 Retry-After: as we agreed answer 2 as we agreed"
    assert "1,234 bytes" in folded.text
    assert "5,000 bytes in all" in folded.text
    acts = [link for link in seen.links() if "/jobs/new" in link]
    assert [queried(link) for link in acts] == [{"action": a, "id": str(one)} for a in ("replay", "reroute", "cancel")]


def test_its_json_is_the_one_of_the_api(shared_api: Api, conn: Connection) -> None:
    one = exchanged(conn, 2, "x")
    whole = somebody(shared_api, Role.VIEWER).ask("GET", f"/console/dead-letters/{one}/json")
    assert whole.headers["content-type"] == "application/json"
    assert whole.json == shared_api.get(f"/v1/dead-letters/{one}", admin=True).json


def test_what_came_from_outside_is_text_and_however_much_there_is_the_page_stays_small(shared_api: Api, conn: Connection) -> None:
    one = exchanged(conn, 80, HOSTILE * 40)
    browser = somebody(shared_api, Role.OPERATOR)
    seen = browser.get(f"/console/dead-letters/{one}")
    assert len(seen.reply.body) < LARGEST
    assert "40 earlier attempts" in seen.text
    assert len(seen.root.one("ol", class_="line").all("pre")) > 5
    for n in range(25):
        long = {"event_type": HOSTILE * 3, "trace_id": "t" * 200, "source": "s" * 200, "event_id": f"{n:0128}"}
        [ref] = making.routed(conn, (HOSTILE,), **long)
        making.settled(conn, making.claimed(conn, ref), replace(making.GIVE_UP, last_error=HOSTILE * 20))
    listed = browser.get("/console/dead-letters")
    assert len(listed.reply.body) < LARGEST
    for page in (seen, listed):
        assert b"alert(1)</script>" not in page.reply.body
        assert b"<img" not in page.reply.body
        assert len(page.root.all("script")) == 1
        assert "<script>alert(1)</script>" in page.text, "it is shown, as what it is"
    conn.execute("DELETE FROM event WHERE length(source) = 200")


@pytest.mark.parametrize("one", ["nobody", "0", "9" * 18, "9" * 40, "%3Cb%3E", "%D9%A3"])
def test_one_that_is_not_there_is_told_in_words(shared_api: Api, one: str) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    for address in (f"/console/dead-letters/{one}", f"/console/dead-letters/{one}/json"):
        seen = browser.get(address)
        assert seen.status == 404
        assert "There is no dead letter" in seen.text


def test_one_that_was_replayed_is_no_dead_letter_any_more(shared_api: Api, conn: Connection) -> None:
    [one] = letters(conn, "sink", 1)
    browser = somebody(shared_api, Role.OPERATOR)
    seen = browser.get(f"/console/dead-letters/{one}")
    [event] = [link for link in seen.links() if link.startswith("/console/events/")]
    browser.submit(browser.get(event), "/replay", reason="mended")
    assert browser.get(f"/console/dead-letters/{one}").status == 404
