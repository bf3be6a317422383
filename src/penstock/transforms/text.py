"""Text columns: lower-casing, whitespace, Unicode forms, counting words and characters.

The work is done on the UTF-8 bytes of a whole column at once; no row becomes a Python string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import Utf8, flags, from_utf8, plain, utf8
from penstock.errors import SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.columns import append, as_names, column, like, one_or_list, replace

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.integer[Any]]]

FORMS = ("NFC", "NFKC", "NFD", "NFKD")

# Whitespace by code point, up to the ideographic space: the last there is.
IS_SPACE = np.array([chr(c).isspace() for c in range(0x4000)])


class Lower(Transform):
    """Lower-case text, one character to one, as Unicode's simple mapping has it (`pc.utf8_lower`).

    Python's `str.lower` differs on a few characters whose lower case depends on their neighbours or is longer.
    """

    def __init__(self, columns: str | Iterable[str]) -> None:
        self.columns = as_names(columns)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rewrite(batch, self.columns, _lower)

    def __repr__(self) -> str:
        return f"Lower({one_or_list(self.columns)})"


class Strip(Transform):
    """Remove whitespace at both ends, as `str.strip` does."""

    def __init__(self, columns: str | Iterable[str]) -> None:
        self.columns = as_names(columns)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rewrite(batch, self.columns, pc.utf8_trim_whitespace)

    def __repr__(self) -> str:
        return f"Strip({one_or_list(self.columns)})"


class NormalizeWhitespace(Transform):
    """One space between words and none at the ends: `" ".join(text.split())`."""

    def __init__(self, columns: str | Iterable[str]) -> None:
        self.columns = as_names(columns)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rewrite(batch, self.columns, _single_spaced)

    def __repr__(self) -> str:
        return f"NormalizeWhitespace({one_or_list(self.columns)})"


class NormalizeUnicode(Transform):
    """Bring text to one Unicode form, so that equal-looking strings are equal.

    Rows of plain ASCII cost almost nothing; others run at some 100 MB/s.
    """

    def __init__(self, columns: str | Iterable[str], form: str = "NFC") -> None:
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
        self.columns = as_names(columns)
        self.form = form

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return rewrite(batch, self.columns, lambda text: pc.utf8_normalize(text, form=self.form))

    def __repr__(self) -> str:
        return f"NormalizeUnicode({one_or_list(self.columns)}, form={self.form!r})"


class CountWords(Transform):
    """Add a column with the number of words, `len(text.split())`, as int64. Null text has a null count."""

    def __init__(self, column: str, into: str = "words") -> None:
        (self.column,) = as_names([column])
        (self.into,) = as_names([into])

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        text = as_text(column(batch, self.column), self.column)
        data, bounds = utf8(text)
        counts = row_sums(word_starts(word_bytes(data), bounds), bounds)
        return append(batch, self.into, pa.array(counts, mask=flags(text.is_null()) if text.null_count else None))

    def __repr__(self) -> str:
        return f"CountWords({self.column!r}, into={self.into!r})"


class CountChars(Transform):
    """Add a column with the number of characters (code points), `len(text)`, as int64. Null text has a null count."""

    def __init__(self, column: str, into: str = "chars") -> None:
        (self.column,) = as_names([column])
        (self.into,) = as_names([into])

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        text = as_text(column(batch, self.column), self.column)
        return append(batch, self.into, pc.utf8_length(text).cast(pa.int64()))

    def __repr__(self) -> str:
        return f"CountChars({self.column!r}, into={self.into!r})"


def as_text(array: pa.Array, name: str) -> pa.Array:
    """The column as string or large_string, or an error if it is not text."""
    text = plain(array)
    if text.type in (pa.string(), pa.large_string()):
        return text
    if pa.types.is_null(text.type):
        return text.cast(pa.string())
    raise SchemaError(f"column {name!r} is {array.type}, expected text; put Cast({{{name!r}: 'string'}}) before")


def rewrite(batch: pa.RecordBatch, columns: Iterable[str], function: Callable[[pa.Array], pa.Array]) -> pa.RecordBatch:
    """The batch with `function` applied to these text columns; their types stay."""
    for name in columns:
        given = column(batch, name)
        text = as_text(given, name)
        if not pa.types.is_null(given.type):
            batch = replace(batch, name, like(function(text), given.type))
    return batch


def word_bytes(data: np.ndarray[Any, np.dtype[np.uint8]]) -> Flags:
    """Flags of the bytes that belong to words: all but whitespace, as `str.isspace` has it."""
    word = data > 32
    if data.size == 0:
        return word
    # Control characters below the space that are no whitespace: rare, so look before paying for it.
    if data.min() < 9 or (data - np.uint8(14)).min() < 14:
        word |= (data < 9) | (data - np.uint8(14) < 14)
    if data.max() >= 0xC2:
        _clear_wide_spaces(word, data)
    return word


def word_starts(word: Flags, bounds: Integers) -> Flags:
    """Flags of the first byte of each word. Words end where rows end."""
    starts = np.empty_like(word)
    if word.size:
        np.greater(word[1:], word[:-1], out=starts[1:])
        rows = bounds[:-1]
        if rows[-1] == word.size:  # the last rows are empty, and begin after the last byte
            rows = rows[rows < word.size]
        starts[rows] = word[rows]
    return starts


def row_sums(marked: Flags, bounds: Integers) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Number of marked bytes of each row."""
    narrow = np.int32 if marked.size < 2**31 else np.int64  # half the time of int64
    return _per_row(np.add, marked.view(np.uint8), bounds, narrow)


