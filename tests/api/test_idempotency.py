"""A (source, event_id) is accepted once, whatever races."""

import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
import redis

from tests.api.serving import Api, event, rows


def test_of_fifty_equal_posts_one_is_accepted(api: Api) -> None:
    """Fifty parallel posts through two workers: one 202, 49 duplicates with the first one's data, one row."""
    for round_ in range(5):
        body = event(f"same{round_}")
        with ThreadPoolExecutor(50) as pool:
            replies = list(pool.map(api.post, [body] * 50))
        assert Counter(r.status for r in replies) == {202: 1, 200: 49}
        assert {r.json["duplicate"] for r in replies if r.status == 200} == {True}
        assert len({(r.json["created_at"], r.json["trace_id"], r.json["event_id"]) for r in replies}) == 1
    assert rows(api.env["MADEIRA_DATABASE_URL"]) == 5


@pytest.mark.long
def test_of_fifty_different_posts_under_one_id_one_is_accepted(api: Api) -> None:
    """Whoever is first wins; all the others are told of the conflict, and the first version stays."""
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda n: api.post(event("clash", payload={"n": n})), range(50)))
    assert Counter(r.status for r in replies) == {202: 1, 409: 49}
    winner = next(n for n, r in enumerate(replies) if r.status == 202)
    shown = api.get("/v1/events/clash?source=shop", admin=True).json
    assert shown["payload"] == {"n": winner}
    conflict = next(r for r in replies if r.status == 409)
    assert conflict.headers["content-type"] == "application/problem+json"
    assert (conflict.json["event_id"], conflict.json["created_at"]) == ("clash", shown["created_at"])


def test_the_same_json_in_other_bytes_is_a_duplicate(shared_api: Api) -> None:
    """Spacing, key order and spelling of numbers and escapes do not make another event."""
    first = b'{"event_id":"equal","event_type":"t","payload":{"a":1.0,"b":"\\u0041","c":[1,2]},"parameters":{}}'
    other = b'{ "parameters" : { },"payload":{"c":[ 1, 2 ],"b":"A","a":1},\n"event_type":"t", "event_id":"equal" }'
    assert shared_api.post(first).status == 202
    reply = shared_api.post(other)
    assert (reply.status, reply.json["duplicate"]) == (200, True)


@pytest.mark.parametrize(
    "change",
    [
        {"payload": {"n": 2}},
        {"payload": {"n": True}},
        {"payload": {"n": "1"}},
        {"payload": {"n": 1, "m": None}},
        {"payload": None},
        {"event_type": "order.Paid"},
        {"target_uri": "http://host/"},
        {"parameters": {}},
        {"routing_key": "x"},
        {"deliver_at": "2020-01-01T00:00:00Z"},
    ],
    ids=str,
)
def test_any_other_content_is_a_conflict(shared_api: Api, change: dict[str, object]) -> None:
    """A known id with another value in any field is refused."""
    name = uuid.uuid4().hex
    assert shared_api.post(event(name)).status == 202
    assert shared_api.post(event(name, **change)).status == 409
    assert shared_api.post(event(name)).status == 200


def test_a_new_trace_id_makes_no_new_event(shared_api: Api) -> None:
    """A sender that traces each try of its own gets the first one's trace."""
    assert shared_api.post(event("retraced"), {"X-Trace-Id": "first"}).status == 202
    reply = shared_api.post(event("retraced"), {"X-Trace-Id": "second"})
    assert (reply.status, reply.json["trace_id"]) == (200, "first")


def test_similar_ids_are_different_events(shared_api: Api) -> None:
    """Ids are compared byte by byte, and belong to their source."""
    for name in ("A", "a", "1", "01", "x", "x.", "X"):
        assert shared_api.post(event(name)).status == 202
    assert shared_api.post(event("a"), source="other", secret="another-secret-new").status == 202
    assert shared_api.post(json.dumps({"event_id": "x ", "event_type": "t", "payload": 1}).encode()).status == 422


def test_a_refused_post_does_not_use_up_its_id(shared_api: Api) -> None:
    """An event that was refused is accepted under the same id once it is mended."""
    assert shared_api.post(json.dumps({"event_id": "mended", "event_type": "t"}).encode()).status == 422
    assert shared_api.post(b'{"event_id":"mended","event_type":"t","payload":NaN}').status == 400
    assert shared_api.post(json.dumps({"event_id": "mended", "event_type": "t", "payload": 1}).encode()).status == 202


def test_a_wiped_redis_does_not_reopen_the_window(api: Api) -> None:
    """The mark in Redis decides nothing: without it a known id is still a duplicate."""
    assert api.post(event("wiped")).status == 202
    redis.Redis.from_url(api.env["MADEIRA_REDIS_URL"]).flushall()
    assert api.post(event("wiped")).status == 200
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        assert c.execute("SELECT count(*) FROM event").fetchone() == (1,)
