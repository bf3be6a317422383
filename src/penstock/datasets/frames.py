"""The rows of a dataset, whatever holds them: pandas, Polars, Arrow or a list of dicts, told by what they can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.errors import DataError, SchemaError

__all__ = ["column_names", "column_of", "plain_column", "take_rows", "with_plain_targets"]


def column_names(data: Any) -> list[str]:
    """The names of the columns, in their order; none if the rows have no columns."""
    if isinstance(data, pa.Table):
        names: list[str] = data.column_names
        return names
    if hasattr(data, "columns"):
        return [str(name) for name in data.columns]
    if isinstance(data, Sequence) and data and isinstance(data[0], dict):
        return [str(name) for name in dict.fromkeys(name for row in data for name in row)]
    return []


def column_of(data: Any, name: str) -> pa.Array:
    """One column as one Arrow array, values rather than a dictionary of them; NaN of pandas is null."""
    names = column_names(data)
    if name not in names:
        raise SchemaError(f"column {name!r} is not in the data; it has {names}{did_you_mean(name, names)}")
    if isinstance(data, pa.Table):
        column = plain_column(data.column(name))
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    values = [row.get(name) for row in data] if isinstance(data, Sequence) else data[name]
    if hasattr(values, "to_arrow"):  # Polars
        return plain_column(values.to_arrow())
    try:
        return plain_column(pa.array(values, from_pandas=True))
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise DataError(
            f"column {name!r} holds values of different types ({error}); make them one type, such as text, when reading"
        ) from error


def plain_column(column: Any) -> Any:
    """The same values without a dictionary or a view of them, which not everything that reads a column can do."""
    kind = column.type
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        kind = pa.string() if pa.types.is_string_view(kind) else pa.binary()
    return column if kind == column.type else column.cast(kind)


def take_rows(data: Any, rows: npt.NDArray[np.int64]) -> Any:
    """These rows in this order, held by what held them before."""
    if isinstance(data, pa.Table):
        return data.take(pa.array(rows))
    if hasattr(data, "iloc"):
        return data.iloc[rows].reset_index(drop=True)
    if hasattr(data, "columns"):
        return data[rows]
    return [data[row] for row in rows.tolist()]


def with_plain_targets(data: Any, targets: Sequence[str], *, as_floats: bool) -> Any:
    """A pandas frame whose whole-number targets are Python's numbers: `mx.array([row["y"]])` takes none of NumPy's.

    Targets of a regression become floats, others integers. Anything else is left as it is.
    """
    if not hasattr(data, "iloc"):
        return data
    whole = [name for name in targets if getattr(data[name].dtype, "kind", "") in "iu"]
    return data.assign(**{name: data[name].astype(float if as_floats else object) for name in whole}) if whole else data
