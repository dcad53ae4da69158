"""Plans that were made while the tables were empty, as they are on the first day, stay good when the tables have grown.

So do those that are made anew each time, as behind a pooler, and know of no row until Postgres has counted them.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import psycopg
import pytest
from psycopg import sql

from madeira.records import Claimed, NewEvent, PlannedDelivery
from madeira.store import (
    cancelling,
    claims,
    dead_letters,
    deliveries,
    endpoints,
    erase,
    events,
    job_walks,
    ordering,
    overview,
    reconcile,
    replay,
    routing,
    story,
    timeline,
)
from madeira.store import database as store
from madeira.store.database import BoundedConnection
from madeira.store.selection import Selection
from tests.store import making

#: Rows of the backlog, and rows that a statement about one event may read; without an index it would read all.
BACKLOG = 5_000
MOST = 200

IN_ORDER = [PlannedDelivery(f"later{n}", f"later{n}", ordering_key="k") for n in range(10)]
ENDPOINTS = [PlannedDelivery(f"later{n}", f"later{n}") for n in range(10)]


#: What Postgres knows of tables that were emptied is something else.
pytestmark = pytest.mark.new_database


def one_life(conn: "psycopg.Connection[Any]", note: Callable[[str], None]) -> None:
    """All that happens to a delivery that dies, and to one that is cancelled; `note` is told after each step."""
    event = making.new_event()
    accepted = events.insert(conn, [event])[0]
    events.insert(conn, [event])
    note("insert")
    routing.routable(conn, [accepted.seq])
    plan = [(accepted.seq, [PlannedDelivery("a", "a")])]
    ref = routing.route(conn, plan)[0].refs[0]
    note("route")
    routing.route(conn, plan)
    note("route again")
    held = making.claimed(conn, ref)
    claims.claim(conn, [claims.ClaimRequest(ref.delivery_id, making.token(), 40.0)])
    note("claim")
    verdict = making.verdict(held, making.GIVE_UP)
    deliveries.settle(conn, [verdict])
    deliveries.settle(conn, [verdict])
    note("settle")
    deliveries.unnotified(conn, [ref.delivery_id])
    deliveries.mark_notified(conn, [ref.delivery_id])
    note("notify")
    story.find(conn, event.source, event.event_id)
    story.find_trace(conn, event.event_id)
    note("find")
    what_a_person_does(conn, ref.delivery_id, event, note)
    other = making.new_event()
    routing.route(conn, [(events.insert(conn, [other])[0].seq, [PlannedDelivery("a", "a")])])
    cancelling.cancel(conn, other.source, other.event_id, "a person", "a test")
    note("cancel")
    one_key(conn, note)
    reconcile.unrouted(conn, 0, 20)
    reconcile.finished_among(conn, [ref.delivery_id])
    reconcile.dead_unnotified(conn, 0, 20)
    reconcile.recently_changed(conn, 300, 20)
    reconcile.unfinished_deliveries(conn, 0, 20)
    reconcile.overdue(conn, 20)
    note("reconcile")
    endpoints.unfinished(conn, "a", 20)
    note("an endpoint's number")
    cancelling.cancel_endpoint(conn, "nobody", 0, 20, "a person", None)
    note("a page of an endpoint")
    overview.read(conn)
    note("overview")
    for kind in get_args(job_walks.Kind):
        job_walks.page(conn, kind, "cancel", Selection(), datetime.now(UTC), endpoint="a", cursor=0, limit=20)
        note(f"a page of what is {kind}")


def what_a_person_does(conn: "psycopg.Connection[Any]", dead: int, event: NewEvent, note: Callable[[str], None]) -> None:
    """Look at a dead letter, send it again, and erase what became of it."""
    dead_letters.find(conn, dead)
    note("a dead letter")
    replay.replay(conn, event.source, event.event_id, "a person", "a test")
    note("replay")
    cancelling.cancel(conn, event.source, event.event_id, "a person", "a test")
    note("cancel what was replayed")
    erase.erase(conn, event.source, event.event_id, "a person", "a test")
    note("erase")
    timeline.recent(conn, datetime.now(UTC) - timedelta(days=1), 5)
    note("timeline")


def one_key(conn: "psycopg.Connection[Any]", note: Callable[[str], None]) -> None:
    """All that is asked of deliveries in an order; the last of each key stays unfinished."""
    key = making.token()
    plan = [PlannedDelivery("a", "a", ordering_key=key)]
    seqs = [accepted.seq for accepted in events.insert(conn, [making.new_event() for _ in range(3)])]
    refs = [ref for result in routing.route(conn, [(seq, plan) for seq in seqs]) for ref in result.refs]
    note("before the order")
    ordering.leading(conn, refs)
    note("leading")
    held = making.claimed(conn, refs[0])
    note("claim in order")
    claims.claim(conn, [claims.ClaimRequest(refs[1].delivery_id, making.token(), 40.0)])
    note("claim refused by order")
    deliveries.settle(conn, [making.verdict(held)])
    note("settle in order")
    ordering.following(conn, refs[:1])
    ordering.waits(conn, refs[2].seq)
    note("waits")
    ordering.of_endpoint(conn, "a", 20)
    note("of an endpoint")
    ordering.after_recent(conn, 300, 20, older_than_s=0)
    note("after recent")
    reconcile.not_first_among(conn, [ref.delivery_id for ref in refs])
    note("not first")


@pytest.fixture(autouse=True)
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As small as the limit that is handed to the others."""
    monkeypatch.setattr(cancelling, "LOOK", 20)
    monkeypatch.setattr(job_walks, "LOOK", 20)
    monkeypatch.setattr(overview, "LOOK", 20)
    monkeypatch.setattr(overview, "_LATELY", 20)


