"""Whitening: mean 0 and variance 1 over the tokens that count, of this rank or of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import token_mask
from penstock.rl.advantages.presets import Preset, find_preset
from penstock.rl.arrays import Array, Arrays, arrays_of

__all__ = ["Reduce", "moments", "reduced", "whiten"]

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
