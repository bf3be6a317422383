"""Arrow expressions written as text: `words >= 50 and lang == 'en'`, for command lines and YAML files.

The text is read with Python's own parser and only names, constants, comparisons, arithmetic, and/or/not, `in` and calls
of Arrow compute functions are translated. Nothing is ever evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError

__all__ = ["parse_expression"]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, choices: value.isin(choices),
    ast.NotIn: lambda value, choices: ~value.isin(choices),
    ast.Is: lambda value, _: value.is_null(),
    ast.IsNot: lambda value, _: value.is_valid(),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left.cast(pa.float64()) / right,  # as in Python: 7 / 2 is 3.5
}
_SHORT = {"len": "utf8_length", "lower": "utf8_lower", "upper": "utf8_upper", "strip": "utf8_trim_whitespace"}


def parse_expression(text: str) -> pc.Expression:
    """The Arrow expression that `text` describes; a bare name is a column, `a.b` a field of a struct column."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ConfigError(f"not an expression: {text!r}: {error.msg} at column {error.offset}") from None
    made = _Translator(text).visit(tree.body)
    return made if isinstance(made, pc.Expression) else pc.scalar(made)


class _Translator(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self._text = text

    def visit_Name(self, node: ast.Name) -> Any:
        return pc.field(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        path = [node.attr]
        inner: ast.expr = node.value
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return self.generic_visit(node)
        return pc.field(inner.id, *reversed(path))

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_List(self, node: ast.List) -> Any:
        return [self.visit(item) for item in node.elts]

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return [self.visit(item) for item in node.elts]

    def visit_Compare(self, node: ast.Compare) -> Any:
        left, result = self.visit(node.left), None
        for op, right_node in zip(node.ops, node.comparators):
            right = self.visit(right_node)
            if isinstance(op, (ast.Is, ast.IsNot)) and right is not None:
                raise ConfigError(f"in {self._text!r}: 'is' compares with None only")
            part = _COMPARE[type(op)](_expression(left), right)
            result = part if result is None else result & part
            left = right
        return result

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        parts = [_expression(self.visit(value)) for value in node.values]
        join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        result = parts[0]
        for part in parts[1:]:
            result = join(result, part)
        return result

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        if isinstance(node.op, ast.Not):
            return ~_expression(value)
        if isinstance(node.op, ast.USub):
            return -value if not isinstance(value, pc.Expression) else cast(Any, pc.negate(value))
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        if type(node.op) not in _ARITHMETIC:
            return self.generic_visit(node)
        return _ARITHMETIC[type(node.op)](_expression(self.visit(node.left)), self.visit(node.right))

    def visit_Call(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name):
            return self.generic_visit(node)
        name = _SHORT.get(node.func.id, node.func.id)
        if name not in pc.list_functions():
            hint = did_you_mean(name, [*pc.list_functions(), *_SHORT])
            raise ConfigError(f"in {self._text!r}: no Arrow compute function {name!r}{hint}")
        arguments = [self.visit(argument) for argument in node.args]
        options = {str(keyword.arg): self.visit(keyword.value) for keyword in node.keywords}
        return getattr(pc, name)(*(a if isinstance(a, pc.Expression) else pa.scalar(a) for a in arguments), **options)

    def generic_visit(self, node: ast.AST) -> Any:
        raise ConfigError(
            f"in {self._text!r}: {type(node).__name__} is not supported; write comparisons, arithmetic, and/or/not, "
            "'in', and calls such as len(text)"
        )


def _expression(value: Any) -> Any:
    return value if isinstance(value, pc.Expression) else pc.scalar(value)
