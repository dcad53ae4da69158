"""When a failed delivery is tried again, and when it is not."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira.records import Attempt, Decision, RetryPolicy
from madeira.retry import MAX_RETRY_AFTER_S, decide, delay, failure_class, names_its_class, parse_retry_after
from madeira.states import DeliveryStatus, ErrorCode, FailureClass, Outcome

POLICY = RetryPolicy()
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def none() -> float:
    return 0.0


def almost_one() -> float:
    return 1 - 2**-53


def attempt(outcome: Outcome = Outcome.RETRYABLE, error_code: str | None = "http_503", **more: object) -> Attempt:
    return replace(Attempt(outcome, NOW, 0.5, "http://a.test/", 503, error_code, "the receiver answered 503"), **more)


def decided(of: Attempt, *, policy: RetryPolicy = POLICY, failures: int = 0, age: float = 0.0, rand=none) -> Decision:
    return decide(of, policy=policy, failures=failures, budget_age_s=age, rand=rand)


def test_the_default_delays_double_from_a_minute_to_half_an_hour():
    """60, 120, 240, 480, 960, 1800, 1800 …, for ever."""
    assert [delay(POLICY, n, none) for n in (1, 2, 3, 4, 5, 6, 7, 12, 100)] == [60, 120, 240, 480, 960, 1800, 1800, 1800, 1800]


def test_jitter_adds_up_to_a_fifth_after_the_cap():
    """Never less than promised, and at the cap too deliveries are spread."""
    assert delay(POLICY, 1, almost_one) == pytest.approx(72)
    assert delay(POLICY, 12, almost_one) == pytest.approx(2160)


policies = st.builds(
    RetryPolicy,
    initial=st.floats(0, 1e6),
    factor=st.floats(0, 1e3),
    max=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
    delays=st.lists(st.floats(0, 1e6), max_size=5).map(tuple),
)


@given(policies, st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_a_delay_is_within_its_bounds(policy, failures, share):
    """For any policy and any number of failures: from the nominal delay to the nominal delay and its jitter, no overflow."""
    nominal = delay(policy, failures, none)
    assert 0 <= nominal <= max(policy.max, *policy.delays, 0)
    assert nominal <= delay(policy, failures, lambda: share) <= nominal * (1 + policy.jitter)


@given(st.floats(1, 1e3), st.integers(1, 200))
def test_delays_never_shrink(factor, failures):
    """With a factor of at least one the next delay is at least as long."""
    policy = replace(POLICY, factor=factor)
    assert delay(policy, failures, none) <= delay(policy, failures + 1, none)


def test_an_explicit_list_of_delays_repeats_its_last():
    """The list replaces the formula; jitter still adds."""
    policy = replace(POLICY, delays=(1.0, 5.0))
    assert [delay(policy, n, none) for n in (1, 2, 3, 99)] == [1, 5, 5, 5]
    assert delay(policy, 1, almost_one) == pytest.approx(1.2)


def test_failures_of_one_moment_come_back_spread():
    """200 deliveries that fail together return all over the 12 seconds that jitter allows."""
    rand = random.Random(7).random
    waits = [decided(attempt(), rand=rand).delay_s for _ in range(200)]
    assert min(waits) >= 60
    assert max(waits) < 72
    assert len({int(wait * 10) for wait in waits}) >= 60


def test_a_success_ends_it():
    """Nothing else is looked at: a success after max_age and max_attempts is a success."""
    good = attempt(Outcome.SUCCEEDED, None)
    assert decided(good, failures=99, age=1e9) == Decision(DeliveryStatus.SUCCEEDED)


@pytest.mark.parametrize("outcome", [Outcome.RETRYABLE, Outcome.UNKNOWN, Outcome.BUSINESS])
def test_max_attempts_counts_the_first_one(outcome):
    """Twelve attempts: eleven failures are followed by another attempt, the twelfth is the last."""
    statuses = [decided(attempt(outcome), failures=n).status for n in range(12)]
    assert statuses == [DeliveryStatus.PENDING] * 11 + [DeliveryStatus.DEAD]
    last = decided(attempt(outcome), failures=11)
    assert last.counts
    assert last.last_error == "given up after 12 failed attempts; http_503: the receiver answered 503"


def test_a_permanent_failure_is_final_at_once():
    """With attempts and time to spare."""
    d = decided(attempt(Outcome.PERMANENT, "http_400"))
    assert (d.status, d.failure_class, d.counts) == (DeliveryStatus.DEAD, FailureClass.RECEIVER, True)


@pytest.mark.parametrize(
    ("failure_class", "last_error", "says"),
    [("template", "template: no field x", True), ("network", "dns: no such host", False), ("template", None, False)],
    ids=["itself", "another word", "nothing"],
)
def test_a_class_that_begins_the_error_need_not_be_told_beside_it(failure_class, last_error, says):
    """Whoever shows a dead letter says it once."""
    assert names_its_class({"failure_class": failure_class, "last_error": last_error}) is says


def test_429_counts_against_the_time_only():
    """However often it comes, the delivery lives until max_age, and then it has expired."""
    d = decided(attempt(error_code="http_429"), failures=11)
    assert (d.status, d.counts, d.failure_class) == (DeliveryStatus.PENDING, False, FailureClass.THROTTLED)
    d = decided(attempt(error_code="http_429"), failures=11, age=86_400)
    assert (d.status, d.counts, d.failure_class) == (DeliveryStatus.DEAD, False, FailureClass.EXPIRED)


def test_max_age_is_judged_at_the_end_of_the_attempt():
    """The attempt's own time counts; one that ends just before is followed by another, however long the delay."""
    assert decided(attempt(duration_s=0.4), age=86_399.5).status is DeliveryStatus.PENDING
    d = decided(attempt(duration_s=0.5), age=86_399.5)
    assert (d.status, d.failure_class) == (DeliveryStatus.DEAD, FailureClass.EXPIRED)
    assert d.last_error is not None
    assert d.last_error.startswith("given up 86400 s after the first attempt; http_503")


