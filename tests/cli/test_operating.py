"""`madeira reconcile` from a terminal: what it says when nothing could be compared."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis

from madeira.store import leases

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environ(tmp_path: Path, database_url: str, redis_url: str) -> dict[str, str]:
    """An environment with a database and an empty Redis, where no worker ever ran."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MADEIRA_", "PROMETHEUS_"))}
    places = {"MADEIRA_DATA_DIR": str(tmp_path / "data"), "MADEIRA_DATABASE_URL": database_url, "MADEIRA_REDIS_URL": redis_url}
    return plain | places


def reconcile(environ: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "madeira.cli", "reconcile", *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, timeout=60, text=True)


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
