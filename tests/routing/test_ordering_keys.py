"""By which key a delivery is put in order with others."""

from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.egress import Egress
from madeira.expressions import MAX_KEY, ExpressionFailed, as_key
from madeira.records import Endpoint, PlannedDelivery, RoutableEvent, Route
from madeira.routing.config import Rules
from madeira.routing.rules import match
from madeira.states import FailureClass


def planned(ordering: str, payload: str = "{}", **fields: Any) -> PlannedDelivery:
    """The one delivery of an event to an endpoint with this order."""
    endpoint = Endpoint("a", "http://a.example/", ordering=ordering)
    rules = Rules(MappingProxyType({}), MappingProxyType({"a": endpoint}), (Route("r", "a"),))
    values: dict[str, Any] = {"routing_key": None, "target_uri": None, "parameters": None, "trace_id": "t"}
    values |= {"seq": 1, "source": "s", "event_id": "e", "event_type": "a.b", "created_at": datetime(2026, 1, 1, tzinfo=UTC)}
    [plan] = match(rules, RoutableEvent(payload=payload, **values | fields), egress=Egress(allow=(), deny=()))
    return plan


@pytest.mark.parametrize(
    ("ordering", "payload", "key"),
    [
        ("none", "{}", None),
        ("endpoint", "{}", "*"),
        ("payload.account", '{"account": "17"}', "17"),
        ("payload.account", '{"account": 17}', "17"),
        ("payload.account", '{"account": 17.0}', "17"),
        ("payload.account", '{"account": 17.5}', "17.5"),
        ("payload.account", '{"account": true}', "true"),
        ("payload.account", '{"account": ""}', ""),
        ("payload.account", '{"account": "Zoë"}', "Zoë"),
        ("source + '/' + event_type", "{}", "s/a.b"),
        ("payload.n > 3", '{"n": 4}', "true"),
    ],
)
def test_a_key_is_a_text_a_number_or_a_truth_value(ordering: str, payload: str, key: str | None) -> None:
    """The same value gives the same key, however a sender writes it."""
    plan = planned(ordering, payload)
    assert (plan.ordering_key, plan.failure_class) == (key, None)


@pytest.mark.parametrize("value", ["x" * (MAX_KEY + 1), "a\x00b", "line\nbreak"])
def test_a_key_that_is_long_or_no_line_is_told_by_its_hash(value: str) -> None:
    """So that a row of an index holds it, and Postgres takes it; others keep other keys."""
    key = as_key(value)
    assert key.startswith("sha256:")
    assert len(key) <= MAX_KEY
    assert as_key(value + "x") != key


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ('{"secret": 1}', "there is no field account"),
        ('{"account": null}', "gives null"),
        ('{"account": ["s3cr3t"]}', "gives a list"),
        ('{"account": {"s3cr3t": 1}}', "gives an object"),
    ],
)
def test_what_yields_no_key_is_dead_at_once(payload: str, reason: str) -> None:
    """As with a filter that fails: nothing is sent out of order, the reason names endpoint and field, and no value."""
    plan = planned("payload.account", payload)
    assert (plan.failure_class, plan.ordering_key) == (FailureClass.TEMPLATE, None)
    assert plan.last_error is not None
    assert plan.last_error.startswith(f"template: endpoint a: ordering: {reason}")
    assert "s3cr3t" not in plan.last_error


@given(st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False))
def test_every_key_is_a_short_line(value: Any) -> None:
    """Whatever strangers send."""
    key = as_key(value)
    assert len(key) <= MAX_KEY
    assert key.isprintable()
    key.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, b"x"])
def test_what_is_no_such_value_is_no_key(value: Any) -> None:
    with pytest.raises(ExpressionFailed):
        as_key(value)
