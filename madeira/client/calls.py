"""Signed calls to the API, tried again while the reason passes.

Every call of the client may be repeated: a post names its event's id, a read changes nothing. So whatever does not say that
Madeira took a decision (no connection, no answer, half of one, 408, 429, 5xx) is tried again, with a fresh timestamp and
signature, up to a number of tries and a total time, whichever ends first.
"""

import json
import random
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import httpx

import madeira
from madeira.client.errors import (
    ClientError,
    Conflict,
    NotFound,
    Problem,
    Refused,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from madeira.delivery import signing
from madeira.retry import parse_retry_after

#: Largest answer that is read, in bytes; that to a batch of which every line is refused is about one.
MAX_ANSWER: Final = 16 * 1024 * 1024

#: Seconds between two tries, at most, unless the server asks for more.
MAX_BACKOFF_S: Final = 10.0

#: Answers of 4xx that are tried again, as all of 5xx are.
_PASSING: Final = frozenset({408, 429})

_REFUSALS: Final[dict[int, type[Refused]]] = {401: Unauthorized, 403: Unauthorized, 404: NotFound, 409: Conflict}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, when it was a decision."""

    status: int
    headers: httpx.Headers
    content: bytes
    #: How often it was tried, this last time included.
    tries: int = 1

    def document(self) -> dict[str, Any]:
        """The JSON object in the body; empty when there is none."""
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why a try came to nothing, for now."""

    reason: str
    status: int | None = None
    retry_after_s: float | None = None
    error: Exception | None = None


class Calls:
    """Calls of one source to one Madeira, by any number of threads.

    `timeout_s`, `retries`, `patience_s` and `backoff_s` are those of `Client`.
    """

    def __init__(
        self,
        *,
        url: str,
        source: str,
        secret: str,
        timeout_s: float,
        retries: int,
        patience_s: float,
        backoff_s: float,
        transport: httpx.BaseTransport | None,
    ) -> None:
        self.url = _base(url)
        self.source = _plain("source", source)
        self._secret = _key(secret)
        self._timeout_s = timeout_s
        self._retries = retries
        self._patience_s = patience_s
        self._backoff_s = backoff_s
        self._closed = threading.Event()
        # Nothing from the environment: credentials out of .netrc would make a person of the source.
        self._http = httpx.Client(base_url=self.url, transport=transport, trust_env=False, follow_redirects=False)

    def close(self) -> None:
        """Close the connections; a thread that waits for its next try gives up."""
        self._closed.set()
        self._http.close()

    def make(self, method: str, path: str, body: bytes = b"", *, media_type: str | None = None) -> Answer:
        """One call, and its repetitions; the answer is of 2xx.

        Raises:
            Refused: 4xx.
            UnexpectedAnswer: 3xx.
            Unavailable: no try led to a decision.
            ClientError: the client was closed.
        """
        ends = time.monotonic() + self._patience_s
        tries = 0
        while not self._closed.is_set():
            tries += 1
            outcome = self._once(method, path, body, media_type, ends)
            if isinstance(outcome, Answer):
                return self._decided(Answer(outcome.status, outcome.headers, outcome.content, tries))
            wait_s = self._wait_s(tries, outcome)
            if tries > self._retries or time.monotonic() + wait_s >= ends:
                raise self._given_up(tries, wait_s, outcome) from outcome.error
            self._closed.wait(wait_s)
        raise ClientError(f"this client of {self.url} is closed")

    def _once(self, method: str, path: str, body: bytes, media_type: str | None, ends: float) -> Answer | _Trouble:
        timeout_s = max(0.001, min(self._timeout_s, ends - time.monotonic()))
        try:
            with self._http.stream(
                method, path, content=body, headers=self._headers(body, media_type), timeout=timeout_s
            ) as response:
                content = _read(response, ends)
        except httpx.RequestError as e:
            return _Trouble(f"{type(e).__name__}: {e}" if str(e) else type(e).__name__, error=e)
        except RuntimeError as e:
            # What httpx says when `close` comes in between.
            if not self._closed.is_set():
                raise
            return _Trouble("the client was closed", error=e)
        if content is None:
            return _Trouble(f"the answer was longer than {MAX_ANSWER} bytes or did not end in time", response.status_code)
        if response.status_code in _PASSING or response.status_code >= 500:
            answer = Answer(response.status_code, response.headers, content)
            asked = response.headers.get("Retry-After", "")
            return _Trouble(_told(answer), answer.status, parse_retry_after(asked, datetime.now(UTC)))
        return Answer(response.status_code, response.headers, content)

    def _headers(self, body: bytes, media_type: str | None) -> dict[str, str]:
        timestamp = str(int(time.time()))
        headers = {
            "User-Agent": f"Madeira-Client/{madeira.__version__}",
            "Accept-Encoding": "identity",
            "X-Madeira-Source": self.source,
            "X-Madeira-Timestamp": timestamp,
            "X-Madeira-Signature": signing.sign(self._secret, timestamp, body),
        }
        return headers | ({"Content-Type": media_type} if media_type else {})

    def _wait_s(self, tries: int, trouble: _Trouble) -> float:
        """Seconds until the next try; jitter keeps those apart who were turned away together."""
        backoff_s = min(self._backoff_s * 2.0 ** min(tries - 1, 32), MAX_BACKOFF_S)
        return (trouble.retry_after_s or 0.0) + backoff_s * random.uniform(0.5, 1.0)  # noqa: S311  # no secret

    def _given_up(self, tries: int, wait_s: float, trouble: _Trouble) -> Unavailable:
        times = "1 try" if tries == 1 else f"{tries} tries"
        why = "" if tries > self._retries else f" (the next try, in {wait_s:.1f} s, would pass patience_s={self._patience_s:g})"
        return Unavailable(
            f"{self.url} took no decision in {times}{why}; the last one: {trouble.reason}",
            status=trouble.status,
            tries=tries,
            retry_after_s=trouble.retry_after_s,
        )

    def _decided(self, answer: Answer) -> Answer:
        if 200 <= answer.status < 300:
            return answer
        if answer.status < 400:
            where = answer.headers.get("Location", "another address")
            raise UnexpectedAnswer(f"{self.url} answered {answer.status} and points to {where[:200]!r}: give the address itself")
        told = answer.document()
        detail = told["detail"] if isinstance(told.get("detail"), str) else _one_line(answer.content)
        if answer.status == 401:
            detail += _clock(answer)
        kind = _REFUSALS.get(answer.status, Refused)
        refused = kind(answer.status, problem_name(told.get("type")), detail, _problems(told.get("errors")))
        refused.tries = answer.tries
        raise refused


def problem_name(type: Any) -> str:
    """The stable last part of a problem's type, ``urn:madeira:problem:NAME``; what is no name at all is ``unknown``."""
    return type.rpartition(":")[2] if isinstance(type, str) and type != "about:blank" else "unknown"


def _base(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as e:
        raise ValueError(f"url is no URL: {e}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError("url must begin with http:// or https:// and name a host, such as https://madeira.example")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError("url must not hold credentials, a query or a fragment: the source and its secret are given apart")
    return str(parsed).rstrip("/")


def _plain(name: str, value: str) -> str:
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(f"{name} must be the name of a source: letters, digits, '.', '_' and '-'")
    return value


def _key(secret: str) -> str:
    if not secret:
        raise ValueError("secret must not be empty: everybody could sign with it")
    try:
        secret.encode()
    except UnicodeEncodeError:
        # Without its cause, which holds the secret.
        raise ValueError("secret cannot be written in UTF-8") from None
    return secret


def _read(response: httpx.Response, ends: float) -> bytes | None:
    """The body; None when it is too long or goes on past `ends`."""
    content = b""
    for part in response.iter_bytes():
        content += part
        if len(content) > MAX_ANSWER or time.monotonic() > ends:
            return None
    return content


def _told(answer: Answer) -> str:
    detail = answer.document().get("detail")
    return f"{answer.status}: {detail if isinstance(detail, str) else _one_line(answer.content)}"


def _one_line(content: bytes) -> str:
    """The beginning of a body that is no problem document, for a message."""
    text = " ".join(content[:1000].decode("utf-8", "replace").split())[:200]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text) or "without an explanation"


def _clock(answer: Answer) -> str:
    """What to say when this machine's clock may be the reason."""
    try:
        theirs = datetime.strptime(answer.headers.get("Date", ""), "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return ""
    off_s = (datetime.now(UTC) - theirs).total_seconds()
    if abs(off_s) <= signing.WINDOW_S:
        return ""
    return f" (this machine's clock is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the server's)"


def _problems(errors: Any) -> list[Problem]:
    if not isinstance(errors, list):
        return []
    return [Problem(str(e.get("field", "")), str(e.get("detail", ""))) for e in errors if isinstance(e, dict)]
