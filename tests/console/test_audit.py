"""The audit is found, turned page by page, and taken along as a file."""

import csv
import io
import json
import uuid
from typing import Any

import psycopg

from madeira.states import Role
from madeira.store import audit
from tests.api.serving import Api
from tests.console.browser import queried, somebody


def noted(conn: psycopg.Connection[Any], count: int, who: str) -> None:
    for n in range(count):
        audit.record(conn, who, "replay", f"event shop/{n}", f"because {n}", {"n": n})


def test_the_audit_is_filtered_and_turned_page_by_page(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    who = f"token t-{uuid.uuid4().hex[:8]}"
    noted(conn, 120, who)
    browser = somebody(shared_api, Role.VIEWER)
    seen, met = browser.get(f"/console/audit?who={who.replace(' ', '+')}"), []
    while True:
        rows = [row.all("td") for row in seen.root.all("tr") if row.all("td")]
        met += [cells[3].text for cells in rows]
        audit.record(conn, who, "replay", "event shop/later", "later", {})
        older = [a for a in seen.root.all("a") if a.attributes.get("rel") == "next"]
        if not older:
            break
        seen = browser.get(older[0].attributes["href"])
    assert met == [f"because {n}" for n in reversed(range(120))]
    one = browser.get(f"/console/audit?who={who.replace(' ', '+')}&what=event+shop%2F7")
    assert [row.all("td")[3].text for row in one.root.all("tr") if row.all("td")] == ["because 7"]
    assert "Nothing on record matches" in browser.get("/console/audit?who=nobody").text


def test_the_audit_is_a_file_of_all_that_matches(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    who = f"token t-{uuid.uuid4().hex[:8]}"
    noted(conn, 620, who)
    browser = somebody(shared_api, Role.VIEWER)
    page = browser.get(f"/console/audit?who={who.replace(' ', '+')}")
    links = {queried(link).get("format"): link for link in page.links()}
    lines = browser.ask("GET", links["ndjson"])
    assert "attachment" in lines.headers["content-disposition"]
    assert [json.loads(line)["why"] for line in lines.body.splitlines()] == [f"because {n}" for n in reversed(range(620))]
    table = list(csv.DictReader(io.StringIO(browser.ask("GET", links["csv"]).body.decode())))
    assert [row["why"] for row in table] == [f"because {n}" for n in reversed(range(620))]
    assert json.loads(table[0]["detail"]) == {"n": 619}


def test_a_spreadsheet_takes_nothing_of_the_audit_for_a_formula(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    who = f"+{uuid.uuid4().hex[:8]}"
    audit.record(conn, who, "replay", "=1+1", '@SUM("x",\n2)', {})
    body = somebody(shared_api, Role.VIEWER).ask("GET", f"/console/audit/file?format=csv&who=%2B{who[1:]}").body
    (row,) = csv.DictReader(io.StringIO(body.decode(), newline=""))
    assert (row["who"], row["what"], row["why"]) == (f"'{who}", "'=1+1", '\'@SUM("x",\n2)')
