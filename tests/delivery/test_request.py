"""The request of a claimed delivery: its bytes, its headers, and what makes it impossible."""

import json
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

import madeira
from madeira.delivery import request, signing
from madeira.delivery.request import NotSent, OutboundRequest, build
from madeira.headers import RESERVED_HEADERS
from madeira.records import CALLBACK_URL
from madeira.states import ErrorCode, Outcome
from tests.delivery.samples import CLAIM, ENDPOINT, WHSEC, claim, endpoint


def now() -> datetime:
    return datetime.now(UTC)


def headers(made: OutboundRequest) -> dict[str, str]:
    lower = [name.lower() for name, _ in made.headers]
    assert len(set(lower)) == len(lower), "a header is there twice"
    return {name.lower(): value for name, value in made.headers}


def test_the_body_holds_the_envelope_and_the_payloads_own_bytes():
    """Big numbers, 1.0, repeated keys and escapes arrive as the upstream wrote them."""
    body = build(CLAIM, ENDPOINT, now=now()).body
    assert body.endswith(b', "payload": ' + CLAIM.payload.encode() + b"}")
    assert list(json.loads(body)) == ["event_id", "event_type", "source", "created_at", "trace_id", "payload"]
    assert json.loads(body)["created_at"] == "2026-01-02T03:04:05.678901Z"


def test_body_and_id_are_the_same_on_every_attempt():
    """Another attempt, token, moment, time zone, worker and endpoint setting change neither body nor webhook-id."""
    first = build(CLAIM, ENDPOINT, now=now())
    later = claim(
        attempt=9,
        failures=7,
        token="another",
        budget_age_s=5000.0,
        created_at=CLAIM.created_at.astimezone(timezone(timedelta(hours=5))),
    )
    again = build(later, endpoint(url="http://moved.example/", secrets=("new",)), now=now() + timedelta(days=1))
    assert again.body == first.body
    assert headers(again)["webhook-id"] == headers(first)["webhook-id"]


@pytest.mark.parametrize(
    "other",
    [
        {"delivery_id": 4712},
        {"source": "b"},
        {"event_id": "e"},
        {"endpoint": "f"},
        {"created_at": datetime(2026, 1, 1, tzinfo=UTC)},
    ],
    ids=str,
)
def test_another_delivery_has_another_id(other):
    """Two deliveries never share an id, not even those of two installations that count from 1."""
    assert request.webhook_id(claim(**other)) != request.webhook_id(CLAIM)


def test_a_body_made_by_a_template_is_sent_as_it_is():
    """A frozen body replaces the default one, byte for byte."""
    assert build(claim(body='{"x":  "\u00e9"}'), ENDPOINT, now=now()).body == b'{"x":  "\xc3\xa9"}'


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_payload_arrives_as_the_value_it_was(value):
    """The body is JSON, whatever JSON the payload is."""
    for text in (json.dumps(value), json.dumps(value, indent=1)):
        assert json.loads(build(claim(payload=text), ENDPOINT, now=now()).body)["payload"] == value


def test_the_headers_of_a_call():
    """Everything that a receiver is promised is there."""
    at = now()
    sent = headers(build(claim(attempt=3), ENDPOINT, now=at))
    stamp = str(int(at.timestamp()))
    assert sent["content-type"] == "application/json"
    assert sent["user-agent"] == f"Madeira/{madeira.__version__}"
    assert sent["accept-encoding"] == "identity"
    assert sent["x-trace-id"] == "trace-1"
    assert re.fullmatch("msg_4711_[0-9a-f]{16}", sent["webhook-id"])
    assert sent["webhook-timestamp"] == sent["x-madeira-timestamp"] == stamp
    assert sent["x-madeira-attempt"] == "3"
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", sent["traceparent"])


def test_a_receiver_can_verify_with_either_scheme():
    """The published package and Madeira's own verifier both take the call."""
    at = now()
    made = build(CLAIM, endpoint(secrets=(WHSEC, "old")), now=at)
    sent = headers(made)
    Webhook(WHSEC).verify(made.body, sent)
    Webhook(b"old").verify(made.body, sent)
    for secret in (WHSEC, "old"):
        assert signing.verify((secret,), sent["x-madeira-timestamp"], sent["x-madeira-signature"], made.body, now=at.timestamp())


def test_without_a_secret_nothing_is_signed():
    """A signature with an empty key would be worth nothing."""
    sent = headers(build(CLAIM, endpoint(secrets=()), now=now()))
    assert not [name for name in sent if "signature" in name]
    assert "webhook-id" in sent


