"""The configuration as a TOML file: what `madeira apply` takes back and finds nothing to change in.

Secrets are written as they are kept: references, and sealed texts, which open where MADEIRA_SECRET_KEY is the same.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from madeira.routing.fields import FIELDS, KINDS, Kind

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")

_HEAD: Final = """\
# Sources, endpoints and routes, as they are; written by `madeira export`, taken back by `madeira apply`.
# A secret that begins with sealed: opens with the MADEIRA_SECRET_KEY that sealed it.
"""


def toml(objects: Mapping[Kind, Iterable[tuple[str, Mapping[str, Any]]]]) -> str:
    """The file of all `objects`, each a name and its canonical form, in the order given."""
    blocks = ["\n".join(_object(kind, name, spec)) + "\n" for kind in KINDS for name, spec in objects[kind]]
    return "\n".join([_HEAD, *blocks])


def _object(kind: Kind, name: str, spec: Mapping[str, Any]) -> Iterator[str]:
    yield f"[[{kind}]]"
    yield f"name = {_value(name)}"
    order = [field.name for field in FIELDS[kind]]
    found = sorted(spec.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    for key, value in found:
        if not isinstance(value, dict):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in found:
        if isinstance(value, dict):
            yield f"[{kind}.{_key(key)}]"
            yield from (f"{_key(k)} = {_value(v)}" for k, v in value.items())


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _long(value) if "\n" in value else _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, which has one more.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _long(text: str) -> str:
    """A text of several lines, as it stands, where nothing in it would be taken for something else."""
    plain = all(c in "\n\t" or c.isprintable() for c in text)
    if not plain or "'''" in text or text.endswith("'"):
        return _quoted(text)
    return f"'''\n{text}'''"
