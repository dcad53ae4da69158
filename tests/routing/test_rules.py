import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import event_values
from madeira.egress import Egress
from madeira.event_values import EventValues
from madeira.expressions import Scope
from madeira.records import CALLBACK_URL, Endpoint, PlannedDelivery, RoutableEvent, Route
from madeira.routing.config import Rules, no_rules, parse_toml
from madeira.routing.rules import _index, lane_of, why_not
from madeira.routing.rules import match as match_with
from madeira.states import FailureClass

EGRESS = Egress()

CALLBACK = Endpoint(name="callback", url=CALLBACK_URL)


def event(event_type: str = "payment.done", **fields: str | None) -> RoutableEvent:
    values: dict[str, Any] = {
        "source": "s",
        "routing_key": None,
        "target_uri": None,
        "payload": "{}",
        "parameters": None,
        **fields,
    }
    created_at = datetime(2026, 1, 2, tzinfo=UTC)
    return RoutableEvent(seq=1, event_id="e", event_type=event_type, trace_id="t", created_at=created_at, **values)


def match(rules: Rules, event: RoutableEvent) -> list[PlannedDelivery]:
    return match_with(rules, event, egress=EGRESS)


def made(routes: list[Route], **endpoints: Endpoint) -> Rules:
    """Rules out of records; the endpoints `a` and `b` are there by themselves."""
    known = {name: Endpoint(name, f"http://{name}.example/") for name in ("a", "b")} | endpoints
    return Rules(MappingProxyType({}), MappingProxyType({"callback": CALLBACK, **known}), tuple(routes))


def rules(*routes: str) -> Rules:
    text = "".join(f'[[source]]\nname="{s}"\nsecrets = ["a-secret"]\n' for s in ("s", "t"))
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


# -- many routes ------------------------------------------------------------------------------------------------------

SOURCES = st.sampled_from(["s", "t", "u"])
TYPES = st.sampled_from(["payment.done", "payment.card.done", "payment", "refund.done", "x"])
PATTERNS = st.sampled_from(["*", "payment.*", "*.done", "payment.done", "payment.d?ne", "[pr]*", "x", "PAYMENT.*", "refund.done"])
KEYS = st.sampled_from([None, "k", "l"])
FILTERS = st.sampled_from([None, "payload.n > 1", "payload.n > 9", "source == 's'", "payload.none == 1"])

ROUTES = st.builds(
    Route,
    name=st.just("r"),
    endpoint=st.sampled_from(["a", "b"]),
    source=st.none() | SOURCES,
    event_type=PATTERNS,
    routing_key=KEYS,
    filter=FILTERS,
)


@given(st.lists(ROUTES, max_size=20), st.lists(st.tuples(SOURCES, TYPES, KEYS), min_size=1, max_size=5))
def test_the_index_finds_what_a_look_at_every_route_finds(routes: list[Route], events: list[tuple[str, str, str | None]]) -> None:
    """Whatever the routes, and whatever was asked before, the same routes match in the same order as one by one."""
    numbered = [replace(route, name=f"r{number}") for number, route in enumerate(routes)]
    found = made(numbered)
    for source, event_type, key in events + events:
        one = event(event_type, source=source, routing_key=key, payload='{"n": 5}')
        expected: dict[str, list[str]] = {}
        failed: dict[str, list[str]] = {}
        for route in numbered:
            verdict = naive(route, one)
            if verdict is None:
                failed.setdefault(route.endpoint, []).append(route.name)
            elif verdict:
                expected.setdefault(route.endpoint, []).append(route.name)
        plans = match(found, one)
        assert {p.endpoint: list(p.routes) for p in plans if p.failure_class is None} == expected
        dead = {p.endpoint: list(p.routes) for p in plans if p.failure_class is FailureClass.TEMPLATE}
        assert dead == {endpoint: names for endpoint, names in failed.items() if endpoint not in expected}


def naive(route: Route, one: RoutableEvent) -> bool | None:
    """Whether a route matches; None when its filter fails."""
    if route.source not in (None, one.source) or route.routing_key not in (None, one.routing_key):
        return False
    if not fnmatch.fnmatchcase(one.event_type, route.event_type):
        return False
    return {None: True, "payload.n > 1": True, "payload.n > 9": False, "source == 's'": one.source == "s"}.get(route.filter)


@given(ROUTES, SOURCES, TYPES, KEYS)
def test_each_route_says_why_it_does_not_match(route: Route, source: str, event_type: str, key: str | None) -> None:
    """The reason is there exactly when the route leads to no delivery."""
    one = event(event_type, source=source, routing_key=key, payload='{"n": 5, "none": 2}')
    reason = why_not(route, one, Scope(EventValues(one)))
    assert (reason is None) == bool(match(made([route]), one))


def test_what_madeira_tells_of_itself_goes_only_where_its_source_is_named() -> None:
    """A route for all sources is not for that one, and says so."""
    told = event("madeira.breaker.opened", source="madeira")
    everything, notices = Route("everything", "a"), Route("notices", "b", source="madeira", event_type="madeira.*")
    assert [d.endpoint for d in match(made([everything, notices]), told)] == ["b"]
    reason = why_not(everything, told, Scope(EventValues(told)))
    assert reason is not None
    assert "names no source" in reason
    assert why_not(notices, told, Scope(EventValues(told))) is None


def test_what_strangers_send_does_not_fill_the_memory() -> None:
    """The memory of the index has a limit, whatever event types come."""
    found = made([Route("r", "a")])
    for number in range(10_000):
        assert match(found, event(f"type{number}"))
    assert len(_index(found)._known) < 5_000


