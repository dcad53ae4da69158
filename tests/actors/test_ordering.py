"""Order in a worker: of a key only the first is queued and called, and whoever ends it has the next one go."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from madeira.broker.queues import DELIVER, ROUTE, Ensure, delivery_key, ensure_delivery
from madeira.broker.rebuild import fill
from madeira.records import DeliveryRef, PlannedDelivery
from madeira.store import cancelling, events, holding, ordering, routing
from madeira.store import replay as replaying
from tests.actors.conftest import Make
from tests.actors.inprocess import InProcess
from tests.receiver import Answer, Gate, Receiver
from tests.store import making
from tests.system.harness import wait_until


@pytest.fixture
def process(make: Make) -> InProcess:
    """A worker process whose endpoint takes the events of an account in order; the test starts it."""
    process = make({"ordering": "payload.account", "retry": {"initial": 0.1, "max": 0.1, "max_attempts": 2}})
    process.tools.database.open()
    return process


def accepted(process: InProcess, n: int, account: str = "k", **fields: Any) -> list[int]:
    """Accept events of an account, which the route `a` matches; their places in the order of acceptance."""
    payloads = [json.dumps({"account": account, "n": i}) for i in range(n)]
    new = [making.new_event(event_type="a.b", payload=payload, **fields) for payload in payloads]
    return [answer.seq for answer in events.insert(process.conn, new)]


def born(process: InProcess, n: int, account: str = "k") -> list[DeliveryRef]:
    """Deliveries of events of an account, in their order; not queued."""
    plan = [PlannedDelivery("a", "a", ("a",), ordering_key=account)]
    results = routing.route(process.conn, [(seq, plan) for seq in accepted(process, n, account)])
    return [ref for result in results for ref in result.refs]


def numbers(receiver: Receiver) -> list[int]:
    """The numbers of the events as they were called."""
    return [call.json()["payload"]["n"] for call in receiver.calls]


def kinds(process: InProcess, refs: Sequence[DeliveryRef]) -> list[str]:
    """Where the broker has deliveries."""
    return [place.kind for place in process.queues.where(DELIVER, [delivery_key(ref) for ref in refs])]


def act(process: InProcess, ref: DeliveryRef, what: Callable[..., Any], **options: Any) -> Any:
    row = process.event(ref)
    return what(process.conn, row["source"], row["event_id"], "the test", "a test", **options)


def test_events_are_called_in_order_however_their_keys_are_queued(process: InProcess, receiver: Receiver) -> None:
    """All are thrown at the worker at once, the last one first: each is called alone, after those before it."""
    refs = born(process, 6)
    process.start()
    for ref in reversed(refs):
        process.queue(ref)
    process.wait_status(refs[-1], "succeeded")
    assert numbers(receiver) == [0, 1, 2, 3, 4, 5]
    assert receiver.max_overlap == 1
    assert [process.outcomes(ref) for ref in refs] == [["succeeded"]] * 6
    for ref in refs:
        process.wait_place(ref, "nowhere")


def test_what_is_behind_is_forgotten_until_its_turn_has_come(process: InProcess, receiver: Receiver) -> None:
    """While the first is called the others are nowhere in Redis, and nothing asks for them."""
    gate = Gate()
    receiver.queue("/a", Answer(hold=gate))
    refs = born(process, 3)
    process.queue(*refs)
    process.start()
    receiver.wait_for(1)
    process.wait_place(refs[1], "nowhere")
    process.wait_place(refs[2], "nowhere")
    assert kinds(process, refs) == ["held", "nowhere", "nowhere"]
    assert process.reconcile() == {}
    gate.set()
    process.wait_status(refs[-1], "succeeded")
    assert numbers(receiver) == [0, 1, 2]


def test_a_retry_keeps_its_place_and_a_death_lets_the_next_one_go(process: InProcess, receiver: Receiver) -> None:
    """The second fails once, the third for good; what is behind them waits, then goes."""
    receiver.queue("/a", Answer(), Answer(status=503), Answer(), Answer(status=400), Answer())
    refs = born(process, 4)
    process.queue(refs[0])
    process.start()
    process.wait_status(refs[-1], "succeeded")
    assert numbers(receiver) == [0, 1, 1, 2, 3]
    assert [process.delivery(ref)["status"] for ref in refs] == ["succeeded", "succeeded", "dead", "succeeded"]


def test_a_receiver_that_is_gone_holds_a_key_at_its_first_until_it_is_mended(process: InProcess, receiver: Receiver) -> None:
    """The one that was answered 410 keeps its place and its budget; what is behind it is not even queued."""
    receiver.queue("/a", Answer(status=410))
    refs = born(process, 3)
    process.queue(refs[0])
    process.start()
    wait_until(lambda: _state(process) == "disabled", what="the endpoint is disabled")
    process.wait_place(refs[0], "waiting")
    assert kinds(process, refs) == ["waiting", "nowhere", "nowhere"]
    changed = holding.change(process.conn, "a", "enable", who="the test", why=None)
    assert changed is not None
    assert changed.version is not None
    process.queues.hold("a", changed.version, "")
    process.wait_status(refs[-1], "succeeded")
    assert numbers(receiver) == [0, 0, 1, 2]
    assert process.delivery(refs[0])["failures"] == 0


def _state(process: InProcess) -> str | None:
    now = holding.read(process.conn, "a")
    return now.state if now else None


def test_keys_do_not_wait_for_each_other(process: InProcess, receiver: Receiver) -> None:
    gate = Gate()
    receiver.queue("/a", Answer(hold=gate))
    slow, quick = born(process, 2, "slow"), born(process, 3, "quick")
    process.queue(slow[0])
    process.start()
    receiver.wait_for(1)
    process.queue(quick[0])
    process.wait_status(quick[-1], "succeeded")
    assert process.delivery(slow[1])["status"] == "pending"
    gate.set()
    process.wait_status(slow[-1], "succeeded")


def test_routing_queues_the_first_only_and_keeps_the_order_of_acceptance(process: InProcess, receiver: Receiver) -> None:
    """Routed one by one, the last one first: those that come too early wait for the others."""
    seqs = accepted(process, 5)
    process.start()
    for seq in reversed(seqs):
        process.queues.ensure([Ensure(ROUTE, str(seq))])
        wait_until(lambda seq=seq: making.event(process.conn, seq)["routed_at"], what="its routing")  # type: ignore[misc]
    wait_until(lambda: making.event(process.conn, seqs[-1])["status"] == "succeeded", what="the end of the last one")
    assert numbers(receiver) == [0, 1, 2, 3, 4]


def test_an_event_that_is_not_routed_yet_holds_up_what_came_after_it(process: InProcess, receiver: Receiver) -> None:
    """It is looked at again within a second, with nothing to wake it."""
    first, second = accepted(process, 2)
    process.start()
    process.queues.ensure([Ensure(ROUTE, str(second))])
    wait_until(lambda: making.event(process.conn, second)["routed_at"], what="its routing")
    [(delivery_id,)] = process.conn.execute("SELECT id FROM delivery")
    process.wait_place(DeliveryRef(delivery_id, second, "a"), "delayed")
    assert receiver.calls == []
    process.queues.ensure([Ensure(ROUTE, str(first))])
    wait_until(lambda: making.event(process.conn, second)["status"] == "succeeded", 5, what="both deliveries")
    assert numbers(receiver) == [0, 1]


def test_what_was_replayed_waits_for_the_one_in_hand_and_then_goes_first(process: InProcess, receiver: Receiver) -> None:
    """Queued by hand it is refused and forgotten; the end of the call that is under way lets it go before all others."""
    gate = Gate()
    receiver.queue("/a", Answer(status=400), Answer(hold=gate))
    refs = born(process, 3)
    process.queue(refs[0])
    process.start()
    process.wait_status(refs[0], "dead")
    receiver.wait_for(2)
    assert ordering.leading(process.conn, act(process, refs[0], replaying.replay).refs) == []
    process.queue(refs[0])
    process.wait_place(refs[0], "nowhere")
    gate.set()
    process.wait_status(refs[2], "succeeded")
    assert numbers(receiver) == [0, 1, 0, 2]


def test_a_key_whose_first_was_cancelled_goes_on_although_nobody_was_told(process: InProcess, receiver: Receiver) -> None:
    """The cancel's key is still queued: its claim is refused, and has the next one go."""
    refs = born(process, 2)
    process.queue(refs[0])
    act(process, refs[0], cancelling.cancel)
    process.start()
    process.wait_status(refs[1], "succeeded")
    assert numbers(receiver) == [1]


