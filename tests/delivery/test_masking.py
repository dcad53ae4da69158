"""What a receiver echoes of an endpoint's credentials is taken out of its answer, however it was written."""

import base64
import html
import json
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.delivery import masking
from madeira.delivery.answer import CallFailed
from madeira.delivery.verdict import judge
from madeira.records import Endpoint
from madeira.states import ErrorCode
from tests.delivery.samples import endpoint
from tests.delivery.test_verdict import answer

TOKEN = 'tok/en+<Q>&\\x"é7=end'
SECRET = "a signing/secret & more"
STANDARD = "whsec_" + base64.b64encode(b"sixteen+bytes/key").decode()
BASIC = "Basic " + base64.b64encode(b"madeira-user:pass/word<1>").decode()


def target(*, secrets: tuple[str, ...] = (), **headers: str) -> Endpoint:
    return replace(endpoint(), secrets=secrets, headers=MappingProxyType(headers))


def masked(text: bytes, echoing: Endpoint, first: int = 65_536) -> bytes:
    return masking.masked(text, echoing, first=first)


def everywhere(pattern: str) -> Callable[[str], str]:
    """Writes each character by `pattern`."""
    return lambda text: "".join(pattern.format(ord(c)) for c in text)


def in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def twice(write: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: write(write(text))


def in_base64(before: str, after: str = "") -> Callable[[str], str]:
    return lambda text: base64.b64encode((before + text + after).encode()).decode()


WAYS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "in capitals": lambda text: text.replace("é", "!").upper().replace("!", "é"),
    "in JSON": in_json,
    "in JSON, not of ASCII": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "in JSON of a solidus": lambda text: in_json(text).replace("/", "\\/"),
    "in JSON of everything": everywhere("\\u{:04x}"),
    "in JSON of everything, in capitals": everywhere("\\u{:04X}"),
    "in JSON in JSON": twice(in_json),
    "in JSON in JSON in JSON": lambda text: in_json(in_json(in_json(text))),
    "in JSON for HTML": lambda text: in_json(text).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003E"),
    "in HTML": html.escape,
    "in HTML of everything": everywhere("&#{};"),
    "in HTML of everything, hexadecimal": everywhere("&#x{:X};"),
    "in HTML of everything, with zeros": everywhere("&#x{:06x};"),
    "in HTML in HTML": twice(html.escape),
    "in HTML in JSON": lambda text: in_json(html.escape(text)),
    "in JSON in HTML": lambda text: html.escape(in_json(text)),
    "in a path": quote,
    "in a query": lambda text: quote(text, safe=""),
    "in a query, in small letters": lambda text: quote(text, safe="").lower(),
    "in a form": quote_plus,
    "in a query in a query": twice(lambda text: quote(text, safe="")),
    "of percent signs only": lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    "in hexadecimal": lambda text: text.encode().hex(),
    "in hexadecimal, in capitals": lambda text: text.encode().hex().upper(),
    "in base64": in_base64(""),
    "in base64 in JSON": lambda text: in_json(in_base64("")(text)).replace("/", "\\/"),
    "in base64 in a query": lambda text: quote(in_base64("")(text), safe=""),
    "in base64 for URLs": lambda text: base64.urlsafe_b64encode(text.encode()).decode().rstrip("="),
    "in latin-1": str,
}


@pytest.mark.parametrize("value", [TOKEN, SECRET, STANDARD])
@pytest.mark.parametrize("way", WAYS)
def test_a_credential_is_masked_however_it_is_written(way: str, value: str) -> None:
    """In the excerpt and in the reason; what stands around it stays."""
    text = WAYS[way](value)
    written = text.encode("latin-1" if way == "in latin-1" else "utf-8")
    echoing = target(secrets=(value,), Authorization=f"Bearer {value}")
    assert masked(b"(" + written + b")", echoing) == b"(***)"
    around = (b"100% \\n &amp; \\u0041 (", b") &lt; %41 \\u0041 %")
    assert masked(written.join(around), echoing) == b"***".join(around)
    assert judge(answer(302, location=f"/?{text}#"), echoing).reason == (
        "the receiver answered 302 to /?***#; redirects are not followed"
    )


@pytest.mark.parametrize("before", ["", "a", "ab", "abc", "Bearer "])
@pytest.mark.parametrize("after", ["", "z", "zy"])
def test_a_credential_inside_of_something_in_base64_is_masked(before: str, after: str) -> None:
    """All but the characters that hold bits of what stands beside it."""
    whole = in_base64(before, after)(SECRET)
    left = masked(whole.encode(), target(secrets=(SECRET,)))
    assert b"***" in left
    assert len(left) <= len(b"***") + len(base64.b64encode(before.encode())) + len(base64.b64encode(after.encode())) + 4


