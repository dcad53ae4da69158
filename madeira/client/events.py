"""Events as the client takes them, and the JSON that is posted.

Every event gets its id here, before the first try: it is what makes a repetition harmless.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from madeira import ids
from madeira.client.errors import InvalidEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event to be sent; what is None is left out."""

    #: A dotted name, such as ``payment.settled``.
    event_type: str
    #: Any JSON value.
    payload: Any
    #: 1 to 128 characters out of ``A-Z a-z 0-9 . _ : -``; None: made by the client, a UUID of version 7.
    event_id: str | None = None
    #: Callback address that the event is for.
    target_uri: str | None = None
    #: For the URL templates of endpoints.
    parameters: Mapping[str, Any] | None = None
    #: For routes.
    routing_key: str | None = None
    #: Not to be delivered before; with a zone, at most 30 days ahead.
    deliver_at: datetime | None = None
    #: 1 to 64 characters out of ``A-Z a-z 0-9 . _ -``; None: made by Madeira.
    trace_id: str | None = None


def document(item: Event | Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are posted for `item`, with an id; a mapping is taken as it is.

    Raises:
        InvalidEvent: `item` is neither, or its ``deliver_at`` has no zone.
    """
    if isinstance(item, Event):
        given = {f.name: getattr(item, f.name) for f in fields(item)}
        found = {name: value for name, value in given.items() if value is not None or name == "payload"}
    elif isinstance(item, Mapping):
        found = dict(item)
    else:
        raise InvalidEvent(f"an event is an Event or a mapping of its fields, not a {type(item).__name__}")
    if found.get("event_id") is None:
        found["event_id"] = ids.uuid7()
    if isinstance(found.get("deliver_at"), datetime):
        found["deliver_at"] = _rfc3339(found["deliver_at"])
    return found


def encode(fields: Mapping[str, Any]) -> bytes:
    """`fields` as JSON on one line.

    Raises:
        InvalidEvent: there is something in it that JSON cannot say.
    """
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_value).encode()
    except (TypeError, ValueError, RecursionError) as e:
        reason = "a string holds half of a surrogate pair" if isinstance(e, UnicodeEncodeError) else str(e)
        raise InvalidEvent(f"the event cannot be written as JSON: {reason}") from None


def _value(value: Any) -> Any:
    """What `json` does not know by itself: mappings that are no dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _rfc3339(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise InvalidEvent("deliver_at needs a zone: datetime.now(UTC) + timedelta(hours=1), for example")
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
