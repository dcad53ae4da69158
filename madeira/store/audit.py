"""The record of what people did: who, when, what, why. Written in the transaction that does it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

#: Note one action.
_RECORD: Final = """
    INSERT INTO audit (who, action, what, why, detail)
    VALUES (%(who)s, %(action)s, %(what)s, %(why)s, %(detail)s)
    RETURNING id
"""

#: Say how far an action has come that takes several transactions.
_AMEND: Final = "UPDATE audit SET detail = %(detail)s WHERE id = %(id)s"

#: What a page may be narrowed by; who and what have indexes in the order of time, as the whole has.
_CONDITIONS: Final = {
    "who": "who = %(who)s",
    "action": "action = %(action)s",
    "what": "what = %(what)s",
    "since": "at >= %(since)s",
    "until": "at < %(until)s",
}


def record(conn: psycopg.Connection[Any], who: str, action: str, what: str, why: str | None, detail: Mapping[str, Any]) -> int:
    """Note that `who` did `action` to `what`; `detail` (JSON) says how many and by which filter. Gives the entry's id."""
    params = {"who": who, "action": action, "what": what, "why": why, "detail": Jsonb(dict(detail))}
    ((entry,),) = conn.execute(_RECORD, params)
    return int(entry)


def amend(conn: psycopg.Connection[Any], entry: int, detail: Mapping[str, Any]) -> None:
    """Say anew how much an action has done that takes several transactions; nothing else of an entry is ever changed."""
    conn.execute(_AMEND, {"id": entry, "detail": Jsonb(dict(detail))})


def page(
    conn: psycopg.Connection[Any],
    *,
    limit: int,
    before: tuple[datetime, int] | None = None,
    who: str | None = None,
    action: str | None = None,
    what: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[dict[str, Any]]:
    """At most `limit` entries, the latest first, that match all that is given.

    `before` is the (at, id) of the last entry of the page before; `since` is included, `until` is not.
    """
    params = {"who": who, "action": action, "what": what, "since": since, "until": until, "limit": limit}
    wanted = [condition for name, condition in _CONDITIONS.items() if params[name] is not None]
    if before is not None:
        params |= {"at": before[0], "id": before[1]}
        wanted.append("(at, id) < (%(at)s, %(id)s)")
    where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
    statement = f"SELECT id, at, who, action, what, why, detail FROM audit {where} ORDER BY at DESC, id DESC LIMIT %(limit)s"  # noqa: S608
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement.encode(), params).fetchall()
