"""Who asks in the tests: people with tokens of each role, sources that sign, and strangers."""

import uuid
from collections.abc import Mapping

import psycopg

from madeira.states import Role
from madeira.store import tokens
from tests.api.serving import ADMIN_TOKEN, Api

ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


def token(api: Api, role: Role, *, name: str | None = None, expires_s: float | None = None) -> tuple[str, str]:
    """A new token: its text and its name."""
    name = name or f"{role}-{uuid.uuid4().hex[:12]}"
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        text, _ = tokens.create(c, name=name, role=role, expires_s=expires_s, who="tests")
    return text, name


def bearer(text: str) -> dict[str, str]:
    """The header that shows a token."""
    return {"Authorization": f"Bearer {text}"}


def person(api: Api, role: Role) -> dict[str, str]:
    """The headers of somebody who has a new token of this role."""
    return bearer(token(api, role)[0])


def in_json(headers: Mapping[str, str]) -> dict[str, str]:
    """The same, for a body of JSON."""
    return {**headers, "Content-Type": "application/json"}


def audited(api: Api) -> int:
    """How many rows the audit has."""
    with psycopg.connect(api.env["MADEIRA_DATABASE_URL"]) as c:
        return c.execute("SELECT count(*) FROM audit").fetchone()[0]
