"""Group commit: many callers, one thread, one connection; a fault hits only whom it belongs to."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, Claimed, NewEvent
from madeira.store import events
from madeira.store.database import Database
from madeira.store.deliveries import ClaimRequest, SettleRequest, claim, settle
from madeira.store.group_commit import GroupCommit, _Lost, _Waiter
from madeira.store.migrate import migrate
from tests.servers import OwnPostgres
from tests.store.making import RETRY, Connection, claimed, log_of, new_event, routed, token, verdict
from tests.store.waiting import at_once, good, terminate, until, waits_for_a_lock

Run = Callable[[Connection, list[Any]], list[Any]]

#: The name of the database sessions of the group under test.
APPLICATION = "group"


class Gate:
    """A lock in Postgres, held by a transaction of the test: whoever calls `pass_through` waits at it inside a statement."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._conn.autocommit = False
        self._conn.execute("SELECT pg_advisory_xact_lock(1)")

    def open(self) -> None:
        self._conn.commit()

    @staticmethod
    def pass_through(conn: Connection) -> None:
        conn.execute("SELECT pg_advisory_xact_lock_shared(1)")


@pytest.fixture
def own_database(database_url: str) -> Iterator[Database]:
    """Connections whose sessions go by the name of the group under test; a statement may take 0.5 s."""
    database = Database(url=database_url, application=APPLICATION, pool_max=1, statement_timeout_s=0.5)
    database.open()
    yield database
    database.close()


@pytest.fixture
def patient_database(database_url: str) -> Iterator[Database]:
    """The same, but a statement may take as long as a test does."""
    database = Database(url=database_url, application=APPLICATION, pool_max=1, statement_timeout_s=100)
    database.open()
    yield database
    database.close()


@pytest.fixture
def gate(database_url: str) -> Iterator[Gate]:
    """Closed until the test opens it."""
    with Database(url=database_url, application="gate", pool_max=1, statement_timeout_s=100).connect() as conn:
        yield Gate(conn)


class Groups:
    """Makes group commits and stops them in the end."""

    def __init__(self) -> None:
        self.made: list[GroupCommit[Any, Any]] = []

    def __call__(self, database: Database, run: Run, *, rerun_unknown: bool = False, **options: Any) -> GroupCommit[Any, Any]:
        group = GroupCommit[Any, Any](name="test", database=database, run=run, rerun_unknown=rerun_unknown, **options)
        self.made.append(group)
        return group


@pytest.fixture
def make() -> Iterator[Groups]:
    groups = Groups()
    yield groups
    for group in groups.made:
        group.stop(timeout_s=10)


def submit(group: GroupCommit[Any, Any], item: Any, timeout_s: float | None = 30) -> Callable[[], Any]:
    return partial(group.submit, item, timeout_s)


def until_waiting(group: GroupCommit[Any, Any], n: int) -> None:
    until(lambda: group.waiting == n)


class Caller(threading.Thread):
    """A thread that submits one item and keeps what came of it."""

    def __init__(self, group: GroupCommit[Any, Any], item: Any, timeout_s: float | None = 30) -> None:
        super().__init__()
        self._submit = submit(group, item, timeout_s)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._submit()
        except Exception as e:  # noqa: BLE001 - the test looks at it
            self.result = e

    def outcome(self) -> Any:
        self.join()
        return self.result


def test_what_waits_becomes_one_group_in_order_of_arrival(patient_database: Database, make: Groups, gate: Gate) -> None:
    """While one commit runs, all others gather; then they go together, at most `max_group`, the first come first."""
    seen: list[list[int]] = []

    def run(c: Connection, items: list[int]) -> list[int]:
        seen.append(items)
        Gate.pass_through(c)
        return [-item for item in items]

    group = make(patient_database, run, max_group=20)
    callers = [Caller(group, 0)]
    until(lambda: seen == [[0]])
    for item in range(1, 31):
        callers.append(Caller(group, item))
        until_waiting(group, item)
    gate.open()
    assert [caller.outcome() for caller in callers] == [-item for item in range(31)]
    assert seen == [[0], list(range(1, 21)), list(range(21, 31))]


