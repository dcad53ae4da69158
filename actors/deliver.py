"""Stop 3 of 4. Before: a `pending` delivery that may go now. After: claimed, called once, its outcome settled.

The order is what keeps the promises: the claim is committed before the call is made, the outcome is committed before
the broker hears of it, and no connection is held while the receiver thinks. A worker that dies between two steps leaves
a claim whose lease runs out, or a settled row whose key reconcile finds finished.
"""

import math
import random
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import uuid4

import dramatiq

from madeira import metrics, retry
from madeira.broker.hands import Hand
from madeira.broker.queues import DELIVER, ensure_dead_letter, ensure_delivery
from madeira.broker.tools import Tools, current
from madeira.delivery import exchange
from madeira.delivery import request as requests
from madeira.delivery.answer import Answer, CallFailed
from madeira.delivery.verdict import judge
from madeira.errors import BrokerUnavailable, StoreUnavailable
from madeira.lanes import is_slow, patience_s, verdict
from madeira.lanes.state import hold_of
from madeira.log import bind, get
from madeira.records import Attempt, Claimed, DeliveryRef, Endpoint, Refused, Settled
from madeira.states import DeliveryStatus, ErrorCode, Outcome
from madeira.store import holding
from madeira.store.claims import ClaimRequest
from madeira.store.deliveries import SettleRequest

if TYPE_CHECKING:
    from madeira.spans.record import Call

log = get(__name__)

#: Seconds that a claim may wait for Postgres before the grant is given back.
_CLAIM_WITHIN_S = 5.0

#: Seconds between two looks at a settle that Postgres has not taken yet.
_SETTLE_EVERY_S = 5.0

#: Share of the lease's margin that may pass between hand-out and call; past it the call might outlive its lease.
_LATEST_START = 0.5

#: Seconds after which a delivery whose endpoint cannot be called from here is handed out again, to whomever.
_OUT_OF_USE_S = 1.0

#: Times that a delivery whose row is not there is asked for again, before it is dropped: a minute and a quarter.
_MISSING_TRIES = 4

#: Seconds that a lane is left alone whose receiver is gone, where that could not be told: longer than any process takes to hear
#: of a change.
_GONE_S = 3.0

#: How the audit calls who disables an endpoint that is gone.
_BY = "madeira"


@dramatiq.actor(queue_name=DELIVER, priority=10, max_retries=None, time_limit=math.inf)
def deliver(delivery_id: int, seq: int, lane: str) -> None:
    """Deliver one delivery, once."""
    tools = current()
    hand = tools.hand()
    began = time.monotonic()
    endpoint = tools.endpoint(lane)
    if endpoint is None:
        # Gone, or out of use in this process: another one may deliver it, and this one must not get it again at once.
        hand.refund = True
        hand.delay(_OUT_OF_USE_S)
        return
    claim = _claim(tools, hand, endpoint, delivery_id, lane)
    if claim is None:
        return
    if isinstance(claim, Refused):
        _leave(hand, DeliveryRef(delivery_id, seq, lane), claim)
        return
    with bind(trace_id=claim.trace_id, event_id=claim.event_id, endpoint=claim.endpoint):
        _tell_start(tools, hand, endpoint, lane)
        if hand.waited_s > tools.settings.lease_margin_s * _LATEST_START:
            # Not called, so nothing to record: the claim runs out by itself.
            log.warning("delivery.too_late_to_start", waited_s=round(hand.waited_s, 3))
            return
        span = tools.spans.attempt(claim) if tools.spans else None
        attempt = _call(tools, claim, endpoint, span)
        settled = _settle(tools, hand, claim, attempt, endpoint)
        if span:
            span.end(attempt, settled)
        _tell_lane(tools, hand, claim, attempt, endpoint, began)
        _tell(hand, claim, attempt, settled, stays=_is_gone(attempt, endpoint))


