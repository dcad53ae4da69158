"""Calls over real sockets: what is sent arrives as it was made, what comes back is judged as it is, and nothing is added."""

import httpx
import pytest

from madeira.delivery.answer import MAX_BODY, CallFailed
from madeira.delivery.client import Caller
from madeira.delivery.verdict import judge
from madeira.states import ErrorCode, Outcome
from tests.delivery.calling import call
from tests.delivery.samples import ENDPOINT, LOOPBACK, post
from tests.receiver import Answer as Scripted
from tests.receiver import closed_port

# What arrives


def test_a_call_arrives_as_it_was_made(receiver, caller):
    """Method, path, query, headers and body reach the receiver to the byte."""
    body = bytes(range(256))
    request = post(receiver.url("/x/%20?y=1&z"), body, [("X-A", "1"), ("X-B", "caf\u00e9")], "PUT")
    answer = caller.call(request, deadline_s=10)
    [seen] = receiver.calls
    assert (seen.method, seen.path, seen.body) == ("PUT", "/x/%20?y=1&z", body)
    assert [name for name, _ in seen.header_list] == ["Host", "X-A", "X-B", "Content-Length"]
    assert seen.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert seen.headers["x-b"].encode("latin-1").decode() == "caf\u00e9"
    assert (answer.status, answer.body, answer.truncated) == (200, b'{"success": true}', False)
    assert answer.headers["content-type"] == "application/json"
    assert answer.url == request.url


@pytest.mark.parametrize("size", [0, 1, 65_536, 8_000_000])
def test_a_body_of_any_size_arrives_whole(receiver, caller, size):
    """Also one that does not fit the socket's buffer."""
    body = b"x" * size
    call(caller, receiver.url(), body=body)
    assert receiver.calls[0].body == body


@pytest.mark.parametrize(
    "scripted",
    [
        Scripted(),
        Scripted(chunk=3),
        Scripted(until_close=True),
        Scripted(close_after=True),
        Scripted(interim=3),
        Scripted(interim=2, interim_status=103),
    ],
    ids=str,
)
def test_every_framing_is_read(receiver, caller, scripted):
    """Length, chunks, end of the connection, interim answers before: the same body comes out."""
    receiver.default(scripted)
    for _ in range(3):
        assert call(caller, receiver.url()).body == b'{"success": true}'


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PATCH"])
def test_other_methods(receiver, caller, method):
    """The answer to HEAD has a length and no body."""
    receiver.default(Scripted(status=204) if method == "HEAD" else Scripted())
    for _ in range(2):
        assert call(caller, receiver.url(), method=method).status in (200, 204)
    assert receiver.calls[0].method == method


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b"NaN", Outcome.UNKNOWN),
        (b'{"a": "\x00"}', Outcome.UNKNOWN),
        (b"\x00", Outcome.UNKNOWN),
        (b'{"success": false}', Outcome.BUSINESS),
        (b"", Outcome.SUCCEEDED),
    ],
)
def test_odd_bodies_come_through_to_the_verdict(receiver, caller, body, outcome):
    """A 200 with any bytes is judged, not stumbled over."""
    receiver.default(Scripted(body=body))
    attempt = judge(call(caller, receiver.url()), ENDPOINT)
    assert attempt.outcome is outcome
    assert attempt.excerpt == body


@pytest.mark.parametrize("chunk", [0, 1000])
def test_a_large_answer_is_cut_and_its_connection_not_used_again(receiver, caller, chunk):
    """64 KiB are read; the verdict on a 2xx is too_large, on others the status decides."""
    receiver.default(Scripted(body=b"x" * 5_000_000, chunk=chunk))
    answer = call(caller, receiver.url())
    assert (len(answer.body), answer.truncated) == (MAX_BODY, True)
    assert judge(answer, ENDPOINT).error_code == ErrorCode.TOO_LARGE
    assert caller.idle_connections == 0
    receiver.default(Scripted(status=503, body=b"x" * 5_000_000, chunk=chunk))
    assert judge(call(caller, receiver.url()), ENDPOINT).error_code == "http_503"


# Redirects, cookies, proxies


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location", ["/elsewhere", "//127.0.0.1:1/x", "http://127.0.0.1:99999/", "http://[", "gopher://x/", "\xff", "http://a b/"]
)
def test_no_redirect_is_followed(receiver, caller, status, location):
    """Wherever Location points and however broken it is: one call, and the verdict names the status."""
    receiver.default(Scripted(status=status, headers={"Location": location, "Refresh": "0; url=/elsewhere"}))
    attempt = judge(call(caller, receiver.url("/here")), ENDPOINT)
    assert (attempt.outcome, attempt.error_code) == (Outcome.UNKNOWN, f"http_{status}")
    assert [c.path for c in receiver.calls] == ["/here"]


def test_no_cookie_is_kept(receiver, caller):
    """What one receiver sets is never sent, to itself or to another."""
    receiver.default(Scripted(headers={"Set-Cookie": "a=b; Path=/"}))
    for _ in range(2):
        call(caller, receiver.url())
    assert "cookie" not in receiver.calls[1].headers


def test_no_proxy_of_the_environment_is_used(receiver, monkeypatch):
    """Nor credentials of a .netrc: the environment of a worker is not a setting of Madeira."""
    with closed_port() as port:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        with Caller(egress=LOOPBACK, max_connections=1) as caller:
            assert call(caller, receiver.url()).status == 200


def test_it_is_an_httpx_client(receiver, caller, caplog):
    """httpx logs each call as it does everywhere, without the body of an answer or a secret."""
    caplog.set_level("INFO", logger="httpx")
    call(caller, receiver.url("/x"), headers=[("Authorization", "Bearer s3cret")])
    assert isinstance(caller._client, httpx.Client)
    assert "200" in caplog.text
    assert "/x" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_fault_of_our_own_is_a_platform_failure(receiver, caller):
    """An error that nobody thought of does not come out raw, and is not the receiver's."""
    request = post(receiver.url(), body=None)  # type: ignore[arg-type]
    with pytest.raises(CallFailed, match="TypeError") as caught:
        caller.call(request, deadline_s=10)
    assert caught.value.error_code is ErrorCode.PLATFORM
    assert receiver.count() == 0
    assert call(caller, receiver.url()).status == 200
