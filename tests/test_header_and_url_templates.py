"""Templates for headers and URLs: one line, and never another receiver than was meant, whatever data comes in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import target, templates
from madeira.templates import TemplateFailed, check_header, check_url
from tests.template_values import VALUES, values

# -- headers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Bearer {{ payload.object.a.b }}", "Bearer c"),
        (" {{ event_id }} ", "evt-1"),
        ("{{ payload.cents }}; {{ payload.yes }}", "1.10; true"),
        ("{{ payload.accent }}", "Z\u00fcrich"),
        ("{{ parameters.accent | urlencode }}", "%C3%BC"),
        ("{{ parameters.missing | default('') }}", ""),
    ],
)
def test_a_header_is_made_of_the_event(text: str, expected: str) -> None:
    """Spaces around it go: they are none of its value."""
    assert check_header(text) is None
    assert templates.header(text, VALUES) == expected


@pytest.mark.parametrize(
    "text",
    ["{{ payload.lines }}", "{{ payload.nul }}", "{{ 'a\\nb' }}", "a\n{{ event_id }}", "{{ payload.half }}", "{{ '\u20ac' }}"],
)
def test_a_header_never_breaks_the_message(text: str) -> None:
    """Line breaks, control characters and what no header can hold end the delivery."""
    with pytest.raises(TemplateFailed, match="cannot stand in a header"):
        templates.header(text, VALUES)


@given(st.text())
def test_whatever_a_header_is_made_of_it_is_one_line(text: str) -> None:
    try:
        made = templates.header("{{ payload.v }}", values(json.dumps({"v": text})))
    except TemplateFailed:
        return
    assert made == text.strip(" \t")
    assert not any((ord(c) < 32 and c != "\t") or ord(c) == 127 or ord(c) > 255 for c in made)


# -- URLs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{+target_uri}", "https://back.example/cb?x=1"),
        ("https://h.example/plain?x=1", "https://h.example/plain?x=1"),
        ("https://h.example/{event_type}/{event_id}", "https://h.example/payment.done/evt-1"),
        ("https://h.example/{parameters.account}", "https://h.example/a%2Fb%20c"),
        ("https://h.example/{+parameters.path}", "https://h.example/x/y"),
        ("https://h.example{/source,parameters.path}", "https://h.example/billing/x%2Fy"),
        ("https://h.example/{parameters.list}", "https://h.example/a,b%2Fc"),
        ("https://h.example{/parameters.list*}", "https://h.example/a/b%2Fc"),
        (
            "https://h.example/{?parameters.list*,parameters.cents}",
            "https://h.example/?parameters.list=a&parameters.list=b%2Fc&parameters.cents=1.10",
        ),
        ("https://h.example{?trace_id}{&parameters.yes}", "https://h.example?trace_id=trace-1&parameters.yes=true"),
        ("https://h.example/x?fixed=1{&parameters.empty}", "https://h.example/x?fixed=1&parameters.empty="),
        ("https://h.example/x{;parameters.cents}", "https://h.example/x;parameters.cents=1.10"),
        ("https://h.example/x{.source}", "https://h.example/x.billing"),
        ("https://h.example/{source:3}", "https://h.example/bil"),
        ("https://h.example/{parameters.accent}", "https://h.example/%C3%BC"),
        ("https://h.example/{parameters.nested.deep.1.er}/{parameters.nested.deep.0}", "https://h.example/z/10"),
        ("https://h.example/{payload.big}/{payload.real}", "https://h.example/12345678901234567890/1.0"),
        ("https://h.example/{parameters.host}", "https://h.example/%40evil.example%2F"),
        ("https://h.example/{parameters.encoded}", "https://h.example/%252e%252e"),
        ("https://h.example/a{parameters.dots}", "https://h.example/a.."),
        ("https://h.example/?q={parameters.up}", "https://h.example/?q=x%2F..%2Fy"),
        ("https://h.example:8443/{parameters.space}", "https://h.example:8443/%20"),
    ],
)
def test_a_url_is_made_of_the_event(text: str, expected: str) -> None:
    """By RFC 6570; numbers as the event has them."""
    assert check_url(text) is None
    assert templates.url(text, VALUES) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("https://h.example/{parameters.missing}", "the event has no parameters.missing"),
        ("https://h.example/{parameters.account.deep}", "the event has no parameters.account.deep"),
        ("https://h.example/{parameters.list.7}", "the event has no parameters.list.7"),
        ("https://h.example/{?parameters.missing}", "the event has no parameters.missing"),
        ("https://h.example/{parameters.none}", "parameters.none is null"),
        ("https://h.example/{routing_key}", "routing_key is null"),
        ("https://h.example/{parameters.object}", "parameters.object is no text, number or list"),
        ("https://h.example/{payload.items}", "payload.items is no text, number or list"),
        ("https://h.example/{parameters.empty}/x", "parameters.empty is empty"),
        ("https://h.example/{parameters.dots}/x", "leads out of its folder"),
        ("https://h.example{/parameters.dots}", "leads out of its folder"),
        ("https://h.example/.{parameters.dots:1}/x", "leads out of its folder"),
        ("https://h.example/{parameters.up}", "leads out of its folder"),
        ("https://h.example/{+parameters.up}", "leads out of its folder"),
        ("https://h.example/{+parameters.encoded}/x", "leads out of its folder"),
        ("https://h.example/{parameters.back}", "leads out of its folder"),
        ("https://h.example/{+parameters.hash}", "a fragment"),
        ("https://h.example/{parameters.half}", "half a character"),
        ("https://h.example/{payload.nul}{+payload.lines}", None),
    ],
)
def test_a_url_that_is_another_one_than_was_meant_fails(text: str, reason: str | None) -> None:
    """A hole in the path, a way out of it: the delivery is dead, and nothing is called."""
    assert check_url(text) is None
    if reason is None:
        made = templates.url(text, VALUES)
        assert made.isascii()
        assert made.isprintable()
        return
    with pytest.raises(TemplateFailed) as caught:
        templates.url(text, VALUES)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{event_id}://h.example/", "must begin with http:// or https:// and a literal host"),
        ("https://{source}/", "must begin with"),
        ("https://{source}.example/", "must begin with"),
        ("https://h{source}/", "the host must be followed by"),
        ("https://h.{parameters.x}/", "the host must be followed by"),
        ("https://h.example:{parameters.port}/", "the host must be followed by"),
        ("https://h.example{parameters.x}", "the host must be followed by"),
        ("https://h.example{+parameters.x}", "the host must be followed by"),
        ("https://h.example{.source}", "the host must be followed by"),
        ("https://h.example{;source}", "the host must be followed by"),
        ("https://h.example{&source}", "the host must be followed by"),
        ("https://{parameters.user}@h.example/", "must begin with"),
        ("https://u@h.example/{event_id}", "the host must be followed by"),
        ("{+target_uri}/x", "must begin with"),
        ("https://h.example/{+target_uri}", "there is no target_uri"),
        ("https://h.example/{evnt_id}", "there is no evnt_id; did you mean event_id?"),
        ("https://h.example/{account}", "there is no account; known are event_id"),
        ("https://h.example/{event_id.x}", "there is no event_id.x"),
        ("https://h.example/{payload}", "name the value in payload that is meant"),
        ("https://h.example/{#event_id}", "the operator # is not available"),
        ("https://h.example/{=event_id}", "the operator = is not available"),
        ("https://h.example/{event_id", "has no partner"),
        ("https://h.example/event_id}", "has no partner"),
        ("https://h.example/{}", "is no name"),
        ("https://h.example/{event_id,}", "is no name"),
        ("https://h.example/{event id}", "is no name"),
        ("https://h.example/{event_id:0}", "is no name"),
        ("https://h.example/{event_id=x}", "is no name"),
        ("https://h.example/{event_id}#x", "must not have a fragment"),
        ("https://a..b/{event_id}", "no possible name"),
        ("https://1/{event_id}", "looks like a number"),
        ("https://h.example:99999/{event_id}", "malformed"),
        ("https://h.example/" + "x" * 5000 + "{event_id}", "4096 are allowed"),
    ],
)
def test_a_url_template_that_cannot_be_used_is_refused(text: str, reason: str) -> None:
    """At saving; and should it get past that, nothing is called."""
    found = check_url(text)
    assert found is not None
    assert reason in found
    with pytest.raises(TemplateFailed):
        templates.url(text, VALUES)


@given(
    st.text(max_size=30),
    st.sampled_from(["/{parameters.v}", "/a/{+parameters.v}", "{/parameters.v}", "/x{.parameters.v}/y", "{?parameters.v}"]),
)
def test_whatever_the_values_the_call_goes_to_the_templates_host(text: str, rest: str) -> None:
    """And into the folder that it names."""
    try:
        made = templates.url("https://h.example:8443" + rest, values("{}", json.dumps({"v": text})))
    except TemplateFailed:
        return
    where = target.parse(made)
    assert where.origin == ("https", "h.example", 8443)
    assert where.path.startswith(rest.split("{", 1)[0])


def test_an_event_without_a_callback_address_has_no_url() -> None:
    with pytest.raises(TemplateFailed, match="brought no target_uri"):
        templates.url("{+target_uri}", values(target_uri=None))
