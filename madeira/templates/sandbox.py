"""Jinja2, cut down to what is safe to run on strangers' data, with a bound on time and size.

What is there: output, ``if``, ``for`` (over lists and objects), ``set`` of a plain name, the usual operators, and the filters and
tests below. There are no calls, macros, imports, blocks or Python attributes: ``payload.items`` is the field *items* of the
payload, never a method. What is undefined is an error.

The bound is fuel: whatever may cost more than a moment (an element of a loop, a comparison of lists, the output of a text)
is paid for by its size, and who runs out of it fails. To that end the operations concerned are replaced, when a template is
compiled, by filters of our own that pay before they act. These take the context, which also keeps Jinja2 from evaluating
them at compile time. Numbers print as they were written in the payload, ``true`` and ``false`` as in JSON; null, lists and
objects do not print by themselves: ``tojson`` writes them.
"""

import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, Undefined, UndefinedError, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from madeira.event_values import NAMES
from madeira.templates import filters
from madeira.templates.failure import TemplateFailed
from madeira.templates.fuel import FUEL, MAX_RESULT, Fuel, fuel_of, printed

#: Characters of a template, at most.
MAX_LENGTH: Final = 65_536

#: Parts of a template (operators, names, texts …), at most.
_MAX_NODES: Final = 5_000

#: Levels of parts in one another, and of loops in one another, at most.
_MAX_DEPTH: Final = 60
_MAX_LOOPS: Final = 8

_RESERVED: Final = frozenset({"loop", "self", "caller", "varargs", "kwargs"})

#: What ``loop`` tells.
_LOOP: Final = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})

_ALLOWED: Final = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.Name,
    nodes.Const,
    nodes.Tuple,
    nodes.List,
    nodes.Dict,
    nodes.Pair,
    nodes.Keyword,
    nodes.CondExpr,
    nodes.Filter,
    nodes.Test,
    nodes.Getitem,
    nodes.Getattr,
    nodes.Slice,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.And,
    nodes.Or,
    nodes.Not,
    nodes.Neg,
    nodes.Pos,
    nodes.Add,
    nodes.Sub,
    nodes.Mul,
    nodes.Div,
    nodes.FloorDiv,
    nodes.Mod,
)

_REMEDIES: Final[dict[type[nodes.Node], str]] = {
    nodes.Call: "calls are not available; use a filter, such as {{ payload | length }}",
    nodes.CallBlock: "calls are not available",
    nodes.Pow: "** is not available",
    nodes.Include: "include is not available: a template stands alone",
    nodes.Import: "import is not available: a template stands alone",
    nodes.FromImport: "import is not available: a template stands alone",
    nodes.Extends: "extends is not available: a template stands alone",
    nodes.Block: "block is not available: a template stands alone",
    nodes.Macro: "macro is not available",
    nodes.AssignBlock: "set needs a value: {% set name = … %}",
    nodes.NSRef: "set takes a plain name: {% set name = … %}",
    nodes.FilterBlock: "filter blocks are not available; use {{ … | filter }}",
}

#: Operators that are paid for; `filters` holds what replaces them.
_BINARY: Final[dict[type[nodes.Node], str]] = {
    nodes.Add: "add",
    nodes.Sub: "subtract",
    nodes.Mul: "multiply",
    nodes.Div: "divide",
    nodes.FloorDiv: "floor_divide",
    nodes.Mod: "modulo",
}


class _Bad(Exception):
    """Raised while a template is looked at; the message says what is wrong with it, and in which line."""

    def __init__(self, line: int, detail: str) -> None:
        super().__init__(f"line {line}: {detail}")


def check(text: str) -> str | None:
    """Why `text` cannot be a template; None when it can."""
    if len(text) > MAX_LENGTH:
        return f"has {len(text)} characters; {MAX_LENGTH} are allowed"
    try:
        _parse(text)
    except _Bad as e:
        return str(e)
    return None


