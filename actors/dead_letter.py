"""What is given up: counted once, told once, and left for a person.

Settle has recorded the death before this actor hears of it; this actor only tells. It may run any number of times:
`notified_at` is set where it is not set yet, and only those rows are told.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence

import dramatiq

from actors import notify
from madeira import metrics
from madeira.broker.queues import DEAD_LETTER
from madeira.broker.tools import current
from madeira.errors import StoreUnavailable
from madeira.log import get
from madeira.store import deliveries, notices
from madeira.store.deliveries import DeadLetter
from madeira.store.notices import Died

log = get(__name__)


@dramatiq.actor(queue_name=DEAD_LETTER, priority=3, max_retries=None)
def dead_letter(*delivery_ids: int) -> None:
    """Tell of the dead deliveries `delivery_ids` that nobody was told of yet."""
    tools = current()
    hand = tools.hand()
    began_ns = time.time_ns() if tools.spans else 0
    try:
        with tools.database.connection() as conn:
            dead = {row.delivery_id: row for row in deliveries.unnotified(conn, delivery_ids)}
            told = [dead[i] for i in deliveries.mark_notified(conn, list(dead))]
            begun = notices.dead_letters(conn, _died(told))
    except StoreUnavailable as e:
        tools.broker.gate.close(str(e))
        hand.give_back()
        log.warning("dead_letter.deferred", error=str(e))
        return
    hand.forget()
    if begun:
        notify.say_soon(tools)
    groups = Counter((row.endpoint, row.failure_class) for row in told)
    for (endpoint, failure_class), count in groups.items():
        metrics.DEAD_LETTERS.labels(metrics.endpoint_label(endpoint), failure_class).inc(count)
        log.error("dead_letters", endpoint=endpoint, failure_class=failure_class, count=count)
    for row in told:
        log.warning(
            "delivery.dead", delivery=row.delivery_id, endpoint=row.endpoint, trace_id=row.trace_id, reason=row.last_error
        )
        if tools.spans:
            tools.spans.given_up(row, began_ns)


def _died(told: Sequence[DeadLetter]) -> Iterator[Died]:
    """What is told of each endpoint, should its dead letters begin now: how many there are, and what of the first."""
    for endpoint, count in Counter(row.endpoint for row in told).items():
        first = next(row for row in told if row.endpoint == endpoint)
        detail = {
            "failure_class": first.failure_class,
            "reason": first.last_error,
            "source": first.source,
            "event_id": first.event_id,
            "trace_id": first.trace_id,
        }
        yield Died(endpoint, count, detail)
