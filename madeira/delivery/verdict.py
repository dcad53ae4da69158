"""What an answer came to.

| answer | outcome |
|---|---|
| 2xx, empty body (204 has none) | succeeded, unless the endpoint requires a body: unknown |
| 2xx, JSON without a business error | succeeded |
| 2xx, JSON with a business error | business |
| 2xx, anything else | unknown |
| 408, 425, 429, 5xx | retryable |
| other 4xx | permanent |
| 3xx (never followed), 101, 600 and above | unknown |
| no complete answer | retryable, except for what no retry mends |

An endpoint's success rule, an expression over ``status``, ``headers`` (names in lower case), ``body`` (the parsed JSON; null when
there is none, or it is no JSON) and ``text`` (the body as it came), takes the place of what is said of 2xx here: true means
succeeded, false business, and an error unknown. A rule that reads ``status`` may also call another answer a success (a 409 for
what was there already); what it does not call a success there is what the table says, since HTTP has said why.

A business error is a JSON object with ``"success": false``, ``"ok": false``, a ``"code"`` other than ``0``, ``"0"``, ``200``
and ``"200"``, or an ``"error"`` that is neither null nor false nor empty.
"""

import hashlib
import json
from datetime import timedelta
from typing import Any, Final

from madeira import expressions, retry
from madeira.delivery.answer import MAX_BODY, Answer, CallFailed
from madeira.delivery.masking import masked
from madeira.expressions import ExpressionFailed
from madeira.records import Attempt, Endpoint
from madeira.states import ErrorCode, Outcome, http_error

#: Bytes of an answer's body that are kept in the log.
EXCERPT: Final = 4096

#: Characters of a reason, at most.
_MAX_REASON: Final = 500

_RETRYABLE_STATUS: Final = frozenset({408, 425, 429})

_OUTCOMES: Final = {
    ErrorCode.TOO_LARGE: Outcome.UNKNOWN,
    ErrorCode.DENIED_BY_POLICY: Outcome.PERMANENT,
    ErrorCode.BAD_URL: Outcome.PERMANENT,
    ErrorCode.TEMPLATE: Outcome.PERMANENT,
    ErrorCode.PLATFORM: Outcome.LOST,
}

#: Outcome, error code and reason.
_Verdict = tuple[Outcome, str | None, str | None]

_SUCCESS: Final[_Verdict] = (Outcome.SUCCEEDED, None, None)


def judge(result: Answer | CallFailed, endpoint: Endpoint) -> Attempt:
    """Judge what a call came back with; never fails, whatever the receiver sent."""
    if isinstance(result, CallFailed):
        return Attempt(
            outcome=_OUTCOMES.get(result.error_code, Outcome.RETRYABLE),
            started_at=result.started_at,
            duration_s=result.duration_s,
            url=result.url,
            error_code=result.error_code.value,
            reason=_told(result.reason, endpoint),
        )
    outcome, error_code, reason = _judge_answer(result, endpoint)
    return Attempt(
        outcome=outcome,
        started_at=result.started_at,
        duration_s=result.duration_s,
        url=result.url,
        status_code=result.status,
        error_code=error_code,
        reason=_told(reason, endpoint) if reason else None,
        excerpt=masked(result.body, endpoint, first=EXCERPT),
        length=len(result.body),
        sha256=hashlib.sha256(result.body).digest() if result.body else None,
        retry_after_s=_retry_after(result) if outcome is not Outcome.SUCCEEDED else None,
    )


def _told(reason: str, endpoint: Endpoint) -> str:
    """`reason` without credentials; it is cut afterwards, so that no part of one is left at its end."""
    text = reason.encode(errors="replace")
    return _one_line(masked(text, endpoint, first=4 * _MAX_REASON).decode(errors="replace"))


def _judge_answer(answer: Answer, endpoint: Endpoint) -> _Verdict:
    status = answer.status
    if 200 <= status < 300:
        return _judge_by_rule(answer, endpoint.success, endpoint) if endpoint.success else _judge_body(answer, endpoint)
    if endpoint.success and _is_excused(answer, endpoint.success):
        return _SUCCESS
    if status in _RETRYABLE_STATUS or 500 <= status < 600:
        return Outcome.RETRYABLE, http_error(status), f"the receiver answered {status}"
    if 400 <= status < 500:
        return Outcome.PERMANENT, http_error(status), f"the receiver answered {status}"
    if 300 <= status < 400:
        where = answer.headers.get("location")
        to = f" to {where}" if where else ""
        return Outcome.UNKNOWN, http_error(status), f"the receiver answered {status}{to}; redirects are not followed"
    return Outcome.UNKNOWN, http_error(status), f"the receiver answered {status}, which is no final status of HTTP"


