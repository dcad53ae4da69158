"""Rules in CEL (Common Expression Language): a route's filter over an event, an endpoint's success rule over an answer,
the key over an event by which an endpoint's deliveries are put in order.

An expression is written by an operator, but what it reads comes from strangers, so an evaluation is bounded beforehand. The
library has no limit of its own, and holds the interpreter's lock while it runs: two nested comprehensions over a list of
100,000 numbers would stop a whole process for hours (and ``map`` and ``filter`` copy their result for each element). So the
structure of the expression tells how the work grows with the size of the data, and an event that is too large for it is
refused before the work begins (`MAX_WORK`, about a second at worst). Without a comprehension an event of any size will do.

How JSON appears in CEL: an integer of 64 bits is an ``int``, up to ``18446744073709551615`` a ``uint``, and beyond that a
``double``, which keeps about 16 digits; a number with a fraction or an exponent is a ``double``. Comparisons go across these
types (``1 == 1.0`` is true, ``payload.amount > 100`` holds for ``100.5``), arithmetic does not: write
``double(payload.amount) * 1.5``. A field that is not there is an error, not null; ``has(payload.amount)`` asks for it.
``||`` and ``&&`` pass over an error on one side when the other side decides. ``size`` of a text counts bytes of UTF-8.
"""

import difflib
import functools
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from madeira.errors import MadeiraError
from madeira.expressions.shape import (
    LARGE,
    MACROS,
    Macro,
    Shape,
    Size,
    Token,
    macros_of,
    measure,
    patterns_of,
    regex_size,
    shape_of,
    tokens_of,
)

if TYPE_CHECKING:
    import cel

#: Characters of an expression, at most.
MAX_LENGTH: Final = 4096

#: Characters of a key, at most; a longer one is told by its hash.
MAX_KEY: Final = 200

#: Levels of comprehensions inside one another, at most.
MAX_NESTING: Final = 2

#: Steps that an evaluation may take as far as can be told beforehand; one takes 50 to 100 ns.
MAX_WORK: Final = 10_000_000

#: Parts of all regular expressions of an expression, at most; repetitions (``{n}``) are written out when it is compiled.
_MAX_REGEX: Final = 1000

#: What an endpoint's success rule may look at.
ANSWER_VARIABLES: Final = frozenset({"status", "headers", "body", "text"})

_TYPES: Final = frozenset({"bool", "bytes", "double", "int", "list", "map", "null_type", "string", "uint"})

_FUNCTIONS: Final = frozenset(
    {
        "bytes",
        "contains",
        "double",
        "duration",
        "dyn",
        "endsWith",
        "getDate",
        "getDayOfMonth",
        "getDayOfWeek",
        "getDayOfYear",
        "getFullYear",
        "getHours",
        "getMilliseconds",
        "getMinutes",
        "getMonth",
        "getSeconds",
        "int",
        "matches",
        "size",
        "startsWith",
        "string",
        "timestamp",
        "type",
        "uint",
    }
)


@functools.cache
def _cel() -> Any:
    """The library, once there is an expression: with it comes a terminal of its own, half of the time of a start."""
    import cel

    return cel


class ExpressionFailed(MadeiraError):
    """Raised when an expression gives no yes or no; `reason` is one line without any value of the data."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def check(text: str, variables: frozenset[str]) -> str | None:
    """Why `text` cannot be used as an expression over `variables`; None when it can."""
    if len(text) > MAX_LENGTH:
        return f"has {len(text)} characters; {MAX_LENGTH} are allowed"
    if any(0xD800 <= ord(c) < 0xE000 for c in text):
        return "holds half a character (a lone surrogate)"
    try:
        program = _cel().compile(text)
    except ValueError as e:
        return f"is no CEL: {_syntax(str(e))}"
    tokens = list(tokens_of(text))
    macros = list(macros_of(tokens))
    return (
        _unknown("variable", set(program.variables()) - {m.variable for m in macros} - _TYPES, variables)
        or _unknown("function", {f for f in program.functions() if f.isidentifier()}, _FUNCTIONS | MACROS)
        or _misused(macros, variables)
        or _bad_regex(tokens)
    )


def variables_of(text: str) -> frozenset[str]:
    """The variables that a checked expression reads."""
    return _compiled(text).reads


def as_key(value: Any) -> str:
    """A text, a number or a truth value as the text of a key: equal values give equal texts, and so do ``17``, ``17.0`` and
    ``"17"``, since senders are not strict about that.

    Raises:
        ExpressionFailed: it is something else, or no finite number.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ExpressionFailed("gives no finite number")
        value = int(value) if value.is_integer() else repr(value)
    if not isinstance(value, int | str):
        raise ExpressionFailed(f"gives {_kind(value)}, not a text, a number, true or false")
    key = str(value)
    if len(key) > MAX_KEY or not key.isprintable():
        return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return key


def evaluate(text: str, values: Mapping[str, Any]) -> bool:
    """Whether the expression `text` holds for `values`.

    Raises:
        ExpressionFailed: it gives no yes or no: a field is missing, types do not fit, the data is too large for it.
    """
    return Scope(values).evaluate(text)


