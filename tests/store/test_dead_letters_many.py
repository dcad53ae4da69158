"""Fifty thousand dead letters are looked through as quickly as fifty."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from statistics import quantiles
from typing import Any

import pytest

from madeira.states import FailureClass
from madeira.store import dead_letters
from madeira.store.dead_letters import Place
from madeira.store.selection import Selection
from tests.store.making import Connection

pytestmark = [pytest.mark.long, pytest.mark.alone]

MANY = 50_000
BASE = datetime(2026, 3, 1, tzinfo=UTC)

#: Seconds that one answer may take.
MOST_S = 0.2


@pytest.fixture
def many(conn: Connection) -> Connection:
    """Dead letters of twenty endpoints, a second apart, among four times as many that succeeded."""
    conn.execute("SET session_replication_role = replica")
    conn.execute(
        """
        INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, status, routed_at, deliveries, dead)
        SELECT 's' || n %% 5, 'e' || n, (ARRAY['order.paid', 'order.sent', 'invoice.paid'])[1 + n %% 3], repeat('x', 300),
               sha256(''), 't', CASE n %% 5 WHEN 0 THEN 'dead' ELSE 'succeeded' END, now(), 1, (n %% 5 = 0)::integer
        FROM generate_series(1, 5 * %s) n
        """,
        (MANY,),
    )
    conn.execute(
        """
        INSERT INTO delivery (event_seq, endpoint, lane, status, attempt, finished_at, died_at, failure_class, last_error,
                              last_error_code, trace_id)
        SELECT seq, 'e' || seq / 5 %% 20, 'a', CASE seq %% 5 WHEN 0 THEN 'dead' ELSE 'succeeded' END, 12, now(),
               CASE seq %% 5 WHEN 0 THEN %s::timestamptz + seq * interval '1 s' END, CASE seq %% 5 WHEN 0 THEN 'receiver' END,
               'gave up after 12 attempts: the receiver answered 503', 'http_503', 't'
        FROM event
        """,
        (BASE,),
    )
    conn.execute(
        """
        INSERT INTO delivery_log (delivery_id, attempt, token, started_at, outcome, error_code, settled_as, worker)
        SELECT id, n, gen_random_uuid(), died_at, 'retryable', 'http_503', 'pending', 'w'
        FROM delivery, generate_series(1, 3) n WHERE died_at IS NOT NULL
        """
    )
    conn.execute("SET session_replication_role = DEFAULT")
    return conn


def p95(look: Callable[[], Any]) -> float:
    """Seconds that 95 of 100 looks take at most."""
    took = []
    for _ in range(20):
        began = time.perf_counter()
        look()
        took.append(time.perf_counter() - began)
    return quantiles(took, n=20)[18]


def test_overview_first_and_last_page_and_searches_are_quick_among_fifty_thousand(many: Connection) -> None:
    """Before Postgres has counted the rows, and afterwards; what is found, and what is looked for in vain."""

    def page(after: Place | None = None, **selected: Any) -> Callable[[], Any]:
        return lambda: dead_letters.page(many, Selection(**selected), limit=50, after=after)

    looks = {
        "overview (groups of all)": lambda: dead_letters.groups(many, Selection(), limit=50),
        "groups of an endpoint": lambda: dead_letters.groups(many, Selection(endpoint="e7"), limit=50),
        "first page": page(),
        "last page": page(Place(BASE + timedelta(seconds=150), 0)),
        "page of an endpoint": page(endpoint="e7"),
        "page of a source": page(source="s0", event_type="order.*"),
        "page of a text": page(text="E2345"),
        "page of a time": page(since=BASE + timedelta(hours=20), until=BASE + timedelta(hours=21), error="http_503"),
        "page of a class that is not there": page(failure_class=FailureClass.NETWORK),
        "page of a text that is not there": page(text="nobody says this"),
    }
    before = {name: p95(look) for name, look in looks.items()}
    many.execute("VACUUM ANALYZE")
    after = {name: p95(look) for name, look in looks.items()}
    for name in looks:
        print(f"p95 of {name}: {before[name] * 1000:.1f} ms, once vacuumed {after[name] * 1000:.1f} ms")
    assert dead_letters.groups(many, Selection(), limit=50).counted == MANY
    assert {name: s for took in (before, after) for name, s in took.items() if s > MOST_S} == {}
