"""`madeira reconcile` from a terminal: what it says when nothing could be compared."""

import json
import subprocess
from pathlib import Path

import psycopg
import pytest
import redis

from madeira.store import leases
from tests import terminal


@pytest.fixture
def environ(tmp_path: Path, database_url: str, redis_url: str) -> dict[str, str]:
    """An environment with a database and an empty Redis, where no worker ever ran."""
    return terminal.environ(
        MADEIRA_DATA_DIR=str(tmp_path / "data"), MADEIRA_DATABASE_URL=database_url, MADEIRA_REDIS_URL=redis_url
    )


def reconcile(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return terminal.run(environ, "reconcile", *arguments, code=None)


@pytest.mark.long
def test_reconcile_says_that_redis_is_empty(environ: dict[str, str]) -> None:
    """With the remedy, and an exit code that a script sees; when a worker has been there, it compares."""
    done = reconcile(environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Redis is empty" in done.stderr
    assert "start one" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with redis.Redis.from_url(environ["MADEIRA_REDIS_URL"]) as client:
        client.set("madeira:epoch", "1")
    done = reconcile(environ)
    assert (done.returncode, done.stdout) == (0, "no differences\n")


def test_reconcile_says_that_redis_is_away(environ: dict[str, str]) -> None:
    """With the remedy; the JSON says that nothing was compared, and why."""
    done = reconcile(environ | {"MADEIRA_REDIS_URL": "redis://127.0.0.1:1/0"}, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["ran"], told["differences"]) == (False, {})
    assert "see that it runs and that MADEIRA_REDIS_URL names it" in told["reason"]
    assert told["reason"] in done.stderr


def test_reconcile_says_that_another_run_is_under_way(environ: dict[str, str]) -> None:
    """The reason is in the JSON too."""
    with psycopg.connect(environ["MADEIRA_DATABASE_URL"]) as conn:
        assert leases.take(conn, "reconcile", "another", 60.0)
    done = reconcile(environ, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert (told["ran"], told["differences"]) == (False, {})
    assert "another run is under way" in told["reason"]
    assert told["reason"] in done.stderr