def test_the_upstreams_trace_goes_on_with_a_parent_of_its_own_for_each_attempt():
    """The trace id and the flags stay, the parent id is new."""
    given_ = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    one = headers(build(claim(traceparent=given_), ENDPOINT, now=now()))["traceparent"]
    two = headers(build(claim(traceparent=given_, attempt=2), ENDPOINT, now=now()))["traceparent"]
    assert one.split("-")[1] == two.split("-")[1] == "0af7651916cd43dd8448eb211c80319c"
    assert one.endswith("-00")
    assert len({one.split("-")[2], two.split("-")[2], "b7ad6b7169203331"}) == 3


@pytest.mark.parametrize(("version", "more"), [("01", ""), ("cc", "-x"), ("fe", "-")])
@pytest.mark.parametrize(("flags", "sent"), [("01", "01"), ("00", "00"), ("ff", "01"), ("fe", "00")])
def test_a_traceparent_of_a_version_to_come_goes_on_as_version_00(version: str, more: str, flags: str, sent: str) -> None:
    """With its trace id, and of its flags the one that all versions share."""
    given_ = f"{version}-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}{more}"
    header = headers(build(claim(traceparent=given_, trace_id="another"), ENDPOINT, now=now()))["traceparent"]
    assert re.fullmatch(f"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{{16}}-{sent}", header)


@pytest.mark.parametrize("given_", ["", "junk", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-a\r\nb"])
def test_a_broken_traceparent_is_replaced(given_):
    """What is no traceparent is not passed on."""
    sent = headers(build(claim(traceparent=given_, trace_id="0af7651916cd43dd8448eb211c80319c"), ENDPOINT, now=now()))
    assert re.fullmatch("00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", sent["traceparent"])


def test_headers_of_the_endpoint_are_sent():
    """Credentials and the like, in the spelling of the configuration."""
    made = build(CLAIM, endpoint(headers={"Authorization": "Bearer t", "X-Tenant": "caf\u00e9"}), now=now())
    assert ("Authorization", "Bearer t") in made.headers
    assert ("X-Tenant", "caf\u00e9") in made.headers


@pytest.mark.parametrize("name", sorted(RESERVED_HEADERS))
def test_an_endpoint_cannot_override_our_headers(name):
    """Whatever the spelling, a header that Madeira sets stays Madeira's."""
    plain = build(CLAIM, ENDPOINT, now=datetime(2026, 1, 1, tzinfo=UTC))
    made = build(CLAIM, endpoint(headers={name.title(): "forged"}), now=datetime(2026, 1, 1, tzinfo=UTC))
    assert made.headers == plain.headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-A", "a\r\nX-B: b"),
        ("X-A", "a\nb"),
        ("X-A", "a\rb"),
        ("X-A", "a\x00"),
        ("X A", "a"),
        ("X-A:", "a"),
        ("", "a"),
        ("X\r\nB", "a"),
        ("\u00e9", "a"),
    ],
    ids=ascii,
)
def test_a_header_that_would_split_the_message_is_never_sent(name, value):
    """It ends the delivery, and the reason does not tell the value."""
    with pytest.raises(NotSent) as caught:
        build(CLAIM, endpoint(headers={name: value}), now=now())
    attempt = caught.value.attempt
    assert (attempt.outcome, attempt.error_code) == (Outcome.PERMANENT, ErrorCode.TEMPLATE)
    assert attempt.status_code is None
    assert attempt.reason is not None
    assert "X-B" not in attempt.reason
    assert attempt.reason.isprintable()


def test_a_broken_secret_ends_the_delivery_and_is_not_told():
    """An unusable whsec_ is a fault of the configuration, not of the receiver."""
    with pytest.raises(NotSent) as caught:
        build(CLAIM, endpoint(secrets=("whsec_!!notbase64!!",)), now=now())
    assert caught.value.attempt.outcome is Outcome.PERMANENT
    assert "notbase64" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://xn--/",
        "http://\u2460\u2461\u2466.0.0.1/",
        "http://a b/",
        "http://x\r\ny/",
        "http://a.test:99999/",
        f"http://{'a' * 300}/",
        "",
        None,
    ],
    ids=ascii,
)
def test_a_url_that_cannot_be_called_is_permanent(url):
    """One log row with bad_url, for a fixed URL and for a callback address alike."""
    cases = [(claim(target_uri=url), endpoint(url=CALLBACK_URL))]
    if url is not None:
        cases.append((CLAIM, endpoint(url=url)))
    for of_claim, of_endpoint in cases:
        at = now()
        with pytest.raises(NotSent, match="bad_url") as caught:
            build(of_claim, of_endpoint, now=at)
        attempt = caught.value.attempt
        assert (attempt.outcome, attempt.error_code, attempt.started_at) == (Outcome.PERMANENT, ErrorCode.BAD_URL, at)
        assert attempt.url.isprintable()
        assert len(attempt.url) <= 500


