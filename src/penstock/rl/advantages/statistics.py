"""Statistics that estimators share: group means and deviations, whitening, discounted sums. No loop over groups."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import more, token_mask
from penstock.rl.advantages.presets import Gap, Preset, SingleMemberGroup, find_preset
from penstock.rl.arrays import Array, Arrays, arrays_of

__all__ = ["Deviations", "Groups", "Reduce", "deviations", "moments", "reduced", "single_member_rows", "whiten"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """Group of each row, numbered in order of appearance."""

    arrays: Arrays
    index: npt.NDArray[np.int64]
    """Group number of each row, on the host."""
    place: Array
    """The same on the device; None if `size` is known."""
    count: int
    size: int | None
    """Size of the groups if they are consecutive and equal: then sums need no index."""
    names: Any

    @classmethod
    def of(cls, arrays: Arrays, groups: Any, rows: int) -> Groups:
        """Groups of ids, one a row; or of a number, the size of groups of consecutive rows."""
        if isinstance(groups, (int, np.integer)) and not isinstance(groups, bool):
            return cls._consecutive(arrays, int(groups), rows)
        ids = _ids(groups)
        if len(ids) != rows:
            raise DataError(f"groups has {len(ids)} ids for {rows} rewards; give one for each row")
        if ids.null_count:
            row = int(np.argmax(np.asarray(ids.is_null())))
            raise DataError(f"row {row} has no group id; give one for each row", row=row)
        encoded = ids.dictionary_encode()
        index = np.asarray(encoded.indices).astype(np.int64)
        names = encoded.dictionary
        size = _size(index, len(names))
        return cls(arrays, index, None if size else arrays.put(index), len(names), size, names)

    @classmethod
    def whole(cls, arrays: Arrays, rows: int) -> Groups:
        """All rows in one group."""
        return cls(arrays, np.zeros(rows, np.int64), None, 1, rows, ["the batch"])

    @classmethod
    def _consecutive(cls, arrays: Arrays, size: int, rows: int) -> Groups:
        if size < 1 or rows % size:
            raise ConfigError(f"groups={size} must be a positive number that divides the {rows} rows; or give ids")
        index = np.arange(rows) // size
        return cls(arrays, index, None, rows // size, size, range(rows // size))

    @property
    def equal(self) -> bool:
        """True if all groups have the same size."""
        if self.size is not None:
            return True
        sizes = self.sizes()
        return bool((sizes == sizes[0]).all())

    def sizes(self) -> npt.NDArray[np.int64]:
        """Rows of each group."""
        return np.bincount(self.index, minlength=self.count) if self.size is None else np.full(self.count, self.size)

    def sum(self, values: Array) -> Array:
        """Sum of each group."""
        if self.size is not None:
            return self.arrays.row_sums(values.reshape(self.count, self.size))
        return self.arrays.segment_sum(values, self.place, self.count)

    def combine(self, operation: Callable[[Array, Array], Array], values: Array, of_groups: Array) -> Array:
        """Operation on each row's value and the number of its group."""
        if self.size is not None:
            return operation(values.reshape(self.count, self.size), of_groups[:, None]).reshape(-1)
        return operation(values, of_groups[self.place])

    def spread(self, of_groups: Array) -> Array:
        """Number of its group, for each row."""
        if self.size is not None:
            shape = (self.count, self.size)
            return self.arrays.xp.broadcast_to(of_groups[:, None], shape).reshape(-1)
        return of_groups[self.place]

    def first(self, values: Array) -> Array:
        """Value of the first row of each group."""
        if self.size is not None:
            return values.reshape(self.count, self.size)[:, 0]
        rows = np.empty(self.count, np.int64)
        rows[self.index[::-1]] = np.arange(len(self.index))[::-1]  # the last that is written stays
        return values[self.arrays.put(rows)]

    def called(self, row: int) -> str:
        """Id of a row's group, for messages."""
        name = self.names[int(self.index[row])]
        return repr(name.as_py() if isinstance(name, pa.Scalar) else name)


