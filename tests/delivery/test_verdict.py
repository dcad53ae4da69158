"""What each answer comes to: one row per answer, with what follows from it."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import expressions, retry
from madeira.delivery.answer import MAX_BODY, Answer, CallFailed
from madeira.delivery.verdict import EXCERPT, judge
from madeira.records import RetryPolicy
from madeira.states import DeliveryStatus, ErrorCode, Outcome
from tests.delivery.samples import endpoint

S, R, P, U, B = Outcome.SUCCEEDED, Outcome.RETRYABLE, Outcome.PERMANENT, Outcome.UNKNOWN, Outcome.BUSINESS

ENDPOINT = endpoint()


def answer(status: int, body: bytes = b"", *, truncated: bool = False, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, named, body, truncated, "http://a.test/", datetime(2026, 1, 1, tzinfo=UTC), 0.5)


#: Answer -> outcome and error code.
TABLE = [
    (answer(200, b'{"code":0}'), S, None),
    (answer(200, b'{"code":"0"}'), S, None),
    (answer(200, b'{"code":200}'), S, None),
    (answer(200, b'{"code":"200"}'), S, None),
    (answer(200, b'{"code":200.0}'), S, None),
    (answer(200, b'{"code":5001}'), B, "business"),
    (answer(200, b'{"code":"5001"}'), B, "business"),
    (answer(200, b'{"code":-1}'), B, "business"),
    (answer(200, b'{"code":201}'), B, "business"),
    (answer(200, b'{"code":""}'), B, "business"),
    (answer(200, b'{"code":null}'), B, "business"),
    (answer(200, b'{"code":false}'), B, "business"),
    (answer(200, b'{"code":[0]}'), B, "business"),
    (answer(200, b'{"code":{}}'), B, "business"),
    (answer(200, b'{"error":null}'), S, None),
    (answer(200, b'{"error":""}'), S, None),
    (answer(200, b'{"error":[]}'), S, None),
    (answer(200, b'{"error":{}}'), S, None),
    (answer(200, b'{"error":false}'), S, None),
    (answer(200, b'{"error":"no such account"}'), B, "business"),
    (answer(200, b'{"error":{"code":1}}'), B, "business"),
    (answer(200, b'{"error":true}'), B, "business"),
    (answer(200, b'{"success":true}'), S, None),
    (answer(200, b'{"success":false}'), B, "business"),
    (answer(200, b'{"success":"false"}'), S, None),
    (answer(200, b'{"success":0}'), S, None),
    (answer(200, b'{"success":null}'), S, None),
    (answer(200, b'{"ok":true}'), S, None),
    (answer(200, b'{"ok":false}'), B, "business"),
    (answer(200, b'{"success":true,"code":7}'), B, "business"),
    (answer(200, b'{"data":{"success":false}}'), S, None),
    (answer(200, b"{}"), S, None),
    (answer(200, b"[]"), S, None),
    (answer(200, b'[{"success":false}]'), S, None),
    (answer(200, b'"ok"'), S, None),
    (answer(200, b"0"), S, None),
    (answer(200, b"null"), S, None),
    (answer(200, b"false"), S, None),
    (answer(200, b' \r\n {"a": 1} \n'), S, None),
    (answer(200, b'\xef\xbb\xbf{"code":0}'), S, None),
    (answer(200, b'{"n":' + b"9" * 5000 + b"}"), S, None),
    (answer(200, b'{"code":' + b"9" * 5000 + b"}"), B, "business"),
    (answer(200, b"1e400"), S, None),
    (answer(200, b"ok", content_type="text/plain"), U, "unparseable"),
    (answer(200, b"<html><body>Please sign in</body></html>", content_type="text/html"), U, "unparseable"),
    (answer(200, b""), S, None),
    (answer(204), S, None),
    (answer(205), S, None),
    (answer(200, b" "), U, "unparseable"),
    (answer(200, b'{"code":'), U, "unparseable"),
    (answer(200, b'{"code":0}{"code":0}'), U, "unparseable"),
    (answer(200, b"{'code':0}"), U, "unparseable"),
    (answer(200, b'{"a":1,}'), U, "unparseable"),
    (answer(200, "gr\u00fc\u00dfe".encode("latin-1"), content_type="text/plain; charset=latin-1"), U, "unparseable"),
    (answer(200, '{"a":"\u00fc"}'.encode("latin-1")), U, "unparseable"),
    (answer(200, '{"a":"\u00fc"}'.encode("utf-16")), U, "unparseable"),
    (answer(200, b"NaN"), U, "unparseable"),
    (answer(200, b'{"code":NaN}'), U, "unparseable"),
    (answer(200, b'{"code":Infinity}'), U, "unparseable"),
    (answer(200, b'{"code":-Infinity}'), U, "unparseable"),
    (answer(200, b"\x00"), U, "unparseable"),
    (answer(200, b'{"a":"\x00"}'), U, "unparseable"),
    (answer(200, b"[" * 60_000), U, "unparseable"),
    (answer(200, b'{"a":' * 10_000), U, "unparseable"),
    (answer(200, b" " * MAX_BODY, truncated=True), U, "too_large"),
    (answer(204, b"x", truncated=True), U, "too_large"),
    (answer(201, b'{"id":7}'), S, None),
    (answer(202, b'{"id":7}'), S, None),
    (answer(202, b'{"ok":false}'), B, "business"),
    (answer(207, b'{"code":0}'), S, None),
    (answer(207, b"<multistatus/>"), U, "unparseable"),
    (answer(299, b"{}"), S, None),
    (answer(299, b"odd"), U, "unparseable"),
    (answer(101), U, "http_101"),
    (answer(300, b"choose"), U, "http_300"),
    (answer(301, location="http://elsewhere.test/"), U, "http_301"),
    (answer(302, b'{"code":0}', location="http://elsewhere.test/"), U, "http_302"),
    (answer(303), U, "http_303"),
    (answer(304), U, "http_304"),
    (answer(307), U, "http_307"),
    (answer(308), U, "http_308"),
    (answer(400, b'{"code":0}'), P, "http_400"),
    (answer(401), P, "http_401"),
    (answer(403), P, "http_403"),
    (answer(404, b"x" * MAX_BODY, truncated=True), P, "http_404"),
    (answer(409), P, "http_409"),
    (answer(410), P, "http_410"),
    (answer(413), P, "http_413"),
    (answer(422), P, "http_422"),
    (answer(451), P, "http_451"),
    (answer(499), P, "http_499"),
    (answer(408), R, "http_408"),
    (answer(425), R, "http_425"),
    (answer(429), R, "http_429"),
    (answer(500, b'{"code":0}'), R, "http_500"),
    (answer(501), R, "http_501"),
    (answer(502), R, "http_502"),
    (answer(503, b"x" * MAX_BODY, truncated=True), R, "http_503"),
    (answer(504), R, "http_504"),
    (answer(599), R, "http_599"),
    (answer(600), U, "http_600"),
    (answer(999), U, "http_999"),
]


def row_id(row: object) -> str:
    return f"{row.status} {row.body[:40]!r}" if isinstance(row, Answer) else str(row)


@pytest.mark.parametrize(("given_", "outcome", "error_code"), TABLE, ids=row_id)
def test_each_answer_has_one_verdict(given_, outcome, error_code):
    """Outcome, error code, and what follows: success ends it, permanent is dead at once, all else is tried to the limit."""
    attempt = judge(given_, ENDPOINT)
    assert (attempt.outcome, attempt.error_code) == (outcome, error_code)
    assert attempt.status_code == given_.status
    assert (attempt.reason is None) == (outcome is S)

    def decided(failures):
        return retry.decide(attempt, policy=RetryPolicy(), failures=failures, budget_age_s=0.0, rand=lambda: 0.0).status

    if outcome is S:
        assert decided(0) is decided(11) is DeliveryStatus.SUCCEEDED
    elif outcome is P:
        assert decided(0) is DeliveryStatus.DEAD
    else:
        assert decided(0) is decided(10) is DeliveryStatus.PENDING
        assert decided(11) is (DeliveryStatus.PENDING if given_.status == 429 else DeliveryStatus.DEAD)


@pytest.mark.parametrize("given_", [answer(200), answer(204), answer(202)], ids=row_id)
def test_an_endpoint_may_require_a_body(given_):
    """Then an empty answer is unknown, and is not tried for ever."""
    attempt = judge(given_, endpoint(require_body=True))
    assert (attempt.outcome, attempt.error_code) == (U, "unparseable")
    assert judge(answer(200, b"{}"), endpoint(require_body=True)).outcome is S


FAILURES = {
    ErrorCode.DNS: R,
    ErrorCode.CONNECT_REFUSED: R,
    ErrorCode.CONNECT_TIMEOUT: R,
    ErrorCode.UNREACHABLE: R,
    ErrorCode.TLS: R,
    ErrorCode.PROTOCOL: R,
    ErrorCode.RESET: R,
    ErrorCode.READ_TIMEOUT: R,
    ErrorCode.DEADLINE: R,
    ErrorCode.TOO_LARGE: U,
    ErrorCode.DENIED_BY_POLICY: P,
    ErrorCode.BAD_URL: P,
    ErrorCode.TEMPLATE: P,
    ErrorCode.PLATFORM: Outcome.LOST,
}


@pytest.mark.parametrize("code", [code for code in ErrorCode if code not in (ErrorCode.BUSINESS, ErrorCode.UNPARSEABLE)])
def test_each_failure_to_get_an_answer_has_one_outcome(code):
    """Every code of the closed list that a call can fail with is in the table."""
    failure = CallFailed(code, "it\nbroke\x00")
    failure.url, failure.started_at, failure.duration_s = "http://a.test/", datetime(2026, 1, 1, tzinfo=UTC), 2.5
    attempt = judge(failure, ENDPOINT)
    assert attempt.outcome is FAILURES[code]
    assert (attempt.error_code, attempt.status_code) == (code.value, None)
    assert (attempt.url, attempt.started_at, attempt.duration_s) == (failure.url, failure.started_at, 2.5)
    assert attempt.reason == "it broke "


def test_a_reason_is_one_printable_line():
    """A hostile Location goes neither into a log line of its own nor, with its NUL, into Postgres."""
    attempt = judge(answer(302, location="http://x/\x00\r\n\x1b[31m" + "y" * 9000), ENDPOINT)
    assert attempt.reason is not None
    assert attempt.reason.isprintable()
    assert "http://x/" in attempt.reason
    assert len(attempt.reason) <= 500


def test_the_log_keeps_the_beginning_the_length_and_the_hash():
    """Of a long answer 4 KiB are kept."""
    body = b'"' + b"x" * 10_000 + b'"'
    attempt = judge(answer(200, body), ENDPOINT)
    assert (attempt.excerpt, attempt.length) == (body[:EXCERPT], 10_002)
    assert attempt.sha256 is not None
    assert len(attempt.sha256) == 32
    assert judge(answer(204), ENDPOINT).sha256 is None


def test_retry_after_is_read_from_failures():
    """Seconds and dates, against the moment of the answer; nothing from a success."""
    assert judge(answer(429, retry_after="3"), ENDPOINT).retry_after_s == 3.0
    assert judge(answer(503, retry_after="Thu, 01 Jan 2026 00:00:10 GMT"), ENDPOINT).retry_after_s == 9.5
    assert judge(answer(503, retry_after="3, 900"), ENDPOINT).retry_after_s == 900.0, "it came twice"
    assert judge(answer(503, retry_after="soon"), ENDPOINT).retry_after_s is None
    assert judge(answer(200, retry_after="3"), ENDPOINT).retry_after_s is None


@given(st.integers(100, 999), st.binary(max_size=200), st.booleans(), st.text(max_size=50))
def test_judging_never_fails(status, body, truncated, retry_after):
    """Whatever a receiver sends, there is a verdict, with a reason unless it is a success."""
    attempt = judge(answer(status, body, truncated=truncated, retry_after=retry_after, location=retry_after), ENDPOINT)
    assert (attempt.outcome is S) == (attempt.error_code is None) == (attempt.reason is None)
    assert attempt.outcome is not S or 200 <= status < 300


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
    )
)
def test_any_json_but_an_object_is_a_success(value):
    """Only an object can hold a business error."""
    assert judge(answer(200, json.dumps(value).encode()), ENDPOINT).outcome is S


def test_the_verdict_leaves_the_answer_alone():
    """The same answer is judged the same twice."""
    given_ = replace(answer(200, b'{"code":0}'))
    assert judge(given_, ENDPOINT) == judge(given_, ENDPOINT)


def test_what_the_endpoint_is_called_with_is_not_in_the_excerpt():
    """A receiver that echoes its request shows no credential to whoever reads the attempt."""
    guarded = replace(
        endpoint(), headers={"Authorization": "Bearer abcdefghijk", "X-Key": "12345678"}, secrets=("whsec_c2VjcmV0",)
    )
    body = b'{"success": false, "error": "abcdefghijk", "seen": "Bearer abcdefghijk 12345678 whsec_c2VjcmV0"}'
    attempt = judge(answer(200, body), guarded)
    assert attempt.excerpt == b'{"success": false, "error": "***", "seen": "*** *** ***"}'
    assert "abcdefghijk" not in (attempt.reason or "")
    assert attempt.length == len(body)


def test_a_status_below_100_has_a_code_of_three_digits():
    """Whatever a receiver sends can be recorded."""
    assert judge(answer(0, b""), endpoint()).error_code == "http_000"


RULE = "status in [200, 201] && body.code == 0"

#: Rule, answer -> outcome, error code.
RULES = [
    (RULE, answer(200, b'{"code":0}'), S, None),
    (RULE, answer(200, b'{"code":0.0}'), S, None),
    (RULE, answer(201, b'{"code":0,"error":"x"}'), S, None),
    (RULE, answer(202, b'{"code":0}'), B, "business"),
    (RULE, answer(200, b'{"code":1}'), B, "business"),
    (RULE, answer(200, b'{"code":"0"}'), B, "business"),
    (RULE, answer(200, b"{}"), U, "unparseable"),
    (RULE, answer(200, b"<html>"), U, "unparseable"),
    (RULE, answer(200, b'{"code":NaN}'), U, "unparseable"),
    (RULE, answer(204), B, "business"),
    (RULE, answer(200), U, "unparseable"),
    (RULE, answer(200, b'{"code":0}' + b" " * MAX_BODY, truncated=True), U, "too_large"),
    (RULE, answer(404, b'{"code":0}'), P, "http_404"),
    (RULE, answer(503, b"<html>"), R, "http_503"),
    (RULE, answer(429, b'{"code":0}'), R, "http_429"),
    (RULE, answer(302, b'{"code":0}'), U, "http_302"),
    ("status == 409 || status < 300", answer(409, b"x" * MAX_BODY, truncated=True), S, None),
    ("status == 409 || status < 300", answer(200, b"<html>"), S, None),
    ("status == 409 || status < 300", answer(410), P, "http_410"),
    ("status == 409 && body.known", answer(409, b'{"known":true}'), S, None),
    ("status == 409 && body.known", answer(409, b'{"known":false}'), P, "http_409"),
    ("status == 409 && body.known", answer(409, b"<html>"), P, "http_409"),
    ("status == 409 && body.known", answer(409, b'{"known":true}', truncated=True), P, "http_409"),
    ("true", answer(500), R, "http_500"),
    ("body.ok", answer(500, b'{"ok":true}'), R, "http_500"),
    ("body.ok", answer(200, b'{"ok":true}'), S, None),
    ("body.ok", answer(200, b'{"ok":false}'), B, "business"),
    ("body.ok", answer(200, b'{"ok":1}'), U, "unparseable"),
    ("body == null", answer(200), S, None),
    ("body == null", answer(200, b"null"), S, None),
    ("body == null || text == 'OK'", answer(200, b"OK"), S, None),
    ("text.startsWith('OK')", answer(200, b"OK 17", content_type="text/plain"), S, None),
    ("text.startsWith('OK')", answer(200, b"\xff\xfe"), B, "business"),
    ("headers['content-type'] == 'text/plain'", answer(200, b"x", content_type="text/plain"), S, None),
    ("headers['x-result'] == 'ok'", answer(200, b"x"), U, "unparseable"),
    ("'x-result' in headers", answer(200, b"x"), B, "business"),
    ("body.n > 1.0e300", answer(200, b'{"n":' + b"9" * 5000 + b"}"), S, None),
]


@pytest.mark.parametrize(("rule", "given_", "outcome", "error_code"), RULES, ids=row_id)
def test_a_success_rule_judges_what_http_calls_a_success(rule, given_, outcome, error_code):
    """False is business, an error unknown. Another status is a success only if the rule reads it and says so."""
    assert expressions.check(rule, expressions.ANSWER_VARIABLES) is None
    attempt = judge(given_, endpoint(success=rule))
    assert (attempt.outcome, attempt.error_code) == (outcome, error_code)
    assert (attempt.reason is None) == (outcome is S)


def test_a_required_body_is_required_beside_a_rule_too():
    """The rule is not asked about an answer without one."""
    assert judge(answer(200), endpoint(success="true", require_body=True)).outcome is U
    assert judge(answer(200, b"x"), endpoint(success="true", require_body=True)).outcome is S


def test_a_failed_rule_tells_no_value_of_the_answer():
    """Its reason goes into logs."""
    attempt = judge(answer(200, b'{"s3cr3t": 1}'), endpoint(success="body.code == 0"))
    assert attempt.reason == "the success rule failed on the answer 200: there is no field code"


@given(st.binary(max_size=200), st.integers(100, 999))
def test_a_success_rule_never_fails_the_judge(body, status):
    """Whatever the receiver sends."""
    attempt = judge(answer(status, body), endpoint(success="status == 200 && body.list.all(x, x.n > 1) && text.size() > 2"))
    assert attempt.outcome in Outcome


def test_what_a_template_of_a_header_brings_itself_is_masked():
    """A receiver may echo it; what came from the event is no secret."""
    target = endpoint(headers={"Authorization": "Token abcdefgh-{{ event_id }}"})
    assert judge(answer(200, b'{"got": "abcdefgh-evt-1"}'), target).excerpt == b'{"got": "***evt-1"}'
