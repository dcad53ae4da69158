"""The application of a process that has ended its work."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import psycopg
import pytest

from madeira.api.app import Application


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Application]:
    """One that works."""
    monkeypatch.setenv("MADEIRA_DATABASE_URL", database_url)
    monkeypatch.setenv("MADEIRA_REDIS_URL", redis_url)
    monkeypatch.setenv("MADEIRA_DATA_DIR", str(tmp_path))
    app = Application()
    app.open()
    yield app
    app.close()


def ask(app: Application, method: str, path: str) -> tuple[str, dict[str, str], bytes]:
    """One request as a server of WSGI makes it."""
    environ: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path}
    setup_testing_defaults(environ)
    begun: list[tuple[str, dict[str, str]]] = []
    body = b"".join(app(environ, lambda status, headers, *_: begun.append((status, dict(headers)))))
    return *begun[0], body


def connections(database_url: str) -> int:
    """How many the API has to its database."""
    with psycopg.connect(database_url) as conn:
        where = "application_name = 'madeira-api' AND datname = current_database()"
        row = conn.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {where}".encode()).fetchone()
    assert row
    return int(row[0])


@pytest.mark.parametrize("path", ["/readyz", "/v1/events", "/console/events"])
def test_what_comes_after_the_end_is_refused_and_opens_nothing(app: Application, database_url: str, path: str) -> None:
    """With a problem like any other that says to try again."""
    assert ask(app, "GET", "/readyz")[0].startswith("200")
    app.close()
    status, headers, body = ask(app, "GET", path)
    assert status == "503 Service Unavailable"
    assert headers["Content-Type"] == "application/problem+json"
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Retry-After"].isdigit()
    assert json.loads(body)["type"] == "urn:madeira:problem:unavailable"
    assert ask(app, "HEAD", path)[2] == b""
    assert connections(database_url) == 0
