"""Rows in groups: who belongs to whom, and sums over each group without a loop over groups."""

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
from penstock.rl.advantages.presets import Lone, Preset, find_preset
from penstock.rl.arrays import Array, Arrays, arrays_of

__all__ = ["Deviations", "Groups", "Reduce", "deviations", "lone_rows", "moments", "reduced", "whiten"]


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each row, numbered in order of appearance; `size` if they are consecutive and equal."""

    arrays: Arrays
    index: npt.NDArray[np.int64]
    """On the host."""
    place: Array
    """The same on the device, or None where `size` will do."""
    count: int
    size: int | None
    names: Any

    @classmethod
    def of(cls, arrays: Arrays, groups: Any, rows: int) -> Groups:
        """Ids of any kind, one a row; or a number, the size of groups of consecutive rows."""
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
        """Whether all are of one size."""
        if self.size is not None:
            return True
        sizes = self.sizes()
        return bool((sizes == sizes[0]).all())

    def sizes(self) -> npt.NDArray[np.int64]:
        """How many rows each has."""
        return np.bincount(self.index, minlength=self.count) if self.size is None else np.full(self.count, self.size)

    def sum(self, values: Array) -> Array:
        """One number a group."""
        if self.size is not None:
            return self.arrays.row_sums(values.reshape(self.count, self.size))
        return self.arrays.segment_sum(values, self.place, self.count)

    def combine(self, operation: Callable[[Array, Array], Array], values: Array, of_groups: Array) -> Array:
        """Each row's value with the number of its group."""
        if self.size is not None:
            return operation(values.reshape(self.count, self.size), of_groups[:, None]).reshape(-1)
        return operation(values, of_groups[self.place])

    def spread(self, of_groups: Array) -> Array:
        """The number of its group, for each row."""
        if self.size is not None:
            shape = (self.count, self.size)
            return self.arrays.xp.broadcast_to(of_groups[:, None], shape).reshape(-1)
        return of_groups[self.place]

    def first(self, values: Array) -> Array:
        """Of each group, the value of its first row."""
        if self.size is not None:
            return values.reshape(self.count, self.size)[:, 0]
        rows = np.empty(self.count, np.int64)
        rows[self.index[::-1]] = np.arange(len(self.index))[::-1]  # the last that is written stays
        return values[self.arrays.put(rows)]

    def called(self, row: int) -> str:
        """The id of a row's group, for messages."""
        name = self.names[int(self.index[row])]
        return repr(name.as_py() if isinstance(name, pa.Scalar) else name)


@dataclass(frozen=True, slots=True)
class Deviations:
    """How far each reward is from the mean of its group."""

    values: Array
    """One a row; 0 for rows that are left out."""
    counts: Array
    """One a group: its rows that are not left out."""
    groups: Groups

    def std(self, ddof: int) -> Array:
        """The standard deviation of each group; 0 of one too small to have any."""
        xp = self.groups.arrays.xp
        return xp.sqrt(self.groups.sum(self.values * self.values) / xp.clip(self.counts - ddof, 1, None))


def deviations(rewards: Array, groups: Groups, valid: Array | None, *, weights: Array | None = None) -> Deviations:
    """From the mean, weighted if weights are given.

    Everything is relative to the first reward of the group, which makes equal rewards exactly 0 apart in any precision:
    a rounding error of 1e-8 divided by itself plus an epsilon of 1e-9 would be an advantage of 0.9.
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


def lone_rows(
    advantages: Array,
    rewards: Array,
    deviations: Deviations,
    lone: Lone,
    *,
    valid: Array | None = None,
    of_preset: str | None = None,
) -> Array:
    """The rule for groups of one applied: `rewards` is what such a row gets where the rule is its reward.

    `of_preset` is the preset whose rule it is, if nobody asked for it: that all groups are of one is then logged.
    """
    groups = deviations.groups
    xp = groups.arrays.xp
    alone_in = deviations.counts == 1
    if not bool(xp.any(alone_in)):
        return advantages
    alone = groups.spread(alone_in) if valid is None else groups.spread(alone_in) & valid
    if lone == "raise":
        rows = np.flatnonzero(groups.arrays.host(alone))
        raise DataError(
            f"row {rows[0]} is alone in group {groups.called(int(rows[0]))}{more(len(rows) - 1)} and has nothing to be "
            f"compared with; leave it out, or pass lone='zero', 'reward' or 'nan'",
            row=int(rows[0]),
        )
    if of_preset is not None and groups.count == len(groups.index) > 1:
        _tell_all_alone(of_preset, lone)
    value = {"zero": 0.0, "reward": rewards, "nan": float("nan")}[lone]
    return xp.where(alone, value, advantages)


@lru_cache(maxsize=32)
def _tell_all_alone(preset: str, lone: Lone) -> None:
    """Once in a process for each preset."""
    logger.warning(
        "every row is alone in its group, and preset=%r then gives %s as advantage; give the rows of one prompt the "
        "same group, or pass lone=%r to say that it is meant",
        preset,
        {"zero": "0", "reward": "the reward", "nan": "NaN"}.get(lone, lone),
        lone,
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
    """The size of the groups if they are consecutive and equal: then sums need no index."""
    size, rest = divmod(len(index), max(1, count))
    if rest or not np.array_equal(index.reshape(count, size)[:, 0], np.arange(count)):
        return None
    blocks = index.reshape(count, size)
    return size if bool((blocks == blocks[:, :1]).all()) else None


Reduce: TypeAlias = Callable[[Array], Any]
"""Adds a small array up over ranks, and gives the sum back or leaves it in the array."""


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

    `ddof=1` is the unbiased variance, `ddof=0` the biased one (OpenRLHF). `floor="clamp"` takes epsilon as the least
    variance instead of adding it. `shift_mean=False` adds the mean again, as is done with rewards.
    `reduce` makes mean and variance those of all ranks: it is called twice, on every rank, with an array of two and of
    one number, and adds them up; `torch.distributed.all_reduce` will do. A rank without rows takes part.
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
        raise DataError("values with mask 1 are not all finite numbers; nothing can be whitened by them")
    variance *= count / (count - ddof)
    deviation = (max(variance, epsilon) if floor == "clamp" else variance + epsilon) ** 0.5
    whitened = (wide - mean) * (1 / deviation) + (0.0 if shift_mean else mean)
    return arrays.give(arrays.like(xp.where(counted, whitened, 0.0), given))


def moments(arrays: Arrays, values: Array, weights: Array, reduce: Reduce | None) -> tuple[float, float, float]:
    """How many, their mean and their biased variance; `weights` are 1 or 0.

    Deviations are squared after the mean of all ranks is known: squares of the values themselves would cancel.
    """
    xp = arrays.xp
    values = xp.where(weights > 0, values, 0.0)
    count, total = reduced(arrays, xp.stack([xp.sum(weights), xp.sum(values)]), reduce)
    mean = total / max(count, 1.0)
    apart = (values - mean) * weights
    (squares,) = reduced(arrays, xp.stack([xp.sum(apart * apart)]), reduce)
    return count, mean, squares / max(count, 1.0)


def reduced(arrays: Arrays, sums: Array, reduce: Reduce | None) -> list[float]:
    """A few sums as numbers, added up over ranks."""
    if reduce is not None:
        ours = arrays.give(sums)
        result = reduce(ours)
        sums = ours if result is None else result  # torch.distributed.all_reduce works in place
    return [float(value) for value in arrays.host(sums)]
