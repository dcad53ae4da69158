"""A session that finds no table although they are there, since somebody else has emptied its ``search_path``.

`pg_dump` does that to its session. Through a pooler in transaction mode it is everybody's session, handed on as it was left, and
whoever comes next finds no table in it. Nothing that a client says at its start prevents it, and to say the path in every
transaction would cost each of them a way to the server. So it is looked at when a table was not found, and only then: within one
message, for which a pooler keeps the session. One with an empty path gets back the path that it began with, so that each is met
once; all others are left as they are.

A path that the role itself leads elsewhere, or nowhere, is no session's and is not mended: it is told, so that nobody is sent to
make tables that are there.
"""

import re
from typing import Final

#: What is told instead of that there were no tables.
SPOILT: Final = (
    "the tables are there, but the pooler handed out a session with an empty search_path, as pg_dump leaves it: let pg_dump and "
    "its like connect directly; if this goes on, have the pooler connect anew (RECONNECT)"
)

#: What is told of a role that does not look where the tables are.
HIDDEN: Final = (
    "the tables are there, but in a schema where this role does not look (search_path), or that it may not use: `madeira doctor` "
    "says what to type"
)

#: Give a session whose path is empty back the one with which it began; one row if it was.
MEND: Final = """
    SELECT set_config('search_path', reset_val, false) FROM pg_settings
    WHERE name = 'search_path' AND setting IN ('', '""') AND reset_val NOT IN ('', '""')
"""

#: Whether the record of what was applied is in a schema to which its plain name does not lead.
_HIDES: Final = """
    to_regclass('schema_migration') IS NULL AND EXISTS (SELECT FROM pg_class WHERE relname = 'schema_migration' AND relkind = 'r')
"""

#: What the server calls a table that it did not find, as far as it may be one of ours.
_NAME: Final = re.compile(r'"([a-z_][a-z_0-9]{0,62})"')


def look(complaint: str, *, in_transaction: bool) -> str:
    """The message that mends the session, and ends with two answers.

    Whether the table that the server's `complaint` names is seen now, and whether the tables are where nobody looks.
    """
    found = _NAME.search(complaint)
    name = found.group(1) if found else "schema_migration"
    return f"{'ROLLBACK;' if in_transaction else ''}{MEND};SELECT to_regclass('{name}') IS NOT NULL, {_HIDES}"
