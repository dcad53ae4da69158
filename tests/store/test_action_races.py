"""What people do at the same moment as others, or as workers, ends as if one had come after the other."""

from collections import Counter
from functools import partial

from madeira.errors import IllegalTransition
from madeira.records import Claimed, DeliveryRef, PlannedDelivery
from madeira.states import FailureClass
from madeira.store import cancelling, erase, events, replay, routing
from madeira.store.claims import ClaimRequest, claim
from madeira.store.deliveries import settle
from tests.store.making import (
    GIVE_UP,
    Connection,
    claimed,
    counts_agree,
    delivery,
    event,
    new_event,
    routed,
    settled,
    token,
    verdict,
)
from tests.store.waiting import at_once, good

#: Rounds of a race that is over in milliseconds.
ROUNDS = 40


def dead_one(conn: Connection, event_id: str) -> DeliveryRef:
    [ref] = routed(conn, event_id=event_id)
    settled(conn, claimed(conn, ref), GIVE_UP)
    return ref


def codes(results: list[object]) -> list[str]:
    """The codes of those that were refused; any other error is none of theirs."""
    errors = [r for r in results if isinstance(r, Exception)]
    assert all(isinstance(e, IllegalTransition) for e in errors), errors
    return sorted(e.code for e in errors if isinstance(e, IllegalTransition))


def test_of_four_who_replay_the_same_event_one_does(several: list[Connection], conn: Connection) -> None:
    """A double click takes effect once: one replay, one audit row, the others are told that it is on its way."""
    for n in range(ROUNDS):
        ref = dead_one(conn, f"e{n}")
        results = at_once(*(partial(replay.replay, c, "shop", f"e{n}", "ann", "why") for c in several))
        assert codes(results) == ["unfinished"] * 3
        assert delivery(conn, ref.delivery_id)["status"] == "pending"
    assert conn.execute("SELECT count(*) FROM audit WHERE action = 'replay'").fetchone() == (ROUNDS,)
    assert counts_agree(conn)


def test_of_four_who_reroute_the_same_event_one_does(several: list[Connection], conn: Connection) -> None:
    """A double click takes effect once, and no delivery is taken away twice."""
    born_dead = PlannedDelivery("a", "a", failure_class=FailureClass.POLICY, last_error="denied")
    for n in range(ROUNDS):
        [accepted] = events.insert(conn, [new_event(event_id=f"e{n}")])
        routing.route(conn, [(accepted.seq, [born_dead])])
        results = at_once(*(partial(replay.reroute, c, "shop", f"e{n}", "ann", "why") for c in several))
        assert codes(results) == ["unfinished"] * 3
        assert event(conn, accepted.seq)["deliveries"] == 0
    assert conn.execute("SELECT count(*) FROM audit WHERE action = 'reroute'").fetchone() == (ROUNDS,)


def test_of_four_who_erase_or_replay_one_is_first(several: list[Connection], conn: Connection) -> None:
    """Erased first: nothing is sent any more. Replayed first: nothing is erased while it is on its way."""
    seen = Counter[str]()
    for n in range(ROUNDS):
        ref = dead_one(conn, f"e{n}")
        jobs = [partial(erase.erase, c, "shop", f"e{n}", "ann", "why") for c in several[:2]]
        jobs += [partial(replay.replay, c, "shop", f"e{n}", "ann", "why") for c in several[2:]]
        refused = codes(at_once(*jobs))
        row = event(conn, ref.seq)
        first = "erase" if row["erased_at"] else "replay"
        assert refused == (["erased"] * 3 if first == "erase" else ["unfinished"] * 3)
        assert row["status"] == ("dead" if first == "erase" else "delivering")
        seen[first] += 1
    assert counts_agree(conn)


def test_a_replay_that_meets_the_settle_comes_after_it_or_is_told_to_wait(several: list[Connection], conn: Connection) -> None:
    """Either the delivery was dead already and goes again, or it was still being called; it never hangs between."""
    for n in range(ROUNDS):
        [ref] = routed(conn, event_id=f"e{n}")
        held = claimed(conn, ref)
        results = at_once(
            partial(settle, several[0], [verdict(held, GIVE_UP)]),
            partial(replay.replay, several[1], "shop", f"e{n}", "ann", "why"),
        )
        refused = codes(results)
        status = delivery(conn, ref.delivery_id)["status"]
        assert (refused, status) in ((["unfinished"], "dead"), ([], "pending"))
    assert counts_agree(conn)


def test_a_cancel_that_meets_the_second_routing_leaves_right_counts(several: list[Connection], conn: Connection) -> None:
    """Cancelled before: nothing new is made. Cancelled after: what is new is cancelled. What had succeeded stays."""
    for n in range(ROUNDS):
        [accepted] = events.insert(conn, [new_event(event_id=f"e{n}")])
        born_dead = PlannedDelivery("b", "b", failure_class=FailureClass.TEMPLATE, last_error="no such field")
        [first] = routing.route(conn, [(accepted.seq, [PlannedDelivery("a", "a"), born_dead])])
        settled(conn, claimed(conn, first.refs[0]))
        replay.reroute(conn, "shop", f"e{n}", "ann", "mended")
        plan = [(accepted.seq, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")])]
        good(
            at_once(
                partial(routing.route, several[0], plan),
                partial(cancelling.cancel, several[1], "shop", f"e{n}", "ann", None),
            )
        )
        rows = conn.execute("SELECT endpoint, status FROM delivery WHERE event_seq = %s ORDER BY id", (accepted.seq,)).fetchall()
        assert rows in ([("a", "succeeded")], [("a", "succeeded"), ("b", "cancelled")])
        assert event(conn, accepted.seq)["status"] == ("succeeded" if len(rows) == 1 else "cancelled")
    assert counts_agree(conn)


def test_a_sweep_of_an_endpoint_meets_claims_settles_and_cancels_without_a_deadlock(
    several: list[Connection], conn: Connection
) -> None:
    """Two sweeps, a worker and somebody who cancels events at once: all come to an end, and the counts are right."""
    for round_ in range(ROUNDS // 8):
        names = [f"r{round_}e{n}" for n in range(20)]
        refs = [routed(conn, ("a", "b"), event_id=name) for name in names]

        def work(c: Connection, refs: list[list[DeliveryRef]] = refs) -> None:
            for pair in reversed(refs):
                answers = claim(c, [ClaimRequest(ref.delivery_id, token(), 40.0) for ref in pair])
                settle(c, [verdict(held, GIVE_UP) for held in answers if isinstance(held, Claimed)])

        def cancel(c: Connection, names: list[str] = names) -> None:
            for name in reversed(names):
                try:
                    cancelling.cancel(c, "shop", name, "bob", None)
                except IllegalTransition:
                    continue

        def sweep(c: Connection) -> None:
            done = cancelling.Sweep("a", "ann", "gone")
            while not done.complete:
                done.go_on(c, 7)

        good(
            at_once(
                partial(work, several[0]), partial(cancel, several[1]), partial(sweep, several[2]), partial(sweep, several[3])
            )
        )
    assert counts_agree(conn)
    assert conn.execute("SELECT count(*) FROM delivery WHERE finished_at IS NULL AND claim_token IS NULL").fetchone() == (0,)