def test_a_platform_failure_uses_up_nothing():
    """It is not the receiver's fault: neither attempts nor age end it here."""
    d = decided(attempt(Outcome.LOST, ErrorCode.PLATFORM), failures=11, age=1e9)
    assert (d.status, d.counts, d.failure_class) == (DeliveryStatus.PENDING, False, FailureClass.PLATFORM)
    assert d.delay_s > 0


@pytest.mark.parametrize("code", ["http_429", "http_503", "http_408", "http_301"])
def test_retry_after_is_a_floor(code):
    """A longer one lengthens the wait, a shorter one changes nothing, more than an hour is an hour."""
    assert decided(attempt(error_code=code, retry_after_s=300.0)).delay_s == 300
    assert decided(attempt(error_code=code, retry_after_s=3.0)).delay_s == 60
    assert decided(attempt(error_code=code, retry_after_s=999_999.0)).delay_s == 3600
    assert decided(attempt(error_code=code, retry_after_s=-5.0)).delay_s == 60


@given(
    st.sampled_from(Outcome),
    st.sampled_from(ErrorCode) | st.just("http_429"),
    st.integers(0, 200),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_a_decision_always_makes_sense(outcome, code, failures, age, retry_after):
    """It ends or it waits for a bounded time; a cause is named unless it succeeded."""
    d = decided(attempt(outcome, code, retry_after_s=retry_after), failures=failures, age=age, rand=almost_one)
    assert d.status in (DeliveryStatus.SUCCEEDED, DeliveryStatus.DEAD, DeliveryStatus.PENDING)
    assert (d.status is DeliveryStatus.PENDING) == (0 < d.delay_s <= MAX_RETRY_AFTER_S)
    assert (d.failure_class is None) == (d.last_error is None) == (outcome is Outcome.SUCCEEDED)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_has_its_class(code):
    """Network where no answer came, receiver where one came and said no, and the three that are ours."""
    ours = {
        ErrorCode.DENIED_BY_POLICY: FailureClass.POLICY,
        ErrorCode.BAD_URL: FailureClass.POLICY,
        ErrorCode.TEMPLATE: FailureClass.TEMPLATE,
        ErrorCode.PLATFORM: FailureClass.PLATFORM,
    }
    answered = {ErrorCode.PROTOCOL, ErrorCode.TOO_LARGE, ErrorCode.BUSINESS, ErrorCode.UNPARSEABLE}
    expected = ours.get(code, FailureClass.RECEIVER if code in answered else FailureClass.NETWORK)
    assert failure_class(code) is expected


def test_a_status_is_the_receivers():
    """Except 429, which is throttling."""
    assert failure_class("http_500") is failure_class("http_404") is FailureClass.RECEIVER
    assert failure_class("http_429") is FailureClass.THROTTLED


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        ("3", 3),
        (" 120 ", 120),
        ("2.5", 2.5),
        ("999999", 3600),
        ("9" * 5000, 3600),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOW + timedelta(days=9), usegmt=True), 3600),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0),
        ("Thu, 01 Jan 2026 12:01:30 -0000", 90),
        ("Thu, 01 Jan 2026 14:01:30 +0200", 90),
        ("3, 3", 3),
        ("3,900 , 4", 900),
        ("900, soon", 900),
        ("soon, 3", 3),
        ("-3, , 5", 5),
        ("3, Thu, 01 Jan 2026 12:01:30 GMT", 90),
        ("Thu, 01 Jan 2026 12:01:30 GMT, 3", 90),
        ("Thu, 01 Jan 2026 12:01:30 GMT, Thu, 01 Jan 2026 12:02:00 GMT", 120),
        ("Thursday, 01-Jan-26 12:01:30 GMT, 3", 90),
        ("Thu, 3", None),
        (",", None),
        ("", None),
        ("-3", None),
        ("+3", None),
        ("nan", None),
        ("inf", None),
        ("1e3", None),
        ("3 seconds", None),
        ("\u0663", None),
        ("tomorrow", None),
        ("2026-01-01T12:01:30Z", None),
        ("Thu, 99 Jan 2026 12:01:30 GMT", None),
        ("Thu, 01 Jan 99999 12:01:30 GMT", None),
    ],
)
def test_retry_after_in_its_forms(value, seconds):
    """Seconds and HTTP dates are understood, up to an hour; all else is ignored. Of several the longest counts."""
    assert parse_retry_after(value, NOW) == seconds


@given(st.text())
def test_no_retry_after_makes_it_fail(value):
    """Whatever a receiver writes, it is seconds within bounds or nothing."""
    seconds = parse_retry_after(value, NOW)
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER_S


def test_gone_keeps_a_delivery_in_its_place_where_the_url_is_the_endpoints_own():
    """Whatever its age and its failures; of a callback address it is final, and so is every other refusal."""
    gone = attempt(Outcome.PERMANENT, "http_410", status_code=410)
    old = {"policy": POLICY, "failures": 11, "budget_age_s": 1e9, "rand": none}
    kept = decide(gone, **old, fixed_url=True)
    assert (kept.status, kept.stays, kept.counts, kept.delay_s) == (DeliveryStatus.PENDING, True, False, 0.0)
    assert decide(gone, **old).status is DeliveryStatus.DEAD
    refused = attempt(Outcome.PERMANENT, "http_404", status_code=404)
    assert decide(refused, **old, fixed_url=True).status is DeliveryStatus.DEAD
