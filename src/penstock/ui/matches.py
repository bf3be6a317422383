"""Search in rows: a query, and the rows of Arrow arrays, tokens and plain values that match it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.ragged import is_any_list, is_number
from penstock.arrays.text import is_text

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
MOST_QUERY = 1_000
"""Characters of a text that is searched for."""


@dataclass(frozen=True, slots=True)
class Query:
    """Text, and shortest and longest length, of the rows that are looked for.

    A text without capitals of ASCII is found in either case, one with capitals as it is written.
    """

    text: str = ""
    shortest: int | None = None
    longest: int | None = None

    def __bool__(self) -> bool:
        return bool(self.text) or self.by_length

    @property
    def by_length(self) -> bool:
        return self.shortest is not None or self.longest is not None

    @property
    def needle(self) -> bytes:
        return self.text.encode("utf-8", "surrogatepass")

    @property
    def folds(self) -> bool:
        """True if the case of ASCII letters does not count."""
        return self.needle == self.needle.lower()

    def fits_length(self, length: int) -> bool:
        return (self.shortest is None or length >= self.shortest) and (self.longest is None or length <= self.longest)

    def fitting(self, lengths: npt.NDArray[Any]) -> Mask:
        """Lengths within the bounds."""
        fits = np.ones(len(lengths), bool)
        if self.shortest is not None:
            fits &= lengths >= self.shortest
        if self.longest is not None:
            fits &= lengths <= self.longest
        return fits

    def is_in(self, data: bytes) -> bool:
        return self.needle in (data.lower() if self.folds else data)

    def is_in_value(self, value: Any) -> bool:
        """True if a text of a plain value, at any depth, has the text of the query."""
        return any(self.is_in(text.encode("utf-8", "surrogatepass")) for text in texts_of(value))

    def in_spans(self, data: bytes, offsets: Ints) -> Mask:
        """Spans `offsets[i]` to `offsets[i + 1]` of joined data that have the text, all searched at once."""
        found = np.zeros(len(offsets) - 1, bool)
        needle, data = self.needle, data.lower() if self.folds else data
        at = data.find(needle, int(offsets[0]))
        while at >= 0 and at + len(needle) <= int(offsets[-1]):
            span = int(np.searchsorted(offsets, at, side="right")) - 1
            end = int(offsets[span + 1])
            if at + len(needle) <= end:
                found[span] = True
                at = data.find(needle, max(end, at + 1))  # one hit a span is enough
            else:
                at = data.find(needle, at + 1)
        return found

    def in_batch(self, batch: pa.RecordBatch) -> Mask:
        """Rows with the text in a column of text, at any depth."""
        found = np.zeros(batch.num_rows, bool)
        for column in batch.columns:
            found |= self._in_array(column)
        return found

    def _in_array(self, array: pa.Array) -> Mask:
        kind = array.type
        if _is_text(kind):
            data, offsets = joined(array)
            return self.in_spans(data, offsets)
        return _any_of_children(array, self._in_array)


def texts_of(value: Any) -> Iterator[str]:
    """Texts of a plain value, at any depth; keys of mappings are none."""
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, bytes):
            yield each.decode("utf-8", "replace")
        elif isinstance(each, Mapping):
            stack.extend(reversed(list(each.values())))
        elif isinstance(each, list | tuple):
            stack.extend(reversed(each))


def characters(value: Any) -> int:
    """Characters of all texts of a plain value."""
    return sum(map(len, texts_of(value)))


def characters_in(batch: pa.RecordBatch) -> Ints:
    """Characters of all texts of each row."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        total += _characters(column)
    return total


def joined(array: pa.Array) -> tuple[bytes, Ints]:
    """Bytes of an array of text, joined, and the offsets of its values in them."""
    wide = array.cast(pa.large_string())
    offsets = np.frombuffer(wide.buffers()[1], np.int64)[wide.offset : wide.offset + len(wide) + 1]
    low, high = int(offsets[0]), int(offsets[-1])
    data = wide.buffers()[2]
    text = b"" if data is None else data.slice(low, high - low).to_pybytes()
    return text, np.asarray(offsets - low)


def _any_of_children(array: pa.Array, look: Any) -> Mask:
    """Rows of which any value below matches."""
    kind = array.type
    found = np.zeros(len(array), bool)
    if pa.types.is_dictionary(kind):
        return np.asarray(look(array.dictionary_decode()))
    if pa.types.is_struct(kind):
        for field in array.flatten():
            found |= look(field)
    elif pa.types.is_map(kind):
        parents, items = _map_items(array)
        found[parents[look(items)]] = True
    elif is_any_list(kind) and not is_number(kind.value_type):
        inner = look(array.flatten())
        parents = pc.list_parent_indices(array).to_numpy()
        found[parents[inner]] = True
    return found


def _characters(array: pa.Array) -> Ints:
    kind = array.type
    total = np.zeros(len(array), np.int64)
    if _is_text(kind):
        return np.asarray(pc.fill_null(pc.utf8_length(array), 0).to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_dictionary(kind):
        return _characters(array.dictionary_decode())
    if pa.types.is_struct(kind):
        for field in array.flatten():
            total += _characters(field)
    elif is_any_list(kind) and not is_number(kind.value_type):
        np.add.at(total, pc.list_parent_indices(array).to_numpy(), _characters(array.flatten()))
    elif pa.types.is_map(kind):
        parents, items = _map_items(array)
        np.add.at(total, parents, _characters(items))
    return total


def _map_items(array: pa.MapArray) -> tuple[Ints, pa.Array]:
    """Values of maps, and the row of each."""
    offsets = array.offsets.to_numpy()
    items = array.items.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    return np.repeat(np.arange(len(array)), np.diff(offsets)), items


def _is_text(kind: pa.DataType) -> bool:
    return is_text(kind) or bool(pa.types.is_string_view(kind))
