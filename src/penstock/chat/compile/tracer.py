"""Tracer: a template compiled to run with symbols in place of contents.

Most templates put contents between fixed texts and do not depend on them. The tracer proves that of a template: symbols
can only be written, joined and stripped, and answer a few questions, whose answers become conditions. Any other use of
a symbol raises. So the traced text holds for every conversation with the same roles that meets the conditions, because
nothing else about the contents was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from penstock.chat.compile.layouts import Hole
from penstock.chat.compile.prover import MAX_PARTS, LeakError, Symbol, reject
from penstock.chat.limits import writable
from penstock.chat.sandbox import Sandbox, added, begun, joined, sandboxed

UNTRACED = (
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
)
OF_EVERY_TEXT = {
    # Tests that come out the same for every text.
    **dict.fromkeys(("string", "defined", "iterable", "sequence"), True),
    **dict.fromkeys(("undefined", "none", "mapping", "number", "boolean", "true", "false", "integer", "float"), False),
}
COMPARING = frozenset({"==", "eq", "equalto", "!=", "ne", "in"})
"""Tests that compare their arguments; a symbol answers these itself."""
UNCHANGED = frozenset({"default", "d", "_bounded"})
"""Filters that use only the truth value of a value, and return it unchanged."""
PASSING = frozenset(
    {"length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr", "_stepped"}
)
"""Filters that use the items of a list only through tests and other filters."""


class TracedText(str):
    """Symbol in the output of a template; `str` of it is itself."""

    symbol: Symbol

    def __str__(self) -> str:
        return self


class Method:
    """A method of a symbol, to be called by a template."""

    def __init__(self, symbol: Symbol, name: str) -> None:
        self.symbol, self.name = symbol, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.symbol, self.name)(*args, **kwargs)


class TracingSandbox(Sandbox):
    """The sandbox, with symbols among the values."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Uncaptured().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Jinja adds the variables of the loop, for functions that want the whole context.
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(function) is Method:
            return function(*args, **given)
        passing = isinstance(function, Macro) or function is Namespace or type(_owner(function)) is dict
        if not passing and _has_symbol((args, given)):
            reject()
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not Symbol:
            return super().getattr(obj, attribute)
        if attribute not in ("strip", "lstrip", "rstrip", "startswith", "endswith"):
            reject()
        return Method(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is Symbol or type(argument) is Symbol:
            reject()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _has_symbol((left, right)):
            reject()
        return super().call_binop(context, operator, left, right)


class Uncaptured(NodeTransformer):
    """Refuses symbols in captured text, which the template could read again."""

    def __init__(self) -> None:
        self.depth = 0

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802 - found by this name
        return self._capturing(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._capturing(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._capturing(node) if node.recursive else self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if self.depth:
            node.nodes = [_filtered(part) for part in node.nodes]
        return node

    def _capturing(self, node: nodes.Node) -> nodes.Node:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node


class Tracer:
    """A template compiled for symbols."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(self, **variables: Any) -> list[str | Hole]:
        """Texts and holes that the template writes. Raises what the template raises."""
        context = self._template.new_context(begun(variables))
        parts: list[str | Hole] = []
        for part in self._template.root_render_func(context):
            if isinstance(part, TracedText):
                parts += part.symbol.parts
            else:
                parts.append(part)
            if len(parts) > MAX_PARTS:
                raise LeakError(f"a text of more than {MAX_PARTS} pieces")
        return parts


@lru_cache(maxsize=64)
def tracer(source: str) -> Tracer | None:
    """The tracer of a template, compiled once per process; None if it cannot be traced."""
    environment = sandboxed(TracingSandbox, marks=True)
    environment.finalize = _finalized
    tree = environment.parse(source)
    if next(tree.find_all(UNTRACED), None) is not None:
        return None
    own = {"_joined": _joined, "_added": _added, "_plain": _plain, "trim": _trim, "string": _string}
    for name, filter_ in list(environment.filters.items()):
        if name not in UNCHANGED:
            environment.filters[name] = _careful(filter_, passing=name in PASSING)
    environment.filters |= own
    environment.filters.pop("random")
    for name, test in list(environment.tests.items()):
        environment.tests[name] = _careful_test(name, test)
    try:
        return Tracer(environment.from_string(tree))
    except Exception:  # noqa: BLE001 - it uses a filter that does not exist for symbols, or is too much for the compiler
        return None


def _careful(filter_: Callable[..., Any], *, passing: bool) -> Callable[..., Any]:
    """The filter, refusing symbols; with `passing`, symbols inside of a filtered list are allowed."""
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def careful(*args: Any, **kwargs: Any) -> Any:
        given = (*args[skipped:], *kwargs.values())
        if any(type(value) is Symbol for value in given) if passing else _has_symbol(given):
            reject()
        return filter_(*args, **kwargs)

    return careful


def _careful_test(name: str, test: Any) -> Any:
    if name in COMPARING:
        return test
    skipped = 1 if hasattr(test, "jinja_pass_arg") else 0

    @wraps(test)
    def careful(*args: Any, **kwargs: Any) -> Any:
        given = args[skipped:]
        if given and type(given[0]) is Symbol and name in OF_EVERY_TEXT:
            return OF_EVERY_TEXT[name]
        # These tests use the type of a value only; the items of a list or message do not matter.
        if any(type(value) is Symbol for value in given) if name in OF_EVERY_TEXT else _has_symbol((given, kwargs)):
            reject()
        return test(*args, **kwargs)

    return careful


def _has_symbol(value: Any) -> bool:
    """True if the value is or may contain a symbol."""
    if isinstance(value, list | tuple):
        return any(map(_has_symbol, value))
    if isinstance(value, dict):
        return any(map(_has_symbol, value.values()))
    return not isinstance(value, str | int | float | jinja2.Undefined | None)


def _finalized(value: Any) -> Any:
    if type(value) is not Symbol:
        return writable(value)
    written = TracedText()
    written.symbol = value
    return written


def _joined(parts: list[Any]) -> Symbol | str:
    symbol = next((part for part in parts if type(part) is Symbol), None)
    if symbol is None:
        return joined(parts)
    return Symbol(symbol.watch, [piece for part in parts for piece in _pieces(part)])


def _added(terms: list[Any]) -> Any:
    symbol = next((term for term in terms if type(term) is Symbol), None)
    if symbol is None:
        return added(terms)
    if not all(type(term) in (Symbol, str) for term in terms):
        reject()
    return _joined(terms)


def _plain(value: Any) -> Any:
    return reject() if type(value) is Symbol else value


def _trim(value: Any, chars: Any = None) -> Any:
    return value.strip(chars) if type(value) is Symbol else jinja2.filters.do_trim(_known(value), chars)


def _string(value: Any) -> Any:
    return value if type(value) is Symbol else str(writable(_known(value)))


def _known(value: Any) -> Any:
    return reject() if _has_symbol(value) else value


def _pieces(part: Any) -> Sequence[str | Hole]:
    return part.parts if type(part) is Symbol else (str(writable(part)),)


def _owner(function: Any) -> Any:
    return getattr(function, "__self__", None)


def _filtered(part: nodes.Expr) -> nodes.Expr:
    if isinstance(part, nodes.TemplateData):
        return part
    return nodes.Filter(part, "_plain", [], [], None, None, lineno=part.lineno)
