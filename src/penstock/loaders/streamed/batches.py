"""Samples of several windows put together into one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.collate import BatchLayout, collate, width
from penstock.loaders.streamed.catalog import Catalog
from penstock.loaders.streamed.rows import TokenRows
from penstock.loaders.streamed.stream import Filled
from penstock.order.samples import Samples

__all__ = ["MemoryTokens", "collated"]

Ints = npt.NDArray[np.int64]


class MemoryTokens:
    """Parts of rows of several windows, by number: what a batch is copied from."""

    def __init__(self, windows: Sequence[TokenRows], owners: Ints, begins: Ints, *, masked: bool) -> None:
        self._windows, self._owners, self._begins, self._masked = windows, owners, begins, masked

    @property
    def masked(self) -> bool:
        return self._masked

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        for number, begin, size, target in self._slices(rows, starts, lengths, at):
            out[target : target + size] = self._windows[number].flat[begin : begin + size]

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        for number, begin, size, target in self._slices(rows, starts, lengths, at):
            mask = self._windows[number].mask
            out[target : target + size] = True if mask is None else mask[begin : begin + size]

    def _slices(self, rows: Ints, starts: Ints, lengths: Ints, at: Ints) -> list[tuple[int, int, int, int]]:
        """(window, where it begins there, how long, where it goes); what lies side by side on both sides is one."""
        if not len(rows):
            return []
        owners, begins = self._owners[rows], self._begins[rows] + starts
        follows = (owners[1:] == owners[:-1]) & (begins[1:] == begins[:-1] + lengths[:-1])
        follows &= at[1:] == at[:-1] + lengths[:-1]
        heads = np.flatnonzero(np.concatenate([[True], ~follows]))
        sizes = np.add.reduceat(lengths, heads)
        return list(zip(owners[heads].tolist(), begins[heads].tolist(), sizes.tolist(), at[heads].tolist()))


def collated(
    taken: Sequence[tuple[Filled, int]], catalog: Catalog, form: BatchLayout, *, masked: bool
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The arrays of a batch, where each part of it came from, and how many tokens it has without padding."""
    runs = _runs(taken)
    parts = [filled.samples.slice(low, high) for filled, low, high in runs]
    samples = Samples.concat(parts)
    none = np.zeros(0, np.int64)
    owners = np.repeat(np.arange(len(runs)), [len(part.rows) for part in parts])
    windows = [filled.rows for filled, _, _ in runs]
    begins = np.concatenate([none, *(window.bounds[part.rows] for window, part in zip(windows, parts))])
    tokens = MemoryTokens(windows, owners, begins + samples.starts, masked=masked)
    blocks = np.concatenate([none, *(window.blocks[part.rows] for window, part in zip(windows, parts))])
    places = np.concatenate([none, *(window.places[part.rows] for window, part in zip(windows, parts))])
    # Collation is told of parts by their numbers, which say all that is needed to find them.
    numbered = Samples(samples.offsets, np.arange(len(owners)), np.zeros(len(owners), np.int64), samples.lengths)
    arrays = collate(numbered, np.zeros(len(owners), np.int64), [tokens], form, width(numbered, form))
    return arrays, _provenance(numbered, catalog, form, blocks, places), samples.tokens


def _runs(taken: Sequence[tuple[Filled, int]]) -> list[tuple[Filled, int, int]]:
    """Neighbouring samples of one window together."""
    runs: list[tuple[Filled, int, int]] = []
    for filled, index in taken:
        if runs and runs[-1][0] is filled and runs[-1][2] == index:
            runs[-1] = (filled, runs[-1][1], index + 1)
        else:
            runs.append((filled, index, index + 1))
    return runs


def _provenance(samples: Samples, catalog: Catalog, form: BatchLayout, blocks: Ints, places: Ints) -> dict[str, Any]:
    names, source, rows = catalog.origins(blocks, places)
    unknown = np.full(len(places), -1, np.int64)
    return {
        "sources": names,
        "source": source,
        "row": unknown if catalog.by_bytes else rows,
        "offset": rows if catalog.by_bytes else unknown,
        "sample": samples.rows if form.split else samples.numbers(),
    }
