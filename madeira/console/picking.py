"""Which dead letters are meant: filters as an address says them, ones that were ticked, and a filter told in words."""

from collections.abc import Mapping
from typing import Any, Final, cast

import falcon

from madeira import digits
from madeira.api.problems import FieldError, invalid
from madeira.api.query import Check
from madeira.console import asking, words
from madeira.store import selection
from madeira.store.selection import Selection

#: The filters of dead letters, checked as those of a job are.
CHECKS: Final[Mapping[str, Check]] = {**selection.CHECKS, "since": asking.moment, "until": asking.moment}

#: How they are called.
NAMES: Final = {
    "endpoint": "endpoint",
    "error": "error",
    "failure_class": "class",
    "source": "source",
    "event_type": "type",
    "since": "died since",
    "until": "died until",
    "text": "words",
}

#: Rows that can be ticked at most: those of a page, with room to spare.
_MOST: Final = 200

#: Digits of an id.
_DIGITS: Final = 18


def ticked(req: falcon.Request) -> tuple[int, ...]:
    """The deliveries that were ticked; they are taken out of the query, whose other parts are read as ever.

    Raises:
        Problem: 422, when one is no id, or there are too many.
    """
    given = cast("dict[str, Any]", req.params).pop("id", [])
    told = [given] if isinstance(given, str) else list(given)
    ids = [found for one in told if (found := digits.plain(one, _DIGITS))]
    if len(told) > _MOST or len(ids) != len(told):
        raise invalid([FieldError("id", f"must be ids of deliveries, {_MOST} at most")])
    return tuple(ids)


def wanted(values: Mapping[str, Any], ids: tuple[int, ...] = ()) -> Selection:
    """The selection that a checked query and ticked rows make."""
    filters = {name: value for name, value in values.items() if name in CHECKS}
    return Selection(**filters, delivery_ids=ids or None)


def told(document: Mapping[str, Any], *, among: str = "dead") -> str:
    """A filter as a person says it; `document` is the one that is kept with a job."""
    names = NAMES if among == "dead" else {**NAMES, "since": "made since", "until": "made until"}
    parts = [f"{names[name]} {document[name]}" for name in names if name in document]
    for name, one, many in (("delivery_ids", "dead letter", "dead letters"), ("event_ids", "event", "events")):
        if name in document:
            parts.append(f"{words.plural(len(document[name]), one, many)} by id")
    return ", ".join(parts) or "everything"
