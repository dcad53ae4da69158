"""Templates: what bodies they make, what is refused, and that none takes long, whatever data comes in."""

import json
import resource
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import templates
from madeira.event_values import EventValues
from madeira.templates import TemplateFailed, check_body, check_header
from tests.template_values import PAYLOAD, VALUES, values

#: Wide limits for the processor time and memory of one rendering; what is bounded badly takes minutes and gigabytes.
SECONDS = 10.0
MEGABYTES = 300


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ payload | tojson }}", None),
        ("{{ payload.big }}", "12345678901234567890"),
        ("{{ payload.real | tojson }}", "1.0"),
        ("{{ payload.cents }}", "1.10"),
        ("{{ payload.exp | tojson }}", "1E+2"),
        ("{{ payload.zero }}", "-0"),
        ("[{{ payload.items | tojson }}]", '[[{"sku": "x", "n": 2}, {"sku": "y", "n": 3.50}]]'),
        ("{{ payload.list | tojson }}", "[3, 1.0, 2]"),
        ("{{ payload.text | tojson }}", r'"<a & \"b\">"'),
        ("{{ payload.accent | tojson }}", '"Z\u00fcrich"'),
        ("{{ payload.half | tojson }}", r'"\ud800"'),
        ("{{ payload.nul | tojson }}", r'"\u0000"'),
        ("{{ payload.none | tojson }}", "null"),
        ("{{ payload.yes }}", "true"),
        ("{{ payload.object.a.b | tojson }}", '"c"'),
        ("{{ payload['object']['a'].b | tojson }}", '"c"'),
        ("{{ {'a': payload.cents, 'b': [payload.yes, none]} | tojson }}", '{"a": 1.10, "b": [true, null]}'),
        ("{{ event_id | tojson }}", '"evt-1"'),
        ("{{ created_at | tojson }}", '"2026-01-02T03:04:05.678901Z"'),
        ("{{ routing_key | tojson }}", "null"),
        ("{{ parameters.account | tojson }}", '"a/b c"'),
        ("{{ payload.missing | default(1) }}", "1"),
        ("{{ payload.none | default('x', true) | tojson }}", '"x"'),
        ("{% if payload.missing is defined %}1{% else %}2{% endif %}", "2"),
        ("{% if payload.yes and not payload.none and payload.big > 5 %}1{% endif %}", "1"),
        ("[{% for i in payload.items %}{{ ', ' if not loop.first }}{{ i.n }}{% endfor %}]", "[2, 3.50]"),
        ("{{ '{' }}{% for k, v in payload.object | items %}{{ k | tojson }}: {{ v | tojson }}{% endfor %}}", '{"a": {"b": "c"}}'),
        ("[{% for x in payload.list if x > 1 %}{{ loop.index }}{{ ',' if not loop.last }}{% endfor %}]", "[1,2]"),
        ("[{% for x in [] %}1{% else %}2{% endfor %}]", "[2]"),
        ("{% set n = payload.items | map(attribute='n') | sum %}{{ n * 2 }}", "11.0"),
        ("{{ payload.items | map('sku') | join('-') | upper | tojson }}", '"X-Y"'),
        ("{{ payload.list | sort | first }}", "1.0"),
        ("{{ payload.list[1:] | length }}", "2"),
        ("{{ payload.text[1:2] | tojson }}", '"a"'),
        ("{{ (payload.text ~ payload.cents ~ payload.yes) | replace('<', '') | length }}", "16"),
        ("{{ 7 // 2 + 7 % 2 - -1 }}", "5"),
        ("{{ 'a' in payload.object and 3 in payload.list and 'r' in payload.accent }}", "true"),
        ("{{ 1 < 2 < 3 }}", "true"),
        ("{{ payload.accent | lower | trim | capitalize | tojson }}", '"Z\u00fcrich"'),
        ("{{ 'a,b' | split(',') | tojson }}", '["a", "b"]'),
        ("{{ payload.neg | abs | round(1) }}", "1.5"),
        ("{{ '12' | int + ('1.5' | float) }}", "13.5"),
        ("[{{ ' -12 ' | int }}, {{ '+7' | int }}, {{ ' .5 ' | float }}, {{ '-2.e3' | float }}]", "[-12, 7, 0.5, -2000.0]"),
        ("{{ '" + "9" * 4000 + "' | int }}", "9" * 4000),
    ],
)
def test_a_body_is_made_of_the_event(text: str, expected: str | None) -> None:
    """Numbers are written as the payload has them, texts as JSON has them and not as HTML has."""
    assert check_body(text) is None
    assert templates.body(text, VALUES) == (PAYLOAD if expected is None else expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(JSON, st.sampled_from([None, 1]))
def test_a_payload_goes_through_a_template_unchanged(value: Any, indent: int | None) -> None:
    """The whole, whatever its spacing, by its own bytes; a part by its value."""
    text = json.dumps({"v": value}, indent=indent)
    assert templates.body("{{ payload | tojson }}", values(text)) == text
    assert json.loads(templates.body("[{{ payload.v | tojson }}]", values(text))) == [value]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ payload.missing }}", "there is no field missing"),
        ("{{ payload.missing.deep | default(1) }}", "there is no field missing"),
        ("{{ payload[payload.accent] | tojson }}", "a field or element is missing"),
        ("{{ payload.list[7] }}", "a field or element is missing"),
        ("{{ payload.big.deep }}", "there is no field deep"),
        ("{{ payload.none }}", "a value is null; write it with tojson"),
        ("{{ payload.list }}", "a list or object does not print by itself"),
        ("{{ payload.accent }}", "the result is not JSON"),
        ('"{{ payload.text }}"', "the result is not JSON"),
        ('"{{ payload.lines }}"', "the result is not JSON"),
        ('"{{ payload.half }}"', "the result holds half a character"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ("NaN", "NaN is not JSON"),
        ("[1, 2", "the result is not JSON"),
        ("1e999", "a number is too large"),
        ("{{ 1e308 * 10 }}", "a number is too large"),
        ("{{ payload.big - 'a' }}", "an operation does not fit"),
        ("{{ payload.accent < 1 }}", "an operation does not fit"),
        ("{{ payload.accent | abs }}", "an operation does not fit"),
        ("{{ payload.accent | int }}", "an operation does not fit"),
        ("{{ '1e999' | float }}", "a number is too large"),
        ("{{ 'nan' | float }}", "an operation does not fit"),
        ("{{ 'inf' | float }}", "an operation does not fit"),
        ("{{ '1_0' | int }}", "an operation does not fit"),
        ("{{ '1_0' | float }}", "an operation does not fit"),
        ("{{ '\u0661' | int }}", "an operation does not fit"),
        ("{{ '\u0661' | float }}", "an operation does not fit"),
        ("{{ '1.5' | int }}", "an operation does not fit"),
        ("{{ 1 / 0 }}", "a division by zero"),
        ("{{ '%s' % 1 }}", "an operation does not fit"),
        ("{{ payload.accent * 3 }}", "an operation does not fit"),
        ("{% for x in payload.accent %}{% endfor %}1", "a loop goes over a list or an object"),
        ("{{ loop.index }}", "undefined"),
        ("{% for x in [1] %}{{ loop }}{% endfor %}", "does not print by itself"),
        ("{% if false %}{% set x = 1 %}{% endif %}{{ x }}", "undefined"),
        ("{{ payload.__class__ }}", "there is no field __class__"),
        ("{{ payload['__class__'] }}", "a field or element is missing"),
        ("{{ payload.items.append }}", "there is no field append"),
        ("{{ payload.accent.upper }}", "there is no field upper"),
        ("{{ payload.get }}", "there is no field get"),
        ("{% for x in [1] %}{{ loop._iterable }}{% endfor %}", "there is no field _iterable"),
        ("{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}", "there is no field __init__"),
        ("{{ payload.missing._undefined_hint }}", "there is no field missing"),
        ("{{ payload['items'] | map('a\x00\ud800\n') | tojson }}", "an element has no field a\ufffd\ufffd\ufffd"),
    ],
)
def test_what_cannot_be_made_fails_with_a_reason(text: str, reason: str) -> None:
    """It is accepted at saving, since another event may do; the reason holds no value of the event."""
    assert check_body(text) is None
    with pytest.raises(TemplateFailed) as caught:
        templates.body(text, VALUES)
    assert reason in caught.value.reason
    assert "\u00fc" not in caught.value.reason
    assert caught.value.reason.isprintable()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{", "line 1: unexpected 'end of template'"),
        ("\n\n{% if %}", "line 3"),
        ("{\n{{ paylod.a }}}", "line 2: there is no paylod; did you mean payload?"),
        ("{{ payload | tojsn }}", "line 1: there is no filter tojsn; did you mean tojson?"),
        ("{{ payload is mappng }}", "line 1: there is no test mappng; did you mean mapping?"),
        ("{{ range }}", "there is no range"),
        ("{{ payload.items() }}", "calls are not available; use a filter"),
        ("{{ payload.__class__.__mro__() }}", "calls are not available"),
        ("{{ lipsum }}", "there is no lipsum"),
        ("{{ self }}", "there is no self"),
        ("{{ cycler }}", "there is no cycler"),
        ("{{ 2 ** 9 }}", "** is not available"),
        ("{% macro m() %}{% endmacro %}", "macro is not available"),
        ("{% include 'x' %}", "include is not available: a template stands alone"),
        ("{% import 'x' as x %}", "import is not available"),
        ("{% from 'x' import y %}", "import is not available"),
        ("{% extends 'x' %}", "extends is not available"),
        ("{% block b %}{% endblock %}", "block is not available"),
        ("{% call x() %}{% endcall %}", "not available"),
        ("{% filter upper %}a{% endfilter %}", "filter blocks are not available"),
        ("{% set x %}a{% endset %}", "set needs a value"),
        ("{% set a.b = 1 %}", "set takes one plain name"),
        ("{% set a, b = [1, 2] %}", "set takes one plain name"),
        ("{% set payload = 1 %}", "payload is the name of something else"),
        ("{% for loop in [1] %}{% endfor %}", "loop is the name of something else"),
        ("{% for x in payload.a recursive %}{% endfor %}", "recursive loops are not available"),
        ("{% with x = 1 %}{% endwith %}", "with is not available"),
        ("{% autoescape true %}{% endautoescape %}", "not available"),
        ("{{ payload | join(*payload.list) }}", "* and ** are not available"),
        ("{{ payload | tojson(**payload) }}", "* and ** are not available"),
        ("{{ '%s' | format(1) }}", "there is no filter format"),
        ("{{ payload | attr('x') }}", "there is no filter attr"),
        ("{{ payload | pprint }}", "there is no filter pprint"),
        ("{% do x %}", "line 1"),
        ("x" * 70_000, "65536 are allowed"),
        ("{{ " + "9" * 5000 + " }}", "a number that is too large"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "nested too deeply"),
        ("{{" + "-" * 5000 + "1}}", "nested too deeply"),
        ("{{" + "not " * 5000 + "1}}", "nested too deeply"),
        ("{{ 1" + " + 1" * 3000 + " }}", "nested too deeply"),
        ("{{ 1" + " | abs" * 3000 + " }}", "nested too deeply"),
        ("{{ payload" + ".a" * 3000 + " }}", "nested too deeply"),
        ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "nested too deeply"),
        ("{% if 1 %}" * 1000 + "{% endif %}" * 1000, "nested too deeply"),
        ("{% for x in payload.a %}" * 9 + "{% endfor %}" * 9, "nested too deeply"),
        ("{{ 1 }}" * 9000, "more than 5000 parts"),
    ],
    ids=lambda text: ascii(text[:40]),
)
def test_what_cannot_be_used_is_refused_with_line_and_remedy(text: str, reason: str) -> None:
    """At saving, in one line, and quickly; and should it get past that, it fails without telling what stood there."""
    started = time.thread_time()
    for check in (check_body, check_header):
        found = check(text)
        assert found is not None
        assert reason in found
        assert len(found) < 400
    with pytest.raises(TemplateFailed) as caught:
        templates.body(text, VALUES)
    assert text[:30] not in caught.value.reason
    assert time.thread_time() - started < SECONDS


