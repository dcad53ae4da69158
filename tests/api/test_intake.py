"""What is accepted is stored as it was received, under the names that the sender gave."""

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import redis
from psycopg.rows import dict_row

from tests.api.serving import SECRET, Api, event, signed

RAW_BODIES = {
    "a1": rb'{"event_id":"a1","event_type":"t","payload":{"t":"\u001B"}}',
    "a2": b'{ "payload" : { "b" : 1.0 }, "event_id":"a2" ,"event_type":"t"}\n',
    "a3": '{"event_id":"a3","event_type":"t","payload":"raw \U0001f600 emoji"}'.encode(),
    "a4": rb'{"event_id":"a4","event_type":"t","payload":{"u":"http:\/\/x","n":12345678901234567890}}',
    "a5": rb'{"event_id":"a5","event_type":"t","payload":"a\u0000b","parameters":{"k\u0000" : 1E2}}',
    "a6": rb'{"event_id":"a6","event_type":"t","payload":"\ud800"}',
    "a7": b'{"event_id":"a7","event_type":"t","payload":null}',
    "a8": b'{"event_id":"a8","event_type":"t","payload":' + b"[" * 62 + b"0.10" + b"]" * 62 + b"}",
}


def stored(api: Api, event_id: str, source: str = "shop") -> dict:
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"], row_factory=dict_row) as c:
        row = c.execute("SELECT * FROM event WHERE event_id = %s AND source = %s", (event_id, source)).fetchone()
    assert row is not None
    return row


def payload_of(body: bytes) -> str:
    """The payload's text, cut out by hand."""
    text = body.decode()
    start = text.index('"payload"') + len('"payload"')
    start = re.compile(r"\s*:\s*").match(text, start).end()
    return text[start : json.JSONDecoder().raw_decode(text, start)[1]]


@pytest.mark.parametrize("event_id", RAW_BODIES)
def test_the_signature_is_checked_over_the_received_bytes(shared_api: Api, event_id: str) -> None:
    """Escapes, spacing, emoji and long numbers pass, are stored and shown byte by byte; one space more is refused."""
    body = RAW_BODIES[event_id]
    altered = body.replace(b":", b": ", 1)
    assert shared_api.request("POST", "/v1/events", altered, signed(body)).status == 401
    reply = shared_api.post(body)
    assert reply.status == 202
    assert stored(shared_api, event_id)["payload"] == payload_of(body)
    shown = shared_api.get(f"/v1/events/{event_id}?source=shop", admin=True)
    assert shown.status == 200
    assert f'"payload": {payload_of(body)}'.encode() in shown.body


def test_the_receipt_says_what_was_accepted(shared_api: Api) -> None:
    """202 carries id, source, trace, status and time of acceptance."""
    before = datetime.now(UTC)
    reply = shared_api.post(event("receipt", trace_id="t.r_a-1"))
    assert reply.status == 202
    assert reply.headers["content-type"] == "application/json"
    receipt = reply.json
    created = datetime.fromisoformat(receipt.pop("created_at"))
    assert abs(created - before) < timedelta(seconds=30)
    assert receipt == {
        "event_id": "receipt",
        "source": "shop",
        "trace_id": "t.r_a-1",
        "status": "pending",
        "duplicate": False,
    }


def test_every_field_is_stored(shared_api: Api) -> None:
    """All optional fields reach the row as they were sent."""
    due = (datetime.now(UTC) + timedelta(days=29)).replace(microsecond=123456)
    body = event(
        "full:1.2_3-4",
        target_uri="https://[2001:db8::1]:8443/a%20b?c=d&e[]=f",
        parameters={"account": "12", "nested": {"a": [1]}},
        routing_key="ledger \u2192 \u03c0",
        deliver_at=due.isoformat(),
        source="shop",
    )
    assert shared_api.post(body).status == 202
    row = stored(shared_api, "full:1.2_3-4")
    assert row["target_uri"] == "https://[2001:db8::1]:8443/a%20b?c=d&e[]=f"
    assert row["parameters"] == '{"account": "12", "nested": {"a": [1]}}'
    assert row["routing_key"] == "ledger \u2192 \u03c0"
    assert row["deliver_at"] == due
    assert row["event_type"] == "order.paid"


