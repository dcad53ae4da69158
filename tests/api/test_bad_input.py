"""Each wrong header, body, type, size and encoding gets its status and a problem document that names the field."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.serving import ADMIN_TOKEN, Api, check, event, signed

#: Whatever is refused leaves no row.
pytestmark = pytest.mark.usefixtures("leaves_no_row")

LIMIT = 20000

BODY = event("never")

GOOD = {"event_id": "bad-input", "event_type": "order.paid", "payload": {"n": 1}}

WRONG_VALUES: dict[str, list[Any]] = {
    "event_id": [
        "",
        ".",
        "..",
        "a b",
        "x ",
        " x",
        "a\u0000b",
        "é",
        "a/b",
        "x" * 129,
        1,
        1.5,
        None,
        True,
        [],
        {},
        "a\n",
        "\ud800",
    ],
    "event_type": ["", ".", "a.", ".a", "a..b", "a b", "a\u0000", "é.b", "x" * 256, 1, None, True, [], {}, "a\n", "a.b\n", "*"],
    "routing_key": ["", "a\u0000b", "x" * 256, 1, None, True, [], {}, "a\nb", "\ud800", "\u007f"],
    "parameters": ["", "x", 1, None, True, [], [{}]],
    "trace_id": ["", "a b", "é", "x" * 65, 1, None, [], {}, "a\n", "a:b"],
    "source": ["other", "", 1, None, [], {}, "SHOP", "shop "],
    "deliver_at": [
        "",
        "now",
        1893456000,
        None,
        True,
        [],
        "2026-01-01",
        "2026-01-01T00:00:00",
        "2026-01-01T00:00Z",
        "2026-13-01T00:00:00Z",
        "2026-02-30T00:00:00Z",
        "2026-01-01T25:00:00Z",
        "2026-01-01T00:00:00+25:00",
        "2026-W01-1T00:00:00Z",
        "20260101T000000Z",
        "2026-01-01T00:00:00Z\n",
        "2026-01-01T00:00:00.Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59Z",
        "9999-12-31T23:59:59-23:59",
        "٢٠٢٦-01-01T00:00:00Z",
        "x" * 1000,
    ],
    "target_uri": [
        "",
        1,
        None,
        True,
        [],
        {},
        "/relative",
        "relative",
        "//host/path",
        "ftp://host/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "gopher://host/",
        "http:",
        "http:/host",
        "http:host",
        "http://",
        "http:///path",
        "http://?q",
        "http://:80/",
        "http://host:/",
        "http://host:0/",
        "http://host:65536/",
        "http://host:99999999999/",
        "http://host:80:80/",
        "http://host:a/",
        "http://host:-1/",
        "http://host:+80/",
        "http://host:\uff18\uff10/",
        "http://user@host/",
        "http://user:secret@host/",
        "http://@host/",
        "http://good@evil/",
        "http://host\\@evil/",
        "http:\\\\host\\",
        "http://ho st/",
        " http://host/",
        "http://host/ ",
        "http://host/a b",
        "http://host/a\r\nX-Evil: 1",
        "http://host/\n",
        "http://host/\t",
        "http://host\r\n/",
        "http://host/\u0000",
        "http://host/\u007f",
        "http://host/\u2028",
        "http://hóst/",
        "http://host/ä",
        "http://①②⑦.0.0.1/",
        "http://host/%",
        "http://host/%zz",
        "http://host%00/",
        "http://ho%73t/",
        "http://[::1",
        "http://::1/",
        "http://[::g]/",
        "http://[fe80::1%25eth0]/",
        "http://[1.2.3.4]/",
        "http://1.2.3/",
        "http://256.1.1.1/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://host./..//\\",
        "http://-/",
        "http://.host/",
        "http://a..b/",
        f"http://{'a' * 64}.example/",
        f"http://{'a.' * 130}example/",
        f"http://host/{'x' * 2048}",
        "http://host/<script>",
        'http://host/"',
        "http://host/#fragment",
        "http://host/{x}",
    ],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG_VALUES.items() for v in values], ids=lambda x: ascii(x)[:50]
)
def test_a_wrong_value_names_its_field(shared_api: Api, field: str, value: Any) -> None:
    """A field of the wrong type, size or pattern is told by name."""
    check(shared_api.post(json.dumps(GOOD | {field: value}).encode()), 422, field)


@pytest.mark.parametrize("missing", ["event_type", "payload"])
def test_a_missing_field_is_named(shared_api: Api, missing: str) -> None:
    """A required field that is absent is told by name."""
    body = {k: v for k, v in GOOD.items() if k != missing}
    check(shared_api.post(json.dumps(body).encode()), 422, missing)


@pytest.mark.parametrize("name", ["status", "id", "Event_Type", "event_type ", "", "\u0000", "\ud800", "x" * 500, "é"])
def test_an_unknown_field_is_named(shared_api: Api, name: str) -> None:
    """A top-level field that an event does not have is an error, and its name comes back safely."""
    reply = shared_api.post(json.dumps(GOOD | {name: 1}).encode())
    check(reply, 422, ascii(name[:64])[1:-1])


def test_all_errors_are_told_at_once(shared_api: Api) -> None:
    """Three wrong fields are three entries in one answer."""
    body = {"event_id": "", "event_type": "x", "target_uri": "nowhere", "extra": 1}
    check(shared_api.post(json.dumps(body).encode()), 422, "event_id", "target_uri", "payload", "extra")


@pytest.mark.parametrize("body", [b"[]", b"1", b'"x"', b"null", b"true", b"[{}]"])
def test_a_body_that_is_no_object_is_told_so(shared_api: Api, body: bytes) -> None:
    """JSON of another type at the top is not an event."""
    check(shared_api.post(body), 422, "body")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"not json",
        b"{",
        b'{"event_id":"x","event_id":"y","event_type":"a","payload":1}',
        b'{"event_id":"n","event_type":"a","payload":NaN}',
        b'{"event_id":"n","event_type":"a","payload":{"v":Infinity}}',
        b'{"event_id":"o","event_type":"a","payload":1e999}',
        b'{"event_id":"o","event_type":"a","payload":{"k":1,"k":2}}',
        b'{"event_id":"z","event_type":"a","payload":"a\x00b"}',
        b'{"event_id":"z","event_type":"a","payload":"a\nb"}',
        b'{"event_id":"z","event_type":"a","payload":"\xff"}',
        b'{"event_id":"z","event_type":"a","payload":"\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"event_id":"z","event_type":"a","payload":1}',
        '{"event_id":"z","event_type":"a","payload":1}'.encode("utf-16"),
        b'{"event_id":"z","event_type":"a","payload":1} trailing',
        b'{"event_id":"z","event_type":"a","payload":1}{}',
        b'{"event_id":"z","event_type":"a","payload":' + b"9" * 6000 + b"}",
        b'{"event_id":"z","event_type":"a","payload":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"event_id":"z","event_type":"a","payload":' + b"[" * 15000 + b"}",
    ],
    ids=lambda b: repr(b[:50]),
)
def test_what_is_not_strict_json_is_refused(shared_api: Api, body: bytes) -> None:
    """A body on which parsers disagree is refused with 400."""
    reply = shared_api.post(body)
    check(reply, 400)
    assert reply.json["type"] == "urn:madeira:problem:not-strict-json"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": ""},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/jsonx"},
        {"Content-Type": "application/x-ndjson"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "\xe9"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "br"},
    ],
    ids=str,
)
def test_another_media_type_is_not_supported(shared_api: Api, headers: dict[str, str]) -> None:
    """Only JSON in UTF-8, not compressed, is taken."""
    check(shared_api.post(BODY, headers), 415)


def test_without_a_media_type_nothing_is_read(shared_api: Api) -> None:
    """A post without Content-Type gets 415."""
    headers = {k: v for k, v in signed(BODY).items() if k != "Content-Type"}
    check(shared_api.request("POST", "/v1/events", BODY, headers), 415)


def head(*lines: str, body: bytes = BODY) -> bytes:
    """The start of a raw, well signed request with further header lines."""
    headers = [f"{k}: {v}" for k, v in signed(body).items()]
    return "\r\n".join(["POST /v1/events HTTP/1.1", "Host: x", "Connection: close", *headers, *lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(lambda: head(f"Content-Length: {LIMIT + 1}"), 413, id="announced too large, nothing sent"),
        pytest.param(lambda: head("Content-Length: 99999999999999999999999"), 413, id="announced absurdly large"),
        pytest.param(
            lambda: (
                head("Transfer-Encoding: chunked")
                + b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(6))
                + b"0\r\n\r\n"
            ),
            413,
            id="chunked too large",
        ),
        pytest.param(lambda: head("Content-Length: -1"), 400, id="negative length"),
        pytest.param(lambda: head("Content-Length: x"), 400, id="length no number"),
        pytest.param(lambda: head("Content-Length: 1", "Content-Length: 2"), 400, id="two lengths"),
        pytest.param(
            lambda: head("Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400, id="length and chunked"
        ),
        pytest.param(lambda: head("Transfer-Encoding: chunked") + b"zz\r\nxx\r\n", 400, id="bad chunk size"),
        pytest.param(lambda: head("Transfer-Encoding: chunked") + b"2\r\nxxyy\r\n0\r\n\r\n", 400, id="chunk longer than said"),
        pytest.param(lambda: head("Transfer-Encoding: gzip"), 400, id="not chunked at last"),
        pytest.param(lambda: head("Transfer-Encoding: nonsense"), 501, id="unknown transfer coding"),
        pytest.param(lambda: head("Content-Type: text/plain"), 400, id="two media types"),
        pytest.param(lambda: head("X-Bad: a\x00b"), 400, id="NUL in a header"),
        pytest.param(lambda: head("X-Bad: a\x01b"), 400, id="control character in a header"),
        pytest.param(lambda: head("X Bad: a"), 400, id="space in a header's name"),
        pytest.param(lambda: head("X-Bad"), 400, id="header without colon"),
        pytest.param(lambda: head("X-Big: " + "x" * 20000), 431, id="header too long"),
        pytest.param(lambda: head(*[f"X-{i}: 1" for i in range(200)]), 431, id="too many headers"),
        pytest.param(lambda: head("Expect: nonsense"), 417, id="unknown expectation"),
        pytest.param(lambda: b"POST /v1/events\r\n\r\n", 400, id="no version"),
        pytest.param(lambda: b"POST /v1/" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, id="path too long"),
        pytest.param(lambda: b"POST /v1/events HTTP/9.9\r\nHost: x\r\n\r\n", 400, id="unknown version"),
        pytest.param(lambda: b"post /v1/events HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="lower-case method"),
        pytest.param(lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, id="TLS on a plain port"),
        pytest.param(lambda: head(body=b""), 400, id="no length, no body"),
        pytest.param(lambda: b"GET /healthz HTTP/1.1\r\nHos: x\r\n\r\n", 400, id="no host"),
        pytest.param(lambda: b"GET /console/login HTTP/1.1\r\n\r\n", 400, id="no host, no other header"),
        pytest.param(lambda: b"GET /healthz HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400, id="two hosts"),
    ],
)
def test_odd_framing_is_refused(shared_api: Api, data: Callable[[], bytes], status: int) -> None:
    """What is wrong with the request as HTTP is told by a problem document too."""
    # Signed now: what was signed when the tests were collected is stale after five minutes.
    check(shared_api.raw(data()), status)


def test_a_body_that_nobody_wants_and_that_is_malformed_gets_no_answer_of_its_own(shared_api: Api) -> None:
    """A second one would be taken for that of the next request."""
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n0\r\n\r\n")
        answers = b"".join(iter(lambda: s.recv(4096), b""))
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("lines", [b"Connection: TE, Close", b"Connection: keep-alive\r\nConnection: close"])
def test_whoever_asks_for_the_last_answer_gets_it(shared_api: Api, lines: bytes) -> None:
    """Wherever among the options it says so: the connection is closed, and what comes behind is not answered."""
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as s:
        s.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answers = b"".join(iter(lambda: s.recv(4096), b""))
    assert answers.count(b"HTTP/1.1 200 ") == 1
    assert b"connection: close" in answers.lower()


@pytest.mark.parametrize("request_line", [b"GET /healthz HTTP/1.0\r\n", b"GET /healthz HTTP/1.1\r\nHost:\r\n"])
def test_whoever_need_not_name_a_host_is_answered(shared_api: Api, request_line: bytes) -> None:
    """HTTP/1.0 knew no hosts, and a host without a name is one that is named (RFC 9110, section 7.2)."""
    assert shared_api.raw(request_line + b"Connection: close\r\n\r\n").status == 200


def test_a_body_over_the_limit_is_refused_before_it_is_looked_at(shared_api: Api) -> None:
    """One byte over the limit is 413, the limit itself passes."""
    fill = b'{"event_type":"a","payload":"%s"}'
    exact = fill % (b"x" * (LIMIT - len(fill) + 2))
    assert len(exact) == LIMIT
    check(shared_api.post(exact + b" "), 413)


def test_a_body_that_is_cut_off_is_no_event(shared_api: Api) -> None:
    """Fewer bytes than announced are refused, even when their signature fits."""
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=20) as s:
        s.sendall(head(f"Content-Length: {len(BODY) + 5}") + BODY)
        s.shutdown(socket.SHUT_WR)
        assert s.recv(4096).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/events/", 405),
        ("GET", "/v1/events/a/b", 404),
        ("GET", "/%00", 404),
        ("GET", "/%ff", 404),
        ("PUT", "/v1/events", 405),
        ("DELETE", "/v1/events/x", 405),
        ("GET", "/v1/events/x/cancel", 405),
        ("POST", "/healthz", 405),
        ("POST", "/metrics", 405),
        ("BREW", "/v1/events", 400),
    ],
)
def test_addresses_and_methods_that_do_not_exist(shared_api: Api, method: str, path: str, status: int) -> None:
    """falcon's own errors are problem documents like all others."""
    check(shared_api.request(method, path), status)


