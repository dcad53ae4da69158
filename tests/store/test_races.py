"""What many do at once ends as if they had done it one after another."""

import random
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from madeira.errors import IllegalTransition
from madeira.records import Claimed, DeliveryRef, PlannedDelivery
from madeira.states import EventStatus
from madeira.store import cancelling, events, routing
from madeira.store.claims import ClaimRequest, claim
from madeira.store.database import Database
from madeira.store.deliveries import settle
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    claimed,
    counts_agree,
    delivery,
    expire,
    log_of,
    new_event,
    token,
    verdict,
)
from tests.store.waiting import at_once, good

#: Rounds of a race that is over in milliseconds.
ROUNDS = 60


def route_all(conn: Connection, n: int, endpoints: tuple[str, ...]) -> list[list[DeliveryRef]]:
    """Accept and route `n` events; the deliveries of each."""
    seqs = [a.seq for a in events.insert(conn, [new_event() for _ in range(n)])]
    plan = [PlannedDelivery(endpoint, endpoint) for endpoint in endpoints]
    return [result.refs for result in routing.route(conn, [(seq, plan) for seq in seqs])]


def claim_all(conn: Connection, refs: list[DeliveryRef]) -> list[Claimed]:
    answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in refs])
    assert all(isinstance(answer, Claimed) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Claimed)]


def test_fifty_identical_posts_are_one_event(database: Database) -> None:
    """Exactly one is accepted; all others are duplicates that carry its seq, and none fails."""
    event = new_event()
    with ExitStack() as stack:
        conns = [stack.enter_context(database.connect()) for _ in range(50)]
        answers = good(at_once(*(partial(events.insert, conn, [event]) for conn in conns)))
    assert Counter(answer.duplicate for [answer] in answers) == {True: 49, False: 1}
    assert len({answer.seq for [answer] in answers}) == 1
    assert not any(answer.conflict for [answer] in answers)


def test_groups_with_the_same_ids_in_opposite_order_do_not_deadlock(several: list[Connection]) -> None:
    """Each id is accepted once, whichever group was first, and no group fails."""
    for _ in range(ROUNDS):
        group = [new_event() for _ in range(50)]
        groups = [group, group[::-1], random.sample(group, 50), random.sample(group, 50)]
        answers = good(at_once(*(partial(events.insert, conn, g) for conn, g in zip(several, groups, strict=True))))
        accepted = [a.event_id for answer in answers for a in answer if not a.duplicate]
        assert sorted(accepted) == sorted(event.event_id for event in group)


@pytest.mark.long
def test_two_deliveries_of_one_event_that_settle_at_once_finish_it(several: list[Connection], conn: Connection) -> None:
    """A thousand times at the same instant: no event is left delivering, whatever the two verdicts were."""
    pairs = [[claim_all(conn, refs) for refs in route_all(conn, 200, ("a", "b"))] for _ in range(5)]
    flat = [pair for block in pairs for pair in block]
    verdicts = [[verdict(held, random.choice([SUCCESS, GIVE_UP])) for held in pair] for pair in flat]
    last = []
    for pair in verdicts:
        answers = good(at_once(*(partial(settle, c, [r]) for c, r in zip(several, pair, strict=False))))
        last.append(sorted(answer.event_status or "" for [answer] in answers))
    assert len(last) == 1000
    assert all("delivering" in states and states != ["delivering", "delivering"] for states in last)
    assert conn.execute("SELECT count(*) FROM event WHERE status = 'delivering'").fetchone() == (0,)
    assert counts_agree(conn)


