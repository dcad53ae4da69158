"""What people are told: once per episode, by the log and by an event where somebody asked for it, and never in a circle."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from madeira.records import DeliveryRef
from madeira.store import holding, notices
from madeira.store.notices import Kind
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Receiver
from tests.store import making
from tests.store.making import GIVE_UP
from tests.system.harness import configure, toml, wait_until

#: `a` takes whatever no route of another source gets; `pager` is told of Madeira itself.
ROUTES = [
    {"name": "all", "endpoint": "a"},
    {"name": "notices", "source": "madeira", "event_type": "madeira.*", "endpoint": "pager"},
]

Told = Callable[..., InProcess]


@pytest.fixture
def told(database_url: str, make: Make, receiver: Receiver) -> Told:
    """Makes a worker process, started or not, with the endpoints `a` and `pager`."""

    def process(*, start: bool = False, routes: list[dict[str, str]] | None = None, **a: Any) -> InProcess:
        made = make()
        endpoints = {"a": {"url": receiver.url("/a"), **a}, "pager": {"url": receiver.url("/pager")}}
        configure(database_url, toml(endpoints, ROUTES if routes is None else routes))
        if start:
            made.start()
        else:
            made.tools.database.open()
            made.tools.rules.start()
        assert made.tools.rules.wait(10)
        return made

    return process


def run(process: InProcess) -> list[dict[str, Any]]:
    """A run of `notify`; the lines that it logged, without where."""
    # Imported when the actors have a broker.
    from actors import notify

    with capture_logs() as lines:
        notify.run(process.tools)
    return [line for line in lines if line["event"] in set(Kind)]


def died(process: InProcess, *endpoints: str) -> list[DeliveryRef]:
    """Deliveries that have died, and were noted as `dead_letter` notes them."""
    refs = making.routed(process.conn, endpoints)
    for ref in refs:
        making.settled(process.conn, making.claimed(process.conn, ref), GIVE_UP)
    with process.conn.transaction():
        notices.dead_letters(process.conn, [notices.Died(endpoint, 1, {"reason": "400"}) for endpoint in endpoints])
    return refs


def kinds(process: InProcess) -> list[str]:
    """What was to be told so far, in order."""
    return [notice.kind for notice in reversed(notices.latest(process.conn))]


def own_events(process: InProcess) -> list[str]:
    rows = process.conn.execute("SELECT event_type FROM event WHERE source = 'madeira' ORDER BY seq")
    return [event_type for (event_type,) in rows]


# -- who is told --------------------------------------------------------------------------------------------------------


def test_the_first_dead_letter_of_an_endpoint_calls_who_asked_for_it_and_the_next_ones_do_not(
    told: Told, receiver: Receiver
) -> None:
    """One signed call with what a person needs to begin; the death is told by the way of every other event."""
    process = told(start=True)
    receiver.answer("/a", Answer(status=400))
    process.wait_status(process.routed("a"), "dead")
    [call] = receiver.wait_for(1, path="/pager")
    document = call.json()
    assert (document["event_type"], document["source"]) == ("madeira.dead_letters.began", "madeira")
    assert document["payload"]["endpoint"] == "a"
    assert document["payload"]["detail"]["failure_class"] == "receiver"
    assert document["payload"]["detail"]["event_id"]
    assert call.headers["webhook-signature"]
    later = [process.routed("a") for _ in range(4)]
    for ref in later:
        process.wait_status(ref, "dead")
        wait_until(lambda ref=ref: process.delivery(ref)["notified_at"], what="the dead letter was told")
    assert kinds(process) == ["dead_letters.began"]
    assert run(process) == []
    assert own_events(process) == ["madeira.dead_letters.began"]


def test_a_notice_about_the_endpoint_that_is_told_of_notices_is_a_line_in_the_log_only(told: Told) -> None:
    """A receiver that is down is not sent that it is down: there is no circle."""
    process = told()
    died(process, "pager")
    [line] = run(process)
    assert (line["event"], line["endpoint"], line["log_level"]) == ("dead_letters.began", "pager", "error")
    assert own_events(process) == []
    died(process, "a")
    assert [line["endpoint"] for line in run(process)] == ["a"]
    assert own_events(process) == ["madeira.dead_letters.began"]


def test_where_nobody_asked_there_is_a_line_in_the_log_and_no_event(told: Told) -> None:
    """Nothing that would end as unrouted; a route that names no source gets nothing of Madeira's own."""
    process = told(routes=[{"name": "all", "endpoint": "pager"}])
    died(process, "a")
    assert len(run(process)) == 1
    assert own_events(process) == []


