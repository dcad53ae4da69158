"""The record of what people did: who, when, what, why. Written in the transaction that does it."""

from collections.abc import Mapping
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

#: Note one action.
_RECORD: Final = """
    INSERT INTO audit (who, action, what, why, detail)
    VALUES (%(who)s, %(action)s, %(what)s, %(why)s, %(detail)s)
"""


def record(conn: psycopg.Connection[Any], who: str, action: str, what: str, why: str | None, detail: Mapping[str, Any]) -> None:
    """Note that `who` did `action` to `what`; `detail` (JSON) says how many and by which filter."""
    params = {"who": who, "action": action, "what": what, "why": why, "detail": Jsonb(dict(detail))}
    conn.execute(_RECORD, params)