@dataclass(frozen=True, slots=True)
class Deviations:
    """Deviation of each reward from the mean of its group."""

    values: Array
    """One a row; 0 for rows that do not count."""
    counts: Array
    """Rows of each group that count."""
    groups: Groups

    def std(self, ddof: int) -> Array:
        """Standard deviation of each group; 0 for a group of one."""
        xp = self.groups.arrays.xp
        return xp.sqrt(self.groups.sum(self.values * self.values) / xp.clip(self.counts - ddof, 1, None))


def deviations(rewards: Array, groups: Groups, valid: Array | None, *, weights: Array | None = None) -> Deviations:
    """Deviations from the group means, which `weights` weigh.

    All sums are relative to the first reward of the group, so equal rewards deviate by exactly 0 in any precision: a
    rounding error of 1e-8, divided by itself plus an epsilon of 1e-9, would be an advantage of 0.9.
    """
    arrays = groups.arrays
    xp = arrays.xp
    kept = rewards if valid is None else xp.where(valid, rewards, 0.0)
    apart = groups.combine(operator.sub, kept, groups.first(kept))
    by = weights
    counts = arrays.wide(arrays.put(groups.sizes().astype(np.float32)))
    if valid is not None:
        ones = arrays.like(valid, apart)
        counts = groups.sum(ones)
        by = ones if weights is None else ones * weights
    total = counts if weights is None else groups.sum(by)
    mean = groups.sum(apart if by is None else apart * by) / xp.where(total > 0, total, 1.0)
    apart = groups.combine(operator.sub, apart, mean)
    return Deviations(apart if valid is None else xp.where(valid, apart, 0.0), counts, groups)


def single_member_rows(
    advantages: Array,
    rewards: Array,
    deviations: Deviations,
    rule: SingleMemberGroup,
    *,
    valid: Array | None = None,
    of_preset: str | None = None,
) -> Array:
    """Advantages with the rule for groups of one applied; `rewards` is what the rule "reward" gives to such a row.

    `of_preset` names the preset that the rule comes from, if the caller chose none: a warning is logged when all groups
    have one member.
    """
    groups = deviations.groups
    xp = groups.arrays.xp
    alone_in = deviations.counts == 1
    if not bool(xp.any(alone_in)):
        return advantages
    alone = groups.spread(alone_in) if valid is None else groups.spread(alone_in) & valid
    if rule == "raise":
        rows = np.flatnonzero(groups.arrays.host(alone))
        raise DataError(
            f"row {rows[0]} is alone in group {groups.called(int(rows[0]))}{more(len(rows) - 1)} and cannot be "
            "compared; leave it out, or pass single_member_group='zero', 'reward' or 'nan'",
            row=int(rows[0]),
        )
    if of_preset is not None and groups.count == len(groups.index) > 1:
        _log_all_single(of_preset, rule)
    value = {"zero": 0.0, "reward": rewards, "nan": float("nan")}[rule]
    return xp.where(alone, value, advantages)


@lru_cache(maxsize=32)
def _log_all_single(preset: str, rule: SingleMemberGroup) -> None:
    """Logged once in a process for each preset."""
    logger.warning(
        "every row is alone in its group, so preset=%r gives %s as advantage; give the rows of one prompt the same "
        "group, or pass single_member_group=%r if this is intended",
        preset,
        {"zero": "0", "reward": "the reward", "nan": "NaN"}.get(rule, rule),
        rule,
    )


def _ids(groups: Any) -> Any:
    if not isinstance(groups, (list, tuple, np.ndarray, pa.Array, pa.ChunkedArray)):
        groups = arrays_of(groups).host(groups)
    if isinstance(groups, pa.ChunkedArray):
        return groups.combine_chunks()
    try:
        ids = groups if isinstance(groups, pa.Array) else pa.array(groups, from_pandas=False)
        if pa.types.is_nested(ids.type):
            raise pa.ArrowInvalid(f"they are of type {ids.type}")
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"groups must be one id a row, all numbers or all strings: {error}") from None
    return ids