def render(text: str, values: Mapping[str, Any]) -> str:
    """What the template `text` makes of `values`.

    Raises:
        TemplateFailed: a value is missing or does not fit, or time or size exceed their bounds.
    """
    template, names = _compiled(text)
    fuel = Fuel()
    try:
        given = {name: values[name] for name in names}
    except ValueError:
        raise TemplateFailed("the payload or the parameters are no JSON") from None
    try:
        return _joined(template.generate({**given, FUEL: fuel}), fuel)
    except TemplateFailed:
        raise
    except UndefinedError as e:
        raise TemplateFailed(str(e.message or "a value is undefined")) from None
    except RecursionError:
        raise TemplateFailed("the data is nested too deeply") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as e:
        raise TemplateFailed(_REASONS.get(type(e), "an operation does not fit the values that it was given")) from None


def _joined(pieces: Iterator[str], fuel: Fuel) -> str:
    made: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RESULT:
            raise TemplateFailed(f"the result is longer than {MAX_RESULT} characters")
        fuel.pay(1)
        made.append(piece)
    return "".join(made)


_REASONS: Final[dict[type[Exception], str]] = {
    ZeroDivisionError: "a division by zero",
    OverflowError: "a number is too large",
}


@functools.lru_cache(maxsize=2048)
def _compiled(text: str) -> tuple[Template, tuple[str, ...]]:
    """The template, and the names of the event that it reads."""
    if len(text) > MAX_LENGTH:
        raise TemplateFailed(f"the template is longer than {MAX_LENGTH} characters")
    try:
        tree = _parse(text)
        names = tuple({node.name for node in tree.find_all(nodes.Name)} & set(NAMES))
        code = _ENVIRONMENT.compile(_Payer().visit(tree), "template")
    except _Bad:
        # What it says may quote the template, and that of a header may hold a credential.
        raise TemplateFailed("the template cannot be used; check the endpoint's configuration") from None
    except (SyntaxError, RecursionError, MemoryError, TemplateSyntaxError):
        raise TemplateFailed("the template is too complicated") from None
    return Template.from_code(_ENVIRONMENT, code, {}), names


def _parse(text: str) -> nodes.Template:
    try:
        tree = _ENVIRONMENT.parse(text)
    except TemplateSyntaxError as e:
        raise _Bad(e.lineno, e.message or "cannot be read") from None
    except (RecursionError, MemoryError):
        raise _Bad(1, "the template is nested too deeply") from None
    except (ValueError, OverflowError):
        raise _Bad(1, "the template holds a number that is too large") from None
    stored = {node.name for node in _walk(tree) if isinstance(node, nodes.Name) and node.ctx == "store"}
    for node in _walk(tree):
        _check_node(node, stored)
    return tree


def _walk(tree: nodes.Template) -> list[nodes.Node]:
    """All parts; not by recursion, since a hostile template is nested as deep as it is long."""
    found: list[nodes.Node] = []
    rest: list[tuple[nodes.Node, int, int]] = [(tree, 0, 0)]
    while rest:
        node, depth, loops = rest.pop()
        found.append(node)
        loops += isinstance(node, nodes.For)
        if depth > _MAX_DEPTH or loops > _MAX_LOOPS:
            raise _Bad(node.lineno, "the template is nested too deeply")
        if len(found) > _MAX_NODES:
            raise _Bad(node.lineno, f"the template has more than {_MAX_NODES} parts")
        rest += [(child, depth + 1, loops) for child in node.iter_child_nodes()]
    return found


