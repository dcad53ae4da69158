"""Tokens of the API: who may ask for what, without a password that could be read here.

A token is ``mdr_<handle>_<secret>``. The handle is public, finds the row and may stand in a log; of the whole only a SHA-256
digest is kept, which suffices for a secret of 32 random bytes: nobody guesses it, however fast the digest is. The text is
given once, by `create`, and cannot be shown again.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from madeira.errors import AlreadyThere, NotThere
from madeira.states import Role
from madeira.store import audit

#: What a token looks like: the prefix lets scanners of repositories and logs find one that leaked.
_TOKEN: Final = re.compile(r"mdr_(?P<handle>[0-9a-f]{12})_[A-Za-z0-9_-]{43}")

#: Random bytes of the secret part.
_SECRET_BYTES: Final = 32

#: Longest life that can be asked for, in seconds: a hundred years.
MAX_EXPIRES_S: Final = 36_525 * 86_400.0

#: The tokens that hold now.
_LIVE: Final = """
    SELECT handle, digest, name, role
    FROM api_token
    WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
"""

_SHOWN: Final = """
    name, handle, role, created_by, created_at, expires_at, last_used_at, revoked_at,
    coalesce(expires_at <= clock_timestamp(), false) AS expired
"""

#: The tokens that nobody has revoked, by name.
_LIST: Final = f"SELECT {_SHOWN} FROM api_token WHERE revoked_at IS NULL ORDER BY name"  # noqa: S608

#: Make a token, unless one with this name is there.
_CREATE: Final = f"""
    INSERT INTO api_token (handle, digest, name, role, created_by, expires_at)
    VALUES (%(handle)s, %(digest)s, %(name)s, %(role)s, %(who)s, clock_timestamp() + %(expires_s)s * interval '1 s')
    ON CONFLICT (name) WHERE revoked_at IS NULL DO NOTHING
    RETURNING {_SHOWN}
"""  # noqa: S608

#: End a token.
_REVOKE: Final = f"""
    UPDATE api_token SET revoked_at = clock_timestamp() WHERE name = %(name)s AND revoked_at IS NULL RETURNING {_SHOWN}
"""  # noqa: S608

#: Note that tokens were used; not more often than once in half a minute, whatever the number of processes that say so.
_USED: Final = """
    UPDATE api_token
    SET last_used_at = clock_timestamp()
    WHERE handle = ANY(%(handles)s) AND (last_used_at IS NULL OR last_used_at < clock_timestamp() - interval '30 s')
"""


@dataclass(frozen=True, slots=True)
class Token:
    """What is needed to recognise a token."""

    handle: str
    digest: bytes = field(repr=False)
    name: str
    role: Role


def handle_of(text: str) -> str | None:
    """The handle in the text of a token; None when it is no token of ours."""
    found = _TOKEN.fullmatch(text)
    return found["handle"] if found else None


def digest_of(text: str) -> bytes:
    """What is kept of a token."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def live(conn: psycopg.Connection[Any]) -> dict[str, Token]:
    """All tokens that hold now, by handle. They are few: people and programs, not requests."""
    rows = conn.execute(_LIVE).fetchall()
    return {handle: Token(handle, bytes(digest), name, Role(role)) for handle, digest, name, role in rows}


def listed(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """The tokens that are not revoked, without anything that would let one in; also those that have expired."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_LIST).fetchall()


def create(
    conn: psycopg.Connection[Any], *, name: str, role: Role, expires_s: float | None, who: str, why: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Make a token that holds for `expires_s` seconds (None: until it is revoked); its text, told only now, and its row.

    Raises:
        AlreadyThere: a token with this name is not revoked yet.
    """
    handle = secrets.token_hex(6)
    text = f"mdr_{handle}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    params = {"handle": handle, "digest": digest_of(text), "name": name, "role": role, "who": who, "expires_s": expires_s}
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        made = cursor.execute(_CREATE, params).fetchone()
        if made is None:
            raise AlreadyThere(f"there is a token {name} already; revoke it first, or choose another name")
        audit.record(conn, who, "create", f"token {name}", why, {"after": _noted(made)})
    return text, made


def revoke(conn: psycopg.Connection[Any], *, name: str, who: str, why: str | None = None) -> dict[str, Any]:
    """End the token `name`; its row.

    Raises:
        NotThere: no token of this name holds.
    """
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        ended = cursor.execute(_REVOKE, {"name": name}).fetchone()
        if ended is None:
            raise NotThere(f"there is no token {name!r}, or it is revoked already")
        audit.record(conn, who, "revoke", f"token {name}", why, {"before": _noted(ended)})
    return ended


def note_use(conn: psycopg.Connection[Any], handles: Iterable[str]) -> None:
    """Note that these tokens were used just now."""
    conn.execute(_USED, {"handles": list(handles)})


def _noted(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the audit keeps of a token."""
    expires: datetime | None = row["expires_at"]
    return {"handle": row["handle"], "role": row["role"], "expires_at": expires.isoformat() if expires else None}
