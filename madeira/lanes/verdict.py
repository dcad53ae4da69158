"""What an attempt says about its receiver: what the breaker of its lane hears, and how long the receiver is left alone."""

from typing import Final, Literal

from madeira.records import Attempt
from madeira.retry import THROTTLED
from madeira.states import ErrorCode, Outcome

#: See ``madeira/broker/scripts/breaker.lua``; empty: nothing that the receiver could help.
Verdict = Literal["", "good", "bad", "timeout", "throttled"]

#: What cost a thread all the time that the endpoint allows.
_TIMEOUTS: Final = frozenset({ErrorCode.CONNECT_TIMEOUT, ErrorCode.READ_TIMEOUT, ErrorCode.DEADLINE})

#: Answers whose ``Retry-After`` speaks of the receiver, and not only of this one event.
_PATIENCE: Final = frozenset({429, 503})

#: The longest that a receiver is left alone for one such answer, in seconds; it may ask again.
MAX_PATIENCE_S: Final = 300.0


def verdict(attempt: Attempt) -> Verdict:
    """What the breaker hears of an attempt.

    A receiver that answers is there, also where it refuses one event (other 4xx, a business error). What it cannot help (a
    denied address, a template) says nothing. Too many requests is a wish, not a failure.
    """
    if attempt.outcome is Outcome.SUCCEEDED or attempt.outcome is Outcome.BUSINESS:
        return "good"
    if attempt.outcome is Outcome.PERMANENT:
        return "good" if attempt.status_code is not None else ""
    if attempt.outcome not in (Outcome.RETRYABLE, Outcome.UNKNOWN):
        return ""
    if attempt.error_code == THROTTLED:
        return "throttled"
    return "timeout" if attempt.error_code in _TIMEOUTS else "bad"


def patience_s(attempt: Attempt) -> float:
    """For how many seconds the whole lane is left alone because the receiver asked for it; 0: it did not."""
    if attempt.status_code not in _PATIENCE or attempt.outcome is not Outcome.RETRYABLE:
        return 0.0
    return min(max(0.0, attempt.retry_after_s or 0.0), MAX_PATIENCE_S)