def test_a_route_that_names_no_source_gets_no_notice_beside_one_that_does(told: Told) -> None:
    """What Madeira tells of itself is not sent to partners by a route that takes everything."""
    process = told(start=True)
    died(process, "b")
    run(process)
    row: Any = wait_until(
        lambda: process.conn.execute(
            "SELECT array_agg(endpoint) FROM delivery d JOIN event e ON e.seq = d.event_seq WHERE source = 'madeira'"
        ).fetchone()[0],  # type: ignore[index]
        what="its routing",
    )
    assert row == ["pager"]


def test_processes_that_say_notices_at_once_say_each_once(told: Told) -> None:
    """Four threads, five notices: five lines, five events."""
    process = told()
    for i in range(5):
        died(process, f"e{i}")
    start = threading.Barrier(4)
    from actors import notify

    def say() -> None:
        start.wait()
        for _ in range(3):
            notify.say(process.tools)

    threads = [threading.Thread(target=say) for _ in range(4)]
    with capture_logs() as lines:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line["endpoint"] for line in lines if line["event"] == "dead_letters.began") == [f"e{i}" for i in range(5)]
    assert len(own_events(process)) == 5


def test_what_another_process_is_saying_just_now_is_left_to_it(told: Told) -> None:
    """It is passed over without a wait; should the other one die, it is said after all."""
    process = told()
    from actors import notify

    died(process, "a")
    with process.conn.transaction(force_rollback=True):
        assert len(notices.unsaid(process.conn, 10)) == 1
        assert notify.say(process.tools) == 0
    assert notify.say(process.tools) == 1
    assert notify.say(process.tools) == 0


def test_the_periodic_actors_run_as_messages_of_their_own_queues(told: Told) -> None:
    """As the scheduler sends them: the notice is said, and its event is counted."""
    process = told(start=True)
    from actors.notify import notify
    from actors.rollup import rollup

    died(process, "b")
    notify.send()
    wait_until(lambda: own_events(process), what="the notice was said")
    rollup.send()
    counted = "SELECT accepted FROM rollup_source WHERE span = 'hour' AND source = 'madeira'"
    wait_until(lambda: process.conn.execute(counted.encode()).fetchall() == [(1,)], what="the event was counted")


# -- episodes -----------------------------------------------------------------------------------------------------------


def test_an_episode_of_dead_letters_ends_with_the_last_of_them_or_after_a_quiet_hour(told: Told) -> None:
    """Until then nobody is told again."""
    process = told()
    died(process, "a")
    run(process)
    died(process, "a")
    run(process)
    assert kinds(process) == ["dead_letters.began"]
    process.conn.execute("UPDATE episode SET last_at = last_at - interval '61 min'")
    run(process)
    died(process, "a")
    assert kinds(process) == ["dead_letters.began"] * 2
    for row in process.conn.execute("SELECT id FROM delivery WHERE died_at IS NOT NULL").fetchall():
        process.conn.execute(
            "UPDATE delivery SET status = 'pending', died_at = NULL, finished_at = NULL WHERE id = %s", (row[0],)
        )
    run(process)
    died(process, "a")
    assert kinds(process) == ["dead_letters.began"] * 3


def opened(process: InProcess, receiver: Receiver) -> None:
    """Let the breaker of `a` open."""
    receiver.answer("/a", Answer(status=503))
    for _ in range(5):
        process.routed("a")
    wait_until(lambda: process.queues.lane_states(["a"])[0].breaker.state == "open", what="the breaker")


BREAKER = {"breaker": {"enabled": True, "hold": 60}, "retry": {"initial": 60, "max": 60}}


def works_again(process: InProcess, receiver: Receiver) -> None:
    """Let a call of `a` succeed, and be counted."""
    receiver.answer("/a", Answer())
    process.wait_status(process.routed("a"), "succeeded")
    wait_until(lambda: process.queues.opened(["a"])[0].has_succeeded, what="the verdict")


def test_a_breaker_is_told_of_when_it_opens_and_when_it_closes(told: Told, receiver: Receiver) -> None:
    """Also when nothing waits in its lane any more."""
    process = told(start=True, **BREAKER)
    opened(process, receiver)
    [line] = run(process)
    assert (line["event"], line["endpoint"], line["lane"]) == ("breaker.opened", "a", "a")
    assert line["reason"] == "5 failures in a row"
    assert run(process) == []
    process.redis.delete("m:lane:a:breaker")
    works_again(process, receiver)
    [line] = run(process)
    assert (line["event"], line["log_level"]) == ("breaker.closed", "info")
    assert run(process) == []


