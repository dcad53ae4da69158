"""What an event must look like: each field's type, size and pattern, and one precise line for each that is wrong.

All errors of a body are told at once. What passes here can be stored and called: a value that Postgres cannot hold (NUL,
a lone surrogate) or that no client can call stops at the door with 422, not later with a dead delivery.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from madeira import ids, reasons, target, traceparent
from madeira.api import problems
from madeira.api.problems import FieldError
from madeira.egress import Egress
from madeira.records import NewEvent
from madeira.strict_json import Document

#: How far ahead an event may be scheduled.
MAX_AHEAD: Final = timedelta(days=30)

#: Characters of an event type.
MAX_EVENT_TYPE: Final = 255

#: Characters of a routing key.
MAX_ROUTING_KEY: Final = 255

#: Characters of a callback address.
MAX_TARGET_URI: Final = 2048

#: Not "." and "..": as the last part of an address they mean another address.
_EVENT_ID: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]{1,128}", re.ASCII)
_EVENT_TYPE: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*", re.ASCII)
_TRACE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_RFC3339: Final = re.compile(r"(\d{4}-\d{2}-\d{2})[Tt ](\d{2}:\d{2}:\d{2})(?:\.(\d{1,12}))?([Zz]|[+-]\d{2}:\d{2})", re.ASCII)
_URI_CHARACTERS: Final = re.compile(r"(?:[A-Za-z0-9!$&'()*+,\-./:;=?@_~\[\]#]|%[0-9A-Fa-f]{2})*", re.ASCII)

_KNOWN: Final = frozenset(
    {
        "event_id",
        "event_type",
        "payload",
        "target_uri",
        "parameters",
        "routing_key",
        "deliver_at",
        "trace_id",
        "source",
    }
)


class _Invalid(ValueError):
    """Raised inside a check; the message becomes the field's `detail`."""


def is_event_id(text: str) -> bool:
    """Whether `text` can be the id of an event at all."""
    return _EVENT_ID.fullmatch(text) is not None


def new_event(
    document: Document | None,
    *,
    source: str,
    raw: bytes,
    environ: Mapping[str, Any],
    egress: Egress,
    beside: Sequence[FieldError] = (),
) -> NewEvent:
    """The event that a body describes; trace headers are taken from `environ` (WSGI).

    A callback address that `egress` refuses is one that is wrong; nothing is looked up. `beside` is what the caller has found
    wrong with the rest of the body: it is told with all else.

    Raises:
        Problem: 422, with one entry for each field that is wrong.
    """
    if document is None:
        raise problems.invalid([FieldError("body", "must be a JSON object")])
    values, texts = document.values, document.texts
    errors = list(beside)
    if not values.keys() <= _KNOWN:
        errors += [FieldError(problems.shown(name), "is not a field of an event") for name in values if name not in _KNOWN]
    errors += [FieldError(name, "is required") for name in ("event_type", "payload") if name not in values]
    checked: dict[str, Any] = {}
    for name, check in _CHECKS:
        if name in values:
            try:
                checked[name] = check(values[name])
            except _Invalid as e:
                errors.append(FieldError(name, str(e)))
    refused = _refusal_of_target(checked.get("target_uri"), egress)
    if refused is not None:
        errors.append(FieldError("target_uri", refused))
    if values.get("source", source) != source:
        errors.append(FieldError("source", "must equal the header X-Madeira-Source, or be left out"))
    if errors:
        raise problems.invalid(errors)
    parent, header_trace = from_headers(environ)
    return NewEvent(
        source=source,
        event_id=checked.get("event_id") or ids.uuid7(),
        event_type=checked["event_type"],
        payload=texts["payload"],
        body_sha256=hashlib.sha256(raw).digest(),
        trace_id=checked.get("trace_id") or header_trace or uuid.uuid4().hex,
        routing_key=checked.get("routing_key"),
        target_uri=checked.get("target_uri"),
        parameters=texts.get("parameters"),
        traceparent=parent,
        deliver_at=checked.get("deliver_at"),
    )


def _event_id(value: Any) -> str:
    if not isinstance(value, str) or not _EVENT_ID.fullmatch(value):
        raise _Invalid("must be a string of 1 to 128 characters out of A-Z a-z 0-9 . _ : -, and not . or ..")
    return value


def _event_type(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_EVENT_TYPE or not _EVENT_TYPE.fullmatch(value):
        raise _Invalid(
            f"must be a dotted name such as payment.captured: words of A-Z a-z 0-9 _ - with dots between, "
            f"at most {MAX_EVENT_TYPE} characters"
        )
    return value


def _routing_key(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ROUTING_KEY or not reasons.is_line(value):
        raise _Invalid(f"must be a string of 1 to {MAX_ROUTING_KEY} printable characters")
    return value


def _parameters(value: Any) -> None:
    if not isinstance(value, dict):
        raise _Invalid("must be an object")


def _trace_id(value: Any) -> str:
    if not isinstance(value, str) or not _TRACE_ID.fullmatch(value):
        raise _Invalid("must be a string of 1 to 64 characters out of A-Z a-z 0-9 . _ -")
    return value


def _deliver_at(value: Any) -> datetime:
    match = _RFC3339.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Invalid("must be an RFC 3339 time with a zone, such as 2030-01-31T12:00:00Z")
    day, clock, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(
            f"{day}T{clock}.{(fraction or '0')[:6]:0<6}{'+00:00' if zone in 'Zz' else zone}"
        ).astimezone(UTC)
    except (ValueError, OverflowError):
        raise _Invalid("is no time that exists") from None
    if moment.year < 1970:
        raise _Invalid("must not be before 1970")
    if moment - datetime.now(UTC) > MAX_AHEAD:
        raise _Invalid(f"must be at most {MAX_AHEAD.days} days ahead")
    return moment


def _target_uri(value: Any) -> str:
    if not isinstance(value, str):
        raise _Invalid("must be a string")
    if not 1 <= len(value) <= MAX_TARGET_URI:
        raise _Invalid(f"must have 1 to {MAX_TARGET_URI} characters")
    if not _URI_CHARACTERS.fullmatch(value):
        raise _Invalid("holds a character that a URI may not hold (spaces and others must be percent-encoded)")
    scheme, separator, rest = value.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise _Invalid("must be an absolute URI that starts with http:// or https://")
    if "@" in rest.split("/", 1)[0].split("?", 1)[0]:
        raise _Invalid("must not hold credentials")
    if "#" in rest:
        raise _Invalid("must not have a fragment: it is never sent")
    try:
        target.parse(value)
    except target.BadUrl as e:
        raise _Invalid(f"cannot be called: {e}") from None
    return value


def _refusal_of_target(value: str | None, egress: Egress) -> str | None:
    return None if value is None else egress.refusal_of_host(target.parse(value).host)


_CHECKS: Final[tuple[tuple[str, Callable[[Any], Any]], ...]] = (
    ("event_id", _event_id),
    ("event_type", _event_type),
    ("target_uri", _target_uri),
    ("parameters", _parameters),
    ("routing_key", _routing_key),
    ("deliver_at", _deliver_at),
    ("trace_id", _trace_id),
)


def from_headers(environ: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The W3C trace context to pass on, and the trace id that the headers name; a bad header counts as none."""
    found = traceparent.parse(environ.get("HTTP_TRACEPARENT", ""))
    parent = None if found is None else str(found)
    given = environ.get("HTTP_X_TRACE_ID", "")
    if _TRACE_ID.fullmatch(given):
        return parent, given
    return parent, None if found is None else found.trace_id
