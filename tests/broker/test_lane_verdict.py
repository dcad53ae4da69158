"""What an attempt says about its receiver."""

from datetime import UTC, datetime

import pytest

from madeira.lanes import patience_s, verdict
from madeira.records import Attempt
from madeira.states import ErrorCode, Outcome


def attempt(outcome: Outcome, error_code: str | None = None, status: int | None = None, wait_s: float | None = None) -> Attempt:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Attempt(outcome, now, 0.1, "http://a.test/", status, error_code, retry_after_s=wait_s)


@pytest.mark.parametrize(
    ("made", "heard"),
    [
        (attempt(Outcome.SUCCEEDED, None, 200), "good"),
        (attempt(Outcome.BUSINESS, ErrorCode.BUSINESS, 200), "good"),
        (attempt(Outcome.PERMANENT, "http_404", 404), "good"),
        (attempt(Outcome.PERMANENT, ErrorCode.DENIED_BY_POLICY), ""),
        (attempt(Outcome.PERMANENT, ErrorCode.TEMPLATE), ""),
        (attempt(Outcome.PERMANENT, ErrorCode.BAD_URL), ""),
        (attempt(Outcome.LOST, ErrorCode.PLATFORM), ""),
        (attempt(Outcome.LATE), ""),
        (attempt(Outcome.RETRYABLE, "http_503", 503), "bad"),
        (attempt(Outcome.RETRYABLE, "http_408", 408), "bad"),
        (attempt(Outcome.RETRYABLE, ErrorCode.CONNECT_REFUSED), "bad"),
        (attempt(Outcome.RETRYABLE, ErrorCode.DNS), "bad"),
        (attempt(Outcome.RETRYABLE, ErrorCode.RESET), "bad"),
        (attempt(Outcome.UNKNOWN, "http_302", 302), "bad"),
        (attempt(Outcome.UNKNOWN, ErrorCode.UNPARSEABLE, 200), "bad"),
        (attempt(Outcome.RETRYABLE, ErrorCode.READ_TIMEOUT), "timeout"),
        (attempt(Outcome.RETRYABLE, ErrorCode.CONNECT_TIMEOUT), "timeout"),
        (attempt(Outcome.RETRYABLE, ErrorCode.DEADLINE), "timeout"),
        (attempt(Outcome.RETRYABLE, "http_429", 429), "throttled"),
    ],
)
def test_the_breaker_hears_what_the_receiver_could_help(made: Attempt, heard: str) -> None:
    assert verdict(made) == heard


@pytest.mark.parametrize(
    ("status", "asked_s", "left_alone_s"),
    [(429, 7.0, 7.0), (503, 7.0, 7.0), (500, 7.0, 0.0), (429, None, 0.0), (429, 3600.0, 300.0), (503, -5.0, 0.0)],
)
def test_a_lane_is_left_alone_for_what_429_and_503_ask_five_minutes_at_most(
    status: int, asked_s: float | None, left_alone_s: float
) -> None:
    assert patience_s(attempt(Outcome.RETRYABLE, f"http_{status}", status, asked_s)) == left_alone_s
