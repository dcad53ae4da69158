"""The scheduler's broker: what it cannot send it leaves to the next tick."""

import contextlib
import logging
import uuid

import dramatiq
import pytest

from madeira.broker.queues import Queues
from madeira.broker.ticking import TickingBroker
from tests.servers import OwnRedis


def test_ticks_are_dropped_while_redis_is_away_and_that_is_said_once(
    own_redis: OwnRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """And that it is back, once."""
    caplog.set_level(logging.INFO)
    with contextlib.closing(Queues(redis_url=own_redis.url, namespace="t", timeout_s=3.0)) as queues:
        broker = TickingBroker(
            queues=queues,
            process=f"p.{uuid.uuid4().hex[:8]}",
            silence_s=60.0,
            lease_margin_s=0.0,
            lanes=lambda _lanes: [],
            lanes_version=lambda: 0,
            middleware=[],
        )
        tick = dramatiq.actor(lambda: None, broker=broker, actor_name="tick")
        own_redis.kill()
        for _ in range(3):
            tick.send()
        own_redis.start()
        for _ in range(2):
            tick.send()
        assert broker.do_qsize("default") == 2
    told = [record.msg["event"] for record in caplog.records if isinstance(record.msg, dict)]
    assert told == ["broker.away", "broker.back"]