def _claim(tools: Tools, hand: Hand, endpoint: Endpoint, delivery_id: int, lane: str) -> Claimed | Refused | None:
    lease_s = endpoint.timeout + tools.settings.lease_margin_s
    try:
        return tools.claims.submit(ClaimRequest(delivery_id, str(uuid4()), lease_s, lane), timeout_s=_CLAIM_WITHIN_S)
    except StoreUnavailable as e:
        tools.broker.gate.close(str(e))
        hand.give_back()
        log.warning("delivery.deferred", error=str(e))
        return None


def _tell_start(tools: Tools, hand: Hand, endpoint: Endpoint, lane: str) -> None:
    """Let the pace of a slow lane count from the call; of a fast one the hand-outs are even enough."""
    if endpoint.rate is None or not is_slow(endpoint.rate):
        return
    try:
        tools.broker.wire.start(lane, hand.only().token)
    except BrokerUnavailable as e:
        # The hand-outs keep the pace all the same, only a little less exactly.
        log.warning("lane.start_not_told", error=str(e))


def _leave(hand: Hand, ref: DeliveryRef, refused: Refused) -> None:
    """A claim that was refused costs nothing: neither a retry nor the rate token."""
    hand.refund = True
    if refused.reason in ("finished", "cancelled", "died", "behind"):
        hand.forget()
    elif refused.reason == "missing":
        if hand.only().stumbles >= _MISSING_TRIES:
            log.error("delivery.no_such_row")
            hand.forget()
    else:
        hand.delay(refused.delay_s)
    if refused.first is not None:
        hand.follow.append(ensure_delivery(refused.first))
    if refused.reason == "died":
        hand.follow.append(ensure_dead_letter(ref))
        log.error("delivery.died", failure_class="platform")


def _call(tools: Tools, claim: Claimed, endpoint: Endpoint, span: "Call | None") -> Attempt:
    try:
        request = requests.build(claim, endpoint, now=datetime.now(UTC), span=span.header if span else None)
    except requests.NotSent as refusal:
        return refusal.attempt
    if span:
        span.goes_to(request.method, request.target)
    result: Answer | CallFailed
    try:
        result = tools.caller.call(request, deadline_s=endpoint.timeout)
    except CallFailed as failed:
        result = failed
    attempt = judge(result, endpoint)
    if attempt.outcome is Outcome.SUCCEEDED:
        return attempt
    answer = result if isinstance(result, Answer) else None
    return replace(attempt, exchange=exchange.kept(request, answer, endpoint))


def _settle(tools: Tools, hand: Hand, claim: Claimed, attempt: Attempt, endpoint: Endpoint) -> Settled:
    """Record the outcome, however long Postgres takes; the marker is renewed meanwhile."""
    hand.renewing = True
    decision = retry.decide(
        attempt,
        policy=endpoint.retry,
        failures=claim.failures,
        budget_age_s=claim.budget_age_s,
        rand=random.random,
        fixed_url=endpoint.has_fixed_url,
    )
    request = SettleRequest(
        delivery_id=claim.delivery_id,
        seq=claim.seq,
        token=claim.token,
        attempt_no=claim.attempt,
        attempt=attempt,
        decision=decision,
        worker=tools.broker.process,
    )
    settled = _record(tools, request)
    _count(claim, attempt, settled)
    return settled


def _record(tools: Tools, request: SettleRequest) -> Settled:
    refused = False
    while True:
        try:
            return tools.settles.submit(request, timeout_s=_SETTLE_EVERY_S)
        except StoreUnavailable as e:
            tools.broker.gate.close(str(e))
            log.warning("delivery.settle_waits", error=str(e))
            time.sleep(0.2)
        except Exception:
            # Postgres takes the verdict but not what the receiver said: the verdict counts.
            if refused:
                raise
            refused = True
            log.exception("delivery.answer_unrecordable")
            request = replace(request, attempt=_without_details(request.attempt))


def _without_details(attempt: Attempt) -> Attempt:
    failed = attempt.outcome != Outcome.SUCCEEDED
    return Attempt(
        outcome=attempt.outcome,
        started_at=attempt.started_at,
        duration_s=attempt.duration_s,
        url="",
        error_code=ErrorCode.PROTOCOL if failed else None,
        reason="what the receiver answered could not be recorded; it is in the log" if failed else None,
    )


