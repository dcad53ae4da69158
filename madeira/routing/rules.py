"""Which deliveries an event becomes. Pure: the same event and rules give the same answer, in the order of the rules.

The routes that fit an event by source and type are looked up, not searched for: with a thousand routes the few that can match
are found as quickly as with one, and only their filters are evaluated. A filter or a template that fails makes a delivery that
is born dead and tells the reason: the event is not lost, and its other deliveries are not touched.
"""

import fnmatch
import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from madeira import target, templates
from madeira.egress import Egress
from madeira.event_values import EventValues
from madeira.expressions import ExpressionFailed, Scope
from madeira.records import NO_ORDER, WHOLE_ENDPOINT, Endpoint, PlannedDelivery, RoutableEvent, Route
from madeira.routing.config import CALLBACK, Rules
from madeira.states import ErrorCode, FailureClass
from madeira.templates import TemplateFailed

#: What a host may look like inside the name of a lane; other hosts are told by their hash.
_PLAIN_HOST: Final = re.compile(r"[a-z0-9._:\[\]-]{1,120}")

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

#: Pairs of source and event type whose routes are remembered. Event types come from strangers, so it is not without limit.
_REMEMBERED: Final = 4096

#: The ordering key of all deliveries of an endpoint that go one after another.
_ONE_KEY: Final = "*"

#: Characters of an error, at most.
_MAX_ERROR: Final = 500


@dataclass(slots=True)
class _Lead:
    """What leads to one endpoint."""

    #: Routes that match.
    routes: list[str] = field(default_factory=list)
    #: Routes whose filter failed, and why.
    failed: dict[str, str] = field(default_factory=dict)


def match(rules: Rules, event: RoutableEvent, *, egress: Egress) -> list[PlannedDelivery]:
    """The deliveries of `event`: one per endpoint, whatever number of routes lead there.

    An event that no route matches goes to its callback address, if it brought one; else nowhere. A route whose filter fails
    counts as one that matches. Where another route leads to the same endpoint, that one decides, and the failure is noted.
    """
    values = EventValues(event)
    scope = Scope(values)
    leads: defaultdict[str, _Lead] = defaultdict(_Lead)
    for route in _index(rules).candidates(event.source, event.event_type):
        if not _has_key(route, event):
            continue
        try:
            if _lets_pass(route, scope):
                leads[route.endpoint].routes.append(route.name)
        except ExpressionFailed as e:
            leads[route.endpoint].failed[route.name] = f"the filter of route {route.name} failed: {e.reason}"
    if not leads and event.target_uri:
        leads[CALLBACK] = _Lead()
    return [_planned(rules.endpoints[name], lead, event, values, scope, egress) for name, lead in leads.items()]


def why_not(route: Route, event: RoutableEvent, scope: Scope) -> str | None:
    """Why `route` does not match `event`; None when it does. `scope` holds the event's values.

    Raises:
        ExpressionFailed: its filter failed.
    """
    if not _has_source(route, event.source):
        return f"it is for events of the source {route.source}"
    if not _has_type(route, event.event_type):
        return f"it is for event types like {route.event_type}"
    if not _has_key(route, event):
        return f"it is for the routing key {route.routing_key}"
    return None if _lets_pass(route, scope) else "its filter says no"


def lane_of(endpoint: Endpoint, target_uri: str | None) -> str:
    """The waiting line of a delivery: the endpoint's; one per host where the address comes with the event.

    A slow callback host must not slow the others. Never holds a space, a comma or a bar; at most 200 characters.
    """
    if not endpoint.is_callback or not target_uri:
        return endpoint.name
    return f"{endpoint.name}@{_host_and_port(target_uri)}"


# -- which routes -----------------------------------------------------------------------------------------------------


def _has_source(route: Route, source: str) -> bool:
    return route.source is None or route.source == source


def _has_type(route: Route, event_type: str) -> bool:
    return _glob(route.event_type).match(event_type) is not None


def _has_key(route: Route, event: RoutableEvent) -> bool:
    return route.routing_key is None or route.routing_key == event.routing_key


def _lets_pass(route: Route, scope: Scope) -> bool:
    return route.filter is None or scope.evaluate(route.filter)


