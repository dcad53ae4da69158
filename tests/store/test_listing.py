"""Lists of events: each that matches is shown once, newest first, page by page, whatever comes meanwhile."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from madeira.states import EventStatus
from madeira.store import cancelling, events, listing
from madeira.store.listing import Wanted
from tests.store.making import GIVE_UP, Connection, accept, claimed, new_event, routed, settled


def walked(conn: Connection, wanted: Wanted, limit: int = 3) -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    before: int | None = None
    while True:
        page = listing.page(conn, wanted, limit=limit, before=before)
        assert len(page.events) <= limit
        found += page.events
        if page.before is None:
            return found
        assert before is None or page.before < before
        before = page.before


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [event["event_id"] for event in found]


@pytest.fixture
def cast(conn: Connection) -> Connection:
    """One event of each kind, the oldest first."""
    accept(conn, event_id="pending", event_type="order.paid")
    [ref] = routed(conn, ("a",), event_id="done", event_type="order.sent", trace_id="t1")
    settled(conn, claimed(conn, ref))
    [ref, _] = routed(conn, ("a", "b"), event_id="half", event_type="invoice.paid", trace_id="t1")
    settled(conn, claimed(conn, ref), GIVE_UP)
    [ref] = routed(conn, ("b",), event_id="dead", source="other", event_type="orders")
    settled(conn, claimed(conn, ref), GIVE_UP)
    routed(conn, ("c",), event_id="gone", event_type="order.paid.twice")
    cancelling.cancel(conn, "shop", "gone", "ann", None)
    return conn


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), ["gone", "dead", "half", "done", "pending"]),
        (Wanted(status=EventStatus.PENDING), ["pending"]),
        (Wanted(status=EventStatus.DELIVERING), ["half"]),
        (Wanted(status=EventStatus.SUCCEEDED), ["done"]),
        (Wanted(status=EventStatus.DEAD), ["dead"]),
        (Wanted(status=EventStatus.CANCELLED), ["gone"]),
        (Wanted(event_type="order.paid"), ["pending"]),
        (Wanted(event_type="order.*"), ["gone", "done", "pending"]),
        (Wanted(event_type="order*"), ["gone", "dead", "done", "pending"]),
        (Wanted(event_type="*"), ["gone", "dead", "half", "done", "pending"]),
        (Wanted(event_type="order"), []),
        (Wanted(source="shop"), ["gone", "half", "done", "pending"]),
        (Wanted(source="other"), ["dead"]),
        (Wanted(source="sho"), []),
        (Wanted(endpoint="a"), ["half", "done"]),
        (Wanted(endpoint="b"), ["dead", "half"]),
        (Wanted(trace_id="t1"), ["half", "done"]),
        (Wanted(trace_id="t1", source="other"), []),
        (Wanted(trace_id="t1", endpoint="b"), ["half"]),
        (Wanted(source="shop", status=EventStatus.PENDING), ["pending"]),
        (Wanted(source="other", status=EventStatus.PENDING), []),
        (Wanted(source="shop", endpoint="a", status=EventStatus.SUCCEEDED, event_type="order.*"), ["done"]),
    ],
    ids=str,
)
def test_a_list_holds_what_matches_all_that_is_asked(cast: Connection, wanted: Wanted, expected: list[str]) -> None:
    assert ids(walked(cast, wanted)) == expected
    assert ids(walked(cast, wanted, limit=1)) == expected


def test_a_row_shows_the_envelope_and_how_the_deliveries_stand_but_no_payload(cast: Connection) -> None:
    """Counts and endpoints with their states in short."""
    [half] = walked(cast, Wanted(status=EventStatus.DELIVERING))
    assert {"payload", "parameters"}.isdisjoint(half)
    assert (half["delivery_count"], half["unfinished"], half["dead"], half["cancelled"]) == (2, 1, 1, 0)
    shown = [(d["endpoint"], d["status"], d["attempt"], d["failure_class"]) for d in half["deliveries"]]
    assert shown == [("a", "dead", 1, "receiver"), ("b", "pending", 0, None)]


def test_what_comes_meanwhile_changes_no_page_that_follows(conn: Connection) -> None:
    """The second page begins where the first one ended, however many came since."""
    for n in range(6):
        accept(conn, event_id=f"e{n}")
    first = listing.page(conn, Wanted(), limit=3)
    for n in range(6, 9):
        accept(conn, event_id=f"e{n}")
    second = listing.page(conn, Wanted(), limit=3, before=first.before)
    assert ids(first.events + second.events) == ["e5", "e4", "e3", "e2", "e1", "e0"]
    assert listing.page(conn, Wanted(), limit=3, before=second.before) == ([], None)


def test_a_page_looks_at_a_bounded_number_of_events_and_says_where_it_stopped(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind many that do not match, the one that does is found by going on."""
    accept(conn, event_id="old", event_type="rare")
    for _ in range(9):
        accept(conn)
    monkeypatch.setattr(listing, "LOOK", 4)
    first = listing.page(conn, Wanted(event_type="rare"), limit=5)
    assert (first.events, first.before) == ([], 7)
    assert ids(walked(conn, Wanted(event_type="rare"))) == ["old"]
    assert len(walked(conn, Wanted())) == 10


