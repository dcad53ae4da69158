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

A business error is a JSON object with ``"success": false``, ``"ok": false``, a ``"code"`` other than ``0``, ``"0"``, ``200``
and ``"200"``, or an ``"error"`` that is neither null nor false nor empty.
"""

import hashlib
import json
from datetime import timedelta
from typing import Any, Final

from madeira import retry
from madeira.delivery.answer import MAX_BODY, Answer, CallFailed
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

#: Header values shorter than this are no credentials, and their letters may stand in any answer.
_SHORTEST_CREDENTIAL: Final = 8

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
            reason=_one_line(result.reason),
        )
    outcome, error_code, reason = _judge_answer(result, endpoint)
    hidden = _credentials(endpoint)
    return Attempt(
        outcome=outcome,
        started_at=result.started_at,
        duration_s=result.duration_s,
        url=result.url,
        status_code=result.status,
        error_code=error_code,
        reason=_one_line(_masked(reason.encode(), hidden).decode(errors="replace")) if reason else None,
        excerpt=_masked(result.body, hidden)[:EXCERPT],
        length=len(result.body),
        sha256=hashlib.sha256(result.body).digest() if result.body else None,
        retry_after_s=_retry_after(result) if outcome is not Outcome.SUCCEEDED else None,
    )


def _credentials(endpoint: Endpoint) -> list[bytes]:
    """What a receiver may echo and nobody shall read: header values, the credential in them, and secrets; longest first."""
    values = {*endpoint.secrets, *endpoint.headers.values()}
    values |= {value.rsplit(" ", 1)[-1] for value in endpoint.headers.values()}
    return sorted((value.encode() for value in values if len(value) >= _SHORTEST_CREDENTIAL), key=len, reverse=True)


def _masked(text: bytes, hidden: list[bytes]) -> bytes:
    for value in hidden:
        text = text.replace(value, b"***")
    return text


def _judge_answer(answer: Answer, endpoint: Endpoint) -> _Verdict:
    status = answer.status
    if 200 <= status < 300:
        return _judge_body(answer, endpoint)
    if status in _RETRYABLE_STATUS or 500 <= status < 600:
        return Outcome.RETRYABLE, http_error(status), f"the receiver answered {status}"
    if 400 <= status < 500:
        return Outcome.PERMANENT, http_error(status), f"the receiver answered {status}"
    if 300 <= status < 400:
        where = answer.headers.get("location")
        to = f" to {where}" if where else ""
        return Outcome.UNKNOWN, http_error(status), f"the receiver answered {status}{to}; redirects are not followed"
    return Outcome.UNKNOWN, http_error(status), f"the receiver answered {status}, which is no final status of HTTP"


def _judge_body(answer: Answer, endpoint: Endpoint) -> _Verdict:
    if answer.truncated:
        return Outcome.UNKNOWN, ErrorCode.TOO_LARGE, f"the answer {answer.status} is longer than {MAX_BODY} bytes"
    if not answer.body:
        if endpoint.require_body:
            return Outcome.UNKNOWN, ErrorCode.UNPARSEABLE, f"the answer {answer.status} is empty; the endpoint requires a body"
        return _SUCCESS
    try:
        value = json.loads(answer.body.decode("utf-8-sig"), parse_constant=_no_constant, parse_int=_number)
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
        return f'"code": {_short(value["code"])}'
    error = value.get("error")
    if error is None or error is False or error in ("", [], {}):
        return None
    return f'"error": {_short(error)}'


def _is_good_code(code: Any) -> bool:
    # In JSON false is no 0 and true no 1, in Python they are.
    return not isinstance(code, bool) and code in (0, "0", 200, "200")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(digits: str) -> int | float:
    # Python refuses to convert very long integers, which are JSON all the same.
    return int(digits) if len(digits) < 1000 else float(digits)


def _short(value: Any) -> str:
    return json.dumps(value)[:200]


def _retry_after(answer: Answer) -> float | None:
    value = answer.headers.get("retry-after")
    return retry.parse_retry_after(value, answer.started_at + timedelta(seconds=answer.duration_s)) if value else None


def _one_line(text: str) -> str:
    """`text` without what would break a line, a terminal or Postgres (which takes no NUL in text)."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_REASON])
