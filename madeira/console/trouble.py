"""How the endpoints are, the one with most trouble first."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from madeira.broker.queues import Queues
from madeira.errors import BrokerUnavailable
from madeira.lanes.pace import endpoint_of
from madeira.lanes.showing import lane as shown_lane
from madeira.lanes.state import LaneState
from madeira.routing.config import CALLBACK, callback
from madeira.routing.manage import Shown
from madeira.store.holding import Holding
from madeira.store.overview import Overview

#: States of a lane by the trouble that they are while something waits, the worst first.
_TROUBLE: Final = ("open", "half_open", "disabled", "paused", "retry_after", "ramp", "unknown", "active")


@dataclass(frozen=True, slots=True)
class Row:
    """One endpoint."""

    name: str
    #: False when the configuration does not hold it, though something waits for it.
    is_configured: bool
    #: As a lane's: ``active``, ``paused``, ``disabled``, ``open``, …; ``unknown`` while Redis is away and nobody holds it.
    state: str
    reason: str | None
    #: Seconds until that changes by itself, where that is known.
    until_s: float | None
    #: Unfinished deliveries, and since when the oldest of them waits.
    waiting: int
    since: datetime | None
    dead: int
    #: Calls under way, and at most; None while Redis is away.
    under_way: int | None
    concurrency: int
    #: Calls per second at most; None: not limited.
    rate: float | None

    @property
    def is_built_in(self) -> bool:
        """Whether nobody can hold or change it."""
        return self.name == CALLBACK

    @property
    def is_held(self) -> bool:
        """Whether something keeps what waits from going, that does not end with the next call."""
        return self.state in ("open", "half_open", "paused", "disabled")

    def trouble(self) -> tuple[Any, ...]:
        """Sorts the worst first."""
        age = (datetime.now(UTC) - self.since).total_seconds() if self.since else 0.0
        rank = _TROUBLE.index(self.state) if self.waiting or self.state in ("open", "half_open") else len(_TROUBLE)
        return (not (self.is_held and self.waiting), rank, -self.dead, -age, -self.waiting, self.name)


def rows(configured: Sequence[Shown], overview: Overview, *, held: dict[str, str], queues: Queues) -> list[Row]:
    """All endpoints that are configured, and others for which something waits or that have something dead.

    `held` is the state of each in Postgres.
    """
    documents: dict[str, Any] = {one.name: one.document for one in configured}
    dead: dict[str, int] = {}
    for one in overview.dead:
        dead[one.endpoint] = dead.get(one.endpoint, 0) + one.number
    names = sorted({*documents, *overview.waiting, *dead})
    states = _lanes(names, queues)
    made = [_row(name, documents.get(name), overview, dead.get(name, 0), held.get(name, "active"), states) for name in names]
    return sorted(made, key=Row.trouble)


def _lanes(names: Sequence[str], queues: Queues) -> dict[str, list[LaneState]] | None:
    """The lanes of each endpoint; None while Redis is away."""
    try:
        others = [lane for lane in queues.lanes() if lane not in names]
        wanted = [*names, *others]
        found = queues.lane_states(wanted)
    except BrokerUnavailable:
        return None
    states: dict[str, list[LaneState]] = {}
    for lane, state in zip(wanted, found, strict=True):
        states.setdefault(endpoint_of(lane), []).append(state)
    return states


def _row(
    name: str,
    document: Any,
    overview: Overview,
    dead: int,
    held: str,
    states: dict[str, list[LaneState]] | None,
) -> Row:
    defaults = callback()
    limits = document or {}
    waiting = overview.waiting.get(name)
    lane: dict[str, Any] = {"state": held if held != "active" else "unknown", "reason": None, "until_s": None, "under_way": None}
    if states is not None:
        lane = shown_lane(Holding(held), states[name])
    return Row(
        name=name,
        is_configured=document is not None or name == CALLBACK,
        state=lane["state"],
        reason=lane["reason"],
        until_s=lane["until_s"],
        waiting=waiting.number if waiting else 0,
        since=waiting.since if waiting else None,
        dead=dead,
        under_way=lane["under_way"],
        concurrency=limits.get("concurrency", defaults.concurrency),
        rate=limits.get("rate"),
    )
