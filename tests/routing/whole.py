"""A configuration with something of everything, and what of it stands in the database."""

from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from madeira.errors import ConfigurationInvalid

WHOLE = """
[[source]]
name = "billing"
secrets = ["env:BILLING_SECRET", "old-secret-of-billing"]
rate = 100
burst = 20

[[endpoint]]
name = "ledger"
url = "https://partner.example/api/{event_type}"
method = "PUT"
body = '''

{"id": {{ event_id | tojson }},
 "why": "a \\"quoted\\" word"}'''
success = 'status == 200 && body.code == 0'
rate = 30
timeout = 2.5
secrets = ["whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3", "env:LEDGER_SECRET"]
[endpoint.headers]
Authorization = "Bearer the-token-of-ledger"
"X-Plain" = "env:LEDGER_HEADER"
[endpoint.retry]
initial = 1
max = 8

[[endpoint]]
name = "audit"
url = "http://audit.example/"

[[route]]
name = "z-first"
source = "billing"
event_type = "payment.*"
filter = "payload.amount > 100"
endpoint = "ledger"

[[route]]
name = "a-second"
endpoint = "callback"
"""

SECRETS = ("old-secret-of-billing", "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3", "the-token-of-ledger")

ENVIRON = {"BILLING_SECRET": "b", "LEDGER_SECRET": "l", "LEDGER_HEADER": "h"}


def rows(url: str, statement: str) -> list[dict[str, Any]]:
    with psycopg.connect(url, row_factory=dict_row) as conn:
        return conn.execute(statement.encode()).fetchall()


def everything(url: str) -> str:
    """Every row of the tables that a change touches, as text."""
    return "\n".join(
        str(rows(url, f"SELECT * FROM {t} ORDER BY 1")) for t in ("source", "endpoint", "route", "configuration", "audit")
    )


def version(url: str) -> int:
    return int(rows(url, "SELECT version FROM configuration")[0]["version"])


def fields_of(problem: pytest.ExceptionInfo[ConfigurationInvalid]) -> list[str]:
    return [p.field for p in problem.value.problems]