def test_without_an_id_one_is_made_that_sorts_by_time(shared_api: Api) -> None:
    """Two posts without an id are two events whose ids are UUIDs of version 7, in order."""
    body = json.dumps({"event_type": "a.b", "payload": 1}).encode()
    first, second = shared_api.post(body), shared_api.post(body)
    assert (first.status, second.status) == (202, 202)
    ids = [first.json["event_id"], second.json["event_id"]]
    pattern = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(pattern, i) for i in ids)
    milliseconds = [int(i.replace("-", "")[:12], 16) for i in ids]
    assert milliseconds == sorted(milliseconds)
    assert abs(milliseconds[0] / 1000 - time.time()) < 30


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("field", "headers", "expected", "parent"),
    [
        ("body", {"X-Trace-Id": "header", "traceparent": TRACEPARENT}, "body", TRACEPARENT),
        (None, {"X-Trace-Id": "header", "traceparent": TRACEPARENT}, "header", TRACEPARENT),
        (None, {"traceparent": TRACEPARENT}, "0af7651916cd43dd8448eb211c80319c", TRACEPARENT),
        (None, {"X-Trace-Id": "bad one", "traceparent": TRACEPARENT}, "0af7651916cd43dd8448eb211c80319c", TRACEPARENT),
        (None, {"X-Trace-Id": "x" * 65}, None, None),
        (None, {"X-Trace-Id": "\xe9"}, None, None),
        (None, {"traceparent": TRACEPARENT.upper()}, None, None),
        (None, {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"}, None, None),
        (None, {"traceparent": "ff" + TRACEPARENT[2:]}, None, None),
        (None, {"traceparent": "nonsense"}, None, None),
        (None, {"traceparent": f"{TRACEPARENT}-x"}, None, None),
        (None, {"traceparent": f"{TRACEPARENT}-"}, None, None),
        (None, {"traceparent": f"cc{TRACEPARENT[2:]}"}, "0af7651916cd43dd8448eb211c80319c", TRACEPARENT),
        (None, {"traceparent": f"cc{TRACEPARENT[2:]}-x"}, "0af7651916cd43dd8448eb211c80319c", TRACEPARENT),
        (None, {"traceparent": f"cc{TRACEPARENT[2:]}-"}, "0af7651916cd43dd8448eb211c80319c", TRACEPARENT),
        (None, {"traceparent": f"cc{TRACEPARENT[2:]}x"}, None, None),
        ("body", {"traceparent": f"01{TRACEPARENT[2:]}-what-ever"}, "body", TRACEPARENT),
        (None, {}, None, None),
    ],
)
def test_where_a_trace_id_comes_from(
    shared_api: Api, field: str | None, headers: dict[str, str], expected: str | None, parent: str | None
) -> None:
    """The body comes before X-Trace-Id, that before traceparent; a bad header is as good as none."""
    reply = shared_api.post(event(**({"trace_id": field} if field else {}), event_id=f"trace{time.time_ns()}"), headers)
    assert reply.status == 202
    trace_id = reply.json["trace_id"]
    if expected is None:
        assert re.fullmatch(r"[0-9a-f]{32}", trace_id)
    else:
        assert trace_id == expected
    row = stored(shared_api, reply.json["event_id"])
    assert (row["trace_id"], row["traceparent"]) == (trace_id, parent)


@pytest.mark.parametrize(
    "text", ["2020-02-29T12:00:00Z", "2020-02-29t12:00:00.5z", "2020-02-29 12:00:00.123456789+05:30", "1970-01-01T00:00:00-00:00"]
)
def test_a_time_in_the_past_means_now(shared_api: Api, text: str) -> None:
    """Every form of RFC 3339 is read; what is past is due at once."""
    name = f"past{time.time_ns()}"
    assert shared_api.post(event(name, deliver_at=text)).status == 202
    assert stored(shared_api, name)["deliver_at"] <= datetime.now(UTC)


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON ; charset=UTF-8", 'application/json; charset="utf-8"']
)
def test_spellings_of_the_media_type(shared_api: Api, content_type: str) -> None:
    """The media type is compared without regard to case and spacing."""
    assert shared_api.post(event(f"media{time.time_ns()}"), {"Content-Type": content_type}).status == 202


def test_a_chunked_body_is_taken(shared_api: Api) -> None:
    """A body without a length in advance is read to its end."""
    body = event("chunked")
    headers = "".join(f"{k}: {v}\r\n" for k, v in signed(body).items())
    chunks = b"".join(f"{len(body[i : i + 7]):x}\r\n".encode() + body[i : i + 7] + b"\r\n" for i in range(0, len(body), 7))
    head = f"POST /v1/events HTTP/1.1\r\nHost: x\r\n{headers}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert shared_api.raw(head.encode() + chunks + b"0\r\n\r\n").status == 202


def test_several_secrets_of_a_source_are_good(shared_api: Api) -> None:
    """While a secret is rotated the old one and the new one both sign."""
    for secret in ("another-secret-new", "another-secret-old"):
        assert shared_api.post(event(secret), source="other", secret=secret).status == 202
    assert shared_api.post(event("wrong"), source="other", secret=SECRET).status == 401


def test_an_event_is_committed_marked_and_queued(api: Api) -> None:
    """After the 202 there is the row, the idempotency mark for a day, and the id on the queue, due when the event is."""
    assert api.post(event("now")).status == 202
    due = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert api.post(event("later", deliver_at=due)).status == 202
    client = redis.Redis.from_url(api.env["MADEIRA_REDIS_URL"])
    now, later = str(stored(api, "now")["seq"]).encode(), str(stored(api, "later")["seq"]).encode()
    delayed = dict(client.zrange("madeira:route:delayed", 0, -1, withscores=True))
    assert now not in delayed
    seconds, microseconds = client.time()
    assert 3590 < delayed[later] / 1000 - (seconds + microseconds / 1e6) < 3601
    marks = [key for key in client.scan_iter("madeira:*") if b"shop:now" in key]
    assert len(marks) == 1
    assert 86_000 < client.ttl(marks[0]) <= 86_400


@pytest.mark.alone
def test_a_source_that_is_added_may_post_within_two_seconds(api: Api) -> None:
    """A change of the configuration counts in every process without a restart."""
    body = event("from-new")
    assert api.post(body, source="new", secret="the-third-secret").status == 401
    api.configure(api.config + '\n[[source]]\nname = "new"\nsecrets = ["the-third-secret"]\n')
    changed = time.monotonic()
    statuses: list[tuple[float, int]] = []
    while not statuses or statuses[-1][0] < 3:
        statuses.append((time.monotonic() - changed, api.post(body, source="new", secret="the-third-secret").status))
    # Many posts, so that both processes are among those who answer.
    later = [status for asked_s, status in statuses if asked_s > 2]
    assert len(later) > 20
    assert set(later) <= {200, 202}, statuses


def test_without_a_configuration_nobody_is_known(serve: Callable[..., Api], database_url: str, redis_url: str) -> None:
    """An API without sources starts, says so in its log, and refuses everybody."""
    api = serve(database_url, redis_url, config=None).start()
    assert api.post(event("x")).status == 401
    assert "api.no_sources" in api.log.read_text()
