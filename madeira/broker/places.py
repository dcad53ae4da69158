"""Where waits what is unfinished of an event, as it is shown: in Postgres behind another event, or in the queues."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from madeira.broker.queues import DELIVER, ROUTE, Queues, delivery_key
from madeira.errors import BrokerUnavailable
from madeira.records import DeliveryRef
from madeira.store import ordering
from madeira.store.ordering import Wait


def in_order(conn: psycopg.Connection[Any], found: Mapping[str, Any]) -> Mapping[int, Wait]:
    """Behind what wait the deliveries of an event, as `madeira.store.story.find` gives it, that go in an order."""
    ordered = any(d["ordering_key"] is not None and d["status"] == "pending" for d in found["deliveries"])
    return ordering.waits(conn, found["seq"]) if ordered else {}


def add(found: dict[str, Any], waits: Mapping[int, Wait], queues: Queues, *, asked_by: str | None = None) -> None:
    """Say in ``waits`` where waits what is unfinished: behind another event by `in_order`, else as far as Redis can tell at
    this moment. `asked_by` is the source that asks, which is told the ids of its own events only; None: a person.
    """
    for delivery in found["deliveries"]:
        if delivery["id"] in waits:
            delivery["waits"] = _behind(waits[delivery["id"]], asked_by)
    waiting = [d for d in found["deliveries"] if d["status"] in ("pending", "delivering") and d["id"] not in waits]
    keys = [delivery_key(DeliveryRef(d["id"], found["seq"], d["lane"])) for d in waiting]
    try:
        if found["status"] == "pending":
            found["waits"] = _place(queues.where(ROUTE, [str(found["seq"])])[0])
        for delivery, place in zip(waiting, queues.where(DELIVER, keys), strict=True):
            delivery["waits"] = _place(place)
    except BrokerUnavailable:
        for part in [*waiting, *([found] if found["status"] == "pending" else [])]:
            part["waits"] = {"where": "unknown"}


def _place(place: Any) -> dict[str, Any]:
    shown = {"where": place.kind, "seconds": round(place.delay_s, 3), "ahead": place.ahead}
    if not place.limit:
        return shown
    shown["for"] = place.limit
    # Nobody knows when a person lets an endpoint go.
    if place.limit not in ("paused", "disabled"):
        shown["until"] = datetime.now(UTC) + timedelta(seconds=place.delay_s)
    return shown


def _behind(wait: Wait, asked_by: str | None) -> dict[str, Any]:
    """How it is shown that a delivery waits for another event; a source is told the ids of its own only."""
    shown = {"where": "ordering", "seconds": 0.0, "ahead": wait.ahead}
    if asked_by not in (None, wait.source):
        return shown
    return shown | {"behind": {"source": wait.source, "event_id": wait.event_id}}
