"""Dead letters are shown once each, the latest first, by bounded work however many there are."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from madeira.states import ErrorCode, FailureClass, Outcome
from madeira.store import dead_letters, replay, routing
from madeira.store.dead_letters import Place
from madeira.store.selection import Selection
from tests.store import making
from tests.store.making import GIVE_UP, RETRY, Connection, claimed, died, make_due, routed, settled

BASE = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(conn: Connection, delivery_id: int, minutes: float) -> None:
    """Let a delivery have died so many minutes after the beginning."""
    conn.execute("UPDATE delivery SET died_at = %s WHERE id = %s", (BASE + timedelta(minutes=minutes), delivery_id))


def walked(conn: Connection, selection: Selection, limit: int = 2) -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    after: Place | None = None
    while True:
        page = dead_letters.page(conn, selection, limit=limit, after=after)
        assert len(page.items) <= limit
        found += page.items
        if page.after is None:
            return found
        assert after is None or page.after < after
        after = page.after


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [item["event_id"] for item in found]


@pytest.fixture
def cast(conn: Connection) -> Connection:
    """Five dead letters, not in the order in which they were made; two of them died at the same moment."""
    for minutes, (event_id, endpoint, code, words, fields) in {
        1: ("one", "a", "http_404", "the receiver answered 404", {}),
        4: ("two", "b", "http_503", "gave up: the receiver answered 503", {"event_type": "order.paid.twice"}),
        3: ("three", "a", "dns", "no such host", {"source": "other", "event_type": "orders"}),
        2: ("four", "b", "http_503", "gave up: the receiver answered 503", {}),
    }.items():
        at(conn, died(conn, event_id, endpoint, code, words, **fields), minutes)
    at(conn, died(conn, "five", "b", "http_503", "gave up: the receiver answered 503", source="other"), 4)
    routed(conn, ("a",), event_id="alive")
    [ref] = routed(conn, ("a",), event_id="done")
    settled(conn, claimed(conn, ref))
    return conn


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["five", "two", "three", "four", "one"]),
        (Selection(endpoint="b"), ["five", "two", "four"]),
        (Selection(endpoint="c"), []),
        (Selection(source="other"), ["five", "three"]),
        (Selection(event_type="order.*"), ["five", "two", "four", "one"]),
        (Selection(failure_class=FailureClass.NETWORK), []),
        (Selection(error="http_503", source="shop"), ["two", "four"]),
        (Selection(since=BASE + timedelta(minutes=2)), ["five", "two", "three", "four"]),
        (Selection(until=BASE + timedelta(minutes=4)), ["three", "four", "one"]),
        (Selection(endpoint="b", since=BASE + timedelta(minutes=3), text="503"), ["five", "two"]),
        (Selection(event_ids=("one", "five", "alive")), ["five", "one"]),
    ],
    ids=str,
)
def test_a_list_holds_what_is_dead_and_selected_the_latest_first(
    cast: Connection, selection: Selection, expected: list[str]
) -> None:
    """Page by page or at once."""
    assert ids(walked(cast, selection)) == expected
    assert ids(walked(cast, selection, limit=1)) == expected
    assert ids(walked(cast, selection, limit=50)) == expected


def test_an_item_says_what_failed_since_when_and_how_often(conn: Connection) -> None:
    """Everything but the payload; the times are those of the first and of the last failed attempt."""
    [ref] = routed(conn, ("a",), event_id="one")
    settled(conn, claimed(conn, ref), RETRY)
    make_due(conn, ref.delivery_id)
    settled(conn, claimed(conn, ref), GIVE_UP)
    conn.execute("UPDATE delivery_log SET recorded_at = %s WHERE attempt = 1", (BASE,))
    conn.execute("UPDATE delivery_log SET recorded_at = %s WHERE attempt = 2", (BASE + timedelta(hours=1),))
    [item] = walked(conn, Selection())
    row = making.delivery(conn, ref.delivery_id)
    assert item == {
        "id": ref.delivery_id,
        "event_id": "one",
        "source": "shop",
        "event_type": "order.paid",
        "endpoint": "a",
        "routes": ["some route"],
        "failure_class": "receiver",
        "error_code": "http_503",
        "last_error": "400",
        "attempt": 2,
        "first_failed_at": BASE,
        "last_failed_at": BASE + timedelta(hours=1),
        "died_at": row["died_at"],
        "accepted_at": making.event(conn, ref.seq)["created_at"],
        "trace_id": row["trace_id"],
        "erased_at": None,
    }


def test_what_was_born_dead_failed_when_it_died(conn: Connection) -> None:
    """Nothing was attempted, and yet it is shown with its times."""
    plan = [making.PlannedDelivery("b", "b", (), FailureClass.TEMPLATE, "template: no such field", ErrorCode.TEMPLATE)]
    routing.route(conn, [(making.accept(conn), plan)])
    [item] = walked(conn, Selection())
    assert (item["attempt"], item["error_code"]) == (0, "template")
    assert item["first_failed_at"] == item["last_failed_at"] == item["died_at"]


def test_what_dies_or_is_replayed_meanwhile_changes_no_page_that_follows(cast: Connection) -> None:
    """The second page begins where the first one ended."""
    first = dead_letters.page(cast, Selection(), limit=2)
    died(cast, "late", "a", "http_404", "the receiver answered 404")
    replay.replay(cast, "shop", "two", "ann", "mended")
    second = dead_letters.page(cast, Selection(), limit=3, after=first.after)
    assert ids(second.items) == ["three", "four", "one"]
    assert ids(walked(cast, Selection())) == ["late", "five", "three", "four", "one"]


def test_a_page_looks_at_a_bounded_number_and_says_where_it_stopped(cast: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind many that are not selected, the one that is is found by going on."""
    monkeypatch.setattr(dead_letters, "LOOK", 2)
    first = dead_letters.page(cast, Selection(error="http_404"), limit=5)
    assert (first.items, first.after is None) == ([], False)
    assert ids(walked(cast, Selection(error="http_404"))) == ["one"]
    assert len(walked(cast, Selection())) == 5


