"""What a template can do with values: its filters, tests and operators, each of which pays for what it does.

All take plain data (texts, numbers, booleans, null, lists, objects) and give plain data. An operation that does not fit its
values raises TypeError or ValueError; what would become too large raises `TemplateFailed` before it is made.
"""

import functools
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Undefined, pass_context
from jinja2.runtime import Context

from madeira.event_values import Array, Object
from madeira.templates.failure import TemplateFailed
from madeira.templates.fuel import CHARACTERS, MAX_BITS, MAX_RESULT, Fuel, bounded, fuel_of, printed

#: Fuel of one element of a loop, besides its body.
_STEP: Final = 10

#: What `int` and `float` read of a text, besides space around it.
_WHOLE: Final = re.compile(r"[+-]?[0-9]+")
_FRACTION: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


# -- operators -------------------------------------------------------------------------------------------------------


def _loop(fuel: Fuel, value: Any, body: int) -> list[Any]:
    """The elements of a loop, paid for all together; `body` is the number of parts that each of them runs through."""
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, list | tuple | Mapping):
        raise TemplateFailed("a loop goes over a list or an object")
    fuel.pay(len(value) * (_STEP + body))
    return list(value)


def _concat(fuel: Fuel, *values: Any) -> str:
    texts = [printed(value) for value in values]
    fuel.room(sum(map(len, texts)))
    return "".join(texts)


def _add(fuel: Fuel, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        fuel.room(len(left) + len(right))
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        fuel.pay(len(left) + len(right))
        return left + right
    return _arithmetic(operator.add)(fuel, left, right)


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Fuel, Any, Any], Any]:
    def operate(fuel: Fuel, left: Any, right: Any) -> Any:
        for one in (left, right):
            _number(one)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise TemplateFailed("a number is too large")
        fuel.pay(1)
        return function(left, right)

    return operate


def _compare(fuel: Fuel, left: Any, *operands: Any) -> bool:
    for name, right in zip(operands[::2], operands[1::2], strict=True):
        for one in (left, right):
            if isinstance(one, Undefined):
                one._fail_with_undefined_error()
        fuel.pay_for(right)
        if name not in ("in", "notin"):
            fuel.pay_for(left)
        if not _COMPARISONS[name](left, right):
            return False
        left = right
    return True


_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def _slice(fuel: Fuel, value: Any, start: Any, stop: Any, step: Any) -> Any:
    _sequence(value)
    fuel.pay_for_text(value) if isinstance(value, str) else fuel.pay(1 + len(value))
    return value[start:stop:step]


# -- filters ---------------------------------------------------------------------------------------------------------


def _default(_fuel: Fuel, value: Any, instead: Any = "", falsy: bool = False) -> Any:
    """`instead` where the value is undefined, or, if `falsy`, where it is null, false or empty too."""
    return instead if isinstance(value, Undefined) or (falsy and not value) else value


