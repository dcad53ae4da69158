"""What a person ends: one event where it stands, and all that waits for an endpoint in bounded pages; with one audit row."""

import pytest

from madeira.errors import IllegalTransition
from madeira.records import DeliveryRef
from madeira.states import DeliveryStatus, EventStatus
from madeira.store import cancelling
from tests.store.making import (
    GIVE_UP,
    RETRY,
    Connection,
    claimed,
    counts_agree,
    delivery,
    event,
    expire,
    log_of,
    routed,
    settled,
)


def sweep(conn: Connection, endpoint: str = "a", limit: int = 2) -> cancelling.Sweep:
    done = cancelling.Sweep(endpoint, "ann", "gone for good")
    while not done.complete:
        done.go_on(conn, limit)
    return done


def test_all_that_is_unfinished_of_an_endpoint_ends_and_nothing_else(conn: Connection) -> None:
    """What waits is cancelled, what is being called is asked to end, other endpoints' deliveries go on."""
    refs = [routed(conn, ("a", "b")) for _ in range(5)]
    calling = claimed(conn, refs[0][0])
    expired = claimed(conn, refs[1][0])
    expire(conn, expired.delivery_id)
    done = sweep(conn)
    assert (done.cancelled, done.requested, done.known) == (4, 1, True)
    assert {delivery(conn, pair[0].delivery_id)["status"] for pair in refs[1:]} == {"cancelled"}
    assert delivery(conn, calling.delivery_id)["cancel_requested_at"] is not None
    assert {delivery(conn, pair[1].delivery_id)["status"] for pair in refs} == {"pending"}
    assert delivery(conn, refs[4][0].delivery_id)["last_error"] == "cancelled with all of a by ann: gone for good"
    assert counts_agree(conn)
    assert {event(conn, pair[0].seq)["status"] for pair in refs} == {"delivering"}
    rows = conn.execute("SELECT who, action, what, why, detail FROM audit").fetchall()
    assert rows == [
        ("ann", "cancel", "endpoint a", "gone for good", {"cancelled": 4, "requested": 1, "complete": True}),
    ]


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_no_page_is_larger_than_was_asked_for_and_none_is_left_out(conn: Connection, limit: int) -> None:
    """Pages of any size together meet each delivery once."""
    refs = {routed(conn)[0].delivery_id for _ in range(7)}
    after: int | None = 0
    ended: list[int] = []
    while after is not None:
        page = cancelling.cancel_endpoint(conn, "a", after, limit, "ann", None)
        assert len(page.cancelled) <= limit
        ended += [ref.delivery_id for ref in page.cancelled]
        after = page.after_id
    assert ended == sorted(refs)


def test_a_page_looks_at_a_bounded_part_of_the_backlog(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many deliveries to others a page may find none, and says where to go on."""
    monkeypatch.setattr(cancelling, "LOOK", 3)
    for _ in range(4):
        routed(conn, ("b",))
    [mine] = routed(conn, ("a",))
    first = cancelling.cancel_endpoint(conn, "a", 0, 10, "ann", None)
    assert first.cancelled == []
    assert first.after_id is not None
    second = cancelling.cancel_endpoint(conn, "a", first.after_id, 10, "ann", None)
    assert (second.cancelled, second.after_id) == ([mine], None)


def test_what_was_cancelled_is_on_record_before_the_sweep_is_complete(conn: Connection) -> None:
    """A process that dies between two pages leaves an audit row that says how far it came."""
    for _ in range(3):
        routed(conn)
    begun = cancelling.Sweep("a", "ann", "gone")
    begun.go_on(conn, 2)
    assert conn.execute("SELECT detail FROM audit").fetchall() == [({"cancelled": 2, "requested": 0, "complete": False},)]


def test_an_endpoint_that_nobody_knows_leaves_no_trace(conn: Connection) -> None:
    """A name that is neither configured nor waited for is told as unknown; a known one is on record with nought."""
    assert not sweep(conn, "nobody").known
    assert conn.execute("SELECT count(*) FROM audit").fetchone() == (0,)
    assert sweep(conn, "callback").known
    assert conn.execute("SELECT detail -> 'cancelled' FROM audit").fetchall() == [(0,)]


def test_what_was_asked_to_end_ends_when_its_worker_is_gone(conn: Connection) -> None:
    """Only that: neither what a living worker still calls, nor what nobody asked to end, nor what waits."""
    refs = [routed(conn)[0] for _ in range(4)]
    gone, alive, unasked = (claimed(conn, ref) for ref in refs[:3])
    for claim in (gone, alive):
        assert cancelling.cancel(conn, "shop", claim.event_id, "ann", None) is not None
    for claim in (gone, unasked):
        expire(conn, claim.delivery_id)
    ended = cancelling.end_abandoned(conn, 10)
    assert [ref.delivery_id for ref in ended] == [gone.delivery_id]
    assert [delivery(conn, ref.delivery_id)["status"] for ref in refs] == ["cancelled", "delivering", "delivering", "pending"]
    assert event(conn, gone.seq)["status"] == "cancelled"
    assert counts_agree(conn)
    assert cancelling.end_abandoned(conn, 10) == []


def test_cancel_ends_what_waits_and_asks_what_is_called(conn: Connection) -> None:
    """Pending: cancelled at once. Delivering: asked. A claim whose lease has run out: ended, and the log says so."""
    waits, called, expired = routed(conn, ["a", "b", "c"], event_id="one")
    held = claimed(conn, called)
    claimed(conn, expired)
    expire(conn, expired.delivery_id)
    result = cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    assert result is not None
    assert (result.status, result.requested) == (EventStatus.DELIVERING, 1)
    assert result.cancelled == [DeliveryRef(ref.delivery_id, ref.seq, ref.lane) for ref in (waits, expired)]
    assert log_of(conn, expired.delivery_id) == [(1, "lost", "cancelled")]
    assert delivery(conn, called.delivery_id)["cancel_requested_at"] is not None
    assert counts_agree(conn)
    again = cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    assert again is not None
    assert (again.cancelled, again.requested) == ([], 1)
    assert settled(conn, held, RETRY).status == DeliveryStatus.CANCELLED
    assert event(conn, waits.seq)["status"] == "cancelled"
    assert counts_agree(conn)


def test_cancel_leaves_an_audit_row(conn: Connection) -> None:
    """Who, what, why, how many."""
    routed(conn, ["a", "b"], event_id="one")
    cancelling.cancel(conn, "shop", "one", "ann", "wrong price")
    row = conn.execute("SELECT who, action, what, why, detail FROM audit").fetchone()
    detail = {"cancelled": 2, "requested": 0, "status": "cancelled"}
    assert row == ("ann", "cancel", "event shop/one", "wrong price", detail)


def test_what_is_finished_cannot_be_cancelled(conn: Connection) -> None:
    """A dead event stays dead, and no audit row claims otherwise; an unknown one is None."""
    [ref] = routed(conn, event_id="one")
    settled(conn, claimed(conn, ref), GIVE_UP)
    with pytest.raises(IllegalTransition, match="dead already"):
        cancelling.cancel(conn, "shop", "one", "ann", None)
    assert conn.execute("SELECT count(*) FROM audit").fetchone() == (0,)
    assert cancelling.cancel(conn, "shop", "two", "ann", None) is None