# -- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filter_", "payload", "matches"),
    [
        ("payload.amount > 100", '{"amount": 100.5}', True),
        ("payload.amount > 100", '{"amount": 100}', False),
        ("has(payload.vip) && payload.vip", '{"amount": 1}', False),
        ("parameters.region == 'eu'", "{}", True),
        ("routing_key == null", "{}", True),
        ("event_type.startsWith('payment.') && source == 's' && trace_id == 't'", "{}", True),
        ("created_at < '2027'", "{}", True),
    ],
)
def test_a_filter_decides_over_the_event(filter_: str, payload: str, matches: bool) -> None:
    """All fields of an event can be looked at."""
    one = event(payload=payload, parameters='{"region": "eu"}')
    assert bool(match(made([Route("r", "a", filter=filter_)]), one)) is matches


def test_a_filter_that_fails_makes_a_dead_delivery_and_nothing_else() -> None:
    """The event is not lost, the reason names the route and no value, and other routes go on."""
    routes = [Route("bad", "a", filter="payload.secret.x == 1"), Route("good", "b")]
    dead, alive = match(made(routes), event(payload='{"secret": "s3cr3t"}'))
    assert (dead.endpoint, dead.routes, dead.failure_class) == ("a", ("bad",), FailureClass.TEMPLATE)
    assert dead.last_error is not None
    assert dead.last_error.startswith("template: the filter of route bad failed")
    assert "s3cr3t" not in dead.last_error
    assert (alive.endpoint, alive.failure_class, alive.last_error) == ("b", None, None)


def test_a_route_that_matches_wins_over_one_that_fails() -> None:
    """Where both lead to one endpoint the event is delivered, and the failure is noted."""
    routes = [Route("bad", "a", filter="payload.x == 1"), Route("good", "a")]
    [plan] = match(made(routes), event())
    assert (plan.routes, plan.failure_class) == (("good",), None)
    assert plan.last_error == "template: the filter of route bad failed: there is no field x"


def test_a_filter_that_fails_is_no_reason_to_call_the_callback_address() -> None:
    """The event was meant for somebody else, so a person decides."""
    plans = match(made([Route("bad", "a", filter="payload.x == 1")]), event(target_uri="http://back.example/"))
    assert [(p.endpoint, p.failure_class) for p in plans] == [("a", FailureClass.TEMPLATE)]


def test_a_payload_is_parsed_once_and_only_if_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand filters parse one payload once; routes and endpoints that do not look at it parse none."""
    parsed: list[str] = []
    real = event_values.parse
    monkeypatch.setattr(event_values, "parse", lambda text: parsed.append(text) or real(text))
    one = event(payload='{"n": 5}')
    match(made([Route(f"r{n}", "a", filter="source == 's'") for n in range(9)]), one)
    assert parsed == []
    body = Endpoint("a", "http://a.example/{payload.n}", body="{{ payload | tojson }}", headers={"X-N": "{{ payload.n }}"})
    [plan] = match(made([Route(f"r{n}", "a", filter=f"payload.n != {n}") for n in range(9)], a=body), one)
    assert len(plan.routes) == 8
    assert parsed == ['{"n": 5}']


# -- templates and addresses ------------------------------------------------------------------------------------------


def test_a_body_is_made_when_the_event_is_routed() -> None:
    """It is frozen then; an endpoint without a template has none."""
    templated = Endpoint("a", "http://a.example/", body='{"id": {{ event_id | tojson }}, "n": {{ payload.n }}}')
    one, other = match(made([Route("r", "a"), Route("q", "b")], a=templated), event(payload='{"n": 1.10}'))
    assert (one.body, other.body) == ('{"id": "e", "n": 1.10}', None)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"body": '{"n": {{ payload.none }}}'}, "body: there is no field none"),
        ({"body": "{{ payload.text }}"}, "body: the result is not JSON"),
        ({"url": "http://a.example/{payload.none}"}, "url: the event has no payload.none"),
        ({"headers": {"X-A": "{{ payload.none }}"}}, "header X-A: there is no field none"),
        ({"headers": {"X-A": "{{ payload.split }}"}}, "header X-A: the result holds a line break"),
    ],
)
def test_what_cannot_be_made_of_an_event_is_dead_at_once(fields: Mapping[str, Any], where: str) -> None:
    """It would fail at every attempt; the reason names endpoint and field, and other endpoints get theirs."""
    broken = replace(Endpoint("a", "http://a.example/"), **fields)
    payload = '{"text": "s3cr3t", "split": "s3cr3t\\r\\nX-B: 1"}'
    dead, alive = match(made([Route("r", "a"), Route("q", "b")], a=broken), event(payload=payload))
    assert (dead.failure_class, dead.body) == (FailureClass.TEMPLATE, None)
    assert dead.last_error is not None
    assert dead.last_error.startswith(f"template: endpoint a: {where}")
    assert "s3cr3t" not in dead.last_error
    assert alive.failure_class is None


@pytest.mark.parametrize(
    "uri", ["http://127.0.0.1/", "http://[::1]:8000/x", "http://169.254.169.254/latest", "http://localhost/"]
)
def test_an_address_that_may_not_be_called_is_dead_at_once(uri: str) -> None:
    """A callback address and the URL of an endpoint alike, without asking a name server."""
    for found, one in ((no_rules(), event(target_uri=uri)), (made([Route("r", "a")], a=Endpoint("a", uri)), event())):
        [plan] = match(found, one)
        assert plan.failure_class is FailureClass.POLICY
        assert plan.last_error is not None
        assert plan.last_error.startswith("denied_by_policy: ")


def test_an_address_that_cannot_be_called_is_left_to_the_attempt() -> None:
    """Its log then shows what would have been called."""
    [plan] = match(no_rules(), event(target_uri="http://xn--/"))
    assert (plan.failure_class, plan.last_error) == (None, None)
