"""What people were told lately, in words."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from madeira.console import words
from madeira.store.notices import Kind, Notice


class Told(NamedTuple):
    """A notice as the page tells it."""

    at: datetime
    text: str
    tone: str
    #: Of what it is about.
    link: str | None


def told(notice: Notice) -> Told:
    """A notice, in words."""
    name, detail = notice.endpoint, notice.detail
    about = words.address("endpoints", name) if name else None
    match notice.kind:
        case Kind.DEAD_LETTERS_BEGAN:
            why = detail.get("reason") or detail.get("failure_class")
            return Told(
                notice.at, f"Dead letters of {name} began{_because(why)}", "bad", words.address("dead-letters", endpoint=name)
            )
        case Kind.BREAKER_OPENED:
            return Told(notice.at, f"{name} failed so often that it is left alone{_because(detail.get('reason'))}", "wait", about)
        case Kind.BREAKER_CLOSED:
            return Told(notice.at, f"{name} is called again as ever", "good", about)
        case Kind.ENDPOINT_DISABLED:
            by = f" by {detail['by']}" if detail.get("by") else ""
            return Told(notice.at, f"{name} was disabled{by}{_because(detail.get('reason'))}", "bad", about)
        case Kind.RECONCILE_DIFFERENCES:
            return Told(notice.at, f"Reconcile found, and mended, {_counts(detail)}", "wait", None)
    return Told(notice.at, f"{notice.kind} {name}".strip(), "off", about)


def _because(why: Any) -> str:
    return f": {why}" if why else ""


def _counts(detail: Mapping[str, Any]) -> str:
    found = sorted(detail.items(), key=lambda one: (-int(one[1]), one[0]))
    return words.joined(f"{count} {kind}" for kind, count in found) if found else "differences"