@pytest.mark.parametrize(
    ("header", "echo"),
    [
        (BASIC, "madeira-user:pass/word<1>"),
        (BASIC, "pass/word<1>"),
        (BASIC, "madeira-user"),
        (BASIC, BASIC.removeprefix("Basic ")),
        (BASIC.upper().replace(BASIC.upper()[6:], BASIC[6:]), "pass\\/word\\u003c1>"),
        ('Token token="abcdefgh1", x=1', "abcdefgh1"),
        ("session=abcdefgh1; path=/", "abcdefgh1"),
        ("Bearer  abcdefgh1 ", "abcdefgh1"),
        ("Token abcdefgh-{{ event_id }}", "abcdefgh-"),
    ],
)
def test_the_parts_of_a_header_are_masked_by_themselves(header: str, echo: str) -> None:
    """User and password, the credential without its scheme, the value of a parameter."""
    assert masked(f"<{echo}>".encode(), target(X=header)) == b"<***>"


@pytest.mark.parametrize("echo", ["sixteen+bytes/key", STANDARD[6:], STANDARD[6:].rstrip("="), b"sixteen+bytes/key".hex()])
def test_the_key_in_a_secret_is_masked(echo: str) -> None:
    """What follows whsec_, and what it is the base64 of."""
    assert masked(f"<{echo}>".encode(), target(secrets=(STANDARD,))).replace(b"=", b"") == b"<***>"


def test_a_short_value_is_not_masked() -> None:
    """Its letters may stand in any answer."""
    assert masked(b"1234567 12345678", target(A="1234567", B="12345678")) == b"1234567 ***"


def test_a_credential_that_a_reason_is_cut_in_leaves_no_part_of_itself() -> None:
    """It is masked before it is cut."""
    secret = "abcdefghijklmnopqrstuvwxyz"
    for length in range(140, 510, 7):
        body = json.dumps({"error": "x" * length + secret}).encode()
        reason = judge(answer(200, body), target(secrets=(secret,))).reason or ""
        assert "abc" not in reason


@pytest.mark.parametrize("way", ["as it is", "in JSON of everything", "in base64", "in HTML of everything, with zeros"])
def test_a_credential_that_an_excerpt_ends_in_leaves_no_part_of_itself(way: str) -> None:
    """Wherever the cut is, and however much stands behind."""
    written = WAYS[way](SECRET).encode()
    whole = b"." * 50 + written + b"." * 5000
    for first in range(50, 60 + len(written)):
        left = masked(whole, target(secrets=(SECRET,)), first)
        assert set(left) <= set(b".*"), (first, left)
        assert left.startswith(b"." * 50)


def test_what_a_call_failed_for_is_masked_too() -> None:
    """A malformed answer may be quoted there."""
    failed = CallFailed(ErrorCode.PROTOCOL, "no status line: 'HTTP/9 abcdefghijk'")
    failed.started_at, failed.url, failed.duration_s = answer(200).started_at, "http://h.example/", 0.0
    assert judge(failed, target(A="Bearer abcdefghijk")).reason == "no status line: 'HTTP/9 ***'"


def test_the_forms_are_made_once_for_an_endpoint() -> None:
    """An attempt pays for the search only, and nothing without a body."""
    echoing = target(secrets=("made-once-for-this-test",))
    before = masking._forms.cache_info()
    assert masked(b"", echoing) == b""
    assert masking._forms.cache_info() == before
    for _ in range(3):
        assert masked(b"made-once-for-this-test", echoing) == b"***"
    assert masking._forms.cache_info().misses == before.misses + 1


@given(st.binary(max_size=300))
def test_an_answer_without_a_credential_stays_as_it_is(body: bytes) -> None:
    """Whatever the receiver sent, nothing fails and nothing is lost."""
    assert masked(body, target(secrets=("not-to-be-found-in-there",))) == body


@given(
    st.lists(
        st.sampled_from([b"\\", b"\\\\", b"u00", b"%", b"25", b"&", b"amp;", b"#x41;", b"abcdefgh", b"\\ud83d", b"4"]),
        max_size=12,
    )
)
def test_half_an_escape_neither_fails_nor_hides_a_credential(parts: list[bytes]) -> None:
    """Escapes that go wrong are text like others."""
    assert b"abcdefgh" not in masked(b"".join(parts), target(secrets=("abcdefgh",)))
