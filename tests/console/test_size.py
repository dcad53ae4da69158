"""However much there is, a page stays small, says what it left out, and leads to it."""

import json
import uuid
from typing import Any

import psycopg

from madeira.console.objects import PAGE
from madeira.console.overview import DEAD, ROWS
from madeira.states import Role
from madeira.store import audit
from tests.api.serving import CONFIG, Api
from tests.console.browser import Browser, somebody
from tests.console.scenes import HOSTILE, LARGEST, died
from tests.store import making

#: Of each kind.
MANY = 150


def config() -> str:
    """Many of everything, with long names."""
    parts = [CONFIG]
    for n in range(MANY):
        name = f"partner-ledger-settlements-europe-{n:04}"
        parts.append(f'[[source]]\nname = "{name}"\nsecrets = ["{name}-secret"]\n')
        parts.append(f'[[endpoint]]\nname = "{name}"\nurl = "http://127.0.0.1:9/{name}"\nrate = 5\n')
        filter_ = f"payload.amount > {n} && payload.currency in ['EUR', 'USD'] && !(payload.note == \\\"none\\\")"
        parts.append(f'[[route]]\nname = "{name}"\nendpoint = "{name}"\nsource = "{name}"\nfilter = "{filter_}"\n')
    return "\n".join(parts)


def all_pages(browser: Browser, address: str, column: int = 0) -> list[str]:
    """The first cells of all rows, page by page."""
    met: list[str] = []
    following: list[str] = [address]
    while following:
        seen = browser.get(following[0])
        assert seen.status == 200
        assert len(seen.reply.body) < LARGEST, (following, len(seen.reply.body))
        met += [row.all("td")[column].text for row in seen.root.one("tbody").all("tr")]
        following = [a.attributes["href"] for a in seen.root.all("a") if a.attributes.get("rel") == "next"]
    return met


def test_many_endpoints_routes_and_sources_come_page_by_page_and_none_is_missed(
    shared_api: Api, conn: psycopg.Connection[Any]
) -> None:
    shared_api.configure(config())
    names = [f"partner-ledger-settlements-europe-{n:04}" for n in range(MANY)]
    for name in names[:60]:
        making.routed(conn, (name,))
        died(conn, name)
    browser = somebody(shared_api, Role.OPERATOR)
    assert sorted(all_pages(browser, "/console/endpoints")) == sorted([*names, "sink"])
    assert all_pages(browser, "/console/endpoints?q=EUROPE-000") == names[:10]
    assert all_pages(browser, "/console/routes") == ["all", *names]
    assert all_pages(browser, "/console/sources") == sorted([*names, "shop", "other"])
    seen = browser.get("/console")
    assert len(seen.reply.body) < LARGEST
    assert f"{MANY + 1 - ROWS} more endpoints" in seen.text
    assert f"{60 - DEAD} more groups" in seen.text
    tried = browser.get(f"/console/dry-run?event={died(conn)}&source=shop")
    assert tried.status == 200
    assert len(tried.reply.body) < LARGEST
    assert f"{MANY + 1 - PAGE} more routes" in tried.text


def test_a_page_of_the_audit_stays_small_though_its_entries_are_long(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    document = {"url": "https://ledger.example/" + "x" * 200, "headers": {f"X-Header-{n}": "hidden" for n in range(30)}}
    for n in range(40):
        why = "because of what the partner wrote, " * 10
        audit.record(conn, "token somebody-with-a-long-name", "update", f"endpoint {'e' * 60}-{n}", why, {"after": document})
    seen = somebody(shared_api, Role.VIEWER).get("/console/audit")
    assert len(seen.reply.body) < LARGEST
    assert len(seen.root.one("tbody").all("tr")) == 30


def test_an_event_of_many_attempts_and_a_large_payload_fits_on_a_page_that_says_what_it_left_out(
    shared_api: Api, conn: psycopg.Connection[Any]
) -> None:
    event_id = uuid.uuid4().hex
    [ref] = making.routed(conn, ("sink",), event_id=event_id, payload=json.dumps(HOSTILE * 3000))
    for _ in range(60):
        held = making.claimed(conn, ref)
        asked = making.verdict(held, making.RETRY)
        loud = making.replace(asked.attempt, excerpt=(HOSTILE * 50).encode()[:4096], length=9999, reason=HOSTILE * 4)
        making.settle(conn, [making.replace(asked, attempt=loud)])
        making.make_due(conn, ref.delivery_id)
    seen = somebody(shared_api, Role.OPERATOR).get(f"/console/events/{event_id}?source=shop")
    assert len(seen.reply.body) < LARGEST
    assert "steps more" in seen.text
    assert "characters in all" in seen.text
