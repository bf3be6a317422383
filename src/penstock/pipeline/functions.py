"""Functions as stages: of a row, of a batch, or an Arrow expression."""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock._syntax import parse
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline.chain import BrokenStageError
from penstock.pipeline.stages import Transform
from penstock.types.columns import to_column
from penstock.types.schema import Schema

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
        tree = parse(text.strip(), mode="eval")
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


Row = dict[str, Any]
Kind = Literal["row", "batch", "expression"]
_LEARN_ROWS = 256


class RowSchema:
    """The columns that a row function returns, learned from its first rows (up to 256) unless they are given.

    A column that was in the input keeps its type if the new values fit it. Afterwards every batch must agree.
    """

    def __init__(self, given: pa.Schema | None) -> None:
        self._given = given
        self.known: pa.Schema | None = given
        self._fixed: pa.Schema | None = None

    def reset(self) -> None:
        self.known = self._given if self._given is not None else self._fixed

    def fix(self, schema: pa.Schema | None) -> None:
        """Columns that were learned elsewhere, which stay after `reset`; None lets them be learned again."""
        self._fixed = schema
        self.reset()

    def describe(self) -> str:
        """The columns that were given: what is learned follows from the rows."""
        return str(self._given)

    def to_batch(
        self, rows: Sequence[Mapping[str, Any]], source: pa.RecordBatch, handed_out: Mapping[str, list[Any]]
    ) -> pa.RecordBatch:
        """Rows to columns. A column whose values are still the objects of the input keeps its array."""
        if self.known is None:
            if not rows:
                return source.slice(0, 0)
            self.known = self._learned(rows[:_LEARN_ROWS], source)
        _check_keys(rows, self.known.names, self._refusal)
        columns = [
            self._column([row.get(field.name) for row in rows], field, source, handed_out) for field in self.known
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.known)

    def _learned(self, rows: Sequence[Mapping[str, Any]], source: pa.RecordBatch) -> pa.Schema:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pa.schema([(name, self._type([row.get(name) for row in rows], name, source)) for name in names])

    def _type(self, values: list[Any], name: str, source: pa.RecordBatch) -> pa.DataType:
        index = source.schema.get_field_index(name)
        if index >= 0:
            before = source.schema.field(index).type
            try:
                to_column(values, pa.field(name, before))
                return before
            except SchemaError:
                pass  # the function gave the column another type: take that one
        return pa.array(values).type

    @property
    def _refusal(self) -> type[SchemaError]:
        """With a given schema a row that does not fit is a bad row; what was only learned cannot blame the row."""
        return SchemaError if self._given is not None else BrokenStageError

    def _column(
        self, values: list[Any], field: pa.Field, source: pa.RecordBatch, handed_out: Mapping[str, list[Any]]
    ) -> pa.Array:
        if _untouched(values, handed_out.get(field.name)):
            before = source.column(field.name)
            if before.type == field.type:
                return before
        try:
            return to_column(values, field)
        except SchemaError as error:
            raise self._refusal(
                f"column {field.name!r} does not fit {field.type}, the type of the first rows: {error}; "
                "pass schema= with the right type"
            ) from error


class FunctionStage(Transform):
    """Base of `Map` and `FlatMap`: a function of a row or a batch, and the columns a row function returns."""

    def __init__(self, function: Any, batch: bool | None, schema: pa.Schema | Any | None) -> None:
        self._function = function
        self._kind = kind_of(function, batch)
        self._rows = RowSchema(arrow_schema(schema))

    @property
    def calls_function(self) -> bool:
        """True if it calls a user's function, and is no expression."""
        return self._kind != "expression"

    @property
    def learning(self) -> bool:
        return self._kind == "row" and self._rows.known is None

    @property
    def output_schema(self) -> pa.Schema | None:
        return self._rows.known if self._kind == "row" else None

    def set_output_schema(self, schema: pa.Schema | None) -> None:
        self._rows.known = schema

    def fix_output_schema(self, schema: pa.Schema | None) -> None:
        """The columns that another process has learned from the first rows of the input, for this one's rows too."""
        self._rows.fix(schema)

    def reset(self) -> None:
        self._rows.reset()


