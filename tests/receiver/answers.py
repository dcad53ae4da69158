"""What the receiver is told to answer, and what it notes of a call."""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Gate:
    """Holds answers back until `set` is called; like `threading.Event`, but a loop can be told instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Let everything through that waits now or comes later."""
        with self._lock:
            self._open = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        """Whether `set` was called."""
        return self._open

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the gate is open, in whatever thread opens it."""
        with self._lock:
            if not self._open:
                self._callbacks.append(callback)
                return
        callback()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the receiver does with one request; the default is a 200 with ``{"success": true}``."""

    status: int = 200
    #: Sent as it is; a str is encoded as UTF-8.
    body: bytes | str = b'{"success": true}'
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Seconds before the first byte of the answer.
    delay_s: float = 0.0
    #: The answer begins only when this is set.
    hold: Gate | None = None
    #: Seconds between two bytes of the body; None: all at once.
    drip_body_s: float | None = None
    #: Seconds between two bytes of the whole answer, header section included; None: all at once.
    drip_head_s: float | None = None
    #: Interim answers (status `interim_status`) before the real one; -1: without end, one every millisecond.
    interim: int = 0
    interim_status: int = 100
    #: Send the body in chunks of this many bytes instead of with a Content-Length; 0: do not.
    chunk: int = 0
    #: Say neither length nor chunks; the body ends with the connection.
    until_close: bool = False
    #: Close the connection after the answer, saying so (`Connection: close`).
    close_after: bool = False
    #: Close the connection after the answer without having said so: the client's pool finds it stale.
    drop_after: bool = False
    #: Close without a byte of answer.
    no_answer: bool = False
    #: Reset the connection (RST) without a byte of answer.
    reset: bool = False
    #: Reset the connection after this many bytes of the answer; None: do not.
    reset_after: int | None = None
    #: Bytes to send instead of an HTTP answer, exactly as they are.
    raw: bytes | None = None


#: Decides the answer from the request; runs in the receiver's loop and must not block.
Script = Callable[["Call"], Answer]


def json_answer(value: Any, **more: Any) -> Answer:
    """An `Answer` whose body is `value` as JSON."""
    return Answer(body=json.dumps(value), **more)


@dataclass(slots=True, eq=False)
class Call:
    """One request as it arrived."""

    #: 0 for the first call that this receiver saw.
    number: int
    #: Number of the TCP connection that it came on, from 0.
    connection: int
    method: str
    #: Path with its query, as sent.
    path: str
    #: Names in lower case; of a repeated header the last.
    headers: dict[str, str]
    #: Names and values as sent, in order.
    header_list: list[tuple[str, str]]
    body: bytes
    #: Arrival of the last byte of the request, `time.monotonic`.
    at: float
    #: The same moment, Unix seconds.
    wall: float
    #: Serial number of the certificate that the client showed; None when it showed none.
    client_serial: str | None = None
    #: Calls that were unanswered when this one came, itself included.
    overlap: int = 1
    #: The same, among those with the same ``webhook-id``.
    overlap_same_id: int = 1
    #: End of the answer or of the connection, `time.monotonic`; None while unanswered.
    ended: float | None = None
    #: Status that was sent; None when no complete answer was.
    status: int | None = None

    @property
    def webhook_id(self) -> str:
        """The ``webhook-id`` header; empty when there was none."""
        return self.headers.get("webhook-id", "")

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)
