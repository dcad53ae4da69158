"""Each kind of process by itself: the API takes in and works on nothing, and a dedicated worker can be missing."""

import contextlib

import pytest

from madeira.broker.queues import DELIVER, ROUTE, Queues
from tests.receiver import Receiver
from tests.system.conftest import Launch

pytestmark = pytest.mark.long


def test_without_a_worker_events_are_accepted_and_stay_queued(launch: Launch, receiver: Receiver) -> None:
    """The API consumes nothing: all is where it was put until a worker comes."""
    madeira = launch({"good": {"url": receiver.url("/good")}})
    madeira.api()
    events = [madeira.post("good.x") for _ in range(5)]
    with contextlib.closing(Queues(redis_url=madeira.redis_url, namespace=madeira.namespace)) as queues:
        size = queues.sizes()[ROUTE]
        assert (size.ready, size.held) == (5, 0)
        assert queues.alive(60) == 0
        assert {madeira.event(event)["status"] for event in events} == {"pending"}
        assert receiver.count() == 0
        madeira.worker()
        for event in events:
            madeira.wait_status(event, "succeeded")
    assert receiver.count() == 5


def test_one_kind_of_dedicated_worker_that_is_stopped_leaves_the_others_working(launch: Launch, receiver: Receiver) -> None:
    """Without those that deliver events are still routed; without those that route what is routed is still delivered."""
    madeira = launch({"good": {"url": receiver.url("/good")}})
    madeira.api()
    madeira.worker(queues=["reconcile", "dead_letter", "jobs", "notify", "rollup"], threads=4, name="house")
    router = madeira.worker(queues=[ROUTE], threads=4, name="router")
    events = [madeira.post("good.x") for _ in range(5)]
    for event in events:
        madeira.wait_status(event, "delivering")
    assert {madeira.delivery(event)["status"] for event in events} == {"pending"}
    assert receiver.count() == 0

    assert router.stop() == 0
    late = madeira.post("good.x")
    madeira.worker(queues=[DELIVER], name="deliverer")
    for event in events:
        madeira.wait_status(event, "succeeded")
    assert madeira.event(late)["status"] == "pending"
    assert receiver.count() == 5

    madeira.worker(queues=[ROUTE], threads=4, name="router-again")
    madeira.wait_status(late, "succeeded")
    assert receiver.count() == 6