#: Each address that takes no such parameter, with its method.
QUERIES = [
    ("POST", "/v1/events?dry_run=true", "dry_run"),
    ("POST", "/v1/events?dry_run", "dry_run"),
    ("POST", "/v1/events?source=shop", "source"),
    ("POST", "/v1/events/batch?dry_run=true", "dry_run"),
    *((("POST", f"/v1/events/x/{action}?source=shop&dryrun=1", "dryrun")) for action in ("cancel", "replay", "reroute", "erase")),
    *((("POST", f"/v1/events/x/{action}?source=shop&source=shop", "source")) for action in ("cancel", "replay")),
    *((("POST", f"/v1/events/x/{action}?source=shop&source=other", "source")) for action in ("reroute", "erase")),
    ("POST", "/v1/endpoints/sink/cancel?source=shop", "source"),
    ("POST", "/v1/endpoints/sink/test?dry_run=true", "dry_run"),
    ("POST", "/v1/dry-run?source=shop", "source"),
    ("GET", "/v1/events/x?source=shop&sourse=other", "sourse"),
    ("GET", "/v1/events/x?source=shop&source=other", "source"),
    ("GET", "/v1/events/batch?source=shop&source=other", "source"),
    ("GET", "/v1/events?sourse=shop", "sourse"),
    ("GET", "/v1/reconcile?limit=1", "limit"),
    ("GET", "/v1/jobs?status=done", "status"),
    ("GET", "/v1/jobs/1?limit=1", "limit"),
    ("POST", "/v1/jobs?dry_run=true", "dry_run"),
    ("POST", "/v1/jobs/1/pause?force=1", "force"),
]