def _size(index: npt.NDArray[np.int64], count: int) -> int | None:
    """Size of the groups if they are consecutive and equal, else None."""
    size, rest = divmod(len(index), max(1, count))
    if rest or not np.array_equal(index.reshape(count, size)[:, 0], np.arange(count)):
        return None
    blocks = index.reshape(count, size)
    return size if bool((blocks == blocks[:, :1]).all()) else None


Reduce: TypeAlias = Callable[[Array], Any]
"""Sums a small array over ranks, in place or as its result."""


def whiten(
    values: Any,
    mask: Any = None,
    *,
    preset: str | Preset = "penstock",
    ddof: int | None = None,
    epsilon: float | None = None,
    floor: Literal["add", "clamp"] | None = None,
    shift_mean: bool = True,
    reduce: Reduce | None = None,
) -> Array:
    """(x - mean) / sqrt(variance + epsilon) over the values with mask 1; 0 elsewhere.

    `ddof=1` is the unbiased variance, `ddof=0` the biased one (OpenRLHF). `floor="clamp"` makes epsilon the
    lower bound of the variance instead of adding it. `shift_mean=False` adds the mean again, as usual for rewards.
    `reduce` makes mean and variance those of all ranks: every rank calls it twice, with arrays of two numbers and of
    one, to be summed over ranks, as `torch.distributed.all_reduce` does. A rank without rows takes part.
    """
    rules = find_preset(preset)
    ddof = rules.whiten_ddof if ddof is None else ddof
    epsilon = rules.whiten_epsilon if epsilon is None else epsilon
    floor = rules.whiten_floor if floor is None else floor
    if floor not in ("add", "clamp"):
        raise ConfigError(f"floor must be 'add' or 'clamp', got {floor!r}")
    arrays = arrays_of(values, mask)
    xp = arrays.xp
    given = arrays.floats(values)
    counted = token_mask(arrays, mask, tuple(given.shape), "zero")
    wide = arrays.wide(xp.where(counted, given, 0.0))
    count, mean, variance = moments(arrays, wide, arrays.like(counted, wide), reduce)
    if count <= ddof:
        raise DataError(f"whitening with ddof={ddof} needs more than {ddof} values with mask 1, got {count:g}")
    if not variance < float("inf"):
        raise DataError("values with mask 1 must be finite to be whitened; at least one is NaN or infinite")
    variance *= count / (count - ddof)
    deviation = (max(variance, epsilon) if floor == "clamp" else variance + epsilon) ** 0.5
    whitened = (wide - mean) * (1 / deviation) + (0.0 if shift_mean else mean)
    return arrays.give(arrays.like(xp.where(counted, whitened, 0.0), given))


def moments(arrays: Arrays, values: Array, weights: Array, reduce: Reduce | None) -> tuple[float, float, float]:
    """Count, mean and biased variance of values with weight 1; the other weights are 0.

    The mean of all ranks comes first and deviations are squared then: squares of the values themselves would cancel.
    """
    xp = arrays.xp
    values = xp.where(weights > 0, values, 0.0)
    count, total = reduced(arrays, xp.stack([xp.sum(weights), xp.sum(values)]), reduce)
    mean = total / max(count, 1.0)
    apart = (values - mean) * weights
    (squares,) = reduced(arrays, xp.stack([xp.sum(apart * apart)]), reduce)
    return count, mean, squares / max(count, 1.0)


def reduced(arrays: Arrays, sums: Array, reduce: Reduce | None) -> list[float]:
    """Sums as Python numbers, over all ranks."""
    if reduce is not None:
        ours = arrays.give(sums)
        result = reduce(ours)
        sums = ours if result is None else result  # torch.distributed.all_reduce works in place
    return [float(value) for value in arrays.host(sums)]


# -- discounted sums ---------------------------------------------------------------------------------------------------


