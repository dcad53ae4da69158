"""What reconcile and a rebuild read: complete, page by page, with delays by the database's clock."""

from datetime import UTC, datetime, timedelta

from madeira.records import DeliveryRef
from madeira.store import cancelling, events, reconcile, routing
from tests.store.making import (
    GIVE_UP,
    RETRY,
    Connection,
    accept,
    claimed,
    expire,
    new_event,
    routed,
    settled,
)


def ids(rows: list[reconcile.Unfinished]) -> list[int]:
    return [row.ref.delivery_id for row in rows]


def age(conn: Connection, table: str, seconds: float) -> None:
    """Let everything in a table have happened `seconds` earlier."""
    columns = {
        "event": ["created_at", "updated_at", "route_at"],
        "delivery": ["created_at", "updated_at", "next_attempt_at", "lease_until"],
        "delivery_log": ["recorded_at"],
    }[table]
    conn.execute(f"UPDATE {table} SET {', '.join(f'{c} = {c} - {seconds} * interval $$1 s$$' for c in columns)}".encode())


def test_unrouted_events_are_read_page_by_page(conn: Connection) -> None:
    """All that wait for their routing, with the time until then; not the routed, cancelled, dead or very young."""
    now, later = accept(conn), accept(conn, deliver_at=datetime.now(UTC) + timedelta(hours=1))
    routed(conn)
    cancelled = new_event()
    events.insert(conn, [cancelled])
    cancelling.cancel(conn, "shop", cancelled.event_id, "ann", None)
    last = accept(conn)
    [(first, delay), (second, until_due)] = reconcile.unrouted(conn, 0, 2)
    assert (first, delay, second) == (now, 0, later)
    assert 3590 < until_due <= 3600
    assert [seq for seq, _ in reconcile.unrouted(conn, later, 2)] == [last]
    assert reconcile.unrouted(conn, 0, 10, older_than_s=5) == []
    assert reconcile.finished_events_among(conn, [now, later, last, 10**12]) == {10**12}
    routing.route(conn, [(now, [])])
    assert reconcile.finished_events_among(conn, [now, last]) == {now}


def test_unfinished_deliveries_are_read_page_by_page(conn: Connection) -> None:
    """Pending with the time until due, delivering with the time until the lease ends, nothing that is finished."""
    refs = routed(conn, ["a", "b", "c", "d"])
    waiting, retried, held, done = refs
    settled(conn, claimed(conn, retried), RETRY)
    claimed(conn, held, lease_s=40)
    settled(conn, claimed(conn, done), GIVE_UP)
    first, second = reconcile.unfinished_deliveries(conn, 0, 2)
    assert (first.ref, first.status) == (DeliveryRef(waiting.delivery_id, waiting.seq, "a", 0.0), "pending")
    assert second.status == "pending"
    assert 59 < second.ref.delay_s <= 60
    [third] = reconcile.unfinished_deliveries(conn, second.ref.delivery_id, 2)
    assert (third.ref.delivery_id, third.status) == (held.delivery_id, "delivering")
    assert 39 < third.ref.delay_s <= 40
    assert reconcile.unfinished_deliveries(conn, 0, 10, older_than_s=5) == []
    all_ids = [ref.delivery_id for ref in refs]
    assert reconcile.finished_among(conn, [*all_ids, 10**12]) == {done.delivery_id, 10**12}


def test_what_changed_lately_is_found_by_birth_and_by_attempt(conn: Connection) -> None:
    """Young rows, and old ones with a young attempt; neither the untouched nor the finished."""
    untouched, tried, done = (ref for _ in range(3) for ref in routed(conn))
    age(conn, "delivery", 1000)
    age(conn, "event", 1000)
    settled(conn, claimed(conn, tried), RETRY)
    settled(conn, claimed(conn, done), GIVE_UP)
    [young] = routed(conn)
    assert ids(reconcile.recently_changed(conn, 60, 100)) == [tried.delivery_id, young.delivery_id]
    assert reconcile.recently_changed(conn, 60, 100, older_than_s=5) == []
    age(conn, "delivery_log", 1000)
    assert ids(reconcile.recently_changed(conn, 60, 100)) == [young.delivery_id]
    assert untouched.delivery_id in ids(reconcile.recently_changed(conn, 10_000, 100))


def test_a_takeover_counts_as_a_change(conn: Connection) -> None:
    """An old delivery that was taken over just now is among what changed lately."""
    [ref] = routed(conn)
    claimed(conn, ref)
    age(conn, "delivery", 1000)
    claimed(conn, ref)
    assert ids(reconcile.recently_changed(conn, 60, 100)) == [ref.delivery_id]