def _judge_by_rule(answer: Answer, rule: str, endpoint: Endpoint) -> _Verdict:
    if answer.truncated and _reads_body(rule):
        return _too_large(answer)
    if not answer.body and endpoint.require_body:
        return _empty(answer)
    try:
        if _holds(answer, rule):
            return _SUCCESS
    except ExpressionFailed as e:
        return Outcome.UNKNOWN, ErrorCode.UNPARSEABLE, f"the success rule failed on the answer {answer.status}: {e.reason}"
    return Outcome.BUSINESS, ErrorCode.BUSINESS, f"the receiver answered {answer.status}, and the success rule says no"


def _is_excused(answer: Answer, rule: str) -> bool:
    """Whether the success rule calls an answer a success that HTTP calls none."""
    try:
        return (
            "status" in expressions.variables_of(rule) and not (answer.truncated and _reads_body(rule)) and _holds(answer, rule)
        )
    except ExpressionFailed:
        return False


def _holds(answer: Answer, rule: str) -> bool:
    text = answer.body.decode("utf-8-sig", errors="replace")
    try:
        body = _parsed(answer.body)
    except (ValueError, RecursionError):
        body = None
    return expressions.evaluate(rule, {"status": answer.status, "headers": dict(answer.headers), "body": body, "text": text})


def _reads_body(rule: str) -> bool:
    return not expressions.variables_of(rule).isdisjoint(("body", "text"))


def _too_large(answer: Answer) -> _Verdict:
    return Outcome.UNKNOWN, ErrorCode.TOO_LARGE, f"the answer {answer.status} is longer than {MAX_BODY} bytes"


def _empty(answer: Answer) -> _Verdict:
    return Outcome.UNKNOWN, ErrorCode.UNPARSEABLE, f"the answer {answer.status} is empty; the endpoint requires a body"


def _judge_body(answer: Answer, endpoint: Endpoint) -> _Verdict:
    if answer.truncated:
        return _too_large(answer)
    if not answer.body:
        return _empty(answer) if endpoint.require_body else _SUCCESS
    try:
        value = _parsed(answer.body)
    except (ValueError, RecursionError):
        return Outcome.UNKNOWN, ErrorCode.UNPARSEABLE, f"the body of the answer {answer.status} is not JSON"
    failure = _business_error(value)
    if failure is None:
        return _SUCCESS
    return Outcome.BUSINESS, ErrorCode.BUSINESS, f"the receiver answered {answer.status} and says {failure}"


def _business_error(value: Any) -> str | None:
    """What in `value` says that the receiver did not do it; None when nothing does."""
    if not isinstance(value, dict):
        return None
    for name in ("success", "ok"):
        if value.get(name) is False:
            return f'"{name}": false'
    if "code" in value and not _is_good_code(value["code"]):
        return f'"code": {json.dumps(value["code"])}'
    error = value.get("error")
    if error is None or error is False or error in ("", [], {}):
        return None
    return f'"error": {json.dumps(error)}'


def _is_good_code(code: Any) -> bool:
    # In JSON false is no 0 and true no 1, in Python they are.
    return not isinstance(code, bool) and code in (0, "0", 200, "200")


def _parsed(body: bytes) -> Any:
    return json.loads(body.decode("utf-8-sig"), parse_constant=_no_constant, parse_int=_number)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(digits: str) -> int | float:
    # Python refuses to convert very long integers, which are JSON all the same.
    return int(digits) if len(digits) < 1000 else float(digits)


def _retry_after(answer: Answer) -> float | None:
    value = answer.headers.get("retry-after")
    return retry.parse_retry_after(value, answer.started_at + timedelta(seconds=answer.duration_s)) if value else None


def _one_line(text: str) -> str:
    """`text` without what would break a line, a terminal or Postgres (which takes no NUL in text)."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_REASON])
