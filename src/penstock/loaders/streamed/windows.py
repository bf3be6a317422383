"""Windows of rows that are read, tokenised and shuffled together, and the cursors of samples in them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import is_list
from penstock.arrays.text import arrow_of, numbers_of
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError, ResumeError, StageError, place
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.loaders.streamed.catalog import ROW, Catalog
from penstock.loaders.streamed.rows import TokenRows
from penstock.metrics.readings import Readings
from penstock.order.permutation import Permutation, derive_key
from penstock.pipeline.chain import BrokenStageError, Chain, Ran, StepError, stage_name
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import StageMetrics, reason_readings, tokens_in
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.stages import Finishing, Rejected, Stateful, Transform, TwoPart
from penstock.sources.splits import SplitReader, SplitRows, open_split

log = logging.getLogger(__name__)

_FIRST_SHARE = 64
_TOGETHER_BYTES = 1 << 20
"""Input that is transformed together: the blocks of a small input are far smaller, and each call has a cost."""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
_VALUES = {digit: value for value, digit in enumerate(_DIGITS)}
_MORE = 32
_ENDED = "."


@dataclass(frozen=True, slots=True)
class WindowStart:
    """Beginning of a window: block of the stream, place in the block, and number of windows before it."""

    block: int = 0
    at: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class StreamCursor:
    """Next sample of a stream: number `index` of the window that is `ahead` windows after the one at `start`.

    The windows between hold the `carry` tokens that are left over and begin the first sample. Without any, it is 0.
    """

    start: WindowStart = WindowStart()
    ahead: int = 0
    carry: int = 0
    index: int = 0
    ended: bool = False

    def to_text(self) -> str:
        """Six numbers in digits of five bits, the lowest first; a sixth bit marks that more digits follow."""
        if self.ended:
            return _ENDED
        return "".join(map(_spelled, (*astuple(self.start), self.ahead, self.carry, self.index)))

    @classmethod
    def from_text(cls, text: str) -> StreamCursor:
        if text == _ENDED:
            return cls(ended=True)
        numbers, number, shift = [], 0, 0
        try:
            for digit in text:
                value = _VALUES[digit]
                number |= (value & (_MORE - 1)) << shift
                shift += 5
                if not value & _MORE:
                    numbers.append(number)
                    number = shift = 0
            block, at, window, ahead, carry, index = numbers
        except (KeyError, TypeError, ValueError):
            raise ResumeError(f"the state is damaged: {text!r} is not the cursor of a stream") from None
        return cls(WindowStart(block, at, window), ahead, carry, index)


def _spelled(number: int) -> str:
    digits = []
    while True:
        number, low = number >> 5, number & (_MORE - 1)
        digits.append(_DIGITS[low | (_MORE if number else 0)])
        if not number:
            return "".join(digits)


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Rows and bytes of input that fill a window, whichever comes first; the same on every machine.

    The first window of a stream is a 64th of that, so that the first batch comes soon. The second has a different size
    in each stream, or all streams would need their next windows in the same step.
    """

    rows: int = 4096
    nbytes: int = 2 << 20

    def __post_init__(self) -> None:
        if self.rows < 1 or self.nbytes < 1:
            raise ConfigError(f"shuffle_window and window_bytes must be positive, got {self.rows} and {self.nbytes}")

    def of(self, stream: int, number: int) -> tuple[int, int]:
        """Rows and bytes of a window."""
        if number > 1:
            return self.rows, self.nbytes
        # The golden ratio spreads neighbours evenly over (0, 1].
        share = 1 / _FIRST_SHARE if not number else 1 - stream * 0.6180339887498949 % 1
        return max(1, int(self.rows * share)), max(1, int(self.nbytes * share))


@dataclass(frozen=True, slots=True, eq=False)
class BlockSequence:
    """Blocks that one stream reads in one epoch, in order."""

    stream: int
    epoch: int
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Counts of the rows of a window."""

    read: int
    """Rows of the input."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that transforms dropped, by reason."""
    changed: Counter[str] = field(default_factory=Counter)
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True, slots=True)
class RowWindow:
    """Rows that were read and shuffled together, and the beginning of the next window."""

    rows: TokenRows
    next: WindowStart
    counts: WindowCounts