def test_groups_that_settle_the_same_events_in_opposite_order_do_not_deadlock(
    several: list[Connection], conn: Connection
) -> None:
    """Four groups with one delivery each of the same fifty events, shuffled: every event ends, every count is right."""
    for _ in range(ROUNDS // 4):
        columns = zip(*[claim_all(conn, refs) for refs in route_all(conn, 50, ("a", "b", "c", "d"))], strict=True)
        groups = [
            [verdict(held, random.choice([SUCCESS, GIVE_UP, RETRY])) for held in random.sample(column, 50)] for column in columns
        ]
        good(at_once(*(partial(settle, c, group) for c, group in zip(several, groups, strict=True))))
    assert counts_agree(conn)


def test_one_of_many_claims_wins(several: list[Connection], conn: Connection) -> None:
    """Four workers ask for the same deliveries in their own order: each delivery gets one of them, nobody waits or fails."""
    refs = [refs[0] for refs in route_all(conn, 50, ("a",))]
    for round_ in range(1, 6):
        groups = [[ClaimRequest(ref.delivery_id, token(), 40.0) for ref in random.sample(refs, 50)] for _ in several]
        answers = good(at_once(*(partial(claim, c, group) for c, group in zip(several, groups, strict=True))))
        winners = Counter(a.delivery_id for group in answers for a in group if isinstance(a, Claimed))
        assert set(winners.values()) <= {1}
        for ref in refs:
            if ref.delivery_id not in winners:
                claimed(conn, ref)
            expire(conn, ref.delivery_id)
        assert len(log_of(conn, refs[0].delivery_id)) == round_ - 1


def test_a_cancel_that_meets_a_claim_is_never_overlooked(several: list[Connection], conn: Connection) -> None:
    """Either the claim is refused, or it is granted and the cancel is noted on it; never granted as if nothing was."""
    worker, operator = several[:2]
    seen = Counter[str]()
    for _ in range(ROUNDS):
        event = new_event()
        seq = events.insert(conn, [event])[0].seq
        [ref] = routing.route(conn, [(seq, [PlannedDelivery("a", "a")])])[0].refs
        results = good(
            at_once(
                partial(claim, worker, [ClaimRequest(ref.delivery_id, token(), 40.0)]),
                partial(cancelling.cancel, operator, "shop", event.event_id, "ann", None),
            )
        )
        [answer], cancel = results
        row = delivery(conn, ref.delivery_id)
        if isinstance(answer, Claimed):
            assert (cancel.requested, cancel.cancelled) == (1, [])
            assert (row["status"], row["cancel_requested_at"] is not None) == ("delivering", True)
        else:
            assert answer.reason in ("cancelled", "contended")
            assert row["status"] == "cancelled"
        seen[type(answer).__name__] += 1
    assert counts_agree(conn)


def test_a_cancel_that_meets_a_settle_leaves_right_counts(several: list[Connection], conn: Connection) -> None:
    """The event ends in the state that its delivery says, whoever was first."""
    worker, operator = several[:2]
    for _ in range(ROUNDS):
        event = new_event()
        seq = events.insert(conn, [event])[0].seq
        refs = routing.route(conn, [(seq, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")])])[0].refs
        request = verdict(claimed(conn, refs[0]), random.choice([SUCCESS, RETRY, GIVE_UP]))
        good(
            at_once(
                partial(settle, worker, [request]),
                partial(cancelling.cancel, operator, "shop", event.event_id, "ann", None),
            )
        )
        assert delivery(conn, refs[1].delivery_id)["status"] == "cancelled"
        assert delivery(conn, refs[0].delivery_id)["status"] != "pending"
    assert counts_agree(conn)


def test_a_frozen_worker_that_wakes_while_another_takes_over(several: list[Connection], conn: Connection) -> None:
    """Settle against takeover: one of the two wins; if the takeover does, the verdict is late, never both, never neither."""
    frozen_conn, other_conn = several[:2]
    for [ref] in route_all(conn, ROUNDS, ("a",)):
        held = claimed(conn, ref)
        expire(conn, ref.delivery_id)
        results = good(
            at_once(
                partial(settle, frozen_conn, [verdict(held, RETRY)]),
                partial(claim, other_conn, [ClaimRequest(ref.delivery_id, token(), 40.0)]),
            )
        )
        [settled_], [claim_] = results
        outcomes = [outcome for _, outcome, _ in log_of(conn, ref.delivery_id)]
        if isinstance(claim_, Claimed):
            assert settled_.status is None
            assert sorted(outcomes) == ["late", "lost"]
        else:
            assert settled_.status == "pending"
            assert outcomes == ["retryable"]
    assert counts_agree(conn)


def test_routers_that_meet_make_one_set_of_deliveries(several: list[Connection], conn: Connection) -> None:
    """Four route the same events with different rules: one of them decides for each event, the others say nothing new."""
    for _ in range(ROUNDS // 4):
        seqs = [a.seq for a in events.insert(conn, [new_event() for _ in range(16)])]
        plans = [
            [(seq, [PlannedDelivery(f"{name}{i}", name) for i in range(3)]) for seq in random.sample(seqs, 16)] for name in "wxyz"
        ]
        results = good(at_once(*(partial(routing.route, c, plan) for c, plan in zip(several, plans, strict=True))))
        decided = Counter(r.seq for group in results for r in group if r.status == EventStatus.DELIVERING)
        assert decided == dict.fromkeys(seqs, 1)
    assert conn.execute("SELECT count(*) FROM delivery GROUP BY event_seq HAVING count(*) <> 3").fetchall() == []
    assert counts_agree(conn)


def test_a_cancel_that_meets_the_routing(several: list[Connection], conn: Connection) -> None:
    """Cancelled before: no deliveries. Cancelled after: they are all cancelled. The event ends cancelled both ways."""
    for _ in range(ROUNDS):
        event = new_event()
        seq = events.insert(conn, [event])[0].seq
        plan = [(seq, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")])]
        good(
            at_once(
                partial(routing.route, several[0], plan),
                partial(cancelling.cancel, several[1], "shop", event.event_id, "ann", None),
            )
        )
        assert conn.execute("SELECT status FROM event WHERE seq = %s", (seq,)).fetchone() == ("cancelled",)
    assert conn.execute("SELECT count(*) FROM delivery WHERE status <> 'cancelled'").fetchone() == (0,)


def test_everything_at_once_keeps_the_books(several: list[Connection], conn: Connection) -> None:
    """Workers that claim, settle, lose their leases and come late, and an operator who cancels, over the same events."""
    group = [new_event() for _ in range(30)]
    seqs = [a.seq for a in events.insert(conn, group)]
    plan = [PlannedDelivery(endpoint, endpoint) for endpoint in "abc"]
    refs = [ref for r in routing.route(conn, [(seq, plan) for seq in seqs]) for ref in r.refs]

    def work(c: Connection) -> None:
        for _ in range(12):
            asked = [ClaimRequest(ref.delivery_id, token(), 0.0) for ref in random.sample(refs, 30)]
            held = [answer for answer in claim(c, asked) if isinstance(answer, Claimed)]
            decisions = [SUCCESS, GIVE_UP, RETRY]
            settle(c, [verdict(h, random.choice(decisions)) for h in held if random.random() < 0.7])

    def operate(c: Connection) -> None:
        for event in random.sample(group, 20):
            try:
                cancelling.cancel(c, "shop", event.event_id, "ann", None)
            except IllegalTransition:
                continue

    good(at_once(*(partial(work, c) for c in several[:3]), partial(operate, several[3])))
    assert counts_agree(conn)
    wrong = conn.execute("""
        SELECT d.id FROM delivery d
        WHERE d.attempt <> (SELECT count(*) FROM delivery_log l WHERE l.delivery_id = d.id AND l.outcome <> 'late')
                           + (d.status = 'delivering')::integer
    """)
    assert wrong.fetchall() == []
