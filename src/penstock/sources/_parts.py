"""Parts of a block: where its records stand, and handing out its rows a few at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError
from penstock.pipeline.stages import Block, Decoded, Origin
from penstock.sources._blocks import Place

__all__ = ["Pending", "Spans"]


class Spans:
    """Where the records of a block stand."""

    def __init__(self, block: Block) -> None:
        self._data: pa.Buffer = block.data
        self._cutter = block.meta["layout"].cutter
        self.starts: npt.NDArray[np.int64]
        self.starts, self._stops = self._cutter.spans(np.frombuffer(block.data, np.uint8))

    def filled(self) -> list[int]:
        """The numbers of the records that are not blank."""
        view, blank = memoryview(self._data), self._cutter.blank
        spans = zip(self.starts.tolist(), self._stops.tolist())
        # Most records show in their first bytes that they are not blank.
        return [
            number
            for number, (start, stop) in enumerate(spans)
            if not blank(bytes(view[start : min(stop, start + 64)])) or not blank(bytes(view[start:stop]))
        ]

    def slice(self, first: int, last: int) -> pa.Buffer:
        """The bytes from the first of these records to the end of the last."""
        start = int(self.starts[first])
        return self._data.slice(start, int(self._stops[last]) - start)


class Pending:
    """A decoded block that is handed out in parts: its rows and its bad records, in the order of the file."""

    def __init__(self, block: Block, decoded: Decoded) -> None:
        self._block, self._batch = block, decoded.batch
        self._rows: Sequence[int] = decoded.rows if decoded.rows is not None else range(decoded.batch.num_rows)
        self._bad = deque(decoded.rejected)
        self._used = 0
        self._spans: Spans | None = None

    @property
    def over(self) -> bool:
        return self._used == len(self._rows) and not self._bad

    @property
    def nbytes(self) -> int:
        return int(self._batch.nbytes)

    def take(self, max_rows: int) -> tuple[pa.RecordBatch, Origin]:
        """The next rows and where they come from; raises for a bad record that stands before them."""
        first = self._next_bad()
        before = bisect_left(self._rows, first) if first is not None else len(self._rows)
        if self._used == before:
            bad = self._bad.popleft()
            raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
        part = self._batch.slice(self._used, min(max_rows, before - self._used))
        origin = self._block.origin
        row = origin.row + self._rows[self._used]
        self._used += part.num_rows
        return part, Origin(origin.file, row)

    def place(self) -> Place:
        """The next record, good or bad."""
        if self._spans is None:
            self._spans = Spans(self._block)
        following = [self._rows[self._used]] if self._used < len(self._rows) else []
        bad = self._next_bad()
        number = min([*following, *([bad] if bad is not None else [])])
        origin = self._block.origin
        offset = (origin.offset or 0) + int(self._spans.starts[number])
        return Place(self._block.meta["file"], offset, origin.row + number)

    def _next_bad(self) -> int | None:
        return (self._bad[0].row or 0) - self._block.origin.row if self._bad else None