@functools.lru_cache(maxsize=10_000)
def _glob(pattern: str) -> re.Pattern[str]:
    """`*` stands for any characters, dots included: ``payment.*`` matches ``payment.card.captured``."""
    return re.compile(fnmatch.translate(pattern))


class _Index:
    """The routes of one set of rules, found by source and event type; in the order of the rules."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str | None, str], list[tuple[int, Route]]] = defaultdict(list)
        self._patterns: dict[str | None, list[tuple[int, Route]]] = defaultdict(list)
        for place, route in enumerate(routes):
            if any(c in route.event_type for c in "*?["):
                self._patterns[route.source].append((place, route))
            else:
                self._exact[route.source, route.event_type].append((place, route))
        self._known: dict[tuple[str, str], tuple[Route, ...]] = {}

    def candidates(self, source: str, event_type: str) -> tuple[Route, ...]:
        """The routes that fit by source and type."""
        known = self._known.get((source, event_type))
        if known is None:
            known = tuple(route for _, route in sorted(self._find(source, event_type), key=lambda found: found[0]))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[source, event_type] = known
        return known

    def _find(self, source: str, event_type: str) -> Iterator[tuple[int, Route]]:
        for one in (source, None):
            yield from self._exact.get((one, event_type), ())
            yield from (found for found in self._patterns.get(one, ()) if _has_type(found[1], event_type))


@functools.lru_cache(maxsize=4)
def _index(rules: Rules) -> _Index:
    return _Index(rules.routes)


# -- what becomes of them ---------------------------------------------------------------------------------------------


def _planned(
    endpoint: Endpoint, lead: _Lead, event: RoutableEvent, values: EventValues, scope: Scope, egress: Egress
) -> PlannedDelivery:
    lane = lane_of(endpoint, event.target_uri)
    if not lead.routes and lead.failed:
        why = "; ".join(lead.failed.values())
        return _dead(endpoint, lane, tuple(lead.failed), FailureClass.TEMPLATE, ErrorCode.TEMPLATE, why)
    routes = tuple(lead.routes)
    try:
        body = templates.body_of(endpoint, values)
        # Made anew for each attempt; one that fails now would fail then.
        templates.headers_of(endpoint, values)
        url = templates.url_of(endpoint, values)
        key = _ordering_key(endpoint, scope)
    except (TemplateFailed, ExpressionFailed) as e:
        why = f"endpoint {endpoint.name}: {'ordering: ' if isinstance(e, ExpressionFailed) else ''}{e.reason}"
        return _dead(endpoint, lane, routes, FailureClass.TEMPLATE, ErrorCode.TEMPLATE, why)
    refusal = _refusal(url, egress)
    if refusal:
        return _dead(endpoint, lane, routes, FailureClass.POLICY, ErrorCode.DENIED_BY_POLICY, refusal)
    noted = f"{ErrorCode.TEMPLATE}: {'; '.join(lead.failed.values())}"[:_MAX_ERROR] if lead.failed else None
    return PlannedDelivery(endpoint=endpoint.name, lane=lane, routes=routes, last_error=noted, body=body, ordering_key=key)


def _ordering_key(endpoint: Endpoint, scope: Scope) -> str | None:
    """Under which key the delivery goes one after another with others; None: under none."""
    if endpoint.ordering == NO_ORDER:
        return None
    return _ONE_KEY if endpoint.ordering == WHOLE_ENDPOINT else scope.key(endpoint.ordering)


def _dead(
    endpoint: Endpoint, lane: str, routes: tuple[str, ...], failure_class: FailureClass, code: ErrorCode, why: str
) -> PlannedDelivery:
    return PlannedDelivery(endpoint.name, lane, routes, failure_class, f"{code}: {why}"[:_MAX_ERROR], code)


def _refusal(url: str, egress: Egress) -> str | None:
    """Why a URL is not to be called by its host alone; the call itself judges the addresses."""
    try:
        return egress.refusal_of_host(target.parse(url).host)
    except target.BadUrl:
        # The attempt says so, and is on record with what it would have called.
        return None


def _host_and_port(uri: str) -> str:
    try:
        parts = urlsplit(uri)
        host, port = (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        host, port = "", 0
    if not _PLAIN_HOST.fullmatch(host):
        host = "x-" + hashlib.sha256((host or uri).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
