"""Statistics that estimators share: group means and deviations, whitening, discounted sums. No loop over groups."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batching.backends.base import Array
from penstock.batching.backends.operations import ArrayOperations, Operation, operations_of
from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import blank_rows, more, token_mask
from penstock.rl.advantages.presets import Empty, Gap, Preset, SingleMemberGroup, find_preset

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Groups:
    """Group of each row. Ids in main memory are numbered there; ids on a device are numbered on it, without a wait."""

    arrays: ArrayOperations
    rows: int
    count: int
    """Number of groups; for ids on a device the number of rows, so the last groups may be empty."""
    size: int | None = None
    """Size of the groups if they are consecutive and equal: then sums need no index."""
    index: npt.NDArray[np.int64] | None = None
    """Group number of each row, in main memory; None if `size` says it, or if it is known on the device only."""
    place: Array = None
    """The same on the device; None if `size` is known."""
    first_rows: Array = None
    """First row of each group, on the device; None if `size` is known."""
    names: Any = None
    """Ids of the groups, or of the rows if they are on a device."""
    sizes: npt.NDArray[np.float64] | None = None
    """Rows of each group, if `index` is known and `size` is not."""
    counts: Array = None
    """The same on the device."""

    @classmethod
    def of(cls, arrays: ArrayOperations, groups: Any, rows: int) -> Groups:
        """Groups of ids, one a row; or of a number, the size of groups of consecutive rows."""
        if isinstance(groups, (int, np.integer)) and not isinstance(groups, bool):
            size = int(groups)
            if size < 1 or rows % size:
                raise ConfigError(f"groups={size} must be a positive number that divides the {rows} rows; or give ids")
            return cls(arrays, rows, rows // size, size)
        if _on_device(arrays, groups):
            return cls._of_device(arrays, groups, rows)
        index, names, size_or_none = arrays.untraced(_numbered)(groups, rows)
        if size_or_none:
            return cls(arrays, rows, len(names), size_or_none, index, names=names)
        first, sizes = arrays.untraced(_first_rows)(index, len(names))
        place, first_rows, counts = arrays.untraced(arrays.put_all)(index, first, sizes)
        return cls(arrays, rows, len(names), None, index, place, first_rows, names, sizes, counts)

    @classmethod
    def _of_device(cls, arrays: ArrayOperations, ids: Any, rows: int) -> Groups:
        if len(ids.shape) != 1:
            raise DataError(f"groups must be one id a row, got shape {tuple(ids.shape)}")
        _check_count(ids.shape[0], rows)
        order = arrays.stable_order(ids)
        ordered = ids[order]
        starts = arrays.xp.concatenate([arrays.true((1,)), ordered[1:] != ordered[:-1]])
        numbers = arrays.xp.cumsum(starts * 1, 0) - 1
        nowhere = arrays.xp.where(starts, numbers, rows)
        return cls(
            arrays,
            rows,
            rows,
            place=arrays.scatter(numbers, order, rows),
            first_rows=arrays.scatter(order, nowhere, rows + 1)[:rows],
            names=ids,
        )

    @property
    def known(self) -> bool:
        """True if the groups are known without the device."""
        return self.size is not None or self.index is not None

    @property
    def single_rows(self) -> npt.NDArray[np.bool_] | None:
        """True for rows that are alone in their group; None if there is none. Of `known` groups."""
        if self.index is None:
            return np.ones(self.rows, bool) if self.size == 1 else None
        if self.size is not None:
            return np.ones(self.rows, bool) if self.size == 1 else None
        assert self.sizes is not None
        single = self.sizes == 1
        return single[self.index] if single.any() else None

    def whole_if_unequal(self) -> Groups:
        """These groups if they have the same size, else all rows as one group."""
        if self.size is not None:
            return self
        if self.sizes is not None:
            return self if bool((self.sizes == self.sizes[0]).all()) else Groups(self.arrays, self.rows, 1, self.rows)
        xp = self.arrays.xp
        of_rows = self.spread(self.sum(self.arrays.wide(xp.ones_like(self.place))))
        equal = xp.all(of_rows == of_rows[0])
        place, first = xp.where(equal, self.place, 0), xp.where(equal, self.first_rows, 0)
        return replace(self, place=place, first_rows=first)

    def sum(self, values: Array) -> Array:
        """Sum of each group."""
        if self.size is not None:
            rows = values.reshape(self.count, self.size)
            # einsum is much faster for short rows
            return np.einsum("ij->i", rows) if self.arrays.on_host else self.arrays.xp.sum(rows, axis=1)
        return self.arrays.segment_sum(values, self.place, self.count)

    def combine(self, operation: Operation, values: Array, of_groups: Array | float, like: Array = None) -> Array:
        """Operation on each row's value and the number of its group, or of all groups; in the type of `like`."""
        if like is not None:
            operation = partial(self.arrays.into, operation, like=like)
        if isinstance(of_groups, (int, float)):
            return operation(values, of_groups)
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
        return values[self.first_rows]

    def numbers(self) -> Array:
        """Group number of each row, on the device."""
        return self.place if self.size is None else self.arrays.count_up(self.rows) // self.size

    def called(self, row: int) -> str:
        """Id of a row's group, for messages."""
        if self.index is None:
            return repr(row // self.size if self.size is not None else self.arrays.host(self.names)[row].item())
        name = self.names[int(self.index[row])]
        return repr(name.as_py() if isinstance(name, pa.Scalar) else name)


@dataclass(frozen=True, slots=True)
class Deviations:
    """Deviation of each reward from the mean of its group."""

    values: Array
    """One a row; 0 for rows that do not count."""
    counts: Array | float
    """Rows of each group that count; a number if all groups have the same."""
    groups: Groups
    ddof: int
    row_std: Array | None = None

    def std(self) -> Array:
        """Standard deviation of each group; 0 for a group of one."""
        if self.row_std is not None:
            return self.row_std
        arrays = self.groups.arrays
        squares = self.groups.sum(self.values * self.values)
        return arrays.xp.sqrt(squares / at_least(arrays, self.counts - self.ddof, 1))

    def nan_if_not_finite(self) -> Array:
        """NaN for groups with a reward that is not finite, 0 for others."""
        return (self.groups.sum(self.values) if self.row_std is None else self.row_std) * 0.0


def deviations(
    rewards: Array, groups: Groups, valid: Array | None, *, ddof: int, weights: Array | None = None
) -> Deviations:
    """Deviations from the group means, which `weights` weigh.

    All sums are relative to the first reward of the group, so equal rewards deviate by exactly 0 in any precision: a
    rounding error of 1e-8, divided by itself plus an epsilon of 1e-9, would be an advantage of 0.9.
    """
    arrays, size = groups.arrays, groups.size
    xp = arrays.xp
    if valid is None and weights is None and size is not None and size > max(ddof, 1):
        known = arrays.row_std_mean(rewards.reshape(groups.count, size), ddof)
        if known is not None:
            apart = groups.combine(operator.sub, rewards, known[1])
            return Deviations(apart, float(size), groups, ddof, known[0])
    kept = rewards if valid is None else xp.where(valid, rewards, 0.0)
    apart = groups.combine(operator.sub, kept, groups.first(kept))
    by, counts = weights, _counts(groups, apart)
    if valid is not None:
        ones = arrays.like(valid, apart)
        counts = groups.sum(ones)
        by = ones if weights is None else ones * weights
    total = counts if weights is None else groups.sum(by)
    if weights is None and not isinstance(total, float):
        total = at_least(arrays, total, 1.0)  # groups may be empty
    elif valid is not None or not groups.known:
        total = xp.where(total == 0, 1.0, total)
    mean = groups.sum(apart if by is None else apart * by) / total
    apart = groups.combine(operator.sub, apart, mean)
    return Deviations(apart if valid is None else xp.where(valid, apart, 0.0), counts, groups, ddof)


def _counts(groups: Groups, like: Array) -> Array | float:
    if groups.size is not None:
        return float(groups.size)
    if groups.sizes is not None:
        return groups.arrays.like(groups.counts, like)
    return groups.sum(groups.arrays.xp.ones_like(like))


def at_least(arrays: ArrayOperations, value: Array | float, low: float) -> Array | float:
    """The larger of a number, or of each element of an array, and `low`."""
    return max(value, float(low)) if isinstance(value, float) else arrays.xp.clip(value, low, None)


def single_member_rows(
    advantages: Array,
    rewards: Callable[[], Array],
    deviations: Deviations,
    rule: SingleMemberGroup,
    *,
    valid: Array | None = None,
    of_preset: str | None = None,
) -> Array:
    """Advantages with the rule for groups of one applied; `rewards()` is what the rule "reward" gives to such rows.

    Where the sizes of groups are known on a device only, rows that the rule "raise" forbids become NaN, unless values
    are checked. `of_preset` names the preset that the rule comes from, if the caller chose none: a warning is logged
    when all groups have one member.
    """
    groups, counts = deviations.groups, deviations.counts
    arrays, decided = groups.arrays, groups.known and valid is None
    xp = arrays.xp
    single = groups.single_rows if decided else None
    if decided and single is None:
        return advantages
    alone = arrays.true((groups.rows,)) if isinstance(counts, float) else groups.spread(counts == 1)
    alone = alone if valid is None else alone & valid
    if decided or arrays.check:
        rows = np.flatnonzero(arrays.host(alone) if single is None else single)
        if not len(rows):
            return advantages
        if rule == "raise":
            raise DataError(
                f"row {rows[0]} is alone in group {groups.called(int(rows[0]))}{more(len(rows) - 1)} and cannot be "
                "compared; leave it out, or pass single_member_group='zero', 'reward' or 'nan'",
                row=int(rows[0]),
            )
        if of_preset is not None and groups.known and groups.count == groups.rows > 1:
            _log_all_single(of_preset, rule)
    value = rewards() if rule == "reward" else 0.0 if rule == "zero" else float("nan")
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


def _on_device(arrays: ArrayOperations, groups: Any) -> bool:
    """True for ids that could not be read without waiting for a device."""
    if arrays.on_host or isinstance(groups, (list, tuple, np.ndarray, pa.Array, pa.ChunkedArray)):
        return False
    own = operations_of(groups)
    return not own.check and own.name == arrays.name


def _check_count(ids: int, rows: int) -> None:
    if ids != rows:
        raise DataError(f"groups has {ids} ids for {rows} rewards; give one for each row")


def _numbered(groups: Any, rows: int) -> tuple[npt.NDArray[np.int64], Any, int | None]:
    """Number of the group of each row, the ids by number, and the size of groups that are consecutive and equal."""
    ids = _ids(groups)
    _check_count(len(ids), rows)
    if ids.null_count:
        row = int(np.argmax(np.asarray(ids.is_null())))
        raise DataError(f"row {row} has no group id; give one for each row", row=row)
    encoded = ids.dictionary_encode()
    index = np.array(encoded.indices, np.int64)  # torch.compile wants an array that can be written to
    return index, encoded.dictionary, _size(index, len(encoded.dictionary))


def _first_rows(index: npt.NDArray[np.int64], count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """First row of each group, and the number of its rows."""
    first = np.empty(count, np.int64)
    first[index[::-1]] = np.arange(len(index))[::-1]  # the last that is written stays
    return first, np.bincount(index, minlength=count).astype(np.float64)


def _ids(groups: Any) -> Any:
    if not isinstance(groups, (list, tuple, np.ndarray, pa.Array, pa.ChunkedArray)):
        groups = operations_of(groups).host(groups)
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
    check: bool = False,
) -> Array:
    """(x - mean) / sqrt(variance + epsilon) over the values with mask 1; 0 elsewhere.

    `ddof=1` is the unbiased variance, `ddof=0` the biased one (OpenRLHF). `floor="clamp"` makes epsilon the
    lower bound of the variance instead of adding it. `shift_mean=False` adds the mean again, as usual for rewards.
    `reduce` makes mean and variance those of all ranks: every rank calls it twice, with arrays of two numbers and of
    one, to be summed over ranks, as `torch.distributed.all_reduce` does. A rank without rows takes part.
    """
    rules = find_preset(preset)
    rules = replace(
        rules,
        whiten_ddof=rules.whiten_ddof if ddof is None else ddof,
        whiten_epsilon=rules.whiten_epsilon if epsilon is None else epsilon,
        whiten_floor=rules.whiten_floor if floor is None else floor,
    )
    if rules.whiten_floor not in ("add", "clamp"):
        raise ConfigError(f"floor must be 'add' or 'clamp', got {floor!r}")
    arrays = operations_of(values, mask, check=check)
    given = arrays.floats(values)
    counted = token_mask(arrays, mask, tuple(given.shape), "zero")
    return arrays.give(whitened(arrays, given, counted, rules, reduce, shift_mean=shift_mean))


def whitened(
    arrays: ArrayOperations,
    given: Array,
    counted: Array,
    rules: Preset,
    reduce: Reduce | None,
    *,
    shift_mean: bool = True,
    blank: Array | float = 0.0,
) -> Array:
    """Values with mask 1 whitened; `blank` elsewhere. Without two values, or with one that is not finite: an error, or
    NaN if values are not checked."""
    xp, ddof = arrays.xp, rules.whiten_ddof
    wide = arrays.wide(arrays.kept(counted, given))
    count, mean, apart, squares = moments(arrays, wide, counted, reduce)
    if arrays.check:
        seen = float(count)
        if seen <= ddof:
            raise DataError(f"whitening with ddof={ddof} needs more than {ddof} values with mask 1, got {seen:g}")
        if not float(squares) < float("inf"):
            raise DataError("values with mask 1 must be finite to be whitened; at least one is NaN or infinite")
    free = count - ddof
    if ddof > 1 and not isinstance(free, float):  # of one value the sum of squares is 0, and 0 / 0 is NaN
        free = xp.where(free > 0, free, float("nan"))
    variance, floor = squares / free, rules.whiten_epsilon
    variance = at_least(arrays, variance, floor) if rules.whiten_floor == "clamp" else variance + floor
    if shift_mean:
        found = arrays.into(operator.mul, apart, variance**-0.5, given)
    else:
        found = arrays.into(operator.add, apart * variance**-0.5, mean, given)
    return arrays.kept(counted, found, blank)


Number: TypeAlias = Array | float
"""Python number, or an array without dimensions on a device."""


def moments(
    arrays: ArrayOperations, values: Array, counted: Array, reduce: Reduce | None
) -> tuple[Number, Number, Array, Number]:
    """Count and mean of the values with mask 1, deviations from it, and the sum of their squares; the others are 0.

    The mean of all ranks comes first and deviations are squared then: squares of the values themselves would cancel.
    """
    count, total = reduced(arrays, [arrays.count_true(counted, values), arrays.xp.sum(values)], reduce)
    mean = total / at_least(arrays, count, 1.0)
    apart = arrays.kept(counted, values - mean)
    (squares,) = reduced(arrays, [arrays.sum_of_squares(apart)], reduce)
    return count, mean, apart, squares


def reduced(arrays: ArrayOperations, sums: list[Array], reduce: Reduce | None) -> list[Number]:
    """Sums over all ranks: Python numbers, or arrays without dimensions on a device, which is not waited for."""
    if reduce is not None:
        ours = arrays.give(arrays.xp.stack(sums))
        result = reduce(ours)
        found = ours if result is None else result  # torch.distributed.all_reduce works in place
        sums = [*(arrays.host(found) if arrays.on_host else found)]
    return [float(value) for value in sums] if arrays.on_host else sums


# -- discounted sums ---------------------------------------------------------------------------------------------------


BLOCK = 32
"""Steps of a block: longer blocks cost more inside, shorter ones more between blocks."""


def discounted(
    arrays: ArrayOperations, inputs: list[Array], gamma: float, lam: float, gap: Gap, empty: Empty
) -> tuple[Array, ...]:
    """Discounted sums of [rewards, mask], or GAE and returns of [rewards, values, mask], in blocks of rows.

    `A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}`, and `A + V` if there are values; 0 where the mask is 0. A
    number that is not finite is an error; if values are not checked, its row has NaN, and so has a row without tokens
    where `empty` forbids it.
    """

    def block(reward: Array, *rest: Array) -> tuple[Array, ...]:
        value, mask = rest[0] if len(rest) == 2 else None, rest[-1]
        if arrays.on_host:
            return _sums_on_host(arrays, reward, value, mask, gamma, gamma * lam, gap)
        blank = blank_rows(arrays, mask, empty)
        found = _sums_on_device(arrays, reward, value, mask, blank, gamma, gamma * lam, gap)
        if arrays.check and not bool(arrays.xp.isfinite(arrays.xp.sum(found[0]))):
            raise FloatingPointError
        return found

    try:
        return arrays.by_rows(block, inputs, inputs[0].shape[1])
    except FloatingPointError:
        raise _not_finite(arrays, inputs, gap) from None


def _not_finite(arrays: ArrayOperations, inputs: list[Array], gap: Gap) -> DataError:
    counted = arrays.host(inputs[-1]) | (gap == "through")
    for name, array in zip(("reward", "value"), inputs[:-1]):
        host = arrays.host(array)
        bad = np.argwhere(counted & ~np.isfinite(host))
        if len(bad):
            row, token = map(int, bad[0])
            return DataError(f"the {name} of row {row}, token {token} is {host[row, token]}; give it a number", row=row)
    return DataError("rewards and values are too large: their sum is not finite")


def _sums_on_host(
    arrays: ArrayOperations,
    rewards: npt.NDArray[Any],
    values: npt.NDArray[Any] | None,
    mask: npt.NDArray[np.bool_],
    gamma: float,
    decay: float,
    gap: Gap,
) -> tuple[Array, ...]:
    """Sums of a few rows of NumPy arrays. Masks without gaps, which are known by looking, take a shorter way. Raises
    FloatingPointError if a number is not finite."""
    steps = mask.shape[1]
    lengths = np.sum(mask, axis=1)
    front = np.arange(-(-steps // BLOCK) * BLOCK, dtype=np.int32)[None, :] < lengths[:, None]
    has_gaps = bool(np.any(front[:, :steps] != mask))
    squeezed = has_gaps and gap == "skip"
    counted = _through_gaps(arrays, mask) if has_gaps and gap == "through" else mask
    whole = bool(np.all(counted))

    def laid_out(array: npt.NDArray[Any]) -> Array:
        if squeezed:  # tokens that count, side by side
            return _placed(array[mask].astype(np.float64), front)
        return _padded(arrays, arrays.wide(array if whole else np.where(counted, array, 0.0)))

    def back(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if squeezed:
            return _placed(array[front], mask)
        return np.where(mask, array[:, :steps], 0.0) if has_gaps else array[:, :steps]

    value, reward = None if values is None else laid_out(values), laid_out(rewards)
    if value is None:
        reward = reward + 0.0  # a copy: it is overwritten, and it may be the caller's array
    sums = _decayed_sums(arrays, reward, value, gamma, decay)
    if not bool(np.isfinite(np.sum(sums[:, 0]))):  # the first sum of a row has everything in it
        raise FloatingPointError
    return (back(sums),) if value is None else (back(sums), back(sums + value))


def _sums_on_device(
    arrays: ArrayOperations,
    rewards: Array,
    values: Array | None,
    mask: Array,
    blank: Array | float,
    gamma: float,
    decay: float,
    gap: Gap,
) -> tuple[Array, ...]:
    """The same for arrays that cannot be looked at: every mask may have gaps.

    `blank`, which is 0 in every row with a token, is what tokens with mask 0 get.
    """
    rows, steps = mask.shape
    counted = _through_gaps(arrays, mask) if gap == "through" else mask
    if decay == 1:  # values cancel between a token and the next, whatever is between them
        sums = arrays.suffix_sums(arrays.kept(counted, rewards, blank))
        returns = arrays.kept(mask, arrays.like(sums, rewards), blank)
        if values is None:
            return (returns,)
        return arrays.kept(mask, arrays.into(operator.sub, sums, values, rewards), blank), returns
    if gap != "skip":
        reward = _padded(arrays, arrays.wide(arrays.kept(counted, rewards, blank)))
        value = None if values is None else _padded(arrays, arrays.kept(counted, values, blank))
        sums = _decayed_sums(arrays, reward, value, gamma, decay)[:, :steps]
    else:  # tokens that count, side by side after an unused place; the others are put in a place of no row
        width = -(-(steps + 1) // BLOCK) * BLOCK
        starts = arrays.count_up(rows + 1, width)
        seen = arrays.running_counts(mask) + starts[:-1, None]
        place = arrays.xp.where(mask, seen, starts[-1]).reshape(-1)

        def packed(array: Array) -> Array:
            return arrays.scatter(array.reshape(-1), place, rows * width + 1)[:-1].reshape(rows, width)

        value = None if values is None else packed(values)
        sums = _decayed_sums(arrays, packed(arrays.wide(rewards)), value, gamma, decay).reshape(-1)[seen]
    advantages = arrays.kept(mask, arrays.like(sums, rewards), blank)
    if values is None:
        return (advantages,)
    return advantages, arrays.kept(mask, arrays.into(operator.add, sums, values, rewards), blank)


def _decayed_sums(arrays: ArrayOperations, rewards: Array, values: Array | None, gamma: float, decay: float) -> Array:
    """`A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1}` of rows whose length is a multiple of `BLOCK`.

    `rewards` are in the widest floats, and may be overwritten.
    """
    terms = rewards
    if values is not None:
        terms = arrays.add_at(rewards - values, (slice(None), slice(None, -1)), values[:, 1:], gamma)
    rows, length = terms.shape
    count = length // BLOCK
    inner = arrays.powers(decay, BLOCK, terms)
    blocks = terms.reshape(rows, count, BLOCK)
    if count > 1:
        between = arrays.powers(decay**BLOCK, count, terms)
        sums = arrays.product(arrays.product(blocks, inner[:, 0]), between)
        blocks = arrays.add_at(blocks, (slice(None), slice(None, -1), -1), sums[:, 1:], decay)
    return arrays.product(blocks, inner).reshape(rows, length)


def _padded(arrays: ArrayOperations, array: Array) -> Array:
    """Rows with zeros after them, up to a multiple of `BLOCK`."""
    rows, steps = array.shape
    missing = -steps % BLOCK
    if not missing:
        return array
    return arrays.xp.concatenate([array, arrays.zeros(rows * missing, array).reshape(rows, missing)], axis=1)


class PaddedRows:
    """Rows of flat tokens, from `bounds[i]` to `bounds[i + 1]`, as padded rows and back."""

    def __init__(self, arrays: ArrayOperations, bounds: npt.NDArray[np.int64]) -> None:
        lengths = np.diff(bounds)
        self.arrays, self.shape = arrays, (len(lengths), max(1, int(lengths.max(initial=1))))
        self._part, self._tokens = slice(int(bounds[0]), int(bounds[-1])), int(bounds[-1] - bounds[0])
        columns, sizes = arrays.count_up(self.shape[1]), arrays.put(lengths)
        self._front = columns < sizes[:, None]
        if not arrays.on_host:
            places = columns + arrays.put(bounds[:-1] - bounds[0])[:, None]
            self._places = arrays.xp.where(self._front, places, self._tokens)

    def padded(self, flat: Array) -> Array:
        """Flat tokens as padded rows, with zeros after them."""
        part, xp = flat[self._part], self.arrays.xp
        if self.arrays.on_host:
            return _placed(part, self._front)
        return xp.concatenate([part, self.arrays.zeros(1, part)])[self._places]

    def flat(self, padded: Array) -> Array:
        """Tokens of padded rows end to end."""
        if self.arrays.on_host:
            return padded[self._front]
        return self.arrays.scatter(padded.reshape(-1), self._places.reshape(-1), self._tokens + 1)[:-1]


def _placed(flat: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    whole = np.zeros(mask.shape, flat.dtype)
    whole[mask] = flat
    return whole


def _through_gaps(arrays: ArrayOperations, mask: Array) -> Array:
    """Mask with its gaps filled: all tokens up to the last that counts."""
    seen = arrays.running_counts(mask)
    return mask | (seen < seen[:, -1:])
