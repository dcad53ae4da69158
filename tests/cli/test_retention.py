"""`madeira retention`, `madeira log-level`, and what `madeira trace` says of what is gone."""

import json
import subprocess
from pathlib import Path

import psycopg
import pytest

from tests import terminal
from tests.store.making import claimed, routed, settled
from tests.store.test_retention import age


@pytest.mark.long
def test_what_is_old_goes_when_a_person_asks_for_it(tmp_path: Path, database_url: str, redis_url: str) -> None:
    """Counted before, removed then, on record, and told by whoever is asked for it."""
    environ = terminal.environ(MADEIRA_DATA_DIR=str(tmp_path), MADEIRA_DATABASE_URL=database_url, MADEIRA_REDIS_URL=redis_url)

    def madeira(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return terminal.run(environ, *arguments, code=None)

    with psycopg.connect(database_url, autocommit=True) as conn:
        for name in ("old", "older"):
            [ref] = routed(conn, event_id=name)
            settled(conn, claimed(conn, ref))
        age(conn, days=100)
        counts = {"payload": 2, "succeeded": 2, "cancelled": 0, "dead": 0}
        assert json.loads(madeira("retention", "--dry-run", "--json").stdout) == {"dry_run": True, "counts": counts}
        assert madeira("retention").stdout == "nothing to remove\n"
        conn.execute("UPDATE burial SET at = at - interval '2 minutes'")
        done = json.loads(madeira("retention", "--json").stdout)
        assert done == {"dry_run": False, "counts": {"events_succeeded": 2, "deliveries": 2}}
        entry = conn.execute("SELECT what, detail FROM audit WHERE action = 'retention'").fetchall()
        assert entry == [("by hand", done["counts"])]

        told = madeira("trace", "old").stdout
        assert "was removed because of its age" in told
        assert "was removed because of its age" in madeira("events", "show", "old").stderr
        assert json.loads(madeira("trace", "trace-older", "--json").stdout)[0]["status"] == "succeeded"

        assert madeira("log-level").stdout == "each process has the level of its environment\n"
        assert madeira("log-level", "debug").returncode == 2
        assert madeira("log-level", "debug", "--for", "60", "--reason", "why").stdout.startswith("debug until 2")
        assert json.loads(madeira("log-level", "own", "--reason", "why", "--json").stdout) == {"level": None, "until": None}
        levels = conn.execute("SELECT detail ->> 'before', detail ->> 'after' FROM audit WHERE action = 'log-level' ORDER BY id")
        assert levels.fetchall() == [(None, "debug"), ("debug", None)]
