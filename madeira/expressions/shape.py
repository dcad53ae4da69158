"""How the work of an expression grows with the data: read off its structure before it runs.

The library for CEL shows no syntax tree, so comprehensions are found among the tokens: a macro's name between a dot and
a bracket.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: Steps that one part of a regular expression counts for where it is used in a comprehension: it is compiled each time.
_REGEX_WORK: Final = 3000

#: Characters of a text that count as one value.
_TEXT_UNIT: Final = 64

#: What makes a comprehension.
MACROS: Final = frozenset({"all", "exists", "exists_one", "existsOne", "map", "filter"})
_COLLECTING: Final = frozenset({"map", "filter"})

#: Variables that may hold much, and are converted for CEL only when an expression reads them.
LARGE: Final = frozenset({"payload", "parameters", "body", "text", "headers"})

_TOKEN: Final = re.compile(
    r"""
      (?P<skip>\s+|//[^\n]*)
    | (?P<string>(?:[bB]?[rR]|[rR][bB])(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"[^"\n]*"|'[^'\n]*')
                |[bB]?(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>[0-9][A-Za-z0-9.]*)
    | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)

#: A part of a regular expression: a repetition, a class, an escape, or any other character.
_PART: Final = re.compile(r"\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|\[\^?\]?(?:\\.|[^\]\\])*\]|\\[pP]\{[^}]*\}|\\.|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Size:
    """How much a value is."""

    #: Values in it, itself included; a long text counts as several.
    values: int = 1
    #: Elements of its longest list or object.
    longest: int = 1

    def plus(self, other: "Size") -> "Size":
        """The size of both together."""
        return Size(self.values + other.values, max(self.longest, other.longest))


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an expression decides over its work."""

    macros: int = 0
    #: ``map`` and ``filter``.
    collecting: int = 0
    #: Comprehensions whose body reads more than its own element.
    outward: int = 0
    #: Parts of the regular expressions in comprehensions.
    regex: int = 0
    additions: int = 0

    @property
    def grows(self) -> bool:
        """Whether more than the first reading of the data is to be expected."""
        return self.macros > 0 or self.additions > 1

    def work(self, size: Size) -> int:
        """Steps, at most, roughly."""
        times = 1 + self.additions
        longest = size.longest * times
        steps: int = size.values * times**2 * longest ** (self.outward + (self.collecting > 0)) * max(1, self.macros)
        return steps * max(1, _REGEX_WORK * self.regex)


@dataclass(frozen=True, slots=True)
class Token:
    """A word of an expression."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Macro:
    """A comprehension: ``all``, ``exists``, ``map``, ``filter`` and the like."""

    name: str
    variable: str
    #: What is evaluated for each element.
    body: tuple[Token, ...] = field(repr=False)
    #: Level of nesting, from 1.
    level: int
    #: The variables of the comprehensions around it.
    around: frozenset[str]

    @property
    def is_outward(self) -> bool:
        """Whether the body reads anything that may be large and is not part of the element."""
        outside = (LARGE | self.around) - {self.variable}
        return any(name in outside for name in _free_names(self.body))


def tokens_of(text: str) -> Iterator[Token]:
    """The words of an expression, without spaces and remarks."""
    for match in _TOKEN.finditer(text):
        if match.lastgroup != "skip":
            yield Token(str(match.lastgroup), match[0])


def macros_of(tokens: Iterable[Token], level: int = 1, around: frozenset[str] = frozenset()) -> Iterator[Macro]:
    """The comprehensions in `tokens`, those inside others included."""
    tokens = tuple(tokens)
    at = 0
    while at < len(tokens):
        dot, name, bracket = (tokens[at : at + 3] + (Token("", ""),) * 3)[:3]
        at += 1
        if dot.text != "." or name.text not in MACROS or bracket.text != "(":
            continue
        inside = _inside(tokens, at + 2)
        variable = inside[0].text if inside else ""
        macro = Macro(name.text, variable, inside[1:], level, around)
        yield macro
        yield from macros_of(inside[1:], level + 1, around | {variable})
        at += 2 + len(inside)


def _inside(tokens: tuple[Token, ...], start: int) -> tuple[Token, ...]:
    """The tokens from `start` to the bracket that closes."""
    depth = 1
    for at in range(start, len(tokens)):
        depth += (tokens[at].text in ("(", "[", "{")) - (tokens[at].text in (")", "]", "}"))
        if depth == 0:
            return tokens[start:at]
    return tokens[start:]


def _free_names(tokens: tuple[Token, ...]) -> Iterator[str]:
    for at, token in enumerate(tokens):
        if token.kind == "name" and (at == 0 or tokens[at - 1].text != "."):
            yield token.text


def shape_of(tokens: list[Token], macros: list[Macro]) -> Shape:
    """What `tokens`, and the comprehensions found in them, say about the work."""
    return Shape(
        macros=len(macros),
        collecting=sum(m.name in _COLLECTING for m in macros),
        outward=sum(m.is_outward for m in macros),
        regex=sum(regex_size(pattern) for m in macros if m.level == 1 for pattern in patterns_of(m.body)),
        additions=sum(token.text == "+" for token in tokens),
    )


def measure(value: Any) -> Size:
    """How much `value` is."""
    values, longest, rest = 0, 1, [value]
    while rest:
        one = rest.pop()
        values += 1
        if isinstance(one, str):
            values += len(one) // _TEXT_UNIT
        elif isinstance(one, Mapping):
            longest = max(longest, len(one))
            rest += one.values()
        elif isinstance(one, list):
            longest = max(longest, len(one))
            rest += one
    return Size(values, longest)


def patterns_of(tokens: Sequence[Token]) -> Iterator[str]:
    """The texts that stand behind ``matches(``."""
    for name, bracket, text in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if name.text == "matches" and bracket.text == "(" and text.kind == "string":
            yield text.text.lstrip("rRbB").strip("'\"")


def regex_size(pattern: str) -> int:
    """How many parts a regular expression has once its repetitions are written out."""
    sizes, last = [0], 0
    for part in _PART.finditer(pattern):
        if part["least"] is not None:
            sizes[-1] += last * (max(1, int(part["least"][:6]), int((part["most"] or "0")[:6])) - 1)
        elif part[0] == "(":
            sizes.append(0)
        elif part[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += last
    return sum(sizes)
