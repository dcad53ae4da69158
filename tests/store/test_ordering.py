"""Order: of an endpoint and key one delivery after another, in the order in which their events were accepted."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from threading import Barrier, Thread
from typing import Any

import psycopg
import pytest

from madeira.records import Claimed, DeliveryRef, PlannedDelivery, Refused
from madeira.store import cancelling, ordering, replay, routing
from madeira.store.claims import ClaimRequest, claim
from tests.store.making import (
    RETRY,
    SUCCESS,
    Connection,
    accept,
    claimed,
    counts_agree,
    delivery,
    event,
    make_due,
    settled,
    token,
)
from tests.store.ordered import (
    ask,
    born,
    cancel,
    died,
    id_of,
    may_go,
    play_again,
    refused,
    retrying,
    route,
    routes,  # noqa: F401  # a fixture of every test here
    run_out,
    succeeded,
    taken,
    untouched,
)
from tests.store.waiting import at_once, good, until, waits_for_a_lock

LATER = timedelta(hours=1)


# -- what a claim may have -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happened", "goes"),
    [(untouched, False), (retrying, False), (taken, False), (run_out, False), (succeeded, True), (died, True), (cancel, True)],
)
@pytest.mark.parametrize(
    ("key", "endpoint", "same"), [("k", "a", True), ("other", "a", False), ("k", "b", False), (None, "a", False)]
)
def test_a_delivery_goes_when_none_before_it_in_its_key_is_unfinished(
    conn: Connection,
    happened: Callable[[Connection, DeliveryRef], None],
    goes: bool,
    key: str | None,
    endpoint: str,
    same: bool,
) -> None:
    """A retry keeps its place, however long it waits; what ended lets the next one go. Other keys and endpoints are free."""
    earlier, later = born(conn), born(conn, key, endpoint)
    happened(conn, earlier)
    if goes or not same:
        assert may_go(conn, later)
        return
    answer = refused(conn, later)
    assert answer.reason == "behind"
    held = happened is taken
    assert id_of(answer.first) == (None if held else earlier.delivery_id), "what is held needs no queueing"


def test_what_is_behind_hears_when_the_first_is_due(conn: Connection) -> None:
    """So that queueing it does not bring its retry forward."""
    earlier, later = born(conn), born(conn)
    retrying(conn, earlier)
    first = refused(conn, later).first
    assert first is not None
    assert (first.delivery_id, first.seq, first.lane, first.line) == (earlier.delivery_id, earlier.seq, "a", "retry")
    assert 50 < first.delay_s <= 60


def test_a_whole_key_goes_in_the_order_of_acceptance_whatever_the_order_of_routing(conn: Connection) -> None:
    """Routed backwards, claimed in any order: each time exactly the next one is granted."""
    seqs = [accept(conn) for _ in range(6)]
    refs = [route(conn, seq) for seq in reversed(seqs)]
    went = []
    while len(went) < len(seqs):
        answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])
        [held] = [a for a in answers if isinstance(a, Claimed)]
        went.append(held.seq)
        settled(conn, held)
    assert went == seqs


def reroute(conn: Connection, seq: int) -> None:
    """An event that found no route is to be routed again."""
    routing.route(conn, [(seq, [])])
    row = event(conn, seq)
    assert replay.reroute(conn, row["source"], row["event_id"], "ann", "mended")


def unroutable(conn: Connection, seq: int) -> None:
    for _ in range(10):
        routing.count_route_failure(conn, seq)


def has_come_due(conn: Connection, seq: int) -> None:
    conn.execute("UPDATE event SET route_at = clock_timestamp() - interval '0.3 s' WHERE seq = %s", (seq,))


def cancel_event(conn: Connection, seq: int) -> None:
    cancelling.cancel(conn, "shop", event(conn, seq)["event_id"], "ann", None)


def wait_on(conn: Connection, seq: int) -> None:
    """Leave it as it was accepted."""


@pytest.mark.parametrize(
    ("fields", "happened", "blocks"),
    [
        ({}, wait_on, True),
        ({}, reroute, True),
        ({}, cancel_event, False),
        ({}, unroutable, False),
        ({"source": "second"}, wait_on, True),
        ({"source": "other"}, wait_on, False),
        ({"deliver_at": datetime.now(UTC) + LATER}, wait_on, False),
        ({"deliver_at": datetime.now(UTC) + LATER}, has_come_due, True),
        ({"deliver_at": datetime.now(UTC) + LATER, "source": "second"}, has_come_due, True),
        ({"deliver_at": datetime.now(UTC) + LATER, "source": "other"}, has_come_due, False),
    ],
    ids=[
        *("waits", "rerouted", "cancelled", "unroutable", "of a second source", "of a source that leads elsewhere"),
        *("not due", "due", "due of a second source", "due of a source that leads elsewhere"),
    ],
)
def test_a_delivery_waits_for_the_routing_of_what_came_before(
    conn: Connection, fields: dict[str, Any], happened: Callable[[Connection, int], None], blocks: bool
) -> None:
    """If a route leads from its source to the endpoint, and it is due: nobody knows yet whether it is the first of a key."""
    earlier = accept(conn, **fields)
    happened(conn, earlier)
    ref = born(conn)
    if not blocks:
        assert may_go(conn, ref)
        return
    answer = refused(conn, ref)
    assert (answer.reason, answer.first) == ("unrouted", None)
    assert 0.1 <= answer.delay_s <= 1.0
    routing.route(conn, [(earlier, [PlannedDelivery("b", "b")])])
    assert may_go(conn, ref)


def test_what_came_later_need_not_be_routed(conn: Connection) -> None:
    ref = born(conn)
    accept(conn)
    assert may_go(conn, ref)


def test_a_route_without_a_source_leads_from_every_source(conn: Connection) -> None:
    accept(conn, source="whoever")
    assert refused(conn, born(conn, endpoint="c")).reason == "unrouted"


def test_what_has_no_key_waits_for_nothing(conn: Connection) -> None:
    """Neither for deliveries nor for the routing of events."""
    accept(conn)
    born(conn)
    assert may_go(conn, born(conn, None))


def test_the_longer_routing_takes_the_longer_one_waits(conn: Connection) -> None:
    """A tenth of a second for what came just now, a second for what is stuck."""
    earlier = accept(conn)
    ref = born(conn)
    assert refused(conn, ref).delay_s < 1.0
    conn.execute("UPDATE event SET route_at = clock_timestamp() - interval '1 h' WHERE seq = %s", (earlier,))
    assert refused(conn, ref).delay_s == 1.0


# -- takeovers and replays -------------------------------------------------------------------------------------------


def test_a_takeover_keeps_its_place(conn: Connection) -> None:
    """The one whose worker died is called again before anything else of its key."""
    first, second = born(conn), born(conn)
    run_out(conn, first)
    assert id_of(refused(conn, second).first) == first.delivery_id
    settled(conn, claimed(conn, first))
    assert may_go(conn, second)


def test_what_was_begun_is_taken_over_before_what_was_replayed_in_front_of_it(conn: Connection) -> None:
    """Else the two would wait for each other: its call may have been made already."""
    first, second = born(conn), born(conn)
    died(conn, first)
    run_out(conn, second)
    play_again(conn, first)
    answer = refused(conn, first)
    assert (answer.reason, id_of(answer.first)) == ("behind", second.delivery_id)
    assert id_of(settled(conn, claimed(conn, second)).first) == first.delivery_id
    assert may_go(conn, first)


def test_a_replayed_one_goes_by_its_seq_among_the_unfinished(conn: Connection) -> None:
    """Before those that came later, behind those that came earlier, after the one that is in hand."""
    one, two, three, four = (born(conn) for _ in range(4))
    died(conn, one)
    died(conn, two)
    held = claimed(conn, three)
    assert ordering.leading(conn, [play_again(conn, two)]) == [], "what is in hand ends first"
    assert ordering.leading(conn, [play_again(conn, one)]) == []
    for ref, follows in ((one, one), (two, two), (four, four)):
        now = settled(conn, held)
        assert id_of(now.first) == follows.delivery_id
        for other in {one, two, four} - {ref}:
            assert not may_go(conn, other)
        held = claimed(conn, ref)
    assert settled(conn, held).first is None


def test_dead_letters_replayed_in_any_order_go_in_the_order_of_acceptance(conn: Connection) -> None:
    refs = [born(conn) for _ in range(10)]
    for ref in refs:
        died(conn, ref)
    chance = Random(46)
    for ref in chance.sample(refs, len(refs)):
        play_again(conn, ref)
    went: list[int] = []
    while len(went) < len(refs):
        free = [a for ref in chance.sample(refs, len(refs)) if isinstance(a := ask(conn, ref), Claimed)]
        assert len(free) == 1
        settled(conn, free[0], RETRY if len(went) == 3 and free[0].failures == 0 else SUCCESS)
        if delivery(conn, free[0].delivery_id)["status"] == "pending":
            make_due(conn, free[0].delivery_id)
        else:
            went.append(free[0].seq)
    assert went == [ref.seq for ref in refs]
    assert counts_agree(conn)


# -- two at the same instant -----------------------------------------------------------------------------------------


def test_two_claims_of_one_key_that_cannot_see_each_other_do_not_both_get_it(several: list[Connection], conn: Connection) -> None:
    """One claim is under way and not committed; what was replayed in front of it is claimed; only an index knows of both."""
    first, second, other = born(conn), born(conn), born(conn, "other")
    died(conn, first)
    answers: list[Claimed | Refused] = []

    def claim_first() -> None:
        answers.extend(claim(several[1], [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in (first, other)]))

    with several[0].transaction():
        held = claimed(several[0], second)
        play_again(conn, first)
        thread = Thread(target=claim_first)
        thread.start()
        until(lambda: waits_for_a_lock(conn, "tests"))
    thread.join()
    mine, free = answers
    assert mine == Refused("behind")
    assert isinstance(free, Claimed), "what else is in the group is claimed"
    assert id_of(settled(conn, held).first) == first.delivery_id
    assert may_go(conn, first)


def test_a_settle_and_a_routing_at_the_same_instant_do_not_both_overlook_the_next_one(
    several: list[Connection], conn: Connection
) -> None:
    """Each asks after its own commit who is the first: whichever comes later tells of it."""
    for _ in range(60):
        held = claimed(conn, born(conn))
        seq = accept(conn)

        def tell_of_routed(seq: int = seq) -> list[int]:
            return [r.delivery_id for r in ordering.leading(several[0], [route(several[0], seq)])]

        now, told = good(at_once(partial(settled, several[1], held), tell_of_routed))
        [next_one] = [row[0] for row in conn.execute("SELECT id FROM delivery WHERE event_seq = %s", (seq,))]
        assert next_one in {id_of(now.first), *told}
        succeeded(conn, DeliveryRef(next_one, seq, "a"))


def replay_and_claim(conn: Connection, refs: list[DeliveryRef], go: Barrier) -> list[Claimed | Refused]:
    """Replay dead deliveries, then claim them when all are ready."""
    for ref in refs:
        play_again(conn, ref)
    go.wait()
    return claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])


def claim_and_linger(conn: Connection, refs: list[DeliveryRef], go: Barrier) -> list[Claimed | Refused]:
    """Claim deliveries, and commit it only when all are ready."""
    with conn.transaction():
        answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])
        go.wait()
    return answers


def test_many_at_once_never_hold_two_of_a_key_and_none_fails(several: list[Connection], conn: Connection) -> None:
    """Groups over the same keys in different orders, some of them replayed just now: collisions are nobody's error."""
    chance = Random(7)
    for n in range(30):
        early, late = [], []
        for key in range(6):
            early.append(born(conn, f"{n} {key}"))
            died(conn, early[-1])
            late.append(born(conn, f"{n} {key}"))
        mine, go = chance.sample(range(6), 3), Barrier(2)
        answers = at_once(
            partial(claim_and_linger, several[0], [late[i] for i in mine], go),
            partial(replay_and_claim, several[1], chance.sample(early, 6), go),
        )
        held = [a.delivery_id for answer in good(answers) for a in answer if isinstance(a, Claimed)]
        keys = [delivery(conn, i)["ordering_key"] for i in held]
        assert len(keys) == len(set(keys))
        assert len(keys) == 6


def test_postgres_itself_holds_one_of_a_key_at_most(conn: Connection) -> None:
    """Whatever a statement forgets to ask."""
    first, second = born(conn), born(conn)
    claimed(conn, first)
    with pytest.raises(psycopg.errors.UniqueViolation, match="delivery_one_per_key"):
        conn.execute(
            "UPDATE delivery SET status = 'delivering', claim_token = gen_random_uuid(), lease_until = now() WHERE id = %s",
            (second.delivery_id,),
        )


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_claims_of_what_has_no_key_write_no_index(conn: Connection) -> None:
    """The columns that order is kept by stay as they are."""
    refs = [born(conn, None) for _ in range(3)]
    with conn.transaction():
        for ref in refs:
            claimed(conn, ref)
        row = conn.execute("SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'delivery'").fetchone()
    assert row == (3, 3)
