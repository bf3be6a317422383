"""Rows of cached parts: from the name of a part to the rows and tokens of a table that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.store.gather import TokenTable

Ints = npt.NDArray[np.int64]


class PartRanges(NamedTuple):
    """Ranges of rows, and of tokens, of the parts with the numbers `which`."""

    which: Ints
    rows: Ints
    """First row of each, and the row after the last, in two columns."""
    tokens: Ints


class PartRows:
    """Parts of the stores in buckets that a table reads."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._shards: dict[str, int] = {}
        self._layouts: set[str] = set()
        for number, (store, shard) in enumerate(table.entries):
            if store.bucket is not None:
                entry = store.manifest.shards[shard]
                self._shards.setdefault(entry.name, number)
                self._layouts |= {f"{entry.index_checksum}.index", f"{entry.name}.{entry.index_checksum[:16]}.sums"}
        self._bounds: dict[int, tuple[Ints, Ints]] = {}

    def layouts(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        """True for indexes and checksums, which are needed all the time."""
        return np.array([name in self._layouts for name in names], np.bool_)

    def ranges(self, names: Sequence[str]) -> PartRanges:
        """Rows of those parts that hold rows of the table."""
        which, found = [], []
        for number, name in enumerate(names):
            shard_name, _, piece = name.partition(".")
            shard = self._shards.get(shard_name)
            if shard is None or not (piece.isdigit() or piece == "arrow"):
                continue
            rows, tokens = self._piece_bounds(shard)
            low, high = (int(piece), int(piece) + 1) if piece.isdigit() and len(rows) > 2 else (0, len(rows) - 1)
            if high < len(rows):
                which.append(number)
                found.append((rows[low], rows[high], tokens[low], tokens[high]))
        bounds = np.array(found, np.int64).reshape(-1, 4)
        return PartRanges(np.array(which, np.int64), bounds[:, :2], bounds[:, 2:])

    def _piece_bounds(self, number: int) -> tuple[Ints, Ints]:
        """Rows and tokens of the table before each piece of a shard, and before the next shard.

        Of a shard that was not used yet, as if it was one piece: nothing is fetched to know what to evict.
        """
        known = self._bounds.get(number)
        if known is not None:
            return known
        store, shard = self._table.entries[number]
        first_row, first_token = self._table.row_starts[number], self._table.token_starts[number]
        layout = None if store.bucket is None else store.bucket.known_layout(shard)
        if layout is None:
            return self._table.row_starts[number : number + 2], self._table.token_starts[number : number + 2]
        rows = np.asarray(layout.starts, np.int64)
        before = offsets_of(layout.lengths) if len(layout.lengths) else np.zeros(len(rows), np.int64)
        tokens = before[rows] if len(layout.lengths) else before
        self._bounds[number] = rows + first_row, tokens + first_token
        return self._bounds[number]
