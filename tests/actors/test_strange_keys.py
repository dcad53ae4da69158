"""Keys and answers that nobody should ever make stop neither a queue nor reconcile."""

import pytest
from dramatiq import Message

from madeira.broker.queues import DELIVER, ROUTE
from madeira.store.database import Database
from tests.actors.conftest import Make
from tests.receiver import Answer, Receiver
from tests.system.harness import wait_until


@pytest.mark.parametrize("queue", [ROUTE, DELIVER])
def test_what_names_no_row_is_refused_at_the_door_and_dropped_behind_it(make: Make, queue: str) -> None:
    process = make()
    args = ("x",) if queue == ROUTE else ("x", 1, "a")
    with pytest.raises(ValueError, match="is no key of the queue"):
        process.broker.enqueue(Message(queue, queue, args, {}, {}))
    if queue == ROUTE:
        process.redis.zadd("m:route:lane:-", {"garbage": 0})
    process.redis.zadd(f"m:{queue}:delayed", {"99999999999999999999:1:a": 1e15, "junk": 1e15})
    process.start()
    from actors.reconcile import run

    database = Database(url=process.settings.database_url, application="test", pool_max=2)
    database.open()
    try:
        assert run(process.queues, database, period_s=60.0, force=True) is not None, "reconcile comes to its end"
    finally:
        database.close()
    assert process.redis.zcard(f"m:{queue}:delayed") == 0
    left = (f"m:{queue}:lane:-", f"m:{queue}:held")
    wait_until(lambda: not process.redis.exists(*left), what="the end of the garbage")


def test_an_answer_that_postgres_does_not_take_is_recorded_without_its_details(make: Make, receiver: Receiver) -> None:
    receiver.answer("/a", Answer(status=500))
    process = make({"retry": {"max_attempts": 1}})
    process.conn.execute("ALTER TABLE delivery_log ADD CONSTRAINT refuses CHECK (error_code <> 'http_500')")
    process.start()
    ref = process.routed()
    process.wait_status(ref, "dead")
    assert (process.outcomes(ref), receiver.count()) == (["retryable"], 1)
