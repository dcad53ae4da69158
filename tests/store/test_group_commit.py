"""Group commit: many callers, one thread, one connection; a fault hits only whom it belongs to."""

import threading
import time
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.errors import StoreUnavailable
from madeira.records import Accepted, NewEvent
from madeira.store import events, story
from madeira.store.database import Database
from madeira.store.deliveries import settle
from madeira.store.group_commit import GroupCommit
from madeira.store.migrate import migrate
from tests.store.grouping import APPLICATION, Caller, Gate, Groups, submit, until_waiting
from tests.store.making import Connection, claimed, new_event, routed, verdict
from tests.store.waiting import at_once, good, until, waits_for_a_lock


def test_what_waits_becomes_one_group_in_order_of_arrival(patient_database: Database, grouped: Groups, gate: Gate) -> None:
    """While one commit runs, all others gather; then they go together, at most `max_group`, the first come first."""
    seen: list[list[int]] = []

    def run(c: Connection, items: list[int]) -> list[int]:
        seen.append(items)
        Gate.pass_through(c)
        return [-item for item in items]

    group = grouped(patient_database, run, max_group=20)
    callers = [Caller(group, 0)]
    until(lambda: seen == [[0]])
    for item in range(1, 31):
        callers.append(Caller(group, item))
        until_waiting(group, item)
    gate.open()
    assert [caller.outcome() for caller in callers] == [-item for item in range(31)]
    assert seen == [[0], list(range(1, 21)), list(range(21, 31))]


def test_many_callers_are_all_accepted(own_database: Database, conn: Connection, grouped: Groups) -> None:
    """Forty threads with twenty posts each: every one gets its own answer, in fewer commits than posts."""
    groups: list[int] = []

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        groups.append(len(items))
        return events.insert(c, items)

    group = grouped(own_database, run)

    def post() -> None:
        for _ in range(20):
            event = new_event()
            assert group.submit(event, 30).event_id == event.event_id

    good(at_once(*[post] * 40))
    assert conn.execute("SELECT count(*) FROM event").fetchone() == (800,)
    assert sum(groups) == 800
    assert len(groups) < 800


def test_bad_data_hurts_only_its_sender(patient_database: Database, conn: Connection, grouped: Groups, gate: Gate) -> None:
    """One value that Postgres refuses, in the middle of a group: its caller gets the error, the others are accepted."""

    def run(c: Connection, items: list[NewEvent]) -> list[Accepted]:
        Gate.pass_through(c)
        return events.insert(c, items)

    group = grouped(patient_database, run)
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
    own_database: Database, database: Database, conn: Connection, grouped: Groups
) -> None:
    """One row of the group is locked by somebody: its settle times out, the others' are recorded."""
    refs = routed(conn, ["a"]) + routed(conn, ["a"]) + routed(conn, ["a"])
    requests = [verdict(claimed(conn, ref)) for ref in refs]
    group = grouped(own_database, settle, rerun_unknown=True)
    with database.connection() as other:
        other.execute("SELECT 1 FROM event WHERE seq = %s FOR UPDATE", (refs[1].seq,))
        results = at_once(*(submit(group, request) for request in requests))
    assert isinstance(results[1], StoreUnavailable)
    assert [result.status for result in (results[0], results[2])] == ["succeeded", "succeeded"]
    assert group.submit(requests[1], 30).status == "succeeded"


def test_after_comes_between_commit_and_answer(own_database: Database, conn: Connection, grouped: Groups) -> None:
    """`after` sees committed rows, and is done before the caller goes on; what it raises reaches nobody."""
    seen: list[Any] = []

    def after(items: list[NewEvent], answers: list[Accepted]) -> None:
        row = conn.execute("SELECT seq FROM event WHERE event_id = %s", (items[0].event_id,)).fetchone()
        seen.append((row, answers[0].seq))
        raise RuntimeError("the broker is away")

    group = grouped(own_database, events.insert, after=after)
    for n in (1, 2):
        seq = group.submit(new_event(), 30).seq
        assert len(seen) == n
        assert seen[-1] == ((seq,), seq)


def test_a_caller_that_gives_up_takes_nobody_down(patient_database: Database, grouped: Groups, gate: Gate) -> None:
    """One caller of a group gives up while it commits, one before it begins: all others get their answers."""
    seen: list[list[int]] = []

    def run(c: Connection, items: list[int]) -> list[int]:
        seen.append(items)
        Gate.pass_through(c)
        return items

    group = grouped(patient_database, run)
    follower = Caller(group, 1)
    until(lambda: len(seen) == 1)
    with pytest.raises(StoreUnavailable, match="within"):
        group.submit(2, 0.01)
    others = [Caller(group, item) for item in (3, 4)]
    until_waiting(group, 3)
    gate.open()
    assert [caller.outcome() for caller in (follower, *others)] == [1, 3, 4]
    assert sorted(item for items in seen for item in items) == [1, 3, 4]


def test_only_so_many_may_wait(patient_database: Database, conn: Connection, grouped: Groups, gate: Gate) -> None:
    """Beyond `max_waiting` a caller is turned away at once instead of adding to the queue."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = grouped(patient_database, run, max_waiting=2)
    callers = [Caller(group, 0)]
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    for item in (1, 2):
        callers.append(Caller(group, item))
        until_waiting(group, item)
    with pytest.raises(StoreUnavailable, match="wait for test already"):
        group.submit(3, 30)
    gate.open()
    assert [caller.outcome() for caller in callers] == [0, 1, 2]


def test_stop_commits_what_waits(patient_database: Database, conn: Connection, grouped: Groups, gate: Gate) -> None:
    """What was submitted before the stop is answered; what comes after is refused."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = grouped(patient_database, run)
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


def test_stop_gives_up_on_what_takes_too_long(patient_database: Database, conn: Connection, grouped: Groups, gate: Gate) -> None:
    """After its time, those that still wait are told, instead of hanging for ever."""

    def run(c: Connection, items: list[int]) -> list[int]:
        Gate.pass_through(c)
        return items

    group = grouped(patient_database, run)
    running = Caller(group, 0)
    until(lambda: waits_for_a_lock(conn, APPLICATION))
    waiting = Caller(group, 1)
    until_waiting(group, 1)
    group.stop(timeout_s=0.01)
    assert isinstance(waiting.outcome(), StoreUnavailable)
    gate.open()
    assert running.outcome() == 0


def test_company_is_waited_for_under_load_only(database: Database, grouped: Groups) -> None:
    """A lone caller never waits for company; after a shared group the next one is given time to fill."""
    started, go_on, groups = threading.Event(), threading.Event(), []

    def run(_conn: Connection, items: list[Any]) -> list[Any]:
        groups.append(items)
        if items == ["first"]:
            started.set()
            go_on.wait(10)
        return items

    commits = grouped(database, run, gather_s=0.5)
    threads = [threading.Thread(target=commits.submit, args=("first", 10))]
    threads[0].start()
    started.wait(10)
    threads += [threading.Thread(target=commits.submit, args=("second", 10)) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(commits._waiting) == 2)
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
            story.find(conn, "shop", "none")
        migrate(empty_database_url)
        until(lambda: database.trouble() is None)
        assert not commits.submit(new_event(), 5).duplicate
    finally:
        commits.stop(5)
        database.close()
