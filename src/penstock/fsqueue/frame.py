"""Frame of a batch file: all bytes of it except arrays.

Files of a split differ in their arrays and in their number alone if the columns have one size and nothing is
compressed. So Arrow writes and reads the first of them; the next are written by filling in, and read by comparing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt


class ArrayPlace(NamedTuple):
    """Place of an array in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, data: Any) -> npt.NDArray[Any]:
        """The array: a view of the bytes of a file."""
        return np.ndarray(self.shape, self.dtype, data, self.offset)


class Frame:
    """Places of the arrays of each batch, and the bytes around them."""

    def __init__(self, batches: Sequence[Sequence[ArrayPlace]], digits: int) -> None:
        self.batches = batches
        self.digits = digits
        self.numbers: list[int] = []
        """Positions of the number of the file."""
        self._gaps: list[tuple[int, int, bytes]] = []

    @classmethod
    def of(cls, data: memoryview, batches: Sequence[Sequence[ArrayPlace]], mark: bytes, number: int) -> Self | None:
        """Frame of the bytes of file `number`; None if its mark is not in the header and in the footer alone.

        `mark` is the metadata of the file: the number of the file stands before its last byte.
        """
        digits = len(str(number))
        frame = cls(batches, digits)
        gaps = list(_gaps(batches, len(data)))
        for low, high in gaps:
            text = bytes(data[low:high])
            found = text.find(mark)
            while found >= 0:
                frame.numbers.append(low + found + len(mark) - 1 - digits)
                found = text.find(mark, found + 1)
        if not mark.endswith(b"%d}" % number) or len(frame.numbers) != 2 or any(low > high for low, high in gaps):
            return None
        for low, high in gaps:
            inside = [place for place in frame.numbers if low <= place < high]
            starts, stops = [low, *(place + digits for place in inside)], [*inside, high]
            frame._gaps += [(a, b, bytes(data[a:b])) for a, b in zip(starts, stops) if a < b]
        return frame

    def write_number(self, data: npt.NDArray[np.uint8], number: int) -> None:
        """Make these bytes those of another number, which has as many digits."""
        text = np.frombuffer(b"%d" % number, np.uint8)
        for place in self.numbers:
            data[place : place + self.digits] = text

    def fits(self, data: Any, number: int) -> bool:
        """True if these are the bytes of file `number`, whatever its arrays hold; `data` is as long as the frame."""
        text = b"%d" % number
        return (
            len(text) == self.digits
            and all(data[place : place + self.digits] == text for place in self.numbers)
            and all(data[low:high] == piece for low, high, piece in self._gaps)
        )


def _gaps(batches: Sequence[Sequence[ArrayPlace]], size: int) -> Iterator[tuple[int, int]]:
    """Bytes between arrays; if arrays overlap, one that ends before it begins."""
    start = 0
    for place in sorted((place for batch in batches for place in batch), key=lambda place: place.offset):
        yield start, place.offset
        start = place.stop
    yield start, size
