"""Documents of ids made into rows of at most so many: kept whole, cut, dropped or split, all losses counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Flags, Ints, Ragged
from penstock.errors import ConfigError, DataError

__all__ = ["TokenTruncation", "TruncatedTokens", "Truncation"]

Truncation: TypeAlias = Literal["error", "drop", "left", "right", "split"]

Places: TypeAlias = npt.NDArray[np.int64]
Told: TypeAlias = tuple[dict[str, int], dict[str, int], dict[str, int]]
"""Rows left out, rows changed, tokens left out; each by reason."""


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """What became of some documents."""

    ids: Ragged
    owners: Places | None
    """The document each row comes from; None if each is one row."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """Documents that became other than whole, by reason."""
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTruncation:
    """How documents become rows.

    `bos` stands at the beginning of every row, `eos` only where a document ends; one that is there already is not
    added again. Both count for `max_length`.
    """

    bos: int | None = None
    eos: int | None = None
    max_length: int | None = None
    truncation: Truncation = "error"
    stride: int = 0
    min_length: int = 0

    def __post_init__(self) -> None:
        if self.truncation not in get_args(Truncation):
            raise ConfigError(f"truncation must be one of {list(get_args(Truncation))}, got {self.truncation!r}")
        if self.min_length < 0 or self.stride < 0:
            raise ConfigError(f"min_length and stride must not be negative, got {self.min_length} and {self.stride}")
        if self.max_length is None:
            if self.truncation != "error" or self.stride:
                raise ConfigError(f"truncation={self.truncation!r} and stride={self.stride} need a max_length")
            return
        if self.max_length < max(1, self.min_length) or self.room < 1:
            raise ConfigError(
                f"max_length={self.max_length} leaves no room; it must be at least min_length={self.min_length}, "
                "and hold a token besides the BOS token if one is added"
            )
        if self.stride and self.truncation != "split":
            raise ConfigError(f"stride={self.stride} is for truncation='split', got {self.truncation!r}")
        if self.stride >= self.room:
            raise ConfigError(
                f"stride={self.stride} must be smaller than the {self.room} tokens of a document in a row"
            )

    @property
    def room(self) -> int:
        """How many tokens of a document, EOS included, a row can hold."""
        assert self.max_length is not None
        return self.max_length - (self.bos is not None)

    def rows(self, documents: Ragged) -> TruncatedTokens:
        """The rows that these documents make."""
        values, bounds = documents.values, documents.offsets
        starts, stops = bounds[:-1].copy(), bounds[1:].copy()
        if self.bos is not None:
            starts += _holds(values, starts, stops, self.bos, first=True)
        if self.eos is not None:
            stops -= _holds(values, starts, stops, self.eos, first=False)
        content = stops - starts
        lengths = content + (self.eos is not None)
        owners, begin, end, told = self._pieces(lengths)
        sizes = end - begin + (self.bos is not None)
        dropped, changed, tokens = told
        if self.min_length and (short := sizes < self.min_length).any():
            overlap = np.where(begin > 0, np.minimum(self.stride, end - begin), 0) if self.truncation == "split" else 0
            reason = f"shorter than {self.min_length} tokens"
            dropped[reason] = int(np.count_nonzero(short))
            tokens[f"in rows {reason}"] = int((end - begin - overlap)[short].sum())
            owners, begin, end = owners[~short], begin[~short], end[~short]
        one_each = len(owners) == len(lengths) and bool((owners[1:] > owners[:-1]).all())
        if one_each and not changed and self.bos is None and self.eos is None:
            return TruncatedTokens(documents, None, dropped, changed, tokens)
        closed = (end == lengths[owners]) & (end > begin) if self.eos is not None else None
        first = starts[owners] + begin
        last = starts[owners] + np.minimum(end, content[owners])
        ids = self._framed(values, np.minimum(first, last), last, closed)
        return TruncatedTokens(ids, None if one_each else owners, dropped, changed, tokens)

    def _pieces(self, lengths: Places) -> tuple[Places, Places, Places, Told]:
        """The rows as documents and the stretch of each, before anything is added; and what is to be counted."""
        owners = np.arange(len(lengths))
        begin, end = np.zeros(len(lengths), np.int64), lengths.copy()
        told: Told = ({}, {}, {})
        if self.max_length is None or not (long := lengths > self.room).any():
            return owners, begin, end, told
        count, room = int(np.count_nonzero(long)), self.room
        beyond = int((lengths - room)[long].sum())
        if self.truncation == "error":
            row = int(long.argmax())
            given = int(lengths[row]) + (self.bos is not None)
            raise DataError(
                f"row {row} of the batch has {given:,} tokens, more than max_length={self.max_length}; "
                "raise it, or pass truncation='drop', 'left', 'right' or 'split'",
                row=row,
            )
        if self.truncation == "drop":
            reason = f"longer than {self.max_length} tokens"
            told = ({reason: count}, {}, {f"in rows {reason}": int(lengths[long].sum())})
            return owners[~long], begin[~long], end[~long], told
        if self.truncation == "split":
            step = room - self.stride
            pieces = 1 + np.maximum(-(-(lengths - room) // step), 0)
            owners = np.repeat(owners, pieces)
            begin = (np.arange(len(owners)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * step
            end = np.minimum(begin + room, lengths[owners])
            return owners, begin, end, ({}, {f"split into rows of at most {self.max_length} tokens": count}, {})
        if self.truncation == "left":
            begin = np.maximum(lengths - room, 0)
        else:
            end = np.minimum(lengths, room)
        told = (
            {},
            {f"cut to {self.max_length} tokens": count},
            {f"cut off on the {self.truncation}": beyond},
        )
        return owners, begin, end, told

    def _framed(self, values: Ints, first: Places, last: Places, closed: Flags | None) -> Ragged:
        """Stretches of the values, each with BOS before it, and EOS behind those that are closed."""
        inner = last - first
        sizes = inner + (self.bos is not None)
        if closed is not None:
            sizes = sizes + closed
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        taken = _stretches(values, first, last)
        if len(taken) == bounds[-1]:
            return Ragged(taken, bounds)
        ids = np.empty(bounds[-1], values.dtype)
        from_text = np.ones(bounds[-1], np.bool_)
        if self.bos is not None:
            from_text[bounds[:-1]] = False
            ids[bounds[:-1]] = self.bos
        if closed is not None:
            ends = bounds[1:][closed] - 1
            from_text[ends] = False
            ids[ends] = self.eos
        ids[from_text] = taken
        return Ragged(ids, bounds)


def _holds(
    values: Ints,
    starts: Places,
    stops: Places,
    token: int,
    *,
    first: bool,
) -> Flags:
    """Which documents have this token at their beginning, or at their end."""
    held = np.zeros(len(starts), np.bool_)
    filled = stops > starts
    held[filled] = values[starts[filled] if first else stops[filled] - 1] == token
    return held


def _stretches(values: Ints, first: Places, last: Places) -> Ints:
    """The values from each `first` to its `last`, end to end."""
    if len(first) == 0:
        return values[:0]
    if (first[1:] == last[:-1]).all():
        return values[first[0] : last[-1]]
    lengths = last - first
    before = np.cumsum(lengths) - lengths
    return values[np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))]
