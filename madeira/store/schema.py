"""Whether the tables are such that this version can work with them, by the list of what was applied to them.

Migrations come first, processes afterwards; so for a while a version works on tables that are one release ahead, and must. What
it must not do is work on tables that are behind it, or so far ahead that something is gone which it still uses. A migration
that takes something away says in its name which one a version must know to do without it: ``0012_fewer.after_0010.sql``.
"""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

from madeira.errors import StoreError

FOLDER: Final = Path(__file__).parent.parent / "migrations"

#: What was applied. That there is no such table tells that nothing was.
APPLIED: Final = "SELECT name FROM schema_migration"

#: What is told when the tables are not there, and what to do about it.
NO_TABLES: Final = "the database has no tables (or not all): run `madeira migrate`"

#: How every other misfit begins, those of `search_path` included.
_MISFIT: Final = "the tables are "

#: The end of the name of a migration that takes away what versions used that do not know the one with this number.
_AFTER: Final = re.compile(r"\.after_([0-9]{4})\.sql$")


def files(folder: Path = FOLDER) -> list[str]:
    """The names of the migrations in `folder`, in their order.

    Raises:
        StoreError: there are none.
    """
    names = sorted(path.name for path in folder.glob("[0-9]*.sql"))
    if not names:
        raise StoreError(f"there are no migrations in {folder}: the package is not complete; install it again")
    return names


@lru_cache(maxsize=1)
def known() -> tuple[str, ...]:
    """The migrations that this version brings."""
    return tuple(files())


def missing(applied: Collection[str], names: Iterable[str]) -> list[str]:
    """Which of `names` were not applied, in their order."""
    return [name for name in names if name not in applied]


def misfit(applied: Collection[str], names: Collection[str]) -> str | None:
    """Why a version that knows the migrations `names` cannot work with these tables, and what to do; None when it can."""
    behind = missing(applied, names)
    if behind:
        return f"{_MISFIT}older than this version (not applied: {', '.join(behind)}): run `madeira migrate`"
    newest = max(name[:4] for name in names)
    for name in sorted(set(applied) - set(names)):
        found = _AFTER.search(name)
        if found and found.group(1) > newest:
            return f"{_MISFIT}of a later version ({name}), and what this one needs is gone: install the later version"
    return None


def is_misfit(text: str) -> bool:
    """Whether `text` tells of tables that are not there, or do not fit: a person has to do something."""
    return text == NO_TABLES or text.startswith(_MISFIT)
