"""Many events in one request: each line is accepted, told as a duplicate, or rejected by itself."""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
import redis

from madeira.api.batch import MAX_BYTES, MAX_LINES
from tests.api.serving import Api, Reply, event, rows, signed
from tests.servers import OwnPostgres


def send(api: Api, body: bytes, headers: dict[str, str] | None = None, **signing: Any) -> Reply:
    """Post a batch, signed."""
    ours = signed(body, **signing) | {"Content-Type": "application/x-ndjson"} | (headers or {})
    return api.request("POST", "/v1/events/batch", body, ours, timeout_s=60)


def lines(*bodies: bytes, end: bytes = b"\n") -> bytes:
    return b"".join(body + end for body in bodies)


def fresh(n: int, prefix: str | None = None) -> list[bytes]:
    """Bodies of `n` events with ids of their own."""
    prefix = prefix or uuid.uuid4().hex
    return [event(f"{prefix}-{i}", payload={"n": i}) for i in range(n)]


def stored(api: Api, prefix: str) -> list[tuple[Any, ...]]:
    """Ids and digests of the events whose ids begin so, in the order of acceptance."""
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute(
            "SELECT event_id, body_sha256 FROM event WHERE starts_with(event_id, %s) ORDER BY seq", (prefix,)
        ).fetchall()


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("closed", [True, False])
def test_the_lines_of_a_batch_are_accepted_in_their_order_and_queued(shared_api: Api, end: bytes, closed: bool) -> None:
    """More than one commit takes: seq rises with the lines, each digest is over the line, and each event is on the queue."""
    prefix = uuid.uuid4().hex
    bodies = fresh(450, prefix)
    body = lines(*bodies, end=end)
    reply = send(shared_api, body if closed else body.removesuffix(end))
    assert (reply.status, reply.json) == (200, {"accepted": 450, "duplicates": 0, "rejected": []})
    assert stored(shared_api, prefix) == [(json.loads(b)["event_id"], hashlib.sha256(b).digest()) for b in bodies]
    client = redis.Redis.from_url(shared_api.env["MADEIRA_REDIS_URL"])
    waiting = set(client.zrange(f"{shared_api.env['MADEIRA_NAMESPACE']}:route:lane:-", 0, -1))
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        seqs = {str(seq).encode() for (seq,) in c.execute("SELECT seq FROM event WHERE starts_with(event_id, %s)", (prefix,))}
    assert seqs <= waiting


def test_a_batch_that_is_sent_again_is_all_duplicates(shared_api: Api) -> None:
    """Also when its lines come in another order, and when one of them was posted alone before."""
    bodies = fresh(30)
    assert shared_api.post(bodies[7]).status == 202
    assert send(shared_api, lines(*bodies)).json == {"accepted": 29, "duplicates": 1, "rejected": []}
    assert send(shared_api, lines(*reversed(bodies))).json == {"accepted": 0, "duplicates": 30, "rejected": []}
    assert shared_api.post(bodies[3]).status == 200


