"""Jobs of every kind: each delivery exactly once whatever overlaps, stops or breaks; they are steered, previewed and listed."""

import threading
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from madeira.errors import AlreadyThere, IllegalTransition
from madeira.records import DeliveryRef
from madeira.store import audit, job_steps, jobs
from madeira.store.database import Database
from madeira.store.job_steps import step
from madeira.store.jobs import NewJob
from madeira.store.selection import Selection
from tests.store import making
from tests.store.stepping import (
    CANCEL,
    REPLAY,
    REROUTE,
    UNORDERED,
    born_dead,
    dead,
    delivers,
    event_id,
    kill,
    made,
    numbers,
    records,
    shown,
    steps,
    succeed,
    unrouted,
)

Connection = psycopg.Connection[Any]


# -- exactly once -------------------------------------------------------------------------------------------------


def test_of_overlapping_jobs_each_delivery_is_replayed_by_one_and_the_others_say_so(database: Database, conn: Connection) -> None:
    refs = dead(conn, 40)
    ids = [made(conn, UNORDERED, f"operator {n}") for n in range(4)]
    start = threading.Barrier(4)
    begun: list[DeliveryRef] = []

    def run(job_id: int) -> None:
        with database.connect() as own:
            start.wait()
            begun.extend(steps(own, job_id))

    threads = [threading.Thread(target=run, args=(job_id,)) for job_id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun, key=lambda ref: ref.delivery_id) == refs
    for ref in refs:
        kill(conn, ref)
    for job_id in ids:
        assert steps(conn, job_id) == [], "what died by one job is dead since after all of them were made"
    found = [shown(conn, job_id) for job_id in ids]
    assert [job["state"] for job in found] == ["done"] * 4
    assert sum(job["failed"] for job in found) == 40
    assert [job["failed"] + job["skipped"] for job in found] == [40] * 4
    assert [job["skips"].get("no_longer", 0) for job in found] == [job["skipped"] for job in found]


def test_two_that_go_on_with_one_job_at_once_begin_each_delivery_once(database: Database, conn: Connection) -> None:
    refs = dead(conn, 30)
    job = made(conn, replace(UNORDERED, rate=1000))
    start = threading.Barrier(3)
    begun: list[DeliveryRef] = []

    def run() -> None:
        with database.connect() as own:
            start.wait()
            while len(found := step(own, job).begun) or numbers(own, job)[5]:
                begun.extend(found)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(begun, key=lambda ref: ref.delivery_id) == refs
    assert numbers(conn, job) == (30, 0, 0, 0, 30, 0)


@pytest.mark.parametrize("job", [REPLAY, UNORDERED, CANCEL, replace(CANCEL, among="dead"), REROUTE])
def test_a_step_that_is_lost_before_its_commit_has_done_nothing(conn: Connection, job: NewJob) -> None:
    dead(conn, 3)
    born_dead(conn)
    unrouted(conn)
    making.accept(conn)
    making.claimed(conn, making.routed(conn)[0])
    making.routed(conn)
    job_id = made(conn, job)
    tables = ("event", "delivery", "delivery_log", "job", "job_part", "job_begun", "audit")

    def everything() -> list[Any]:
        return [conn.execute(f"SELECT * FROM {table} ORDER BY 1, 2".encode()).fetchall() for table in tables]

    before = everything()
    with conn.transaction(force_rollback=True):
        assert step(conn, job_id).moved
    assert everything() == before
    steps(conn, job_id, delivers(conn))
    total, done, failed, skipped, begun, left = numbers(conn, job_id)
    assert total == done + failed + skipped + begun
    assert left == 0


def test_a_request_that_is_sent_twice_makes_one_job(database: Database, conn: Connection) -> None:
    dead(conn, 2)
    asked = replace(REPLAY, key="click-1")
    start = threading.Barrier(20)
    found: list[tuple[int, bool]] = []

    def ask() -> None:
        with database.connect() as own:
            start.wait()
            job, is_new = jobs.create(own, asked, "admin")
            found.append((job["id"], is_new))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({job_id for job_id, _ in found}) == 1
    assert sum(is_new for _, is_new in found) == 1
    assert records(conn, found[0][0]) == [("admin", "replay")]
    with pytest.raises(AlreadyThere, match="click-1"):
        jobs.create(conn, replace(asked, reason="another one"), "admin")