class WindowBuilder:
    """Reads and transforms windows. A window depends on the arguments alone, so any thread may make any window."""

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
                    f"{stage_name(transform)} depends on the order of rows, which streams do not keep; leave it out, "
                    "or prepare the data first (streaming=False)"
                )
        self.catalog, self.tokens, self.mask = catalog, tokens, mask
        self.limits, self.seed, self.shuffle, self.on_error = limits, seed, shuffle, on_error
        self._chain = Chain(transforms, [StageMetrics(stage_name(each), "transform") for each in transforms])

    def make(self, sequence: BlockSequence, start: WindowStart, split: OpenSplit) -> RowWindow:
        """The window that begins at `start`. `split` keeps the file open between the windows of a stream."""
        most_rows, most_bytes = self.limits.of(sequence.stream, start.number)
        parts: list[TokenRows] = []
        counts = WindowCounts(0)
        unread: list[Rejected] = []
        failed: list[Rejected] = []
        waiting: list[_InputRows] = []
        block, at, read, waiting_bytes = start.block, start.at, 0, 0
        while most_rows > 0 and most_bytes > 0 and block < len(sequence.blocks):
            number = int(sequence.blocks[block])
            reader = split.reader(self.catalog, number, at)
            try:
                cut = reader.cut(most_rows, most_bytes)
            except DataError as error:
                if self.on_error == "raise":
                    self._add(waiting, parts, counts, failed)  # an earlier row may be the first that is bad
                    raise
                kind = reader.skip_bad()
                at = reader.at
                unread.append(Rejected(error.file, error.row, error.offset, "reading", kind, error.reason))
                continue
            if cut is None:
                self.catalog.check_unchanged(number)
                split.close()
                block, at = block + 1, 0
                continue
            most_rows, most_bytes, at = most_rows - cut.records, most_bytes - cut.nbytes, reader.at
            rows = reader.decode(cut)
            nbytes = cut.nbytes
            del cut  # from here on the window is made of tokens: neither its bytes nor its text are there as a whole
            if rows.rejected and self.on_error == "raise":
                self._add(waiting, parts, counts, failed)
                bad = rows.rejected[0]
                raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
            unread += rows.rejected
            read += rows.batch.num_rows
            if not rows.batch.num_rows:
                continue
            apart = waiting and not _can_join(waiting[0].schema, rows.batch.schema)
            if apart or waiting_bytes + nbytes > _TOGETHER_BYTES:
                self._add(waiting, parts, counts, failed)
                waiting, waiting_bytes = [], 0
            waiting.append(_InputRows.of_block(self.catalog, number, rows))
            waiting_bytes += nbytes
        self._add(waiting, parts, counts, failed)
        made = TokenRows.concat(parts)
        parts.clear()
        if self.shuffle and made.rows > 1:
            key = derive_key(self.seed, "rows", sequence.epoch, sequence.stream, start.number)
            made = made.take(Permutation(made.rows, key)(np.arange(made.rows)))
        counts = replace(counts, read=read, rejected=(*unread, *failed))
        return RowWindow(made, WindowStart(block, at, start.number + 1), counts)

    def _add(
        self, waiting: list[_InputRows], parts: list[TokenRows], counts: WindowCounts, failed: list[Rejected]
    ) -> None:
        """Tokens of some rows."""
        if not waiting:
            return
        rows = _InputRows.concat(waiting)
        batch = rows.batch()
        ran = self._transform(batch)
        for dropped, changed in ran.counts.values():
            counts.dropped.update(dropped)
            counts.changed.update(changed)
        failed += self._failed(ran, rows, batch)
        if ran.batch is not None and ran.batch.num_rows:
            parts.append(self._tokens(ran.batch, rows))

    def _transform(self, batch: pa.RecordBatch) -> Ran:
        try:
            return self._chain.run(batch, batch.nbytes)
        except StepError as step:
            if isinstance(step.error, BrokenStageError):
                raise step.error from step.error.__cause__
        return self._chain.isolate(batch, first_only=self.on_error == "raise")

    def _failed(self, ran: Ran, rows: _InputRows, batch: pa.RecordBatch) -> list[Rejected]:
        """Rows that raised an error in a transform."""
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

    def _tokens(self, batch: pa.RecordBatch, rows: _InputRows) -> TokenRows:
        numbers = numbers_of(batch.column(ROW))
        mask = None if self.mask is None else batch.column(self.mask)
        columns = _plain(batch.column(self.tokens)), _plain(mask)
        return TokenRows.of(*columns, rows.blocks[numbers], rows.places[numbers])


