"""Lists of events over HTTP: who may see what, what may be asked, and how the pages follow each other."""

import uuid
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest

from tests.api.serving import Api, event, signed


def listed(api: Api, query: str = "", **who: object) -> list[str]:
    """The ids on all pages of a list, three at a time."""
    found: list[str] = []
    cursor = ""
    while True:
        reply = api.get(f"/v1/events?limit=3{query}{cursor}", **(who or {"admin": True}))
        assert reply.status == 200, reply.body
        found += [e["event_id"] for e in reply.json["events"]]
        if reply.json["next_cursor"] is None:
            assert reply.json["complete"] is True
            return found
        cursor = f"&cursor={reply.json['next_cursor']}"


def test_pages_follow_each_other_newest_first(shared_api: Api) -> None:
    """All pages together hold each event of a trace once, in the order of acceptance from the last to the first."""
    trace = uuid.uuid4().hex
    names = [f"{trace}-{n}" for n in range(8)]
    for name in names:
        assert shared_api.post(event(name, trace_id=trace)).status == 202
    assert listed(shared_api, f"&trace_id={trace}") == names[::-1]
    first = shared_api.get(f"/v1/events?trace_id={trace}&limit=1", admin=True).json["events"][0]
    assert (first["event_id"], first["source"], first["status"], first["deliveries"]) == (names[-1], "shop", "pending", [])
    assert first["created_at"].endswith("Z")
    assert "payload" not in first


def test_a_source_lists_its_own_events_and_no_others(shared_api: Api) -> None:
    """By its signature a source sees what it posted; it cannot ask for another's; a stranger sees nothing."""
    trace = uuid.uuid4().hex
    shared_api.post(event(f"{trace}-mine", trace_id=trace))
    shared_api.post(event(f"{trace}-theirs", trace_id=trace), source="other", secret="another-secret-old")
    assert listed(shared_api, f"&trace_id={trace}") == [f"{trace}-theirs", f"{trace}-mine"]
    assert listed(shared_api, f"&trace_id={trace}", source="shop") == [f"{trace}-mine"]
    assert listed(shared_api, f"&trace_id={trace}&source=shop", source="shop") == [f"{trace}-mine"]
    refused = shared_api.get("/v1/events?source=other", source="shop")
    assert (refused.status, refused.json["errors"][0]["field"]) == (422, "source")
    assert shared_api.get("/v1/events").status == 401
    assert shared_api.request("GET", "/v1/events", None, signed(b"", secret="wrong")).status == 401


def test_filters_narrow_the_list(shared_api: Api) -> None:
    """Type, beginning of a type, source, state and time, each and together."""
    trace = uuid.uuid4().hex
    start = quote((datetime.now(UTC) - timedelta(seconds=1)).isoformat())
    for name, kind in (("a", "order.paid"), ("b", "order.sent"), ("c", "invoice.paid")):
        assert shared_api.post(event(f"{trace}-{name}", event_type=kind, trace_id=trace)).status == 202
    end = quote((datetime.now(UTC) + timedelta(seconds=1)).isoformat())

    def names(query: str) -> str:
        return "".join(name[-1] for name in listed(shared_api, f"&trace_id={trace}{query}"))

    assert names("&event_type=order.paid") == "a"
    assert names("&event_type=order.*") == "ba"
    assert names("&status=pending") == "cba"
    assert names("&status=dead") == ""
    assert names("&source=shop&event_type=*") == "cba"
    assert names("&source=other") == ""
    assert names("&endpoint=sink") == ""
    assert names(f"&since={start}&until={end}") == "cba"
    assert names(f"&until={start}") == ""
    assert names(f"&since={end}") == ""


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("status=waiting", "status"),
        ("event_type=a%20b", "event_type"),
        ("event_type=*.paid", "event_type"),
        ("event_type=", "event_type"),
        ("since=yesterday", "since"),
        ("until=2026-01-01", "until"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("cursor=x", "cursor"),
        ("cursor=%C3%A9", "cursor"),
        ("cursor=ZTE%3D%3D%3D", "cursor"),
        ("color=red", "color"),
        ("source=a&source=b", "source"),
        ("trace_id=%00", "trace_id"),
    ],
)
def test_what_cannot_be_asked_is_told_by_field(shared_api: Api, query: str, field: str) -> None:
    """A misspelt filter never shows everything."""
    reply = shared_api.get(f"/v1/events?{query}", admin=True)
    assert (reply.status, [e["field"] for e in reply.json["errors"]]) == (422, [field])