#: One line of each kind that is rejected, with its type and a word of the detail.
BAD: dict[str, tuple[bytes, str, str]] = {
    "cut off": (b'{"event_id": "x", "event_type": "t", "payl', "not-strict-json", "strict JSON"),
    "two values": (b'{"event_type":"t","payload":1} {"event_type":"t","payload":2}', "not-strict-json", "Extra data"),
    "a key twice": (b'{"event_type":"t","payload":1,"payload":2}', "not-strict-json", "twice"),
    "no number": (b'{"event_type":"t","payload":NaN}', "not-strict-json", "NaN"),
    "no UTF-8": (b'{"event_type":"t","payload":"\xff"}', "not-strict-json", "UTF-8"),
    "a byte order mark": (b'\xef\xbb\xbf{"event_type":"t","payload":1}', "not-strict-json", "byte order mark"),
    "too deep": (b'{"event_type":"t","payload":' + b"[" * 70 + b"]" * 70 + b"}", "not-strict-json", "nested"),
    "no object": (b"[1, 2]", "invalid", "object"),
    "a field is missing": (b'{"event_type":"t"}', "invalid", "payload: is required"),
    "a field too many": (b'{"event_type":"t","payload":1,"color":"red"}', "invalid", "color"),
    "a bad id": (b'{"event_id":"a b","event_type":"t","payload":1}', "invalid", "event_id"),
    "another source": (b'{"event_type":"t","payload":1,"source":"other"}', "invalid", "source"),
    "a bad address": (b'{"event_type":"t","payload":1,"target_uri":"ftp://host/"}', "invalid", "target_uri"),
    "too large": (b'{"event_type":"t","payload":"' + b"x" * 20_000 + b'"}', "too-large", "20000 bytes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_rejected_alone_and_by_its_number(shared_api: Api, kind: str) -> None:
    """Empty lines count, and the neighbours on both sides are accepted."""
    line, name, word = BAD[kind]
    before, after = fresh(2)
    reply = send(shared_api, lines(b"", before, b"  ", line, b"", after))
    assert reply.status == 200
    assert (reply.json["accepted"], reply.json["duplicates"]) == (2, 0)
    [rejected] = reply.json["rejected"]
    assert (rejected["line"], rejected["type"]) == (4, name)
    assert word in rejected["detail"]


def test_all_kinds_of_bad_lines_in_one_file_are_told_and_nothing_else(shared_api: Api) -> None:
    """Among 500 lines exactly the bad ones are reported, in the order of the file; the file again: the rest are duplicates."""
    body = fresh(500)
    places = {31 * (i + 1): bad for i, bad in enumerate(BAD.values())}
    for place, (line, _, _) in places.items():
        body[place - 1] = line
    for accepted, duplicates in ((500 - len(BAD), 0), (0, 500 - len(BAD))):
        told = send(shared_api, lines(*body)).json
        assert (told["accepted"], told["duplicates"]) == (accepted, duplicates)
        assert [(r["line"], r["type"]) for r in told["rejected"]] == [(place, name) for place, (_, name, _) in places.items()]


def test_one_id_twice_in_a_batch_is_a_duplicate_or_a_conflict(shared_api: Api) -> None:
    """The first line counts; the same again is a duplicate, other content is rejected with the id, wherever it stands."""
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    far = fresh(250)
    body = lines(event(one), event(one), event(one, payload=2), event(other), *far, event(other, payload=2), event(one), b"{")
    told = send(shared_api, body).json
    assert (told["accepted"], told["duplicates"]) == (252, 2)
    # In the order of the file, though a conflict shows only at the commit.
    assert [(r["line"], r["type"], r.get("event_id")) for r in told["rejected"]] == [
        (3, "conflict", one),
        (255, "conflict", other),
        (257, "not-strict-json", None),
    ]


def test_a_rejected_line_names_its_event_where_that_is_known(shared_api: Api) -> None:
    """The id of a line whose other fields are wrong is told; one that is no id is not."""
    body = lines(event("known", event_type="?"), event("no id", event_type="?"), b'{"event_id": 5}', b'{"event_id": "cut')
    assert [r.get("event_id") for r in send(shared_api, body).json["rejected"]] == ["known", None, None, None]


def test_the_answer_to_a_line_of_nonsense_is_short(shared_api: Api) -> None:
    """However many fields of a line are wrong, its detail is of bounded length."""
    nonsense = json.dumps({f"f{n}": n for n in range(1000)}).encode()
    [rejected] = send(shared_api, nonsense).json["rejected"]
    assert len(rejected["detail"]) == 500


@pytest.mark.parametrize("body", [b"", b"\n", b"\r\n  \n\t\n"], ids=["nothing", "a line", "blanks"])
def test_a_batch_of_empty_lines_is_an_empty_batch(shared_api: Api, body: bytes) -> None:
    assert send(shared_api, body).json == {"accepted": 0, "duplicates": 0, "rejected": []}


def test_the_signature_is_over_the_whole_body(shared_api: Api) -> None:
    """One byte more and nothing is accepted; so also without a signature, or with another source's."""
    prefix = uuid.uuid4().hex
    body = lines(*fresh(3, prefix))
    assert send(shared_api, body + b"\n", {"X-Madeira-Signature": signed(body)["X-Madeira-Signature"]}).status == 401
    assert send(shared_api, body, secret="wrong").status == 401
    assert send(shared_api, body, source="other").status == 401
    assert shared_api.request("POST", "/v1/events/batch", body, {"Content-Type": "application/x-ndjson"}).status == 401
    assert stored(shared_api, prefix) == []


def test_what_is_no_batch_is_refused_as_a_whole(shared_api: Api) -> None:
    """Another media type, a compressed body, too many lines, too many bytes: each with a text that says so, and no row."""
    prefix = uuid.uuid4().hex
    body = lines(*fresh(2, prefix))
    assert send(shared_api, body, {"Content-Type": "application/json"}).status == 415
    assert send(shared_api, body, {"Content-Encoding": "gzip"}).status == 415
    many = send(shared_api, body + b"\n" * (MAX_LINES - 1))
    assert (many.status, many.json["type"]) == (422, "urn:madeira:problem:too-many-lines")
    assert f"{MAX_LINES + 1} lines" in many.json["detail"]
    head = "".join(f"{k}: {v}\r\n" for k, v in (signed(body) | {"Content-Type": "application/x-ndjson"}).items())
    announced = f"POST /v1/events/batch HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {MAX_BYTES + 1}\r\n\r\n"
    large = shared_api.raw(announced.encode())
    assert (large.status, large.json["type"]) == (413, "urn:madeira:problem:too-large")
    assert str(MAX_BYTES) in large.json["detail"]
    assert stored(shared_api, prefix) == []


def test_a_batch_may_be_larger_than_a_single_body(shared_api: Api) -> None:
    """The largest batch is taken though a post may have 20,000 bytes only, in chunks as well."""
    prefix = uuid.uuid4().hex
    filler = "x" * 15_000
    bodies = [event(f"{prefix}-{i}", payload=filler) for i in range(MAX_BYTES // 15_200)]
    body = lines(*bodies)
    assert MAX_BYTES * 0.95 < len(body) <= MAX_BYTES
    assert send(shared_api, body).json["accepted"] == len(bodies)
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 65536]), body[i : i + 65536]) for i in range(0, len(body), 65536))
    head = "".join(f"{k}: {v}\r\n" for k, v in (signed(body) | {"Content-Type": "application/x-ndjson"}).items())
    request = f"POST /v1/events/batch HTTP/1.1\r\nHost: x\r\n{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert shared_api.raw(request.encode() + chunked + b"0\r\n\r\n").json["duplicates"] == len(bodies)


