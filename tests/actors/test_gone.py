"""A receiver that answers 410: whom that ends, and what it may change of what a person has decided."""

from typing import Any

import psycopg
import pytest

from madeira.store import configuration, holding
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Gate, Receiver
from tests.system.harness import wait_until


def state(process: InProcess) -> str:
    now = holding.read(process.conn, "a")
    assert now is not None
    return now.state


@pytest.mark.parametrize("path", ["/{event_id}", "/x{?trace_id}"])
def test_gone_ends_one_delivery_only_where_the_url_depends_on_the_event(make: Make, receiver: Receiver, path: str) -> None:
    """The address of one event says nothing about those of the others: the endpoint stays as it is."""
    receiver.answer("/gone/e1", Answer(status=410))
    receiver.answer("/gone/x", Answer(status=410))
    process = make({"url": receiver.url("/gone") + path})
    process.start()
    ref = process.routed("a", event_id="e1")
    row = process.wait_status(ref, "dead")
    assert (row["failure_class"], row["last_error_code"]) == ("receiver", "http_410")
    process.wait_place(ref, "nowhere")
    assert state(process) == "active"


# -- what a person has decided ----------------------------------------------------------------------------------------


def act(process: InProcess, action: Any, why: str | None = None) -> None:
    """What the API does when a person holds an endpoint or lets it go."""
    changed = holding.change(process.conn, "a", action, who="ann", why=why)
    assert changed is not None
    assert changed.version is not None
    process.queues.hold("a", changed.version, "" if changed.now.state == "active" else changed.now.state)


def audit(conn: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """Who did what with endpoints, but for making them."""
    found = conn.execute("SELECT who, action FROM audit WHERE action IN ('pause', 'resume', 'disable', 'enable') ORDER BY id")
    return found.fetchall()


def under_way(process: InProcess, receiver: Receiver, n: int = 1) -> tuple[Gate, list[Any]]:
    """Calls that will be answered 410 once the gate is opened."""
    gate = Gate()
    receiver.queue("/a", *(Answer(status=410, hold=gate) for _ in range(n)))
    refs = [process.routed("a") for _ in range(n)]
    receiver.wait_for(n)
    return gate, refs


def test_an_answer_to_a_call_from_before_an_enable_does_not_disable_again(process: InProcess, receiver: Receiver) -> None:
    """Its delivery is called once more, and nothing is counted."""
    gate, [ref] = under_way(process, receiver)
    act(process, "disable", "moving")
    act(process, "enable")
    gate.set()
    row = process.wait_status(ref, "succeeded")
    assert (row["failures"], row["retries"], row["attempt"]) == (0, 0, 2)
    assert state(process) == "active"
    assert audit(process.conn) == [("ann", "disable"), ("ann", "enable")]


@pytest.mark.parametrize("action", ["pause", "disable"])
def test_an_answer_that_comes_late_leaves_a_persons_hold_and_its_reason_alone(
    process: InProcess, receiver: Receiver, action: str
) -> None:
    gate, [ref] = under_way(process, receiver)
    act(process, action, "their migration")
    before = holding.read(process.conn, "a")
    gate.set()
    row = process.wait_status(ref, "pending")
    process.wait_place(ref, "waiting")
    assert (row["failures"], row["retries"]) == (0, 0)
    assert holding.read(process.conn, "a") == before
    assert audit(process.conn) == [("ann", action)]
    assert process.place(ref).limit == (before.state if before else None)
    assert process.queues.lane_states(["a"])[0].retry_after_s == 0.0


def test_many_calls_that_are_answered_so_disable_once(make: Make, receiver: Receiver) -> None:
    """One row in the audit and one version, however many were under way; all wait, uncounted, and nothing is asked again."""
    process = make(threads=12)
    process.start()
    gate, refs = under_way(process, receiver, 4)
    version = configuration.version(process.conn)
    gate.set()
    for ref in refs:
        process.wait_place(ref, "waiting")
    assert state(process) == "disabled"
    assert audit(process.conn) == [("madeira", "disable")]
    assert configuration.version(process.conn) == version + 1
    assert [process.delivery(ref)["failures"] for ref in refs] == [0] * 4


def test_an_answer_at_the_url_from_before_a_change_does_not_disable_what_is_there_now(make: Make, receiver: Receiver) -> None:
    """A person has mended the URL while the old one was still being called."""
    process = make()
    process.start()
    gate, [ref] = under_way(process, receiver)
    process.conn.execute("UPDATE endpoint SET version = version + 1, updated_at = clock_timestamp() WHERE name = 'a'")
    gate.set()
    wait_until(lambda: process.outcomes(ref) == ["permanent"], what="the answer is on record")
    process.wait_place(ref, "waiting")
    assert state(process) == "active"
    assert process.place(ref).limit == "retry_after"
