"""What is written as TOML is read back as what it was, whatever it holds."""

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from madeira.routing.export import toml

STRANGE = ["\n", "\n\na", "a\n'", "a\n'''b", "a\r\nb", "\x7f", 'a "b" \\n', "{{ a }}\n  {% b %}\n", "\u2028\n\x85"]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")) | st.sampled_from(STRANGE)
VALUE = TEXT | st.integers(0, 10**6) | st.floats(0.001, 1e9) | st.booleans() | st.lists(TEXT)
SPEC = st.fixed_dictionaries(
    {"url": TEXT},
    optional={
        "headers": st.dictionaries(TEXT, TEXT),
        "retry": st.dictionaries(st.sampled_from(["initial", "max"]), VALUE),
        "body": TEXT,
        "rate": VALUE,
        "secrets": st.lists(TEXT),
    },
)


@given(st.dictionaries(TEXT, SPEC, max_size=3))
def test_what_is_written_is_read_back(specs: dict[str, dict[str, Any]]) -> None:
    """Texts with quotes, line breaks and control characters, numbers, lists and tables."""
    text = toml({"source": [], "endpoint": list(specs.items()), "route": []})
    read = tomllib.loads(text).get("endpoint", [])
    assert [(table.pop("name"), table) for table in read] == list(specs.items())
