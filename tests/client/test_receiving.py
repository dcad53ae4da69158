"""The receiving side: what Madeira sent is known for what it is, and nothing else is."""

import json
from datetime import UTC, datetime, timedelta
from email.message import Message

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from madeira.client import Call, Delivery, UnexpectedBody, UnwantedTest, VerificationFailed, authenticate, verify
from madeira.delivery import signing
from madeira.delivery.request import build
from tests.delivery.samples import CLAIM, WHSEC, claim, endpoint

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STAMP = str(int(NOW.timestamp()))
BODY = json.dumps(
    {
        "event_id": "evt-1",
        "event_type": "payment.settled",
        "source": "billing",
        "created_at": "2026-01-02T03:04:05.678901Z",
        "trace_id": "trace-1",
        "payload": {"amount": 12345678901234567890},
    }
).encode()


def headers(secrets=("right",), body=BODY, stamp=STAMP, **changes: str) -> dict[str, str]:
    """The headers of a genuine call, with some of them changed; underscores stand for hyphens."""
    given = {
        "webhook-id": "msg_1",
        "webhook-timestamp": stamp,
        "webhook-signature": signing.standard_signature(secrets, "msg_1", stamp, body),
        "X-Madeira-Attempt": "3",
    }
    return given | {name.replace("_", "-"): value for name, value in changes.items()}


def verified(given=None, body=BODY, secrets="right", **more) -> Delivery:
    return verify(headers() if given is None else given, body, secrets, now=NOW.timestamp(), **more)


def test_a_genuine_call_brings_its_event():
    """Every field of the envelope, typed, and what the headers say."""
    assert verified() == Delivery(
        event_id="evt-1",
        event_type="payment.settled",
        source="billing",
        created_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        trace_id="trace-1",
        payload={"amount": 12345678901234567890},
        webhook_id="msg_1",
        attempt=3,
    )


@pytest.mark.parametrize("prove", [verify, authenticate])
def test_a_test_call_is_turned_away_unless_it_is_wanted(prove):
    """Once the signature held: what is forged is forged, whatever it is called."""
    signature = signing.standard_signature(["right"], "msg_test_1", STAMP, BODY)
    given = headers(webhook_id="msg_test_1", webhook_signature=signature)
    with pytest.raises(UnwantedTest, match="only a test call"):
        prove(given, BODY, "right", now=NOW.timestamp())
    assert issubclass(UnwantedTest, VerificationFailed)
    assert prove(given, BODY, "right", now=NOW.timestamp(), allow_tests=True).is_test
    assert not prove(headers(), BODY, "right", now=NOW.timestamp(), allow_tests=True).is_test
    with pytest.raises(VerificationFailed, match="no signature"):
        prove(given, BODY, "wrong", now=NOW.timestamp())


@pytest.mark.parametrize("secret", [WHSEC, "plain s\u00e9cret"], ids=["whsec", "plain"])
def test_the_request_that_madeira_makes_is_verified(secret):
    """With the machine's own clock, and with the names of headers as they go on the wire."""
    request = build(CLAIM, endpoint(secrets=(secret,)), now=datetime.now(UTC))
    delivery = verify(dict(request.headers), request.body, secret)
    assert (delivery.event_id, delivery.source, delivery.trace_id) == (CLAIM.event_id, CLAIM.source, CLAIM.trace_id)
    assert (delivery.event_type, delivery.created_at) == (CLAIM.event_type, CLAIM.created_at)
    assert (delivery.payload, delivery.attempt) == (json.loads(CLAIM.payload), CLAIM.attempt)


def test_what_the_published_package_signs_is_verified():
    """One direction: any sender of Standard Webhooks."""
    signature = Webhook(WHSEC).sign("msg_1", NOW, BODY.decode())
    assert verified(headers(webhook_signature=signature), secrets=WHSEC).event_id == "evt-1"
    with pytest.raises(VerificationFailed):
        verified(headers(webhook_signature=signature), body=BODY + b" ", secrets=WHSEC)


