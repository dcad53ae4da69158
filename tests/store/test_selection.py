"""A filter of many deliveries means the same in a list, in a job, and in the document that is kept of it."""

import json
from dataclasses import fields
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from madeira.errors import SelectionInvalid
from madeira.records import PlannedDelivery
from madeira.states import ErrorCode, FailureClass
from madeira.store import replay, routing
from madeira.store.selection import MAX_DELIVERY_IDS, MAX_EVENT_IDS, Selection, conditions, from_document
from tests.store import making
from tests.store.making import Connection, died

BASE = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.fixture
def cast(conn: Connection) -> Connection:
    """Four dead deliveries a minute apart, and one that waits."""
    ids = [
        died(conn, "one", "a", "http_404", "the receiver answered 404"),
        died(conn, "two", "b", "http_503", "gave up: the receiver answered 503", event_type="order.paid.twice"),
        died(conn, "Three", "a", "dns", "No such Host: 100%_sure", source="other", event_type="orders"),
    ]
    plan = [PlannedDelivery("b", "b", (), FailureClass.TEMPLATE, "template: no such field", ErrorCode.TEMPLATE)]
    ids += [ref.delivery_id for ref in routing.route(conn, [(making.accept(conn, event_id="four"), plan)])[0].dead]
    for n, delivery_id in enumerate(ids):
        conn.execute("UPDATE delivery SET died_at = %s WHERE id = %s", (BASE + timedelta(minutes=n), delivery_id))
    [waiting] = making.routed(conn, ("a",), event_id="five")
    conn.execute("UPDATE delivery SET created_at = %s WHERE id = %s", (BASE + timedelta(minutes=9), waiting.delivery_id))
    return conn


def selected(conn: Connection, selection: Selection) -> list[str]:
    wanted, params = conditions(selection)
    where = " AND ".join(wanted) or "true"
    statement = f"SELECT e.event_id FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE {where} ORDER BY d.id"
    return [row[0] for row in conn.execute(statement.encode(), params)]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["one", "two", "Three", "four", "five"]),
        (Selection(source="other"), ["Three"]),
        (Selection(endpoint="b"), ["two", "four"]),
        (Selection(event_type="order.paid"), ["one", "four", "five"]),
        (Selection(event_type="order.*"), ["one", "two", "four", "five"]),
        (Selection(event_type="*"), ["one", "two", "Three", "four", "five"]),
        (Selection(failure_class=FailureClass.TEMPLATE), ["four"]),
        (Selection(error="http_503"), ["two"]),
        (Selection(error="template"), ["four"]),
        (Selection(since=BASE + timedelta(minutes=1)), ["two", "Three", "four", "five"]),
        (Selection(until=BASE + timedelta(minutes=2)), ["one", "two"]),
        (Selection(text="ANSWERED"), ["one", "two"]),
        (Selection(text="NO such host"), ["Three"]),
        (Selection(text="three"), ["Three"]),
        (Selection(text="%_"), ["Three"]),
        (Selection(event_ids=("four", "two", "none")), ["two", "four"]),
        (Selection(delivery_ids=(10**9,)), []),
        (Selection(endpoint="a", source="shop", error="http_404", event_ids=("one", "two")), ["one"]),
    ],
    ids=str,
)
def test_a_selection_takes_what_matches_all_that_is_given(cast: Connection, selection: Selection, expected: list[str]) -> None:
    assert selected(cast, selection) == expected
    assert selected(cast, from_document(json.loads(json.dumps(selection.as_document())))) == expected


def test_deliveries_are_taken_one_by_one_also_of_an_event_that_has_several(conn: Connection) -> None:
    one, other = making.routed(conn, ("a", "b"), event_id="both")
    third = died(conn, "third", "a", "dns", "no such host")
    assert selected(conn, Selection(delivery_ids=(one.delivery_id, third))) == ["both", "third"]
    assert selected(conn, Selection(delivery_ids=(one.delivery_id, other.delivery_id))) == ["both", "both"]
    assert selected(conn, Selection(delivery_ids=(one.delivery_id, third), endpoint="b")) == []


def test_the_code_of_the_last_failure_is_kept_until_the_next_verdict(conn: Connection) -> None:
    """Also over a replay, so that it is still told why it died; a success takes it away."""
    delivery_id = died(conn, "one", "a", "http_404", "the receiver answered 404")
    replay.replay(conn, "shop", "one", "ann", "mended")
    assert making.delivery(conn, delivery_id)["last_error_code"] == "http_404"
    making.settled(conn, making.claimed(conn, making.DeliveryRef(delivery_id, 1, "a")))
    assert making.delivery(conn, delivery_id)["last_error_code"] is None


