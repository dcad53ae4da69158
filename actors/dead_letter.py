"""What is given up: counted once, told once, and left for a person.

Settle has recorded the death before this actor hears of it; this actor only tells. It may run any number of times:
`notified_at` is set where it is not set yet, and only those rows are told.
"""

from collections import Counter

import dramatiq

from madeira import metrics
from madeira.broker.queues import DEAD_LETTER
from madeira.broker.tools import current
from madeira.errors import StoreUnavailable
from madeira.log import get
from madeira.store import deliveries

log = get(__name__)


@dramatiq.actor(queue_name=DEAD_LETTER, priority=3, max_retries=None)
def dead_letter(*delivery_ids: int) -> None:
    """Tell of the dead deliveries `delivery_ids` that nobody was told of yet."""
    tools = current()
    hand = tools.hand()
    try:
        with tools.database.connection() as conn:
            dead = {row.delivery_id: row for row in deliveries.unnotified(conn, delivery_ids)}
            told = [dead[i] for i in deliveries.mark_notified(conn, list(dead))]
    except StoreUnavailable as e:
        tools.broker.gate.close()
        hand.give_back()
        log.warning("dead_letter.deferred", error=str(e))
        return
    hand.forget()
    groups = Counter((row.endpoint, row.failure_class) for row in told)
    for (endpoint, failure_class), count in groups.items():
        metrics.DEAD_LETTERS.labels(endpoint, failure_class).inc(count)
        log.error("dead_letters", endpoint=endpoint, failure_class=failure_class, count=count)
    for row in told:
        log.warning(
            "delivery.dead", delivery=row.delivery_id, endpoint=row.endpoint, trace_id=row.trace_id, reason=row.last_error
        )
