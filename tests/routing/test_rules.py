import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.records import CALLBACK_URL, Endpoint, RoutableEvent
from madeira.routing.config import Rules, no_rules, parse_toml
from madeira.routing.rules import lane_of, match

CALLBACK = Endpoint(name="callback", url=CALLBACK_URL)


def event(event_type: str = "payment.done", **fields: str | None) -> RoutableEvent:
    values = {"source": "s", "routing_key": None, "target_uri": None, **fields}
    return RoutableEvent(seq=1, event_id="e", event_type=event_type, trace_id="t", route_failures=0, **values)  # type: ignore[arg-type]


def rules(*routes: str) -> Rules:
    text = "".join(f'[[source]]\nname="{s}"\nsecrets=["x"]\n' for s in ("s", "t"))
    text += "".join(f'[[endpoint]]\nname="{e}"\nurl="http://h/"\n' for e in ("a", "b"))
    text += "".join(f'[[route]]\nname="r{i}"\n{r}\n' for i, r in enumerate(routes))
    return parse_toml(text, where="test")


@pytest.mark.parametrize(
    ("route", "matches"),
    [
        ("", True),
        ("event_type='payment.*'", True),
        ("event_type='payment.don?'", True),
        ("event_type='payment.done'", True),
        ("event_type='payment'", False),
        ("event_type='*.done'", True),
        ("event_type='Payment.*'", False),
        ("event_type='refund.*'", False),
        ("source='s'", True),
        ("source='t'", False),
        ("routing_key='k'", False),
        ("event_type='payment.*'\nsource='t'", False),
    ],
)
def test_a_route_matches_by_source_type_and_key(route: str, matches: bool) -> None:
    """All conditions of a route must hold; those that it leaves out hold for every event."""
    assert bool(match(rules(f"endpoint='a'\n{route}"), event())) is matches


def test_a_star_spans_dots() -> None:
    """A pattern covers the types below as well: payment.* takes payment.card.captured."""
    assert match(rules("endpoint='a'\nevent_type='payment.*'"), event("payment.card.captured"))


def test_a_routing_key_is_exact() -> None:
    """A routing key matches as a whole and is no pattern."""
    only_k = rules("endpoint='a'\nrouting_key='k*'")
    assert match(only_k, event(routing_key="k*"))
    assert not match(only_k, event(routing_key="kk"))


def test_several_routes_to_one_endpoint_are_one_delivery() -> None:
    """An event reaches an endpoint once, with the names of all routes that led there, in the order of the file."""
    plans = match(rules("endpoint='a'", "endpoint='b'", "endpoint='a'\nevent_type='payment.*'"), event())
    assert [(p.endpoint, p.lane, p.routes) for p in plans] == [("a", "a", ("r0", "r2")), ("b", "b", ("r1",))]


def test_an_unmatched_event_goes_to_its_callback_address() -> None:
    """Without a matching route the address that came with the event is called, in the line of its host."""
    plans = match(no_rules(), event(target_uri="https://Partner.example/hook"))
    assert [(p.endpoint, p.lane, p.routes) for p in plans] == [("callback", "callback@partner.example:443", ())]


def test_a_matched_event_does_not_go_to_its_callback_address() -> None:
    """Routes win over the callback address."""
    plans = match(rules("endpoint='a'"), event(target_uri="http://h/"))
    assert [p.endpoint for p in plans] == ["a"]


def test_an_event_without_a_way_has_no_delivery() -> None:
    """No route and no address: nothing to deliver to."""
    assert match(no_rules(), event()) == []


@pytest.mark.parametrize(
    ("uri", "lane"),
    [
        ("http://h/x", "callback@h:80"),
        ("https://H:8443/x", "callback@h:8443"),
        ("http://[::1]:9/x", "callback@[::1]:9"),
        (None, "callback"),
    ],
)
def test_a_callback_lane_is_named_after_host_and_port(uri: str | None, lane: str) -> None:
    """Two callback hosts never share a waiting line."""
    assert lane_of(CALLBACK, uri) == lane


@given(st.text(max_size=300).flatmap(lambda s: st.sampled_from([s, "http://" + s, f"https://{s}:70000/", f"http://[{s}]/"])))
def test_a_lane_is_a_plain_short_word(uri: str) -> None:
    """Whatever address comes in, its lane can be part of a Redis key and of a list."""
    lane = lane_of(CALLBACK, uri)
    assert re.fullmatch(r"[A-Za-z0-9._:@\[\]-]{1,200}", lane)
