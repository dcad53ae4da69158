"""Dead letters over HTTP: what is shown, what may be asked, and how the pages follow each other."""

import json
import uuid
from urllib.parse import quote

import pytest

from madeira.states import Outcome
from madeira.store import replay
from madeira.store.deliveries import SettleRequest, settle
from tests.api.serving import Api
from tests.store import making
from tests.store.making import GIVE_UP, died, routed, settled


@pytest.fixture
def endpoint() -> str:
    """An endpoint of this test alone."""
    return f"ledger-{uuid.uuid4().hex[:12]}"


def listed(api: Api, query: str) -> list[str]:
    """The events of all pages, two a page."""
    found: list[str] = []
    cursor = ""
    while True:
        reply = api.get(f"/v1/dead-letters?limit=2&{query}{cursor}", admin=True)
        assert reply.status == 200, reply.body
        found += [item["event_id"] for item in reply.json["dead_letters"]]
        if reply.json["next_cursor"] is None:
            assert reply.json["complete"] is True
            return found
        cursor = f"&cursor={reply.json['next_cursor']}"


def test_pages_follow_each_other_the_latest_first(shared_api: Api, conn: making.Connection, endpoint: str) -> None:
    """What is replayed meanwhile is gone from them."""
    names = [f"{endpoint}-{n}" for n in range(5)]
    for name in names:
        died(conn, name, endpoint, "http_404", "the receiver answered 404")
    assert listed(shared_api, f"endpoint={endpoint}") == names[::-1]
    replay.replay(conn, "shop", names[2], "ann", "mended")
    assert listed(shared_api, f"endpoint={endpoint}") == [names[n] for n in (4, 3, 1, 0)]


def test_filters_narrow_list_and_groups_alike(shared_api: Api, conn: making.Connection, endpoint: str) -> None:
    """Each, and all together."""
    died(conn, f"{endpoint}-a", endpoint, "http_404", "the receiver answered 404")
    died(conn, f"{endpoint}-b", endpoint, "http_503", "gave up: the receiver is busy", source="other", event_type="order.sent")
    row = conn.execute("SELECT died_at FROM delivery WHERE endpoint = %s ORDER BY id DESC LIMIT 1", (endpoint,)).fetchone()
    assert row is not None
    second = quote(row[0].isoformat())

    def names(query: str) -> str:
        of_list = listed(shared_api, f"endpoint={endpoint}&{query}")
        groups = shared_api.get(f"/v1/dead-letters/groups?endpoint={endpoint}&{query}", admin=True).json
        assert (groups["counted"], groups["complete"]) == (len(of_list), True)
        return "".join(name[-1] for name in of_list)

    assert names("") == "ba"
    assert names("source=other") == "b"
    assert names("event_type=order.*") == "ba"
    assert names("event_type=order.paid") == "a"
    assert names("failure_class=receiver") == "ba"
    assert names("failure_class=network") == ""
    assert names("error=http_503") == "b"
    assert names("text=BUSY") == "b"
    assert names(f"text={endpoint}-a") == "a"
    assert names(f"since={second}") == "b"
    assert names(f"until={second}") == "a"
    assert names(f"source=other&event_type=order.*&error=http_503&text=busy&since={second}") == "b"


def test_groups_are_told_with_an_example(shared_api: Api, conn: making.Connection, endpoint: str) -> None:
    """The largest first, and no more than asked for."""
    for n, code in enumerate(("http_503", "dns", "http_503")):
        died(conn, f"{endpoint}-{n}", endpoint, code, f"because of {code}")
    told = shared_api.get(f"/v1/dead-letters/groups?endpoint={endpoint}&limit=1", admin=True).json
    [group] = told["groups"]
    assert (told["counted"], told["complete"]) == (3, True)
    assert (group["endpoint"], group["error_code"], group["count"]) == (endpoint, "http_503", 2)
    assert (group["failure_class"], group["last_error"]) == ("receiver", "because of http_503")
    assert group["first_died_at"] < group["last_died_at"]
    example = shared_api.get(f"/v1/dead-letters/{group['example']}", admin=True).json
    assert example["error_code"] == "http_503"


def test_one_is_shown_with_what_was_sent_and_what_came_back(shared_api: Api, conn: making.Connection, endpoint: str) -> None:
    """As in the list, and its attempts besides; the event shows the same of them."""
    [ref] = routed(conn, (endpoint,), event_id=endpoint)
    held = making.claimed(conn, ref)
    sent = {"method": "POST", "headers": [["X-Token", "***"]], "body_length": 2, "body_sha256": "00"}
    exchange = {"request": sent, "answer": {"headers": [["server", "nginx"]], "complete": True}}
    failed = making.attempt(Outcome.PERMANENT, exchange=json.dumps(exchange), excerpt=b"no \xff", sha256=b"\x01" * 32)
    settle(conn, [SettleRequest(held.delivery_id, held.seq, held.token, held.attempt, failed, GIVE_UP, "worker:1")])
    shown = shared_api.get(f"/v1/dead-letters/{ref.delivery_id}", admin=True).json
    [attempt] = shown.pop("attempts")
    assert shared_api.get(f"/v1/dead-letters?endpoint={endpoint}", admin=True).json["dead_letters"] == [shown]
    assert (attempt["exchange"], attempt["excerpt"], attempt["sha256"]) == (exchange, "no �", "01" * 32)
    event = shared_api.get(f"/v1/events/{endpoint}?source=shop", admin=True).json
    assert event["deliveries"][0]["attempts"] == [attempt]
    assert event["deliveries"][0]["last_error_code"] == shown["error_code"]


def test_what_is_not_dead_is_not_found(shared_api: Api, conn: making.Connection, endpoint: str) -> None:
    """Nor what is no id; the answer says which of both it may be."""
    [ref] = routed(conn, (endpoint,))
    settled(conn, making.claimed(conn, ref))
    for path in (str(ref.delivery_id), "0", "x", "9" * 19, "-1", "%C2%B2"):
        reply = shared_api.get(f"/v1/dead-letters/{path}", admin=True)
        assert (reply.status, reply.json["type"]) == (404, "urn:madeira:problem:unknown-dead-letter")


@pytest.mark.parametrize("where", ["", "/groups"])
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("error=http_5xx", "error"),
        ("failure_class=recipient", "failure_class"),
        ("event_type=*.paid", "event_type"),
        ("since=yesterday", "since"),
        ("text=", "text"),
        ("text=%00", "text"),
        ("limit=201", "limit"),
        ("endpoint=a&endpoint=b", "endpoint"),
        ("endpoints=a", "endpoints"),
        ("group_by=error", "group_by"),
    ],
)
def test_what_cannot_be_asked_is_told_by_field(shared_api: Api, where: str, query: str, field: str) -> None:
    """A misspelt filter never shows everything."""
    reply = shared_api.get(f"/v1/dead-letters{where}?{query}", admin=True)
    assert (reply.status, [e["field"] for e in reply.json["errors"]]) == (422, [field])


def test_groups_have_no_pages(shared_api: Api) -> None:
    reply = shared_api.get("/v1/dead-letters/groups?cursor=1-1", admin=True)
    assert (reply.status, reply.json["errors"][0]["field"]) == (422, "cursor")
    assert shared_api.get("/v1/dead-letters?cursor=x", admin=True).json["errors"][0]["field"] == "cursor"


def test_a_source_sees_no_dead_letters(shared_api: Api) -> None:
    """Not even its own: these are for the people who run it."""
    for path in ("", "/groups", "/1"):
        assert shared_api.get(f"/v1/dead-letters{path}", source="shop").status == 401
