"""Tokenised rows in memory: one flat array of tokens, where each row begins, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["TokenRows"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows of tokens: row i is `flat[bounds[i]:bounds[i + 1]]`. What an order asks of a table, and more."""

    flat: npt.NDArray[Any]
    bounds: Ints
    mask: npt.NDArray[np.bool_] | None
    """Which tokens are supervised; None: all of them."""
    blocks: Ints
    """The block that each row was read from."""
    places: Ints
    """Where each row begins in its file: a byte, or a row."""

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        return int(self.bounds[-1])

    @property
    def nbytes(self) -> int:
        arrays = [self.flat, self.bounds, self.blocks, self.places, *([] if self.mask is None else [self.mask])]
        return sum(int(array.nbytes) for array in arrays)

    def lengths(self, rows: npt.ArrayLike) -> Ints:
        wanted = np.asarray(rows, np.int64)
        return self.bounds[wanted + 1] - self.bounds[wanted]

    def find_tokens(self, positions: npt.ArrayLike) -> tuple[Ints, Ints]:
        """The row that holds the n-th token, and which of its tokens that is."""
        wanted = np.asarray(positions, np.int64)
        rows = np.searchsorted(self.bounds, wanted, side="right") - 1
        return rows, wanted - self.bounds[rows]

    def taken(self, rows: Ints) -> TokenRows:
        """Some rows, in the order given."""
        lengths = self.lengths(rows)
        bounds = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=bounds[1:])
        return TokenRows(
            _gathered(self.flat, self.bounds, rows),
            bounds,
            None if self.mask is None else _gathered(self.mask, self.bounds, rows),
            self.blocks[rows],
            self.places[rows],
        )

    def tail(self, tokens: int) -> TokenRows:
        """The last tokens, as a copy; of the first row that is in it only the end."""
        begin = self.tokens - tokens
        first = int(np.searchsorted(self.bounds, begin, side="right")) - 1
        bounds = np.maximum(self.bounds[first:] - begin, 0) if tokens else np.zeros(1, np.int64)
        first = first if tokens else self.rows
        return TokenRows(
            self.flat[begin:].copy(),
            bounds,
            None if self.mask is None else self.mask[begin:].copy(),
            self.blocks[first:],
            self.places[first:],
        )

    @classmethod
    def of(cls, tokens: pa.ListArray, mask: pa.ListArray | None, blocks: Ints, places: Ints) -> TokenRows:
        """From columns of lists."""
        bounds = np.asarray(tokens.offsets.to_numpy(), np.int64)
        flat = tokens.values.to_numpy(zero_copy_only=False)[bounds[0] : bounds[-1]]
        supervised = None
        if mask is not None:
            begin = mask.offsets[0].as_py()
            values = mask.values.slice(begin, len(flat))
            supervised = np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.bool_, copy=False)
        return cls(flat, bounds - bounds[0], supervised, blocks, places)

    @classmethod
    def concat(cls, parts: Sequence[TokenRows]) -> TokenRows:
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = np.zeros(0, np.int64)
            return cls(np.zeros(0, np.uint16), np.zeros(1, np.int64), None, none, none)
        reach = np.cumsum([0, *(part.tokens for part in parts)])
        masks = [part.mask if part.mask is not None else np.ones(part.tokens, np.bool_) for part in parts]
        return cls(
            np.concatenate([part.flat for part in parts]),
            np.concatenate([[0], *(part.bounds[1:] + low for part, low in zip(parts, reach))]).astype(np.int64),
            np.concatenate(masks) if any(part.mask is not None for part in parts) else None,
            np.concatenate([part.blocks for part in parts]),
            np.concatenate([part.places for part in parts]),
        )


def _gathered(flat: npt.NDArray[Any], bounds: Ints, rows: Ints) -> npt.NDArray[Any]:
    """The values of some rows, one behind the other. A loop over rows, of which a window has a few thousand."""
    parts = [flat[low:high] for low, high in zip(bounds[rows].tolist(), bounds[rows + 1].tolist())]
    return np.concatenate(parts) if parts else flat[:0]
