"""How an endpoint is held and how its lanes are, as it is shown by whichever door."""

from collections.abc import Sequence
from typing import Any

from madeira.lanes.state import STATES, LaneState
from madeira.store.holding import Holding


def held(now: Holding) -> dict[str, Any]:
    """How an endpoint is held, as it is shown."""
    return {"state": now.state, "reason": now.reason, "since": now.since, "by": now.by}


def lane(now: Holding, states: Sequence[LaneState]) -> dict[str, Any]:
    """All lanes of an endpoint as one: the state of the worst, and the sums."""
    worst = min(states, key=lambda s: STATES.index(s.name))
    # What Postgres says counts: Redis may not know yet, or any more.
    state = now.state if now.state != "active" else worst.name if not worst.hold else "active"
    breaker = worst.breaker
    reason = now.reason if now.state != "active" else breaker.reason
    if state == "retry_after":
        reason = "the receiver asked to be left alone (Retry-After)"
    until_s = {"open": breaker.left_s, "half_open": breaker.left_s, "retry_after": worst.retry_after_s}.get(state)
    return {
        "state": state,
        "reason": reason,
        # Of an open breaker: when a call may try; of one half open: when the call that tries is given up.
        "until_s": None if until_s is None else round(until_s, 3),
        "allowed": breaker.allow if state == "ramp" else None,
        "under_way": sum(s.under_way for s in states),
        "waiting": {line: sum(getattr(s, line) for s in states) for line in ("fresh", "retry", "replay")},
    }