def test_what_was_lost_too_often_died_of_the_platform(conn: Connection) -> None:
    [ref] = making.routed(conn)
    making.claimed(conn, ref)
    conn.execute("UPDATE delivery SET lost = 9 WHERE id = %s", (ref.delivery_id,))
    making.expire(conn, ref.delivery_id)
    making.claim(conn, [making.ClaimRequest(ref.delivery_id, making.token(), 40.0)])
    row = making.delivery(conn, ref.delivery_id)
    assert (row["status"], row["last_error_code"]) == ("dead", "platform")


_LETTERS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=200)
_MOMENTS = st.datetimes(datetime(1990, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


@settings(deadline=None)
@given(
    st.builds(
        Selection,
        source=st.none() | _LETTERS,
        endpoint=st.none() | _LETTERS,
        event_type=st.none() | st.from_regex(r"[a-z.]{1,20}\*?", fullmatch=True),
        failure_class=st.none() | st.sampled_from(FailureClass),
        error=st.none() | st.sampled_from(["http_404", *ErrorCode]),
        since=st.none() | _MOMENTS,
        until=st.none() | _MOMENTS,
        text=st.none() | _LETTERS,
        event_ids=st.none()
        | st.lists(st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True), min_size=1, max_size=5).map(tuple),
        delivery_ids=st.none() | st.lists(st.integers(1, 10**18 - 1), min_size=1, max_size=5).map(tuple),
    )
)
def test_the_document_of_a_selection_says_all_of_it(selection: Selection) -> None:
    """Through JSON and back, with as many fields as were given."""
    document = selection.as_document()
    assert from_document(json.loads(json.dumps(document))) == selection
    assert set(document) == {f.name for f in fields(selection) if getattr(selection, f.name) is not None}


@pytest.mark.parametrize(
    ("document", "field", "words"),
    [
        ([], "", "must be an object"),
        ({"endpoints": "a"}, "endpoints", "known: source, endpoint"),
        ({"\x1b[2J": "a"}, "\\x1b[2J", "is no field"),
        ({"source": ""}, "source", "1 to 200 printable"),
        ({"endpoint": 3}, "endpoint", "must be a text"),
        ({"event_type": "*.paid"}, "event_type", "payment.*"),
        ({"failure_class": "recipient"}, "failure_class", "receiver, throttled"),
        ({"error": "http_5xx"}, "error", "http_503"),
        ({"error": "timeout"}, "error", "read_timeout"),
        ({"since": "2026-01-31T12:00:00"}, "since", "with its zone"),
        ({"until": "yesterday"}, "until", "with its zone"),
        ({"since": "0001-01-01T00:00:00+14:00"}, "since", "with its zone"),
        ({"text": "a\x00b"}, "text", "printable"),
        ({"text": "x" * 201}, "text", "1 to 200"),
        ({"event_ids": []}, "event_ids", "1 to 1000"),
        ({"event_ids": ["x"] * (MAX_EVENT_IDS + 1)}, "event_ids", "1 to 1000"),
        ({"event_ids": "one"}, "event_ids", "must be a list"),
        ({"event_ids": ["one", "a b"]}, "event_ids", "letters, digits"),
        ({"delivery_ids": []}, "delivery_ids", "1 to 1000"),
        ({"delivery_ids": [1] * (MAX_DELIVERY_IDS + 1)}, "delivery_ids", "1 to 1000"),
        ({"delivery_ids": 1}, "delivery_ids", "must be a list"),
        ({"delivery_ids": [1, "2"]}, "delivery_ids", "whole numbers"),
        ({"delivery_ids": [1.5]}, "delivery_ids", "whole numbers"),
        ({"delivery_ids": [True]}, "delivery_ids", "whole numbers"),
        ({"delivery_ids": [10**18]}, "delivery_ids", "whole numbers"),
        ({"source": None}, "source", "must be a text"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, (dict, list)) else "",
)
def test_a_field_that_is_wrong_is_named_with_what_would_be_right(document: Any, field: str, words: str) -> None:
    with pytest.raises(SelectionInvalid) as refused:
        from_document(document)
    assert [p.field for p in refused.value.problems] == [field]
    assert words in refused.value.problems[0].detail
    assert words in str(refused.value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(SelectionInvalid) as refused:
        from_document({"source": "", "endpoint": "a", "until": "never"})
    assert [p.field for p in refused.value.problems] == ["source", "until"]


def test_a_time_of_another_zone_is_the_same_moment() -> None:
    there = BASE.astimezone(timezone(timedelta(hours=2)))
    assert from_document({"since": there.isoformat()}) == Selection(since=BASE)
