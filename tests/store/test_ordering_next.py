"""Order: whoever ends a delivery tells which one follows, and only the first of a key is queued, overdue or looked for."""

from collections.abc import Callable
from typing import Any

import pytest

from madeira.records import DeliveryRef
from madeira.states import MAX_LOST
from madeira.store import erase, ordering, reconcile
from madeira.store.deliveries import settle
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    accept,
    claimed,
    delivery,
    settled,
    verdict,
)
from tests.store.ordered import (
    born,
    cancel,
    died,
    id_of,
    play_again,
    refused,
    routes,  # noqa: F401  # a fixture of every test here
    run_out,
    succeeded,
)


@pytest.mark.parametrize(("decision", "follows"), [(SUCCESS, True), (GIVE_UP, True), (RETRY, False)])
def test_a_settle_tells_who_comes_next(conn: Connection, decision: Any, follows: bool) -> None:
    """A success or a death lets the next one go, a retry keeps its place; also when the reply was lost and it is asked again."""
    first, second = born(conn), born(conn)
    born(conn)
    request = verdict(claimed(conn, first), decision)
    for _ in range(2):
        [answer] = settle(conn, [request])
        assert id_of(answer.first) == (second.delivery_id if follows else None)


def test_a_retry_tells_of_what_was_replayed_in_front_of_it(conn: Connection) -> None:
    """It was refused while this one was in hand, and would be nowhere."""
    first, second = born(conn), born(conn)
    died(conn, first)
    held = claimed(conn, second)
    play_again(conn, first)
    assert refused(conn, first).first is None
    assert id_of(settled(conn, held, RETRY).first) == first.delivery_id


def test_settles_of_several_keys_in_one_group_tell_each_its_next(conn: Connection) -> None:
    pairs = [(born(conn, key), born(conn, key)) for key in ("x", "y")]
    alone, unordered = born(conn, "z"), born(conn, None)
    requests = [verdict(claimed(conn, ref)) for ref in (*(one for one, _ in pairs), alone, unordered)]
    assert [id_of(a.first) for a in settle(conn, requests)] == [*(two.delivery_id for _, two in pairs), None, None]


@pytest.mark.parametrize("ended", [succeeded, died, cancel])
def test_a_refused_claim_of_what_has_ended_tells_who_comes_next(
    conn: Connection, ended: Callable[[Connection, DeliveryRef], None]
) -> None:
    """Whoever ended it may have died before it could tell."""
    first, second = born(conn), born(conn)
    ended(conn, first)
    answer = refused(conn, first)
    assert answer.reason in ("finished", "cancelled")
    assert id_of(answer.first) == second.delivery_id


def test_a_claim_that_ends_what_was_lost_too_often_tells_who_comes_next(conn: Connection) -> None:
    first, second = born(conn), born(conn)
    for _ in range(MAX_LOST):
        run_out(conn, first)
    answer = refused(conn, first)
    assert (answer.reason, id_of(answer.first)) == ("died", second.delivery_id)


def test_what_follows_on_a_cancelled_one_is_asked_for_afterwards(conn: Connection) -> None:
    """The next of the key; the first, where it was not the first that was cancelled; nothing while a worker holds one."""
    one, two, three = born(conn), born(conn), born(conn)
    unordered = born(conn, None)
    cancel(conn, one)
    assert [r.delivery_id for r in ordering.following(conn, [one, unordered])] == [two.delivery_id]
    cancel(conn, three)
    assert [r.delivery_id for r in ordering.following(conn, [three])] == [two.delivery_id]
    claimed(conn, two)
    assert ordering.following(conn, [one, three]) == []


def test_of_an_endpoint_the_first_of_each_key_are_told(conn: Connection) -> None:
    """What waits after all of an endpoint was cancelled came while that went on."""
    refs = {key: [born(conn, key) for _ in range(2)] for key in ("x", "y")}
    born(conn, "x", "b")
    born(conn, None)
    found = ordering.of_endpoint(conn, "a", 10)
    assert {(r.delivery_id, r.line) for r in found} == {(one.delivery_id, "fresh") for one, _ in refs.values()}


def test_only_the_first_of_a_key_is_to_be_queued(conn: Connection) -> None:
    """Routing, a replay and a reconcile leave the others out."""
    first, second = born(conn), born(conn)
    unordered = born(conn, None)
    refs = [first, second, unordered]
    assert ordering.leading(conn, refs) == [first, unordered]
    page = reconcile.unfinished_deliveries(conn, 0, 10)
    assert [(row.ref.delivery_id, row.is_ordered, row.is_first) for row in page] == [
        (first.delivery_id, True, True),
        (second.delivery_id, True, False),
        (unordered.delivery_id, False, True),
    ]
    assert reconcile.not_first_among(conn, [r.delivery_id for r in refs]) == {second.delivery_id}
    claimed(conn, first)
    assert ordering.leading(conn, refs) == [first, unordered]


def test_what_waits_behind_another_one_is_not_overdue(conn: Connection) -> None:
    """However many there are, they do not hide what is."""
    first = born(conn)
    for _ in range(20):
        born(conn)
    lonely = born(conn, "other")
    conn.execute("UPDATE delivery SET next_attempt_at = now() - interval '1 h', updated_at = now() - interval '1 h'")
    assert {row.ref.delivery_id for row in reconcile.overdue(conn, 4)} == {first.delivery_id, lonely.delivery_id}


def test_the_next_of_a_key_is_found_by_what_ended_lately(conn: Connection) -> None:
    """It has not changed itself since it was born, so nothing else would find it soon."""
    first, second = born(conn), born(conn)
    succeeded(conn, born(conn, "done"))
    succeeded(conn, first)
    found = ordering.after_recent(conn, 300.0, 10, older_than_s=0.0)
    assert [(r.delivery_id, r.line) for r in found] == [(second.delivery_id, "fresh")]
    assert ordering.after_recent(conn, 300.0, 10, older_than_s=60.0) == []


def test_it_is_told_what_a_delivery_waits_for(conn: Connection) -> None:
    """The event of the first of its key and how many come before; or an event that is not routed yet."""
    first = born(conn, event_id="one")
    second, third = born(conn, event_id="two"), born(conn, event_id="three")
    assert ordering.waits(conn, first.seq) == {}
    assert ordering.waits(conn, second.seq) == {second.delivery_id: ordering.Wait("shop", "one", 1)}
    assert ordering.waits(conn, third.seq) == {third.delivery_id: ordering.Wait("shop", "one", 2)}
    accept(conn, event_id="stuck")
    ref = born(conn, "other")
    assert ordering.waits(conn, ref.seq) == {ref.delivery_id: ordering.Wait("shop", "stuck", 0)}


def test_an_erased_event_keeps_no_key(conn: Connection) -> None:
    """It may have been made of what is to be forgotten."""
    ref = born(conn, "ann@example.com", event_id="one")
    succeeded(conn, ref)
    erase.erase(conn, "shop", "one", "ann", "asked to")
    assert delivery(conn, ref.delivery_id)["ordering_key"] is None
