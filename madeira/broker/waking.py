"""How a door wakes the workers for jobs: an ordinary Dramatiq message, put into its queue without the actor's module.

Should it be lost, the actor's tick of every minute finds what there is to do.
"""

import time
from typing import Final

from dramatiq import Message

from madeira.broker.queues import Queues

#: The queue of the actor `jobs`, and its name.
JOBS: Final = "jobs"


def wake_jobs(queues: Queues) -> None:
    """Let a worker look for jobs now.

    Raises:
        BrokerUnavailable: Redis is away.
    """
    message: Message[None] = Message(queue_name=JOBS, actor_name=JOBS, args=(), kwargs={}, options={})
    name = f"{message.message_id}.{time.time_ns()}"
    queues.enqueue(JOBS, name, message.copy(options={"redis_message_id": name}).encode())