@pytest.mark.parametrize("key", [WHSEC, b"plain"], ids=["whsec", "plain"])
def test_the_published_package_agrees_about_every_call(key):
    """The other direction: what verifies here verifies there, and what does not does not."""
    secret = key if isinstance(key, str) else key.decode()
    stamp = str(int(datetime.now(UTC).timestamp()))
    calls = [
        headers((secret,), stamp=stamp),
        headers(("another", secret), stamp=stamp),
        headers(("another",), stamp=stamp),
        headers((secret,), stamp=stamp, webhook_id="msg_2"),
        headers((secret,), stamp=str(int(stamp) - 400)),
        headers((secret,), stamp=str(int(stamp) + 400)),
        headers((secret,), stamp=stamp) | {"webhook-signature": "v1,AAAA v2,BBBB"},
    ]
    verdicts = []
    for call in calls:
        try:
            Webhook(key).verify(BODY, call)
            theirs = True
        except WebhookVerificationError:
            theirs = False
        try:
            verify(call, BODY, secret)
            ours = True
        except VerificationFailed:
            ours = False
        assert ours == theirs
        verdicts.append(ours)
    assert verdicts == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("signed", [("old",), ("new",), ("new", "old"), ("unknown", "old")], ids="+".join)
@pytest.mark.parametrize("known", ["old new", "new old"])
def test_any_pair_of_secrets_that_fits_is_enough_during_a_rotation(signed, known):
    """Several on either side, in any order."""
    assert verified(headers(signed), secrets=known.split()).event_id == "evt-1"


def test_signatures_of_other_versions_are_passed_over():
    """A later version of the standard may send both."""
    good = headers()["webhook-signature"]
    assert verified(headers(webhook_signature=f"v1a,{good[3:]} {good} v2,xyz")).event_id == "evt-1"
    with pytest.raises(VerificationFailed):
        verified(headers(webhook_signature=f"v1a,{good[3:]} {good[3:]} v2,{good[3:]}"))


@pytest.mark.parametrize("offset", [-300, 0, 300])
def test_a_timestamp_inside_the_tolerance_is_taken(offset):
    """Clocks may differ, either way."""
    assert verify(headers(), BODY, "right", now=NOW.timestamp() + offset).event_id == "evt-1"


