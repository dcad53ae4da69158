"""What is old goes while events come in, and nobody who posts notices."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

import psycopg
import pytest

from benchmarks.retention import fill
from tests.api.conftest import serve  # noqa: F401  # a fixture
from tests.api.serving import ROOT, Api, event, signed

#: What is measured here is time. The tables are filled, and their parts changed.
pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.new_database]

#: Finished events with a delivery and an attempt each.
OLD = 20_000

#: Posts a second.
RATE = 40

#: What posts may take while things are removed: so many times what they take without, and so many seconds more, since on a
#: machine with other work a handful of posts decide.
FACTOR, NOISE_S = 1.5, 0.05


def test_removing_what_is_old_holds_no_post_up(api_at: Api, tmp_path: Path, database_url: str) -> None:
    """All of it goes, the part of the log with its files; posts are accepted as quickly; an id that is gone is a duplicate."""
    with psycopg.connect(database_url, autocommit=True) as conn:
        fill(conn, OLD, "shop")
        before = log_bytes(conn)
        drive(api_at, 2.0)
        quiet = drive(api_at, 10.0)
        busy = []
        for _ in range(2):
            removing = subprocess.Popen(
                [sys.executable, "-m", "madeira.cli", "retention"], cwd=ROOT, env=api_at.env, stdout=subprocess.DEVNULL
            )
            while removing.poll() is None:
                busy += drive(api_at, 1.0)
            assert removing.returncode == 0
            conn.execute("UPDATE burial SET at = at - interval '2 minutes'")
        print(f"p99 of {len(quiet)} posts without: {p99(quiet):.4f} s, of {len(busy)} meanwhile: {p99(busy):.4f} s")
        assert conn.execute("SELECT count(*) FROM event WHERE event_id LIKE 'old-%'").fetchone() == (0,)
        assert conn.execute("SELECT count(*) FROM delivery").fetchone() == (0,)
        assert before > 5_000_000
        assert log_bytes(conn) < 1_000_000
        assert (
            conn.execute("SELECT count(*) FROM event").fetchone()
            == conn.execute("SELECT count(*) FROM event WHERE event_id LIKE 'new-%'").fetchone()
        )
        body = event("old-7")
        known = api_at.request("POST", "/v1/events", body, signed(body, source="shop"))
        assert (known.status, known.json["type"]) == (409, "urn:madeira:problem:conflict")
        conn.execute("UPDATE tombstone SET body_sha256 = sha256(%s) WHERE event_id = 'old-7'", (body,))
        again = api_at.request("POST", "/v1/events", body, signed(body, source="shop"))
        assert (again.status, again.json["duplicate"], again.json["status"]) == (200, True, "succeeded")
    assert p99(busy) <= FACTOR * p99(quiet) + NOISE_S


@pytest.fixture
def api_at(serve: Any, database_url: str, redis_url: str) -> Api:  # noqa: F811
    """An API."""
    api: Api = serve(database_url, redis_url)
    return api.start()


def drive(api: Api, seconds: float) -> list[float]:
    """Post for so long at an even pace, come what may; the seconds from when each was due to its answer."""
    count = int(seconds * RATE)
    bodies = [event(f"new-{time.time_ns()}-{n}") for n in range(count)]
    begun = time.monotonic()

    def post(n: int) -> float:
        due = begun + n / RATE
        time.sleep(max(0.0, due - time.monotonic()))
        assert api.post(bodies[n]).status == 202
        return time.monotonic() - due

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(post, range(count)))


def p99(took: list[float]) -> float:
    return quantiles(took, n=100)[98]


def log_bytes(conn: "psycopg.Connection[Any]") -> int:
    row = conn.execute(
        "SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits WHERE inhparent = 'delivery_log'::regclass"
    ).fetchone()
    assert row is not None
    return int(row[0])
