"""The record of what people did: complete, in order, page by page."""

import json
import uuid
from datetime import datetime, timedelta
from typing import Any, Self

import psycopg
import pytest

from madeira.store import audit
from tests.api.people import ADMIN, in_json
from tests.api.serving import Api


def noted(api: Api, **of: object) -> list[str]:
    """Ten rows at four moments, by two people, of two kinds; the names of what they are about, the earliest first."""
    mark = uuid.uuid4().hex
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        for n in range(10):
            audit.record(
                c, f"{mark}-{'even' if n % 2 == 0 else 'odd'}", "a" if n < 5 else "b", f"thing {mark}-{n}", None, {"n": n}
            )
        # Several at the same moment, so that time alone does not order them.
        c.execute(
            "UPDATE audit SET at = date_trunc('second', at) - (10 - (detail->>'n')::int / 3) * interval '1 minute'"
            " WHERE what LIKE %s",
            (f"thing {mark}-%",),
        )
    return [f"thing {mark}-{n}" for n in range(10)]


def pages(api: Api, query: str) -> list[dict]:
    """All entries, page by page."""
    found: list[dict] = []
    cursor = None
    while True:
        reply = api.request("GET", f"/v1/audit?{query}{f'&cursor={cursor}' if cursor else ''}", None, ADMIN)
        assert reply.status == 200, reply.body
        found += reply.json["entries"]
        cursor = reply.json["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9, 200])
def test_pages_of_any_size_hold_everything_once_and_in_order(shared_api: Api, limit: int) -> None:
    """The latest first; entries of the same moment too."""
    names = noted(shared_api)
    found = [e["what"] for e in pages(shared_api, f"limit={limit}") if e["what"] in names]
    assert found == names[::-1]


def test_a_page_can_be_narrowed_by_everything_it_shows(shared_api: Api) -> None:
    """By person, action, object and time, alone and together; since is included, until is not."""
    names = noted(shared_api)
    mark = names[0].split()[1].partition("-")[0]
    everything = {e["what"]: e for e in pages(shared_api, "limit=200")}

    def narrowed(**query: str) -> list[str]:
        spelt = "&".join(f"{k}={v.replace(' ', '%20').replace('+', '%2B')}" for k, v in query.items())
        return [e["what"] for e in pages(shared_api, f"limit=2&{spelt}") if e["what"] in names][::-1]

    assert narrowed(who=f"{mark}-even") == names[::2]
    assert narrowed(who=f"{mark}-even", action="b") == names[6::2]
    assert narrowed(what=names[3]) == [names[3]]
    assert narrowed(what=names[3], who=f"{mark}-even") == []
    moment = everything[names[3]]["at"]
    assert narrowed(since=moment) == names[3:]
    assert narrowed(until=moment) == names[:3]
    later = datetime.fromisoformat(moment) + timedelta(minutes=1)
    assert narrowed(since=moment, until=later.isoformat()) == names[3:6]
    local = datetime.fromisoformat(moment).astimezone().isoformat()
    assert narrowed(since=local) == names[3:]


def test_entries_that_come_meanwhile_do_not_shift_the_pages(shared_api: Api) -> None:
    """A cursor names a place, not a number of entries."""
    names = noted(shared_api)
    who = f"{names[0].split()[1].partition('-')[0]}-even"
    first = shared_api.request("GET", f"/v1/audit?who={who}&limit=2", None, ADMIN).json
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        audit.record(c, who, "c", "something new", None, {})
    second = shared_api.request("GET", f"/v1/audit?who={who}&limit=2&cursor={first['next_cursor']}", None, ADMIN).json
    assert [e["what"] for e in first["entries"] + second["entries"]] == names[8:0:-2]


@pytest.mark.parametrize(
    ("field", "query"),
    [
        ("limit", "limit=0"),
        ("limit", "limit=201"),
        ("limit", "limit=x"),
        ("limit", "limit="),
        ("limit", "limit=%D9%A3"),
        ("limit", "limit=1&limit=2"),
        ("cursor", "cursor=x"),
        ("cursor", "cursor=999999999999999999-1"),
        ("since", "since=yesterday"),
        ("since", "since=2026-02-30T00:00:00Z"),
        ("since", "since=2026-01-01T00:00:00"),
        ("until", "until=0001-01-01T00:00:00%2B14:00"),
        ("who", "who=%00"),
        ("who", "who="),
        ("what", "what=" + "x" * 513),
        ("nobody", "nobody=1"),
    ],
)
def test_a_wrong_parameter_is_named(shared_api: Api, field: str, query: str) -> None:
    """422: a misspelt filter must not show everything."""
    reply = shared_api.request("GET", f"/v1/audit?{query}", None, ADMIN)
    assert reply.status == 422
    assert [e["field"] for e in reply.json["errors"]] == [field]


def test_a_page_of_a_large_audit_reads_no_more_than_a_page(shared_api: Api) -> None:
    """With any narrowing that has an index, and far behind: fewer than three hundred blocks for fifty thousand rows."""
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as c:
        c.execute(
            "INSERT INTO audit (who, action, what, at) SELECT 'crowd ' || n % 100, 'x', 'thing ' || n,"
            " now() - interval '1 year' + n * interval '1 s' FROM generate_series(1, 50000) n"
        )
        try:
            c.execute("ANALYZE audit")
            middle = c.execute("SELECT at, id FROM audit WHERE what = 'thing 25000'").fetchone()
            for asked in ({}, {"who": "crowd 7"}, {"what": "thing 30000"}, {"since": middle[0]}, {"until": middle[0]}):
                for before in (None, middle):
                    blocks = _blocks(c, limit=51, before=before, **asked)
                    assert blocks < 300, (asked, before, blocks)
        finally:
            c.execute("DELETE FROM audit WHERE who LIKE 'crowd %'")


class _Explaining(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        return super().execute(b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + query, params, **options)


def _blocks(c: psycopg.Connection, **asked: object) -> int:
    """Blocks of the table and its indexes that a page looks at."""
    c.cursor_factory = _Explaining
    try:
        (row,) = audit.page(c, **asked)
    finally:
        c.cursor_factory = psycopg.Cursor
    plan = row["QUERY PLAN"][0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_a_change_says_what_was_before_and_after(shared_api: Api) -> None:
    """Of a token: its role and its end; and why, where it was told."""
    name = f"t-{uuid.uuid4().hex}"
    body = json.dumps({"name": name, "role": "viewer", "expires_in": 60}).encode()
    assert shared_api.request("POST", "/v1/tokens", body, in_json(ADMIN)).status == 201
    assert shared_api.request("DELETE", f"/v1/tokens/{name}?reason=no%20longer", None, ADMIN).status == 200
    revoked, made = pages(shared_api, f"what=token%20{name}")
    assert (revoked["action"], revoked["who"], revoked["why"]) == ("revoke", "admin", "no longer")
    assert (made["action"], made["why"]) == ("create", None)
    assert made["detail"]["after"] == revoked["detail"]["before"]
    assert made["detail"]["after"]["role"] == "viewer"
    assert made["at"] < revoked["at"]
