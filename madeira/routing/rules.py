"""Which deliveries an event becomes. Pure: the same event and rules give the same answer, in the order of the rules."""

import fnmatch
import hashlib
import re
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from madeira.records import Endpoint, PlannedDelivery, RoutableEvent, Route
from madeira.routing.config import CALLBACK, Rules

#: What a host may look like inside the name of a lane; other hosts are told by their hash.
_PLAIN_HOST: Final = re.compile(r"[a-z0-9._:\[\]-]{1,120}")

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def match(rules: Rules, event: RoutableEvent) -> list[PlannedDelivery]:
    """The deliveries of `event`: one per endpoint, whatever number of routes lead there.

    An event that no route matches goes to its callback address, if it brought one; else nowhere.
    """
    by_endpoint: dict[str, list[str]] = {}
    for route in rules.routes:
        if _matches(route, event):
            by_endpoint.setdefault(route.endpoint, []).append(route.name)
    if not by_endpoint and event.target_uri:
        by_endpoint[CALLBACK] = []
    return [
        PlannedDelivery(endpoint=name, lane=lane_of(rules.endpoints[name], event.target_uri), routes=tuple(routes))
        for name, routes in by_endpoint.items()
    ]


def lane_of(endpoint: Endpoint, target_uri: str | None) -> str:
    """The waiting line of a delivery: the endpoint's; one per host where the address comes with the event.

    A slow callback host must not slow the others. Never holds a space, a comma or a bar; at most 200 characters.
    """
    if not endpoint.is_callback or not target_uri:
        return endpoint.name
    return f"{endpoint.name}@{_host_and_port(target_uri)}"


def _matches(route: Route, event: RoutableEvent) -> bool:
    if route.source is not None and route.source != event.source:
        return False
    if route.routing_key is not None and route.routing_key != event.routing_key:
        return False
    return _glob(route.event_type).match(event.event_type) is not None


@lru_cache(maxsize=10_000)
def _glob(pattern: str) -> re.Pattern[str]:
    """`*` stands for any characters, dots included: ``payment.*`` matches ``payment.card.captured``."""
    return re.compile(fnmatch.translate(pattern))


def _host_and_port(uri: str) -> str:
    try:
        parts = urlsplit(uri)
        host, port = (parts.hostname or "").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        host, port = "", 0
    if not _PLAIN_HOST.fullmatch(host):
        host = "x-" + hashlib.sha256((host or uri).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