def test_groups_say_how_many_died_of_what_where_and_since_when(cast: Connection) -> None:
    """The largest first, with what one of them says."""
    found = dead_letters.groups(cast, Selection(), limit=2)
    assert (found.counted, found.complete, len(found.groups)) == (5, True, 2)
    largest, next_one = found.groups
    example = dead_letters.find(cast, largest.pop("example"))
    assert largest == {
        "endpoint": "b",
        "error_code": "http_503",
        "count": 3,
        "first_died_at": BASE + timedelta(minutes=2),
        "last_died_at": BASE + timedelta(minutes=4),
        "failure_class": "receiver",
        "last_error": "gave up: the receiver answered 503",
    }
    assert (next_one["endpoint"], next_one["error_code"], next_one["count"]) == ("a", "dns", 1)
    assert example is not None
    assert (example["endpoint"], example["error_code"]) == ("b", "http_503")


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(endpoint="b"),
        Selection(source="other"),
        Selection(error="http_503", text="answered"),
        Selection(since=BASE + timedelta(minutes=2), until=BASE + timedelta(minutes=4)),
        Selection(event_ids=("one", "two")),
        Selection(text="nothing says this"),
    ],
    ids=str,
)
def test_groups_count_what_the_list_holds(cast: Connection, selection: Selection) -> None:
    counted = {(g["endpoint"], g["error_code"]): g["count"] for g in dead_letters.groups(cast, selection, limit=50).groups}
    assert counted == Counter((item["endpoint"], item["error_code"]) for item in walked(cast, selection))


def test_groups_count_a_bounded_number_of_the_latest_and_say_so(cast: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "COUNTED", 3)
    monkeypatch.setattr(dead_letters, "COUNTED_WITH_EVENT", 2)
    found = dead_letters.groups(cast, Selection(), limit=50)
    assert ([g["count"] for g in found.groups], found.counted, found.complete) == ([2, 1], 3, False)
    assert dead_letters.groups(cast, Selection(source="nobody"), limit=50) == dead_letters.Groups([], 0, 2, complete=False)
    assert dead_letters.groups(cast, Selection(endpoint="a"), limit=50).complete


def test_one_dead_letter_shows_every_attempt_in_the_order_of_time(conn: Connection) -> None:
    [ref] = routed(conn, ("a",))
    settled(conn, claimed(conn, ref), RETRY)
    make_due(conn, ref.delivery_id)
    settled(conn, claimed(conn, ref), GIVE_UP)
    found = dead_letters.find(conn, ref.delivery_id)
    assert found is not None
    assert [(a["attempt"], a["outcome"]) for a in found["attempts"]] == [(1, Outcome.RETRYABLE), (2, Outcome.PERMANENT)]
    assert {k: v for k, v in found.items() if k != "attempts"} == walked(conn, Selection())[0]


def test_what_is_not_dead_is_no_dead_letter(cast: Connection) -> None:
    """Neither what is alive, nor what is not there, nor what was replayed."""
    [one] = [item["id"] for item in walked(cast, Selection()) if item["event_id"] == "one"]
    assert dead_letters.find(cast, one) is not None
    replay.replay(cast, "shop", "one", "ann", "mended")
    assert dead_letters.find(cast, one) is None
    assert dead_letters.find(cast, 2**62) is None