def _tojson(fuel: Fuel, value: Any) -> str:
    if isinstance(value, Object | Array):
        fuel.pay_for_text(value.text)
        return value.text
    pieces: list[str] = []
    size = 0
    for piece in _json(value):
        size += len(piece)
        if size > MAX_RESULT:
            raise TemplateFailed(f"a text becomes longer than {MAX_RESULT} characters")
        fuel.pay(1 + len(piece) // CHARACTERS)
        pieces.append(piece)
    return "".join(pieces)


def _json(value: Any) -> Iterator[str]:
    if value is None:
        yield "null"
    elif isinstance(value, str):
        yield _quoted(value)
    elif isinstance(value, Mapping):
        for number, (name, one) in enumerate(value.items()):
            if not isinstance(name, str):
                raise TemplateFailed("the names in an object must be texts")
            yield f"{', ' if number else '{'}{_quoted(name)}: "
            yield from _json(one)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield ", " if number else "["
            yield from _json(one)
        yield "]" if value else "[]"
    else:
        yield printed(value)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isascii() or not any(0xD800 <= ord(c) < 0xE000 for c in quoted) else json.dumps(text)


def _length(_fuel: Fuel, value: Any) -> int:
    if not isinstance(value, str | list | tuple | Mapping):
        raise TypeError
    return len(value)


def _of_text(function: Callable[[str], str]) -> Callable[[Fuel, Any], str]:
    def change(fuel: Fuel, value: Any) -> str:
        text = printed(value)
        # Some characters become up to three when their case changes, or as they are encoded.
        fuel.room(3 * len(text)) if len(text) < MAX_RESULT // 3 else fuel.pay_for_text(text)
        return function(text)

    return change


def _replace(fuel: Fuel, value: Any, old: str, new: str) -> str:
    text = printed(value)
    fuel.pay_for_text(text)
    fuel.room(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new)


def _join(fuel: Fuel, value: Any, between: str = "") -> str:
    _sequence(value)
    fuel.pay(len(value))
    texts = [printed(one) for one in value]
    fuel.room(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def _split(fuel: Fuel, value: Any, at: str) -> list[str]:
    text = printed(value)
    fuel.pay_for_text(text)
    fuel.pay(text.count(at))
    return text.split(at)


def _first(_fuel: Fuel, value: Any) -> Any:
    _sequence(value)
    return value[0]


def _last(_fuel: Fuel, value: Any) -> Any:
    _sequence(value)
    return value[-1]


def _of_list(function: Callable[[Any], Any]) -> Callable[[Fuel, Any], Any]:
    def work(fuel: Fuel, value: Any) -> Any:
        _sequence(value)
        fuel.pay_for(value)
        fuel.pay(len(value) * len(value).bit_length())
        return function(value)

    return work


def _sum(value: Any) -> Any:
    for one in value:
        _number(one)
    return sum(value)


def _map(fuel: Fuel, value: Any, attribute: str) -> list[Any]:
    """The field `attribute` (a name, or several with dots between) of each element."""
    _sequence(value)
    steps = attribute.split(".")
    fuel.pay(len(value) * len(steps))
    try:
        return [functools.reduce(operator.getitem, steps, one) for one in value]
    except KeyError:
        raise TemplateFailed(f"an element has no field {attribute[:100]}") from None


def _items(fuel: Fuel, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise TypeError
    fuel.pay(len(value))
    return list(value.items())


def _int(_fuel: Fuel, value: Any) -> int:
    return bounded(int(_digits(value, _WHOLE) if isinstance(value, str) else _real(value)))


def _float(_fuel: Fuel, value: Any) -> float:
    return float(_digits(value, _FRACTION) if isinstance(value, str) else _real(value))


def _digits(text: str, form: re.Pattern[str]) -> str:
    """A number in a text; Python would also read ``1_0`` as ten, the digits of every script, and ``nan``."""
    text = text.strip()
    if not form.fullmatch(text):
        raise ValueError
    return text


def _round(_fuel: Fuel, value: Any, digits: int = 0) -> Any:
    if not -20 <= digits <= 20:
        raise ValueError
    return round(_number(value), digits)


def _absolute(_fuel: Fuel, value: Any) -> Any:
    return abs(_number(value))


def _number(value: Any) -> Any:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return value


def _real(value: Any) -> Any:
    return value if isinstance(value, bool) else _number(value)


def _sequence(value: Any) -> None:
    if isinstance(value, Undefined):
        value._fail_with_undefined_error()
    if not isinstance(value, str | list | tuple):
        raise TypeError


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the rendering's fuel as its first argument.

    It takes the context, so Jinja2 never calls it while it compiles.
    """

    @pass_context
    @functools.wraps(function)
    def pay(context: Context, *args: Any, **kwargs: Any) -> Any:
        return function(fuel_of(context), *args, **kwargs)

    return pay


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "loop": _paid(_loop),
    "concat": _paid(_concat),
    "add": _paid(_add),
    "subtract": _paid(_arithmetic(operator.sub)),
    "multiply": _paid(_arithmetic(operator.mul)),
    "divide": _paid(_arithmetic(operator.truediv)),
    "floor_divide": _paid(_arithmetic(operator.floordiv)),
    "modulo": _paid(_arithmetic(operator.mod)),
    "compare": _paid(_compare),
    "slice": _paid(_slice),
}

FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "abs": _paid(_absolute),
    "capitalize": _paid(_of_text(str.capitalize)),
    "count": _paid(_length),
    "d": _paid(_default),
    "default": _paid(_default),
    "first": _paid(_first),
    "float": _paid(_float),
    "int": _paid(_int),
    "items": _paid(_items),
    "join": _paid(_join),
    "last": _paid(_last),
    "length": _paid(_length),
    "lower": _paid(_of_text(str.lower)),
    "map": _paid(_map),
    "max": _paid(_of_list(max)),
    "min": _paid(_of_list(min)),
    "replace": _paid(_replace),
    "reverse": _paid(_of_list(lambda value: value[::-1])),
    "round": _paid(_round),
    "sort": _paid(_of_list(sorted)),
    "split": _paid(_split),
    "string": _paid(_of_text(str)),
    "sum": _paid(_of_list(_sum)),
    "tojson": _paid(_tojson),
    "trim": _paid(_of_text(str.strip)),
    "upper": _paid(_of_text(str.upper)),
    "urlencode": _paid(_of_text(functools.partial(quote, safe=""))),
}

TESTS: Final[dict[str, Callable[[Any], bool]]] = {
    "boolean": lambda value: isinstance(value, bool),
    "defined": lambda value: not isinstance(value, Undefined),
    "even": lambda value: _whole(value) % 2 == 0,
    "false": lambda value: value is False,
    "float": lambda value: isinstance(value, float),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "list": lambda value: isinstance(value, list | tuple),
    "mapping": lambda value: isinstance(value, Mapping),
    "none": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "odd": lambda value: _whole(value) % 2 == 1,
    "string": lambda value: isinstance(value, str),
    "true": lambda value: value is True,
    "undefined": lambda value: isinstance(value, Undefined),
}


def _whole(value: Any) -> int:
    if not isinstance(_number(value), int):
        raise TypeError
    return int(value)
