"""A route that no event can match is refused when it is saved."""

import fnmatch
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from madeira.api import validation
from madeira.errors import ConfigurationInvalid
from madeira.records import Route
from madeira.routing.config import Problems, canonical, resolved
from madeira.routing.globs import can_match
from madeira.routing.manage import Configurator
from madeira.routing.values import How
from madeira.sealing import Sealer

NEVER = [
    "[",
    "é",
    "a b",
    "a.",
    ".a",
    "a..b",
    "*..*",
    "[é]",
    "[!A-Za-z0-9_.-]",
    "a[",
    "payment/*",
    "*.",
    "?.[.]",
    "x" * 256,
    "[]",
    "a\n",
]
SOMETIMES = [
    "*",
    "?",
    "a",
    "a.*",
    "*.done",
    "[ab]c",
    "[!x]*",
    "*a*b*",
    "a?b",
    "[.]*a"[3:],
    "?" * 255,
    "**",
    "[]a]",
    "[a-]",
    "x[.]y",
]

#: What intake takes as a type.
TYPES = st.from_regex(validation._EVENT_TYPE, fullmatch=True).filter(lambda found: len(found) <= validation.MAX_EVENT_TYPE)

PATTERNS = st.lists(st.sampled_from([*"ab.*?[]!-é", "[ab]", "[!.]", "[.]"]), min_size=1, max_size=7).map("".join)


@pytest.mark.parametrize("pattern", NEVER, ids=ascii)
def test_a_pattern_that_no_type_matches_is_refused(pattern: str) -> None:
    """With the field, and with what a type looks like."""
    problems = Problems()
    canonical("route", "r", {"endpoint": "callback", "event_type": pattern}, How(), problems)
    [problem] = problems.found
    assert problem.field == "event_type"
    assert "words of A-Z a-z 0-9 _ - with dots between" in problem.detail


@pytest.mark.parametrize("pattern", SOMETIMES)
def test_a_pattern_that_some_type_matches_is_taken(pattern: str) -> None:
    """As it is written."""
    problems = Problems()
    assert canonical("route", "r", {"endpoint": "callback", "event_type": pattern}, How(), problems)["event_type"] == pattern
    assert not problems.found


@pytest.mark.parametrize("key", ["", "a\nb", "a\x7f", "\u2028", "x" * 256], ids=["empty", "line break", "DEL", "U+2028", "long"])
def test_a_routing_key_that_no_event_has_is_refused(key: str, configurator: Configurator) -> None:
    """Whatever an event may bring is taken, and nothing else."""
    with pytest.raises(ConfigurationInvalid) as e:
        configurator.create("route", "r", {"endpoint": "callback", "routing_key": key}, who="t")
    assert [problem.field for problem in e.value.problems] == ["routing_key"]
    with pytest.raises(validation._Invalid):
        validation._routing_key(key)
    assert validation._routing_key("a key, é") == "a key, é"
    configurator.create("route", "r", {"endpoint": "callback", "routing_key": "a key, é"}, who="t")


@pytest.mark.parametrize("field", [{"event_type": "["}, {"routing_key": ""}], ids=["event_type", "routing_key"])
def test_a_route_from_before_goes_on_without_harm(field: dict[str, Any]) -> None:
    """What was kept before this was checked does not become unusable."""
    problems = Problems()
    spec = {"endpoint": "callback"} | field
    assert isinstance(resolved("route", "r", spec, sealer=Sealer(()), environ={}, problems=problems, stored=True), Route)
    assert not problems.found


@given(PATTERNS, TYPES)
@example("[a", "a")
def test_what_matches_a_type_is_never_refused(pattern: str, event_type: str) -> None:
    """Against the very rules of intake, and the very way in which routes are matched."""
    assert can_match(pattern) or not fnmatch.fnmatchcase(event_type, pattern)


@given(TYPES, st.data())
def test_a_type_with_parts_left_out_is_never_refused(event_type: str, data: st.DataObject) -> None:
    """Of any type: some characters as ``?``, ``*`` or in brackets."""
    ways = data.draw(st.lists(st.sampled_from(["{}", "{}", "?", "*", "[{}]", "[!é]"]), min_size=len(event_type), max_size=256))
    pattern = "".join(way.format(c) for way, c in zip(ways, event_type, strict=False))
    assert can_match(pattern)


SHORT = [a + b + c for a in ("", *"ab.") for b in ("", *"ab.") for c in "ab."] + [
    "a.a.b",
    "ab.ab",
    "a.b.a.b",
    "aaaa",
    "a.aa.a",
    "b.b.b.b",
]


@given(st.lists(st.sampled_from([*"ab.?*", "[ab]", "[.]", "[!a]", "é", "["]), min_size=1, max_size=3).map("".join))
def test_a_short_pattern_is_refused_exactly_when_nothing_matches_it(pattern: str) -> None:
    """Tried with every short type."""
    types = [one for one in SHORT if validation._EVENT_TYPE.fullmatch(one)]
    assert can_match(pattern) == any(fnmatch.fnmatchcase(one, pattern) for one in types)