# -- pause, resume, cancel ----------------------------------------------------------------------------------------


def test_a_paused_job_begins_nothing_counts_what_it_began_and_goes_on_where_it_was(conn: Connection) -> None:
    refs = dead(conn, 3)
    job = made(conn, REPLAY)
    step(conn, job)
    jobs.steer(conn, job, "pause", "admin", "wait")
    succeed(conn, refs[0])
    assert jobs.runnable(conn) == [job]
    assert steps(conn, job) == []
    assert numbers(conn, job) == (3, 1, 0, 0, 0, 2)
    assert jobs.runnable(conn) == []
    jobs.steer(conn, job, "resume", "admin", None)
    assert jobs.runnable(conn) == [job]
    assert steps(conn, job, delivers(conn)) == refs[1:]
    assert records(conn, job) == [("admin", "replay"), ("admin", "pause"), ("admin", "resume"), ("madeira", "end")]


def test_a_cancelled_job_begins_nothing_more_and_ends_with_what_it_began(conn: Connection) -> None:
    refs = dead(conn, 3)
    job = made(conn, REPLAY)
    step(conn, job)
    assert shown(conn, job)["begun"] == 1
    jobs.steer(conn, job, "cancel", "admin", "enough")
    assert steps(conn, job) == []
    assert shown(conn, job)["finished_at"] is None
    kill(conn, refs[0])
    assert step(conn, job).is_over
    assert numbers(conn, job) == (3, 0, 1, 0, 0, 2)
    assert shown(conn, job)["state"] == "cancelled"
    assert [making.delivery(conn, ref.delivery_id)["status"] for ref in refs[1:]] == ["dead", "dead"]
    assert records(conn, job) == [("admin", "replay"), ("admin", "cancel"), ("madeira", "end")]
    assert jobs.runnable(conn) == []


def test_a_job_is_steered_twice_as_once_and_not_after_its_end(conn: Connection) -> None:
    dead(conn, 1)
    job = made(conn, REPLAY)
    jobs.steer(conn, job, "pause", "admin", "wait")
    again = jobs.steer(conn, job, "pause", "ben", "wait")
    assert again is not None
    paused = conn.execute("SELECT at FROM audit WHERE action = 'pause'").fetchone()
    assert (again.job["state"], again.already, (again.since,), again.by) == ("paused", True, paused, "admin")
    first = jobs.steer(conn, job, "resume", "ben", None)
    assert first is not None
    assert (first.already, first.by) == (False, "ben")
    steps(conn, job, delivers(conn))
    assert records(conn, job) == [("admin", "replay"), ("admin", "pause"), ("ben", "resume"), ("madeira", "end")]
    for word in ("pause", "resume", "cancel"):
        with pytest.raises(IllegalTransition, match="done already"):
            jobs.steer(conn, job, word, "admin", "late")
    assert jobs.steer(conn, job + 1, "pause", "admin", "wait") is None


def test_the_record_of_a_jobs_end_says_what_came_of_it(conn: Connection) -> None:
    [_, second] = dead(conn, 2)
    job = made(conn, replace(REPLAY, selection=Selection(endpoint="a")))
    steps(conn, job, delivers(conn, frozenset([second])))
    end, start = audit.page(conn, limit=2, what=f"job {job}")
    assert start["detail"] == {"filter": {"endpoint": "a"}, "total": 2, "among": "dead", "ordered": True, "rate": None}
    assert end["detail"] == {"state": "done", "total": 2, "done": 1, "failed": 1, "skipped": 0, "begun": 0, "skips": {}}
    assert (start["why"], end["why"]) == (REPLAY.reason, REPLAY.reason)