#: Templates that take time or memory, in every way that we could find.
HUNGRY = [
    "{% for a in payload.l %}{% for b in payload.l %}{% for c in payload.l %}{% endfor %}{% endfor %}{% endfor %}1",
    "{% for a in payload.l %}{{ payload.s }}{% endfor %}",
    "{% for a in payload.l %}" + "x" * 30_000 + "{% endfor %}",
    "{% for a in payload.l %}{% if a in payload.l %}{% endif %}{% endfor %}1",
    "{% for a in payload.l %}{% if payload.l == payload.l %}{% endif %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.l | sort %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload | tojson %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.l | tojson %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.l[0:] %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.s ~ payload.s %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.s | upper %}{% endfor %}1",
    "{% for a in payload.l %}" + "{% set x = [payload.l, payload.l, payload.l, payload.l] %}" * 400 + "{% endfor %}1",
    "{% for a in payload.l %}{% for k, v in payload | items %}{% endfor %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.l | map('x') %}{% endfor %}1",
    "{% for a in payload.l %}{% set x = payload.s | split('x') %}{% endfor %}1",
    "{% set x = payload.s %}" + "{% set x = x ~ x %}" * 40 + "{{ x | length }}",
    "{% set x = payload.s %}" + "{% set x = x + x %}" * 40 + "{{ x | length }}",
    "{% set x = payload.l %}" + "{% set x = x + x %}" * 40 + "{{ x | length }}",
    "{% set x = payload.l %}" + "{% set x = [x, x, x, x] %}" * 40 + "{{ x | tojson }}",
    "{% set x = payload.l %}" + "{% set x = [x, x, x, x] %}" * 40 + "{{ x == x }}",
    "{% set x = payload.l %}" + "{% set x = [x, x, x, x] %}" * 40 + "{{ x | sort | length }}",
    "{% set x = 10 %}" + "{% set x = x * x %}" * 40 + "{{ x }}",
    "{% set x = 10 %}" + "{% set x = x + x %}" * 700 + "{{ x }}",
    "{% set x = 10 %}" + "{% set x = x - -x %}" * 700 + "{{ x }}",
    "{% set x = 1e300 %}" + "{% set x = x | int * x | int %}" * 40 + "{{ x }}",
    "{{ payload.s | replace('x', payload.s) }}",
    "{{ payload.s | replace('', payload.s) }}",
    "{{ payload.l | join(payload.s) }}",
    "{{ payload.s * 1000000 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%999999999d' is odd }}",
    "{{ payload.s | split('') }}",
    "{{ payload.s | urlencode | urlencode | urlencode | length }}",
    "{{ 1.5 | round(999999999) }}",
]


