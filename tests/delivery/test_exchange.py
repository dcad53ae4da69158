"""What is kept of a failed call helps whoever asks why, and nobody who wants to call in our name."""

import base64
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from madeira.delivery import exchange
from madeira.delivery import request as requests
from madeira.delivery.answer import Answer
from madeira.delivery.exchange import HIDDEN, MAX_HEADERS, MAX_VALUE
from madeira.records import Endpoint
from tests.delivery.samples import WHSEC, claim, endpoint
from tests.delivery.test_verdict import answer

TOKEN = "credential-of-the-endpoint"
GUARDED = endpoint(
    url="https://user:password-in-url@ledger.example/hook",
    headers={
        "X-Token": f"Token {TOKEN}",
        "X-Mixed": f"{TOKEN}-{{{{ event_type }}}}",
        "X-Type": "{{ event_type }}",
        "X-Default": "{{ parameters.key | default('" + TOKEN + "') }}",
    },
)


def kept(answered: Answer | None = None, called: Endpoint = GUARDED, **fields: Any) -> dict[str, Any]:
    made = requests.build(claim(**fields), called, now=datetime(2026, 1, 1, tzinfo=UTC))
    document: dict[str, Any] = json.loads(exchange.kept(made, answered, called))
    return document


def test_the_request_is_kept_with_what_the_event_made_of_it() -> None:
    """Method, Madeira's own headers in their order, and the body by its length and digest."""
    body = requests.build(claim(), GUARDED, now=datetime(2026, 1, 1, tzinfo=UTC)).body
    request = kept()["request"]
    headers = dict(request["headers"])
    assert request["method"] == "POST"
    assert (request["body_length"], request["body_sha256"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert list(headers)[:2] == ["Content-Type", "User-Agent"]
    assert (headers["X-Trace-Id"], headers["X-Madeira-Attempt"], headers["X-Type"]) == ("trace-1", "1", "payment.settled")
    assert headers["webhook-id"].startswith("msg_4711_")


def test_credentials_and_signatures_are_hidden_and_it_is_seen_that_they_were_sent() -> None:
    """Headers of the configuration, unless the event alone made them; signatures; user and password of the URL."""
    headers = dict(kept()["request"]["headers"])
    hidden = {name for name, value in headers.items() if value == HIDDEN}
    assert hidden == {"X-Token", "X-Mixed", "X-Default", "Authorization", "webhook-signature", "X-Madeira-Signature"}
    text = json.dumps(kept(answer(503, b"no")))
    basic = base64.b64encode(b"user:password-in-url").decode()
    assert [secret for secret in (TOKEN, WHSEC, "password-in-url", basic) if secret in text] == []


def test_the_headers_of_the_answer_are_kept() -> None:
    found = kept(answer(503, retry_after="120", content_type="text/html; charset=utf-8"))["answer"]
    assert found == {"headers": [["retry-after", "120"], ["content-type", "text/html; charset=utf-8"]], "complete": True}


def test_without_an_answer_the_request_is_kept_alone() -> None:
    assert kept(None)["answer"] is None


def test_what_the_receiver_echoes_or_gives_out_is_masked() -> None:
    """Our credentials wherever they stand, and its own cookies and tokens."""
    given_out = {"set-cookie": "session=1234", "x-auth-token": "abcd", "authentication-info": "nextnonce", "x-api-key": "k"}
    echoed = {"x-echo": f"got {TOKEN}!", "x-coded": base64.b64encode(TOKEN.encode()).decode(), "x-signed": WHSEC}
    found = dict(kept(answer(401, **{k.replace("-", "_"): v for k, v in (given_out | echoed).items()}))["answer"]["headers"])
    assert found == {**dict.fromkeys(given_out, HIDDEN), "x-echo": f"got {HIDDEN}!", "x-coded": HIDDEN, "x-signed": HIDDEN}


def test_an_answer_of_many_long_headers_is_bounded_and_said_to_be() -> None:
    """Each value, and all together."""
    found = kept(answer(500, x_long="v" * 2000, **{f"x_{n}": "w" * 400 for n in range(40)}))["answer"]
    assert not found["complete"]
    assert found["headers"][0] == ["x-long", "v" * MAX_VALUE + "…"]
    assert sum(len(name) + len(value) for name, value in found["headers"]) <= MAX_HEADERS


def test_a_long_value_that_the_event_made_is_bounded() -> None:
    made = endpoint(headers={"X-Note": "{{ payload.note }}"})
    found = kept(None, made, payload=json.dumps({"note": "n" * 5000}))
    assert dict(found["request"]["headers"])["X-Note"] == "n" * MAX_VALUE + "…"


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"x-[a-z]{1,10}", fullmatch=True), st.text(max_size=100), max_size=10))
def test_whatever_the_receiver_sends_becomes_text_that_can_be_kept_and_shown(headers: dict[str, str]) -> None:
    """Valid JSON without NUL, and no header breaks into the next one."""
    made = requests.build(claim(), GUARDED, now=datetime(2026, 1, 1, tzinfo=UTC))
    text = exchange.kept(made, Answer(500, headers, b"", False, "http://a.test/", datetime(2026, 1, 1, tzinfo=UTC), 0.1), GUARDED)
    found = json.loads(text)["answer"]["headers"]
    assert [name for name, _ in found] == list(headers)
    assert "\\u0000" not in text
    assert all(not set(value) & {"\n", "\r", "\x1b", "\x9b", "\u2028"} for _, value in found)


@pytest.mark.parametrize("value", [": x-forged: yes", "a\nx-forged: yes", "a\r\nx-forged: yes"])
def test_no_value_passes_for_another_header(value: str) -> None:
    assert [name for name, _ in kept(answer(500, x_one=value))["answer"]["headers"]] == ["x-one"]
