"""Jobs that cancel or reroute: what waits or found no route when the job was made, each once, and nothing besides."""

from dataclasses import replace
from typing import Any

import psycopg

from madeira.records import DeliveryRef, PlannedDelivery
from madeira.store import routing
from madeira.store.job_steps import Step
from tests.store import making
from tests.store.stepping import CANCEL, REROUTE, born_dead, dead, kill, made, numbers, shown, steps, unrouted

Connection = psycopg.Connection[Any]


def test_a_cancel_ends_what_waits_and_asks_for_the_end_of_what_is_called(conn: Connection) -> None:
    waiting = making.routed(conn)[0]
    called, lucky = making.routed(conn)[0], making.routed(conn)[0]
    held, held_lucky = making.claimed(conn, called), making.claimed(conn, lucky)
    early = making.accept(conn)
    [over] = dead(conn)
    job = made(conn, CANCEL)
    assert numbers(conn, job) == (4, 0, 0, 0, 0, 4)
    ended: list[DeliveryRef] = []
    unrouted: list[int] = []

    def note(done: Step) -> None:
        ended.extend(done.ended)
        unrouted.extend(done.unrouted)

    steps(conn, job, note)
    assert (ended, unrouted) == ([waiting], [early])
    assert numbers(conn, job) == (4, 2, 0, 0, 2, 0)
    making.settled(conn, held, making.RETRY)
    making.settled(conn, held_lucky)
    steps(conn, job)
    assert numbers(conn, job) == (4, 3, 0, 1, 0, 0)
    assert shown(conn, job)["skips"] == {"succeeded": 1}
    assert making.delivery(conn, over.delivery_id)["status"] == "dead"
    assert making.event(conn, early)["status"] == "cancelled"
    assert making.delivery(conn, waiting.delivery_id)["job_id"] == job
    assert making.counts_agree(conn)


def test_a_cancel_leaves_alone_what_was_accepted_after_it_was_made(conn: Connection) -> None:
    making.accept(conn)
    making.routed(conn)
    job = made(conn, CANCEL)
    later, ref = making.accept(conn), making.routed(conn)[0]
    steps(conn, job)
    assert numbers(conn, job) == (2, 2, 0, 0, 0, 0)
    assert making.event(conn, later)["status"] == "pending"
    assert making.delivery(conn, ref.delivery_id)["status"] == "pending"


def test_a_cancel_meets_what_is_routed_before_it_comes_to_it(conn: Connection) -> None:
    seq = making.accept(conn)
    job = made(conn, CANCEL)
    [ref] = routing.route(conn, [(seq, [PlannedDelivery("a", "a")])])[0].refs
    steps(conn, job)
    assert making.delivery(conn, ref.delivery_id)["status"] == "cancelled"
    assert numbers(conn, job) == (1, 1, 0, 0, 0, 0)


def test_a_cancel_of_the_dead_ends_them_and_nothing_else(conn: Connection) -> None:
    refs = dead(conn, 2)
    both = making.routed(conn, ("a", "b"))
    kill(conn, both[0])
    job = made(conn, replace(CANCEL, among="dead"))
    steps(conn, job)
    assert [making.delivery(conn, ref.delivery_id)["status"] for ref in (*refs, *both)] == ["cancelled"] * 3 + ["pending"]
    assert making.event(conn, refs[0].seq)["status"] == "cancelled"
    assert making.event(conn, both[0].seq)["status"] == "delivering"
    assert numbers(conn, job) == (3, 3, 0, 0, 0, 0)
    assert making.counts_agree(conn)


def test_a_reroute_takes_what_found_no_route_and_what_was_born_dead(conn: Connection) -> None:
    seq, born, [attempted] = unrouted(conn), born_dead(conn), dead(conn)
    job = made(conn, REROUTE)
    to_route: list[int] = []
    steps(conn, job, lambda done: to_route.extend(done.to_route))
    assert sorted(to_route) == [seq, born.seq]
    assert making.event(conn, seq)["status"] == making.event(conn, born.seq)["status"] == "pending"
    assert making.event(conn, attempted.seq)["status"] == "dead"
    assert numbers(conn, job) == (2, 2, 0, 0, 0, 0)
    assert routing.route(conn, [(born.seq, [PlannedDelivery("a", "a")])])[0].refs
    assert making.counts_agree(conn)


def test_a_reroute_leaves_alone_what_another_one_took(conn: Connection) -> None:
    unrouted(conn)
    first, second = made(conn, REROUTE), made(conn, REROUTE)
    steps(conn, first)
    steps(conn, second)
    assert numbers(conn, first) == (1, 1, 0, 0, 0, 0)
    assert numbers(conn, second) == (1, 0, 0, 1, 0, 0)