class Scope:
    """Some values, prepared for several expressions; used by one thread.

    Raises nothing on construction: values are looked up and converted when an expression reads them first.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._context: cel.Context | None = None
        self._known: set[str] = set()
        self._sizes: dict[str, Size] = {}

    def evaluate(self, text: str) -> bool:
        """Whether the expression `text` holds.

        Raises:
            ExpressionFailed: as for `evaluate`.
        """
        result = self._value(text)
        if not isinstance(result, bool):
            raise ExpressionFailed(f"gives {_kind(result)}, not true or false")
        return result

    def key(self, text: str) -> str:
        """What the expression `text` yields, as the text of a key; see `as_key`.

        Raises:
            ExpressionFailed: it yields nothing of that kind, or cannot be evaluated.
        """
        return as_key(self._value(text))

    def _value(self, text: str) -> Any:
        compiled = _compiled(text)
        context = self._bring(compiled.reads)
        if compiled.shape.grows:
            self._refuse_too_much(compiled)
        try:
            return compiled.program.execute(context)
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as e:
            raise ExpressionFailed(_reason(e, compiled.words)) from None
        except BaseException as e:
            # A panic inside the library is no Exception.
            if type(e).__name__ != "PanicException":
                raise
            raise ExpressionFailed("the library for CEL failed") from None

    def _bring(self, names: frozenset[str]) -> "cel.Context":
        """Make variables known. Each addition lets the library convert all of them anew, so the small ones come together."""
        context = self._context
        if context is None:
            context = self._context = _cel().Context()
        missing = names - self._known
        if not missing:
            return context
        wanted = (missing & LARGE) | (self._values.keys() - LARGE - self._known)
        try:
            found = {name: self._values[name] for name in wanted if name in self._values}
            context.update(found)
        except ValueError:
            raise ExpressionFailed("the data holds a text that is no Unicode, or is no JSON") from None
        self._known |= wanted
        return context

    def _refuse_too_much(self, compiled: "_Compiled") -> None:
        size = Size()
        for name in compiled.reads & LARGE:
            if name not in self._sizes:
                self._sizes[name] = measure(self._values[name])
            size = size.plus(self._sizes[name])
        if compiled.shape.work(size) > MAX_WORK:
            raise ExpressionFailed(
                f"the data is too large for it ({size.values} values): use fewer comprehensions (all, exists, map, filter), "
                "and none that reads more than its element"
            )


# -- checks ----------------------------------------------------------------------------------------------------------


def _unknown(what: str, used: set[str], known: frozenset[str]) -> str | None:
    if used <= known:
        return None
    name = min(used - known)
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"there is no {what} {name}" + (f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}")


def _misused(macros: list[Macro], variables: frozenset[str]) -> str | None:
    for macro in macros:
        if macro.variable in variables:
            return f"{macro.name}({macro.variable}, …) hides the variable {macro.variable}; use another name for the element"
    if any(macro.level > MAX_NESTING for macro in macros):
        return f"has comprehensions (all, exists, map, filter) in one another, more than {MAX_NESTING} levels deep"
    return None


def _bad_regex(tokens: list[Token]) -> str | None:
    size = sum(regex_size(pattern) for pattern in patterns_of(tokens))
    if size > _MAX_REGEX:
        return f"the patterns of matches have {size} parts, repetitions ({{n}}) written out; {_MAX_REGEX} are allowed"
    for at, token in enumerate(tokens):
        if token.text != "matches" or token.kind != "name":
            continue
        opening, pattern_token, closing = (tokens[at + 1 : at + 4] + [Token("", "")] * 3)[:3]
        is_plain = pattern_token.kind == "string" and (opening.text, closing.text) == ("(", ")")
        if at == 0 or tokens[at - 1].text != "." or not is_plain:
            return 'matches needs its pattern as a text in quotes, such as payload.name.matches("^[a-z]+$")'
        pattern = pattern_token.text
        try:
            _cel().compile(f"''.matches({pattern})").execute({})
        except RuntimeError:
            return f"the pattern {pattern[:60]} is no regular expression"
    return None


def _syntax(message: str) -> str:
    """The place and the cause out of the library's message, which repeats the whole text several times."""
    found = re.search(r"<input>:(\d+):(\d+): ([^\n]*)", message)
    if not found:
        return "it cannot be read"
    cause = found[3].removeprefix("Syntax error: ").split(", expecting", 1)[0].split(" expecting {", 1)[0]
    return f"line {found[1]}, column {found[2]}: {cause[:200]}"


# -- evaluation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Compiled:
    program: "cel.Program"
    #: The variables that it reads; those of comprehensions may be among them.
    reads: frozenset[str]
    #: The names and short texts that stand in it.
    words: frozenset[str]
    shape: Shape


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> _Compiled:
    try:
        program = _cel().compile(text)
    except ValueError as e:
        raise ExpressionFailed(f"is no CEL: {_syntax(str(e))}") from None
    tokens = list(tokens_of(text))
    macros = list(macros_of(tokens))
    return _Compiled(
        program=program,
        reads=frozenset(program.variables()) - {m.variable for m in macros},
        words=frozenset(t.text.strip("'\"")[:100] for t in tokens if t.kind in ("name", "string")),
        shape=shape_of(tokens, macros),
    )


def _reason(error: Exception, words: frozenset[str]) -> str:
    if isinstance(error, KeyError):
        # A key may have been computed from the data, so it is told only where the expression itself names it.
        name = str(error.args[0]) if error.args else ""
        return f"there is no field {name}" if name in words and name.isprintable() else "a field is missing"
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return "it cannot be evaluated"


_REASONS: Final = (
    (IndexError, "a list is shorter than it should be"),
    (ZeroDivisionError, "a division by zero"),
    (OverflowError, "a number is too large"),
    (TypeError, "types do not fit: a field of something that is no object, or arithmetic with both int and double"),
    (RuntimeError, "a function was given something that it cannot work with"),
    (ValueError, "the data holds a text that is no Unicode"),
)


def _kind(value: Any) -> str:
    kinds = {int: "a whole number", float: "a number", str: "a text", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "something else")
