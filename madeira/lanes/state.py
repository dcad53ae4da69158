"""How a lane is at this moment, as Redis tells it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

#: What keeps a whole lane from being served; empty: nothing does.
Hold = Literal["", "paused", "disabled"]

#: What somebody waits for whose delivery could go otherwise; empty: only its turn.
Limit = Literal["", "disabled", "paused", "breaker", "retry_after", "rate", "cap"]


class Breaker(NamedTuple):
    """The breaker of a lane."""

    state: Literal["closed", "open", "half_open", "ramp"]
    #: Seconds until a call may try (open), or until the one that tries is given up (half open).
    left_s: float
    #: Seconds since it opened.
    since_s: float
    #: What it was opened by: failures in a ``row``, or their ``share`` of the last minute; empty while it is closed.
    why: str
    #: Verdicts, and failures among them, by which it was opened; a timeout counts double.
    verdicts: int
    failures: int
    #: Calls at a time that it allows while it closes step by step.
    allow: int

    @property
    def reason(self) -> str | None:
        """Why it is not closed, in words."""
        if self.state == "closed":
            return None
        if self.why == "row":
            return f"{self.failures} failures in a row"
        return f"{self.failures} failures in {self.verdicts} verdicts of the last minute (a timeout counts double)"


class LaneState(NamedTuple):
    """The state of a lane."""

    hold: Hold
    breaker: Breaker
    #: Seconds for which the receiver asked to be left alone.
    retry_after_s: float
    #: Calls under way.
    under_way: int
    #: What waits and could go but for the lane's limits, by line.
    fresh: int
    retry: int
    replay: int

    @property
    def name(self) -> str:
        """The one word for it: what keeps it from being served, the strongest first."""
        if self.hold:
            return self.hold
        if self.breaker.state != "closed":
            return self.breaker.state
        return "retry_after" if self.retry_after_s > 0 else "active"


#: Every word for the state of a lane, the strongest first.
STATES = ("disabled", "paused", "open", "half_open", "ramp", "retry_after", "active")


def lane_state(row: Sequence[Any]) -> LaneState:
    """The state of a lane from what ``scripts/state.lua`` tells of it."""
    hold, state, left, since, why, verdicts, failures, allow, patient, under_way, *waiting = row
    breaker = Breaker(_text(state), float(left) / 1000, float(since) / 1000, _text(why), int(verdicts), int(failures), int(allow))
    return LaneState(_text(hold), breaker, float(patient) / 1000, int(under_way), *waiting)


def hold_of(state: str) -> Hold:
    """What Redis is told of an endpoint's state."""
    return "paused" if state == "paused" else "disabled" if state == "disabled" else ""


def _text(value: Any) -> Any:
    return bytes(value).decode()
