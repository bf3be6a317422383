"""Token rows: documents of ids as rows of at most `max_length` tokens, with every dropped token counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Flags, Ints, Ragged, offsets_of
from penstock.arrays.truncation import Policy, Truncation
from penstock.errors import ConfigError, DataError

Positions: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """Rows made of documents, and the counts of what was dropped or changed."""

    ids: Ragged
    owners: Positions | None
    """Document of each row; None if each document is one row."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Dropped rows, by reason."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """Documents that were cut or split, by reason."""
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTruncation:
    """Rules that make rows of documents.

    `bos` begins every row, `eos` ends the last row of a document. A token that is there already is not added again.
    Both count for `max_length`.
    """

    bos: int | None = None
    eos: int | None = None
    max_length: int | None = None
    truncation: Policy = "error"
    stride: int = 0
    min_length: int = 0

    def __post_init__(self) -> None:
        Truncation(self.truncation, self.max_length)
        if self.min_length < 0 or self.stride < 0:
            raise ConfigError(f"min_length and stride must not be negative, got {self.min_length} and {self.stride}")
        if self.max_length is None:
            if self.truncation != "error" or self.stride:
                raise ConfigError(f"truncation={self.truncation!r} and stride={self.stride} need a max_length")
            return
        if self.max_length < self.min_length or self.room < 1:
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
        """Tokens of a document, EOS included, that fit into a row."""
        assert self.max_length is not None
        return self.max_length - (self.bos is not None)

    def rows(self, documents: Ragged) -> TruncatedTokens:
        """The rows of these documents."""
        values, offsets = documents.values, documents.offsets
        starts, stops = offsets[:-1].copy(), offsets[1:].copy()
        if self.bos is not None:
            starts += _has_token(values, starts, stops, self.bos, first=True)
        if self.eos is not None:
            stops -= _has_token(values, starts, stops, self.eos, first=False)
        content = stops - starts
        lengths = content + (self.eos is not None)
        owners, begin, end = self._pieces(lengths)
        dropped, changed, tokens = self._counts(lengths)
        sizes = end - begin + (self.bos is not None)
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

    def _pieces(self, lengths: Positions) -> tuple[Positions, Positions, Positions]:
        """Document, begin and end of each row, before BOS and EOS are added."""
        if self.max_length is None:
            return np.arange(len(lengths)), np.zeros(len(lengths), np.int64), lengths
        long = lengths > self.room
        if self.truncation == "error" and long.any():
            row = int(long.argmax())
            raise DataError(
                f"row {row} of the batch has {int(lengths[row]) + (self.bos is not None):,} tokens, more than "
                f"max_length={self.max_length}; raise it, or pass truncation='drop', 'left', 'right' or 'split'",
                row=row,
            )
        # A row of a split document repeats `stride` tokens: it begins where a row of `room - stride` tokens would.
        parts = Truncation(self.truncation, self.room - self.stride).parts(lengths - self.stride)
        if self.stride:
            return parts.rows, parts.starts, np.minimum(parts.starts + self.room, lengths[parts.rows])
        return parts.rows, parts.starts, parts.starts + parts.lengths

    def _counts(self, lengths: Positions) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Dropped rows, changed documents and dropped tokens, by reason."""
        if self.max_length is None or not (long := lengths > self.room).any():
            return {}, {}, {}
        count, lost = int(np.count_nonzero(long)), Truncation(self.truncation, self.room).lost_tokens(lengths)
        if self.truncation == "drop":
            reason = f"longer than {self.max_length} tokens"
            return {reason: count}, {}, {f"in rows {reason}": lost}
        if self.truncation == "split":
            return {}, {f"split into rows of at most {self.max_length} tokens": count}, {}
        return {}, {f"cut to {self.max_length} tokens": count}, {f"cut off on the {self.truncation}": lost}

    def _framed(self, values: Ints, first: Positions, last: Positions, closed: Flags | None) -> Ragged:
        """Slices of the values, each with BOS before it, and EOS at the end of those that are closed."""
        sizes = last - first + (self.bos is not None)
        if closed is not None:
            sizes = sizes + closed
        offsets = offsets_of(sizes)
        taken = token_slices(values, first, last).values
        if len(taken) == offsets[-1]:
            return Ragged(taken, offsets)
        ids = np.empty(offsets[-1], values.dtype)
        from_text = np.ones(offsets[-1], np.bool_)
        if self.bos is not None:
            from_text[offsets[:-1]] = False
            ids[offsets[:-1]] = self.bos
        if closed is not None:
            ends = offsets[1:][closed] - 1
            from_text[ends] = False
            ids[ends] = self.eos
        ids[from_text] = taken
        return Ragged(ids, offsets)


def token_slices(values: npt.NDArray[np.generic], first: Positions, last: Positions) -> Ragged:
    """Rows of the values from each `first` to its `last`: a view if they follow each other, else a copy."""
    lengths = last - first
    offsets = offsets_of(lengths)
    if len(first) and np.array_equal(first[1:], last[:-1]):
        return Ragged(values[first[0] : last[-1]], offsets)
    return Ragged(values[np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])], offsets)


def _has_token(values: Ints, starts: Positions, stops: Positions, token: int, *, first: bool) -> Flags:
    """True for each document with this token at its beginning, or at its end."""
    held = np.zeros(len(starts), np.bool_)
    filled = stops > starts
    held[filled] = values[starts[filled] if first else stops[filled] - 1] == token
    return held