def _per_row(
    function: np.ufunc, data: np.ndarray[Any, np.dtype[np.uint8]], bounds: Integers, dtype: type[np.integer[Any]]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The bytes of each row, reduced to one number; 0 for an empty row."""
    numbers = np.zeros(len(bounds) - 1, np.int64)
    filled = bounds[1:] > bounds[:-1]  # reduceat would give an empty stretch the value at its start
    if filled.any():
        numbers[filled] = function.reduceat(data, bounds[:-1][filled], dtype=dtype)
    return numbers


def _lower(text: pa.Array) -> pa.Array:
    data, bounds = utf8(text)
    if data.size == 0 or data.max() < 0x80:
        return pc.ascii_lower(text)
    # Arrow lowers ASCII ten times faster than Unicode: worth it when most of the text is in rows of pure ASCII.
    wide = _per_row(np.maximum, data, bounds, np.uint8) >= 0x80
    if 2 * np.diff(bounds)[wide].sum() > data.size:
        return pc.utf8_lower(text)
    mask = pa.array(wide)
    return pc.replace_with_mask(pc.ascii_lower(text), mask, pc.utf8_lower(text.filter(mask)))


def _single_spaced(text: pa.Array) -> pa.Array:
    data, bounds = utf8(text)
    word = word_bytes(data)
    starts = word_starts(word, bounds)
    words = row_sums(starts, bounds)
    firsts = (np.cumsum(words) - words)[words > 0]
    # Every word but the first of its row keeps one byte before it, to hold the space.
    spaces = np.delete(np.flatnonzero(starts), firsts) - 1
    word[spaces] = True
    if word.all() and (data[spaces] == 32).all():
        return text
    spaced = data.copy()
    spaced[spaces] = 32
    ends = np.cumsum(row_sums(word, bounds))
    return from_utf8(Utf8(np.compress(word, spaced), np.concatenate(([0], ends))), text)


def _clear_wide_spaces(word: Flags, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Unmark the bytes of whitespace characters beyond ASCII. Their first bytes are C2, E1, E2 and E3."""
    for first, kinds, width in ((0xC2, 1, 2), (0xE1, 3, 3)):
        candidates = data - np.uint8(first) < kinds
        if not candidates.any():
            continue
        at = np.flatnonzero(candidates)
        at = at[at <= data.size - width]
        code: Integers = data[at] & np.uint16(0x1F if width == 2 else 0x0F)
        for i in range(1, width):
            code = code << 6 | data[at + i] & 0x3F
        at = at[IS_SPACE[code]]
        for i in range(width):
            word[at + i] = False
