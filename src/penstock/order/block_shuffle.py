"""Shuffle with locality: blocks of neighbours in random order, and an exact shuffle within windows of several blocks.

    loader = PretrainDataLoader("s3://corpora/web.store", batch_size=16, shuffle="blocks")

Every part of a store is then needed once in an epoch, for the time of one window, so that a cache of a few windows
fetches each byte about once. The default shuffle, by contrast, draws every sample from anywhere in the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import index
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.permutation import Permutation, derive_key

Ints = npt.NDArray[np.int64]
_LEAST_BLOCKS = 32
"""An epoch has at least so many blocks, or one a sample."""
_LEAST_WINDOWS = 16
_LOOKED_AT = 16
"""Numbers of a range that stand for all of them when its next use is estimated."""


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """Sizes of a shuffle by blocks, in tokens. `shuffle="blocks"` means the default ones.

    A larger window mixes more of the data, and needs a cache that holds two of them. A small corpus has smaller ones:
    a block is at most a 32nd of it, a window a 16th.
    """

    block_tokens: int = 1 << 22
    window_tokens: int = 1 << 28

    def __post_init__(self) -> None:
        for name in ("block_tokens", "window_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of a BlockShuffle must be an integer of at least 1, got {value!r}")
        if self.window_tokens < self.block_tokens:
            raise ConfigError(
                f"a window consists of whole blocks: window_tokens={self.window_tokens} must be at least "
                f"block_tokens={self.block_tokens}"
            )

    def permutation(self, size: int, tokens: int, key: int) -> BlockPermutation:
        """Permutation of `size` samples that have so many tokens together."""
        each = max(tokens / size, 1e-9)
        block = max(1, min(round(self.block_tokens / each), size // _LEAST_BLOCKS))
        window = min(round(self.window_tokens / each), size // _LEAST_WINDOWS)
        return BlockPermutation(size, key, block=block, window=max(1, window // block))

    def window_share(self, tokens: int) -> float:
        """Share of so many tokens that a window is."""
        return min(self.window_tokens / max(tokens, 1), 1 / _LEAST_WINDOWS)


def described(shuffle: Shuffle) -> bool | str:
    """Shuffle as plans and states name it."""
    if isinstance(shuffle, bool):
        return shuffle
    return f"blocks {_short(shuffle.block_tokens)}/{_short(shuffle.window_tokens)}"


Shuffle: TypeAlias = bool | BlockShuffle
"""False: rows in order; True: any sample may come at any time; or with locality."""


def shuffle_of(given: object) -> Shuffle:
    """Value of the option `shuffle`: True, False, "blocks" or a BlockShuffle."""
    if given == "blocks":
        return BlockShuffle()
    if isinstance(given, (bool, BlockShuffle)):
        return given
    raise ConfigError(f'shuffle must be True, False, "blocks" or BlockShuffle(...), got {given!r}')


@dataclass(frozen=True)
class BlockPermutation(Permutation):
    """Keyed permutation of [0, size) that keeps neighbours near each other; a drop-in for `Permutation`.

    Blocks of `block` numbers (the last may be shorter) come in random order; within windows of `window` blocks of that
    order, all numbers are shuffled. Arithmetic in both directions, as everywhere; the cost is by windows touched.
    """

    block: int = 1
    window: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if index(self.block) < 1 or index(self.window) < 1:
            raise ConfigError(f"block and window must be at least 1, got {self.block} and {self.window}")

    def first_indices(self, values: npt.ArrayLike) -> Ints:
        """First index of the window in which each value comes; cheaper than `inverse`."""
        given = self._checked(values, "value").astype(np.int64)
        return self._window_starts(self._slots(given) // self.window)

    def _map(self, given: npt.ArrayLike, what: str, *, forwards: bool) -> int | Ints:
        places = self._checked(given, what)
        numbers = places.ravel().astype(np.int64)
        if not len(numbers):
            return numbers.reshape(places.shape)
        found = (self._forwards(numbers) if forwards else self._backwards(numbers)).reshape(places.shape)
        return int(found) if np.ndim(given) == 0 else found

    def _forwards(self, indices: Ints) -> Ints:
        inside = self._within_windows(self._slot_at(indices) // self.window, indices, forwards=True)
        slots = self._slot_at(inside)
        return self._blocks(slots) * self.block + inside - self._starts(slots)

    def _backwards(self, values: Ints) -> Ints:
        slots = self._slots(values)
        inside = self._starts(slots) + values % self.block
        return self._within_windows(slots // self.window, inside, forwards=False)

    @cached_property
    def _blocks(self) -> Permutation:
        """Block in each slot of the order of blocks."""
        return Permutation(-(-self.size // self.block), derive_key(self.key, "blocks"))

    @cached_property
    def _short(self) -> tuple[int, int]:
        """Slot of the last block, and how many numbers it lacks."""
        blocks = len(self._blocks)
        return self._blocks.inverse(blocks - 1), blocks * self.block - self.size

    def _slots(self, values: Ints) -> Ints:
        return self._blocks.inverse(values // self.block)

    def _slot_at(self, indices: Ints) -> Ints:
        slot, lack = self._short
        return np.where(indices < (slot + 1) * self.block - lack, indices, indices + lack) // self.block

    def _starts(self, slots: Ints) -> Ints:
        """First index of slots; behind the last one, the size."""
        slot, lack = self._short
        return slots * self.block - np.where(slots > slot, lack, 0)

    def _window_starts(self, windows: Ints) -> Ints:
        return self._starts(np.minimum(windows * self.window, len(self._blocks)))

    def _within_windows(self, windows: Ints, indices: Ints, *, forwards: bool) -> Ints:
        found = np.empty_like(indices)
        touched = windows[:1] if (windows == windows[0]).all() else np.unique(windows)
        bounds = self._window_starts(np.stack([touched, touched + 1]))
        for window, low, high in zip(touched.tolist(), *bounds.tolist()):
            which = slice(None) if len(touched) == 1 else np.flatnonzero(windows == window)
            inside = _permutation(high - low, self.key, window)
            found[which] = (inside(indices[which] - low) if forwards else inside.inverse(indices[which] - low)) + low
        return found


@lru_cache(maxsize=64)
def _permutation(size: int, key: int, window: int) -> Permutation:
    return Permutation(size, derive_key(key, "window", window))


def first_uses(permutation: Permutation | None, ranges: Ints, here: int) -> npt.NDArray[np.float64]:
    """First index from `here` on at which a number of each range comes; inf if there is none.

    Of an exact shuffle, a few numbers of each range are looked at, evenly spread; of one by blocks, all its windows.
    """
    if not len(ranges):
        return np.zeros(0)
    begin, end = ranges[:, :1], ranges[:, 1:]
    if permutation is None:
        return np.asarray(np.where(end > here, np.maximum(begin, here), np.inf).min(axis=1))
    low = np.minimum(begin, permutation.size - 1)
    last = np.maximum(end - 1, low)
    if isinstance(permutation, BlockPermutation):
        block = permutation.block
        most = min(int((last // block - low // block).max()) + 1, _LOOKED_AT)
        begin = permutation.first_indices(np.clip((low // block + np.arange(most)) * block, low, last))
        end = begin + permutation.window * block
    else:
        spread = np.linspace(0, 1, _LOOKED_AT)
        begin = permutation.inverse((low + (last - low) * spread).astype(np.int64))
        end = begin + 1
    return np.asarray(np.where(end > here, np.maximum(begin, here), np.inf).min(axis=1))


def _short(tokens: int) -> str:
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
