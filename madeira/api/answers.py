"""What answers are made of: times and bytes in JSON, and the envelope of an event."""

import json
from datetime import datetime
from typing import Any


def rfc3339(moment: datetime) -> str:
    """A time as clients read it, in UTC."""
    return moment.isoformat().replace("+00:00", "Z")


def jsonable(value: Any) -> Any:
    """What JSON has no type for: times in RFC 3339, bytes as text."""
    if isinstance(value, datetime):
        return rfc3339(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "replace")
    return str(value)


def envelope(found: dict[str, Any]) -> bytes:
    """The JSON of an event as the store found it, with payload and parameters as the very text that was received."""
    rest = {k: v for k, v in found.items() if k not in ("payload", "parameters")}
    for delivery in rest["deliveries"]:
        show_digests(delivery["attempts"])
    head = json.dumps(rest, default=jsonable)
    return f'{head[:-1]}, "parameters": {found["parameters"] or "null"}, "payload": {found["payload"]}}}'.encode()


def show_digests(attempts: list[dict[str, Any]]) -> None:
    """Make the digests of attempts what people read: hexadecimal."""
    for attempt in attempts:
        attempt["sha256"] = attempt["sha256"].hex() if attempt["sha256"] else None
