"""The overview says in a sentence what is well and what is not."""

from typing import Any

import psycopg

from madeira.broker.queues import ROUTE, Queues
from tests.api.serving import Api
from tests.console.browser import administrator
from tests.console.scenes import died, made_endpoint
from tests.store import making


def test_the_overview_says_in_a_sentence_what_is_dead_and_what_is_held(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    browser = administrator(shared_api)
    name = made_endpoint(shared_api)
    died(conn, name)
    making.routed(conn, (name,))
    browser.submit(browser.get(f"/console/endpoints/{name}"), "/pause", reason="their migration")
    seen = browser.get("/console")
    said = seen.root.one(id="said").text
    assert "dead letter" in said
    assert f"{name} (paused) holds 1 delivery; the oldest has waited" in said
    rows = [row.text for row in seen.root.one(id="endpoints-table").one("tbody").all("tr")]
    assert rows[0].startswith(f"{name} paused")
    assert "their migration" not in rows[1]
    group = [row for row in seen.root.one(id="dead-table").one("tbody").all("tr") if name in row.text]
    assert [row.text.split()[:3] for row in group] == [["1", name, "receiver"]]
    assert "no worker" in said.lower()


def test_the_overview_says_that_all_is_well_when_it_is(shared_api: Api, conn: psycopg.Connection[Any]) -> None:
    conn.execute("TRUNCATE event, delivery_log CASCADE")
    ref = making.routed(conn, ("sink",))[0]
    making.settled(conn, making.claimed(conn, ref))
    conn.execute("INSERT INTO reconcile_run (duration_s, holder, counts) VALUES (0.1, 'w', '{\"missing\": 3, \"stray\": 0}')")
    with beating(shared_api):
        seen = administrator(shared_api).get("/console")
    said = seen.root.one(id="said").text
    assert said == "All well: 1 event accepted and 1 delivered in the last minute, nothing waits."
    health = seen.root.one(id="health").text
    assert "1 process alive" in health
    assert "found 3 missing" in health


class beating:
    """A worker that gives a sign of life, as far as Redis can tell."""

    def __init__(self, api: Api) -> None:
        env = api.env
        self._queues = Queues(redis_url=env["MADEIRA_REDIS_URL"], namespace=env["MADEIRA_NAMESPACE"])

    def __enter__(self) -> None:
        self._queues.beat("a-worker", silence_s=60, spread_s=1, queues=[ROUTE], held=[])

    def __exit__(self, *_: object) -> None:
        self._queues.client.delete(f"{self._queues.namespace}:procs")
        self._queues.close()
