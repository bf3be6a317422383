"""Collation: a batch in its smallest form, and its fields, each made when it is wanted.

All encodings of document boundaries that kernels take (`position_ids`, `document_ids`, `cu_seqlens`) are made from one
grid, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, repeat
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import by_owner
from penstock.batching.backends.base import Array, Backend, DeferredFields, Device, aligned_empty
from penstock.errors import ConfigError
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]
IGNORE = -100
"""Label of a token without supervision."""
FIELDS = (
    "input_ids",
    "attention_mask",
    "labels",
    "loss_mask",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "document_ids",
    "num_items_in_batch",
)

_LEARNED = frozenset({"labels", "loss_mask", "num_items_in_batch"})
_BOUNDARIES = frozenset({"document_ids", "cu_seqlens", "max_seqlen"})
_ROWWISE: dict[type, bool] = {}


class Tokens(Protocol):
    """Table that tokens are copied from. A `dtype`, if it has one, is that of its ids."""

    @property
    def masked(self) -> bool:
        """True if rows have a supervision mask; without one, every token is supervised."""
        ...

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy tokens `starts[j]` to `starts[j] + lengths[j]` of row `rows[j]` to `out[at[j]:]`, for every j."""
        ...

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        """Copy the supervision mask of these tokens."""
        ...


class PageLocked(Protocol):
    """Bytes of main memory that a device reads by itself: a tensor of torch."""

    def numpy(self) -> npt.NDArray[np.uint8]: ...


@runtime_checkable
class RowTokens(Tokens, Protocol):
    """Table that can also take rows of one length at once."""

    def take_rows(self, rows: Ints, starts: Ints, length: int) -> npt.NDArray[Any]:
        """Array whose row j has the tokens of row `rows[j]` from `starts[j]` on, in the type of the table."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Layout of batches: shape, padding, dtype and fields."""

    padding_free: bool = False
    """True: all samples end to end in one row, without padding."""
    length: int | None = None
    """Tokens of a row; None: as many as the longest sample of the global batch has."""
    multiple: int = 1
    """Rows are padded to a multiple of this."""
    packed: bool = False
    """True if a sample may hold several documents."""
    split: bool = False
    """True if a sample is a whole batch, whose parts are rows."""
    pad_id: int = 0
    side: Literal["right", "left"] = "right"
    """Side of the padding."""
    integer: npt.DTypeLike = np.int64
    fields: frozenset[str] = frozenset(FIELDS)

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"pad_to_multiple_of must be positive, got {self.multiple}")
        if self.side not in ("right", "left"):
            raise ConfigError(f"padding_side must be 'right' or 'left', got {self.side!r}")
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(
                    f"unknown batch field {name!r}{did_you_mean(name, FIELDS)}; fields are {list(FIELDS)}"
                )

    @cached_property
    def joined(self) -> bool:
        """True if a row may hold several documents."""
        return self.packed or self.padding_free

    @cached_property
    def wide(self) -> np.dtype[Any]:
        """Type of ids, labels and positions."""
        return np.dtype(self.integer)

    @cached_property
    def present(self) -> frozenset[str]:
        """Fields that batches of this layout have."""
        found = self.fields - {"attention_mask"} if self.padding_free else self.fields
        if not self.joined:
            return found - _BOUNDARIES
        return found | {"max_seqlen"} if "cu_seqlens" in found else found  # kernels want both

    def check_same(self, name: str, other: BatchLayout, other_name: str) -> None:
        """Refuse to mix samples of two layouts, with the options of the loaders that make them differ."""
        differing = [
            f"{option} ({getattr(self, field)!r} in {name!r}, {getattr(other, field)!r} in {other_name!r})"
            for field, option in LAYOUT_OPTIONS.items()
            if getattr(self, field) != getattr(other, field)
        ]
        if differing:
            raise ConfigError(
                f"mixed sources share batches, so they need one layout; give both the same {differing[0]}"
            )


