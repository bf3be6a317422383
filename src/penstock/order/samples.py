"""Samples as parts of rows, in four arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of

Ints = npt.NDArray[np.int64]


@lru_cache(maxsize=64)
def count_up_to(count: int) -> Ints:
    """The numbers below `count`, cached and read-only."""
    numbers = np.arange(count)
    numbers.flags.writeable = False
    return numbers


class Samples:
    """Samples in order: sample i consists of the parts `offsets[i]` to `offsets[i + 1]`.

    Part j is the tokens `starts[j]` to `starts[j] + lengths[j]` of row `rows[j]`. A sample without parts is a blank: it
    keeps its place in a batch, with nothing to learn. `single` says that every sample is one part, which saves work.
    A value: never changed after it is made (not enforced, since many are made).
    """

    __slots__ = ("_numbers", "lengths", "offsets", "rows", "single", "starts")

    def __init__(self, offsets: Ints, rows: Ints, starts: Ints, lengths: Ints, single: bool = False) -> None:
        self.offsets, self.rows, self.starts, self.lengths, self.single = offsets, rows, starts, lengths, single
        self._numbers: npt.NDArray[np.int64] | None = None
        """Numbers of the parts, if `cut` made them."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        return int(np.add.reduce(self.lengths))

    @property
    def nbytes(self) -> int:
        return int(self.offsets.nbytes + self.rows.nbytes + self.starts.nbytes + self.lengths.nbytes)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample."""
        if self.single:
            return self.lengths
        return np.diff(offsets_of(self.lengths)[self.offsets])

    def numbers(self) -> npt.NDArray[np.int64]:
        """Number of the sample of each part."""
        if self.single:
            return count_up_to(len(self))
        if self._numbers is not None:
            return self._numbers
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))  # not kept: one goes to the user, one to a grid

    def slice(self, start: int, stop: int) -> Samples:
        """Samples `start` to `stop`, as views."""
        if self.single:
            offsets, low, high = self.offsets[: stop - start + 1], start, stop
            return Samples(offsets, self.rows[low:high], self.starts[low:high], self.lengths[low:high], True)
        offsets = self.offsets[start : stop + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        return Samples(offsets - low, self.rows[low:high], self.starts[low:high], self.lengths[low:high])

    def cut(self, size: int, count: int) -> list[Samples]:
        """The first `count` times `size` samples, as views of `size` each, which know the numbers of their parts."""
        firsts = range(0, count * size, size)
        if self.single:
            offsets, shape, end = self.offsets[: size + 1], (count, size), count * size
            parts = (part[:end].reshape(shape) for part in (self.rows, self.starts, self.lengths))
            return [Samples(offsets, rows, starts, lengths, True) for rows, starts, lengths in zip(*parts)]
        offsets = self.offsets[: count * size + 1]
        numbers, ends = np.repeat(np.arange(count * size) % size, np.diff(offsets)), (offsets - offsets[0]).tolist()
        found = [self.slice(low, low + size) for low in firsts]
        for low, part in zip(firsts, found):
            part._numbers = numbers[ends[low] : ends[low + size]]
        return found

    def copy(self) -> Samples:
        """The same samples in arrays of their own: a slice keeps all that it is a view of."""
        return Samples(self.offsets.copy(), self.rows.copy(), self.starts.copy(), self.lengths.copy(), self.single)

    def take(self, numbers: npt.ArrayLike) -> Samples:
        """Samples by number, in the order given."""
        wanted = np.asarray(numbers, np.int64)
        if self.single:
            offsets = np.arange(len(wanted) + 1)
            return Samples(offsets, self.rows[wanted], self.starts[wanted], self.lengths[wanted], True)
        counts = np.diff(self.offsets)[wanted]
        offsets = offsets_of(counts)
        parts = np.arange(offsets[-1]) + np.repeat(self.offsets[wanted] - offsets[:-1], counts)
        return Samples(offsets, self.rows[parts], self.starts[parts], self.lengths[parts])

    def where(self, keep: npt.NDArray[np.bool_]) -> Samples:
        """Samples with only some of their parts."""
        return Samples(offsets_of(keep)[self.offsets], self.rows[keep], self.starts[keep], self.lengths[keep])

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        """Sample by sample as (row, start, length), for tests and people; not for hot paths."""
        for low, high in zip(self.offsets[:-1], self.offsets[1:]):
            parts = zip(self.rows[low:high], self.starts[low:high], self.lengths[low:high])
            yield [(int(row), int(start), int(length)) for row, start, length in parts]

    @classmethod
    def concat(cls, parts: Sequence[Samples]) -> Samples:
        """Samples of several, in order."""
        reach = np.cumsum([0, *(len(part.rows) for part in parts)])
        return cls(
            np.concatenate([[0], *(part.offsets[1:] + low for part, low in zip(parts, reach))]).astype(np.int64),
            np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(part.starts for part in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]),
            single=all(part.single for part in parts),
        )
