"""What a test's worker process loads instead of `madeira.actors`: the same, with an actor that holds a thread up.

TEST_WITHOUT names a class of middleware that is left out.
"""

import os

import dramatiq

from madeira.actors import broker

broker.middleware[:] = [m for m in broker.middleware if type(m).__name__ != os.environ.get("TEST_WITHOUT")]


@dramatiq.actor(queue_name="holding")
def hold() -> None:
    """Say that it runs, and then hold its thread until something is pushed to the list `let-go`."""
    client = broker.client
    client.rpush("held-up", "1")
    while not client.blpop(["let-go"], timeout=1):
        pass