@pytest.mark.parametrize("text", HUNGRY, ids=[text[:70] for text in HUNGRY])
@pytest.mark.parametrize("size", [1, pytest.param(300, marks=pytest.mark.long), 100_000])
def test_no_template_takes_long_or_much_whatever_the_data(text: str, size: int) -> None:
    """It is made or given up within seconds and some megabytes; without a bound these take minutes to years, or all memory."""
    given_ = values(json.dumps({"l": list(range(size)), "s": "x" * size * 4, "f": "%999999999d"}))
    assert given_["payload"]
    assert check_body(text) is None
    started, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert outcome(text, given_) is not None
    assert time.thread_time() - started < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES


def outcome(text: str, of: EventValues) -> str:
    """What a template gives, or why it gives nothing."""
    try:
        return templates.body(text, of)
    except TemplateFailed as e:
        return f"failed: {e.reason}"


def test_large_data_is_not_refused_where_it_is_passed_on() -> None:
    """A payload of half a megabyte is embedded, and a list of ten thousand is gone through."""
    rows = json.dumps({"l": [{"k": n} for n in range(10_000)], "s": "x" * 400_000})
    assert json.loads(templates.body('{"data": {{ payload | tojson }}}', values(rows)))["data"] == json.loads(rows)
    text = "[{% for r in payload.l %}{{ ',' if not loop.first }}{{ r.k }}{% endfor %}]"
    assert json.loads(templates.body(text, values(rows))) == list(range(10_000))


WORDS = (
    "{{ }} {% %} payload .a .items [0] ['a'] | tojson length join sort map ( ) , ~ + * - / // % == in not and or if else for x "
    "set = endfor endif loop .index 1 'x' [ ] { } : is defined odd __class__ {# #} \" \\ raw endraw"
)


@given(st.lists(st.sampled_from(WORDS.split()), max_size=25).map(" ".join) | st.text(max_size=60))
def test_any_text_is_accepted_or_refused_and_nothing_else(text: str) -> None:
    """What is accepted makes a body or gives a reason."""
    for source in (text, "{{ " + text + " }}", "{% for x in payload.items %}{{ " + text + " }}{% endfor %}"):
        if check_body(source) is None:
            assert outcome(source, VALUES) is not None
