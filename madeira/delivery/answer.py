"""What a call comes back with: an answer of the receiver, or the reason why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from madeira.errors import MadeiraError
from madeira.states import ErrorCode

#: Bytes of an answer's body that are read at most, before decompression and after it.
MAX_BODY: Final = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, read to its end or to `MAX_BODY` bytes."""

    status: int
    #: Names in lower case; the values of a repeated header are joined by ``", "``.
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    #: Whether the body was longer than `MAX_BODY`; `body` is its beginning then.
    truncated: bool
    #: The URL that was called, without user and password.
    url: str
    started_at: datetime
    #: Seconds from the start of the call to the end of the answer.
    duration_s: float


class CallFailed(MadeiraError):
    """Raised when a call brought no complete answer.

    `error_code` is from the closed list, `reason` is one line for a person. The layers below the client know no more;
    the client adds `url` (without user and password), `started_at` and `duration_s` (seconds).
    """

    def __init__(self, error_code: ErrorCode, reason: str) -> None:
        super().__init__(f"{error_code}: {reason}")
        self.error_code = error_code
        self.reason = reason
        self.url = ""
        self.started_at = datetime.fromtimestamp(0, UTC)
        self.duration_s = 0.0
