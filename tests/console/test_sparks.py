"""The small lines of success, the pace that was used, and the jobs that the overview tells of."""

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from madeira.console import sparks, words
from madeira.console.sparks import HEIGHT, Sparks
from madeira.states import Role
from madeira.store import jobs
from madeira.store.jobs import NewJob
from madeira.store.rollups import SLICES, Slice
from madeira.store.selection import Selection
from tests.api.people import audited
from tests.api.serving import Api
from tests.console.browser import administrator, queried, somebody
from tests.console.scenes import died, made_endpoint
from tests.store import making

Connection = psycopg.Connection[Any]


def test_a_line_is_at_the_top_where_all_succeeded_and_broken_where_nothing_was_tried() -> None:
    found = sparks.spark([Slice(0, 4, 4), Slice(1, 0, 4), Slice(5, 1, 2), Slice(SLICES - 1, 600, 600)])
    assert found.path == f"M2.0 2.0h0L8.2 {HEIGHT - 2:.1f}M32.9 9.0h0M70.0 2.0h0"
    assert found.told == "99.1 % of 610 attempts in the last hour succeeded"
    assert found.shown_pace == "2"


@pytest.mark.parametrize(
    ("part", "whole", "told"),
    [(0, 9, "0 %"), (9, 9, "100 %"), (99_999, 100_000, "99.9 %"), (1, 100_000, "0.1 %"), (1, 2, "50 %")],
)
def test_a_share_is_all_or_nothing_only_when_it_is(part: int, whole: int, told: str) -> None:
    assert words.percent(part, whole) == told


@pytest.fixture
def called(shared_api: Api, conn: Connection) -> Iterator[str]:
    """An endpoint that may be called five times a second, was called once a second, and failed half of the time."""
    name = made_endpoint(shared_api, rate=5)
    columns = [
        row[0]
        for row in conn.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = 'rollup_endpoint' AND data_type = 'integer'"
        )
    ]
    counts = {"attempts_succeeded": "30", "attempts_retryable": "30", "attempts_late": "7"}
    conn.execute(
        f"INSERT INTO rollup_endpoint (span, bucket, endpoint, {', '.join(columns)})"
        " SELECT 'minute', date_trunc('minute', now(), 'UTC') - n * interval '1 minute', %s,"
        f" {', '.join(counts.get(column, '0') for column in columns)} FROM generate_series(0, 90) n".encode(),
        [name],
    )
    yield name
    conn.execute("TRUNCATE rollup_endpoint")


def test_each_endpoint_shows_its_success_and_the_pace_that_it_used_of_what_it_may(
    shared_api: Api, conn: Connection, called: str
) -> None:
    found = Sparks().read(conn)
    assert found[called].told == "50 % of 3,600 attempts in the last hour succeeded"
    # A page keeps a reading for ten seconds; nobody else in this file opens this one.
    seen = somebody(shared_api, Role.VIEWER).get(f"/console/endpoints?q={called}")
    (row,) = seen.root.one(id="endpoints-table").one("tbody").all("tr")
    drawing = row.one("svg", class_="spark")
    assert drawing.attributes["aria-label"] == found[called].told
    assert drawing.one("path").attributes["d"] == found[called].path
    assert "1 of 5/s" in row.text


def test_one_reading_serves_for_ten_seconds(conn: Connection, called: str) -> None:
    clock = [0.0]
    kept = Sparks(now=lambda: clock[0])
    first = kept.read(conn)
    conn.execute("TRUNCATE rollup_endpoint")
    clock[0] = 9.9
    assert kept.read(conn) is first
    clock[0] = 10.0
    assert kept.read(conn) == {}


