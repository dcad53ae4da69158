"""Stop 2 of 4. Before: an accepted event. After: one `pending` delivery per endpoint; their ids on the queue `deliver`.

Routing makes no call to the outside, so that intake peaks never press on delivery. A message carries the numbers of up
to sixteen events; those that failed or took their worker down before come alone, so that a bad one cannot take its
neighbours with it.
"""

import time
from collections.abc import Sequence

import dramatiq

from madeira.broker.hands import Hand
from madeira.broker.queues import ROUTE, ensure_dead_letter, ensure_delivery
from madeira.broker.tools import Tools, current
from madeira.errors import StoreUnavailable
from madeira.log import get
from madeira.routing.rules import match
from madeira.store import ordering, routing
from madeira.store.routing import RouteResult, Unroutable

log = get(__name__)

#: Times that an event whose row is not there is asked for again, before it is dropped: a minute and a quarter.
_MISSING_TRIES = 4


@dramatiq.actor(queue_name=ROUTE, priority=5, max_retries=None)
def route(*seqs: int) -> None:
    """Route the events `seqs`."""
    tools = current()
    hand = tools.hand()
    try:
        if _is_poisonous(tools, hand, seqs):
            return
        _route(tools, hand, seqs)
    except StoreUnavailable as e:
        tools.broker.gate.close(str(e))
        hand.give_back()
        log.warning("route.deferred", seqs=seqs, error=str(e))
    except Exception:
        log.exception("route.failed", seqs=seqs)
        if len(seqs) == 1:
            _count_failure(tools, hand, seqs[0])


def _route(tools: Tools, hand: Hand, seqs: Sequence[int]) -> None:
    rules = tools.rules.need()
    began_ns = time.time_ns() if tools.spans else 0
    with tools.database.connection() as conn:
        found, others = routing.routable(conn, seqs)
    # Filters and templates may take a while over a large payload; no connection waits for them.
    plans = [(event.seq, match(rules, event, egress=tools.egress)) for event in found]
    results = []
    if plans:
        with tools.database.connection() as conn:
            results = routing.route(conn, plans, made_for=rules.version)
    if tools.spans:
        tools.spans.routed(found, results, began_ns)
    if any(delivery.ordering_key is not None for _, planned in plans for delivery in planned):
        _keep_first(tools, results)
    for result in results:
        _tell(hand, result)
    for seq, why in others.items():
        _leave(tools, hand, seq, why)


def _keep_first(tools: Tools, results: Sequence[RouteResult]) -> None:
    """Leave out what is not the first of its ordering key: it is queued when its turn has come."""
    with tools.database.connection() as conn:
        first = set(ordering.leading(conn, [ref for result in results for ref in result.refs]))
    for result in results:
        result.refs[:] = [ref for ref in result.refs if ref in first]


def _tell(hand: Hand, result: RouteResult) -> None:
    hand.forget(str(result.seq))
    hand.follow += [ensure_delivery(ref) for ref in result.refs]
    hand.follow += [ensure_dead_letter(ref) for ref in result.dead]
    log.debug("event.routed", seq=result.seq, deliveries=len(result.refs), status=result.status)


def _leave(tools: Tools, hand: Hand, seq: int, why: Unroutable) -> None:
    key = str(seq)
    if why.reason == "finished":
        # An earlier run may have died after its commit: what it left unfinished is in Postgres, and is queued again.
        with tools.database.connection() as conn:
            (result,) = routing.route(conn, [(seq, [])])
        _keep_first(tools, [result])
        _tell(hand, result)
    elif why.reason == "not_due":
        hand.delay(why.delay_s, key)
    elif hand.grants[key].grant.stumbles >= _MISSING_TRIES:
        log.error("route.no_such_event", seq=seq)
        hand.forget(key)


def _is_poisonous(tools: Tools, hand: Hand, seqs: Sequence[int]) -> bool:
    """Counts a worker that was lost with this event in its hands; True when it was one too many."""
    if len(seqs) != 1 or not hand.only().losses:
        return False
    return _count_failure(tools, hand, seqs[0])


def _count_failure(tools: Tools, hand: Hand, seq: int) -> bool:
    try:
        with tools.database.connection() as conn:
            died = routing.count_route_failure(conn, seq)
    except StoreUnavailable as e:
        tools.broker.gate.close(str(e))
        return False
    if died:
        log.error("event.died", seq=seq, reason="platform")
        hand.forget()
    return died
