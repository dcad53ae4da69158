"""Signatures of both schemes, and what a verifier must refuse."""

import base64
import shutil
import subprocess
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from madeira.delivery import signing
from tests.delivery.samples import WHSEC

NOW = 1_767_323_045.0
STAMP = str(int(NOW))
BODY = b'{"a": 1}'


def verified(secrets=("right",), timestamp=STAMP, signature=None, body=BODY, now=NOW):
    """The verdict on a call that is good in every respect but those that are given."""
    return signing.verify(
        secrets, timestamp, signing.sign("right", STAMP, BODY) if signature is None else signature, body, now=now
    )


def test_what_openssl_signs_is_verified():
    """The line in the README makes the same signature as Madeira."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is needed: the README's curl line uses it"
    made = subprocess.run(
        [openssl, "dgst", "-sha256", "-hmac", "s3cret", "-r"],
        input=STAMP.encode() + b"\n" + BODY,
        capture_output=True,
        check=True,
    )
    assert verified(["s3cret"], signature=made.stdout.split()[0].decode())


@pytest.mark.parametrize("secrets", [("right",), ("old", "right"), ("right", "new")])
def test_any_active_secret_verifies(secrets):
    """During a rotation the old and the new secret are both good."""
    assert verified(secrets)


@pytest.mark.parametrize("offset", [-300, -299, 0, 299, 300])
def test_a_timestamp_inside_the_window_is_taken(offset):
    """Clocks may differ by five minutes, either way."""
    assert verified(now=NOW + offset)


@pytest.mark.parametrize("offset", [-302, 302, 86_400])
def test_a_timestamp_outside_the_window_is_refused(offset):
    """An old call cannot be played again."""
    assert not verified(now=NOW + offset)


@pytest.mark.parametrize(
    "case",
    [
        {"secrets": ()},
        {"secrets": ("wrong",)},
        {"timestamp": None},
        {"timestamp": ""},
        {"timestamp": f" {STAMP}"},
        {"timestamp": f"{STAMP}.0"},
        {"timestamp": f"+{STAMP}"},
        {"timestamp": "-1"},
        {"timestamp": "nan"},
        {"timestamp": "1e9"},
        {"timestamp": "9" * 5000},
        {"timestamp": "\u0661\u0662\u0663"},
        {"timestamp": str(int(NOW) + 1)},
        {"signature": ""},
        {"signature": "0" * 64},
        {"signature": signing.sign("right", STAMP, BODY)[:-1]},
        {"signature": "\u00e9\u4e00\ud800"},
        {"signature": ",".join(["0" * 64] * 8 + [signing.sign("right", STAMP, BODY)])},
        {"body": BODY + b" "},
        {"body": b""},
    ],
    ids=repr,
)
def test_anything_else_is_refused_without_an_error(case):
    """Whatever stands in the headers, the verifier says no and does not fail."""
    assert not verified(**case)


def test_capital_hex_and_lists_are_understood():
    """A signature list of another Madeira in rotation verifies, and so does hex in capitals."""
    assert verified(signature=signing.sign("right", STAMP, BODY).upper())
    assert verified(signature=signing.madeira_signature(("new", "right"), STAMP, BODY))


def test_the_raw_bytes_are_signed():
    """Bytes that are no UTF-8 are signed as they are."""
    body = b"\xff\x00\n"
    assert verified(signature=signing.sign("right", STAMP, body), body=body)


@given(st.text(min_size=1).filter(lambda s: s.isprintable()), st.binary(), st.binary())
def test_a_signature_fits_its_body_only(secret, body, other):
    """No other body verifies with a signature."""
    signature = signing.sign(secret, STAMP, body)
    assert signing.verify((secret,), STAMP, signature, body, now=NOW)
    assert signing.verify((secret,), STAMP, signature, other, now=NOW) == (body == other)


def standard_headers(secrets, body=BODY, timestamp=None):
    """The three headers as Madeira sends them."""
    timestamp = timestamp or str(int(time.time()))
    return {
        "webhook-id": "msg_1",
        "webhook-timestamp": timestamp,
        "webhook-signature": signing.standard_signature(secrets, "msg_1", timestamp, body),
    }


def test_the_published_package_verifies_a_whsec_secret():
    """A receiver needs nothing of ours."""
    assert Webhook(WHSEC).verify(BODY, standard_headers([WHSEC])) == {"a": 1}


def test_the_published_package_verifies_any_other_secret_as_bytes():
    """A secret that is no whsec_ is its own key, as UTF-8."""
    assert Webhook("geheim \u00fc".encode()).verify(BODY, standard_headers(["geheim \u00fc"])) == {"a": 1}


def test_the_published_package_verifies_the_old_and_the_new_secret():
    """With two active secrets each of them verifies, and a third does not."""
    headers = standard_headers([WHSEC, "old"])
    assert Webhook(WHSEC).verify(BODY, headers)
    assert Webhook(b"old").verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(b"other").verify(BODY, headers)


def test_our_signature_is_the_published_packages_own():
    """The two implementations agree to the byte."""
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    ours = signing.standard_signature([WHSEC], "msg_1", str(int(at.timestamp())), BODY)
    assert ours == Webhook(WHSEC).sign("msg_1", at, BODY.decode())


def test_a_whsec_secret_without_padding_is_the_same_key():
    """Some tools leave the = away, and so does the published package."""
    assert signing.standard_key("whsec_YQ") == signing.standard_key("whsec_YQ==") == b"a"


@pytest.mark.parametrize("secret", ["whsec_", "whsec_===", "whsec_a", "whsec_not base64!", "whsec_\u00e9\u00e9"])
def test_a_broken_whsec_secret_is_refused_and_not_told(secret):
    """The error says what is wrong and keeps the secret to itself."""
    with pytest.raises(ValueError, match="base64") as caught:
        signing.standard_key(secret)
    assert str(caught.value) == "a secret that begins with whsec_ must go on in base64"
    assert caught.value.__context__ is None, "a traceback would show what could not be decoded"


def test_the_keys_differ_by_scheme():
    """Madeira's own scheme takes the text of a whsec_ secret as its key, so that openssl needs no decoding."""
    assert signing.standard_key(WHSEC) == base64.b64decode(WHSEC[6:])
    assert signing.sign(WHSEC, STAMP, BODY) != signing.sign(WHSEC[6:], STAMP, BODY)