def test_a_breaker_that_redis_has_forgotten_is_not_told_as_closed_while_the_receiver_fails(
    told: Told, receiver: Receiver
) -> None:
    """Nor is it told anew when it opens again; only a call that succeeds ends the episode."""
    process = told(start=True, **BREAKER)
    opened(process, receiver)
    assert [line["event"] for line in run(process)] == ["breaker.opened"]
    process.redis.delete("m:opened", "m:lane:a:breaker", "m:lane:a:verdicts")
    assert run(process) == []
    opened(process, receiver)
    assert run(process) == []
    assert kinds(process) == ["breaker.opened"]
    process.redis.delete("m:lane:a:breaker")
    works_again(process, receiver)
    assert [line["event"] for line in run(process)] == ["breaker.closed"]


def test_an_open_breaker_of_which_nothing_was_heard_for_a_day_is_no_matter_any_more(told: Told, receiver: Receiver) -> None:
    """Its endpoint may be gone; should it open again, that is told."""
    process = told(start=True, **BREAKER)
    opened(process, receiver)
    run(process)
    process.redis.delete("m:lane:a:breaker")
    process.conn.execute("UPDATE episode SET last_at = last_at - interval '25 h'")
    assert run(process) == []
    opened(process, receiver)
    assert [line["event"] for line in run(process)] == ["breaker.opened"]


def test_a_breaker_that_was_open_for_a_moment_only_is_told_of_all_the_same(told: Told, receiver: Receiver) -> None:
    """It opened and closed between two looks."""
    process = told(start=True, **BREAKER)
    opened(process, receiver)
    process.redis.delete("m:lane:a:breaker")
    works_again(process, receiver)
    assert [line["event"] for line in run(process)] == ["breaker.opened", "breaker.closed"]
    assert run(process) == []


def test_a_breaker_that_opens_while_somebody_is_told_is_not_forgotten(told: Told, receiver: Receiver) -> None:
    """What was noted of an earlier opening goes, that of a later one stays."""
    process = told(start=True, **BREAKER)
    opened(process, receiver)
    [first] = process.queues.opened()
    process.redis.hset("m:opened", "a", "99")
    process.queues.opened_seen([first])
    assert [o.mark for o in process.queues.opened()] == ["99"]
    process.queues.opened_seen(process.queues.opened())
    assert process.queues.opened() == []


def test_an_endpoint_that_is_disabled_is_told_of_once(told: Told) -> None:
    """With who and why; doing it again, enabling and pausing say nothing."""
    process = told()
    for action, why in (("pause", "x"), ("disable", "moving"), ("disable", "moving still"), ("enable", None)):
        holding.change(process.conn, "a", action, who="ann", why=why)  # type: ignore[arg-type]
    [line] = run(process)
    assert (line["event"], line["endpoint"], line["reason"], line["by"]) == ("endpoint.disabled", "a", "moving", "ann")


def test_a_receiver_that_is_gone_is_told_of(told: Told, receiver: Receiver) -> None:
    """410 disables the endpoint; whoever asked is called."""
    process = told(start=True)
    receiver.answer("/a", Answer(status=410))
    process.routed("a")
    wait_until(lambda: kinds(process) == ["endpoint.disabled"], what="the notice")
    run(process)
    [call] = receiver.wait_for(1, path="/pager")
    assert call.json()["payload"]["detail"]["by"] == "madeira"


def test_differences_that_reconcile_finds_are_told_of_when_they_begin(told: Told) -> None:
    """Runs that find some one after another are one episode; one that finds none ends it."""
    process = told()

    def found() -> int:
        return sum(process.reconcile().values())

    for _ in range(2):
        making.routed(process.conn)
        assert found() == 1
    assert kinds(process) == ["reconcile.differences"]
    assert found() == 0
    making.routed(process.conn)
    assert found() == 1
    assert kinds(process) == ["reconcile.differences"] * 2
    lines = run(process)
    assert [line["delivery_not_queued"] for line in lines] == [1, 1]


def test_a_run_while_another_one_is_under_way_does_nothing(told: Told) -> None:
    """Of two schedulers one is enough; the roll-ups go by the same rule."""
    process = told()
    from actors import notify, rollup
    from madeira.store import leases

    died(process, "a")
    for lease in (notify.LEASE, rollup.LEASE):
        assert leases.take(process.conn, lease, "another", 60)
    assert run(process) == []
    assert rollup.run(process.tools.database, lag_s=0) == 0
    for lease in (notify.LEASE, rollup.LEASE):
        leases.release(process.conn, lease, "another")
    assert len(run(process)) == 1
    # Two events (the notice is one), one attempt.
    assert rollup.run(process.tools.database, lag_s=0) == 3


def test_old_notices_are_removed(told: Told) -> None:
    """After ninety days."""
    process = told()
    died(process, "a")
    process.conn.execute("UPDATE notice SET at = at - interval '91 days'")
    died(process, "b")
    run(process)
    assert [notice.endpoint for notice in notices.latest(process.conn)] == ["b"]
