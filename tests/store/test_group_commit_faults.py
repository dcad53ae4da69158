"""Group commit while the server goes away: whom a lost connection, a lost reply or a frozen server hurts, and for how long."""

from typing import Any

import pytest

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, Claimed, NewEvent
from madeira.store import events
from madeira.store.claims import ClaimRequest, claim
from madeira.store.database import Database
from madeira.store.deliveries import SettleRequest, settle
from madeira.store.group_commit import _Lost, _Waiter
from tests.servers import OwnPostgres
from tests.store.grouping import APPLICATION, Caller, Gate, Groups, Run, submit
from tests.store.making import RETRY, Connection, claimed, log_of, new_event, routed, token, verdict
from tests.store.waiting import at_once, terminate, until, waits_for_a_lock


@pytest.mark.direct
def test_a_connection_that_was_ended_while_idle_is_replaced_unseen(
    own_database: Database, database_url: str, grouped: Groups
) -> None:
    """An administrator ends the session between two posts: the next one is accepted all the same."""
    group = grouped(own_database, events.insert)
    for _ in range(5):
        assert not group.submit(new_event(), 30).duplicate
        assert terminate(database_url, APPLICATION) == 1


@pytest.mark.parametrize("rerun", [False, True])
def test_a_connection_that_is_lost_in_the_middle(
    patient_database: Database, database_url: str, conn: Connection, grouped: Groups, rerun: bool, gate: Gate
) -> None:
    """Nobody knows whether it was committed: the caller is told so, or the same items are run again."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = grouped(patient_database, run, rerun_unknown=rerun)
    caller = Caller(group, 1)
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    assert terminate(database_url, APPLICATION) == 1
    if rerun:
        until(lambda: waits_for_a_lock(conn, APPLICATION))
        gate.open()
        assert caller.outcome() == 1
    else:
        assert isinstance(caller.outcome(), StoreUnavailable)
        gate.open()
        assert group.submit(2, 30) == 2


def test_a_connection_that_is_lost_while_items_are_run_singly(own_database: Database, grouped: Groups) -> None:
    """After a data error the items go one by one; those behind a loss are told at once, and the next group goes on."""
    done: list[int] = []

    def run(c: Connection, items: list[int]) -> list[int]:
        if len(items) > 1:
            raise ValueError("one of them is bad")
        if items == [1]:
            c.close()
            c.execute("SELECT 1")
        done.extend(items)
        return items

    group = grouped(own_database, run)
    waiters = [_Waiter[int, int](item) for item in range(4)]
    group._commit(waiters)
    assert [type(waiter.error) for waiter in waiters] == [type(None), _Lost, _Lost, _Lost]
    assert group.submit(9, 30) == 9
    assert done == [0, 9]


@pytest.mark.direct
def test_a_server_that_takes_no_more_writes_is_left(own_database: Database, grouped: Groups) -> None:
    """After a failover the old server is read-only: the group goes to a new connection instead of failing for ever."""
    runs: list[int] = []

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        runs.append(len(items))
        if len(runs) == 1:
            c.execute("SET default_transaction_read_only = on")
        return events.insert(c, items)

    group = grouped(own_database, run, rerun_unknown=True)
    group.start()
    assert not group.submit(new_event(), 30).duplicate
    assert runs == [1, 1]


class ReplyLost:
    """Runs a group, and the first time cuts the connection after the commit, before the answer arrives."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.runs = 0

    def __call__(self, conn: Connection, items: list[Any]) -> list[Any]:
        self.runs += 1
        answers = self._run(conn, items)
        if self.runs == 1:
            conn.close()
            conn.execute("SELECT 1")
        return answers


def test_a_claim_whose_reply_was_lost_is_granted_once(own_database: Database, conn: Connection, grouped: Groups) -> None:
    """It was committed; run again by its token it is the same claim, not a refusal and not a second attempt."""
    [ref] = routed(conn)
    run = ReplyLost(claim)
    answer = grouped(own_database, run, rerun_unknown=True).submit(ClaimRequest(ref.delivery_id, token(), 40.0), 30)
    assert run.runs == 2
    assert isinstance(answer, Claimed)
    assert answer.attempt == 1


def test_a_settle_whose_reply_was_lost_counts_once(own_database: Database, conn: Connection, grouped: Groups) -> None:
    """It was committed; run again by its token it finds its own row in the log."""
    [ref] = routed(conn)
    request: SettleRequest = verdict(claimed(conn, ref), RETRY)
    run = ReplyLost(settle)
    answer = grouped(own_database, run, rerun_unknown=True).submit(request, 30)
    assert run.runs == 2
    assert answer.status == "pending"
    assert log_of(conn, ref.delivery_id) == [(1, "retryable", "pending")]


def test_a_post_whose_reply_was_lost_is_a_duplicate_when_it_is_sent_again(own_database: Database, grouped: Groups) -> None:
    """Intake answers that it does not know; the sender's retry learns that the event is in."""
    event = new_event()
    group = grouped(own_database, ReplyLost(events.insert))
    with pytest.raises(StoreUnavailable):
        group.submit(event, 30)
    assert group.submit(event, 30).duplicate


def test_a_server_that_is_away_is_told_at_once_or_waited_for(own_postgres: OwnPostgres, grouped: Groups) -> None:
    """Stopped: intake learns it quickly, a settle waits. Started again: both go on without a restart of ours."""
    database = Database(url=own_postgres.url, application=APPLICATION, pool_max=1)
    intake = grouped(database, events.insert)
    with database.connect() as conn:
        [ref] = routed(conn)
        request = verdict(claimed(conn, ref))
    settles = grouped(database, settle, rerun_unknown=True)
    own_postgres.stop()
    caller = Caller(settles, request, None)
    with pytest.raises(StoreUnavailable):
        intake.submit(new_event(), 30)
    with pytest.raises(StoreUnavailable, match="within"):
        settles.submit(request, 0.3)
    own_postgres.start()
    assert not intake.submit(new_event(), 30).duplicate
    assert caller.outcome().status == "succeeded"
    assert settles.submit(request, 30).status == "succeeded"


def test_a_server_that_freezes_holds_nobody_for_longer_than_asked(own_postgres: OwnPostgres, grouped: Groups) -> None:
    """A frozen server neither answers nor refuses: callers have their own limit, and the thread one too."""
    database = Database(url=own_postgres.url, application=APPLICATION, pool_max=1, statement_timeout_s=0.5)
    group = grouped(database, events.insert)
    group.submit(new_event(), 30)
    own_postgres.stall()
    event = new_event()
    with pytest.raises(StoreUnavailable, match=r"within 0\.2 s"):
        group.submit(event, 0.2)
    with pytest.raises(StoreUnavailable, match=r"did not answer|timeout expired"):
        group.submit(event, 30)
    own_postgres.resume()
    until(lambda: isinstance(at_once(submit(group, new_event()))[0], Accepted))
