"""What the client raises, in one tree, by what the caller can do about it.

Send it again later (`Unavailable`), mend the event or the settings (`Refused`, `InvalidEvent`, `UnexpectedAnswer`), or turn a
call away (`VerificationFailed`). No message holds a secret or a signature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from madeira.errors import MadeiraError


class ClientError(MadeiraError):
    """Base of all errors of the client."""

    #: Of `Client.send_many` and `Client.send_batches`: how many events were answered before the error.
    confirmed: int = 0
    #: Of everything that sends: the events, each with its id, of which it is not known whether they were accepted. Send them
    #: again (`Client.send_many` takes them as they are), and then what the iterable has left: what was accepted is a duplicate.
    unconfirmed: tuple[Mapping[str, Any], ...] = ()


class InvalidEvent(ClientError, ValueError):
    """Raised when an event cannot even be posted: it is no JSON, or its time has no zone."""


class Unavailable(ClientError):
    """Raised when every try failed for a reason that passes: no connection, no answer in time, 408, 429 or 5xx.

    Whether the event was accepted is not known. Sending it again, with the same id, is harmless.
    """

    def __init__(self, message: str, *, status: int | None, tries: int, retry_after_s: float | None) -> None:
        super().__init__(message)
        #: Status of the last answer; None when there was none.
        self.status = status
        #: How often it was tried.
        self.tries = tries
        #: Seconds that the server asked to wait, with its last answer.
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one field of an event."""

    field: str
    detail: str


class Refused(ClientError):
    """Raised when Madeira says no, and would say so again: sending the same once more does not help."""

    #: How often it was tried until there was an answer.
    tries: int = 1

    def __init__(self, status: int, type: str, detail: str, errors: Sequence[Problem] = ()) -> None:
        super().__init__(f"{status} {type}: {detail}")
        self.status = status
        #: The stable name of the reason, such as ``conflict``; ``unknown`` when it was not Madeira that answered.
        self.type = type
        self.detail = detail
        #: What is wrong field by field, where it is the fields (422).
        self.errors = tuple(errors)


class Unauthorized(Refused):
    """Raised when the source is unknown, its signature or timestamp does not hold, or it may not do this (401, 403)."""


class NotFound(Refused):
    """Raised when this source has no such event (404)."""


class Conflict(Refused):
    """Raised when the id was accepted before with other content, or the event's state does not allow what is asked (409)."""


class UnexpectedAnswer(ClientError):
    """Raised when the answer is not one that Madeira gives: the address leads somewhere else, or a proxy answered."""


class VerificationFailed(ClientError):
    """Raised when a call is not proven to be Madeira's; answer it with 401 and do nothing else.

    The message is for the receiver's log; whoever called should not be told.
    """


class UnwantedTest(VerificationFailed):
    """Raised when a call is Madeira's, but a test call, and `allow_tests` was not given; do nothing of what it says.

    Whoever may make test calls chooses what is in them.
    """


class UnexpectedBody(ClientError):
    """Raised when a call is genuine, but its body is not the envelope that Madeira sends by default.

    The endpoint has a body template: use `authenticate`, and read the body by that template.
    """
