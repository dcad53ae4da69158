"""What a change of an object was, field by field: from the rows that the audit keeps of it.

A row holds the object before and after, without its secrets, and the names of the fields that changed; of a secret it says
that it changed, and no more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from madeira.console import fields
from madeira.console.house import House
from madeira.store import audit

#: Changes that a page shows.
SHOWN: Final = 20

#: Rows that are looked through for the changes since some version.
_LOOK: Final = 100

#: What raises the version of an object.
_CHANGES: Final = frozenset({"update", "reencrypt"})


class Step(NamedTuple):
    """One field of a change."""

    field: str
    before: str
    after: str


def history(house: House, what: str) -> Sequence[dict[str, Any]]:
    """The last that people did with an object, each with its ``steps``."""
    with house.database.connection() as connection:
        found = audit.page(connection, limit=SHOWN, what=what)
    return [entry | {"steps": list(steps(entry["detail"]))} for entry in found]


def since(house: House, what: str, count: int) -> Sequence[dict[str, Any]]:
    """The last `count` changes of an object, the latest first; with a negative count all that there are."""
    with house.database.connection() as connection:
        found = audit.page(connection, limit=_LOOK, what=what)
    if count > 0:
        found = [entry for entry in found if entry["action"] in _CHANGES][:count]
    return [entry | {"steps": list(steps(entry["detail"]))} for entry in found]


def steps(detail: Mapping[str, Any]) -> Iterator[Step]:
    """The fields that a change has changed."""
    before, after = detail.get("before"), detail.get("after")
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return
    for name in detail.get("changed", ()):
        one, other = _at(before, str(name)), _at(after, str(name))
        yield Step(name, *(("not shown", "another one, not shown") if one == other else (told(one), told(other))))


def _at(document: Mapping[str, Any], name: str) -> Any:
    """The value of a field, which may be one of a table."""
    table, _, field = name.partition(".")
    found = document.get(table)
    if not field:
        return found
    return found.get(field) if isinstance(found, Mapping) else None


def told(value: Any) -> str:
    """A value as one reads it."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {told(one)}" for name, one in value.items()) or "nothing"
    return fields.shown(value) or "nothing"
