"""What a rendering may use up, and how values print.

Fuel is taken before the work is done, so that what is too much is never begun.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from jinja2 import Undefined
from jinja2.runtime import Context

from madeira.event_values import Number
from madeira.templates.failure import TemplateFailed

#: Characters of a result, and of any text on the way to it.
MAX_RESULT: Final = 1_048_576

#: Fuel of one rendering; a unit is some 100 ns.
MAX_FUEL: Final = 2_000_000

#: Under which name the fuel travels in the context; no template can write it.
FUEL: Final = " fuel"

#: Characters that cost one unit.
CHARACTERS: Final = 16

#: Bits of an integer, at most: as many as Python writes out.
MAX_BITS: Final = 14_000


class Fuel:
    """What is left to one rendering."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_FUEL

    def pay(self, units: int) -> None:
        """Use up `units`.

        Raises:
            TemplateFailed: there are not so many left.
        """
        self._left -= units
        if self._left < 0:
            raise TemplateFailed("it takes too long: too many loops, or too much data in them")

    def pay_for_text(self, text: str) -> None:
        """Use up what making `text` costs.

        Raises:
            TemplateFailed: it is too long.
        """
        self.room(len(text))

    def room(self, size: int) -> None:
        """Use up what making a text of `size` characters costs, before it is made.

        Raises:
            TemplateFailed: that is too long.
        """
        if size > MAX_RESULT:
            raise TemplateFailed(f"a text becomes longer than {MAX_RESULT} characters")
        self.pay(1 + size // CHARACTERS)

    def pay_for(self, value: Any) -> None:
        """Use up what walking through `value` costs."""
        rest = [value]
        while rest:
            one = rest.pop()
            if isinstance(one, str):
                self.pay(1 + len(one) // CHARACTERS)
            elif isinstance(one, Mapping):
                self.pay(1 + len(one))
                rest += one.values()
            elif isinstance(one, list | tuple):
                self.pay(1 + len(one))
                rest += one
            else:
                self.pay(1)


def fuel_of(context: Context) -> Fuel:
    """The fuel of the rendering that `context` belongs to."""
    fuel = context.parent[FUEL]
    assert isinstance(fuel, Fuel)
    return fuel


def printed(value: Any) -> str:
    """How a value stands in a text.

    Raises:
        TemplateFailed: it cannot: null, a list, an object, an infinite number.
        jinja2.UndefinedError: it is undefined.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Number):
        return value.text
    if isinstance(value, int):
        return str(bounded(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TemplateFailed("a number is too large")
        return repr(value)
    if value is None:
        raise TemplateFailed("a value is null; write it with tojson, or give a default: {{ x | default('', true) }}")
    raise TemplateFailed("a list or object does not print by itself; write it with tojson")


def bounded(value: int) -> int:
    """`value`, if it can be written out.

    Raises:
        TemplateFailed: it is too large.
    """
    if value.bit_length() > MAX_BITS:
        raise TemplateFailed("a number is too large")
    return value
