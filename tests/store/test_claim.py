"""Claim: who may call a delivery now, by the database's clock."""

from typing import Any

import pytest

from madeira.records import Claimed, Refused
from madeira.states import MAX_LOST
from madeira.store import cancelling
from madeira.store.claims import ClaimRequest, claim
from tests.store.making import (
    GIVE_UP,
    RETRY,
    SUCCESS,
    Connection,
    claimed,
    counts_agree,
    delivery,
    event,
    expire,
    log_of,
    make_due,
    routed,
    settled,
    token,
)


def ask(conn: Connection, delivery_id: int, with_token: str | None = None) -> Claimed | Refused:
    return claim(conn, [ClaimRequest(delivery_id, with_token or token(), 40.0)])[0]


def refusal(conn: Connection, delivery_id: int) -> Refused:
    answer = ask(conn, delivery_id)
    assert isinstance(answer, Refused), answer
    return answer


def test_a_claim_takes_hold(conn: Connection) -> None:
    """The row is delivering, under the worker's token, until the lease ends by the database's clock."""
    [ref] = routed(conn)
    held = claimed(conn, ref, lease_s=40.0)
    assert (held.delivery_id, held.seq, held.endpoint, held.lane) == (ref.delivery_id, ref.seq, "a", "a")
    assert (held.attempt, held.failures, held.budget_age_s) == (1, 0, 0.0)
    row = delivery(conn, ref.delivery_id)
    assert (row["status"], str(row["claim_token"]), row["lost"]) == ("delivering", held.token, 0)
    assert (row["lease_until"] - row["claimed_at"]).total_seconds() == 40.0


def test_a_delivery_is_held_by_one(conn: Connection) -> None:
    """Another claim is refused until the lease ends, and told how long that takes."""
    [ref] = routed(conn)
    claimed(conn, ref)
    refused = refusal(conn, ref.delivery_id)
    assert refused.reason == "leased"
    assert 39 < refused.delay_s <= 40


def test_the_same_token_again_is_the_same_claim(conn: Connection) -> None:
    """A claim whose reply was lost is answered as if it were the first, counts no attempt, and its lease starts afresh."""
    [ref] = routed(conn)
    first = claimed(conn, ref)
    expire(conn, ref.delivery_id)
    again = ask(conn, ref.delivery_id, first.token)
    assert isinstance(again, Claimed)
    assert (again.attempt, again.token) == (1, first.token)
    assert refusal(conn, ref.delivery_id).reason == "leased"
    assert log_of(conn, ref.delivery_id) == []


def test_two_claims_of_one_delivery_in_one_group(conn: Connection) -> None:
    """One of them gets it, the other is refused; after an expiry too, with one row of loss."""
    [ref] = routed(conn)
    for round_ in (1, 2):
        answers = claim(conn, [ClaimRequest(ref.delivery_id, token(), 40.0) for _ in range(3)])
        winners = [a for a in answers if isinstance(a, Claimed)]
        assert [a.attempt for a in winners] == [round_]
        assert [a.reason for a in answers if isinstance(a, Refused)] == ["leased", "leased"]
        expire(conn, ref.delivery_id)
    assert log_of(conn, ref.delivery_id) == [(1, "lost", "delivering")]


def test_a_takeover_notes_the_attempt_that_vanished(conn: Connection) -> None:
    """Expired: another worker gets it as the next attempt; the log has the lost one; no failure is counted."""
    [ref] = routed(conn)
    first = claimed(conn, ref)
    expire(conn, ref.delivery_id)
    second = claimed(conn, ref)
    assert (second.attempt, second.failures) == (2, 0)
    assert second.token != first.token
    row = conn.execute("SELECT attempt, token::text, outcome, error_code, worker FROM delivery_log").fetchall()
    assert row == [(1, first.token, "lost", "platform", None)]
    assert delivery(conn, ref.delivery_id)["lost"] == 1
    assert event(conn, ref.seq)["retry_count"] == 0


def test_ten_losses_in_a_row_end_a_delivery(conn: Connection) -> None:
    """What kills its worker each time is dead as `platform`, and its event with it; who asked is told to queue the letter."""
    poison, good = routed(conn, ["a", "b"])
    for _ in range(MAX_LOST):
        claimed(conn, poison)
        expire(conn, poison.delivery_id)
    assert ask(conn, poison.delivery_id) == Refused("died")
    row = delivery(conn, poison.delivery_id)
    assert (row["status"], row["failure_class"], row["lost"], row["failures"]) == ("dead", "platform", MAX_LOST, 0)
    assert log_of(conn, poison.delivery_id) == [
        *((n, "lost", "delivering") for n in range(1, MAX_LOST)),
        (MAX_LOST, "lost", "dead"),
    ]
    assert event(conn, poison.seq)["status"] == "delivering"
    settled(conn, claimed(conn, good))
    assert event(conn, poison.seq)["status"] == "dead"
    assert refusal(conn, poison.delivery_id).reason == "finished"
    assert counts_agree(conn)


