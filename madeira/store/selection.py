"""Which deliveries a person means: the filter of the list of dead letters, and of what is done with many at once.

One description for both, so that what a list shows is what a job takes. It is kept with a job as a document (JSON), and it
becomes conditions of a statement that calls the delivery ``d`` and its event ``e``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final

from madeira import reasons
from madeira.errors import FieldProblem, SelectionInvalid
from madeira.states import ErrorCode, FailureClass
from madeira.store.columns import numbers, texts
from madeira.strict_json import as_whole

#: Events that may be named one by one.
MAX_EVENT_IDS: Final = 1000

#: Deliveries that may be named one by one.
MAX_DELIVERY_IDS: Final = 1000

#: Characters of a text that is looked for.
MAX_TEXT: Final = 200

#: An event type, or the beginning of one with a star behind it.
TYPE_PATTERN: Final = r"^(?=.)[A-Za-z0-9_.-]{0,255}\*?$"

_TYPE: Final = re.compile(TYPE_PATTERN, re.ASCII)
_EVENT_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_HTTP: Final = re.compile(r"http_[0-9]{3}", re.ASCII)

#: The condition of each field; the parameters have a prefix, so that a statement may have its own.
_CONDITIONS: Final[Mapping[str, str]] = {
    "source": "e.source = %(sel_source)s",
    "endpoint": "d.endpoint = %(sel_endpoint)s",
    "failure_class": "d.failure_class = %(sel_failure_class)s",
    "error": "d.last_error_code = %(sel_error)s",
    # What has not died is taken by its birth.
    "since": "coalesce(d.died_at, d.created_at) >= %(sel_since)s",
    "until": "coalesce(d.died_at, d.created_at) < %(sel_until)s",
    "text": "(strpos(lower(d.last_error), lower(%(sel_text)s)) > 0 OR strpos(lower(e.event_id), lower(%(sel_text)s)) > 0)",
    "event_ids": "e.event_id = ANY(%(sel_event_ids)s::text[])",
    "delivery_ids": "d.id = ANY(%(sel_delivery_ids)s::bigint[])",
}
_TYPE_IS: Final = "e.event_type = %(sel_event_type)s"
_TYPE_BEGINS: Final = "starts_with(e.event_type, %(sel_event_type)s)"


@dataclass(frozen=True, slots=True)
class Selection:
    """Deliveries that match all that is given."""

    source: str | None = None
    endpoint: str | None = None
    #: A type, or the beginning of one and a ``*``.
    event_type: str | None = None
    failure_class: FailureClass | None = None
    #: The code of the last failure: one of `states.ErrorCode` or ``http_<status>``.
    error: str | None = None
    #: Died at this time or later; of what has not died: was made then.
    since: datetime | None = None
    #: Died before this time; of what has not died: was made then.
    until: datetime | None = None
    #: What stands in the words of the last failure or in the event's id, whatever the case of its letters.
    text: str | None = None
    #: The ids of the events.
    event_ids: tuple[str, ...] | None = None
    #: The ids of the deliveries.
    delivery_ids: tuple[int, ...] | None = None

    def as_document(self) -> dict[str, Any]:
        """The selection as JSON, without what is not given; `from_document` reads it."""
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        return {name: _as_json(value) for name, value in given.items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else str(value)


def conditions(selection: Selection) -> tuple[list[str], dict[str, Any]]:
    """The conditions over ``d`` (delivery) and ``e`` (event), all of which must hold, and their parameters (``sel_…``)."""
    wanted: list[str] = []
    params: dict[str, Any] = {}
    for field in fields(selection):
        value = getattr(selection, field.name)
        if value is None:
            continue
        if field.name == "event_type":
            wanted.append(_TYPE_BEGINS if value.endswith("*") else _TYPE_IS)
            value = value.removesuffix("*")
        else:
            wanted.append(_CONDITIONS[field.name])
        if isinstance(value, tuple):
            value = numbers(value) if field.name == "delivery_ids" else texts(value)
        params[f"sel_{field.name}"] = value
    return wanted, params


def from_document(document: Any) -> Selection:
    """The selection that a document (parsed JSON) describes.

    Raises:
        SelectionInvalid: with one problem for each field that is unknown or wrong.
    """
    if not isinstance(document, dict):
        raise SelectionInvalid((FieldProblem("", "must be an object"),))
    found: dict[str, Any] = {}
    problems: list[FieldProblem] = []
    for name, given in document.items():
        try:
            found[name] = _checked(name, given)
        except ValueError as e:
            problems.append(FieldProblem(ascii(name[:64])[1:-1], str(e)))
    if problems:
        raise SelectionInvalid(tuple(problems))
    return Selection(**found)


def _checked(name: str, given: Any) -> Any:
    if name in _LISTS:
        return _LISTS[name](given)
    check = CHECKS.get(name)
    if check is None:
        raise ValueError(f"is no field of a filter; known: {', '.join((*CHECKS, *_LISTS))}")
    if not isinstance(given, str):
        raise ValueError("must be a text")  # noqa: TRY004  # all that is wrong is told in one way
    return check(given)


def _event_ids(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_EVENT_IDS:
        raise ValueError(f"must be a list of 1 to {MAX_EVENT_IDS} ids of events")
    if not all(isinstance(one, str) and _EVENT_ID.fullmatch(one) for one in given):
        raise ValueError("must hold ids of events: 1 to 128 of letters, digits, '.', '_', ':' and '-'")
    return tuple(given)


def _delivery_ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_DELIVERY_IDS:
        raise ValueError(f"must be a list of 1 to {MAX_DELIVERY_IDS} ids of deliveries")
    found = [number for one in given if (number := as_whole(one)) is not None and 1 <= number < 10**18]
    if len(found) < len(given):
        raise ValueError("must hold ids of deliveries: whole numbers")
    return tuple(found)


#: The fields that name several, each with its check.
_LISTS: Final[Mapping[str, Callable[[Any], tuple[Any, ...]]]] = {"event_ids": _event_ids, "delivery_ids": _delivery_ids}


def _text(given: str) -> str:
    if not given or len(given) > MAX_TEXT or not reasons.is_line(given):
        raise ValueError(f"must be of 1 to {MAX_TEXT} printable characters")
    return given


def _event_type(given: str) -> str:
    if not _TYPE.fullmatch(given):
        raise ValueError("must be an event type such as payment.captured, or the beginning of one and a star: payment.*")
    return given


def _failure_class(given: str) -> FailureClass:
    try:
        return FailureClass(given)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(FailureClass)}") from None


def _error(given: str) -> str:
    if given not in tuple(ErrorCode) and not _HTTP.fullmatch(given):
        raise ValueError(f"must be http_ and a status, such as http_503, or one of {', '.join(ErrorCode)}")
    return given


def _moment(given: str) -> datetime:
    try:
        moment = datetime.fromisoformat(given)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError("must be a time with its zone, such as 2026-01-31T12:00:00Z")


#: How the text of each field is checked and turned into its value; raises ValueError with what would be right.
CHECKS: Final[Mapping[str, Callable[[str], Any]]] = {
    "source": _text,
    "endpoint": _text,
    "event_type": _event_type,
    "failure_class": _failure_class,
    "error": _error,
    "since": _moment,
    "until": _moment,
    "text": _text,
}
