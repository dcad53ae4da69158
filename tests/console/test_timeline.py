"""What an event waits for, in words: one for each place and each limit."""

from datetime import UTC, datetime, timedelta
from typing import Any, get_args

import pytest
import time_machine

from madeira.broker.queues import Place
from madeira.console import timeline
from madeira.lanes.state import Limit

UNTIL = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)

#: What is told of each limit of a lane.
LIMITS = {
    "": "goes as soon as a worker is free",
    "disabled": "until somebody enables it",
    "paused": "until somebody resumes it",
    "breaker": "held by the breaker, since the receiver fails, until 2026-01-31 12:00:00.000 UTC at least",
    "retry_after": "asked to be left alone, until 2026-01-31 12:00:00.000 UTC at least",
    "rate": "the next call in 2.5 s",
    "cap": "as many calls as the endpoint may get are under way",
}


def waits(place: dict[str, Any] | None, *, status: str = "pending", asked_to_end: bool = False, rate: float | None = None) -> str:
    """What is told of a delivery."""
    delivery = {
        "endpoint": "ledger",
        "status": status,
        "waits": place,
        "next_attempt_at": UNTIL,
        "cancel_requested_at": UNTIL if asked_to_end else None,
    }
    (step,) = timeline.waits({"status": "delivering", "deliveries": [delivery]}, {"ledger": rate})
    return f"{step.title}: {step.detail}"


def test_every_limit_of_a_lane_has_its_words() -> None:
    assert set(LIMITS) == set(get_args(Limit))


@pytest.mark.parametrize("limit", LIMITS)
def test_what_waits_in_its_lane_says_for_what(limit: str) -> None:
    place = {"where": "waiting", "seconds": 2.5, "ahead": 212}
    if limit:
        place |= {"for": limit}
    if limit in ("breaker", "retry_after"):
        place |= {"until": UNTIL}
    told = waits(place)
    assert told.startswith("ledger waits: behind 212 others; ")
    assert told.endswith(LIMITS[limit])
    assert waits(place | {"ahead": 0}).startswith("ledger waits: next in its line; ")


def test_what_is_far_behind_says_when_its_turn_comes_by_the_pace() -> None:
    with time_machine.travel(UNTIL, tick=False):
        told = waits({"where": "waiting", "seconds": 1.0, "ahead": 270, "for": "rate"}, rate=30.0)
        assert told.endswith("; at 30/s its turn comes at 12:00:10 UTC or later")
        assert "its turn" not in waits({"where": "waiting", "seconds": 1.0, "ahead": 0, "for": "rate"}, rate=30.0)
        assert "its turn" not in waits({"where": "waiting", "seconds": 1.0, "ahead": 9, "for": "paused"}, rate=30.0)


def test_every_place_has_its_words() -> None:
    kinds = get_args(Place.__annotations__["kind"])
    assert set(kinds) == {"held", "waiting", "delayed", "nowhere"}
    told = {kind: waits({"where": kind, "seconds": 65.0, "ahead": 1}) for kind in (*kinds, "unknown")}
    assert "another takes over in 1 min 5 s" in told["held"]
    assert "due in 1 min 5 s, at 2" in told["delayed"]
    assert "reconcile puts it there" in told["nowhere"]
    assert "Redis cannot be reached" in told["unknown"]


def test_what_stands_behind_another_in_its_order_leads_there() -> None:
    place = {"where": "ordering", "seconds": 0.0, "ahead": 3, "behind": {"source": "shop", "event_id": "e-1"}}
    delivery = {"endpoint": "a", "status": "pending", "waits": place, "next_attempt_at": UNTIL, "cancel_requested_at": None}
    (step,) = timeline.waits({"status": "delivering", "deliveries": [delivery]}, {})
    assert "behind 3 others" in str(step.detail)
    assert step.link == "/console/events/e-1?source=shop"


def test_what_was_asked_to_end_while_it_is_called_says_so() -> None:
    place = {"where": "held", "seconds": 10.0, "ahead": 0}
    told = waits(place, status="delivering", asked_to_end=True)
    assert told.startswith("ledger is being called")
    assert told.endswith("no retry follows")


def test_an_event_of_the_future_says_when_it_is_routed() -> None:
    place = {"where": "delayed", "seconds": 3600.0, "ahead": 0}
    due = datetime.now(UTC) + timedelta(hours=1)
    (step,) = timeline.waits({"status": "pending", "waits": place, "deliver_at": due, "deliveries": []}, {})
    assert step.title == "Waits to be routed"
    assert "due in 1 h" in str(step.detail)


def test_what_has_ended_waits_for_nothing() -> None:
    assert timeline.waits({"status": "succeeded", "deliveries": [{"status": "succeeded"}]}, {}) == []
