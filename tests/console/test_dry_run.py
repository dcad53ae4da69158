"""What would become of an event: the same answer as the API's, for a reader, and nothing is left behind."""

import json
import uuid

import psycopg
import pytest

from madeira.states import Role
from tests.api.people import ADMIN, audited, in_json
from tests.api.serving import Api, event, rows
from tests.console.browser import filled, somebody
from tests.console.scenes import HOSTILE, LARGEST, died, made_endpoint

Connection = psycopg.Connection[object]


def test_a_real_event_is_tried_by_its_address(shared_api: Api, conn: Connection) -> None:
    event_id = died(conn, payload='{"big": 12345678901234567890}')
    browser = somebody(shared_api, Role.VIEWER)
    before = (audited(shared_api), rows(shared_api.database_url), rows(shared_api.database_url, "delivery"))
    page = browser.get(f"/console/events/{event_id}?source=shop")
    (link,) = [link for link in page.links() if "/dry-run?" in link]
    seen = browser.get(link)
    assert seen.status == 200
    assert "It would be delivering" in seen.text
    table = [[cell.text for cell in row.all("td")] for row in seen.root.one("tbody").all("tr")]
    assert ["all", "yes", "sink", ""] in table
    assert "POST http://127.0.0.1:9/" in seen.text
    assert "12345678901234567890" in seen.text
    assert (audited(shared_api), rows(shared_api.database_url), rows(shared_api.database_url, "delivery")) == before


def test_the_form_tells_why_a_route_does_not_match_and_what_an_answer_would_come_to(shared_api: Api) -> None:
    name, endpoint = f"r-{uuid.uuid4().hex[:8]}", made_endpoint(shared_api, success="status == 200 && body.ok == true")
    body = json.dumps({"name": name, "endpoint": endpoint, "event_type": "order.*", "filter": "payload.amount > 100"}).encode()
    assert shared_api.request("POST", "/v1/routes", body, in_json(ADMIN)).status == 201
    browser = somebody(shared_api, Role.VIEWER)
    page = browser.get("/console/dry-run?source=shop")
    tried = {"source": "shop", "event_type": "order.paid", "status": "200", "answer": '{"ok": false}'}
    seen = browser.submit(page, "/dry-run", **tried, payload='{"amount": 7}')
    (row,) = [row.text for row in seen.root.one("tbody").all("tr") if name in row.text]
    assert f"{name} no {endpoint}" in row
    assert "filter" in row
    seen = browser.submit(seen, "/dry-run", payload='{"amount": 700}')
    assert filled(seen.form("/dry-run"))["source"] == "shop", "the form keeps what was tried"
    (row,) = [row.text for row in seen.root.one("tbody").all("tr") if name in row.text]
    assert f"{name} yes {endpoint}" in row
    assert "told as business" in seen.text
    assert "pending , tried again in 1 min" in seen.text
    shared_api.request("DELETE", f"/v1/routes/{name}", None, ADMIN)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"payload": "{"}, "payload"),
        ({"payload": '1, "event_type": "a.b"'}, "payload"),
        ({"payload": "1}, {"}, "payload"),
        ({"parameters": "[1]"}, "parameters"),
        ({"event_type": "not a type"}, "event_type"),
        ({"source": "nobody"}, "source"),
        ({"status": "7"}, "status"),
        ({"target_uri": "http://169.254.169.254/"}, "target_uri"),
    ],
)
def test_what_is_wrong_with_the_form_is_told_by_field(shared_api: Api, fields: dict[str, str], field: str) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    good = {"source": "shop", "event_type": "order.paid", "payload": "{}"}
    seen = browser.submit(browser.get("/console/dry-run"), "/dry-run", **(good | fields))
    assert seen.status == 422
    assert field in seen.root.one("main").one("ul").text


def test_an_event_that_cannot_be_tried_is_told_in_words(shared_api: Api, conn: Connection) -> None:
    browser = somebody(shared_api, Role.VIEWER)
    assert browser.get("/console/dry-run?event=x").status == 422
    assert browser.get("/console/dry-run?event=x&source=shop").status == 404
    event_id = died(conn)
    erased = shared_api.request("POST", f"/v1/events/{event_id}/erase?source=shop", b'{"reason": "asked for"}', in_json(ADMIN))
    assert erased.status == 200
    assert browser.get(f"/console/dry-run?event={event_id}&source=shop").status == 409
    assert not [link for link in browser.get(f"/console/events/{event_id}?source=shop").links() if "/dry-run?" in link]


def test_a_large_and_hostile_event_is_text_and_fits(shared_api: Api) -> None:
    event_id = uuid.uuid4().hex
    assert shared_api.post(event(event_id, payload=HOSTILE * 150)).status == 202
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/dry-run?event={event_id}&source=shop")
    assert seen.status == 200
    assert len(seen.reply.body) < LARGEST
    assert b"alert(1)</script>" not in seen.reply.body
    assert len(seen.root.all("script")) == 1