def discounted(arrays: Arrays, inputs: list[Array], gamma: float, lam: float, gap: Gap) -> tuple[Array, ...]:
    """Discounted sums of [rewards, mask], or GAE and returns of [rewards, values, mask], in blocks of rows."""

    def block(reward: Array, *rest: Array) -> tuple[Array, ...]:
        value = rest[0] if len(rest) == 2 else None
        return _advance(arrays, reward, value, rest[-1], gamma, gamma * lam, gap)

    try:
        return arrays.by_rows(block, inputs, inputs[0].shape[1])
    except FloatingPointError:
        raise _not_finite(arrays, inputs, gap) from None


def _not_finite(arrays: Arrays, inputs: list[Array], gap: Gap) -> DataError:
    counted = arrays.host(inputs[-1]) | (gap == "through")
    for name, array in zip(("reward", "value"), inputs[:-1]):
        host = arrays.host(array)
        bad = np.argwhere(counted & ~np.isfinite(host))
        if len(bad):
            row, token = map(int, bad[0])
            return DataError(f"the {name} of row {row}, token {token} is {host[row, token]}; give it a number", row=row)
    return DataError("rewards and values are too large: their sum is not finite")


BLOCK = 32
"""Steps of a block: longer blocks cost more inside, shorter ones more between blocks."""


def _advance(
    arrays: Arrays, rewards: Array, values: Array | None, mask: Array, gamma: float, decay: float, gap: Gap
) -> tuple[Array, ...]:
    """`A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1}` of a few rows, and `A + V` if there are values; 0 where the
    mask is 0. Raises FloatingPointError if a number is not finite."""
    xp = arrays.xp
    rows, steps = mask.shape
    lengths = xp.sum(mask, axis=1)
    columns = arrays.put(np.arange(-(-steps // BLOCK) * BLOCK, dtype=np.int32))
    front = columns[None, :] < lengths[:, None]
    has_gaps = bool(xp.any(front[:, :steps] != mask))
    squeezed = has_gaps and gap == "skip"
    counted = _through_gaps(arrays, mask) if has_gaps and gap == "through" else mask
    whole = bool(xp.all(counted))
    padding = np.zeros((rows, columns.shape[0] - steps), np.float32)

    def laid_out(array: Array) -> Array:
        if squeezed:  # tokens that count, side by side
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
        terms = terms + 0.0  # a copy: the sums may overwrite it, and it may be the caller's array
    else:
        terms = arrays.add_at(terms - value, (slice(None), slice(None, -1)), value[:, 1:] * gamma)
    sums = _suffix_sums(arrays, terms, decay)
    if not bool(xp.isfinite(xp.sum(sums[:, 0]))):  # the first sum of a row has everything in it
        raise FloatingPointError
    return (back(sums),) if value is None else (back(sums), back(sums + value))


def _suffix_sums(arrays: Arrays, steps: Array, decay: float) -> Array:
    """`S_t = x_t + decay S_{t+1}` for rows whose length is a multiple of `BLOCK`; may overwrite `steps`."""
    rows, length = steps.shape
    count = length // BLOCK
    inner = arrays.like(arrays.put(_powers(decay, BLOCK)), steps)
    blocks = steps.reshape(rows, count, BLOCK)
    if count > 1:
        between = arrays.like(arrays.put(_powers(decay**BLOCK, count)), steps)
        sums = arrays.product(arrays.product(blocks, inner[:, 0]), between)
        blocks = arrays.add_at(blocks, (slice(None), slice(None, -1), -1), sums[:, 1:] * decay)
    return arrays.product(blocks, inner).reshape(rows, length)


def _through_gaps(arrays: Arrays, mask: Array) -> Array:
    """Mask with its gaps filled: all tokens up to the last that counts."""
    ones = mask * 1
    return arrays.xp.sum(ones, axis=1)[:, None] - arrays.xp.cumsum(ones, axis=1) + ones > 0


@lru_cache(maxsize=64)
def _powers(base: float, size: int) -> npt.NDArray[np.float64]:
    """`base ** (k - j)` where k >= j: a row times this is its discounted sums from each element on."""
    exponents = np.subtract.outer(np.arange(size), np.arange(size))
    return np.where(exponents >= 0, np.float64(base) ** np.maximum(exponents, 0), 0.0)
