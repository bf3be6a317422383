"""Rows of different lengths, wherever they lie in memory, as padded grids.

Rows are places in memory, so that a table of many chunks, a mapped file and a list of small arrays are all the same,
and none of them is copied to be read. A grid of rows is a single indexing: row p of a view of memory is the `width`
numbers from place p on.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.memory.views import LONGEST_STRETCH, memory_as, place_of, stretches_of

__all__ = ["MemoryRows", "mask_of", "numbers_of"]

Ints = npt.NDArray[np.int64]
_STEPS: dict[str, tuple[int, npt.NDArray[Any], dict[int, npt.NDArray[Any]]]] = {}
"""By type: a run of ones and then of zeros, and views of it by their width."""


class MemoryRows:
    """One number for each token of each row."""

    def __init__(self, places: Ints, lengths: Ints, room: Ints, dtype: np.dtype[Any], held: Any, nbytes: int) -> None:
        self.lengths, self.dtype, self.nbytes = lengths, dtype, nbytes
        self._places, self._room, self._held = places, room, held
        self._memory = memory_as(dtype)
        self._views: dict[int, npt.NDArray[Any]] = {}

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> MemoryRows:
        """Of pieces, each of (flat numbers, offsets): row i of a piece is `numbers[offsets[i]:offsets[i + 1]]`.

        The numbers are not copied where they are of one type and lie at multiples of its size. They may go on behind
        the last row, which makes the last rows quicker to read.
        """
        dtype = np.result_type(*(numbers.dtype for numbers, _ in parts)) if parts else np.dtype(np.int32)
        dtype = dtype.newbyteorder("=")
        held = []
        places, lengths, room, nbytes = [], [], [], 0
        for numbers, offsets in parts:
            plain = np.require(numbers, dtype, ["C", "A"])
            held.append(plain)
            begin = place_of(plain.ctypes.data, dtype.itemsize) if len(plain) else 0
            starts = offsets[:-1].astype(np.int64)
            places.append(starts + begin)
            lengths.append(np.diff(offsets).astype(np.int64))
            room.append(len(plain) - starts)
            nbytes += plain.nbytes
        return cls(_joined(places), _joined(lengths), _joined(room), dtype, held, nbytes)

    @classmethod
    def of_arrays(cls, arrays: Sequence[npt.NDArray[Any]]) -> MemoryRows:
        """Of one array for each row, copied behind one another."""
        lengths = np.array(list(map(len, arrays)), np.int64)
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        total = int(offsets[-1])
        filled = [array for array in arrays if len(array)] if total and not lengths.all() else arrays
        dtype = np.result_type(*set(map(attrgetter("dtype"), filled))) if total else np.dtype(np.int32)
        flat = np.empty(total + int(lengths.max(initial=0)), np.dtype(np.int8) if dtype.kind == "b" else dtype)
        flat[total:] = 0
        if total:
            np.concatenate(filled, out=flat[:total], casting="unsafe")
        return cls.of_parts([(flat, offsets)])

    @classmethod
    def of_column(cls, column: pa.ChunkedArray) -> MemoryRows:
        """Of a column of lists without nulls, as views of it."""
        parts = []
        for chunk in column.chunks:
            if pa.types.is_fixed_size_list(chunk.type):
                size = chunk.type.list_size
                offsets = np.arange(len(chunk) + 1, dtype=np.int64) * size
                values = chunk.values.slice(chunk.offset * size, len(chunk) * size)
            else:
                offsets, values = numbers_of(chunk.offsets), chunk.values
            parts.append((numbers_of(values), offsets))
        return cls.of_parts(parts)

    def __len__(self) -> int:
        return len(self.lengths)

    def grid(self, rows: Ints, skips: Ints | None, width: int) -> npt.NDArray[Any]:
        """`width` numbers of each row, less the first `skips`; behind the end of a row is anything."""
        places, room = self._places[rows], self._room[rows]
        if skips is not None:
            places, room = places + skips, room - skips
        if len(rows) and width <= LONGEST_STRETCH and int(room.min()) >= width:
            found: npt.NDArray[Any] = self._stretches(width)[places]
            return found
        grid = np.zeros((len(rows), width), self.dtype)
        memory, short = self._memory, np.minimum(room, width)
        for number, (place, count) in enumerate(zip(places.tolist(), short.tolist())):
            if count > 0:
                grid[number, :count] = memory[place : place + count]
        return grid

    def row(self, row: int) -> npt.NDArray[Any]:
        place = int(self._places[row])
        return self._memory[place : place + int(self.lengths[row])]

    def all_ones(self) -> bool:
        """True if every number is 1; reads all of them."""
        return all(bool((numbers == 1).all()) for numbers in self._pieces())

    def _pieces(self) -> list[npt.NDArray[Any]]:
        """The numbers of all rows; those that follow one another in memory as one."""
        if not len(self):
            return []
        ends = self._places + self.lengths
        cuts = np.flatnonzero(self._places[1:] != ends[:-1]) + 1
        begins, stops = np.append(0, cuts).tolist(), np.append(cuts, len(self)).tolist()
        return [self._memory[int(self._places[low]) : int(ends[high - 1])] for low, high in zip(begins, stops)]

    def _stretches(self, width: int) -> npt.NDArray[Any]:
        view = self._views.get(width)
        if view is None:
            view = self._views[width] = stretches_of(self.dtype, width)
        return view

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: the numbers themselves, since places are only good in this one."""
        return {"flat": np.concatenate([np.zeros(0, self.dtype), *self._pieces()]), "lengths": self.lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        offsets = np.concatenate([[0], np.cumsum(state["lengths"])]).astype(np.int64)
        self.__dict__.update(MemoryRows.of_parts([(state["flat"], offsets)]).__dict__)


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers of an Arrow array without nulls, as a view; truth values as bytes."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    # pyarrow's own conversion imports pandas.
    dtype = np.dtype(
        {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(array.type), str(array.type))
    )
    buffer = array.buffers()[1]
    if buffer is None:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def mask_of(lengths: Ints, width: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """(rows, width): 1 for the first `lengths[i]` of row i, 0 behind them. None of the lengths is above the width."""
    held = _STEPS.get(dtype.str)
    if held is None or held[0] < width:
        size = max(width, 128, 2 * held[0] if held else 0)
        ones = np.zeros(2 * size, dtype)
        ones[:size] = 1
        held = _STEPS[dtype.str] = size, ones, {}
    size, ones, views = held
    view = views.get(width)
    if view is None:
        view = views[width] = np.ndarray((size + 1, width), dtype, ones, 0, (dtype.itemsize, dtype.itemsize))
    mask: npt.NDArray[Any] = view[size - lengths]
    return mask
