"""What an address asks for: the filters of a page, checked as the API checks them, and shown as chips that can be taken away."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import falcon

from madeira.api import query
from madeira.api.query import Check
from madeira.console import words


class Chip(NamedTuple):
    """A filter that is set."""

    name: str
    value: str
    #: The page without it.
    without: str


class Asked(NamedTuple):
    """The query of a page."""

    #: Checked values; what was not given is not here.
    values: Mapping[str, Any]
    #: As they were given.
    given: Mapping[str, str]

    def address(self, *parts: str, **other: Any) -> str:
        """The page, with `other` in its query instead of what is asked for now; None takes something away."""
        return words.address(*parts, **{**self.given, **other})

    def chips(self, *parts: str, names: Mapping[str, str]) -> list[Chip]:
        """The filters that are set, by the parameter and how people call it."""
        return [
            Chip(told, self.given[name], self.address(*parts, **{name: None, "before": None}))
            for name, told in names.items()
            if name in self.given
        ]


def read(req: falcon.Request, checks: Mapping[str, Check]) -> Asked:
    """What the query asks for; fields that a form has left empty ask for nothing.

    Raises:
        Problem: 422, with one entry for each parameter that is unknown, given twice, or wrong.
    """
    found = query.read(req, {name: _if_given(check) for name, check in checks.items()})
    values = {name: value for name, value in found.items() if value is not None}
    given = {name: str(req.params[name]) for name in values}
    return Asked(values, given)


def moment(given: str) -> datetime:
    """A time, as the API takes it, or as a form for times gives it, which is UTC then."""
    try:
        return query.moment(given)
    except ValueError:
        pass
    try:
        return datetime.strptime(given, "%Y-%m-%dT%H:%M").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError("must be a time, such as 2026-01-31T12:00 (UTC) or 2026-01-31T12:00:00+01:00") from None


def flag(given: str) -> bool:
    """Whether something is wanted."""
    if given != "1":
        raise ValueError("must be 1, or be left out")
    return True


def _if_given(check: Check) -> Check:
    return lambda given: check(given) if given.strip() else None
