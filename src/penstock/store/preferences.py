"""Rows with two lists of tokens: what a preference pair is, chosen and rejected in one row of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import SchemaError
from penstock.store.gather import TokenTable, _Shard
from penstock.store.reader import Store

Ints = npt.NDArray[np.int64]


class SideTable(TokenTable):
    """The rows of stores by another column of tokens than the one their manifests name.

    How long rows are is not in the index then, but in the shards themselves, of which the offsets are read.
    """

    def __init__(self, stores: Sequence[Store], column: str, mask: str | None = None) -> None:
        self._given = column, mask
        super().__init__(stores)

    def _columns(self) -> tuple[str, str | None]:
        super()._columns()
        for store in self.stores:
            for name in self._given:
                if name is not None and name not in store.schema.names:
                    raise SchemaError(f"column {name!r} not in {store.shown}; it has {store.schema.names}")
        return self._given

    def _open_shard(self, number: int) -> _Shard:
        store, entry = self.entries[number]
        shard = _Shard(store, entry, self.column, self.mask_column)
        shard.lengths = _lengths(store, entry, self.column)
        return shard

    def __getstate__(self) -> dict[str, Any]:
        return {"stores": self.stores, "given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SideTable.__init__(self, state["stores"], *state["given"])


class PairTable(TokenTable):
    """Rows of preference pairs: the tokens of the chosen side, and how long the longer side is.

    `rejected` is the other side of the same rows.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        super().__init__(stores)
        self.rejected = SideTable(stores, "rejected_input_ids", "rejected_loss_mask")

    def lengths(self, rows: npt.ArrayLike) -> Ints:
        return np.maximum(self.lengths_chosen(rows), self.rejected.lengths(rows))

    def lengths_chosen(self, rows: npt.ArrayLike) -> Ints:
        """Tokens of the chosen side alone."""
        return super().lengths(rows)

    def check_unchanged(self, most: int | None = None) -> None:
        super().check_unchanged(most)
        self.rejected.check_unchanged(most)

    def close(self) -> None:
        self.rejected.close()
        super().close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        PairTable.__init__(self, state["stores"])


def read_column(stores: Sequence[Store], name: str) -> npt.NDArray[Any]:
    """A column of plain numbers or truth values, of all rows."""
    parts = [
        batch.column(0).to_numpy(zero_copy_only=False) for store in stores for batch in store.batches(columns=[name])
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _lengths(store: Store, number: int, column: str) -> npt.NDArray[np.int32]:
    reader = store.open_shard(number)
    if store.bucket is not None:
        store.bucket.request((number, piece) for piece in range(len(reader.starts) - 1))
    at = reader.schema.get_field_index(column)
    parts = [
        reader.batch(piece).column(at).value_lengths().to_numpy(zero_copy_only=False)
        for piece in range(len(reader.starts) - 1)
    ]
    return np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