def test_overdue_is_what_should_have_gone(conn: Connection) -> None:
    """Due, or with a lease run out, for longer than the grace; the longest overdue first; not what is held or waits."""
    due, expired, held, waits, older = routed(conn, ["a", "b", "c", "d", "e"])
    claimed(conn, expired, lease_s=1)
    age(conn, "delivery", 100)
    claimed(conn, held)
    settled(conn, claimed(conn, waits), RETRY)
    conn.execute("UPDATE delivery SET next_attempt_at = next_attempt_at - interval '1 h' WHERE id = %s", (older.delivery_id,))
    found = reconcile.overdue(conn, 10)
    assert ids(found)[0] == older.delivery_id
    assert set(ids(found)) == {older.delivery_id, due.delivery_id, expired.delivery_id}
    assert {row.ref.delay_s for row in found} == {0.0}
    assert ids(reconcile.overdue(conn, 1)) == [older.delivery_id]
    assert reconcile.overdue(conn, 10, older_than_s=10_000) == []


def test_what_workers_hold_is_read_with_its_token(conn: Connection) -> None:
    """Every claim that stands, with what is left of its lease; 0 when it has run out."""
    first, _, second = routed(conn, ["a", "b", "c"])
    one, two = claimed(conn, first, lease_s=40), claimed(conn, second)
    expire(conn, second.delivery_id)
    [held] = reconcile.delivering(conn, 0, 1)
    assert (held.ref.delivery_id, held.ref.lane, held.token) == (first.delivery_id, "a", one.token)
    assert 39 < held.lease_s <= 40
    [expired] = reconcile.delivering(conn, held.ref.delivery_id, 10)
    assert (expired.ref.delivery_id, expired.lease_s, expired.token) == (second.delivery_id, 0.0, two.token)


def test_dead_letters_wait_to_be_told(conn: Connection) -> None:
    """Dead deliveries of which nobody was told, page by page."""
    dead = [ref for _ in range(3) for ref in routed(conn)]
    routed(conn)
    for ref in dead:
        settled(conn, claimed(conn, ref), GIVE_UP)
    page = reconcile.dead_unnotified(conn, 0, 2)
    assert page == [DeliveryRef(ref.delivery_id, ref.seq, "a") for ref in dead[:2]]
    assert [r.delivery_id for r in reconcile.dead_unnotified(conn, page[-1].delivery_id, 2)] == [dead[2].delivery_id]


def test_runs_are_on_record(conn: Connection) -> None:
    """The latest first, with what they found."""
    reconcile.record_run(conn, {"unknown": 3}, 0.5, "host:1")
    reconcile.record_run(conn, {}, 0.25, "host:2", slice_from=7)
    last, first = reconcile.last_runs(conn, 10)
    assert (last["holder"], last["counts"], last["slice_from"]) == ("host:2", {}, 7)
    assert (first["holder"], first["counts"], first["duration_s"]) == ("host:1", {"unknown": 3}, 0.5)
    assert 0 <= last["age_s"] < 60
    assert len(reconcile.last_runs(conn, 1)) == 1


def test_a_page_costs_the_same_whatever_the_backlog(conn: Connection) -> None:
    """Every reader of a regular run goes by an index, over a backlog as over nothing: no plan holds a sequential scan."""
    conn.execute("""
        INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, route_at, updated_at)
        SELECT 'bulk', n::text, 't', '1', sha256(''), n::text, then_, then_
        FROM generate_series(1, 20000) n, (SELECT now() - interval '1 h' AS then_) t
    """)
    conn.execute("""
        INSERT INTO delivery (event_seq, endpoint, lane, trace_id, next_attempt_at, updated_at)
        SELECT seq, 'a', 'a', trace_id, route_at, updated_at FROM event
    """)
    conn.execute("ANALYZE")
    page = {"after": 0, "limit": 100, "older_than_s": 5, "since_s": 60, "ids": "{1,2,3}"}
    readers = [
        reconcile._UNROUTED,
        reconcile._UNFINISHED,
        reconcile._RECENT,
        reconcile._OVERDUE,
        reconcile._STILL_UNFINISHED,
        reconcile._STILL_UNROUTED,
        reconcile._DEAD_UNNOTIFIED,
    ]
    for statement in readers:
        plan = "\n".join(row[0] for row in conn.execute(f"EXPLAIN {statement}".encode(), page))
        assert "Seq Scan" not in plan.replace("Seq Scan on delivery_log", ""), plan