def test_many_callers_are_all_accepted(own_database: Database, conn: Connection, make: Groups) -> None:
    """Forty threads with twenty posts each: every one gets its own answer, in fewer commits than posts."""
    groups: list[int] = []

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        groups.append(len(items))
        return events.insert(c, items)

    group = make(own_database, run)

    def post() -> None:
        for _ in range(20):
            event = new_event()
            assert group.submit(event, 30).event_id == event.event_id

    good(at_once(*[post] * 40))
    assert conn.execute("SELECT count(*) FROM event").fetchone() == (800,)
    assert sum(groups) == 800
    assert len(groups) < 800


def test_bad_data_hurts_only_its_sender(patient_database: Database, conn: Connection, make: Groups, gate: Gate) -> None:
    """One value that Postgres refuses, in the middle of a group: its caller gets the error, the others are accepted."""

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        Gate.pass_through(c)
        return events.insert(c, items)

    group = make(patient_database, run)
    first = Caller(group, new_event())
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    bad = [new_event(event_type="nul\x00"), new_event(body_sha256=b"short"), replace(new_event(), payload="\ud800")]
    callers = [Caller(group, new_event()) for _ in range(5)] + [Caller(group, event) for event in bad]
    until_waiting(group, 8)
    gate.open()
    results = [caller.outcome() for caller in [first, *callers]]
    assert [isinstance(result, Accepted) for result in results] == [True] * 6 + [False] * 3
    assert [type(result) for result in results[6:]] == [
        psycopg.DataError,
        psycopg.errors.CheckViolation,
        UnicodeEncodeError,
    ]
    assert conn.execute("SELECT count(*) FROM event").fetchone() == (6,)


@pytest.mark.direct
def test_a_statement_that_takes_too_long_hurts_only_its_sender(
    own_database: Database, database: Database, conn: Connection, make: Groups
) -> None:
    """One row of the group is locked by somebody: its settle times out, the others' are recorded."""
    refs = routed(conn, ["a"]) + routed(conn, ["a"]) + routed(conn, ["a"])
    requests = [verdict(claimed(conn, ref)) for ref in refs]
    group = make(own_database, settle, rerun_unknown=True)
    with database.connection() as other:
        other.execute("SELECT 1 FROM event WHERE seq = %s FOR UPDATE", (refs[1].seq,))
        results = at_once(*(submit(group, request) for request in requests))
    assert isinstance(results[1], StoreUnavailable)
    assert [result.status for result in (results[0], results[2])] == ["succeeded", "succeeded"]
    assert group.submit(requests[1], 30).status == "succeeded"


def test_after_comes_between_commit_and_answer(own_database: Database, conn: Connection, make: Groups) -> None:
    """`after` sees committed rows, and is done before the caller goes on; what it raises reaches nobody."""
    seen: list[Any] = []

    def after(items: list[NewEvent], answers: list[Accepted]) -> None:
        row = conn.execute("SELECT seq FROM event WHERE event_id = %s", (items[0].event_id,)).fetchone()
        seen.append((row, answers[0].seq))
        raise RuntimeError("the broker is away")

    group = make(own_database, events.insert, after=after)
    for n in (1, 2):
        seq = group.submit(new_event(), 30).seq
        assert len(seen) == n
        assert seen[-1] == ((seq,), seq)


def test_a_caller_that_gives_up_takes_nobody_down(patient_database: Database, make: Groups, gate: Gate) -> None:
    """One caller of a group gives up while it commits, one before it begins: all others get their answers."""
    seen: list[list[int]] = []

    def run(c: Connection, items: list[int]) -> list[int]:
        seen.append(items)
        Gate.pass_through(c)
        return items

    group = make(patient_database, run)
    follower = Caller(group, 1)
    until(lambda: len(seen) == 1)
    with pytest.raises(StoreUnavailable, match="within"):
        group.submit(2, 0.01)
    others = [Caller(group, item) for item in (3, 4)]
    until_waiting(group, 3)
    gate.open()
    assert [caller.outcome() for caller in (follower, *others)] == [1, 3, 4]
    assert sorted(item for items in seen for item in items) == [1, 3, 4]