def _check_node(node: nodes.Node, stored: set[str]) -> None:
    if not isinstance(node, _ALLOWED) or type(node) in _REMEDIES:
        raise _Bad(node.lineno, _REMEDIES.get(type(node), f"{type(node).__name__.lower()} is not available"))
    if isinstance(node, nodes.For) and node.recursive:
        raise _Bad(node.lineno, "recursive loops are not available")
    if isinstance(node, nodes.Assign) and not isinstance(node.target, nodes.Name):
        raise _Bad(node.lineno, "set takes one plain name: {% set name = … %}")
    if isinstance(node, nodes.Name):
        _check_name(node, stored)
    if isinstance(node, nodes.Filter | nodes.Test):
        known = filters.FILTERS if isinstance(node, nodes.Filter) else filters.TESTS
        kind = "filter" if isinstance(node, nodes.Filter) else "test"
        if node.name not in known:
            raise _Bad(node.lineno, f"there is no {kind} {node.name}{_did_you_mean(node.name, known)}")
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _Bad(node.lineno, "* and ** are not available")


def _check_name(node: nodes.Name, stored: set[str]) -> None:
    if node.ctx == "store":
        if node.name in _RESERVED or node.name in NAMES:
            raise _Bad(node.lineno, f"{node.name} is the name of something else; choose another one")
    elif node.name not in NAMES and node.name not in stored and node.name != "loop":
        raise _Bad(node.lineno, f"there is no {node.name}{_did_you_mean(node.name, (*NAMES, *stored))}")


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"


class _Payer(NodeTransformer):
    """Replaces what is to be paid for by filters that do so."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        parts = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.iter = _filter(cast(nodes.Expr, node.iter), "loop", [nodes.Const(parts, lineno=node.lineno)])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node.nodes[0], "concat", list(node.nodes[1:]))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        arguments: list[nodes.Expr] = []
        for operand in node.ops:
            arguments += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return _filter(node.expr, "compare", arguments)

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:
        self.generic_visit(node)
        if node.expr2 is None:
            node.expr2 = nodes.Const("", lineno=node.lineno)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, "slice", [part or nodes.Const(None, lineno=node.lineno) for part in parts])

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.BinExpr) and type(node) in _BINARY:
            return _filter(node.left, _BINARY[type(node)], [node.right])
        return node


def _filter(node: nodes.Expr, name: str, arguments: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, f" {name}", arguments, [], None, None, lineno=node.lineno)


class _Undefined(StrictUndefined):
    """Names what is missing, as the template spells it."""

    __slots__ = ()


class _Environment(ImmutableSandboxedEnvironment):
    """Knows data only: fields of objects, elements of lists, and what ``loop`` tells."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping):
            return obj[attribute] if attribute in obj else self._missing(attribute)
        if isinstance(obj, LoopContext) and attribute in _LOOP:
            return getattr(obj, attribute)
        if isinstance(obj, Undefined):
            obj._fail_with_undefined_error()
        return self._missing(attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, Mapping) and isinstance(argument, str):
            # A key may have been computed from the data, which errors do not tell.
            return obj[argument] if argument in obj else self._missing(None)
        if isinstance(obj, list | tuple | str) and isinstance(argument, int):
            return obj[argument] if -len(obj) <= argument < len(obj) else self._missing(None)
        for one in (obj, argument):
            if isinstance(one, Undefined):
                one._fail_with_undefined_error()
        return self._missing(None)

    def _missing(self, name: str | None) -> Undefined:
        return self.undefined(hint=f"there is no field {name}" if name else "a field or element is missing")


@pass_context
def _finalize(context: Context, value: Any) -> str:
    text = printed(value)
    fuel_of(context).pay_for_text(text)
    return text


def _environment() -> _Environment:
    environment = _Environment(
        undefined=_Undefined,
        autoescape=False,
        finalize=_finalize,
        keep_trailing_newline=False,
        cache_size=0,
        optimized=False,
    )
    environment.globals.clear()
    environment.filters.clear()
    environment.filters.update(filters.FILTERS)
    environment.filters.update({f" {name}": function for name, function in filters.OPERATORS.items()})
    environment.tests.clear()
    environment.tests.update(filters.TESTS)
    return environment


_ENVIRONMENT: Final = _environment()