class OpenSplit:
    """Open reader of a stream, kept between its windows."""

    def __init__(self) -> None:
        self._open: tuple[int, SplitReader] | None = None

    def reader(self, catalog: Catalog, block: int, at: int) -> SplitReader:
        """A reader at this place: the open one if it is there, or a new one."""
        if self._open is None or self._open[0] != block or self._open[1].at != at:
            self.close()
            catalog.check_unchanged(block)
            self._open = (block, open_split(catalog.source, catalog.blocks[block], at))
        return self._open[1]

    def rest(self, catalog: Catalog) -> None:
        """Close a file that can be opened in the middle again, and give up what was read ahead of it."""
        if self._open is not None and self._open[1].by_bytes and catalog.blocks[self._open[0]].stop is not None:
            self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None


@dataclass(frozen=True, slots=True)
class _InputRows:
    """Rows of some blocks, numbered in order."""

    catalog: Catalog
    rows: pa.RecordBatch
    blocks: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]

    @classmethod
    def of_block(cls, catalog: Catalog, block: int, rows: SplitRows) -> _InputRows:
        return cls(catalog, rows.batch, np.full(rows.batch.num_rows, block, np.int64), rows.places)

    @classmethod
    def concat(cls, parts: Sequence[_InputRows]) -> _InputRows:
        """Rows of one schema together."""
        if len(parts) == 1:
            return parts[0]
        rows = pa.concat_batches([part.rows for part in parts])
        blocks, places = ([getattr(part, name) for part in parts] for name in ("blocks", "places"))
        return cls(parts[0].catalog, rows, np.concatenate(blocks), np.concatenate(places))

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    def batch(self) -> pa.RecordBatch:
        """The rows with their numbers as a column."""
        return self.rows.append_column(ROW, arrow_of(np.arange(self.rows.num_rows)))

    def located(self, number: int) -> tuple[str, int | None, int | None]:
        """File, row and offset of a row, as far as they are known."""
        return self.catalog.located(int(self.blocks[number]), int(self.places[number]))


def _can_join(one: pa.Schema, other: pa.Schema) -> bool:
    """True if rows of two blocks can be one batch. Dictionaries of two files may be too many for a small index type."""
    return bool(one == other) and not any(map(_has_dictionary, one.types))


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return pa.types.is_dictionary(kind) or any(map(_has_dictionary, inner))


def _plain(column: Any) -> Any:
    """A column of lists with offsets, of fixed-size lists too."""
    if column is None or is_list(column.type):
        return column
    return cast(Any, column.cast(pa.large_list(column.type.value_type)))


class StreamCounts:
    """Counts of rows of one rank in this process. Each rank has its own quarantine file."""

    def __init__(self, on_error: str, quarantine: PathLike | None, rank: Rank) -> None:
        path = None if quarantine is None else require_local(quarantine, "quarantine")
        if path is not None and rank.world_size > 1:
            path = path.with_name(f"{path.stem}-{rank.rank}{path.suffix}")
        self._bad = BadRows(PipelineConfig(on_error=on_error), path)  # type: ignore[arg-type]
        self._on_error = on_error
        self.rows = 0
        """Rows read."""
        self.dropped: Counter[str] = Counter()
        """Rows that transforms dropped, by reason."""
        self.changed: Counter[str] = Counter()
        """Rows kept but changed, by reason; tokens cut off are counted here too."""

    @property
    def rejected(self) -> dict[str, int]:
        """Bad rows, by reason."""
        return dict(self._bad.counts)

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that are in no sample, by reason."""
        return tokens_in(self.changed)

    def readings(self) -> Readings:
        """Metrics by name: rows read, and rows and tokens left out, by reason; of windows that have begun."""
        found: Readings = {"penstock_pipeline_rows_in_total": self.rows}
        return found | reason_readings(dict(self.dropped), dict(self.changed), self.rejected, self._on_error)

    def add(self, window: WindowCounts) -> None:
        self.rows += window.read
        self.dropped.update(window.dropped)
        self.changed.update(window.changed)
        told = set(self._bad.counts)
        for row in window.rejected:
            if (kind := f"{row.stage}: {row.kind}") not in told:  # the first of its kind
                told.add(kind)
                where = place(row.file, row.row, row.offset)
                log.warning("%s: %s; left out, and so are others like it", where, row.reason)
        self._bad.add(window.rejected, self.rows)
        if window.rejected:
            self._bad.flush()  # a state that is saved from now on counts on them

    def keep_quarantine(self) -> None:
        """Append to the quarantine file instead of replacing it, because its run is resumed."""
        path = self._bad.path
        if path is not None and path.exists():
            self._bad.restore({"bytes": path.stat().st_size, "counts": dict(self._bad.counts)})

    def close(self) -> None:
        self._bad.close()