class Map(FunctionStage):
    """Each row, or each batch, through a function; or columns computed by Arrow expressions.

        Map(lambda row: {**row, "n": len(row["text"])})           # a dict for every row; it is the new row
        Map(shorten, batch=True)                                  # RecordBatch -> RecordBatch
        Map({"total": pc.field("price") * pc.field("count")})     # adds or replaces columns, no Python per row
        Map({"total": "price * count"})                           # the same, as text

    A function whose parameter is annotated as `pyarrow.RecordBatch` is taken as a batch function without `batch=True`.
    The columns of a row function are learned from the first rows; pass `schema` where those may mislead (a column that
    is null at first). Functions must be pure: one that fails is called again to find the row.
    """

    def __init__(
        self,
        function: Callable[..., Any] | Mapping[str, Any],
        *,
        batch: bool | None = None,
        schema: pa.Schema | Any | None = None,
    ) -> None:
        self._named = function_name(function)
        if isinstance(function, Mapping):
            function = {
                name: parse_expression(value) if isinstance(value, str) else value for name, value in function.items()
            }
        super().__init__(function, batch, schema)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._kind == "batch":
            return cast(Callable[..., Any], self._function)(batch)
        if self._kind == "expression":
            return evaluate(batch, cast(Mapping[str, Any], self._function))
        function = cast(Callable[[Row], Row], self._function)
        columns = values_of(batch)
        rows = [function(row) for row in rows_of(columns)]
        for row in rows:
            if type(row) is not dict and not isinstance(row, Mapping):  # the second test is twenty times as slow
                raise SchemaError(
                    f"{self!r} returned {type(row).__name__} for a row, expected a dict; "
                    "to leave rows out use Filter, to return several use FlatMap"
                )
        return self._rows.to_batch(rows, batch, columns)

    def __repr__(self) -> str:
        return f"Map({self._named})"


def as_transform(stage: Any) -> Transform:
    """A stage as it is, a function as a `Map`."""
    if callable(getattr(stage, "transform", None)) and not isinstance(stage, type):
        return cast(Transform, stage)
    if callable(stage) and not isinstance(stage, type):
        return Map(stage)
    raise ConfigError(f"{stage!r} cannot be a transform: it has no method transform and is not a function")


def kind_of(function: Any, batch: bool | None) -> Kind:
    """Input of a function: a row, a batch (by option or annotation), or none for an expression."""
    if isinstance(function, (pc.Expression, Mapping)):
        return "expression"
    if not callable(function):
        raise ConfigError(f"expected a function or an Arrow expression, got {function!r}")
    if batch is not None:
        return "batch" if batch else "row"
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return "row"
    annotation = first.annotation if first is not None else None
    return "batch" if annotation is pa.RecordBatch or str(annotation).endswith("RecordBatch") else "row"


def values_of(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """The columns as Python lists."""
    return {name: column.to_pylist() for name, column in zip(batch.schema.names, batch.columns)}


def rows_of(columns: Mapping[str, list[Any]]) -> Iterator[Row]:
    """The rows as dicts. Going by columns is several times faster than `RecordBatch.to_pylist`."""
    names = list(columns)
    return (dict(zip(names, values)) for values in zip(*columns.values()))


def evaluate(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """The batch with each named column set to its expression, computed on the original columns."""
    return project(batch, {name: pc.field(name) for name in batch.schema.names} | dict(columns))


def project(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """The named expressions over a batch. Computed in this thread: memory that Arrow's own threads allocate stays in
    their heaps, where it cannot be freed."""
    acero = _acero()
    plan = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))),
            acero.Declaration("project", acero.ProjectNodeOptions(list(columns.values()), list(columns))),
        ]
    )
    try:
        table = plan.to_table(use_threads=False)
    except (pa.ArrowInvalid, KeyError) as error:
        if "FieldRef" in str(error):
            raise SchemaError(f"{error}; the batch has columns {batch.schema.names}") from error
        raise
    return table.combine_chunks().to_batches()[0] if table.num_rows else batch_of_none(table.schema)


@functools.cache
def _acero() -> Any:
    """The part of `pyarrow.acero` that is used here. The whole brings in pyarrow.dataset and, where it is installed,
    pandas: a fifth of a second in this process, and in each worker process."""
    try:
        import pyarrow._acero as acero
    except ImportError:
        import pyarrow.acero as acero
    return acero


def batch_of_none(schema: pa.Schema) -> pa.RecordBatch:
    """No rows, but the columns."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def arrow_schema(schema: Any) -> pa.Schema | None:
    """An Arrow schema from one, from a penstock `Schema` or what it is made of (`{"z": "string"}`), or from None."""
    if isinstance(schema, Mapping):
        schema = Schema(schema)
    return schema.to_arrow() if hasattr(schema, "to_arrow") else schema


def function_name(function: Any) -> str:
    """Name of a function in messages."""
    if isinstance(function, Mapping):
        return ", ".join(f"{name}={value}" for name, value in function.items())
    if isinstance(function, pc.Expression):
        return str(function)
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in sorted(function.keywords.items()))]
        return f"{function_name(function.func)}({', '.join(given)})"
    return getattr(function, "__qualname__", type(function).__name__).removeprefix("<locals>.").split("<locals>.")[-1]


def _check_keys(rows: Sequence[Mapping[str, Any]], names: list[str], refusal: type[SchemaError]) -> None:
    wanted = set(names)
    for row in rows:
        if not row.keys() <= wanted:
            extra = next(key for key in row if key not in wanted)
            raise refusal(
                f"a row has the new column {extra!r}; the first rows had {names}; "
                "pass schema= with every column the function may return"
            )


def _untouched(values: list[Any], handed_out: list[Any] | None) -> bool:
    return handed_out is not None and len(values) == len(handed_out) and all(map(operator.is_, values, handed_out))