@pytest.mark.parametrize("offset", [-301, 301, 86_400])
def test_a_timestamp_outside_the_tolerance_is_refused(offset):
    """An old call cannot be played again; the message says how far it is off."""
    with pytest.raises(VerificationFailed, match=f"is {abs(offset)} s off; 300 s are allowed"):
        verify(headers(), BODY, "right", now=NOW.timestamp() + offset)
    assert verify(headers(), BODY, "right", now=NOW.timestamp() + offset, tolerance_s=86_400).event_id == "evt-1"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"webhook_id": ""}, "the header webhook-id is missing"),
        ({"webhook_timestamp": ""}, "the header webhook-timestamp is missing"),
        ({"webhook_signature": ""}, "the header webhook-signature is missing"),
        ({"webhook_id": "msg_2"}, "no signature"),
        ({"webhook_id": "msg_\udce9"}, "is not of ASCII"),
        ({"webhook_timestamp": "now"}, "not a number"),
        ({"webhook_timestamp": f"{STAMP}.0"}, "not a number"),
        ({"webhook_timestamp": f"-{STAMP}"}, "not a number"),
        ({"webhook_timestamp": "9" * 5000}, "not a number"),
        ({"webhook_timestamp": str(int(STAMP) + 1)}, "no signature"),
        ({"webhook_signature": "v1,"}, "no signature"),
        ({"webhook_signature": "v1,\u00e9"}, "is not of ASCII"),
        ({"webhook_signature": " ".join(["v1,AAAA"] * 8 + [headers()["webhook-signature"]])}, "no signature"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_its_reason(changed, reason):
    """For the receiver's log; never another error."""
    with pytest.raises(VerificationFailed, match=reason):
        verified(headers(**changed))


@given(
    st.dictionaries(st.sampled_from(["webhook-id", "Webhook-Timestamp", "webhook-signature", "X-Madeira-Attempt"]), st.text()),
    st.binary(),
)
def test_whatever_a_stranger_sends_is_refused_without_another_error(given_headers, body):
    """No header and no body makes the verifier fail."""
    with pytest.raises(VerificationFailed):
        verify(given_headers, body, ["right", WHSEC], now=NOW.timestamp())


def test_headers_are_taken_as_any_framework_has_them():
    """In any case, and as objects that are no dict."""
    message = Message()
    for name, value in headers().items():
        message[name.title()] = value
    assert verified(message).attempt == 3
    assert verified({name.upper(): value for name, value in headers().items()}).attempt == 3


def test_a_header_that_is_there_twice_is_refused():
    """Which of them was signed, and which does the program behind read?"""
    message = Message()
    for name, value in headers().items():
        message[name] = value
    message["Webhook-Id"] = "msg_2"
    with pytest.raises(VerificationFailed, match="webhook-id is missing, is there twice"):
        verified(message)


@pytest.mark.parametrize("attempt", ["", "x", "-1", "9" * 5000, "\u0663"], ids=["none", "word", "negative", "endless", "arabic"])
def test_a_number_of_the_attempt_that_is_none_spoils_nothing(attempt):
    """It is not signed, and only told."""
    assert verified(headers(X_Madeira_Attempt=attempt)).attempt is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"{}",
        b'{"payload": 1}',
        b"\xff",
        b"[" * 100_000,
        BODY.replace(b'"evt-1"', b"7"),
        BODY.replace(b"2026-01", b"soon"),
    ],
    ids=["empty", "cut off", "list", "number", "object", "half", "bytes", "deep", "number for id", "no time"],
)
def test_a_genuine_call_with_another_body_is_not_taken_for_a_forgery(body):
    """A 401 would end the delivery for good, only since the endpoint has a template."""
    given = headers(body=body)
    with pytest.raises(UnexpectedBody, match="body template") as caught:
        verified(given, body)
    assert not isinstance(caught.value, VerificationFailed)
    assert authenticate(given, body, "right", now=NOW.timestamp()) == Call("msg_1", int(STAMP), 3)
    with pytest.raises(VerificationFailed):
        authenticate(given, body + b" ", "right", now=NOW.timestamp())


@pytest.mark.parametrize("secrets", ["", [], (), ["right", ""], [""]], ids=repr)
def test_a_receiver_without_a_secret_does_not_verify(secrets):
    """An empty key would let everybody in."""
    with pytest.raises(ValueError, match="at least one secret, and no empty one"):
        verified(headers(("",)), secrets=secrets)


@pytest.mark.parametrize(
    ("secrets", "error"),
    [(["s3cret-one", "s3cret-two"], VerificationFailed), ("whsec_s3cret-one!", ValueError)],
    ids=["no fit", "no base64"],
)
def test_no_error_tells_a_secret_or_the_signature_that_would_fit(secrets, error):
    """Nor does anything that it was raised from."""
    with pytest.raises(error) as caught:
        verified(headers(("another",)), secrets=secrets)
    assert caught.value.__context__ is None
    assert "s3cret" not in str(caught.value)
    assert signing.standard_signature(["s3cret-one"], "msg_1", STAMP, BODY) not in str(caught.value)


def test_the_representation_of_a_delivery_leaves_the_payload_out():
    """Payloads are of strangers, and may be large; logs hold what is printed."""
    assert "12345678901234567890" not in repr(verified())
    assert "evt-1" in repr(verified())


def test_the_same_delivery_has_the_same_id_on_every_attempt():
    """It is what a receiver keeps to know a repetition."""
    calls = [build(claim(attempt=n), endpoint(secrets=(WHSEC,)), now=datetime.now(UTC) + timedelta(seconds=n)) for n in (1, 2)]
    first, second = (verify(dict(call.headers), call.body, WHSEC) for call in calls)
    assert first.webhook_id == second.webhook_id
    assert (first.attempt, second.attempt) == (1, 2)
