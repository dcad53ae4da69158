"""When two posts under one id say the same."""

import pytest

from madeira.store.same import same_value


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ('{"a": 1, "b": [1, 2]}', '{ "b":[1,2],"a":1 }'),
        ('"\\u00e9"', '"é"'),
        ("1.0", "1"),
        ("1e2", "100"),
        ("12345678901234567890", "12345678901234567890 "),
        (None, None),
        ("1" * 5000, " " + "1" * 5000),
    ],
)
def test_other_spelling_of_the_same_value_is_the_same(a: str | None, b: str | None) -> None:
    """Order of keys, blanks, escapes and the notation of a number do not matter."""
    assert same_value(a, b)
    assert same_value(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1", "true"),
        ("0", "false"),
        ("1", '"1"'),
        ("null", None),
        ("12345678901234567890", "12345678901234567891"),
        ("0.1", "0.10000000000000000001"),
        ("[1, 2]", "[2, 1]"),
        ("[1]", "[1, 1]"),
        ('{"a": 1}', '{"a": 1, "b": null}'),
        ('{"a": true}', '{"a": 1}'),
        ("[" * 5000 + "]" * 5000, "[" * 5000 + " " + "]" * 5000),
        ("1e99999999999999999999", "1e99999999999999999998"),
    ],
)
def test_another_value_is_not_the_same(a: str, b: str | None) -> None:
    """Exact numbers, bool is no number, order in lists counts; what cannot be compared is not the same."""
    assert not same_value(a, b)
    assert not same_value(b, a)
