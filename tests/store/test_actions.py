"""What a person may do with an event in each of its states, and what he is told when he may not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.errors import IllegalTransition
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.states import MAX_ROUTE_FAILURES, FailureClass
from madeira.store import cancelling, deliveries, erase, events, routing, story
from madeira.store import replay as replaying
from tests.store.making import (
    GIVE_UP,
    RETRY,
    Connection,
    accept,
    attempt,
    claimed,
    counts_agree,
    delivery,
    event,
    log_of,
    new_event,
    routed,
    settled,
    verdict,
)

ID = "one"


def in_routing(conn: Connection) -> None:
    accept(conn, event_id=ID)


def waiting(conn: Connection) -> list[DeliveryRef]:
    return routed(conn, event_id=ID)


def calling(conn: Connection) -> None:
    claimed(conn, waiting(conn)[0])


def succeeded(conn: Connection) -> None:
    settled(conn, claimed(conn, waiting(conn)[0]))


def dead(conn: Connection) -> None:
    settled(conn, claimed(conn, waiting(conn)[0]), GIVE_UP)


def dead_and_waiting(conn: Connection) -> None:
    first, _ = routed(conn, ("a", "b"), event_id=ID)
    settled(conn, claimed(conn, first), GIVE_UP)


def dead_and_succeeded(conn: Connection) -> None:
    first, second = routed(conn, ("a", "b"), event_id=ID)
    settled(conn, claimed(conn, first), GIVE_UP)
    settled(conn, claimed(conn, second))


def dead_and_cancelled(conn: Connection) -> None:
    dead_and_waiting(conn)
    cancelling.cancel(conn, "shop", ID, "ann", None)


def cancelled_before_routing(conn: Connection) -> None:
    accept(conn, event_id=ID)
    cancelling.cancel(conn, "shop", ID, "ann", None)


def cancelled(conn: Connection) -> None:
    waiting(conn)
    cancelling.cancel(conn, "shop", ID, "ann", None)


def unrouted(conn: Connection) -> None:
    routing.route(conn, [(accept(conn, event_id=ID), [])])


def never_routed(conn: Connection) -> None:
    seq = accept(conn, event_id=ID)
    for _ in range(MAX_ROUTE_FAILURES):
        routing.count_route_failure(conn, seq)


BORN_DEAD = PlannedDelivery("b", "b", failure_class=FailureClass.TEMPLATE, last_error="no such field")


def born_dead(conn: Connection) -> None:
    routing.route(conn, [(accept(conn, event_id=ID), [BORN_DEAD])])


def born_dead_and_succeeded(conn: Connection) -> None:
    plan = [PlannedDelivery("a", "a"), BORN_DEAD]
    [result] = routing.route(conn, [(accept(conn, event_id=ID), plan)])
    settled(conn, claimed(conn, result.refs[0]))


def routed_again(conn: Connection) -> None:
    """Waits for its second routing, with a delivery of the first one."""
    born_dead_and_succeeded(conn)
    replaying.reroute(conn, "shop", ID, "ann", "mended")


def denied_when_it_was_called(conn: Connection) -> None:
    """Dead by policy, but not born so: it has a body, and an attempt in the log."""
    settled(conn, claimed(conn, waiting(conn)[0]), replace(GIVE_UP, failure_class=FailureClass.POLICY))


def erased(conn: Connection) -> None:
    dead(conn)
    erase.erase(conn, "shop", ID, "ann", "asked for")


ACTIONS: dict[str, Callable[[Connection], Any]] = {
    "cancel": lambda conn: cancelling.cancel(conn, "shop", ID, "bob", "why"),
    "replay": lambda conn: replaying.replay(conn, "shop", ID, "bob", "why"),
    "force": lambda conn: replaying.replay(conn, "shop", ID, "bob", "why", force=True),
    "reroute": lambda conn: replaying.reroute(conn, "shop", ID, "bob", "why"),
    "erase": lambda conn: erase.erase(conn, "shop", ID, "bob", "why"),
}

#: What each action makes of the event: its state afterwards, or (with an exclamation mark) the code of the refusal.
TABLE: dict[Callable[[Connection], Any], tuple[str, ...]] = {
    #                          cancel               replay                force                 reroute                 erase
    in_routing: ("cancelled", "!unfinished", "!unfinished", "!unfinished", "!unfinished"),
    waiting: ("cancelled", "!unfinished", "!unfinished", "!unfinished", "!unfinished"),
    calling: ("delivering", "!unfinished", "!unfinished", "!unfinished", "!unfinished"),
    succeeded: ("!already-finished", "!nothing-to-replay", "delivering", "!nothing-to-reroute", "succeeded"),
    dead: ("!already-finished", "delivering", "delivering", "!nothing-to-reroute", "dead"),
    dead_and_waiting: ("dead", "delivering", "delivering", "!unfinished", "!unfinished"),
    dead_and_succeeded: ("!already-finished", "delivering", "delivering", "!nothing-to-reroute", "dead"),
    dead_and_cancelled: ("!already-finished", "delivering", "delivering", "!nothing-to-reroute", "dead"),
    cancelled_before_routing: ("!already-finished", "!cancelled", "!cancelled", "!cancelled", "cancelled"),
    cancelled: ("!already-finished", "!cancelled", "!cancelled", "!cancelled", "cancelled"),
    unrouted: ("!already-finished", "!not-routed", "!not-routed", "pending", "dead"),
    never_routed: ("!already-finished", "!not-routed", "!not-routed", "pending", "dead"),
    born_dead: ("!already-finished", "!not-routed", "!not-routed", "pending", "dead"),
    born_dead_and_succeeded: ("!already-finished", "!not-routed", "delivering", "pending", "dead"),
    routed_again: ("succeeded", "!unfinished", "!unfinished", "!unfinished", "!unfinished"),
    denied_when_it_was_called: ("!already-finished", "delivering", "delivering", "!nothing-to-reroute", "dead"),
    erased: ("!already-finished", "!erased", "!erased", "!erased", "!erased"),
}


def everything(conn: Connection) -> list[Any]:
    return [
        conn.execute(statement).fetchall()
        for statement in (
            "SELECT * FROM event ORDER BY seq",
            "SELECT * FROM delivery ORDER BY id",
            "SELECT * FROM delivery_log ORDER BY id",
            "SELECT * FROM audit ORDER BY id",
        )
    ]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("situation", TABLE, ids=lambda situation: situation.__name__)
def test_an_action_leads_from_each_state_to_where_the_table_says(
    conn: Connection, situation: Callable[[Connection], Any], action: str
) -> None:
    """Allowed: the event is what the table says, its counts agree, and there is one audit row. Refused: nothing has changed."""
    situation(conn)
    before = everything(conn)
    expected = TABLE[situation][list(ACTIONS).index(action)]
    if expected.startswith("!"):
        with pytest.raises(IllegalTransition) as refused:
            ACTIONS[action](conn)
        assert refused.value.code == expected[1:]
        assert everything(conn) == before
        return
    result = ACTIONS[action](conn)
    row = event(conn, result.seq if action != "erase" else before[0][0][0])
    assert row["status"] == expected
    assert getattr(result, "status", "pending") == expected
    assert counts_agree(conn)
    audited = conn.execute("SELECT who, what, why FROM audit ORDER BY id").fetchall()[len(before[3]) :]
    assert audited == [("bob", f"event shop/{ID}", "why")]


@pytest.mark.parametrize("action", ACTIONS)
def test_an_event_that_is_not_there_is_told_apart(conn: Connection, action: str) -> None:
    """None for an id of another source, and no audit row."""
    accept(conn, event_id=ID, source="other")
    assert ACTIONS[action](conn) is None
    assert conn.execute("SELECT count(*) FROM audit").fetchone() == (0,)


def test_a_replay_begins_with_a_fresh_budget_and_goes_on_with_the_numbers(conn: Connection) -> None:
    """Failures and losses begin at nought, the next attempt is due now and has the next number; nothing tells of death."""
    dead(conn)
    [row] = conn.execute("SELECT id FROM delivery").fetchall()
    conn.execute("UPDATE delivery SET notified_at = now(), lost = 3, retries = 2")
    result = replaying.replay(conn, "shop", ID, "ann", "the receiver is mended")
    assert result is not None
    assert result.refs == [DeliveryRef(row[0], result.seq, "a")]
    found = delivery(conn, row[0])
    assert (found["status"], found["line"], found["failures"], found["lost"], found["attempt"]) == ("pending", "replay", 0, 0, 1)
    for name in ("budget_from", "finished_at", "died_at", "notified_at", "failure_class", "cancel_requested_at"):
        assert found[name] is None
    held = claimed(conn, result.refs[0])
    assert (held.attempt, held.failures, held.budget_age_s) == (2, 0, 0.0)
    settled(conn, held)
    assert event(conn, result.seq)["status"] == "succeeded"
    assert log_of(conn, row[0]) == [(1, "permanent", "dead"), (2, "succeeded", "succeeded")]


def test_a_replay_to_one_endpoint_leaves_the_others(conn: Connection) -> None:
    """Only the delivery that is named goes again; an endpoint that the event does not go to is told apart."""
    refs = routed(conn, ("a", "b", "c"), event_id=ID)
    for ref in refs[:2]:
        settled(conn, claimed(conn, ref), GIVE_UP)
    settled(conn, claimed(conn, refs[2]))
    result = replaying.replay(conn, "shop", ID, "ann", "why", endpoint="b")
    assert result is not None
    assert result.endpoints == ["b"]
    assert [delivery(conn, ref.delivery_id)["status"] for ref in refs] == ["dead", "pending", "succeeded"]
    assert counts_agree(conn)
    assert replaying.replay(conn, "shop", ID, "ann", "why", endpoint="nowhere") is None
    with pytest.raises(IllegalTransition, match="force"):
        replaying.replay(conn, "shop", ID, "ann", "why", endpoint="c")
    forced = replaying.replay(conn, "shop", ID, "ann", "why", endpoint="c", force=True)
    assert forced is not None
    assert forced.endpoints == ["c"]


def test_a_success_that_a_cancel_had_met_is_not_cancelled_by_its_replay(conn: Connection) -> None:
    """The wish to cancel the first call does not hang over the replayed one: its failure is followed by a retry."""
    [ref] = waiting(conn)
    held = claimed(conn, ref)
    cancelling.cancel(conn, "shop", ID, "ann", None)
    settled(conn, held)
    replaying.replay(conn, "shop", ID, "ann", "why", force=True)
    assert settled(conn, claimed(conn, ref), RETRY).status == "pending"


def test_a_reroute_takes_away_what_was_born_dead_and_nothing_else(conn: Connection) -> None:
    """The delivery that never had a body is gone, the one that succeeded stays, and the audit names the first."""
    born_dead_and_succeeded(conn)
    result = replaying.reroute(conn, "shop", ID, "ann", "the template is mended")
    assert result is not None
    assert result.endpoints == ["b"]
    row = event(conn, result.seq)
    assert (row["status"], row["deliveries"], row["dead"], row["routed_at"], row["reason"]) == ("pending", 1, 0, None, None)
    assert row["route_at"] is not None
    assert conn.execute("SELECT endpoint, status FROM delivery").fetchall() == [("a", "succeeded")]
    assert conn.execute("SELECT detail -> 'removed' FROM audit").fetchall() == [(["b"],)]


def test_routing_that_fails_too_often_counts_anew_after_a_reroute(conn: Connection) -> None:
    """A rerouted event has all its chances again; when they are used up it is dead, though a delivery of it succeeded."""
    routed_again(conn)
    [(seq,)] = conn.execute("SELECT seq FROM event").fetchall()
    died = [routing.count_route_failure(conn, seq) for _ in range(MAX_ROUTE_FAILURES)]
    assert died == [False] * (MAX_ROUTE_FAILURES - 1) + [True]
    assert event(conn, seq)["reason"] == "platform"
    assert replaying.reroute(conn, "shop", ID, "ann", "again") is not None
    assert event(conn, seq)["route_failures"] == 0


def test_a_cancel_for_one_endpoint_ends_its_delivery_only(conn: Connection) -> None:
    """The other goes on; a second cancel, an unknown endpoint, and an event without deliveries are each told apart."""
    first, second = routed(conn, ("a", "b"), event_id=ID)
    result = cancelling.cancel(conn, "shop", ID, "ann", "not this one", "b")
    assert result is not None
    assert (result.status, result.cancelled, result.requested) == ("delivering", [second], 0)
    assert delivery(conn, first.delivery_id)["status"] == "pending"
    assert delivery(conn, second.delivery_id)["last_error"] == "cancelled: not this one"
    assert counts_agree(conn)
    with pytest.raises(IllegalTransition, match="cancelled already"):
        cancelling.cancel(conn, "shop", ID, "ann", None, "b")
    assert cancelling.cancel(conn, "shop", ID, "ann", None, "c") is None
    assert conn.execute("SELECT detail ->> 'endpoint' FROM audit").fetchall() == [("b",)]
    accept(conn, event_id="two")
    with pytest.raises(IllegalTransition, match="not routed yet"):
        cancelling.cancel(conn, "shop", "two", "ann", None, "a")


def test_what_is_erased_is_in_no_row_any_more_and_the_same_post_is_still_a_duplicate(conn: Connection) -> None:
    """Payload, parameters, bodies, answers and the tails of addresses are gone; digest, states and errors stay."""
    new = new_event(
        event_id=ID,
        payload='{"name": "Tschaikowski"}',
        parameters='{"who": "Tschaikowski"}',
        target_uri="http://receiver.test/Tschaikowski?q=Tschaikowski",
    )
    [accepted] = events.insert(conn, [new])
    [result] = routing.route(conn, [(accepted.seq, [PlannedDelivery("a", "a")])])
    conn.execute('UPDATE delivery SET body = \'{"to": "Tschaikowski"}\'')
    request = verdict(claimed(conn, result.refs[0]), GIVE_UP)
    told = replace(
        attempt(request.attempt.outcome),
        excerpt=b"Tschaikowski",
        url="http://receiver.test:8080/Tschaikowski?x",
        exchange='{"request": {"headers": [["X-Name", "Tschaikowski"]]}}',
    )
    deliveries.settle(conn, [replace(request, attempt=told)])
    assert "Tschaikowski" in str(everything(conn))
    done = erase.erase(conn, "shop", ID, "ann", "asked for")
    assert done is not None
    assert (done.status, done.deliveries, done.attempts) == ("dead", 1, 1)
    rows = everything(conn)
    assert "Tschaikowski" not in str(rows)
    assert b"Tschaikowski".hex() not in str(rows)
    found = story.find(conn, "shop", ID)
    assert found is not None
    assert found["erased_at"] == done.erased_at
    assert (found["payload"], found["parameters"], found["target_uri"]) == ("null", None, "http://receiver.test")
    [shown] = found["deliveries"]
    assert (shown["last_error"], shown["attempts"][0]["url"]) == ("400", "http://receiver.test:8080")
    [again] = events.insert(conn, [new])
    assert again.duplicate
    deliveries.settle(conn, [replace(request, token="00000000-0000-0000-0000-000000000001", attempt=told)])
    assert log_of(conn, shown["id"])[-1] == (1, "late", None)
    assert "Tschaikowski" not in str(everything(conn))


def test_a_rerouted_event_that_finds_nothing_new_is_what_its_deliveries_are(conn: Connection) -> None:
    """Routed again to an endpoint that it has reached already: it succeeded, and nothing is sent twice."""
    routed_again(conn)
    [(seq,)] = conn.execute("SELECT seq FROM event").fetchall()
    [result] = routing.route(conn, [(seq, [PlannedDelivery("a", "a")])])
    assert (result.status, result.refs, result.dead) == ("succeeded", [], [])
    assert counts_agree(conn)


def test_a_rerouted_event_gets_the_delivery_that_it_lacked(conn: Connection) -> None:
    """The endpoint whose template is mended gets its delivery; the other one's stays as it was."""
    routed_again(conn)
    [(seq,)] = conn.execute("SELECT seq FROM event").fetchall()
    [result] = routing.route(conn, [(seq, [PlannedDelivery("a", "a"), PlannedDelivery("b", "b")])])
    assert (result.status, [ref.lane for ref in result.refs]) == ("delivering", ["b"])
    assert counts_agree(conn)
    settled(conn, claimed(conn, result.refs[0]))
    assert event(conn, seq)["status"] == "succeeded"


def test_the_guard_holds_replays_too(conn: Connection) -> None:
    """A delivery that is being called cannot be set back by any statement while its lease runs and its token holds."""
    [ref] = waiting(conn)
    claimed(conn, ref)
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("UPDATE delivery SET status = 'pending' WHERE id = %s", (ref.delivery_id,))