def test_a_trace_of_the_request_is_the_trace_of_all_its_events(shared_api: Api) -> None:
    """Unless a line names its own."""
    prefix = uuid.uuid4().hex
    send(shared_api, lines(event(f"{prefix}-1"), event(f"{prefix}-2", trace_id="mine")), {"X-Trace-Id": "the-file"})
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"]) as c:
        found = c.execute("SELECT trace_id FROM event WHERE starts_with(event_id, %s) ORDER BY seq", (prefix,)).fetchall()
    assert found == [("the-file",), ("mine",)]


def test_lines_are_counted_as_single_posts_are(api: Api) -> None:
    """By source and outcome; a batch that is refused counts once."""
    bodies = fresh(5)
    send(api, lines(*bodies, bodies[0], b"{", b"[]", event(json.loads(bodies[1])["event_id"], payload="other")))
    send(api, lines(*bodies), secret="wrong")
    shown = api.get("/metrics").body.decode()
    counted = {
        outcome: float(line.rsplit(" ", 1)[1])
        for line in shown.splitlines()
        if line.startswith("madeira_ingress_requests_total{") and 'source="shop"' in line and not line.endswith(" 0.0")
        for outcome in [line.split('outcome="')[1].split('"')[0]]
    }
    assert counted == {"accepted": 5, "duplicate": 1, "malformed": 1, "invalid": 1, "conflict": 1, "unauthorized": 1}


@pytest.mark.long
def test_a_batch_that_races_with_single_posts_of_its_ids_accepts_each_once(api: Api) -> None:
    """Two batches in opposite order and eight clients with single posts: each event is accepted by one of them alone."""
    bodies = fresh(300)
    with ThreadPoolExecutor(10) as pool:
        batches = [pool.submit(send, api, lines(*order)) for order in (bodies, bodies[::-1])]
        singles = list(pool.map(api.post, bodies[::2]))
    told = [batch.result().json for batch in batches]
    assert {r.status for r in singles} <= {200, 202}
    assert sum(t["accepted"] for t in told) + Counter(r.status for r in singles)[202] == 300
    assert [t["rejected"] for t in told] == [[], []]
    assert rows(api.env["MADEIRA_DATABASE_URL"]) == 300


@pytest.mark.long
def test_a_store_that_goes_away_midway_is_told_and_the_same_batch_again_loses_and_doubles_nothing(
    serve: Callable[..., Api], own_postgres: OwnPostgres, redis_url: str
) -> None:
    """503 says to send all again; then what was committed is a duplicate and the rest is accepted."""
    api = serve(own_postgres.url, redis_url).start()
    bodies = fresh(600)
    with psycopg.connect(own_postgres.url, autocommit=True) as c:
        # What is in the way of one event in the third group keeps the batch waiting there.
        c.execute("BEGIN")
        c.execute(
            "INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at) "
            "VALUES ('shop', %s, 't', '1', sha256(''), 't', now())",
            (json.loads(bodies[450])["event_id"],),
        )
        reply = send(api, lines(*bodies))
        c.execute("ROLLBACK")
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert "line 401" in reply.json["detail"]
    assert "Send the whole batch again" in reply.json["detail"]
    assert rows(own_postgres.url) == 400
    assert send(api, lines(*bodies)).json == {"accepted": 200, "duplicates": 400, "rejected": []}
    own_postgres.stop()
    assert send(api, lines(*bodies)).status == 503


def test_a_batch_is_accepted_while_redis_is_away(serve: Callable[..., Api], database_url: str, own_redis: Any) -> None:
    """What is committed is promised; reconcile queues it."""
    api = serve(database_url, own_redis.url).start()
    own_redis.kill()
    assert send(api, lines(*fresh(450))).json["accepted"] == 450


def test_what_the_store_will_not_take_is_rejected_alone(api: Api) -> None:
    """An event that Postgres refuses spoils none of those that were to be committed with it; the log tells the cause."""
    with psycopg.connect(api.database_url, autocommit=True) as c:
        c.execute("ALTER TABLE event ADD CONSTRAINT none_of_these CHECK (event_type <> 'refused')")
    bodies = fresh(5)
    bodies[2] = event("refused", event_type="refused")
    told = send(api, lines(*bodies)).json
    assert (told["accepted"], told["duplicates"]) == (4, 0)
    assert [(r["line"], r["type"], r["event_id"]) for r in told["rejected"]] == [(3, "internal", "refused")]
    assert rows(api.database_url) == 4
    assert "none_of_these" in api.log.read_text()