def spread(conn: Connection, moments: list[datetime]) -> None:
    """Events accepted at these times, in this order; every third place in the order is missing."""
    accepted = events.insert(conn, [new_event() for _ in range(3 * len(moments) // 2 + 1)])
    kept = [a.seq for a in accepted if a.seq % 3][: len(moments)]
    conn.execute("DELETE FROM event WHERE seq <> ALL(%s)", (kept,))
    for seq, moment in zip(kept, moments, strict=True):
        conn.execute("UPDATE event SET created_at = %s, event_id = %s WHERE seq = %s", (moment, moment.isoformat(), seq))


BASE = datetime(2026, 1, 1, tzinfo=UTC)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.integers(0, 600), min_size=1, max_size=40),
    jitter=st.lists(st.integers(-50, 50), min_size=40, max_size=40),
    since=st.none() | st.integers(-100, 12_000),
    until=st.none() | st.integers(-100, 12_000),
)
def test_times_are_found_though_they_are_a_little_out_of_order(
    conn: Connection, steps: list[int], jitter: list[int], since: int | None, until: int | None
) -> None:
    """Exactly the events within the two times are shown, the first included, the second not, whatever gaps there are."""
    conn.execute("TRUNCATE event CASCADE")
    at, moments = 0, []
    for step, shake in zip(steps, jitter, strict=False):
        at += step
        moments.append(BASE + timedelta(seconds=at + shake, microseconds=len(moments)))
    spread(conn, moments)
    low = None if since is None else BASE + timedelta(seconds=since)
    high = None if until is None else BASE + timedelta(seconds=until)
    expected = [m.isoformat() for m in moments if (low is None or m >= low) and (high is None or m < high)]
    assert ids(walked(conn, Wanted(since=low, until=high), limit=7)) == expected[::-1]
    assert ids(walked(conn, Wanted(since=low, until=high, source="shop"), limit=7)) == expected[::-1]


def test_a_list_of_nothing_is_empty(conn: Connection) -> None:
    """Without any event there is no page, also between two times."""
    assert listing.page(conn, Wanted(since=BASE, until=BASE), limit=3) == ([], None)


def test_the_first_moment_is_included_and_the_second_is_not(conn: Connection) -> None:
    """Among events ten seconds apart, those from one to another, for each pair."""
    moments = [BASE + timedelta(seconds=10 * n) for n in range(40)]
    spread(conn, moments)
    for low in range(0, 40, 3):
        for high in range(low, 40, 5):
            found = ids(listing.page(conn, Wanted(since=moments[low], until=moments[high]), limit=50).events)
            assert found == [m.isoformat() for m in moments[low:high]][::-1]


@pytest.mark.parametrize("wanted", [Wanted(trace_id="mine"), Wanted(source="mine")], ids=str)
def test_the_list_of_a_trace_or_a_source_looks_at_nothing_else(
    conn: Connection, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> None:
    """Among many others its one page is complete."""
    for n in range(10):
        accept(conn, source=f"a{n}", trace_id=f"a{n}")
    accept(conn, source="mine", trace_id="mine")
    for n in range(10):
        accept(conn, source=f"z{n}", trace_id=f"z{n}")
    monkeypatch.setattr(listing, "LOOK", 3)
    page = listing.page(conn, wanted, limit=2)
    assert (len(page.events), page.before) == (1, None)
