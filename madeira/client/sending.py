"""The sending side: a client of one source.

What it sends it may send twice, and says so with the same id: an event gets its id before the first try, so that a try whose
answer got lost and the try that follows it are one event. Whoever wants that across a crash of their own process too gives
the id themselves.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from madeira.client import batches
from madeira.client.batches import BatchResult, Summary
from madeira.client.calls import Answer, Calls
from madeira.client.errors import ClientError, Conflict, InvalidEvent, Refused, UnexpectedAnswer
from madeira.client.events import Event, document, encode

_JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Receipt:
    """Madeira's word that it has an event, committed."""

    event_id: str
    source: str
    trace_id: str
    #: ``pending`` for a new one; for a duplicate what became of it by now.
    status: str
    #: Whether it was known before; also when an earlier try of this very call was taken and its answer got lost.
    duplicate: bool
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What a cancel did."""

    event_id: str
    source: str
    #: The event's state now.
    status: str
    #: Deliveries that were ended.
    cancelled: int
    #: Deliveries that are being called now: they are not tried again, but one that succeeds has succeeded.
    requested: int


class Client:
    """Sends the events of one source, and asks about them. Threads may share it.

    `url`: base address of the API, such as ``https://madeira.example``. `source`: its name. `secret`: one of its secrets.
    `timeout_s`: seconds that connecting, or waiting for the next bytes, may take in one try. `retries`: further tries after
    the first. `patience_s`: seconds for all tries of one call and the waits between them; looked at before each try and each
    wait, and while the body of an answer comes. `backoff_s`: seconds before the second try; twice as many before each further
    one, up to 10, less up to half of it by chance; ``Retry-After`` comes on top. `transport`: for a proxy, a private CA or a
    client certificate (`httpx.HTTPTransport`); variables such as HTTPS_PROXY are not read.

    Raises:
        ValueError: an argument is not as it must be.
    """

    def __init__(
        self,
        url: str,
        *,
        source: str,
        secret: str,
        timeout_s: float = 10.0,
        retries: int = 8,
        patience_s: float = 60.0,
        backoff_s: float = 0.2,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("patience_s", patience_s), ("backoff_s", backoff_s)):
            if not value > 0:
                raise ValueError(f"{name} is a number of seconds above 0, not {value}")
        if retries < 0:
            raise ValueError(f"retries is a number of tries from 0, not {retries}")
        self._calls = Calls(
            url=url,
            source=source,
            secret=secret,
            timeout_s=timeout_s,
            retries=retries,
            patience_s=patience_s,
            backoff_s=backoff_s,
            transport=transport,
        )

    def __repr__(self) -> str:
        return f"Client({self._calls.url!r}, source={self._calls.source!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calls that wait for their next try give up, later ones are refused with `ClientError`."""
        self._calls.close()

    def send(
        self,
        event_type: str,
        payload: Any,
        *,
        event_id: str | None = None,
        target_uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        routing_key: str | None = None,
        deliver_at: datetime | None = None,
        trace_id: str | None = None,
    ) -> Receipt:
        """Send one event; when this returns, it is committed. The arguments are those of `Event`.

        Raises:
            InvalidEvent: it cannot be written as JSON.
            Conflict: another event was accepted under this `event_id`.
            Refused: something is wrong with it, or with the source (`Unauthorized`).
            UnexpectedAnswer: no Madeira answers there.
            Unavailable: nothing was confirmed within `retries` and `patience_s`; send it again later, with the same id.
        """
        event = Event(
            event_type=event_type,
            payload=payload,
            event_id=event_id,
            target_uri=target_uri,
            parameters=parameters,
            routing_key=routing_key,
            deliver_at=deliver_at,
            trace_id=trace_id,
        )
        fields = document(event)
        try:
            answer = self._calls.make("POST", "/v1/events", encode(fields), media_type=_JSON)
            return self._receipt(answer, fields["event_id"])
        except ClientError as e:
            if not isinstance(e, (Refused, InvalidEvent)):
                e.unconfirmed = (fields,)
            raise

    def send_many(self, events: Iterable[Event | Mapping[str, Any]], *, batch: int = 1000) -> Summary:
        """Send all of `events`, in batches of at most `batch`, in order, and say what became of them.

        Takes them from the iterable as they are needed. A mapping holds the fields of a post as they are. What is wrong with
        one event is told in the summary and keeps nothing from its neighbours.

        Raises:
            ValueError: `batch` is not from 1 to 5,000.
            ClientError: as `send`, for a whole batch; `confirmed` and `unconfirmed` say where to go on.
        """
        return batches.total(self.send_batches(events, batch=batch))

    def send_batches(self, events: Iterable[Event | Mapping[str, Any]], *, batch: int = 1000) -> Iterator[BatchResult]:
        """`send_many` step by step: sends the next batch whenever its result is asked for, and keeps nothing.

        For more events, or more refused ones, than fit into memory. Nothing is sent that is not iterated.
        """
        if not 1 <= batch <= batches.MAX_LINES:
            raise ValueError(f"batch is a number of events from 1 to {batches.MAX_LINES}, not {batch}")
        return batches.send(self._calls, events, batch)

    def event(self, event_id: str) -> dict[str, Any]:
        """One of the source's own events: envelope, deliveries with their attempts, and where waits what is unfinished.

        Raises:
            NotFound: this source has none of this id.
            ClientError: as `send`.
        """
        found = self._calls.make("GET", _path(event_id)).document()
        if found.get("event_id") != event_id:
            raise UnexpectedAnswer(f"{self._calls.url} answered with something that is not the event {event_id}")
        return found

    def cancel(self, event_id: str, reason: str = "") -> Cancellation:
        """Cancel what has not ended of one of the source's own events; `reason` goes on record.

        Raises:
            NotFound: this source has none of this id.
            Conflict: it has ended already.
            ClientError: as `send`.
        """
        try:
            answer = self._calls.make("POST", f"{_path(event_id)}/cancel", encode({"reason": reason}), media_type=_JSON)
        except Conflict as e:
            return self._cancelled_before(event_id, e)
        told = answer.document()
        try:
            return Cancellation(told["event_id"], told["source"], told["status"], int(told["cancelled"]), int(told["requested"]))
        except (KeyError, TypeError, ValueError):
            raise UnexpectedAnswer(f"{self._calls.url} answered a cancel with something else") from None

    def _cancelled_before(self, event_id: str, conflict: Conflict) -> Cancellation:
        """The conflict is our own doing if an earlier try was taken and its answer got lost."""
        if conflict.tries > 1:
            found = self.event(event_id)
            if found["status"] == "cancelled":
                ended = sum(d["status"] == "cancelled" for d in found["deliveries"])
                return Cancellation(event_id, self._calls.source, "cancelled", ended, 0)
        raise conflict

    def _receipt(self, answer: Answer, event_id: str) -> Receipt:
        told = answer.document()
        try:
            receipt = Receipt(
                event_id=told["event_id"],
                source=told["source"],
                trace_id=told["trace_id"],
                status=told["status"],
                duplicate=bool(told["duplicate"]),
                created_at=datetime.fromisoformat(told["created_at"]),
            )
        except (KeyError, TypeError, ValueError):
            receipt = None
        if receipt is None or receipt.event_id != event_id:
            # A page that says 200 is not a promise.
            raise UnexpectedAnswer(f"{self._calls.url} answered {answer.status}, but not with a receipt for {event_id}")
        return receipt


def _path(event_id: str) -> str:
    if event_id in ("", ".", ".."):
        raise InvalidEvent(f"{event_id!r} cannot be the id of an event")
    return f"/v1/events/{quote(event_id, safe='')}"