def test_the_overview_tells_of_jobs_that_go_on_are_paused_or_have_failed(shared_api: Api, conn: Connection) -> None:
    endpoint = f"e-{uuid.uuid4().hex[:8]}"
    for _ in range(3):
        died(conn, endpoint)
    browser = administrator(shared_api)

    def said() -> str:
        return browser.get("/console").root.one(id="said").text

    made, _ = jobs.create(conn, NewJob(action="replay", selection=Selection(endpoint=endpoint), reason="x"), "somebody")
    number = made["id"]
    assert f"Job {number} (replay) goes on: 0 of 3 are through." in said()
    assert f"/console/jobs/{number}" in browser.get("/console").links()
    conn.execute("UPDATE job SET state = 'paused' WHERE id = %s", (number,))
    assert f"Job {number} (replay) is paused" in said()
    other, _ = jobs.create(conn, NewJob(action="replay", selection=Selection(endpoint=endpoint), reason="x"), "somebody")
    assert "Jobs : 1 goes on and 1 is paused." in said()
    conn.execute("UPDATE job SET state = 'failed', error = 'no such thing', finished_at = now() WHERE id = %s", (number,))
    conn.execute("UPDATE job SET state = 'cancelled', finished_at = now() WHERE id = %s", (other["id"],))
    assert f"Job {number} (replay) has failed: no such thing." in said()
    conn.execute("UPDATE job SET updated_at = now() - interval '2 days' WHERE id = %s", (number,))
    assert "Job" not in said()


def test_an_event_leads_to_the_job_that_acted_on_it(shared_api: Api, conn: Connection) -> None:
    event_id = died(conn)
    browser = somebody(shared_api, Role.VIEWER)
    address = f"/console/events/{event_id}?source=shop"
    assert not [link for link in browser.get(address).links() if link.startswith("/console/jobs/")]
    conn.execute("UPDATE delivery SET job_id = 7 WHERE event_seq = (SELECT seq FROM event WHERE event_id = %s)", (event_id,))
    seen = browser.get(address)
    assert "/console/jobs/7" in seen.links()
    assert "job 7 acted last on sink" in seen.text


def test_everything_unfinished_that_a_list_shows_is_cancelled_by_a_job_after_a_preview(shared_api: Api, conn: Connection) -> None:
    endpoint = f"e-{uuid.uuid4().hex[:8]}"
    for _ in range(4):
        making.routed(conn, (endpoint,))
    died(conn, endpoint)
    browser = administrator(shared_api)
    page = browser.get(f"/console/events?endpoint={endpoint}&status=delivering")
    (link,) = [link for link in page.links() if "/jobs/new" in link]
    assert queried(link) == {"action": "cancel", "among": "unfinished", "endpoint": endpoint}
    rows = audited(shared_api)
    preview = browser.get(link)
    assert preview.title == "Cancel 4 unfinished deliveries?"
    assert "no retry follows" in preview.text
    assert audited(shared_api) == rows
    done = browser.submit(preview, "/console/jobs", reason="withdrawn")
    assert "is made" in done.root.one(id="done").text
    assert audited(shared_api) == rows + 1
    row = conn.execute("SELECT action, among, total, selection FROM job ORDER BY id DESC LIMIT 1").fetchone()
    assert row == ("cancel", "unfinished", 4, {"endpoint": endpoint})
    conn.execute("UPDATE job SET state = 'cancelled', finished_at = now()")


@pytest.mark.parametrize("query", ["q=words", "trace_id=t", "status=dead", "status=delivering", "status=delivering&source=shop"])
def test_a_list_that_no_job_could_choose_offers_no_cancel_of_it(shared_api: Api, conn: Connection, query: str) -> None:
    died(conn, payload='"words"', trace_id="t")
    making.routed(conn, ("sink",))
    seen = administrator(shared_api).get(f"/console/events?{query}")
    assert not [link for link in seen.links() if "/jobs/new" in link]
    assert "is no way to choose them" in seen.text
    viewer = somebody(shared_api, Role.VIEWER).get("/console/events")
    assert not [link for link in viewer.links() if "/jobs/new" in link]


def test_only_a_cancel_is_about_what_is_unfinished(shared_api: Api) -> None:
    assert administrator(shared_api).get("/console/jobs/new?action=replay&among=unfinished").status == 422
