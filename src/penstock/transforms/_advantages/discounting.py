"""Discounted sums from each step to the end of its row, in a few matrix products instead of a loop over steps.

A row is cut into blocks. Within a block the sums are a product with the matrix of powers of the discount. What flows in
from later blocks is known from the first sums of the blocks, which obey the same recurrence with the discount to the
power of the block's length: one more product. Added to the last element of a block, it makes one product give it all.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock._arrays import Array, Arrays
from penstock.transforms._advantages.presets import Gap

__all__ = ["BLOCK", "advance", "suffix_sums", "through_gaps"]

BLOCK = 32
"""Steps of a block: longer ones cost more in their own products, shorter ones in those between blocks."""


def advance(
    arrays: Arrays, rewards: Array, values: Array | None, mask: Array, gamma: float, decay: float, gap: Gap
) -> tuple[Array, ...]:
    """`A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1}` of a few rows, and `A + V` if there are values; 0 where the
    mask is. A FloatingPointError says that a number is not finite."""
    xp = arrays.xp
    rows, steps = mask.shape
    lengths = xp.sum(mask, axis=1)
    columns = arrays.put(np.arange(-(-steps // BLOCK) * BLOCK, dtype=np.int32))
    front = columns[None, :] < lengths[:, None]
    has_gaps = bool(xp.any(front[:, :steps] != mask))
    squeezed = has_gaps and gap == "skip"
    counted = through_gaps(arrays, mask) if has_gaps and gap == "through" else mask
    whole = bool(xp.all(counted))
    padding = np.zeros((rows, columns.shape[0] - steps), np.float32)

    def laid_out(array: Array) -> Array:
        if squeezed:  # the tokens that count side by side, so that nothing is left to be skipped
            return arrays.place(arrays.wide(arrays.select(array, mask)), front)
        kept = arrays.wide(array if whole else xp.where(counted, array, 0.0))
        return xp.concatenate([kept, arrays.like(arrays.put(padding), kept)], axis=1) if padding.size else kept

    def back(array: Array) -> Array:
        if squeezed:
            return arrays.place(arrays.select(array, front), mask)
        return xp.where(mask, array[:, :steps], 0.0) if has_gaps else array[:, :steps]

    terms = laid_out(rewards)
    value = None if values is None else laid_out(values)
    if value is None:
        terms = terms + 0.0  # a copy: the sums may be written over it, and it may be what the caller gave
    else:
        terms = arrays.add_at(terms - value, (slice(None), slice(None, -1)), value[:, 1:] * gamma)
    sums = suffix_sums(arrays, terms, decay)
    if not bool(xp.isfinite(xp.sum(sums[:, 0]))):  # the first sum of a row has everything in it
        raise FloatingPointError
    return (back(sums),) if value is None else (back(sums), back(sums + value))


def suffix_sums(arrays: Arrays, steps: Array, decay: float) -> Array:
    """`S_t = x_t + decay S_{t+1}` for rows whose length is a multiple of `BLOCK`; may write into `steps`."""
    rows, length = steps.shape
    count = length // BLOCK
    inner = arrays.like(arrays.put(_powers(decay, BLOCK)), steps)
    blocks = steps.reshape(rows, count, BLOCK)
    if count > 1:
        between = arrays.like(arrays.put(_powers(decay**BLOCK, count)), steps)
        sums = arrays.product(arrays.product(blocks, inner[:, 0]), between)
        blocks = arrays.add_at(blocks, (slice(None), slice(None, -1), -1), sums[:, 1:] * decay)
    return arrays.product(blocks, inner).reshape(rows, length)


def through_gaps(arrays: Arrays, mask: Array) -> Array:
    """The mask with its gaps filled: all tokens up to the last that counts."""
    ones = mask * 1
    return arrays.xp.sum(ones, axis=1)[:, None] - arrays.xp.cumsum(ones, axis=1) + ones > 0


@lru_cache(maxsize=64)
def _powers(base: float, size: int) -> npt.NDArray[np.float64]:
    """`base ** (k - j)` where k >= j: a row times this is its discounted sums from each element on."""
    exponents = np.subtract.outer(np.arange(size), np.arange(size))
    return np.where(exponents >= 0, np.float64(base) ** np.maximum(exponents, 0), 0.0)