def test_a_verdict_ends_the_row_of_losses(conn: Connection) -> None:
    """Nine losses, one verdict, nine losses: still alive."""
    [ref] = routed(conn)
    for _ in range(2):
        for _ in range(MAX_LOST - 1):
            claimed(conn, ref)
            expire(conn, ref.delivery_id)
        held = claimed(conn, ref)
        settled(conn, held, RETRY)
        make_due(conn, ref.delivery_id)
    assert claimed(conn, ref).attempt == 2 * MAX_LOST + 1


def test_an_expired_claim_that_was_to_be_cancelled_ends(conn: Connection) -> None:
    """The cancel met a call whose worker then died: the next claim ends it, and does not call again."""
    [ref] = routed(conn, event_id="one")
    claimed(conn, ref)
    cancelling.cancel(conn, "shop", "one", "ann", None)
    assert refusal(conn, ref.delivery_id).reason == "leased"
    expire(conn, ref.delivery_id)
    assert ask(conn, ref.delivery_id) == Refused("cancelled")
    assert event(conn, ref.seq)["status"] == "cancelled"
    assert log_of(conn, ref.delivery_id) == [(1, "lost", "cancelled")]
    assert counts_agree(conn)


@pytest.mark.parametrize(("decision", "reason"), [(SUCCESS, "finished"), (GIVE_UP, "finished"), (RETRY, "not_due")])
def test_what_is_not_to_be_called_is_refused(conn: Connection, decision: Any, reason: str) -> None:
    """Finished, or waiting for its time: the refusal says which, and how long."""
    [ref] = routed(conn)
    settled(conn, claimed(conn, ref), decision)
    refused = refusal(conn, ref.delivery_id)
    assert refused.reason == reason
    assert 59 < refused.delay_s <= 60 if reason == "not_due" else refused.delay_s == 0


def test_one_second_early_is_in_time(conn: Connection) -> None:
    """Redis' clock may run ahead of Postgres' by a second; more is too early."""
    early, too_early = routed(conn, ["a", "b"])
    for ref, ahead_s in ((early, 0.9), (too_early, 3.0)):
        conn.execute(
            "UPDATE delivery SET next_attempt_at = clock_timestamp() + %s * interval '1 s' WHERE id = %s",
            (ahead_s, ref.delivery_id),
        )
    assert isinstance(ask(conn, early.delivery_id), Claimed)
    assert 2 < refusal(conn, too_early.delivery_id).delay_s <= 3


def test_a_cancelled_or_unknown_delivery_is_refused(conn: Connection) -> None:
    """Cancelled is said as such; a row that is not there (yet) is `missing`."""
    [ref] = routed(conn, event_id="one")
    cancelling.cancel(conn, "shop", "one", "ann", None)
    assert refusal(conn, ref.delivery_id).reason == "cancelled"
    assert refusal(conn, ref.delivery_id + 1000).reason == "missing"


def test_a_group_of_claims_gets_one_answer_each(conn: Connection) -> None:
    """Granted and refused ones side by side, in the order asked."""
    free, held, gone = routed(conn, ["a", "b", "c"])
    claimed(conn, held)
    settled(conn, claimed(conn, gone))
    ids = [gone.delivery_id, free.delivery_id, 10**12, held.delivery_id]
    answers = claim(conn, [ClaimRequest(i, token(), 40.0) for i in ids])
    assert [a.reason if isinstance(a, Refused) else a.delivery_id for a in answers] == [
        "finished",
        free.delivery_id,
        "missing",
        "leased",
    ]


def test_a_row_that_another_claim_holds_is_skipped(conn: Connection, database: Any) -> None:
    """A claim never waits for another transaction; it is told to come again."""
    [ref] = routed(conn)
    with database.connection() as other:
        other.execute("SELECT 1 FROM delivery WHERE id = %s FOR UPDATE", (ref.delivery_id,))
        assert refusal(conn, ref.delivery_id).reason == "contended"
    claimed(conn, ref)


def test_the_age_of_the_budget_runs_from_its_first_attempt(conn: Connection) -> None:
    """`budget_age_s` is the time since the first claim, over takeovers and retries."""
    [ref] = routed(conn)
    settled(conn, claimed(conn, ref), RETRY)
    conn.execute(
        "UPDATE delivery SET next_attempt_at = now(), budget_from = budget_from - interval '1 h' WHERE id = %s",
        (ref.delivery_id,),
    )
    assert 3600 <= claimed(conn, ref).budget_age_s < 3660


def test_a_lane_gets_no_delivery_that_waits_in_another(conn: Connection) -> None:
    """Redis may know a number from before Postgres was restored, when it was another delivery's: its receiver is not called."""
    [ref] = routed(conn, ["a"])
    asked = [ClaimRequest(ref.delivery_id, token(), 40.0, lane) for lane in ("b", "a")]
    assert isinstance(claim(conn, asked[:1])[0], Refused)
    assert isinstance(claim(conn, asked[1:])[0], Claimed)
