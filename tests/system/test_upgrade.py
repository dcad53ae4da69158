"""From the tables of the first release, with unfinished work in every state, to those of today, and one step beyond."""

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest

from madeira.store.database import Database
from madeira.store.migrate import migrate
from madeira.store.schema import FOLDER
from tests.receiver import Receiver
from tests.system.harness import running, toml, wait_until

#: The migrations of the first release.
FIRST = ("0001_events_and_deliveries.sql", "0002_configuration.sql")

#: An event as the first release accepted it; and as it was once it was routed to so many endpoints.
EVENT = """
INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at, deliver_at)
VALUES ('test', %(id)s, 'a.x', '{"n": 1}', sha256('x'), md5(%(id)s), clock_timestamp() + %(in)s * interval '1 s',
        CASE WHEN %(in)s > 0 THEN clock_timestamp() + %(in)s * interval '1 s' END)
"""
DELIVERY = """
INSERT INTO delivery (event_seq, endpoint, lane, routes, trace_id, budget_from)
SELECT seq, %(endpoint)s, %(endpoint)s, ARRAY['a'], trace_id, now() FROM event WHERE event_id = %(id)s
"""
ROUTED = """
UPDATE event SET status = 'delivering', route_at = NULL, routed_at = now(), deliveries = deliveries + 1,
                 unfinished = unfinished + 1
WHERE event_id = %(id)s
"""

#: What became of the delivery to `a` since; `EVENT_IS` tells its event of it.
CLAIMED = (
    "status = 'delivering', attempt = 1, claimed_at = now(), claim_token = gen_random_uuid(), lease_until = clock_timestamp() + "
)
BECAME: Mapping[str, tuple[str, ...]] = {
    "fresh": (),
    "held": (f"{CLAIMED} interval '2 s'",),
    "left": (f"{CLAIMED} interval '-1 s'",),
    "retry": (
        f"{CLAIMED} interval '9 s'",
        (
            "status = 'pending', line = 'retry', failures = 1, retries = 1, claim_token = NULL, lease_until = NULL, "
            "failure_class = 'receiver', last_error = '503', next_attempt_at = clock_timestamp() + interval '1 s'"
        ),
    ),
    "asked to end": (f"{CLAIMED} interval '-1 s'", "cancel_requested_at = now()"),
    "half": (f"{CLAIMED} interval '9 s'", "status = 'succeeded', finished_at = now(), claim_token = NULL, lease_until = NULL"),
    "done": (f"{CLAIMED} interval '9 s'", "status = 'succeeded', finished_at = now(), claim_token = NULL, lease_until = NULL"),
    "dead": (
        f"{CLAIMED} interval '9 s'",
        (
            "status = 'dead', finished_at = now(), died_at = now(), failures = 1, failure_class = 'receiver', "
            "last_error = '400', claim_token = NULL, lease_until = NULL"
        ),
    ),
    "cancelled": ("status = 'cancelled', finished_at = now()",),
}
EVENT_IS = {
    "half": "unfinished = 1",
    "done": "status = 'succeeded', unfinished = 0",
    "dead": "status = 'dead', unfinished = 0, dead = 1",
    "cancelled": "status = 'cancelled', unfinished = 0, cancelled = 1",
}

#: How each must end, and how often it is still called.
ENDS = {
    "unrouted": ("succeeded", 1),
    "later": ("succeeded", 1),
    "fresh": ("succeeded", 1),
    "held": ("succeeded", 1),
    "left": ("succeeded", 1),
    "retry": ("succeeded", 1),
    "asked to end": ("cancelled", 0),
    "half": ("succeeded", 1),
    "done": ("succeeded", 0),
    "dead": ("dead", 0),
    "cancelled": ("cancelled", 0),
}

#: What a version to come may add while this one runs.
ADDED = {
    "9998_more.sql": "ALTER TABLE event ADD COLUMN more text; ALTER TABLE delivery ADD COLUMN more integer DEFAULT 7;\n"
    "ALTER TABLE delivery_log ADD COLUMN more text;\n"
    "CREATE TABLE more (id bigint PRIMARY KEY REFERENCES event ON DELETE CASCADE);\n"
    "ALTER TABLE event ADD CONSTRAINT event_more CHECK (more <> '') NOT VALID;",
    "9999_more.concurrently.sql": "CREATE INDEX CONCURRENTLY event_more ON event (more) WHERE more IS NOT NULL;",
}


def fill(conn: "psycopg.Connection[tuple[object, ...]]") -> None:
    """Events in every state, as the first release left them."""
    conn.execute(EVENT, {"id": "unrouted", "in": 0})
    conn.execute(EVENT, {"id": "later", "in": 2})
    for name, moves in BECAME.items():
        conn.execute(EVENT, {"id": name, "in": 0})
        for endpoint in ("a", "b") if name == "half" else ("a",):
            conn.execute(DELIVERY, {"id": name, "endpoint": endpoint})
            conn.execute(ROUTED, {"id": name})
        for move in moves:
            conn.execute(
                f"UPDATE delivery SET {move} WHERE endpoint = 'a' AND "
                "event_seq = (SELECT seq FROM event WHERE event_id = %s)".encode(),
                [name],
            )
        if name in EVENT_IS:
            conn.execute(f"UPDATE event SET {EVENT_IS[name]} WHERE event_id = %s".encode(), [name])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_the_first_release_left_unfinished_ends_and_a_step_beyond_disturbs_nobody(
    empty_database_url: str, redis_url: str, receiver: Receiver, tmp_path: Path
) -> None:
    """Today's code refuses the old tables until they are migrated; and works on while the next version's are made."""
    first, later = tmp_path / "first", tmp_path / "later"
    first.mkdir()
    for name in FIRST:
        shutil.copy(FOLDER / name, first)
    assert migrate(empty_database_url, folder=first) == list(FIRST)
    with psycopg.connect(empty_database_url) as conn:
        fill(conn)
    database = Database(url=empty_database_url, application="tests", pool_max=1)
    database.open()
    assert str(database.trouble()).startswith("the tables are older than this version")
    database.close()

    assert migrate(empty_database_url)[0] > FIRST[-1]
    endpoints = {name: {"url": receiver.url(f"/{name}")} for name in ("a", "b")}
    with running(folder=tmp_path, database_url=empty_database_url, redis_url=redis_url, config=toml(endpoints)) as madeira:
        madeira.api()
        madeira.worker()
        madeira.wait_all(60)
        rows = madeira.rows("SELECT event_id, status FROM event")
        calls = Counter(call.json()["event_id"] for call in receiver.calls)
        assert {row["event_id"]: (row["status"], calls[row["event_id"]]) for row in rows} == ENDS
        assert receiver.count("/b") == 1

        shutil.copytree(FOLDER, later)
        for name, text in ADDED.items():
            (later / name).write_text(text)
        posted = madeira.post_many(20)
        assert migrate(empty_database_url, folder=later, lock_s=0.5) == list(ADDED)
        posted += madeira.post_many(20)
        madeira.wait_all(60)
        assert {madeira.event(event)["status"] for event in posted} == {"succeeded"}
        # One that starts now finds them as well.
        madeira.worker(name="late")
        wait_until(lambda: madeira.http.get("/readyz").json()["status"] == "ok", what="readiness")
        assert receiver.overlaps == {}
