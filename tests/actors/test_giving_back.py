"""A worker that loses Postgres or is stopped: what is in hand is finished or given back, and nothing is burnt."""

import time
from threading import Event, Thread

import dramatiq

from madeira.broker.queues import DELIVER, ROUTE, Ensure
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.actors.interleaving import GOOD, in_the_middle
from tests.receiver import Receiver
from tests.servers import OwnPostgres
from tests.store import making
from tests.system.harness import wait_until


def test_while_postgres_is_away_nothing_is_handed_out_nor_burnt(
    make: Make, receiver: Receiver, own_postgres: OwnPostgres
) -> None:
    process = make(database_url=own_postgres.url)
    process.start()
    ref, gate = in_the_middle(process, receiver, GOOD)
    waiting = process.routed(queued=False)
    seq = making.accept(process.conn, source="test", event_type="a.b")
    process.conn.close()
    own_postgres.kill()
    gate.set()
    process.queues.ensure([Ensure(ROUTE, str(seq))])
    wait_until(lambda: not process.broker.gate.is_open(), what="the closed gate")
    process.queue(waiting)
    process.wait_place_of(ROUTE, str(seq), "waiting")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert process.place(waiting).kind == "waiting", "nothing is handed out"
        assert process.place(ref).kind == "held", "its outcome is in hand"
        Event().wait(0.05)
    own_postgres.start()
    process.wait_status(ref, "succeeded")
    process.wait_status(waiting, "succeeded")
    row = wait_until(lambda: (row := making.event(process.conn, seq))["status"] == "succeeded" and row, what="the routed event")
    assert row["route_failures"] == 0
    for one in (ref, waiting):
        assert process.outcomes(one) == ["succeeded"]
        assert (process.delivery(one)["failures"], process.delivery(one)["lost"]) == (0, 0)
    assert receiver.count() == 3
    assert process.redis.hlen("m:route:stumbles") == process.redis.hlen("m:deliver:stumbles") == 0


def test_a_worker_that_is_stopped_gives_back_to_the_front_what_it_has_not_started(make: Make, receiver: Receiver) -> None:
    process = make({"rate": 0.05, "burst": 2}, threads=6)
    go, started = Event(), [Event() for _ in range(6)]

    def hold(n: int) -> None:
        started[n].set()
        go.wait(20)

    # The lane was idle for long: its burst is there.
    process.redis.set("m:lane:a:tat", "1")
    actor = dramatiq.actor(hold, actor_name="hold", queue_name="holding", broker=process.broker)
    for n in range(6):
        actor.send(n)
    process.start()
    assert all(event.wait(5) for event in started)
    refs = [process.routed() for _ in range(3)]
    wait_until(lambda: len(process.broker.hands.of(DELIVER)) == 2, what="two deliveries in memory")
    stopping = Thread(target=process.stop)
    stopping.start()
    wait_until(lambda: all(process.place(ref).kind == "waiting" for ref in refs), 5, what="all given back while jobs run on")
    assert [process.place(ref).ahead for ref in refs] == [0, 1, 2], "in their old order"
    assert process.queues.sizes([DELIVER])[DELIVER].held == 0
    go.set()
    stopping.join(10)
    assert receiver.count() == 0
    assert all(process.delivery(ref)["attempt"] == 0 for ref in refs)
    again = make({"rate": 0.05, "burst": 2}, threads=6)
    again.start()
    for ref in refs[:2]:
        again.wait_status(ref, "succeeded")
    assert again.place(refs[2]).kind == "waiting", "their rate tokens came back too, and no more than theirs"


def test_messages_of_two_queues_never_share_a_hand(make: Make) -> None:
    """Each consumer counts its own calls: the third of one must not be taken for the third of the other."""
    process = make()
    process.tools.rules.start()
    assert process.tools.rules.wait(10)
    taken: dict[str, str] = {}
    for queue in (DELIVER, ROUTE):
        consumer = process.broker.consume(queue, prefetch=9, timeout=100)
        for n in range(1, 4):
            if queue == DELIVER:
                process.routed()
            else:
                process.queues.ensure([Ensure(ROUTE, str(n))])
            message = wait_until(lambda of=consumer: next(of), what="a message")
            taken[message.options["redis_message_id"]] = queue
    assert {name: process.broker.hands.get(name).queue for name in taken} == taken  # type: ignore[union-attr]
    assert len(taken) == 6


def test_a_call_under_way_is_finished_before_its_worker_ends(process: InProcess, receiver: Receiver) -> None:
    ref, gate = in_the_middle(process, receiver, GOOD)
    stopping = Thread(target=process.stop)
    stopping.start()
    wait_until(lambda: process.broker.stopping, what="the end of fetching")
    late = process.routed()
    gate.set()
    stopping.join(10)
    assert process.delivery(ref)["status"] == "succeeded"
    assert (process.place(ref).kind, process.place(late).kind) == ("nowhere", "waiting")
    assert receiver.count() == 1
