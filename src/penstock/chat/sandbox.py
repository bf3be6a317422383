"""Sandbox for chat templates: Jinja without access to Python, with limits on time and memory.

A template comes with a tokenizer from anywhere, so it is untrusted code. `{% generation %}` blocks leave two marks in
the text. Jinja is slow to import, so this module is imported when a template is first needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.chat.limits import (
    MAX_CHARS,
    SIZED,
    allowance,
    begin,
    bound,
    bounded,
    check_arguments,
    check_filled,
    check_power,
    check_product,
    writable,
)
from penstock.chat.templates import END, START
from penstock.files.json_values import dumps

MAX_STEPS = 200_000
"""Iterations of loops and calls in one rendering."""
MAX_INDENT = 64
MAX_ARGUMENTS = 1000

OF_DICTS = frozenset(dir(dict))
WIDE = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "maketrans"})
HARMLESS = frozenset(
    {"length", "count", "default", "d", "first", "last", "trim", "attr", "select", "reject", "selectattr", "rejectattr"}
    | {"map", "items", "int", "float", "abs", "lower"}
)
"""Filters that make nothing larger than what they get."""
_STEPS = "_steps_left"


class Program:
    """A compiled template. Rendering is thread-safe."""

    def __init__(self, environment: Sandbox, tree: nodes.Template) -> None:
        capturing = (nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)
        self.has_generation = _marks(tree)
        self.captures = self.has_generation and any(map(_marks, tree.find_all(capturing)))
        """True if text with marks passes through filters or functions, which the marks could change."""
        self._template = environment.from_string(tree)
        self._globals = dict(self._template.globals)

    def render(self, **variables: Any) -> str:
        """The text, with marks around generation blocks. Raises what the template raises."""
        template = self._template
        variables = {**self._globals, **begun(variables)}
        # As `new_context` does, without merging the globals each time.
        context = template.environment.context_class(template.environment, variables, template.name, template.blocks)
        parts, size = [], 0
        for part in template.root_render_func(context):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARS:
                raise SecurityError(f"the template wrote more than {MAX_CHARS} characters")
        return "".join(parts)


@lru_cache(maxsize=64)
def compiled(source: str, *, marks: bool = True) -> Program:
    """The template, compiled once per process; without `marks`, generation blocks leave no marks."""
    environment = sandboxed(Sandbox, marks=marks)
    return Program(environment, environment.parse(source))


def sandboxed(kind: type[Sandbox], *, marks: bool) -> Sandbox:
    """An environment for chat templates."""
    block = Generation if marks else UnmarkedGeneration
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[block, loopcontrols], finalize=writable)
    for name, filter_ in list(environment.filters.items()):
        if name not in HARMLESS:
            environment.filters[name] = _limited(filter_)
    environment.filters |= {
        "tojson": _to_json,
        "replace": _replace,
        "join": _join,
        "format": _format,
        "indent": _indent,
        "_stepped": _stepped,
        "_joined": joined,
        "_added": added,
        "_bounded": bounded,
    }
    for name in ("center", "batch", "slice", "wordwrap", "pprint", "urlize"):
        environment.filters.pop(name, None)
    environment.globals.pop("lipsum", None)
    environment.globals["raise_exception"] = _raise
    return environment


def begun(variables: dict[str, Any]) -> dict[str, Any]:
    """Variables of a rendering that begins now, with the steps that it may take."""
    begin(variables)
    return {**variables, _STEPS: [MAX_STEPS]}


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: text that the model writes, marked in the output."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in a call block: variables set inside are not visible outside.
        parts: list[nodes.Node] = [_text(START), nodes.Scope(body), _text(END)]
        return [part.set_lineno(line) for part in parts]


class UnmarkedGeneration(Generation):
    """The same block, leaving no marks."""

    def parse(self, parser: Parser) -> list[nodes.Node]:
        return super().parse(parser)[1:2]


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on loops, calls and lengths."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Bounding().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend(context, 1)
        if len(args) > MAX_ARGUMENTS:
            raise SecurityError(f"templates may pass up to {MAX_ARGUMENTS} arguments, got {len(args)}")
        name = getattr(function, "__name__", "")
        if isinstance(getattr(function, "__self__", None), str):
            text: str = function.__self__
            if name in WIDE:
                raise SecurityError(f"templates may not use str.{name}")
            if name == "replace" and len(args) > 1:
                bound(_replaced_length(text, args[0], args[1]))
            elif name == "join" and args:
                return _join(args[0], text)
            else:
                check_arguments((text,))
        return bounded(super().call(context, function, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in the sandbox, but keys of a dict are found without a failing getattr first."""
        if type(obj) is dict and attribute not in OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        form, fill = value.__self__, formatted

        def limited(*args: Any, **kwargs: Any) -> str:
            _check_widths(form)
            mapped = [given for each in args if isinstance(each, dict) for given in each.values()]
            check_filled(form, form.count("{"), [*args, *mapped, *kwargs.values()])
            return fill(*args, **kwargs)

        return limited

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            _check_form(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)