@pytest.mark.parametrize(("method", "path", "name"), QUERIES, ids=lambda x: x)
def test_a_parameter_that_is_unknown_or_given_twice_is_named(shared_api: Api, method: str, path: str, name: str) -> None:
    """What is asked for and not understood is not done without it."""
    body = b'{"reason":"why"}' if method == "POST" else b""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_TOKEN}"}
    if path.startswith(("/v1/events?d", "/v1/events?s", "/v1/events/batch?d")) and method == "POST":
        body = BODY
        headers = signed(body) | ({"Content-Type": "application/x-ndjson"} if "batch" in path else {})
    check(shared_api.request(method, path, body, headers), 422, name)


def test_a_source_is_told_of_a_parameter_too(shared_api: Api) -> None:
    """A source that reads or cancels its own event."""
    check(shared_api.request("GET", "/v1/events/x?sourse=shop", None, signed(b"")), 422, "sourse")
    check(shared_api.request("POST", "/v1/events/x/cancel?dry_run=true", b"", signed(b"")), 422, "dry_run")


ACTIONS = [
    *(f"/v1/events/x/{action}?source=shop" for action in ("cancel", "replay", "reroute", "erase")),
    *(f"/v1/endpoints/sink/{action}" for action in ("cancel", "test")),
]


@pytest.mark.parametrize("path", ACTIONS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
    ids=str,
)
def test_the_body_of_an_action_must_be_json(shared_api: Api, path: str, headers: dict[str, str]) -> None:
    """As every other body."""
    headers = headers | {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    check(shared_api.request("POST", path, b'{"reason":"why"}', headers), 415)


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}], ids=str)
def test_without_a_body_its_media_type_does_not_matter(shared_api: Api, headers: dict[str, str]) -> None:
    """A cancel needs no body, so that none is looked at."""
    given = {k: v for k, v in signed(b"").items() if k != "Content-Type"} | headers
    check(shared_api.request("POST", "/v1/events/nothing/cancel", b"", given), 404)


