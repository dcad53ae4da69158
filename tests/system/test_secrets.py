"""No secret leaves: whatever goes well or wrong, none stands in a log, a metric, an answer, a trace or a table."""

import subprocess
import sys
from pathlib import Path

import psycopg
import redis

from tests.receiver import Answer, Receiver, json_answer
from tests.system.conftest import Launch
from tests.system.harness import SECRET, TOKEN, Madeira

#: What must be nowhere; the test's own signing secret and administrator's token besides.
ENDPOINT_SECRET = "whsec_c2VjcmV0LW9mLXRoZS1lbmRwb2ludC1oZXJl"
HEADER = "Bearer credential-of-the-endpoint"
SECRETS = (SECRET, TOKEN, ENDPOINT_SECRET, HEADER, HEADER.split()[1])


def test_no_secret_leaves(launch: Launch, receiver: Receiver, redis_url: str) -> None:
    receiver.answer("/echo", json_answer({"success": False, "error": "no"}))
    receiver.answer("/refuse", Answer(status=400, body=b"no"))
    receiver.answer("/reset", Answer(reset=True))
    guarded = {"secrets": [ENDPOINT_SECRET], "headers": {"Authorization": HEADER}, "retry": {"max_attempts": 2}}
    madeira = launch(
        {
            "good": {"url": receiver.url("/good"), **guarded},
            "echo": {"url": receiver.url("/echo"), **guarded},
            "reset": {"url": receiver.url("/reset"), **guarded},
            "refuse": {"url": receiver.url("/refuse"), **guarded},
            "gone": {"url": "http://does-not-exist.invalid/", **guarded},
        },
        env={"MADEIRA_LOG_LEVEL": "debug", "MADEIRA_METRICS_PORT": "0"},
    )
    madeira.api()
    madeira.worker()
    ids = [madeira.post(f"{name}.x") for name in ("good", "echo", "reset", "refuse", "gone")]
    madeira.http.post("/v1/events", content=b"{}", headers={**madeira.sign(b"{}"), "X-Madeira-Signature": SECRET})
    madeira.http.get(f"/v1/events/{ids[0]}", headers={"Authorization": f"Bearer {TOKEN}x"})
    for event_id in ids:
        madeira.wait_status(event_id, "succeeded", "dead")
    assert HEADER in {call.headers.get("authorization") for call in receiver.calls}, "it was really sent"

    shown = [answer(madeira, f"/v1/events/{event_id}?source=test") for event_id in ids]
    shown += [answer(madeira, path) for path in ("/metrics", "/readyz", "/v1/reconcile")]
    dead = madeira.http.get("/v1/dead-letters", headers={"Authorization": f"Bearer {TOKEN}"}).json()["dead_letters"]
    assert len(dead) == 4
    shown += [answer(madeira, f"/v1/dead-letters/{item['id']}") for item in dead]
    shown += [trace(madeira, event_id) for event_id in ids]
    shown += [path.read_text(errors="replace") for path in madeira.folder.glob("*.log")]
    shown += [tables(madeira.database_url), keys(redis_url)]
    shown += [path.read_bytes().decode("latin-1") for path in (madeira.folder / "data").rglob("*") if path.is_file()]
    assert not {secret for secret in SECRETS for text in shown if secret in text}
    assert any(ids[0] in text for text in shown), "the search would find something"


def answer(madeira: Madeira, path: str) -> str:
    response = madeira.http.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 200, (path, response.text)
    return response.text + str(response.headers)


def trace(madeira: Madeira, event_id: str) -> str:
    command = [str(Path(sys.executable).parent / "madeira"), "trace", event_id]
    done = subprocess.run(command, env=madeira.env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def tables(database_url: str) -> str:
    """Every row of every table, as text."""
    found = []
    with psycopg.connect(database_url) as conn:
        for (name,) in conn.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall():
            found += [row[0] for row in conn.execute(f'SELECT t::text FROM "{name}" t')]  # type: ignore[arg-type]
        found += [row[0] for row in conn.execute("SELECT convert_from(excerpt, 'LATIN1') FROM delivery_log WHERE excerpt <> ''")]
    return "\n".join(found)


def keys(redis_url: str) -> str:
    """Every key of Redis and what it holds, as the server dumps it."""
    client = redis.Redis.from_url(redis_url)
    return "\n".join(f"{key!r} {client.dump(key)!r}" for key in client.scan_iter())