# -- what it costs ---------------------------------------------------------------------------------------------------

#: Dead letters of the backlog, each beside two deliveries that succeeded.
BACKLOG = 4_000


@pytest.fixture
def backlog(conn: Connection) -> Connection:
    """Many dead letters of ten endpoints, a second apart, in tables that Postgres has not counted."""
    conn.execute("ALTER TABLE delivery SET (autovacuum_enabled = false)")
    conn.execute("SET session_replication_role = replica")
    conn.execute(
        """
        INSERT INTO event (source, event_id, event_type, payload, body_sha256, trace_id, status, routed_at, deliveries, dead)
        SELECT 'shop', 'e' || n, 'order.paid', '1', sha256(''), 't', 'dead', now(), 3, 1 FROM generate_series(1, %s) n
        """,
        (BACKLOG,),
    )
    conn.execute(
        """
        INSERT INTO delivery (event_seq, endpoint, lane, status, finished_at, died_at, failure_class, last_error,
                              last_error_code, trace_id)
        SELECT seq, 'e' || (seq + n) %% 10, 'a', CASE n WHEN 1 THEN 'dead' ELSE 'succeeded' END, now(),
               CASE n WHEN 1 THEN %s::timestamptz + seq * interval '1 s' END, CASE n WHEN 1 THEN 'receiver' END, 'no', 'dns', 't'
        FROM event, generate_series(1, 3) n
        """,
        (BASE,),
    )
    conn.execute("SET session_replication_role = DEFAULT")
    return conn


#: Rows read so far: in all, and by walking through whole tables.
READ = """
    SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::integer, sum(seq_tup_read)::integer FROM pg_stat_xact_user_tables
"""

#: Rows of deliveries changed so far: in all, and without writing an index.
CHANGED = """
    SELECT pg_stat_get_xact_tuples_updated('delivery'::regclass), pg_stat_get_xact_tuples_hot_updated('delivery'::regclass)
"""


@contextmanager
def counting(conn: Connection, statement: str) -> Iterator[list[int]]:
    """Afterwards the list holds by how much the numbers rose within the block."""
    risen: list[int] = []
    with conn.transaction():
        before = conn.execute(statement.encode()).fetchone()
        yield risen
        after = conn.execute(statement.encode()).fetchone()
    assert before is not None
    assert after is not None
    risen += [high - low for low, high in zip(before, after, strict=True)]


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(endpoint="e3"),
        Selection(endpoint="nobody"),
        Selection(until=BASE + timedelta(seconds=BACKLOG // 2)),
        Selection(endpoint="e3", until=BASE + timedelta(seconds=BACKLOG // 2)),
        Selection(event_type="order.*", error="dns", text="NO"),
    ],
    ids=str,
)
def test_a_page_reads_hardly_more_than_it_shows_wherever_it_is(backlog: Connection, selection: Selection) -> None:
    """The first one, and the last one."""
    with counting(backlog, READ) as read:
        first = dead_letters.page(backlog, selection, limit=50)
    assert len(first.items) == 50 or selection.endpoint == "nobody"
    assert (read[0] < 150, read[1]) == (True, 0), read
    with counting(backlog, READ) as read:
        dead_letters.page(backlog, selection, limit=50, after=Place(BASE + timedelta(seconds=20), 0))
    assert (read[0] < 150, read[1]) == (True, 0), read


def test_a_search_looks_at_dead_letters_only(backlog: Connection) -> None:
    """One that finds nothing among them reads each with its event, once more for where it stopped, and nothing that succeeded."""
    with counting(backlog, READ) as read:
        assert dead_letters.page(backlog, Selection(text="nothing"), limit=50) == ([], None)
    assert 2 * BACKLOG <= read[0] < 3 * BACKLOG + 50


def test_groups_of_all_are_counted_in_the_index_alone(backlog: Connection) -> None:
    """Once the table was vacuumed, as it is by itself."""
    backlog.execute("VACUUM delivery")
    with counting(backlog, READ) as read:
        assert dead_letters.groups(backlog, Selection(), limit=50).counted == BACKLOG
    assert (read[0] < 100, read[1]) == (True, 0), read


def test_a_claim_of_what_has_failed_before_writes_no_index(conn: Connection) -> None:
    """What dead letters are found by stays as it is until the verdict."""
    died(conn, "one", "a", "http_404", "the receiver answered 404")
    [ref] = replay.replay(conn, "shop", "one", "ann", "mended").refs  # type: ignore[union-attr]
    with counting(conn, CHANGED) as changed:
        claimed(conn, ref)
    assert changed == [1, 1]