def test_a_job_whose_pages_fail_again_and_again_fails_and_says_why(conn: Connection) -> None:
    dead(conn)
    job = made(conn, REPLAY)
    for _ in range(job_steps.MAX_STUMBLES):
        assert shown(conn, job)["state"] == "running"
        assert not job_steps.stumble(conn, job, "ValueError: no")
    assert step(conn, job).is_over
    found = shown(conn, job)
    assert (found["state"], found["error"]) == ("failed", "ValueError: no")
    assert records(conn, job) == [("admin", "replay"), ("madeira", "end")]
    with pytest.raises(IllegalTransition, match="failed already"):
        jobs.steer(conn, job, "resume", "admin", None)


def test_a_job_that_fails_still_counts_what_it_has_begun(conn: Connection) -> None:
    [ref, _] = dead(conn, 2)
    job = made(conn, REPLAY)
    step(conn, job)
    for _ in range(job_steps.MAX_STUMBLES):
        job_steps.stumble(conn, job, "ValueError: no")
    assert steps(conn, job) == []
    assert shown(conn, job)["finished_at"] is None
    succeed(conn, ref)
    assert step(conn, job).is_over
    assert numbers(conn, job) == (2, 1, 0, 0, 0, 1)
    assert shown(conn, job)["error"] == "ValueError: no"


def test_a_job_of_which_not_even_the_beginnings_can_be_counted_ends_all_the_same(conn: Connection) -> None:
    dead(conn)
    job = made(conn, REPLAY)
    answers = [job_steps.stumble(conn, job, "ValueError: no") for _ in range(2 * job_steps.MAX_STUMBLES)]
    assert answers == [False] * (2 * job_steps.MAX_STUMBLES - 1) + [True]
    assert step(conn, job).is_over


def test_a_page_that_succeeds_makes_up_for_those_that_failed(conn: Connection) -> None:
    dead(conn, 3)
    job = made(conn, REPLAY)
    for _ in range(3):
        for _ in range(job_steps.MAX_STUMBLES - 1):
            assert not job_steps.stumble(conn, job, "once")
        [ref] = step(conn, job).begun
        succeed(conn, ref)
    assert (shown(conn, job)["state"], shown(conn, job)["error"]) == ("running", None)


# -- previews and lists -------------------------------------------------------------------------------------------


def test_a_preview_counts_shows_a_few_and_changes_nothing(conn: Connection) -> None:
    refs = dead(conn, 4)
    preview = jobs.preview(conn, replace(REPLAY, selection=Selection(endpoint="a")))
    assert preview.total == 4
    assert [found["event_id"] for found in preview.sample] == [event_id(conn, ref) for ref in refs[:3]]
    assert preview.sample[0]["last_error"] == "400"
    assert jobs.page(conn, limit=10) == []


@pytest.mark.parametrize("job", [CANCEL, replace(CANCEL, among="dead"), REROUTE], ids=["unfinished", "dead", "reroute"])
def test_every_kind_of_job_can_be_previewed(conn: Connection, job: NewJob) -> None:
    making.accept(conn)
    making.routed(conn)
    dead(conn, 2)
    unrouted(conn)
    born_dead(conn)
    preview = jobs.preview(conn, job)
    assert preview.total == {"unfinished": 2, "dead": 3}.get(job.among if job.action == "cancel" else "", 2)
    assert len(preview.sample) == min(3, preview.total)


def test_jobs_are_listed_page_by_page_the_latest_first(conn: Connection) -> None:
    dead(conn, 1)
    making.routed(conn)
    ids = [made(conn, job) for job in (REPLAY, CANCEL, REPLAY)]
    steps(conn, ids[0], delivers(conn))
    assert [job["id"] for job in jobs.page(conn, limit=2)] == [ids[2], ids[1]]
    assert [job["id"] for job in jobs.page(conn, limit=2, before=ids[1])] == [ids[0]]
    assert [job["id"] for job in jobs.page(conn, limit=9, state="done")] == [ids[0]]
    assert [job["id"] for job in jobs.page(conn, limit=9, action="cancel")] == [ids[1]]