def test_only_so_many_may_wait(patient_database: Database, conn: Connection, make: Groups, gate: Gate) -> None:
    """Beyond `max_waiting` a caller is turned away at once instead of adding to the queue."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = make(patient_database, run, max_waiting=2)
    callers = [Caller(group, 0)]
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    for item in (1, 2):
        callers.append(Caller(group, item))
        until_waiting(group, item)
    with pytest.raises(StoreUnavailable, match="wait for test already"):
        group.submit(3, 30)
    gate.open()
    assert [caller.outcome() for caller in callers] == [0, 1, 2]


def test_stop_commits_what_waits(patient_database: Database, conn: Connection, make: Groups, gate: Gate) -> None:
    """What was submitted before the stop is answered; what comes after is refused."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = make(patient_database, run)
    callers = [Caller(group, 0)]
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    callers += [Caller(group, item) for item in (1, 2)]
    until_waiting(group, 2)
    stopper = threading.Thread(target=group.stop, args=(30,))
    stopper.start()
    gate.open()
    stopper.join()
    assert sorted(caller.outcome() for caller in callers) == [0, 1, 2]
    with pytest.raises(StoreUnavailable, match="is stopped"):
        group.submit(3, 30)


def test_stop_gives_up_on_what_takes_too_long(patient_database: Database, conn: Connection, make: Groups, gate: Gate) -> None:
    """After its time, those that still wait are told, instead of hanging for ever."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = make(patient_database, run)
    running = Caller(group, 0)
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    waiting = Caller(group, 1)
    until_waiting(group, 1)
    group.stop(timeout_s=0.01)
    assert isinstance(waiting.outcome(), StoreUnavailable)
    gate.open()
    assert running.outcome() == 0


@pytest.mark.direct
def test_a_connection_that_was_ended_while_idle_is_replaced_unseen(
    own_database: Database, database_url: str, make: Groups
) -> None:
    """An administrator ends the session between two posts: the next one is accepted all the same."""
    group = make(own_database, events.insert)
    for _ in range(5):
        assert not group.submit(new_event(), 30).duplicate
        assert terminate(database_url, APPLICATION) == 1


@pytest.mark.parametrize("rerun", [False, True])
def test_a_connection_that_is_lost_in_the_middle(
    patient_database: Database, database_url: str, conn: Connection, make: Groups, rerun: bool, gate: Gate
) -> None:
    """Nobody knows whether it was committed: the caller is told so, or the same items are run again."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = make(patient_database, run, rerun_unknown=rerun)
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


def test_a_connection_that_is_lost_while_items_are_run_singly(own_database: Database, make: Groups) -> None:
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

    group = make(own_database, run)
    waiters = [_Waiter[int, int](item) for item in range(4)]
    group._commit(waiters)
    assert [type(waiter.error) for waiter in waiters] == [type(None), _Lost, _Lost, _Lost]
    assert group.submit(9, 30) == 9
    assert done == [0, 9]


@pytest.mark.direct
def test_a_server_that_takes_no_more_writes_is_left(own_database: Database, make: Groups) -> None:
    """After a failover the old server is read-only: the group goes to a new connection instead of failing for ever."""
    runs: list[int] = []

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        runs.append(len(items))
        if len(runs) == 1:
            c.execute("SET default_transaction_read_only = on")
        return events.insert(c, items)

    group = make(own_database, run, rerun_unknown=True)
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


def test_a_claim_whose_reply_was_lost_is_granted_once(own_database: Database, conn: Connection, make: Groups) -> None:
    """It was committed; run again by its token it is the same claim, not a refusal and not a second attempt."""
    [ref] = routed(conn)
    run = ReplyLost(claim)
    answer = make(own_database, run, rerun_unknown=True).submit(ClaimRequest(ref.delivery_id, token(), 40.0), 30)
    assert run.runs == 2
    assert isinstance(answer, Claimed)
    assert answer.attempt == 1


