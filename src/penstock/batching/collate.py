"""Collation: the arrays of a batch from samples.

All encodings of document boundaries that kernels take (`position_ids`, `document_ids`, `cu_seqlens`) are made from one
grid, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import offsets_of
from penstock.batching.backends.base import aligned_empty
from penstock.errors import ConfigError
from penstock.order.samples import Samples
from penstock.store.gather import TokenTable

__all__ = [
    "FIELDS",
    "IGNORE",
    "BatchLayout",
    "RowTokens",
    "Supervision",
    "Tokens",
    "collate",
    "split_rows",
    "supervised_tokens",
    "width",
]


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

_BY_ROW = frozenset({"input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "document_ids"})
_ROWWISE: dict[type, bool] = {}


class Tokens(Protocol):
    """Table that tokens are copied from."""

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


@runtime_checkable
class RowTokens(Tokens, Protocol):
    """Table that can also fill rows of one length at once."""

    def copy_rows(self, rows: Ints, starts: Ints, *outs: npt.NDArray[Any]) -> None:
        """Fill row j of every `out` with the tokens of row `rows[j]` from `starts[j]` on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class _Grid:
    """Grid of rows and tokens, and the place of each part in it."""

    rows: int
    tokens: int
    at: Ints
    """Start of each part in the flattened grid."""
    lengths: Ints
    row_of: Ints
    full: bool
    """True without padding."""
    alike: bool = False
    """True if every row is one part."""

    def empty(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if np.dtype(dtype).itemsize == 8:
            return np.empty((self.rows, self.tokens), dtype)
        return aligned_empty((self.rows, self.tokens), dtype)  # backends with narrow ids share aligned memory only


def width(samples: Samples, layout: BatchLayout) -> int:
    """Tokens of a row, computed from the global batch, so that all ranks agree."""
    if layout.length is not None:
        longest = layout.length
    else:
        sizes = samples.lengths if layout.split else samples.sizes()
        longest = max(int(sizes.max()) if len(sizes) else 1, 1)
    return -(-longest // layout.multiple) * layout.multiple


def collate(
    samples: Samples, sources: Ints, tables: Sequence[Tokens], layout: BatchLayout, tokens_in_row: int
) -> dict[str, Any]:
    """Arrays of a batch. `sources` has the number of the table of each part.

    A sample without parts, or a batch without samples, is a row of padding. Its first token is attended to, since a
    softmax over a row without attention is NaN; it has no labels.
    """
    if len(samples.lengths) and samples.lengths.min() == 0:
        sources = sources[samples.lengths > 0]
        samples = samples.where(samples.lengths > 0)
    if layout.split:
        samples = Samples(np.arange(len(samples.rows) + 1), samples.rows, samples.starts, samples.lengths, single=True)
    grid = _flat_grid(samples, layout) if layout.padding_free else _padded_grid(samples, layout, tokens_in_row)
    ids = grid.empty(layout.integer)
    learned = bool(layout.fields & {"labels", "loss_mask", "num_items_in_batch"})
    labels = grid.empty(layout.integer) if learned else None
    both = [ids] if labels is None else [ids, labels]
    if not _copy_alike(both, samples, tables, grid):
        _copy_ids(ids, samples, sources, tables, grid, layout)
        if labels is not None:
            np.copyto(labels, ids)
    found: dict[str, Any] = {"input_ids": ids}
    if labels is not None:
        _mask_labels(labels, samples, sources, tables, grid)
        found["labels"] = labels
        if layout.fields & {"loss_mask", "num_items_in_batch"}:
            found["loss_mask"] = labels != IGNORE
            found["num_items_in_batch"] = int(np.count_nonzero(found["loss_mask"]))
    if "attention_mask" in layout.fields and not layout.padding_free:
        found["attention_mask"] = _attention(grid, layout)
    if layout.fields & {"position_ids", "document_ids", "cu_seqlens", "max_seqlen"}:
        found |= _documents(grid, layout)
    return {name: value for name, value in found.items() if name in layout.fields}


def split_rows(arrays: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Arrays of `count` batches of equally many unpadded rows that were collated as one."""
    rows = len(arrays["input_ids"]) // count
    ends = arrays["cu_seqlens"][: rows + 1] if "cu_seqlens" in arrays else None
    for low in range(0, rows * count, rows):
        part = {name: value[low : low + rows] for name, value in arrays.items() if name in _BY_ROW}
        if ends is not None:
            part["cu_seqlens"] = ends.copy()
        if "max_seqlen" in arrays:
            part["max_seqlen"] = arrays["max_seqlen"]
        if "num_items_in_batch" in arrays:
            learned = part["loss_mask"] if "loss_mask" in part else part["labels"] != IGNORE
            part["num_items_in_batch"] = int(np.count_nonzero(learned))
        yield part


def supervised_tokens(samples: Samples, sources: Ints, tables: Sequence[Tokens]) -> int:
    """Number of labels that a batch would have, without building it."""
    total = 0
    for number, table in enumerate(tables):
        which = sources == number
        lengths = samples.lengths[which]
        if not table.masked:
            total += int(np.maximum(lengths - 1, 0).sum())
            continue
        at = np.cumsum(lengths) - lengths
        mask = np.zeros(int(lengths.sum()) + 1, np.bool_)
        table.copy_mask(samples.rows[which], samples.starts[which], lengths, mask, at)
        mask[at[lengths > 0]] = False
        total += int(np.count_nonzero(mask))
    return total


def _padded_grid(samples: Samples, layout: BatchLayout, tokens: int) -> _Grid:
    count, lengths = len(samples), samples.lengths
    if samples.single and count and int(lengths.min()) == tokens:
        numbers = np.arange(count)
        return _Grid(count, tokens, numbers * tokens, lengths, numbers, full=True, alike=True)
    row_of = samples.numbers()
    before = np.cumsum(lengths) - lengths
    first = np.zeros(count, np.int64)
    filled = samples.offsets[1:] > samples.offsets[:-1]
    first[filled] = before[samples.offsets[:-1][filled]]
    at = before - first[row_of] + row_of * tokens
    if layout.side == "left":
        at += (tokens - samples.sizes())[row_of]
    full = int(lengths.sum()) == max(count, 1) * tokens
    return _Grid(max(count, 1), tokens, at, lengths, row_of, full=full)


def _flat_grid(samples: Samples, layout: BatchLayout) -> _Grid:
    total = int(samples.lengths.sum())
    tokens = -(-max(total, 1) // layout.multiple) * layout.multiple
    at = np.cumsum(samples.lengths) - samples.lengths
    return _Grid(1, tokens, at, samples.lengths, np.zeros(len(samples.rows), np.int64), full=total == tokens)


def _copy_alike(outs: Sequence[npt.NDArray[Any]], samples: Samples, tables: Sequence[Tokens], grid: _Grid) -> bool:
    """Fill arrays row by row if every row is one part and the table supports it; returns whether it was done."""
    if not grid.alike or len(tables) > 1:
        return False
    table = tables[0]
    if type(table) not in _ROWWISE:
        _ROWWISE[type(table)] = isinstance(table, RowTokens)  # slow for protocols, so once for each class
    if _ROWWISE[type(table)]:
        cast(RowTokens, table).copy_rows(samples.rows, samples.starts, *outs)
    return _ROWWISE[type(table)]


def _copy_ids(
    ids: npt.NDArray[Any],
    samples: Samples,
    sources: Ints,
    tables: Sequence[Tokens],
    grid: _Grid,
    layout: BatchLayout,
) -> None:
    if not grid.full:
        ids.fill(layout.pad_id)
    out = ids.reshape(-1)
    for number, table in enumerate(tables):
        which = _of(number, sources, tables)
        table.copy(samples.rows[which], samples.starts[which], samples.lengths[which], out, grid.at[which])


def _mask_labels(
    labels: npt.NDArray[Any], samples: Samples, sources: Ints, tables: Sequence[Tokens], grid: _Grid
) -> None:
    """Keep ids as labels where tokens are supervised; never the first of a document, which nothing predicts."""
    flat = labels.reshape(-1)
    if not grid.full or any(table.masked for table in tables):
        learned = np.zeros(flat.shape, np.bool_)
        for number, table in enumerate(tables):
            which = _of(number, sources, tables)
            at, lengths = grid.at[which], grid.lengths[which]
            if table.masked:
                table.copy_mask(samples.rows[which], samples.starts[which], lengths, learned, at)
            else:
                learned[_spread(at, lengths)] = True
        flat[~learned] = IGNORE
    flat[grid.at] = IGNORE


def _of(number: int, sources: Ints, tables: Sequence[Tokens]) -> Any:
    """Index of the parts from a table."""
    return slice(None) if len(tables) == 1 else np.flatnonzero(sources == number)


def _attention(grid: _Grid, layout: BatchLayout) -> npt.NDArray[Any]:
    mask = grid.empty(layout.integer)
    mask.fill(1 if grid.full else 0)
    if not grid.full:
        mask.reshape(-1)[_spread(grid.at, grid.lengths)] = 1
        blank = np.setdiff1d(np.arange(grid.rows), grid.row_of)
        mask[blank, -1 if layout.side == "left" else 0] = 1
    return mask


def _documents(grid: _Grid, layout: BatchLayout) -> dict[str, Any]:
    """Document boundaries in four encodings. A run of padding counts as a document, with number 0."""
    found: dict[str, Any] = {}
    shape = (grid.rows, grid.tokens)
    if grid.alike:
        if "position_ids" in layout.fields:
            found["position_ids"] = positions = grid.empty(layout.integer)
            positions[:] = np.arange(grid.tokens)
        if not (layout.packed or layout.padding_free):
            return found
        ends = np.arange(grid.rows + 1, dtype=np.int32) * np.int32(grid.tokens)
        documents = np.ones(shape, np.int32)
        return found | {"document_ids": documents, "cu_seqlens": ends, "max_seqlen": grid.tokens}
    begins, lengths, padding = _runs(grid)
    if "position_ids" in layout.fields:
        found["position_ids"] = positions = grid.empty(layout.integer)
        flat = positions.reshape(-1)
        np.subtract(np.arange(flat.size), np.repeat(begins, lengths), out=flat, casting="unsafe")
    if not (layout.packed or layout.padding_free):
        return found
    if "document_ids" in layout.fields:
        row = begins // grid.tokens
        real = np.cumsum(~padding)
        before = np.concatenate([[0], real])[np.searchsorted(row, row)]  # documents in earlier rows
        number = np.where(padding, 0, real - before)
        found["document_ids"] = np.repeat(number, lengths).astype(np.int32).reshape(shape)
    found["cu_seqlens"] = np.append(begins, grid.rows * grid.tokens).astype(np.int32)
    found["max_seqlen"] = int(lengths.max())
    return found


def _runs(grid: _Grid) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """(start, length, is padding) of all documents and runs of padding, in order."""
    size = grid.rows * grid.tokens
    edges = np.arange(grid.rows, dtype=np.int64) * grid.tokens
    begins = np.unique(np.concatenate([grid.at, grid.at + grid.lengths, edges]))
    begins = begins[begins < size]
    padding = ~np.isin(begins, grid.at, assume_unique=True)
    return begins, np.diff(np.append(begins, size)), padding


def _spread(at: Ints, lengths: Ints) -> Ints:
    """Place of every token of some parts."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(at, lengths)


_WORD = 64


class Supervision:
    """Counts of supervised tokens in parts of rows: all but the first without a mask, otherwise by the mask.

    The first token of a part has no label, since nothing predicts it. A mask is read once (about a nanosecond a token)
    and kept as bits with a count for every 64 of them: a quarter of a byte a token.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def count(self, samples: Samples) -> Ints:
        """Supervised tokens of each part."""
        lengths = samples.lengths
        if not self._table.masked:
            return np.maximum(lengths - 1, 0)
        begins = self._bits[2][samples.rows] + samples.starts
        return np.where(lengths > 0, self._supervised_before(begins + lengths) - self._supervised_before(begins + 1), 0)

    def _supervised_before(self, places: Ints) -> Ints:
        """Supervised tokens before each place in the table, all rows end to end."""
        words, before, _ = self._bits
        word, bit = places // _WORD, (places % _WORD).astype(np.uint64)
        below = words[word] & ((np.uint64(1) << bit) - np.uint64(1))
        return before[word] + np.bitwise_count(below)

    @cached_property
    def _bits(self) -> tuple[npt.NDArray[np.uint64], Ints, Ints]:
        """Mask as 64-bit words, the bits set before each word, and the start of each row."""
        table = self._table
        assert table.mask_column is not None
        lengths: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        packed: list[npt.NDArray[np.uint8]] = []
        left = np.zeros(0, np.uint8)
        for store in table.stores:
            for batch in store.batches(columns=[table.mask_column]):
                column = batch.column(0)
                lengths.append(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64))
                values = column.flatten().to_numpy(zero_copy_only=False)
                bits = np.concatenate([left, values != 0])
                whole = len(bits) - len(bits) % 8
                packed.append(np.packbits(bits[:whole], bitorder="little"))
                left = bits[whole:]
        packed.append(np.packbits(left, bitorder="little"))
        flat = np.concatenate(packed)
        words = np.zeros(len(flat) // 8 + 2, "<u8")
        words.view(np.uint8)[: len(flat)] = flat
        native = words.astype(np.uint64, copy=False)
        return native, offsets_of(np.bitwise_count(native))[:-1], offsets_of(np.concatenate(lengths))[:-1]