def rows_read(conn: "psycopg.Connection[Any]") -> dict[str, int]:
    """How many rows each step of a life reads."""
    read: dict[str, int] = {}
    with conn.transaction():

        def note(step: str) -> None:
            rows = conn.execute(
                "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::integer FROM pg_stat_xact_user_tables"
            ).fetchone()
            assert rows is not None
            read[step] = rows[0] - sum(read.values())

        note("before")
        one_life(conn, note)
    del read["before"]
    return read


def grow(conn: "psycopg.Connection[Any]") -> None:
    """Make a backlog."""
    later = datetime.now(UTC) + timedelta(days=1)
    for _ in range(BACKLOG // 500):
        events.insert(conn, [making.new_event(deliver_at=later) for _ in range(500)])
        keyed = events.insert(conn, [making.new_event() for _ in range(50)])
        routing.route(conn, [(a.seq, IN_ORDER) for a in keyed])
        accepted = events.insert(conn, [making.new_event() for _ in range(50)])
        made = routing.route(conn, [(a.seq, ENDPOINTS) for a in accepted])
        wishes = [claims.ClaimRequest(ref.delivery_id, making.token(), 40.0) for result in made for ref in result.refs]
        held = claims.claim(conn, wishes)
        deliveries.settle(conn, [making.verdict(claim, making.RETRY) for claim in held if isinstance(claim, Claimed)])


def test_what_concerns_one_event_or_one_page_reads_a_few_rows_whatever_the_backlog(conn: "psycopg.Connection[Any]") -> None:
    for _ in range(12):
        one_life(conn, lambda _: None)
    grow(conn)
    by_plans_that_were_kept = rows_read(conn)
    conn.prepare_threshold = None
    for read in (by_plans_that_were_kept, rows_read(conn)):
        assert {step: rows for step, rows in read.items() if rows > MOST} == {}


@pytest.mark.direct
def test_groups_of_all_sizes_are_settled_by_one_plan(conn: "psycopg.Connection[Any]") -> None:
    """Left to Postgres, groups smaller than it takes for granted are planned one by one."""
    for size in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3):
        held = [making.claimed(conn, making.routed(conn)[0]) for _ in range(size)]
        deliveries.settle(conn, [making.verdict(claim) for claim in held])
    kept = conn.execute("SELECT statement ~ 'WITH verdict', generic_plans, custom_plans FROM pg_prepared_statements").fetchall()
    assert sum(custom for _, _, custom in kept) == 0
    assert [generic for is_settle, generic, _ in kept if is_settle] == [7]


#: What walks all that is unrouted until the tables are analysed; see docs/decisions.md.
IN_ORDER_OF_ALL = {"claim in order"}


@pytest.mark.direct
@pytest.mark.long
def test_plans_for_tables_that_were_analysed_while_they_were_tiny_are_made_anew(
    conn: BoundedConnection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are kept read everything, which is why; those that are made anew read a few rows, as if analysed."""
    one_life(conn, lambda _: None)
    with psycopg.connect(database_url, autocommit=True) as admin:
        for table in ("event", "delivery"):
            admin.execute(sql.SQL("ALTER TABLE {} SET (autovacuum_enabled = off)").format(sql.Identifier(table)))
        admin.execute("ANALYZE")
    for _ in range(12):
        one_life(conn, lambda _: None)
    grow(conn)
    kept = {step for step, rows in rows_read(conn).items() if rows > MOST}
    assert kept >= {"claim", "settle"}, "the case is none any more"
    monkeypatch.setattr(store, "PLANS_S", 0.0)
    conn.plan_anew()
    assert {step for step, rows in rows_read(conn).items() if rows > MOST} <= IN_ORDER_OF_ALL
