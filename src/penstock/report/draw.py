"""Draw of rows: a bounded number of them, by arithmetic from a seed, so that the same store gives the same page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order.permutation import Permutation, derive_key
from penstock.store import Store

Ints = npt.NDArray[np.int64]
MOST_LENGTHS = 20_000_000
"""Rows whose lengths are all read: four bytes each."""
MOST_ROWS, MOST_TOKENS = 20_000, 20_000_000
MOST_BUCKET_ROWS, MOST_BUCKET_TOKENS = 200, 2_000_000
"""Every row of a store in a bucket may cost a request."""


@dataclass(frozen=True, slots=True)
class Side:
    """Columns of tokens and mask: one side of a row, two for preference pairs."""

    name: str
    ids: str
    mask: str | None


def sides_of(store: Store) -> list[Side]:
    """The sides of the rows of a store; none if it has no tokens."""
    names = store.schema.names
    manifest = store.manifest
    if manifest.tokens_column is not None and not manifest.tokens_column.startswith(("chosen_", "rejected_")):
        mask = manifest.mask_column
        if mask is None and "loss_mask" in names:
            mask = "loss_mask"
        return [Side("", manifest.tokens_column, mask)]
    sides = []
    for name in ("chosen", "rejected"):
        if f"{name}_input_ids" in names:
            mask = f"{name}_loss_mask"
            sides.append(Side(name, f"{name}_input_ids", mask if mask in names else None))
    return sides


def drawn_rows(store: Store, most: int, seed: int, purpose: str) -> Ints:
    """At most `most` different rows in the order of the draw; all of them, in order, if there are no more."""
    if len(store) <= most:
        return np.arange(len(store), dtype=np.int64)
    return Permutation(len(store), derive_key(seed, "report", purpose))(np.arange(most, dtype=np.int64))


def drawn_lengths(store: Store, seed: int) -> tuple[npt.NDArray[Any], bool]:
    """Lengths of all rows, or of a draw from a store with more; and True if they are all."""
    if store.manifest.tokens_column is None:
        return np.zeros(0, np.int32), True
    if len(store) <= MOST_LENGTHS:
        return store.lengths, True
    rows = np.sort(drawn_rows(store, MOST_LENGTHS // 10, seed, "lengths"))
    bounds = np.concatenate([[0], np.cumsum([shard.rows for shard in store.manifest.shards])])
    cuts = np.searchsorted(rows, bounds)
    parts = [
        store.map_lengths(number)[rows[low:high] - bounds[number]]
        for number, (low, high) in enumerate(pairwise(cuts.tolist()))
        if high > low
    ]
    return np.concatenate(parts), False


def sample_rows(store: Store, seed: int) -> Ints:
    """Rows to count tokens of: as many as the limits on rows and tokens allow, in ascending order."""
    remote = store.bucket is not None
    rows = drawn_rows(store, MOST_BUCKET_ROWS if remote else MOST_ROWS, seed, "tokens")
    budget = MOST_BUCKET_TOKENS if remote else MOST_TOKENS
    if store.manifest.tokens_column is not None and len(rows):
        mean = max(1.0, (store.tokens or 0) / max(1, len(store)))
        rows = rows[: max(1, int(budget / mean))]
    return np.sort(rows)