def test_reconcile_puts_back_the_first_of_a_key_and_nothing_else(process: InProcess, receiver: Receiver) -> None:
    """The keys are lost: one of them is wanted, and a second run finds nothing."""
    refs = born(process, 20)
    others = born(process, 3, "other")
    making.settled(process.conn, making.claimed(process.conn, refs[0]))
    assert process.reconcile() == {"delivery_not_queued": 2}
    assert kinds(process, refs[:3]) == ["nowhere", "waiting", "nowhere"]
    assert kinds(process, others) == ["waiting", "nowhere", "nowhere"]
    assert process.reconcile() == {}
    process.start()
    process.wait_status(refs[-1], "succeeded")
    process.wait_status(others[-1], "succeeded")


def test_what_ended_and_is_still_queued_is_forgotten_for_the_next_of_its_key(process: InProcess) -> None:
    """A worker died after it settled: its key waits for the end of the lease, and reconcile is quicker."""
    first, second = born(process, 2)
    process.queues.ensure([ensure_delivery(first)._replace(delay_s=60.0)])
    making.settled(process.conn, making.claimed(process.conn, first))
    found = process.reconcile()
    assert found["deliver_finished_but_queued"] == 1
    assert kinds(process, [first, second]) == ["nowhere", "waiting"]


def test_a_rebuild_queues_the_first_of_each_key(process: InProcess, receiver: Receiver) -> None:
    """The order holds over a Redis that was wiped."""
    refs = born(process, 3)
    others = born(process, 2, "other")
    process.redis.flushall()
    assert process.queues.rebuild_begin("test")
    assert process.queues.rebuild_commit("test")
    assert fill(process.queues, process.tools.database) == 2
    assert kinds(process, [*refs, *others]) == ["waiting", "nowhere", "nowhere", "waiting", "nowhere"]
    process.start()
    process.wait_status(refs[-1], "succeeded")
    process.wait_status(others[-1], "succeeded")
    assert [n for n in numbers(receiver) if n == 2] == [2]
