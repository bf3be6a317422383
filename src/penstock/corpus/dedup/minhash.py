"""MinHash signatures of text, folded into one 64-bit key for each band."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from penstock.arrays.hashes import Words, as_seed, mix64
from penstock.arrays.text import Utf8
from penstock.corpus.dedup.shingles import characters, shingles
from penstock.errors import ConfigError
from penstock.transforms.text import Integers

__all__ = ["MinHash", "frozen", "kernels"]

A = TypeVar("A", bound=np.ndarray[Any, Any])
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

_MOST = np.uint32(0xFFFFFFFF)
_FOLD = np.uint64(0xFF51AFD7ED558CCD)
_ROWS = 256  # at a time: their signatures take four times the memory of their keys


@cache
def kernels() -> ModuleType | None:
    """The compiled loops, if numba is installed (`pip install 'penstock[fast]'`)."""
    try:
        from penstock.corpus.dedup import kernels as compiled
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("numba", "llvmlite"):
            raise
        return None
    return compiled


def frozen(array: A) -> A:
    """A contiguous array that cannot be written to: numba compiles a loop once more for every other kind."""
    view = cast(A, np.ascontiguousarray(array).view())
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class MinHash:
    """`bands * rows` random permutations of the shingles; two texts share a band key if `rows` minima in a row agree.

    With a share s of common shingles that happens with probability 1 - (1 - s**rows)**bands: 0.5 at s = 0.68 for 14
    bands of 8 rows, 0.99 at 0.85, below 0.01 at 0.4.
    """

    ngram: int
    bands: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        for name, least, most in (("ngram", 1, 100), ("bands", 1, 1000), ("rows", 2, 1000)):
            given = getattr(self, name)
            if not isinstance(given, int) or not least <= given <= most:
                raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {given!r}")
        as_seed(self.seed)

    def keys(self, text: Utf8) -> tuple[Words, np.ndarray[Any, np.dtype[np.bool_]]]:
        """A row of band keys for each text, none of them 0; and which texts have words at all."""
        rows = len(text.offsets) - 1
        keys, worded = np.empty((rows, self.bands), np.uint64), np.empty(rows, np.bool_)
        data, bounds = frozen(text.data), frozen(text.offsets.astype(np.int64, copy=False))
        for start in range(0, rows, _ROWS):
            part = slice(start, start + _ROWS)
            minima = self._minima(data, bounds[start : start + _ROWS + 1])
            keys[part], worded[part] = self._fold(minima), (minima != _MOST).any(axis=1)
        return keys, worded

    @property
    def _half(self) -> int:
        """Permutations before this one see the lower half of a shingle's hash, the others the upper half.

        So every band depends on all 64 bits: with 32, two of 100,000 texts of a single shingle would fall together.
        """
        return self.rows // 2 * self.bands

    @cached_property
    def _permutations(self) -> tuple[Numbers, Numbers]:
        """Factors (odd, so that x * factor + term is a permutation modulo 2**32) and terms."""
        drawn = mix64(np.arange(self.bands * self.rows, dtype=np.uint64) + mix64(np.array([self.seed], np.uint64)))
        return drawn.astype(np.uint32) | np.uint32(1), (drawn >> np.uint64(32)).astype(np.uint32)

    def _minima(self, data: Bytes, bounds: Integers) -> Numbers:
        minima = np.full((len(bounds) - 1, self.bands * self.rows), _MOST)
        if (compiled := kernels()) is not None:
            compiled.minima(data, bounds, characters(), self.ngram, *self._permutations, self._half, minima)
            return minima
        first = bounds[0]
        found = shingles(Utf8(data[first : bounds[-1]], bounds - first), self.ngram)
        low, high = found.hashes.astype(np.uint32), (found.hashes >> np.uint64(32)).astype(np.uint32)
        filled = np.flatnonzero(found.counts)
        starts = np.cumsum(found.counts[filled]) - found.counts[filled]
        if len(filled):
            for j, (factor, term) in enumerate(zip(*self._permutations)):
                words = low if j < self._half else high
                minima[filled, j] = np.minimum.reduceat(words * factor + term, starts)
        return minima

    def _fold(self, minima: Numbers) -> Words:
        """Minimum j belongs to row j // bands of band j % bands."""
        keys = np.repeat(mix64(np.arange(self.bands, dtype=np.uint64))[None], len(minima), axis=0)
        for row in range(self.rows):
            keys ^= minima[:, row * self.bands : (row + 1) * self.bands]
            keys *= _FOLD
            keys ^= keys >> np.uint64(32)
        return np.maximum(keys, np.uint64(1))
