"""What everything is compared with: a Dramatiq actor on the stock broker that only calls ``httpx.post``; no storage at all."""

import os

import dramatiq
import httpx
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=os.environ["BARE_REDIS_URL"], namespace="bare")
dramatiq.set_broker(broker)

client = httpx.Client(timeout=10, limits=httpx.Limits(max_connections=200, max_keepalive_connections=200))
BODY = b'{"event_id":"e-0123456789","event_type":"bench.event","payload":{"amount":100,"currency":"EUR","note":"benchmark"}}'


@dramatiq.actor
def call(url: str) -> None:
    """Post a body of the benchmark's size."""
    client.post(url, content=BODY, headers={"content-type": "application/json"}).raise_for_status()
