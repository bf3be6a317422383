"""From a place in a stream to a window of tokenised, shuffled rows, and the place behind it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, StageError
from penstock.loaders.streamed.catalog import ROW, Catalog
from penstock.loaders.streamed.cursors import Start
from penstock.loaders.streamed.rows import TokenRows
from penstock.order.permutation import Permutation, derive_key
from penstock.pipeline.chain import BrokenStageError, Chain, Ran, StepError, stage_name
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.stages import Finishing, Rejected, Stateful, Transform, TwoPart
from penstock.sources.splits import SplitReader, SplitRows, open_split

__all__ = ["ROW", "BlockSequence", "RowWindow", "WindowBuilder", "WindowLimits"]

_FIRST_SHARE = 64


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """A window is full when it has so many rows, or so many bytes of input: never a matter of the machine.

    The first window of a stream is a 64th of that, so that the first batch is not long in coming. The second ones have
    a different size in each stream, for otherwise all streams would need their next windows in the same step.
    """

    rows: int = 4096
    nbytes: int = 2 << 20

    def __post_init__(self) -> None:
        if self.rows < 1 or self.nbytes < 1:
            raise ConfigError(f"a window holds at least one row and one byte, got {self.rows} and {self.nbytes}")

    def of(self, stream: int, number: int) -> tuple[int, int]:
        """Rows and bytes of a window."""
        if number > 1:
            return self.rows, self.nbytes
        # The golden ratio spreads neighbours evenly over (0, 1].
        share = 1 / _FIRST_SHARE if not number else 1 - stream * 0.6180339887498949 % 1
        return max(1, int(self.rows * share)), max(1, int(self.nbytes * share))


@dataclass(frozen=True, slots=True, eq=False)
class BlockSequence:
    """What one stream reads in one epoch."""

    stream: int
    epoch: int
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Rows that were read and shuffled together, and where the next ones begin."""

    rows: TokenRows
    next: Start
    read: int
    """Rows that were read for it."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out on purpose, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    rejected: tuple[Rejected, ...] = ()


class WindowBuilder:
    """Makes windows. Which one it is depends on the arguments alone, so any thread may make any window."""

    def __init__(
        self,
        catalog: Catalog,
        transforms: Sequence[Transform],
        *,
        tokens: str,
        mask: str | None,
        limits: WindowLimits,
        seed: int,
        shuffle: bool,
        on_error: str,
    ) -> None:
        for transform in transforms:
            if isinstance(transform, Stateful | Finishing | TwoPart):
                raise ConfigError(
                    f"{stage_name(transform)} depends on the rows before, and streams are read in no order that it "
                    "could rely on; leave it out, or prepare the data first (streaming=False)"
                )
        self.catalog, self.tokens, self.mask = catalog, tokens, mask
        self.limits, self.seed, self.shuffle, self.on_error = limits, seed, shuffle, on_error
        self._chain = Chain(transforms, [StageMetrics(stage_name(each), "transform") for each in transforms])

    def make(self, course: BlockSequence, start: Start, held: HeldWindow) -> RowWindow:
        """The window that begins at `start`. `held` keeps the file open from one window of a stream to the next."""
        found, rejected, behind = self._read(course, start, held)
        rows, parts = _Rows(self.catalog, found), []
        dropped, changed = Counter[str](), Counter[str]()
        for batch in rows.batches():
            ran = self._transform(batch, rows)
            for counts in ran.counts.values():
                dropped.update(counts[0])
                changed.update(counts[1])
            rejected += self._failed(ran, rows, batch)
            if ran.batch is not None and ran.batch.num_rows:
                parts.append(self._tokens(ran.batch, rows))
        made = TokenRows.concat(parts)
        if self.shuffle and made.rows > 1:
            key = derive_key(self.seed, "rows", course.epoch, course.stream, start.number)
            made = made.taken(Permutation(made.rows, key)(np.arange(made.rows)))
        return RowWindow(made, behind, rows.count, dropped, changed, tuple(rejected))

    def _read(
        self, course: BlockSequence, start: Start, held: HeldWindow
    ) -> tuple[list[tuple[int, SplitRows]], list[Rejected], Start]:
        most_rows, most_bytes = self.limits.of(course.stream, start.number)
        found: list[tuple[int, SplitRows]] = []
        rejected: list[Rejected] = []
        block, at = start.block, start.at
        while most_rows > 0 and most_bytes > 0 and block < len(course.blocks):
            number = int(course.blocks[block])
            reader = held.reader(self.catalog, number, at)
            try:
                cut = reader.cut(most_rows, most_bytes)
            except DataError as error:
                if self.on_error == "raise":
                    raise
                kind = reader.skip_bad()
                rejected.append(Rejected(error.file, error.row, error.offset, "reading", kind, error.reason))
                continue
            if cut is None:
                self.catalog.check_unchanged(number)
                held.close()
                block, at = block + 1, 0
                continue
            rows = reader.decode(cut)
            if rows.rejected and self.on_error == "raise":
                bad = rows.rejected[0]
                raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
            found.append((number, rows))
            rejected += rows.rejected
            most_rows, most_bytes, at = most_rows - cut.records, most_bytes - cut.nbytes, reader.at
        return found, rejected, Start(block, at, start.number + 1)

    def _transform(self, batch: pa.RecordBatch, rows: _Rows) -> Ran:
        try:
            return self._chain.run(batch, batch.nbytes)
        except StepError as step:
            if isinstance(step.error, BrokenStageError):
                raise step.error from step.error.__cause__
        return self._chain.isolate(batch, first_only=self.on_error == "raise")

    def _failed(self, ran: Ran, rows: _Rows, batch: pa.RecordBatch) -> list[Rejected]:
        """The rows that a transform refused."""
        found = []
        for failure in ran.failures:
            number = batch.column(ROW)[failure.row].as_py()
            file, row, offset = rows.located(number)
            reason = getattr(failure.error, "reason", None) or str(failure.error)
            if self.on_error == "raise":
                raise StageError(reason, stage=failure.stage, file=file, row=row, offset=offset) from failure.error
            data = batch.slice(failure.row, 1).drop_columns([ROW]).to_pylist()[0]
            kind = getattr(failure.error, "kind", None) or type(failure.error).__name__
            found.append(Rejected(file, row, offset, failure.stage, str(kind), reason, data))
        return found

    def _tokens(self, batch: pa.RecordBatch, rows: _Rows) -> TokenRows:
        numbers = batch.column(ROW).to_numpy()
        mask = None if self.mask is None else batch.column(self.mask)
        blocks, places = rows.blocks[numbers], rows.places[numbers]
        return TokenRows.of(_plain(batch.column(self.tokens)), _plain(mask), blocks, places)


class HeldWindow:
    """The open reader of a stream, if there is one."""

    def __init__(self) -> None:
        self._open: tuple[int, SplitReader] | None = None

    def reader(self, catalog: Catalog, block: int, at: int) -> SplitReader:
        """A reader that stands there: the open one, or another."""
        if self._open is None or self._open[0] != block or self._open[1].at != at:
            self.close()
            catalog.check_unchanged(block)
            self._open = (block, open_split(catalog.source, catalog.blocks[block], at))
        return self._open[1]

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


class _Rows:
    """The rows that were read for a window, numbered through."""

    def __init__(self, catalog: Catalog, found: Sequence[tuple[int, SplitRows]]) -> None:
        self._catalog, self._found = catalog, found
        sizes = [rows.batch.num_rows for _, rows in found]
        self.count = sum(sizes)
        self.blocks = np.repeat(np.array([block for block, _ in found], np.int64), sizes)
        self.places = np.concatenate([np.zeros(0, np.int64), *(rows.places for _, rows in found)])

    def batches(self) -> list[pa.RecordBatch]:
        """With their numbers as a column; neighbours with the same columns are one batch."""
        made, first = [], 0
        filled = [rows.batch for _, rows in self._found if rows.batch.num_rows]
        for _, group in itertools.groupby(filled, key=lambda batch: batch.schema):
            batch = pa.concat_batches(list(group))
            numbers = pa.array(np.arange(first, first + batch.num_rows))
            made.append(batch.append_column(ROW, numbers))
            first += batch.num_rows
        return made

    def located(self, number: int) -> tuple[str, int | None, int | None]:
        """File, row and offset of a row, as far as they are known."""
        return self._catalog.located(int(self.blocks[number]), int(self.places[number]))


def _plain(column: Any) -> Any:
    """A list column with offsets of its own, whatever it is a slice of."""
    if column is None or pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return column
    return cast(Any, column.cast(pa.large_list(column.type.value_type)))