ODD_IDS = ["nothing", "%00", "a%00b", "%ff", "%ED%A0%80", "x" * 200, "a%20b", "%2e%2e"]

ODD_SOURCES = ["shop", "%00", "%ff", "nobody", "a%0ab", "x" * 1000]


@pytest.mark.parametrize("event_id", ODD_IDS)
@pytest.mark.parametrize("query", [f"source={source}" for source in ODD_SOURCES])
def test_reading_what_does_not_exist(shared_api: Api, event_id: str, query: str) -> None:
    """An odd or unknown id or source is just not found."""
    check(shared_api.get(f"/v1/events/{event_id}?{query}", admin=True), 404)


def test_an_administrator_names_the_source(shared_api: Api) -> None:
    """Without a source an id is not complete."""
    check(shared_api.get("/v1/events/x", admin=True), 422, "source")


@pytest.mark.parametrize(
    ("body", "status", "fields"),
    [
        (b"{", 400, ()),
        (b"[]", 422, ("body",)),
        (b'{"reason":1}', 422, ("reason",)),
        (b'{"reason":"a\\u0000b"}', 422, ("reason",)),
        (b'{"reason":"\\ud800"}', 422, ("reason",)),
        (b'{"reason":"' + b"x" * 501 + b'"}', 422, ("reason",)),
        (b'{"why":"x"}', 422, ("why",)),
        (b'{"reason":"' + b"x" * 5000 + b'"}', 413, ()),
    ],
)
def test_a_bad_cancel_names_its_field(shared_api: Api, body: bytes, status: int, fields: tuple[str, ...]) -> None:
    """The body of a cancel is checked like an event's."""
    check(shared_api.request("POST", "/v1/events/nothing/cancel", body, signed(body)), status, *fields)
