"""Many events: NDJSON in batches, each signed, tried again and answered as a whole.

Memory holds one batch, whatever the iterable has: events are taken from it as they are needed. A batch ends when it has its
number of events or `MAX_BYTES`, whichever comes first. One that is too large for something on the way (413) is halved.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from madeira.client.calls import Calls, problem_name
from madeira.client.errors import ClientError, InvalidEvent, Refused, UnexpectedAnswer
from madeira.client.events import Event, document, encode

#: Events in one batch, at most: the API's limit.
MAX_LINES: Final = 5_000

#: Bytes of one batch: well below the API's limit of 10 MiB, so that it is answered in good time. An event that is larger by
#: itself goes alone.
MAX_BYTES: Final = 4 * 1024 * 1024

#: Media type of a batch.
NDJSON: Final = "application/x-ndjson"

#: What is refused before it is sent has the name that the API would give it.
_NOT_JSON: Final = "not-strict-json"


@dataclass(frozen=True, slots=True)
class Rejected:
    """One event that was refused."""

    #: Its place in the iterable, from 0.
    index: int
    #: What the iterable gave, itself.
    item: Any
    #: Its id, also where the client made it; None when `item` is nothing that could have one.
    event_id: str | None
    #: The stable name of the reason, such as ``conflict``; the same names as in `Refused`.
    type: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Counted:
    accepted: int
    #: Known before; also when an earlier try of the very same batch was taken and its answer got lost.
    duplicates: int
    #: In the order in which the iterable gave them.
    rejected: tuple[Rejected, ...]

    @property
    def events(self) -> int:
        """How many events it is about."""
        return self.accepted + self.duplicates + len(self.rejected)


class BatchResult(_Counted):
    """What became of one batch."""

    __slots__ = ()


class Summary(_Counted):
    """What became of all that the iterable gave."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Line:
    index: int
    item: Any
    fields: dict[str, Any]
    data: bytes


@dataclass(slots=True)
class _Batch:
    """What is gathered until it is sent."""

    lines: list[_Line] = field(default_factory=list)
    #: Refused here, since they cannot be sent at all.
    refused: list[Rejected] = field(default_factory=list)
    size: int = 0

    @property
    def events(self) -> int:
        return len(self.lines) + len(self.refused)

    def add(self, line: _Line) -> None:
        self.lines.append(line)
        self.size += len(line.data) + 1


def send(calls: Calls, events: Iterable[Event | Mapping[str, Any]], most: int) -> Iterator[BatchResult]:
    """Send `events` in batches of at most `most`; yields what became of each.

    Raises:
        ClientError: as `Client.send`, with `confirmed` and `unconfirmed` filled in.
    """
    confirmed = 0
    batch = _Batch()
    for index, item in enumerate(events):
        line = _line(index, item)
        if isinstance(line, _Line) and batch.size + len(line.data) >= MAX_BYTES and batch.lines:
            # The line in hand is gone from the iterable, so an error must name it too.
            yield (result := _send(calls, batch, confirmed, then=(line,)))
            confirmed += result.events
            batch = _Batch()
        if isinstance(line, _Line):
            batch.add(line)
        else:
            batch.refused.append(line)
        if batch.events == most:
            yield (result := _send(calls, batch, confirmed))
            confirmed += result.events
            batch = _Batch()
    if batch.events:
        yield _send(calls, batch, confirmed)


def total(results: Iterable[BatchResult]) -> Summary:
    """All results in one."""
    accepted = duplicates = 0
    rejected: list[Rejected] = []
    for result in results:
        accepted += result.accepted
        duplicates += result.duplicates
        rejected += result.rejected
    return Summary(accepted, duplicates, tuple(rejected))


def _line(index: int, item: Any) -> _Line | Rejected:
    event_id = None
    try:
        fields = document(item)
        event_id = fields["event_id"]
        return _Line(index, item, fields, encode(fields))
    except InvalidEvent as e:
        return Rejected(index, item, event_id, _NOT_JSON, str(e))


def _send(calls: Calls, batch: _Batch, confirmed: int, then: tuple[_Line, ...] = ()) -> BatchResult:
    """Send what is gathered; in halves where it is too large for something on the way."""
    accepted = duplicates = 0
    rejected = list(batch.refused)
    groups = deque([batch.lines] if batch.lines else [])
    answered = len(batch.refused)
    while groups:
        lines = groups.popleft()
        try:
            result = _post(calls, lines)
        except ClientError as e:
            if isinstance(e, Refused) and e.status == 413:
                if len(lines) > 1:
                    half = len(lines) // 2
                    groups.extendleft((lines[half:], lines[:half]))
                else:
                    rejected.append(_rejected(lines[0], e.type, e.detail))
                    answered += 1
                continue
            e.confirmed = confirmed + answered
            e.unconfirmed = tuple(line.fields for group in (lines, *groups, then) for line in group)
            raise
        accepted += result.accepted
        duplicates += result.duplicates
        rejected += result.rejected
        answered += len(lines)
    return BatchResult(accepted, duplicates, tuple(sorted(rejected, key=lambda r: r.index)))


def _post(calls: Calls, lines: list[_Line]) -> BatchResult:
    body = b"\n".join(line.data for line in lines) + b"\n"
    told = calls.make("POST", "/v1/events/batch", body, media_type=NDJSON).document()
    try:
        accepted, duplicates = int(told["accepted"]), int(told["duplicates"])
        rejected = tuple(
            _rejected(_numbered(lines, r["line"]), problem_name(r["type"]), str(r["detail"])) for r in told["rejected"]
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise UnexpectedAnswer(f"{calls.url} answered a batch with something else") from None
    if accepted + duplicates + len(rejected) != len(lines):
        raise UnexpectedAnswer(f"{calls.url} accounts for {accepted + duplicates + len(rejected)} of {len(lines)} events")
    return BatchResult(accepted, duplicates, rejected)


def _numbered(lines: list[_Line], number: Any) -> _Line:
    """Line `number`, from 1."""
    if not isinstance(number, int) or number < 1:
        raise ValueError
    return lines[number - 1]


def _rejected(line: _Line, type: str, detail: str) -> Rejected:
    return Rejected(line.index, line.item, line.fields["event_id"], type, detail)