def test_a_settle_whose_reply_was_lost_counts_once(own_database: Database, conn: Connection, make: Groups) -> None:
    """It was committed; run again by its token it finds its own row in the log."""
    [ref] = routed(conn)
    request: SettleRequest = verdict(claimed(conn, ref), RETRY)
    run = ReplyLost(settle)
    answer = make(own_database, run, rerun_unknown=True).submit(request, 30)
    assert run.runs == 2
    assert answer.status == "pending"
    assert log_of(conn, ref.delivery_id) == [(1, "retryable", "pending")]


def test_a_post_whose_reply_was_lost_is_a_duplicate_when_it_is_sent_again(own_database: Database, make: Groups) -> None:
    """Intake answers that it does not know; the sender's retry learns that the event is in."""
    event = new_event()
    group = make(own_database, ReplyLost(events.insert))
    with pytest.raises(StoreUnavailable):
        group.submit(event, 30)
    assert group.submit(event, 30).duplicate


def test_a_server_that_is_away_is_told_at_once_or_waited_for(own_postgres: OwnPostgres, make: Groups) -> None:
    """Stopped: intake learns it quickly, a settle waits. Started again: both go on without a restart of ours."""
    database = Database(url=own_postgres.url, application=APPLICATION, pool_max=1)
    intake = make(database, events.insert)
    with database.connect() as conn:
        [ref] = routed(conn)
        request = verdict(claimed(conn, ref))
    settles = make(database, settle, rerun_unknown=True)
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


def test_a_server_that_freezes_holds_nobody_for_longer_than_asked(own_postgres: OwnPostgres, make: Groups) -> None:
    """A frozen server neither answers nor refuses: callers have their own limit, and the thread one too."""
    database = Database(url=own_postgres.url, application=APPLICATION, pool_max=1, statement_timeout_s=0.5)
    group = make(database, events.insert)
    group.submit(new_event(), 30)
    own_postgres.stall()
    event = new_event()
    with pytest.raises(StoreUnavailable, match=r"within 0\.2 s"):
        group.submit(event, 0.2)
    with pytest.raises(StoreUnavailable, match=r"did not answer|timeout expired"):
        group.submit(event, 30)
    own_postgres.resume()
    until(lambda: isinstance(at_once(submit(group, new_event()))[0], Accepted))


def test_company_is_waited_for_under_load_only(database: Database, make: Groups) -> None:
    """A lone caller never waits for company; after a shared group the next one is given time to fill."""
    started, go_on, groups = threading.Event(), threading.Event(), []

    def run(_conn: Connection, items: list[Any]) -> list[Any]:
        groups.append(items)
        if items == ["first"]:
            started.set()
            go_on.wait(10)
        return items

    commits = make(database, run, gather_s=0.5)
    threads = [threading.Thread(target=commits.submit, args=("first", 10))]
    threads[0].start()
    started.wait(10)
    threads += [threading.Thread(target=commits.submit, args=("second", 10)) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    until(lambda: commits.waiting == 2)
    go_on.set()
    for thread in threads:
        thread.join()
    threads = [threading.Thread(target=commits.submit, args=("third", 10)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert groups == [["first"], ["second", "second"], ["third", "third"]]
    commits.submit("clears", 10)
    before = time.monotonic()
    for _ in range(5):
        commits.submit("alone", 10)
    assert time.monotonic() - before < 0.5


def test_without_tables_the_remedy_is_told(empty_database_url: str) -> None:
    """Pooled connections, probes and groups say what to do, and work when it was done."""
    database = Database(url=empty_database_url, application="tests", pool_max=2)
    database.open()
    commits = GroupCommit(name="events", database=database, run=events.insert, rerun_unknown=True)
    try:
        assert database.trouble() is not None
        with pytest.raises(StoreUnavailable, match="madeira migrate"):
            commits.submit(new_event(), 5)
        with pytest.raises(StoreUnavailable, match="madeira migrate"), database.connection() as conn:
            events.find(conn, "shop", "none")
        migrate(empty_database_url)
        assert database.trouble() is None
        assert not commits.submit(new_event(), 5).duplicate
    finally:
        commits.stop(5)
        database.close()
