"""Rows of a token store: pages, search by text and by length, single rows."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import local_or_none
from penstock.store import Store, open_store
from penstock.store.manifest import MANIFEST_NAME
from penstock.ui.matches import Query
from penstock.ui.rows import SNIPPET_TOKENS, Deadline, RowDetail, RowPage, RowPlace, RowSummary, TokenPart, snippet
from penstock.ui.vocabulary import Vocabulary, vocabulary_of

_SHARD_PIECE = 1 << 20
"""Lengths that are compared at once."""
_MOST_COUNTED = 20_000_000


class StoreRows:
    """Rows of the current version of a store. Opened when first looked at, and again when another version is current.

    A request maps what it looks at. Search by length reads the index of lengths alone, four bytes a row.
    """

    unit = "tokens"

    def __init__(self, place: str, tokenizer: str | None = None) -> None:
        self._place, self._tokenizer = place, tokenizer
        self._lock = threading.Lock()
        self._opened: tuple[object, Store] | None = None
        self._counts: tuple[str, list[tuple[int, int, int, bool]]] | None = None
        self._vocabulary: tuple[str | None, Vocabulary | None, str] | None = None

    @property
    def store(self) -> Store:
        """The store as it is now; raises if it was removed."""
        with self._lock:
            stamp = self._stamp()
            if self._opened is None or self._opened[0] != stamp:
                self._opened = (stamp, open_store(self._place))
            return self._opened[1]

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self._texts()[0]

    @property
    def without_text(self) -> str:
        """Reason why there is no text; empty if there is."""
        return self._texts()[1]

    def files(self) -> Sequence[tuple[str, int | None]]:
        store = self.store
        return [(store.shown, len(store))]

    def find(self, file: int, row: int, deadline: Deadline) -> tuple[RowPlace, bool]:
        rows = len(self.store)
        if not rows or row >= rows:
            raise ConfigError(f"row {row:,} does not exist; the store has {rows:,} rows, counted from 0")
        return RowPlace(0, 0, row), True

    def page(self, at: RowPlace, count: int) -> RowPage:
        store = self.store
        begin = min(max(0, at.row), len(store))
        stop = min(begin + count, len(store))
        rows = [each for batch in store.batches(begin, stop) for each in self._summaries(store, batch)]
        numbered = [_numbered(summary, begin + number) for number, summary in enumerate(rows)]
        return RowPage(numbered, RowPlace(0, 0, begin), RowPlace(0, 0, stop) if stop < len(store) else None)

    def search(self, query: Query, at: RowPlace, count: int, deadline: Deadline) -> RowPage:
        store, begin = self.store, min(at.row, len(self.store))
        if query.text:
            found, stop = self._by_text(store, query, begin, count, deadline)
        else:
            found, stop = _by_length(store, query, begin, count, deadline)
        rows = [
            _numbered(summary, row)
            for row in found
            for batch in store.batches(row, row + 1)
            for summary in self._summaries(store, batch, query)
        ]
        return RowPage(rows, RowPlace(0, 0, begin), RowPlace(0, 0, stop) if stop < len(store) else None)

    def row(self, at: RowPlace) -> RowDetail:
        store = self.store
        if not 0 <= at.row < len(store):
            raise ConfigError(f"row {at.row:,} does not exist; the store has {len(store):,} rows, counted from 0")
        values = store[at.row]
        following = RowPlace(0, 0, at.row + 1) if at.row + 1 < len(store) else None
        parts, others = _token_parts(store, values)
        return RowDetail(at, others, parts, following=following)

    def length_counts(self) -> list[tuple[int, int, int, bool]] | None:
        """(shortest, longest, rows, True for an estimate) of ranges of lengths; None without lengths.

        Ranges go by powers of two. Counted once for a version; a store of over 20 million rows is sampled.
        """
        store = self.store
        if store.manifest.tokens_column is None or not len(store):
            return None
        with self._lock:
            if self._counts is None or self._counts[0] != store.manifest.checksum:
                self._counts = (store.manifest.checksum, _length_counts(store))
            return self._counts[1]

    def _by_text(self, store: Store, query: Query, begin: int, count: int, deadline: Deadline) -> tuple[list[int], int]:
        found: list[int] = []
        row = begin
        for batch in store.batches(begin):
            hits = query.in_batch(batch) | self._in_tokens(store, batch, query)
            if query.by_length and store.manifest.tokens_column is not None:
                hits &= query.fitting(_list_lengths(batch.column(store.manifest.tokens_column)))
            for number in np.flatnonzero(hits).tolist():
                found.append(row + number)
                if len(found) == count:
                    return found, row + number + 1
            row += batch.num_rows
            if deadline.over:
                break
        return found, row

    def _in_tokens(self, store: Store, batch: pa.RecordBatch, query: Query) -> npt.NDArray[np.bool_]:
        """Rows whose tokens, as text, have the text of the query."""
        found = np.zeros(batch.num_rows, bool)
        vocabulary = self.vocabulary
        for name in _token_columns(store) if vocabulary is not None else ():
            assert vocabulary is not None
            column = batch.column(name)
            data, offsets = vocabulary.joined(column.flatten().to_numpy(zero_copy_only=False))
            ends = np.concatenate([[0], np.cumsum(_list_lengths(column))])
            found |= query.in_spans(data, offsets[ends])
        return found

    def _summaries(self, store: Store, batch: pa.RecordBatch, query: Query | None = None) -> list[RowSummary]:
        manifest, vocabulary = store.manifest, self.vocabulary
        names = _token_columns(store)
        lengths = _list_lengths(batch.column(manifest.tokens_column)) if manifest.tokens_column else None
        made = []
        for number in range(batch.num_rows):
            ids = batch.column(names[0])[number] if names else None
            supervised = None
            if manifest.mask_column is not None:
                mask = batch.column(manifest.mask_column)[number].values
                supervised = int(mask.true_count) if mask is not None and pa.types.is_boolean(mask.type) else None
            text = _text_of_row(ids, vocabulary, query) if ids is not None else _plain_text(batch, number)
            length = int(lengths[number]) if lengths is not None else None
            made.append(RowSummary(RowPlace(), length, text, supervised))
        return made

    def _texts(self) -> tuple[Vocabulary | None, str]:
        store = self.store
        with self._lock:
            known = self._vocabulary
            if known is None or known[0] != store.manifest.tokenizer:
                known = (store.manifest.tokenizer, *vocabulary_of(store.manifest, self._tokenizer))
                self._vocabulary = known
            return known[1], known[2]

    def _stamp(self) -> object:
        """Changes when another version is current; a store in a bucket is opened once."""
        local = local_or_none(self._place)
        if local is None:
            return None
        try:
            stat = (local / MANIFEST_NAME if local.is_dir() else local).stat()
        except FileNotFoundError:
            if local.is_dir():
                return None  # token data of another program
            raise DataError(
                "it was removed while it was shown; restore it, or end penstock ui", file=self._place
            ) from None
        return stat.st_mtime_ns, stat.st_ino, stat.st_size


def _by_length(store: Store, query: Query, begin: int, count: int, deadline: Deadline) -> tuple[list[int], int]:
    """Rows by their length, from the index of each shard."""
    if store.manifest.tokens_column is None:
        raise ConfigError("the rows of this store have no token length; search by text")
    found: list[int] = []
    starts = [0, *np.cumsum([shard.rows for shard in store.manifest.shards]).tolist()]
    row = begin
    while row < len(store):
        shard = bisect_right(starts, row) - 1
        within = row - starts[shard]
        lengths = store.map_lengths(shard)[within : within + _SHARD_PIECE]
        hits = np.flatnonzero(query.fitting(lengths))[: count - len(found)]
        found += (row + hits).tolist()
        if len(found) == count:
            return found, found[-1] + 1
        row += len(lengths)
        if deadline.over:
            break
    return found, row


def _length_counts(store: Store) -> list[tuple[int, int, int, bool]]:
    step = max(1, len(store) // _MOST_COUNTED)
    counts = np.zeros(33, np.int64)
    for shard in range(len(store.manifest.shards)):
        lengths = store.map_lengths(shard)[::step]
        if len(lengths):
            # frexp(n) is the number of bits of n: 0 for 0, 1 for 1, 2 for 2 and 3, ...
            counts += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=33)[:33]
    ranges = [(0 if bits == 0 else 1 << (bits - 1), (1 << bits) - 1, int(rows)) for bits, rows in enumerate(counts)]
    return [(least, most, rows * step, step > 1) for least, most, rows in ranges if rows]


def _token_columns(store: Store) -> list[str]:
    """Columns of tokens: one, or the two sides of preference pairs."""
    names = [name for name in store.schema.names if name.endswith("input_ids")]
    return names or [name for name in [store.manifest.tokens_column] if name is not None]


def _list_lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    counts = pa.compute.fill_null(pa.compute.list_value_length(column), 0)
    return np.asarray(counts.to_numpy(zero_copy_only=False), np.int64)


def _text_of_row(ids: Any, vocabulary: Vocabulary | None, query: Query | None) -> str:
    values = ids.values
    if values is None:
        return ""
    if vocabulary is None:
        return " ".join(map(str, values.slice(0, SNIPPET_TOKENS // 4).to_pylist()))
    if query is None or not query.text:
        head = vocabulary.text(values.slice(0, SNIPPET_TOKENS).to_numpy(zero_copy_only=False))
        return snippet(head + " " * (1000 * (len(values) > SNIPPET_TOKENS)))
    return snippet(vocabulary.text(values.to_numpy(zero_copy_only=False)), query)


def _plain_text(batch: pa.RecordBatch, number: int) -> str:
    return snippet("  ".join(f"{name}: {str(batch.column(name)[number].as_py())[:200]}" for name in batch.schema.names))


def _numbered(summary: RowSummary, row: int) -> RowSummary:
    return RowSummary(RowPlace(0, 0, row), summary.length, summary.text, summary.supervised)


def _token_parts(store: Store, values: dict[str, Any]) -> tuple[list[TokenPart], dict[str, Any]]:
    """Tokens of a row with their masks, and its other columns."""
    parts, used = [], set()
    for name in _token_columns(store):
        side = name.removesuffix("input_ids")
        mask_name = f"{side}loss_mask" if f"{side}loss_mask" in values else store.manifest.mask_column or ""
        ids, mask = values[name], values.get(mask_name)
        used |= {name, mask_name}
        if ids is not None:
            flags = None if mask is None else np.asarray(mask, bool)
            parts.append(TokenPart(side.rstrip("_") if side != name else "", np.asarray(ids), flags))
    return parts, {name: value for name, value in values.items() if name not in used}
