"""From samples to the arrays of a batch: where each token goes, and what is said about it.

All the encodings of "where do documents begin" that kernels ask for (`position_ids`, `document_ids`, `cu_seqlens`) are
made from one layout, so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.batching.backends.base import aligned_empty
from penstock.errors import ConfigError
from penstock.order.samples import Samples

__all__ = [
    "FIELDS",
    "IGNORE",
    "BatchForm",
    "RowTokens",
    "Tokens",
    "collate",
    "split_rows",
    "supervised_tokens",
    "width",
]

Ints = npt.NDArray[np.int64]
IGNORE = -100
"""The label of a token that nothing is to be learned from."""
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
    """Where the tokens of rows are copied from."""

    @property
    def masked(self) -> bool:
        """Whether it knows which tokens are supervised; if not, all of them are."""
        ...

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy tokens `starts[j]` to `starts[j] + lengths[j]` of row `rows[j]` to `out[at[j]:]`, for every j."""
        ...

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        """The same for which of them are supervised."""
        ...


@runtime_checkable
class RowTokens(Tokens, Protocol):
    """Tokens that fill rows of an array at once, if all are of one length."""

    def copy_rows(self, rows: Ints, starts: Ints, *outs: npt.NDArray[Any]) -> None:
        """Fill row j of every `out` with the tokens of row `rows[j]` from `starts[j]` on."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchForm:
    """What batches look like, whatever is in them."""

    padding_free: bool = False
    """All samples end to end in one row, without padding."""
    length: int | None = None
    """Every row has this many tokens; None: as many as the longest sample of the global batch."""
    multiple: int = 1
    """Rows are padded to a multiple of this."""
    packed: bool = False
    """Whether a sample holds several documents."""
    split: bool = False
    """Whether the parts of a sample are rows of their own: samples are whole batches."""
    pad_id: int = 0
    side: Literal["right", "left"] = "right"
    """Where padding goes."""
    integer: npt.DTypeLike = np.int64
    fields: frozenset[str] = frozenset(FIELDS)

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ConfigError(f"pad_to_multiple_of must be positive, got {self.multiple}")
        if self.side not in ("right", "left"):
            raise ConfigError(f"padding_side must be 'right' or 'left', got {self.side!r}")
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(f"a batch has no field {name!r}{did_you_mean(name, FIELDS)}; it has {list(FIELDS)}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """A grid of rows and tokens, and where each part of the samples begins in it, counted through."""

    rows: int
    tokens: int
    at: Ints
    lengths: Ints
    row_of: Ints
    full: bool
    """Whether there is no padding."""
    alike: bool = False
    """Whether every row is one part."""

    def empty(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if np.dtype(dtype).itemsize == 8:
            return np.empty((self.rows, self.tokens), dtype)
        return aligned_empty((self.rows, self.tokens), dtype)  # what takes narrow ids shares aligned memory only


def width(samples: Samples, form: BatchForm) -> int:
    """Tokens of a row: the same on every rank, since it is asked of the global batch."""
    if form.length is not None:
        longest = form.length
    else:
        sizes = samples.lengths if form.split else samples.sizes()
        longest = max(int(sizes.max()) if len(sizes) else 1, 1)
    return -(-longest // form.multiple) * form.multiple


def collate(
    samples: Samples, sources: Ints, tables: Sequence[Tokens], form: BatchForm, tokens_in_row: int
) -> dict[str, Any]:
    """The arrays of a batch. `sources` says which table each part is from.

    A sample without parts, or a batch without samples, is a row of padding whose first token is attended to, since a
    row that attends to nothing makes NaN of a softmax. Nothing is learned from it.
    """
    if len(samples.lengths) and samples.lengths.min() == 0:
        sources = sources[samples.lengths > 0]
        samples = samples.where(samples.lengths > 0)
    if form.split:
        samples = Samples(np.arange(len(samples.rows) + 1), samples.rows, samples.starts, samples.lengths, single=True)
    layout = _flat(samples, form) if form.padding_free else _grid(samples, form, tokens_in_row)
    ids = layout.empty(form.integer)
    learned = bool(form.fields & {"labels", "loss_mask", "num_items_in_batch"})
    labels = layout.empty(form.integer) if learned else None
    both = [ids] if labels is None else [ids, labels]
    if not _copy_alike(both, samples, tables, layout):
        _copy_ids(ids, samples, sources, tables, layout, form)
        if labels is not None:
            np.copyto(labels, ids)
    found: dict[str, Any] = {"input_ids": ids}
    if labels is not None:
        _mask_labels(labels, samples, sources, tables, layout)
        found["labels"] = labels
        if form.fields & {"loss_mask", "num_items_in_batch"}:
            found["loss_mask"] = labels != IGNORE
            found["num_items_in_batch"] = int(np.count_nonzero(found["loss_mask"]))
    if "attention_mask" in form.fields and not form.padding_free:
        found["attention_mask"] = _attention(layout, form)
    if form.fields & {"position_ids", "document_ids", "cu_seqlens", "max_seqlen"}:
        found |= _documents(layout, form)
    return {name: value for name, value in found.items() if name in form.fields}


def split_rows(arrays: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """The arrays of `count` batches of equally many rows without padding that were collated as one."""
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
    """The tokens that a batch would have labels for, counted without making it."""
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


def _grid(samples: Samples, form: BatchForm, tokens: int) -> _Layout:
    count, lengths = len(samples), samples.lengths
    if samples.single and count and int(lengths.min()) == tokens:
        numbers = np.arange(count)
        return _Layout(count, tokens, numbers * tokens, lengths, numbers, full=True, alike=True)
    row_of = samples.numbers()
    before = np.cumsum(lengths) - lengths
    first = np.zeros(count, np.int64)
    filled = samples.offsets[1:] > samples.offsets[:-1]
    first[filled] = before[samples.offsets[:-1][filled]]
    at = before - first[row_of] + row_of * tokens
    if form.side == "left":
        at += (tokens - samples.sizes())[row_of]
    full = int(lengths.sum()) == max(count, 1) * tokens
    return _Layout(max(count, 1), tokens, at, lengths, row_of, full=full)


def _flat(samples: Samples, form: BatchForm) -> _Layout:
    total = int(samples.lengths.sum())
    tokens = -(-max(total, 1) // form.multiple) * form.multiple
    at = np.cumsum(samples.lengths) - samples.lengths
    return _Layout(1, tokens, at, samples.lengths, np.zeros(len(samples.rows), np.int64), full=total == tokens)


def _copy_alike(outs: Sequence[npt.NDArray[Any]], samples: Samples, tables: Sequence[Tokens], layout: _Layout) -> bool:
    """Fill arrays with tokens if every row is one part and the table can do that at once; say whether it was done."""
    if not layout.alike or len(tables) > 1:
        return False
    table = tables[0]
    if type(table) not in _ROWWISE:
        _ROWWISE[type(table)] = isinstance(table, RowTokens)  # a slow question, of protocols
    if _ROWWISE[type(table)]:
        cast(RowTokens, table).copy_rows(samples.rows, samples.starts, *outs)
    return _ROWWISE[type(table)]


def _copy_ids(
    ids: npt.NDArray[Any],
    samples: Samples,
    sources: Ints,
    tables: Sequence[Tokens],
    layout: _Layout,
    form: BatchForm,
) -> None:
    if not layout.full:
        ids.fill(form.pad_id)
    out = ids.reshape(-1)
    for number, table in enumerate(tables):
        which = _of(number, sources, tables)
        table.copy(samples.rows[which], samples.starts[which], samples.lengths[which], out, layout.at[which])


def _mask_labels(
    labels: npt.NDArray[Any], samples: Samples, sources: Ints, tables: Sequence[Tokens], layout: _Layout
) -> None:
    """Leave the ids where there is something to learn; never the first of a document, which nothing predicts."""
    flat = labels.reshape(-1)
    if not layout.full or any(table.masked for table in tables):
        learned = np.zeros(flat.shape, np.bool_)
        for number, table in enumerate(tables):
            which = _of(number, sources, tables)
            at, lengths = layout.at[which], layout.lengths[which]
            if table.masked:
                table.copy_mask(samples.rows[which], samples.starts[which], lengths, learned, at)
            else:
                learned[_spread(at, lengths)] = True
        flat[~learned] = IGNORE
    flat[layout.at] = IGNORE


def _of(number: int, sources: Ints, tables: Sequence[Tokens]) -> Any:
    """Which parts are from a table."""
    return slice(None) if len(tables) == 1 else np.flatnonzero(sources == number)


def _attention(layout: _Layout, form: BatchForm) -> npt.NDArray[Any]:
    mask = layout.empty(form.integer)
    mask.fill(1 if layout.full else 0)
    if not layout.full:
        mask.reshape(-1)[_spread(layout.at, layout.lengths)] = 1
        blank = np.setdiff1d(np.arange(layout.rows), layout.row_of)
        mask[blank, -1 if form.side == "left" else 0] = 1
    return mask


def _documents(layout: _Layout, form: BatchForm) -> dict[str, Any]:
    """Where documents begin, said in four ways. Padding is one document more, but for its number, which is 0."""
    found: dict[str, Any] = {}
    shape = (layout.rows, layout.tokens)
    if layout.alike:
        if "position_ids" in form.fields:
            found["position_ids"] = positions = layout.empty(form.integer)
            positions[:] = np.arange(layout.tokens)
        if not (form.packed or form.padding_free):
            return found
        ends = np.arange(layout.rows + 1, dtype=np.int32) * np.int32(layout.tokens)
        documents = np.ones(shape, np.int32)
        return found | {"document_ids": documents, "cu_seqlens": ends, "max_seqlen": layout.tokens}
    begins, lengths, padding = _stretches(layout)
    if "position_ids" in form.fields:
        found["position_ids"] = positions = layout.empty(form.integer)
        flat = positions.reshape(-1)
        np.subtract(np.arange(flat.size), np.repeat(begins, lengths), out=flat, casting="unsafe")
    if not (form.packed or form.padding_free):
        return found
    if "document_ids" in form.fields:
        row = begins // layout.tokens
        real = np.cumsum(~padding)
        before = np.concatenate([[0], real])[np.searchsorted(row, row)]  # documents in earlier rows
        number = np.where(padding, 0, real - before)
        found["document_ids"] = np.repeat(number, lengths).astype(np.int32).reshape(shape)
    found["cu_seqlens"] = np.append(begins, layout.rows * layout.tokens).astype(np.int32)
    found["max_seqlen"] = int(lengths.max())
    return found


def _stretches(layout: _Layout) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """(where it begins, how long it is, whether it is padding) for all documents and runs of padding, in order."""
    size = layout.rows * layout.tokens
    edges = np.arange(layout.rows, dtype=np.int64) * layout.tokens
    begins = np.unique(np.concatenate([layout.at, layout.at + layout.lengths, edges]))
    begins = begins[begins < size]
    padding = ~np.isin(begins, layout.at, assume_unique=True)
    return begins, np.diff(np.append(begins, size)), padding


def _spread(at: Ints, lengths: Ints) -> Ints:
    """The place of every token of some parts."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(at, lengths)
