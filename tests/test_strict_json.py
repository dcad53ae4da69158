"""The parse at the door lets through what every JSON parser reads alike, and nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.strict_json import MAX_DEPTH, NotStrictJson, parse


def test_the_text_of_a_value_is_what_was_received() -> None:
    """A value's text is the received bytes, whatever a re-serialisation would make of them."""
    raw = b' {\t"a" : 1.0 , "b":[1,  2],"c":12345678901234567890, "d":"\\u001B\\/\xf0\x9f\x98\x80" } \n'
    document = parse(raw)
    assert document is not None
    assert document.texts == {"a": "1.0", "b": "[1,  2]", "c": "12345678901234567890", "d": '"\\u001B\\/\U0001f600"'}
    assert document.values["c"] == 12345678901234567890


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"x"', b"null", b" true "])
def test_json_that_is_no_object_is_told_apart(raw: bytes) -> None:
    """Strict JSON without an object at its top is not an error of syntax."""
    assert parse(raw) is None


@pytest.mark.parametrize("raw", [b"{}", b" { } ", b'{"a":{}}', b'{"a":-0.0e-999}', b'{"a":"\\u0000"}', b'{"a":"\\ud800"}'])
def test_odd_but_strict_json_passes(raw: bytes) -> None:
    """What the grammar allows passes, also where it is unusual."""
    assert parse(raw) is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b'{,"a":1}',
        b"{'a':1}",
        b"{a:1}",
        b'{"a":1}x',
        b'{"a":1}{"b":1}',
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":0x10}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":[-Infinity]}',
        b'{"a":1e999}',
        b'{"a":{"b":-1e400}}',
        b'{"a":tru}',
        b'{"a":"\\x"}',
        b'{"a":"\\u12"}',
        b'{"a":"line\nbreak"}',
        b'{"a":"nul\x00"}',
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":2}',
        b'{"o":{"a":1,"a":1}}',
        b'{"o":[{"x":{"k":1,"k":2}}]}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xc0\xaf"}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        b'\xc2\xa0{"a":1}',
        b'{"a":1} // comment',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":0.' + b"9" * 5000 + b"}",
        b"[1,",
        b"[NaN]",
        b"nul",
    ],
)
def test_what_parsers_disagree_on_is_refused(raw: bytes) -> None:
    """Malformed, ambiguous and unrepresentable bodies are refused."""
    with pytest.raises(NotStrictJson):
        parse(raw)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_bounded(opening: str, closing: str) -> None:
    """The deepest nesting that is allowed passes, one level more does not, and a million do no harm."""
    inside = MAX_DEPTH - 1

    def nested(levels: int) -> bytes:
        return f'{{"top":{opening * levels}1{closing * levels}}}'.encode()

    assert parse(nested(inside)) is not None
    with pytest.raises(NotStrictJson, match="nested deeper"):
        parse(nested(inside + 1))
    with pytest.raises(NotStrictJson, match="nested deeper"):
        parse(b'{"a":' + b"[" * 1_000_000)


def test_brackets_in_strings_do_not_nest() -> None:
    """Brackets inside of strings are no levels, however many there are and however quotes are escaped."""
    assert parse(json.dumps({"a": ['[{"' * 500, "\\", '\\"['] * 3}).encode()) is not None


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), _VALUES, max_size=5), st.sampled_from([None, 2]), st.booleans())
def test_any_object_is_read_as_the_standard_parser_reads_it(value: dict[str, object], indent: int | None, escape: bool) -> None:
    """Values equal those of the standard parser, and each text is the value's own."""
    raw = json.dumps(value, indent=indent, ensure_ascii=escape).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    document = parse(raw)
    assert document is not None
    assert document.values == value
    assert {k: json.loads(t) for k, t in document.texts.items()} == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0123456789.eE+-ntrf aN', max_size=40).map(str.encode))
def test_arbitrary_bytes_are_read_or_refused(raw: bytes) -> None:
    """Nothing but the one error comes out, and what passes is JSON for the standard parser too."""
    try:
        parse(raw)
    except NotStrictJson:
        return
    json.loads(raw)
