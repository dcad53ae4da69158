"""What would become of an event: the routes that match, the requests that would go out, and what an answer would come to.

Nothing is stored or sent. There is no second way of doing it: routes are matched by `madeira.routing.rules`, requests are made
by `madeira.delivery.request`, answers are judged by `madeira.delivery.verdict` and `madeira.retry`, as for a real event. What
differs is only what a real delivery gets from its row, its number (and so ``webhook-id`` and the span in ``traceparent``), and
the time.

`document` is for showing. It hides what the configuration keeps secret, and the signatures too: whoever may ask for a dry run
must not get a body of his choice signed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from madeira import retry, templates
from madeira.delivery import request as requests
from madeira.delivery.answer import MAX_BODY, Answer
from madeira.delivery.exchange import HIDDEN, SIGNATURES
from madeira.delivery.request import NotSent, OutboundRequest
from madeira.delivery.verdict import judge
from madeira.egress import Egress
from madeira.event_values import EventValues
from madeira.expressions import ExpressionFailed, Scope
from madeira.records import OWN_SOURCE, Attempt, Claimed, Decision, Endpoint, NewEvent, PlannedDelivery, RoutableEvent
from madeira.routing.config import Rules, did_you_mean
from madeira.routing.rules import match, why_not
from madeira.states import DeliveryStatus

_EXPRESSION: Final = re.compile(r"(?s)(\{\{.*?\}\})")


def no_source(rules: Rules, name: str) -> str | None:
    """Why no event of the source `name` can be tried; None when one can."""
    if name in {*rules.sources, OWN_SOURCE}:
        return None
    reason = rules.unusable.get(f"source/{name}") or f"there is none{did_you_mean(name, rules.sources)}"
    return f"the source {name[:64]!a} cannot post: {reason}"


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of a receiver, to be judged."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


@dataclass(frozen=True, slots=True)
class RouteReport:
    """What one route makes of the event."""

    name: str
    endpoint: str
    matches: bool
    #: Why it does not match; also why its filter failed, which makes a dead delivery.
    reason: str | None = None
    #: Whether the filter failed.
    failed: bool = False


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """What an attempt comes to, and what follows from it."""

    attempt: Attempt
    decision: Decision


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """One delivery of the event."""

    plan: PlannedDelivery
    endpoint: Endpoint = field(repr=False)
    #: None when none can be made; `error` says why.
    request: OutboundRequest | None = field(default=None, repr=False)
    error: str | None = None
    #: On the failure to make a request, else on the given response; None without one.
    verdict: VerdictReport | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """What would become of an event."""

    event: RoutableEvent
    routes: tuple[RouteReport, ...]
    #: Without any the event would be dead as ``unrouted``.
    deliveries: tuple[DeliveryReport, ...]


def dry_run(rules: Rules, event: NewEvent, *, egress: Egress, now: datetime, response: Response | None = None) -> DryRun:
    """What would become of `event` if it were accepted, routed and called at `now` and each receiver answered `response`."""
    routable = RoutableEvent.of(event, now)
    scope = Scope(EventValues(routable))
    routes = []
    for route in rules.routes:
        try:
            reason = why_not(route, routable, scope)
            routes.append(RouteReport(route.name, route.endpoint, matches=reason is None, reason=reason))
        except ExpressionFailed as e:
            why = f"its filter failed: {e.reason}"
            routes.append(RouteReport(route.name, route.endpoint, matches=False, reason=why, failed=True))
    deliveries = [_delivery(rules, event, routable, plan, response) for plan in match(rules, routable, egress=egress)]
    return DryRun(routable, tuple(routes), tuple(deliveries))


def _delivery(
    rules: Rules, event: NewEvent, routable: RoutableEvent, plan: PlannedDelivery, response: Response | None
) -> DeliveryReport:
    endpoint = rules.endpoints[plan.endpoint]
    if plan.failure_class is not None:
        return DeliveryReport(plan, endpoint, error=plan.last_error)
    if rules.endpoint(plan.endpoint) is None:
        unusable = rules.unusable.get(f"endpoint/{plan.endpoint}", "it cannot be used here")
        return DeliveryReport(plan, endpoint, error=f"the delivery would wait: {unusable}")
    try:
        made = requests.build(_claimed(event, routable, plan), endpoint, now=routable.created_at)
    except NotSent as e:
        return DeliveryReport(plan, endpoint, error=str(e), verdict=_verdict(e.attempt, endpoint))
    if response is None:
        return DeliveryReport(plan, endpoint, made)
    body = response.body.encode(errors="replace")
    answer = Answer(
        status=response.status,
        headers={name.lower(): value for name, value in response.headers.items()},
        body=body[:MAX_BODY],
        truncated=len(body) > MAX_BODY,
        url=made.url,
        started_at=routable.created_at,
        duration_s=0.0,
    )
    return DeliveryReport(plan, endpoint, made, verdict=_verdict(judge(answer, endpoint), endpoint))


def _claimed(event: NewEvent, routable: RoutableEvent, plan: PlannedDelivery) -> Claimed:
    """The first claim of a planned delivery."""
    return Claimed(
        delivery_id=0,
        seq=0,
        endpoint=plan.endpoint,
        lane=plan.lane,
        attempt=1,
        failures=0,
        token="dry-run",  # noqa: S106  # names a claim
        budget_age_s=0.0,
        source=event.source,
        event_id=event.event_id,
        event_type=event.event_type,
        target_uri=event.target_uri,
        payload=event.payload,
        parameters=event.parameters,
        trace_id=event.trace_id,
        traceparent=event.traceparent,
        created_at=routable.created_at,
        body=plan.body,
        routing_key=event.routing_key,
    )


def _verdict(attempt: Attempt, endpoint: Endpoint) -> VerdictReport:
    decision = retry.decide(
        attempt,
        policy=endpoint.retry,
        failures=0,
        budget_age_s=0.0,
        rand=lambda: 0.0,
        fixed_url=endpoint.has_fixed_url,
    )
    return VerdictReport(attempt, decision)


# -- showing it ------------------------------------------------------------------------------------------------------


def document(run: DryRun) -> dict[str, Any]:
    """`run` as JSON values, without anything that is secret."""
    return {
        "status": _status(run),
        "routes": [
            {"name": r.name, "endpoint": r.endpoint, "matches": r.matches, "failed": r.failed, "reason": r.reason}
            for r in run.routes
        ],
        "deliveries": [_delivery_document(run, delivery) for delivery in run.deliveries],
    }


def _status(run: DryRun) -> str:
    """What the event would be after its routing."""
    if not run.deliveries:
        return "unrouted"
    return "dead" if all(delivery.plan.failure_class for delivery in run.deliveries) else "delivering"


def _delivery_document(run: DryRun, delivery: DeliveryReport) -> dict[str, Any]:
    plan = delivery.plan
    return {
        "endpoint": plan.endpoint,
        "lane": plan.lane,
        "routes": list(plan.routes),
        "ordering_key": plan.ordering_key,
        "request": None if delivery.request is None else request_document(run.event, delivery.request, delivery.endpoint),
        "error": delivery.error,
        "failure_class": plan.failure_class,
        "note": plan.last_error if plan.failure_class is None else None,
        "verdict": None if delivery.verdict is None else _verdict_document(delivery.verdict),
    }


def request_document(event: RoutableEvent | Claimed, made: OutboundRequest, endpoint: Endpoint) -> dict[str, Any]:
    """A request for `event` as JSON values, without anything that is secret."""
    return {
        "method": made.method,
        "url": made.url,
        "headers": [[name, _shown(name, value, endpoint, event)] for name, value in made.headers],
        "body": made.body.decode(),
    }


def _shown(name: str, value: str, endpoint: Endpoint, event: RoutableEvent | Claimed) -> str:
    if name in endpoint.headers:
        return _shown_template(endpoint.headers[name], EventValues(event))
    return HIDDEN if name.lower() in SIGNATURES else value


def _shown_template(text: str, values: EventValues) -> str:
    """A header as the event makes it; what the configuration itself brings may be a credential, and is hidden."""
    parts = _EXPRESSION.split(text)
    if len(parts) == 1 or "{%" in text or "{#" in text or any(quote in text for quote in "\"'"):
        return HIDDEN
    return "".join(
        templates.header(part, values) if part.startswith("{{") else HIDDEN if part.strip() else part for part in parts
    )


def _verdict_document(verdict: VerdictReport) -> dict[str, Any]:
    attempt, decision = verdict.attempt, verdict.decision
    retried = decision.status is DeliveryStatus.PENDING and not decision.stays
    return {
        "outcome": attempt.outcome,
        "error_code": attempt.error_code,
        "reason": attempt.reason,
        "status": decision.status,
        "retry_in_s": decision.delay_s if retried else None,
        "counts": decision.counts,
        "failure_class": decision.failure_class,
    }