def test_a_callback_goes_to_the_events_own_address():
    """The URL of the claim is called, not the endpoint's template."""
    made = build(claim(target_uri="https://back.example:8443/cb?x=1"), endpoint(url=CALLBACK_URL), now=now())
    assert made.url == "https://back.example:8443/cb?x=1"


def test_a_password_in_the_url_is_sent_and_not_told():
    """It becomes the Authorization header, unless the endpoint has one of its own."""
    made = build(claim(target_uri="http://user:hunter2@a.test/"), endpoint(url=CALLBACK_URL), now=now())
    assert headers(made)["authorization"].startswith("Basic ")
    assert made.url == "http://a.test/"
    own = endpoint(url=CALLBACK_URL, headers={"authorization": "Bearer t"})
    assert headers(build(claim(target_uri="http://user:hunter2@a.test/"), own, now=now()))["authorization"] == "Bearer t"
    with pytest.raises(NotSent) as caught:
        build(claim(target_uri="http://user:hunter2@a b/"), endpoint(url=CALLBACK_URL), now=now())
    assert "hunter2" not in caught.value.attempt.url + str(caught.value)


def test_no_secret_shows_in_a_repr():
    """A request and an endpoint can be logged without telling what they hold."""
    target = endpoint(headers={"Authorization": "Bearer t0ken"})
    made = build(CLAIM, target, now=now())
    for text in (repr(made), repr(target)):
        assert "t0ken" not in text
        assert WHSEC not in text


def test_url_and_headers_are_made_of_the_event():
    """For a retry from the endpoint as it is then; a plain value stays as it is, and the order is the endpoint's."""
    made = build(
        claim(payload='{"n": 1.10}', parameters='{"account": "a/b"}', routing_key="k"),
        endpoint(
            url="https://ledger.example/{parameters.account}{?routing_key}",
            headers={"X-First": "{{ payload.n }}", "X-Plain": "{payload.n}", "X-Last": "{{ event_type }} {{ routing_key }}"},
        ),
        now=now(),
    )
    assert made.url == "https://ledger.example/a%2Fb?routing_key=k"
    own = [
        (name, value)
        for name, value in made.headers
        if name.startswith("X-") and name.split("-")[1] in ("First", "Plain", "Last")
    ]
    assert own == [("X-First", "1.10"), ("X-Plain", "{payload.n}"), ("X-Last", "payment.settled k")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"url": "https://ledger.example/{payload.none}"}, "endpoint ledger: url: the event has no payload.none"),
        ({"url": "https://ledger.example/{payload.dots}/x"}, "endpoint ledger: url: a value leads out of its folder"),
        ({"headers": {"X-A": "{{ payload.none }}"}}, "endpoint ledger: header X-A: there is no field none"),
        ({"headers": {"X-A": "{{ payload.split }}"}}, "endpoint ledger: header X-A: the result holds a line break"),
        ({"headers": {"X-A": "{{ s3cr3t"}}, "endpoint ledger: header X-A: the template cannot be used"),
        ({"url": "https://{payload.host}/"}, "endpoint ledger: url: the template must begin with"),
    ],
    ids=str,
)
def test_a_template_that_fails_ends_the_delivery(fields, reason):
    """As class template, with endpoint and field; nothing is called, and no secret is told."""
    payload = '{"dots": "..", "split": "a\\r\\nX-B: b", "host": "evil.example"}'
    with pytest.raises(NotSent) as caught:
        build(claim(payload=payload), endpoint(**fields), now=now())
    attempt = caught.value.attempt
    assert (attempt.outcome, attempt.error_code) == (Outcome.PERMANENT, ErrorCode.TEMPLATE)
    assert attempt.reason is not None
    assert attempt.reason.startswith(reason)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["webhook-id", "Webhook-Signature", "X-Madeira-Attempt", "content-type", "Host", "Content-Length"]
)
def test_a_template_cannot_override_our_headers(name):
    """Not even one that would fail there."""
    plain = build(CLAIM, ENDPOINT, now=datetime(2026, 1, 1, tzinfo=UTC))
    made = build(CLAIM, endpoint(headers={name: "{{ event_id }}"}), now=datetime(2026, 1, 1, tzinfo=UTC))
    assert made.headers == plain.headers


def test_without_templates_the_payload_is_not_parsed():
    """It may be what it is, and costs nothing."""
    assert build(claim(payload="[" * 100_000), endpoint(headers={"X-A": "b"}), now=now()).body.endswith(b"[}")