class Bounding(NodeTransformer):
    """Applies the limits to loops, to `+` and `~`, and to assigned values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - found by this name
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), "_stepped")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):  # a + b + c is one sum: one call, not two
            terms.insert(0, left.right)
            left = left.left
        terms = [self.visit(term) for term in (left, *terms)]
        return _filtered(nodes.List(terms, lineno=node.lineno), "_added")

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.node = _filtered(cast(nodes.Expr, node.node), "_bounded")
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_bounded", [], [], None, None, lineno=node.lineno)
        return node


@jinja2.pass_context
def _stepped(context: Context, iterable: Any) -> Any:
    """The values of a loop; its iterations are charged to the limit."""
    if isinstance(iterable, jinja2.Undefined) or iterable is None:
        return iterable
    if not hasattr(iterable, "__len__"):
        iterable = list(islice(iterable, MAX_STEPS + 1))
    _spend(context, len(iterable))
    return iterable


def _spend(context: Context, steps: int) -> None:
    left = context.parent[_STEPS]
    left[0] -= steps
    if left[0] < 0:
        raise SecurityError(f"the template took more than {MAX_STEPS} steps")


def _limited(filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that is refused what it could make too much of."""
    skipped = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def limited(*args: Any, **kwargs: Any) -> Any:
        check_arguments((*args[skipped:], *kwargs.values()))
        return bounded(filter_(*args, **kwargs))

    return limited


def _check_form(form: str, values: Iterable[Any]) -> None:
    """A form of `%`."""
    _check_widths(form)
    given = [value for each in values for value in (each.values() if isinstance(each, dict) else (each,))]
    check_filled(form, form.count("%"), given)


def _check_widths(form: str) -> None:
    if re.search(r"\d{5}|%[^a-z%]*\*|\{[^{}]*\{", form.replace("{{", "")):
        raise SecurityError(f"templates may not format with large widths: {form!r:.80}")


def _replaced_length(text: str, old: str, new: str) -> int:
    return len(text) + text.count(old) * len(new) if len(new) > len(old) else len(text)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    given = str(writable(text))
    bound(_replaced_length(given, old, new))
    return cast(str, bounded(given.replace(old, new, -1 if count is None else count)))


def _join(values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
    texts = [str(writable(value[attribute] if attribute is not None else value)) for value in values]
    bound(sum(map(len, texts)) + len(between) * len(texts))
    return cast(str, bounded(between.join(texts)))


def _format(form: Any, *args: Any, **kwargs: Any) -> str:
    _check_form(str(form), (kwargs,) if kwargs else args)
    return str(form) % (kwargs or args)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's `indent` with a limit on the width."""
    space = width if isinstance(width, str) else " " * min(width, MAX_INDENT + 1)
    if len(space) > MAX_INDENT:
        raise SecurityError(f"templates may indent by at most {MAX_INDENT}, got {width!r:.80}")
    given = str(writable(text))
    bound(len(given) + (len(given.splitlines()) + 1) * len(space))
    return jinja2.filters.do_indent(given, space, first, blank)


def joined(parts: list[Any]) -> str:
    texts = [part if type(part) is str else str(writable(part)) for part in parts]
    bound(sum(map(len, texts)))
    return cast(str, bounded("".join(texts)))


def added(terms: list[Any]) -> Any:
    total = terms[0]
    if all(type(term) is str for term in terms):
        bound(sum(map(len, terms)))
        return bounded("".join(terms))
    for term in terms[1:]:
        if isinstance(total, SIZED) and isinstance(term, SIZED):
            bound(len(total) + len(term), total)
        total = total + term
    return bounded(total)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's templates expect: no HTML escapes, letters as they are."""
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise SecurityError(f"tojson may indent by at most 16, got {indent!r:.80}")
    if (size := allowance().weigh(value)) > 1 << 12:
        allowance().check(size * (6 + 8 * (indent or 0)))
    return dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(str(writable(message)))


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _text(mark: str) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(mark)])


def _marks(tree: nodes.Node) -> bool:
    return any(data.data == START for data in tree.find_all(nodes.TemplateData))
