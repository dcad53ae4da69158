"""Tells people what they should know, once: a line in the log, and an event for those who want to be called.

The event is one like any other, of the built-in source ``madeira``; it goes where the operator's own routes name that source,
signed and retried as everything is. It is made in the transaction that notes the notice as said, and only where somebody gets it.

What is about an endpoint that such events go to is told by the log only: a receiver that is down must not be sent that it is
down, nor may two of them keep each other busy.
"""

import hashlib
import json
from datetime import UTC
from typing import Any, Final
from uuid import uuid4

import dramatiq
import psycopg
from periodiq import cron

from madeira.broker.queues import ROUTE, Ensure, Opened
from madeira.broker.tools import Tools, current
from madeira.errors import BrokerUnavailable, StoreUnavailable
from madeira.lanes.pace import endpoint_of
from madeira.log import get
from madeira.records import OWN_SOURCE, NewEvent, RoutableEvent
from madeira.routing.config import Rules
from madeira.routing.rules import match
from madeira.store import events, leases, notices
from madeira.store.notices import Kind, Notice

log = get(__name__)

#: Name of the lease row.
LEASE = "notify"

#: Seconds until another may take over from a run whose process is gone.
LEASE_S = 30.0

#: Notices that are said at a time; more than can be in a minute unless something is very wrong.
AT_A_TIME = 100

#: What is good news.
_GOOD: Final = (Kind.BREAKER_CLOSED,)


@dramatiq.actor(queue_name="notify", periodic=cron("* * * * *"), priority=3, max_retries=0)
def notify() -> None:
    """Look whose breakers have opened or closed, and say what is to be said."""
    run(current())


def run(tools: Tools) -> None:
    """One run; a store that is away is looked at again by the next one."""
    holder = uuid4().hex
    try:
        with tools.database.connection() as conn:
            if not leases.take(conn, LEASE, holder, LEASE_S):
                return
        try:
            with tools.database.connection() as conn:
                notices.end_dead_letters(conn)
                notices.end_forgotten(conn)
                notices.remove_old(conn)
            _look_at_breakers(tools)
        finally:
            with tools.database.connection() as conn:
                leases.release(conn, LEASE, holder)
        say(tools)
    except (StoreUnavailable, BrokerUnavailable) as e:
        log.warning("notify.deferred", error=str(e))


def say_soon(tools: Tools) -> None:
    """Say what is to be said now, on the way of other work, which it must not disturb; what fails the next run does."""
    try:
        say(tools)
    except (StoreUnavailable, BrokerUnavailable) as e:
        log.warning("notify.deferred", error=str(e))


def say(tools: Tools) -> int:
    """Say what is to be said; returns how many notices that were.

    Raises:
        StoreUnavailable: Postgres is away.
        BrokerUnavailable: Redis is; the events are committed, and reconcile has them routed.
    """
    rules = tools.rules.current
    if rules is None:
        return 0
    seqs = []
    with tools.database.connection() as conn:
        found = notices.unsaid(conn, AT_A_TIME)
        for notice in found:
            event = _event(tools, rules, notice)
            if event is not None:
                if tools.spans:
                    event = tools.spans.notice(event)
                seqs.append(events.insert(conn, [event])[0].seq)
            notices.said(conn, notice.id, event.event_id if event else None)
    for notice in found:
        write = log.info if notice.kind in _GOOD else log.error
        write(notice.kind, endpoint=notice.endpoint or None, **notice.detail)
    tools.broker.wire.ensure([Ensure(ROUTE, str(seq)) for seq in seqs])
    return len(found)


def _event(tools: Tools, rules: Rules, notice: Notice) -> NewEvent | None:
    """The event that carries a notice; None when it goes to nobody, or must not."""
    if notice.endpoint in _tellers(rules):
        return None
    document = {"notice": notice.id, "kind": notice.kind, "endpoint": notice.endpoint or None}
    payload = json.dumps(document | {"at": notice.at.astimezone(UTC).isoformat(), "detail": notice.detail}, ensure_ascii=False)
    event = NewEvent(
        source=OWN_SOURCE,
        event_id=f"notice-{notice.id}",
        event_type=f"{OWN_SOURCE}.{notice.kind}",
        payload=payload,
        body_sha256=hashlib.sha256(payload.encode()).digest(),
        trace_id=f"notice-{notice.id}",
    )
    return event if match(rules, RoutableEvent.of(event, notice.at), egress=tools.egress) else None


def _tellers(rules: Rules) -> set[str]:
    """The endpoints that events about Madeira itself go to."""
    return {route.endpoint for route in rules.routes if route.source == OWN_SOURCE}


def _look_at_breakers(tools: Tools) -> None:
    with tools.database.connection() as conn:
        known = notices.going_on(conn, Kind.BREAKER_OPENED)
    looked = tools.broker.wire.opened(known)
    with tools.database.connection() as conn:
        for breaker in looked:
            _tell_breaker(conn, breaker)
        # Before the commit: rather a breaker that was open for a moment is not told of than one that is told of twice.
        tools.broker.wire.opened_seen([b for b in looked if b.mark])


def _tell_breaker(conn: psycopg.Connection[Any], breaker: Opened) -> None:
    endpoint = endpoint_of(breaker.lane)
    lane = {"lane": breaker.lane}
    if breaker.mark or breaker.is_open:
        # One that is not open any more was so for less than the time between two runs.
        why = breaker.reason or "it is not open any more"
        notices.begin(conn, Kind.BREAKER_OPENED, breaker.lane, endpoint, lane | {"reason": why})
    # Not for want of memory alone: a Redis that was emptied knows of no open breaker, and the receiver may be as it was.
    if not breaker.is_open and breaker.has_succeeded and notices.end(conn, Kind.BREAKER_OPENED, breaker.lane):
        notices.write(conn, Kind.BREAKER_CLOSED, endpoint, lane)
