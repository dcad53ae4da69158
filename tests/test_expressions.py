"""Expressions in CEL: what they mean, what is refused, and that none takes long, whatever data comes in."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import event_values, expressions
from madeira.expressions import ExpressionFailed, Scope, check, evaluate

NAMES = frozenset(event_values.NAMES)

#: A wide limit for the processor time of one evaluation; what is bounded badly takes minutes.
SECONDS = 10.0

PAYLOAD = {
    "one": 1,
    "real": 1.0,
    "half": 0.5,
    "text": "Z\u00fcrich",
    "none": None,
    "yes": True,
    "max": 2**63 - 1,
    "beyond": 2**63,
    "unsigned": 2**64 - 1,
    "huge": 12345678901234567890123,
    "list": [1, 2, 3],
    "object": {"a": {"b": "c"}},
    "items": [{"sku": "x", "n": 2}, {"sku": "y", "n": 3}],
}

VALUES = {"payload": PAYLOAD, "parameters": {}, "source": "billing", "routing_key": None}

#: Expression -> what it gives; a text is a part of the reason why it gives nothing.
TABLE: list[tuple[str, bool | str]] = [
    ("payload.one == 1", True),
    ("payload.one == 1.0", True),
    ("payload.real == 1", True),
    ("payload.real > 0", True),
    ("payload.one > 0.5", True),
    ("payload.half < 1", True),
    ("payload.one + 1 == 2", True),
    ("payload.one + payload.half > 1.0", "types do not fit"),
    ("double(payload.one) + payload.half == 1.5", True),
    ("payload.max == 9223372036854775807", True),
    ("payload.max + 1 > 0", "a number is too large"),
    ("payload.beyond > payload.max", True),
    ("type(payload.beyond) == uint", True),
    ("payload.unsigned == 18446744073709551615u", True),
    ("type(payload.huge) == double", True),
    ("payload.huge > 1.0e22", True),
    ("payload.huge == 12345678901234567890124.0", True),
    ("payload.yes", True),
    ("!payload.yes", False),
    ("payload.yes == 1", False),
    ("payload.none == null", True),
    ("payload.text == null", False),
    ("payload.text == 'Z\u00fcrich'", True),
    ("payload.text.size() == 7", True),
    ("payload.text.startsWith('Z') && payload.text.endsWith('ch') && payload.text.contains('r')", True),
    ("payload.text.matches('^Z.rich$')", True),
    (r"'DE00123456789012345678'.matches('^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$')", True),
    ("payload.text < 1", "types do not fit"),
    ("payload.text == 1", False),
    ("payload.missing == 1", "there is no field missing"),
    ("payload.object.missing.deep == 1", "there is no field missing"),
    ("payload.one.deep == 1", "types do not fit"),
    ("payload[payload.text] == 1", "a field is missing"),
    ("payload['a\x00'] == 1", "a field is missing"),
    ("has(payload.missing)", False),
    ("has(payload.object.a.b)", True),
    ("has(payload.missing.deep)", "there is no field missing"),
    ("has(parameters.region) && parameters.region == 'eu'", False),
    ("payload.missing == 1 || payload.yes", True),
    ("payload.yes || payload.missing == 1", True),
    ("payload.missing == 1 && !payload.yes", False),
    ("routing_key == null || routing_key == 'k'", True),
    ("payload.object.a.b == 'c' && payload['object']['a'].b == 'c'", True),
    ("'one' in payload && !('two' in payload)", True),
    ("2 in payload.list", True),
    ("payload.list[0] == 1", True),
    ("payload.list[3] == 1", "a list is shorter"),
    ("payload.items.exists(i, i.sku == 'x' && i.n > 1)", True),
    ("payload.items.all(i, i.n > 2)", False),
    ("payload.items.filter(i, i.n > 2).size() == 1", True),
    ("payload.items.map(i, i.sku) == ['x', 'y']", True),
    ("payload.items.exists_one(i, i.n == 3)", True),
    ("payload.items.exists(i, i.missing == 1)", "there is no field missing"),
    ("1 / (payload.one - 1) == 1", "a division by zero"),
    ("int(payload.text) == 1", "a function was given"),
    ("timestamp('2026-01-01T00:00:00Z') < timestamp('2027-01-01T00:00:00Z')", True),
    ("payload.one", "gives a whole number"),
    ("payload.text", "gives a text"),
    ("payload.none", "gives null"),
    ("payload.list", "gives a list"),
    ("source in ['billing', 'shop']", True),
    ("payload.one == 1 ? payload.yes : false", True),
    ("payload.list.size() == size(payload.list) // and a remark\n && true", True),
]


@pytest.mark.parametrize(("text", "expected"), TABLE, ids=[text for text, _ in TABLE])
def test_an_expression_means_what_cel_says(text: str, expected: bool | str) -> None:
    """Each is accepted at saving; it then gives yes, no, or a reason that holds no value of the data."""
    assert check(text, NAMES) is None
    if isinstance(expected, bool):
        assert evaluate(text, VALUES) is expected
        return
    with pytest.raises(ExpressionFailed) as caught:
        evaluate(text, VALUES)
    assert expected in caught.value.reason
    assert "\u00fc" not in caught.value.reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no CEL: line 1, column 1"),
        ("payload.amount >", "no CEL: line 1, column 17"),
        ("payload.a ==\n == 1", "no CEL: line 2"),
        ("payload.a = 1", "no CEL"),
        ("payloda.a == 1", "no variable payloda; did you mean payload?"),
        ("amount > 1", "no variable amount; known are created_at"),
        ("payload.a.startWith('x')", "no function startWith; did you mean startsWith?"),
        ("now() > 1", "no function now"),
        ("optional.of(1).hasValue()", "no variable optional"),
        ("[[[1]]].all(x, x.all(y, y.all(z, z == 1)))", "more than 2 levels deep"),
        ("payload.l.all(source, source == 'x')", "hides the variable source"),
        ("payload.a.matches(payload.b)", "matches needs its pattern as a text"),
        ("payload.a.matches('a' + payload.b)", "matches needs its pattern as a text"),
        ("payload.a.matches('(')", "is no regular expression"),
        ("payload.a.matches('(a{50}){50}')", "the patterns of matches have 2500 parts"),
        ("payload.a.matches('a{9999999999}')", "the patterns of matches have 999999 parts"),
        ("payload.a.matches('" + "a." * 501 + "')", "the patterns of matches have 1002 parts"),
        (
            "payload.a.matches('a{400}') || payload.a.matches('b{400}') || payload.a.matches('c{400}')",
            "the patterns of matches have",
        ),
        ("'\ud800' == payload.a", "half a character"),
        ("payload.a == 1 || " * 300 + "true", "4096 are allowed"),
        ("(" * 1000 + "true" + ")" * 1000, "no CEL"),
        ("!(" * 1000 + "true" + ")" * 1000, "no CEL"),
        ("[" * 2000 + "]" * 2000, "no CEL"),
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_what_cannot_be_used_is_refused_with_place_and_remedy(text: str, reason: str) -> None:
    """At saving, in one line, and quickly."""
    started = time.thread_time()
    found = check(text, NAMES)
    assert found is not None
    assert reason in found
    assert found.isprintable()
    assert len(found) < 400
    assert time.thread_time() - started < SECONDS


def test_strings_and_remarks_are_no_code() -> None:
    """Brackets, names and macros in them do not count."""
    text = "payload.a == '.all(x, payload.b.all(y, ' && payload.c == \"+ + + .map(\" // .all(x, y.all(z, w.all(v\n && true"
    assert check(text, NAMES) is None
    assert evaluate(text, {"payload": {"a": ".all(x, payload.b.all(y, ", "c": "+ + + .map("}}) is True


#: Expressions whose work grows with the data, in every way that we could find.
HUNGRY = [
    "payload.l.all(x, x >= 0)",
    "payload.l.map(x, x).size() > 0",
    "payload.l.filter(x, x >= 0).size() > 0",
    "payload.l.all(x, payload.l.all(y, true))",
    "payload.l.all(x, x in payload.l)",
    "payload.l.all(x, payload.l == payload.l)",
    "payload.l.all(x, size(payload.l + payload.l) > 0)",
    "payload.l.map(x, payload.l.map(y, x)).size() > 0",
    "payload.l.map(x, payload.l).all(y, y.all(z, true))",
    "payload.l.map(x, payload.l.map(y, payload.l)).size() > 0",
    "payload.m.map(x, x.map(y, y)).size() > 0",
    "payload.m.all(x, x.filter(y, y >= 0).size() > 0)",
    "payload.l.all(x, payload.s.contains('xy'))",
    "payload.l.all(x, !payload.s.matches('^(a|b)*c$'))",
    "payload.l.all(x, !string(x).matches('^[a-z]+$'))",
    r"payload.l.all(x, !string(x).matches(r'^(\w{9}){9}$'))",
    r"payload.m.all(x, x.all(y, !string(y).matches(r'^\pL{90}$')))",
    r"payload.s.matches(r'" + r"\w" * 200 + "') || true",
    "payload.s.matches('(x+x+)+y') || true",
    "(payload.s" + " + payload.s" * 200 + ").size() > 0",
    "(payload.l" + " + payload.l" * 200 + ").map(x, x).size() > 0",
    "payload.s.matches('" + "(x|y)*" * 20 + "z') || true",
    "payload.l.filter(x, payload.l.exists(y, y == x)).map(z, [z, payload.l]).size() > 0",
]


@pytest.mark.parametrize("text", HUNGRY, ids=[text[:60] for text in HUNGRY])
@pytest.mark.parametrize("size", [30, 1_000, 30_000, 150_000])
def test_no_expression_takes_long_whatever_the_data(text: str, size: int) -> None:
    """It is answered or refused within seconds; without a bound these take minutes to years."""
    assert check(text, NAMES) is None
    rows = int(size**0.5)
    payload = {"l": list(range(size)), "m": [list(range(rows))] * rows, "s": "x" * size * 6}
    scope = Scope({"payload": payload})
    started = time.thread_time()
    assert outcome(scope, text) in (True, False, "too large")
    assert time.thread_time() - started < SECONDS


def outcome(scope: Scope, text: str) -> bool | str:
    """What an expression gives; when the data is too large for it, that."""
    try:
        return scope.evaluate(text)
    except ExpressionFailed as e:
        return "too large" if "too large for it" in e.reason else e.reason


def test_plain_expressions_take_data_of_any_size() -> None:
    """The bound is for comprehensions; a large event is no reason to refuse a comparison."""
    payload = {"l": [{"k": n, "t": ["x", "y"]} for n in range(20_000)], "s": "x" * 500_000, "a": 5}
    scope = Scope({"payload": payload})
    for text in ("payload.a > 1 && payload.s.size() > 1", "payload.l.exists(x, x.k == 19999 && x.t.exists(t, t == 'y'))"):
        assert scope.evaluate(text) is True


def test_middling_data_is_not_refused() -> None:
    """A list of a few hundred objects may be filtered and compared with another one."""
    payload = {"l": [{"k": n, "name": f"n{n}"} for n in range(500)], "o": list(range(50))}
    assert evaluate("payload.l.filter(x, x.k > 100).size() == 399", {"payload": payload}) is True
    small = {"l": payload["l"][:50], "o": payload["o"]}
    assert evaluate("payload.l.all(x, payload.o.exists(y, y == x.k))", {"payload": small}) is True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_any_json_can_be_looked_at(value: Any) -> None:
    """Numbers of any length, half characters, empty names: an answer or a reason, no other error."""
    parsed = event_values.parse(json.dumps({"v": value}))
    expected = (True, False, "the data holds a text that is no Unicode, or is no JSON")
    assert outcome(Scope({"payload": parsed}), "payload.v == payload.v") in expected


WORDS = "payload .a .l [0] == 1 1.0 'x' + && ! ( ) .all(x, .map(y, x in ? : has( size( .matches('a') { } [ ] , // ' || | - %"
TOKENS = st.sampled_from([*WORDS.split(), "r'", "null", "true", '"', "\\", "\n", " ", "b'"])


@given(st.lists(TOKENS, max_size=30).map("".join) | st.text(max_size=60))
def test_any_text_is_accepted_or_refused_and_nothing_else(text: str) -> None:
    """What is accepted can be evaluated: to an answer or a reason."""
    reason = check(text, NAMES)
    if reason is None:
        values = {"payload": {"a": 1, "l": [1, "x", None]}}
        assert outcome(Scope(values), text) != ""


def test_what_an_expression_reads_is_known() -> None:
    """Only what is read has to be there; names of elements and fields are none."""
    text = "payload.source.exists(x, x.body == status) && headers['a'] == 'b'"
    assert expressions.variables_of(text) == {"payload", "status", "headers"}


def test_values_are_looked_up_when_they_are_read_first() -> None:
    """And once for all expressions of a scope."""

    asked: list[str] = []

    class Values(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            asked.append(name)
            return super().__getitem__(name)

    values = Values(VALUES)
    scope = Scope(values)
    assert scope.evaluate("source == 'billing'")
    assert "payload" not in asked
    assert scope.evaluate("payload.one == 1")
    assert scope.evaluate("payload.one != 2 && source == 'billing'")
    assert asked.count("payload") == 1
