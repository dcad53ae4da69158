"""How values are told."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from madeira.console import words
from madeira.states import DeliveryStatus, EventStatus, Outcome

NOW = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0 ms"), (0.0124, "12 ms"), (0.4, "0.4 s"), (1.25, "1.2 s"), (9.96, "10.0 s"), (59, "59 s"), (60, "1 min"),
        (65, "1 min 5 s"), (840, "14 min"), (3600, "1 h"), (3660, "1 h 1 min"), (36_000, "10 h"), (90_000, "1 d 1 h"),
        (864_000, "10 d"), (-840, "14 min"),
    ],
)  # fmt: skip
def test_a_span_is_told_in_its_largest_units(seconds: float, told: str) -> None:
    assert words.span(seconds) == told


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_longer_span_never_begins_with_a_smaller_unit(one: float, other: float) -> None:
    order = ("ms", "s", "min", "h", "d")
    shorter, longer = sorted((one, other))
    assert order.index(words.span(shorter).split()[1]) <= order.index(words.span(longer).split()[1])


def test_a_moment_is_told_by_its_distance_and_exactly() -> None:
    assert words.ago(NOW - timedelta(minutes=14), NOW) == "14 min ago"
    assert words.ago(NOW + timedelta(seconds=32), NOW) == "in 32 s"
    assert words.ago(NOW, NOW) == "just now"
    assert words.exact(NOW) == "2026-01-31 12:00:00.123 UTC"


@given(st.text(max_size=60))
def test_an_id_is_shortened_in_its_middle_or_left_alone(identifier: str) -> None:
    told = words.short(identifier)
    assert told == identifier if len(identifier) <= 22 else (identifier.startswith(told[:10]) and identifier.endswith(told[-8:]))
    assert len(told) <= 22


@pytest.mark.parametrize("state", [*EventStatus, *DeliveryStatus, *Outcome])
def test_only_what_needs_a_person_is_red(state: str) -> None:
    assert (words.tone(state) == "bad") == (state in ("dead", "permanent"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("invoice\u202efdp.exe", "invoice\\u202efdp.exe"), ("a\x00b\x1b[31m\x7f\x85", "a\\u0000b\\u001b[31m\\u007f\\u0085"),
        ("\u2067x\u2069", "\\u2067x\\u2069"), ("two\n\tlines", "two\n\tlines"), ("\u05e9\u200f \U0001f469\u200d\U0001f467", None),
    ],
    ids=["reversed", "control", "isolated", "lines", "hebrew and joined"],
)  # fmt: skip
def test_what_nobody_would_see_is_written_out_and_the_rest_left_alone(text: str, shown: str | None) -> None:
    assert words.seen(text) == (shown or text)
    markup = Markup(text)
    assert words.seen(markup) is markup
    assert words.seen(7) == 7


def test_numbers_and_lists_are_told_as_one_says_them() -> None:
    assert words.number(1204) == "1,204"
    assert words.plural(1, "delivery", "deliveries") == "1 delivery"
    assert words.plural(1204, "delivery", "deliveries") == "1,204 deliveries"
    assert words.joined(["a", "b", "c"]) == "a, b and c"
    assert words.joined(["a"]) == "a"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no such job", "No such job"), ("forbidden: sign in", "Forbidden: sign in"), ("Not found", "Not found"),
        ("max_attempts is missing", "max_attempts is missing"), ("partner-ledger is paused", "partner-ledger is paused"),
        ("`madeira migrate` was not run", "`madeira migrate` was not run"), ("404 it is", "404 it is"), ("", ""),
    ],
)  # fmt: skip
def test_a_sentence_begins_with_a_capital_and_a_name_as_it_is_written(text: str, told: str) -> None:
    assert words.sentence(text) == told


def test_an_address_is_quoted_whatever_its_parts_are() -> None:
    assert words.address("events", "a/b?c", source="x&y=z", none=None, empty="") == "/console/events/a%2Fb%3Fc?source=x%26y%3Dz"
