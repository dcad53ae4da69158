"""What follows from an attempt: the retry policy, in the one place where it lives. Pure: no clock, no randomness of its own.

It gives a *delay*, never a time: Postgres adds it to its clock, Redis to its own.

Only what the receiver did counts against ``max_attempts``. A 429 does not: who asks for patience gets it until ``max_age``.
``max_age`` is looked at here only, when an attempt has failed: waiting never ends a delivery.
"""

import email.utils
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from madeira.records import Attempt, Decision, RetryPolicy
from madeira.states import DeliveryStatus, ErrorCode, FailureClass, Outcome

#: Seconds of ``Retry-After`` that are honoured, at most.
MAX_RETRY_AFTER_S: Final = 3600.0

#: Error code of "too many requests".
THROTTLED: Final = "http_429"

#: Error code of "gone".
GONE: Final = "http_410"

_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?")

#: One wish in a list; the comma behind the day of a date ends none.
_WISH: Final = re.compile(r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*,)?[^,]+", re.IGNORECASE | re.ASCII)

#: The failure class of an error code; `FailureClass.RECEIVER` for all others: an answer came, and it said no.
_CLASSES: Final[dict[str, FailureClass]] = {
    THROTTLED: FailureClass.THROTTLED,
    ErrorCode.DNS: FailureClass.NETWORK,
    ErrorCode.CONNECT_REFUSED: FailureClass.NETWORK,
    ErrorCode.CONNECT_TIMEOUT: FailureClass.NETWORK,
    ErrorCode.UNREACHABLE: FailureClass.NETWORK,
    ErrorCode.TLS: FailureClass.NETWORK,
    ErrorCode.RESET: FailureClass.NETWORK,
    ErrorCode.READ_TIMEOUT: FailureClass.NETWORK,
    ErrorCode.DEADLINE: FailureClass.NETWORK,
    ErrorCode.DENIED_BY_POLICY: FailureClass.POLICY,
    ErrorCode.BAD_URL: FailureClass.POLICY,
    ErrorCode.TEMPLATE: FailureClass.TEMPLATE,
    ErrorCode.PLATFORM: FailureClass.PLATFORM,
}


def delay(policy: RetryPolicy, failures: int, rand: Callable[[], float]) -> float:
    """Seconds from failure number `failures` (from 1) to the next attempt.

    `rand` gives a number from 0 up to 1. Jitter only adds, and it adds to the capped delay.
    """
    return _nominal(policy, max(1, failures)) * (1 + policy.jitter * rand())


def _nominal(policy: RetryPolicy, failures: int) -> float:
    if policy.delays:
        return policy.delays[min(failures, len(policy.delays)) - 1]
    try:
        return min(policy.initial * policy.factor ** (failures - 1), policy.max)
    except OverflowError:
        return policy.max


def decide(
    attempt: Attempt,
    *,
    policy: RetryPolicy,
    failures: int,
    budget_age_s: float,
    rand: Callable[[], float],
    fixed_url: bool = False,
) -> Decision:
    """What follows from `attempt`.

    Where the URL is the same for every event (`fixed_url`), "gone" says nothing about this delivery: it stays in its place, and
    the endpoint is disabled until a person has seen to it. `failures` is how many counted before it, `budget_age_s` how many
    seconds before this attempt's claim the first attempt of the present budget was.
    """
    if attempt.outcome is Outcome.SUCCEEDED:
        return Decision(DeliveryStatus.SUCCEEDED)
    cause = failure_class(attempt.error_code)
    why = f"{attempt.error_code}: {attempt.reason}"
    if attempt.outcome is Outcome.LOST:
        return Decision(DeliveryStatus.PENDING, delay(policy, failures + 1, rand), failure_class=cause, last_error=why)
    if fixed_url and is_gone(attempt):
        return Decision(DeliveryStatus.PENDING, failure_class=cause, last_error=why, stays=True)
    if attempt.outcome is Outcome.PERMANENT:
        return Decision(DeliveryStatus.DEAD, counts=True, failure_class=cause, last_error=why)
    counts = attempt.error_code != THROTTLED
    if counts and failures + 1 >= policy.max_attempts:
        why = f"given up after {failures + 1} failed attempts; {why}"
        return Decision(DeliveryStatus.DEAD, counts=True, failure_class=cause, last_error=why)
    if budget_age_s + attempt.duration_s >= policy.max_age:
        why = f"given up {policy.max_age:g} s after the first attempt; {why}"
        return Decision(DeliveryStatus.DEAD, counts=counts, failure_class=FailureClass.EXPIRED, last_error=why)
    floor = min(max(0.0, attempt.retry_after_s or 0.0), MAX_RETRY_AFTER_S)
    wait = max(delay(policy, failures + 1, rand), floor)
    return Decision(DeliveryStatus.PENDING, wait, counts=counts, failure_class=cause, last_error=why)


def is_gone(attempt: Attempt) -> bool:
    """Whether the receiver says that nothing is there any more, and never will be."""
    return attempt.outcome is Outcome.PERMANENT and attempt.error_code == GONE


def failure_class(error_code: str | None) -> FailureClass:
    """What kind of cause `error_code` stands for."""
    return _CLASSES.get(error_code or "", FailureClass.RECEIVER)


def names_its_class(delivery: Mapping[str, Any]) -> bool:
    """Whether the words of a delivery's last failure begin with its class, so that it need not be told beside them."""
    return str(delivery["last_error"] or "").startswith(f"{delivery['failure_class']}:")


def parse_retry_after(value: str, now: datetime) -> float | None:
    """The seconds that a ``Retry-After`` header asks for, from 0 to `MAX_RETRY_AFTER_S`; None when it is malformed.

    A header that came more than once, since a proxy has added its own, is a list: the longest wish in it that can be read counts.
    `now` is what an HTTP date is compared with.
    """
    wishes = (_wish(one.strip(), now) for one in _WISH.findall(value))
    return max((wish for wish in wishes if wish is not None), default=None)


def _wish(value: str, now: datetime) -> float | None:
    if value.isascii() and _SECONDS.fullmatch(value):
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        until = email.utils.parsedate_to_datetime(value)
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return min(max(0.0, (until - now).total_seconds()), MAX_RETRY_AFTER_S)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
