"""Values of options that several commands have: a time, a text that a filter may have, a share or a pace, a file."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from madeira import digits
from madeira.states import FailureClass
from madeira.store import selection
from madeira.store.jobs import KEY_PATTERN


class Moment(click.DateTime):
    """A time; one that does not name its zone is local."""

    def __init__(self) -> None:
        super().__init__(["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """The time, in UTC."""
        if not str(value).isascii():
            # Its own reader takes the digits of every script.
            self.fail(f"{value!r} is no time; write it in the digits 0 to 9.", param, ctx)
        found: datetime = super().convert(value, param, ctx)
        try:
            return found.astimezone(UTC)
        except (OverflowError, ValueError):
            # The first and the last hours of the calendar are beyond it in another zone.
            self.fail(f"{value!r} is no time in UTC.", param, ctx)


class Whole(click.IntRange):
    """A whole number within bounds, written as everywhere else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        try:
            found: int = super().convert(digits.whole(str(value)), param, ctx)
        except ValueError as e:
            self.fail(f"{e}.", param, ctx)
        return found


class Number(click.FloatRange):
    """A number within bounds, written as everywhere else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            found: float = super().convert(digits.number(str(value)), param, ctx)
        except ValueError as e:
            self.fail(f"{e}.", param, ctx)
        return found


class Checked(click.ParamType[Any]):
    """A text that a filter may have."""

    name = "text"

    def __init__(self, field: str) -> None:
        self._check = selection.CHECKS[field]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What the filter has of it."""
        try:
            return self._check(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)


class File(click.Path):
    """The name of a file that is read, or - for standard input. What cannot be read is told by whoever reads it."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; an empty name would be that of the folder in which one is."""
        if value == "":
            self.fail("the name of the file is empty.", param, ctx)
        return super().convert(value, param, ctx)


class Key(click.ParamType[str]):
    """What makes a command that is given twice one job, as the API takes it."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The key as it is."""
        if not re.fullmatch(KEY_PATTERN, value):
            self.fail("must be of 1 to 128 letters, digits, '.', '_', ':' and '-'", param, ctx)
        return str(value)


#: A class of failure, as it is written everywhere else: of an enumeration itself click would take the names.
CLASS: Final = click.Choice([one.value for one in FailureClass])

MOMENT: Final = Moment()