def _tell_lane(tools: Tools, hand: Hand, claim: Claimed, attempt: Attempt, endpoint: Endpoint, began: float) -> None:
    """What the call says about the receiver goes to its lane with the finish."""
    if endpoint.breaker.enabled:
        hand.verdict = verdict(attempt)
    wait_s = _disable(tools, claim, endpoint, began) if _is_gone(attempt, endpoint) else patience_s(attempt)
    if wait_s > 0:
        hand.patient = time.monotonic() + wait_s


def _disable(tools: Tools, claim: Claimed, endpoint: Endpoint, began: float) -> float:
    """Disable an endpoint whose receiver says that it is gone, unless somebody has decided otherwise since the call began.

    Should a store be away, the next call is answered the same. Returns the seconds for which the lane is left alone.
    """
    why = f"the receiver answered 410 (gone) to event {claim.source}/{claim.event_id}"
    try:
        with tools.database.connection() as conn:
            found = holding.gone(conn, endpoint.name, who=_BY, why=why, called_s=time.monotonic() - began)
        tools.rules.reload()
        if found is None or found.state == "active":
            return found.wait_s if found else _GONE_S
        if found.now:
            log.warning("endpoint.gone", reason=why, remedy="mend the URL, then enable the endpoint: what waits goes on")
        # Also where it is held for something else: whoever does it may not have told of it yet.
        tools.broker.wire.hold(endpoint.name, found.version, hold_of(found.state))
        return 0.0
    except (StoreUnavailable, BrokerUnavailable) as e:
        log.warning("endpoint.not_disabled", error=str(e))
        return _GONE_S


def _is_gone(attempt: Attempt, endpoint: Endpoint) -> bool:
    return retry.is_gone(attempt) and endpoint.has_fixed_url


def _tell(hand: Hand, claim: Claimed, attempt: Attempt, settled: Settled, *, stays: bool) -> None:
    if settled.first is not None:
        hand.follow.append(ensure_delivery(settled.first))
    if settled.status == DeliveryStatus.SUCCEEDED:
        # On record in Postgres; a line per success would cost more than the call.
        hand.forget()
        log.debug("delivery.succeeded", attempt=claim.attempt, duration_s=round(attempt.duration_s, 4))
        return
    log.info(
        "delivery.business_failure" if attempt.outcome == "business" else "delivery.attempted",
        attempt=claim.attempt,
        outcome=attempt.outcome,
        status_code=attempt.status_code,
        error_code=attempt.error_code,
        duration_s=round(attempt.duration_s, 4),
        status=settled.status or "late",
        retry_in_s=round(settled.delay_s, 3) if settled.status == DeliveryStatus.PENDING else None,
    )
    if settled.status is None:
        return
    if settled.status == DeliveryStatus.PENDING and stays:
        hand.keep()
        return
    if settled.status == DeliveryStatus.PENDING:
        # What has passed since Postgres told the delay is not added to it, or Redis would have the delivery due later.
        left_s = settled.delay_s - (time.monotonic() - settled.read_at)
        raise dramatiq.Retry(delay=max(0, round(left_s * 1000)))
    hand.forget()
    if settled.status == DeliveryStatus.DEAD:
        hand.follow.append(ensure_dead_letter(DeliveryRef(claim.delivery_id, claim.seq, claim.lane)))


def _count(claim: Claimed, attempt: Attempt, settled: Settled) -> None:
    outcome = attempt.outcome if settled.status is not None else "late"
    endpoint = metrics.endpoint_label(claim.endpoint)
    metrics.DELIVERY_ATTEMPTS.labels(endpoint, outcome).inc()
    metrics.DELIVERY_ATTEMPT_DURATION.labels(endpoint).observe(attempt.duration_s)
    if settled.status in (None, DeliveryStatus.PENDING):
        return
    metrics.DELIVERIES_SETTLED.labels(endpoint, settled.status).inc()
    metrics.DELIVERY_RETRIES.labels(endpoint).observe(claim.attempt - 1)
    if settled.status == DeliveryStatus.SUCCEEDED:
        metrics.DELIVERY_LATENCY.observe(settled.latency_s)
