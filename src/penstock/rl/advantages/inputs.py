"""Checked inputs of estimators; errors name the row.

Shapes are always checked. Values are checked where `arrays.check` is true: if they are in main memory, or on a device
whose computations the caller waits for. Otherwise a wrong value becomes NaN in the result, see `blank_rows`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import Array
from penstock.batching.backends.operations import ArrayOperations, operations_of
from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.presets import Empty, Nan


def per_row(arrays: ArrayOperations, values: Any, name: str, *, rows: int | None = None) -> Array:
    """Numbers, one a row."""
    array = _floats(arrays, values, name)
    if len(array.shape) != 1:
        remedy = f"; sum token {name} over their tokens first" if len(array.shape) == 2 else ""
        raise DataError(f"{name} must be one number a row, got shape {tuple(array.shape)}{remedy}")
    if not array.shape[0]:
        raise DataError(f"{name} is empty: there are no rows")
    if rows is not None and array.shape[0] != rows:
        raise DataError(f"{name} has {array.shape[0]} rows, expected {rows}{_first_without(array.shape[0], rows)}")
    return array


def per_token(arrays: ArrayOperations, values: Any, name: str, *, shape: tuple[int, ...] | None = None) -> Array:
    """Numbers, one a token: (rows, tokens)."""
    array = _floats(arrays, values, name)
    given = tuple(array.shape)
    if shape is not None and given != shape:
        raise DataError(
            f"{name} has shape {given}, expected {shape}{_first_without(given[0] if given else 0, shape[0])}"
        )
    if len(given) != 2:
        raise DataError(f"{name} must be (rows, tokens), got shape {given}")
    if 0 in given:
        raise DataError(f"{name} is empty: it has shape {given}")
    return array


def token_mask(arrays: ArrayOperations, mask: Any, shape: tuple[int, ...], empty: Empty) -> Array:
    """Mask of the tokens that count; `empty` is the rule for rows without one."""
    if mask is None:
        return arrays.true(shape)
    array = arrays.bools(_rectangular(mask, "mask"))
    if tuple(array.shape) != tuple(shape):
        given = tuple(array.shape)
        raise DataError(f"mask has shape {given}, expected {shape}{_first_without(given[0] if given else 0, shape[0])}")
    if empty == "raise" and arrays.check:
        counted = arrays.host(arrays.xp.any(array, axis=1))
        if not counted.all():
            row = int(np.argmin(counted))
            raise DataError(
                f"row {row} has no token with mask 1{more(int((~counted).sum()) - 1)}; leave such rows out, or pass "
                f"empty='zero' for rows of zeros",
                row=row,
            )
    return array


def blank_rows(arrays: ArrayOperations, mask: Array, empty: Empty) -> Array | float:
    """Number for tokens with mask 0, one a row: 0, but NaN for rows without a token if `empty` forbids them and
    `token_mask` has not checked it."""
    if empty != "raise" or arrays.check:
        return 0.0
    return arrays.nan_if_false(arrays.xp.any(mask, axis=1))[:, None]


def rows_of(mask: Array) -> tuple[int, int]:
    """Shape of a mask, which must have two dimensions."""
    if len(mask.shape) != 2:
        raise DataError(f"mask must be (rows, tokens), got shape {tuple(mask.shape)}")
    return mask.shape[0], mask.shape[1]


def token_shape(mask: Any, rows: int) -> tuple[int, int]:
    """(rows, tokens) of a mask in any framework."""
    shape = tuple(np.shape(mask))
    if len(shape) != 2:
        raise DataError(f"mask must be (rows, tokens), got shape {shape}")
    return rows, shape[1]


def row_bounds(offsets: Any, tokens: int) -> Any:
    """Checked offsets of rows in flat tokens, on the host."""
    bounds = operations_of(offsets).host(offsets)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
        raise DataError(f"offsets must be integers, one more than rows, got shape {bounds.shape} of {bounds.dtype}")
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise DataError(f"offsets must go from 0 to the {tokens} tokens, got {bounds[0]} to {bounds[-1]}")
    falling = np.flatnonzero(np.diff(bounds) < 0)
    if len(falling):
        row = int(falling[0])
        raise DataError(f"row {row} would end at {bounds[row + 1]}, before its start at {bounds[row]}", row=row)
    return bounds


def on_tokens(arrays: ArrayOperations, advantages: Array, mask: Any) -> Array:
    """Number of each row on all its tokens, 0 where the mask is 0."""
    checked = arrays.bools(mask)
    rows_of(checked)
    if checked.shape[0] != advantages.shape[0]:
        raise DataError(f"mask has {checked.shape[0]} rows for {advantages.shape[0]} rewards; give one for each row")
    return arrays.kept(checked, advantages[:, None])


def finite(arrays: ArrayOperations, rewards: Array, name: str, nan: Nan) -> Array | None:
    """Mask of the finite rewards if others are to be excluded; None if all count. A number that must be finite and is
    not is an error, or stays, if values are not checked: the mean of its group is NaN then."""
    xp = arrays.xp
    if arrays.check:
        if bool(xp.isfinite(xp.sum(rewards))):
            return None
        host = arrays.host(rewards)
        bad = np.isinf(host) if nan == "exclude" else ~np.isfinite(host)
        if bad.any():
            row = int(np.argmax(bad))
            remedy = "give it a number"
            remedy += "" if np.isinf(host[row]) else ", or pass nan='exclude' to leave it out"
            raise DataError(f"{name} of row {row} is {host[row]}{more(int(bad.sum()) - 1)}; {remedy}", row=row)
    return ~xp.isnan(rewards) if nan == "exclude" else None


def unit(name: str, value: float) -> float:
    """Checked factor from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be between 0 and 1, got {value!r}")
    return float(value)


def more(count: int) -> str:
    """Number of further rows with the same mistake, for messages."""
    return f" (and {count} more rows)" if count else ""


def _floats(arrays: ArrayOperations, values: Any, name: str) -> Array:
    try:
        return arrays.floats(_rectangular(values, name))
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} must be numbers, got {type(values).__name__}: {error}") from None


def _rectangular(values: Any, name: str) -> Any:
    """Lists as a NumPy array, None as NaN; an error names the first row of another length."""
    if not isinstance(values, (list, tuple)):
        return values
    lengths = [len(row) if hasattr(row, "__len__") and not isinstance(row, str) else None for row in values]
    for row, length in enumerate(lengths):
        if length != lengths[0]:
            raise DataError(
                f"{name} has {_items(length)} in row {row} and {_items(lengths[0])} in row 0; pad them to one length",
                row=row,
            )
    array: npt.NDArray[Any] = np.asarray(values)
    return array.astype(np.float64) if array.dtype == object else array


def _items(length: int | None) -> str:
    return "a number" if length is None else f"{length} values"


def _first_without(given: int, expected: int) -> str:
    if given == expected:
        return ""
    return f": row {min(given, expected)} is the first {'without' if given < expected else 'too many'}"
