"""Exact sums of floats and of their squares, as integers: the same for any order, and any cuts into parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

UNIT = 1074
"""Every float is a multiple of 2 ** -UNIT, and every square of 2 ** (-2 * UNIT)."""
_FEW = 32
_ROWS = 1 << 14  # the arrays of one piece stay in the cache; sums of up to 2 ** 20 parts are exact
_BITS = 32
_SPLITTER = float((1 << 27) + 1)
_SMALL = 2.0**-450
"""Below this the square of the low half of a float is no float any more."""


def exact_sums(values: Floats) -> tuple[int, int]:
    """Sum of finite values in units of 2 ** -UNIT, and of their squares in units of 2 ** (-2 * UNIT).

    Squares must not overflow: up to 1e150 they do not.
    """
    total = squared = 0
    for start in range(0, len(values), _ROWS):
        piece = values[start : start + _ROWS]
        by_one = piece
        if len(piece) > _FEW:
            small = np.abs(piece) < _SMALL
            by_one, piece = piece[small & (piece != 0)], piece[~small]
            high = piece * _SPLITTER
            high -= high - piece  # the upper 26 bits of each (Dekker, Veltkamp)
            low = piece - high
            total += _sum(piece, UNIT)
            squared += _sum(high * high, 2 * UNIT) + _sum(2 * high * low, 2 * UNIT) + _sum(low * low, 2 * UNIT)
        for value in by_one.tolist():
            units = _units(value, UNIT)
            total, squared = total + units, squared + units * units
    return total, squared


def _sum(values: Floats, unit: int) -> int:
    """Exact sum of some floats in units of 2 ** -unit, by slices of 32 bits: the sum of one slice is exact."""
    total = 0
    while len(values) and (largest := float(np.abs(values).max())):
        exponent = int(np.frexp(largest)[1])  # all are below 2 ** exponent
        grid = max(exponent - _BITS, -UNIT)
        coarse = 1.5 * 2.0 ** (grid + 52) if grid > -970 else 0.0
        if not coarse:
            return total + sum(_units(value, unit) for value in values.tolist() if value)
        slices = (values + coarse) - coarse  # multiples of 2 ** grid
        total += _units(float(slices.sum()), unit)
        values = values - slices
        values = values[values != 0]
    return total


def _units(value: float, unit: int) -> int:
    """A float as a multiple of 2 ** -unit."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (unit + 1 - denominator.bit_length())
