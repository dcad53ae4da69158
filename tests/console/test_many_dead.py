"""Fifty thousand dead letters among a quarter of a million deliveries: how long somebody waits for what."""

import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import psycopg
import pytest

from madeira.api import query
from madeira.states import Role
from tests.api.serving import ADMIN_TOKEN, Api
from tests.console.browser import somebody

pytestmark = [pytest.mark.long, pytest.mark.alone]

DEAD = 50_000

#: Of so many events one is dead.
ONE_OF = 5

#: Seconds that a page may take on the server, and the preview of a replay of all.
PAGE_S = 0.2
PREVIEW_S = 2.0

#: Rows as the hot path leaves them, made in bulk: events of five sources for twenty endpoints that died over a day.
EVENTS = """
INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, status, routed_at, deliveries, dead)
SELECT 'src' || (n %% 5), 'evt-' || n, (ARRAY['payment.captured', 'order.paid', 'refund.done'])[1 + n %% 3], repeat('x', 300),
       sha256(''), 'trace-' || n, CASE WHEN n %% %(of)s = 0 THEN 'dead' ELSE 'succeeded' END, now(), 1, (n %% %(of)s = 0)::int
  FROM generate_series(1, %(all)s) n
"""
DELIVERIES = """
INSERT INTO delivery (event_seq, endpoint, lane, status, finished_at, died_at, failure_class, last_error, last_error_code,
                      trace_id, attempt)
SELECT seq, 'ep' || (seq / %(of)s %% 20), 'l', status, now(),
       CASE WHEN status = 'dead' THEN now() - seq %% 86400 * interval '1 s' END,
       CASE WHEN status = 'dead' THEN 'receiver' END, 'gave up after 12 attempts: the receiver answered 503 to request ' || seq,
       CASE WHEN status = 'dead' THEN (ARRAY['http_503', 'http_500', 'read_timeout', 'dns'])[1 + seq / %(of)s %% 4] END,
       trace_id, 12
  FROM event
"""
ATTEMPTS = """
INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, settled_as, worker, excerpt)
SELECT id, n, gen_random_uuid(), died_at - n * interval '1 min', 'retryable', last_error_code, 'pending', 'w',
       repeat('y', 500)::bytea
  FROM delivery, generate_series(1, 4) n WHERE died_at IS NOT NULL
"""


@pytest.fixture(scope="module")
def filled(shared_api: Api) -> Api:
    with psycopg.connect(shared_api.env["MADEIRA_DATABASE_URL"], autocommit=True) as conn:
        counts = {"of": ONE_OF, "all": DEAD * ONE_OF}
        # Rows of a table may only be born in their first state, unless they are copied.
        conn.execute("SET session_replication_role = replica")
        for statement in (EVENTS, DELIVERIES, ATTEMPTS):
            conn.execute(statement, counts)
        conn.execute("VACUUM (ANALYZE)")
    return shared_api


def p95(ask: Callable[[], Any], times: int = 40) -> float:
    """Seconds within which nineteen of twenty are answered."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        assert ask().status == 200
        took.append(time.perf_counter() - begun)
    return quantiles(took, n=20)[18]


def test_nobody_waits_longer_than_a_blink(filled: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """Overview, first and last page, groups, searches by words and by filters, in the console and in the API."""
    browser = somebody(filled, Role.OPERATOR)
    with psycopg.connect(filled.env["MADEIRA_DATABASE_URL"]) as conn:
        [oldest] = conn.execute("SELECT died_at, id FROM delivery WHERE status = 'dead' ORDER BY died_at, id LIMIT 1 OFFSET 40")
    pages = {
        "overview": "/console",
        "first page": "/console/dead-letters",
        "last page": f"/console/dead-letters?before={query.cursor(*oldest)}",
        "search by an endpoint and its error": "/console/dead-letters?endpoint=ep3&error=dns",
        "search by words that one has": "/console/dead-letters?text=request+17777",
        "search by words that none has": "/console/dead-letters?text=nobody",
    }
    bearer = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    resources = {
        "list": "/v1/dead-letters",
        "groups": "/v1/dead-letters/groups",
        "groups by words that none has": "/v1/dead-letters/groups?text=nobody",
    }
    took = {what: p95(lambda: browser.ask("GET", address)) for what, address in pages.items()}  # noqa: B023
    took |= {what: p95(lambda: filled.request("GET", path, None, bearer)) for what, path in resources.items()}  # noqa: B023
    with capsys.disabled():
        print("".join(f"\n{what}: p95 {seconds * 1000:.0f} ms" for what, seconds in took.items()))
    assert {what: seconds for what, seconds in took.items() if seconds > PAGE_S} == {}


def test_a_replay_of_all_is_previewed_in_two_seconds(filled: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """As a page, and in the API; nothing is begun by it."""
    browser = somebody(filled, Role.OPERATOR)
    body = b'{"action": "replay", "filter": {}, "reason": "to see", "dry_run": true}'
    asked = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"}
    took = {
        "preview in the console": p95(lambda: browser.ask("GET", "/console/jobs/new?action=replay"), 10),
        "preview in the API": p95(lambda: filled.request("POST", "/v1/jobs", body, asked), 10),
    }
    with capsys.disabled():
        print("".join(f"\n{what}: p95 {seconds * 1000:.0f} ms" for what, seconds in took.items()))
    assert max(took.values()) < PREVIEW_S
    assert f"{DEAD:,}" in browser.get("/console/jobs/new?action=replay").text