LAYOUT_OPTIONS = {
    "packed": "packing",
    "padding_free": "padding_free",
    "length": "chunk_size or max_length",
    "split": "max_tokens",
    "multiple": "pad_to_multiple_of",
    "pad_id": "pad_id",
    "side": "padding_side",
    "integer": "backend",
    "fields": "fields",
}
"""Options of loaders that decide a layout; those that decide others too come first."""


class Grid:
    """Grid of rows and tokens, and the place of each part in it. The parts of a row are next to each other."""

    __slots__ = ("_part_of", "_runs", "alike", "at", "full", "left", "lengths", "row_of", "rows", "tokens")

    def __init__(
        self,
        rows: int,
        tokens: int,
        at: Ints,
        lengths: Ints,
        row_of: Ints,
        *,
        left: bool = False,
        alike: bool = False,
        full: bool = False,
    ) -> None:
        self.rows, self.tokens, self.left = rows, tokens, left
        self.at = at
        """Start of each part in the flattened grid."""
        self.lengths, self.row_of = lengths, row_of
        self.alike = alike
        """True if every row is one part."""
        self.full = alike or full or int(lengths.sum()) == rows * tokens
        """True without padding."""
        self._runs: tuple[Ints, npt.NDArray[np.int32]] | None = None
        self._part_of: tuple[Grid, int] | None = None
        """Larger grid that this one is a part of, and its first row in that."""

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """Rows of grids of one shape, one after the other."""
        first = grids[0]
        rows, tokens = first.rows, first.tokens
        if all(grid.alike for grid in grids):
            return _alike_grid(rows * len(grids), tokens)
        at = np.concatenate([grid.at + number * rows * tokens for number, grid in enumerate(grids)])
        row_of = np.concatenate([grid.row_of + number * rows for number, grid in enumerate(grids)])
        lengths = np.concatenate([grid.lengths for grid in grids])
        return cls(rows * len(grids), tokens, at, lengths, row_of, left=first.left)

    def split(self, count: int) -> Iterator[Grid]:
        """`count` grids of equally many rows."""
        rows = self.rows // count
        if self.alike:
            yield from [_alike_grid(rows, self.tokens)] * count
            return
        cuts = np.searchsorted(self.row_of, np.arange(count + 1) * rows).tolist()
        for number, (low, high) in enumerate(pairwise(cuts)):
            first = number * rows
            at, row_of = self.at[low:high] - first * self.tokens, self.row_of[low:high] - first
            part = Grid(rows, self.tokens, at, self.lengths[low:high], row_of, left=self.left, full=self.full)
            part._part_of = self, first
            yield part

    def empty(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if np.dtype(dtype).itemsize == 8:
            return np.empty((self.rows, self.tokens), dtype)
        return aligned_empty((self.rows, self.tokens), dtype)  # backends with narrow ids share aligned memory only

    def sizes(self) -> Ints:
        """Tokens of each row without padding."""
        return np.bincount(self.row_of, self.lengths, self.rows).astype(np.int64)

    def real(self, *, least: int = 0) -> npt.NDArray[np.bool_]:
        """True for tokens, False for padding. Rows count as having at least `least` tokens."""
        sizes = np.maximum(self.sizes(), least)[:, None]
        places = np.arange(self.tokens)
        found: npt.NDArray[np.bool_] = places >= self.tokens - sizes if self.left else places < sizes
        return found

    def runs(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Starts of all documents and runs of padding, with the end of the grid; and the number of each in its row.

        A run of padding counts as a document, with number 0.
        """
        if self._runs is None and self._part_of is not None:
            whole, first = self._part_of
            ends, numbers = whole.runs()
            low, high = whole.runs_between(first, first + self.rows)
            self._runs = ends[low : high + 1] - first * self.tokens, numbers[low:high]
        if self._runs is None:
            numbers = np.arange(1, len(self.at) + 1) - np.searchsorted(self.row_of, self.row_of)
            begins = self.at
            if not self.full:
                sizes = self.sizes()
                padded = np.flatnonzero(sizes < self.tokens)
                padding = padded * self.tokens + (0 if self.left else sizes[padded])
                begins = np.concatenate([begins, padding])
                order = np.argsort(begins, kind="stable")
                begins, numbers = begins[order], np.concatenate([numbers, np.zeros_like(padding)])[order]
            self._runs = np.append(begins, self.rows * self.tokens), numbers.astype(np.int32)
        return self._runs

    def runs_between(self, first: int, last: int) -> tuple[int, int]:
        """First and last run of some rows."""
        low, high = np.searchsorted(self.runs()[0], (first * self.tokens, last * self.tokens)).tolist()
        return low, high


class CompactBatch:
    """Batch in its smallest form: ids in the type of the store, the supervised tokens, and the grid of documents.

    Fields are made from it, never from each other: changing one changes no other.
    """

    __slots__ = ("_part_of", "first_row", "grid", "ids", "items", "layout", "page_locked", "sent", "supervised")

    def __init__(
        self,
        ids: npt.NDArray[Any],
        supervised: npt.NDArray[np.bool_] | None,
        grid: Grid,
        layout: BatchLayout,
        items: int | None = None,
    ) -> None:
        self._part_of: CompactBatch | None = None
        self.first_row = 0
        """Place of this batch in those that were collated as one."""
        self.sent: dict[Any, Any] = {}
        """Copies on devices."""
        self.page_locked: PageLocked | None = None
        """Memory of the ids, if a device reads it by itself."""
        self.ids, self.grid, self.layout = ids, grid, layout
        self.supervised = supervised
        """Supervised tokens; None: all but the first of each document."""
        self.items = items
        """Supervised tokens of the global batch, if they are not those of this one."""

    @classmethod
    def from_parts(cls, parts: Mapping[str, npt.NDArray[Any]], layout: BatchLayout) -> CompactBatch:
        """Batch of the arrays of `parts`."""
        ids = parts["ids"]
        rows, tokens = ids.shape
        if "at" in parts:
            left = layout.side == "left" and not layout.padding_free
            grid = Grid(rows, tokens, parts["at"], parts["lengths"], parts["row_of"], left=left)
        else:
            grid = _alike_grid(rows, tokens)
        return cls(ids, parts.get("supervised"), grid, layout)

    @classmethod
    def join(cls, several: Sequence[CompactBatch]) -> None:
        """Have batches cross to a device as one, as those do that were collated as one, if they have one shape."""
        first = several[0] if several else None
        if first is None or len(several) == 1 or not all(each._joins(first) for each in several):
            return
        rows, masked = first.grid.rows, first.supervised is not None
        grid = Grid.joined([each.grid for each in several])
        mask = np.concatenate([each.supervised for each in several]) if masked else None
        whole = cls(np.concatenate([each.ids for each in several]), mask, grid, first.layout)
        for number, each in enumerate(several):
            each._part_of, each.first_row = whole, number * rows

    def _joins(self, other: CompactBatch) -> bool:
        """True if this batch has the shape of another, and both are by themselves."""
        alone = self._part_of is None and not self.sent and not self.layout.padding_free
        same = self.ids.shape == other.ids.shape and self.ids.dtype == other.ids.dtype and self.layout == other.layout
        return alone and same and (self.supervised is None) == (other.supervised is None)

    def parts(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays that describe the batch, together with its layout: for other processes."""
        grid, found = self.grid, {"ids": self.ids}
        if self.supervised is not None:
            found["supervised"] = self.supervised
        return found if grid.alike else found | {"at": grid.at, "lengths": grid.lengths, "row_of": grid.row_of}

    @property
    def whole(self) -> CompactBatch:
        """Batches that were collated as one, which cross to a device together; this one if it was collated alone."""
        return self if self._part_of is None else self._part_of

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + (0 if self.supervised is None else self.supervised.nbytes)

    def make(self, name: str) -> Any:
        """A field, as an array that nothing else refers to, or as a number."""
        return _MAKERS[name](self)

    def arrays(self) -> dict[str, Any]:
        """All fields of the layout."""
        return {name: self.make(name) for name in FIELDS if name in self.layout.present & self.layout.fields}

    def wire(self) -> dict[str, npt.NDArray[Any]]:
        """Arrays that a device needs to make the fields: ids, and if necessary supervised, sizes, ends and numbers."""
        found: dict[str, npt.NDArray[Any]] = {"ids": self.ids}
        wanted, grid = self.layout.present, self.grid
        if self.supervised is not None and wanted & _LEARNED:
            found["supervised"] = self.supervised
        if not grid.full:
            found["sizes"] = grid.sizes().astype(np.int32)
        learned_by_runs = self.supervised is None and wanted & _LEARNED
        if not grid.alike and (learned_by_runs or wanted & (_BOUNDARIES | {"position_ids"})):
            found["ends"], found["numbers"] = grid.runs()
        return found

    def split(self, count: int) -> Iterator[CompactBatch]:
        """`count` batches of equally many rows that were collated as one."""
        ids, masks, layout = self.ids, self.supervised, self.layout
        shape = (count, len(ids) // count, *ids.shape[1:])
        each: Iterable[Any] = repeat(None, count) if masks is None else masks.reshape(shape)
        first = 0
        for part, mask, grid in zip(ids.reshape(shape), each, self.grid.split(count)):
            batch = CompactBatch(part, mask, grid, layout)
            batch._part_of, batch.first_row = self, first
            first += shape[1]
            yield batch

    def _input_ids(self) -> npt.NDArray[Any]:
        integer = self.layout.wide
        if integer.itemsize == 8:  # as Grid.empty
            return self.ids.astype(integer, "C")
        wide = self.grid.empty(integer)
        wide[...] = self.ids
        return wide

    def _labels(self) -> npt.NDArray[Any]:
        labels, grid = self._input_ids(), self.grid
        if self.supervised is not None:
            labels[~self.supervised] = IGNORE
            return labels
        if not grid.full:
            labels[~grid.real()] = IGNORE
        self._mark_first(labels, IGNORE)
        return labels

    def _loss_mask(self) -> npt.NDArray[Any]:
        if self.supervised is not None:
            return self.supervised.copy()
        grid = self.grid
        mask = np.ones((grid.rows, grid.tokens), np.bool_) if grid.full else grid.real()
        self._mark_first(mask, False)
        return mask

    def _mark_first(self, array: npt.NDArray[Any], value: Any) -> None:
        """Set the first token of every document, which nothing predicts."""
        if self.grid.alike:
            array[:, 0] = value
        else:
            array.reshape(-1)[self.grid.at] = value

    def _items(self) -> int:
        if self.items is not None:
            return self.items
        if self.supervised is not None:
            return int(np.count_nonzero(self.supervised))
        return int(self.grid.lengths.sum()) - len(self.grid.lengths)

    def _attention_mask(self) -> npt.NDArray[Any]:
        mask = self.grid.empty(self.layout.integer)
        # A row of padding attends to one token: a softmax over nothing is NaN.
        mask[...] = 1 if self.grid.full else self.grid.real(least=1)
        return mask

    def _position_ids(self) -> npt.NDArray[Any]:
        positions, grid = self.grid.empty(self.layout.integer), self.grid
        if grid.alike:
            positions[:] = np.arange(grid.tokens)
            return positions
        ends, _ = grid.runs()
        flat = positions.reshape(-1)
        np.subtract(np.arange(flat.size), np.repeat(ends[:-1], np.diff(ends)), out=flat, casting="unsafe")
        return positions

    def _document_ids(self) -> npt.NDArray[Any]:
        shape = (self.grid.rows, self.grid.tokens)
        if self.grid.alike:
            return np.ones(shape, np.int32)
        ends, numbers = self.grid.runs()
        return np.repeat(numbers, np.diff(ends)).reshape(shape)

    def _cu_seqlens(self) -> npt.NDArray[Any]:
        if self.grid.alike:
            return np.arange(self.grid.rows + 1, dtype=np.int32) * np.int32(self.grid.tokens)
        return self.grid.runs()[0].astype(np.int32)

    def _max_seqlen(self) -> int:
        return self.grid.tokens if self.grid.alike else int(np.diff(self.grid.runs()[0]).max())


class HostFields:
    """Fields made in main memory from the compact form of a batch."""

    __slots__ = ("backend", "compact", "names")

    def __init__(self, compact: CompactBatch, backend: Backend) -> None:
        self.compact, self.backend, self.names = compact, backend, compact.layout.present

    @property
    def nbytes(self) -> int:
        return self.compact.nbytes

    def make(self, name: str) -> Array | int:
        made: Any = _MAKERS[name](self.compact)
        return made if isinstance(made, int) else self.backend.from_numpy(made)

    def receive(self) -> None:
        """Nothing: there are no streams in main memory."""

    def to(self, device: Device) -> DeferredFields | None:
        return self.backend.compact_to(self.compact, device)


_MAKERS: dict[str, Callable[[CompactBatch], Any]] = {
    "input_ids": CompactBatch._input_ids,
    "attention_mask": CompactBatch._attention_mask,
    "labels": CompactBatch._labels,
    "loss_mask": CompactBatch._loss_mask,
    "position_ids": CompactBatch._position_ids,
    "cu_seqlens": CompactBatch._cu_seqlens,
    "max_seqlen": CompactBatch._max_seqlen,
    "document_ids": CompactBatch._document_ids,
    "num_items_in_batch": CompactBatch._items,
}


def width(samples: Samples, layout: BatchLayout) -> int:
    """Tokens of a row, computed from the global batch, so that all ranks agree."""
    if layout.length is not None:
        longest = layout.length
    else:
        sizes = samples.lengths if layout.split else samples.sizes()
        longest = int(sizes.max()) if len(sizes) else 1
    return rounded(longest, layout)


def rounded(longest: int, layout: BatchLayout) -> int:
    """Tokens of a row that holds this many."""
    return -(-max(longest, 1) // layout.multiple) * layout.multiple


def collate(
    samples: Samples, sources: Ints, tables: Sequence[Tokens], layout: BatchLayout, tokens_in_row: int
) -> dict[str, Any]:
    """Arrays of a batch, all fields of the layout; see `collate_compact`."""
    return collate_compact(samples, sources, tables, layout, tokens_in_row).arrays()


def collate_compact(
    samples: Samples,
    sources: Ints,
    tables: Sequence[Tokens],
    layout: BatchLayout,
    tokens_in_row: int,
    page_locked: Callable[[int], PageLocked | None] | None = None,
) -> CompactBatch:
    """Batch whose fields are still to be made. `sources` has the number of the table of each part.

    `page_locked` gives memory for ids that a device will read; None if there is none left.

    A sample without parts, or a batch without samples, is a row of padding. Its first token is attended to; it has no
    labels.
    """
    least = int(samples.lengths.min()) if len(samples.lengths) else None
    if least == 0:
        if len(tables) > 1:  # otherwise nobody reads them, and they may be those of the first batch alone
            sources = sources[samples.lengths > 0]
        samples = samples.where(samples.lengths > 0)
    if layout.split:
        samples = Samples(np.arange(len(samples.rows) + 1), samples.rows, samples.starts, samples.lengths, single=True)
    if layout.padding_free:
        grid = _flat_grid(samples, layout)
    elif samples.single and least == tokens_in_row:
        grid = _alike_grid(len(samples), tokens_in_row)
    else:
        grid = _padded_grid(samples, layout, tokens_in_row)
    ids, memory = _take_alike(samples, tables, grid), None
    if ids is None:
        kind = _ids_dtype(tables, layout)
        memory = None if page_locked is None else page_locked(grid.rows * grid.tokens * kind.itemsize)
        ids = grid.empty(kind) if memory is None else memory.numpy().view(kind).reshape(grid.rows, grid.tokens)
        _copy_ids(samples, sources, tables, grid, layout, ids)
    learned = layout.fields & _LEARNED and any(table.masked for table in tables)
    batch = CompactBatch(ids, _supervised(samples, sources, tables, grid) if learned else None, grid, layout)
    batch.page_locked = memory
    return batch


def _padded_grid(samples: Samples, layout: BatchLayout, tokens: int) -> Grid:
    count, lengths = len(samples), samples.lengths
    row_of = samples.numbers()
    before = np.cumsum(lengths) - lengths
    first = np.zeros(count, np.int64)
    filled = samples.offsets[1:] > samples.offsets[:-1]
    first[filled] = before[samples.offsets[:-1][filled]]
    at = before - first[row_of] + row_of * tokens
    left = layout.side == "left"
    if left:
        at += (tokens - samples.sizes())[row_of]
    return Grid(max(count, 1), tokens, at, lengths, row_of, left=left)


@lru_cache(maxsize=64)
def _alike_grid(rows: int, tokens: int) -> Grid:
    numbers = np.arange(rows)
    return Grid(rows, tokens, numbers * tokens, np.full(rows, tokens), numbers, alike=True)


def _flat_grid(samples: Samples, layout: BatchLayout) -> Grid:
    total = int(samples.lengths.sum())
    tokens = -(-max(total, 1) // layout.multiple) * layout.multiple
    at = np.cumsum(samples.lengths) - samples.lengths
    return Grid(1, tokens, at, samples.lengths, np.zeros(len(samples.rows), np.int64))


def _ids_dtype(tables: Sequence[Tokens], layout: BatchLayout) -> np.dtype[Any]:
    """Dtype of all tables if they have one, it is narrower than that of the fields, and padding fits."""
    wide = np.dtype(layout.integer)
    kinds = {getattr(table, "dtype", wide) for table in tables}
    kind: np.dtype[Any] = kinds.pop()
    fits = not kinds and kind.itemsize < wide.itemsize and layout.pad_id <= np.iinfo(kind).max
    return kind if fits else wide


def _take_alike(samples: Samples, tables: Sequence[Tokens], grid: Grid) -> npt.NDArray[Any] | None:
    """Ids taken row by row, if every row is one part and the table supports it."""
    if not grid.alike or len(tables) > 1:
        return None
    table = tables[0]
    if type(table) not in _ROWWISE:
        _ROWWISE[type(table)] = isinstance(table, RowTokens)  # slow for protocols, so once for each class
    if not _ROWWISE[type(table)]:
        return None
    return cast(RowTokens, table).take_rows(samples.rows, samples.starts, grid.tokens)


def _copy_ids(
    samples: Samples,
    sources: Ints,
    tables: Sequence[Tokens],
    grid: Grid,
    layout: BatchLayout,
    ids: npt.NDArray[Any],
) -> None:
    if not grid.full:
        ids.fill(layout.pad_id)
    out = ids.reshape(-1)
    for number, which in by_owner(sources, len(tables)):
        table = tables[number]
        table.copy(samples.rows[which], samples.starts[which], samples.lengths[which], out, grid.at[which])


def _supervised(samples: Samples, sources: Ints, tables: Sequence[Tokens], grid: Grid) -> npt.NDArray[np.bool_]:
    """Supervised tokens by the masks of the tables; never the first of a document, which nothing predicts."""
    mask = np.zeros((grid.rows, grid.tokens), np.bool_)
    flat = mask.reshape(-1)
    for number, which in by_owner(sources, len(tables)):
        table = tables[number]
        at, lengths = grid.at[which], grid.lengths[which]
        if table.masked:
            table.copy_mask(samples.rows[which], samples.starts[which], lengths, flat, at)
        else:
            flat[spread(at, lengths)] = True
    flat[grid.at] = False
    return mask


def spread(at: Ints, lengths: Ints) -> Ints:
    """Place of every token of some parts."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(at, lengths)
