"""Parquet files joined and measured without decoding: pages as they are, and one footer for all row groups.

A page header has no positions, so the bytes of a row group are the same wherever it stands; positions are in the
footer, a struct of Thrift's compact protocol. So row groups can be encoded by several threads, each as a file of its
own, and the joined file has the same bytes as one that was written in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["MAGIC", "PAGE_HEADER_BYTES", "dictionary_entry_bytes", "join_footers", "split_file"]

MAGIC = b"PAR1"
PAGE_HEADER_BYTES = 64
"""As many as the header of a dictionary page has at most."""
_LENGTH = struct.Struct("<I")
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12

# Field numbers of parquet.thrift
_FILE_ROWS, _FILE_GROUPS = 3, 4
_GROUP_CHUNKS, _GROUP_OFFSET, _GROUP_ORDINAL = 1, 5, 7
_CHUNK_META, _CHUNK_POSITIONS = 3, (2, 4, 6)
"""Of a column chunk: its metadata; position of that, of the offset index and of the column index."""
_META_POSITIONS = (9, 10, 11, 14)
"""Of the metadata: positions of the data pages, the index pages, the dictionary page and the Bloom filter."""
_PAGE_TYPE, _PAGE_SIZE, _PAGE_DICTIONARY = 1, 2, 7
_DICTIONARY_PAGE, _DICTIONARY_ENTRIES = 2, 1

Field = tuple[int, int, Any]
"""Number, type and value of a field."""


def split_file(data: memoryview) -> tuple[memoryview, memoryview]:
    """Row groups and footer of a whole Parquet file."""
    end = len(data) - len(MAGIC) - _LENGTH.size
    start = end - _LENGTH.unpack_from(data, end)[0]
    return data[len(MAGIC) : start], data[start:end]


def join_footers(footers: Sequence[bytes | memoryview], shifts: Sequence[int]) -> bytes:
    """Footer of a file that consists of the row groups of several files, with its length and the magic bytes.

    `shifts` has, for each file, the bytes by which its row groups moved. Column chunks are moved one by one: as Python
    values, all those of a file with thousands of columns would take many times the memory of its rows.
    """
    rows = count = 0
    groups = bytearray()
    for footer, shift in zip(footers, shifts, strict=True):
        reader = _Reader(footer)
        for number, kind in reader.fields():
            if number == _FILE_ROWS:
                rows += reader.value(kind)
            elif number == _FILE_GROUPS:
                for _ in range(reader.items()[1]):
                    _move_group(reader, groups, shift, count)
                    count += 1
            else:
                reader.skip(kind)
    out = bytearray()
    reader, start = _Reader(footers[0]), 0
    for number, kind in reader.fields():
        out += reader.since(start)
        start = reader.at
        reader.skip(kind)
        if number == _FILE_ROWS:
            _write_number(out, rows)
        elif number == _FILE_GROUPS:
            _write_items(out, _STRUCT, count)
            out += groups
        else:
            out += reader.since(start)
        start = reader.at
    out.append(0)
    return bytes(out) + _LENGTH.pack(len(out)) + MAGIC


def dictionary_entry_bytes(header: bytes | memoryview) -> tuple[float, int]:
    """Mean size of a text in a dictionary page, and the size of all, by the header of the page; 0 if it is none."""
    try:
        page = {number: value for number, _, value in _Reader(header).struct()}
        entries = {number: value for number, _, value in page[_PAGE_DICTIONARY]}[_DICTIONARY_ENTRIES]
        size = page[_PAGE_SIZE]
        is_one = page[_PAGE_TYPE] == _DICTIONARY_PAGE and entries > 0 and size > 0
        return (size / entries, size) if is_one else (0.0, 0)
    except (IndexError, KeyError, TypeError, ValueError):
        return 0.0, 0


def _move_group(reader: _Reader, out: bytearray, shift: int, ordinal: int) -> None:
    """Write the next row group of a footer as it is, except for positions and its number."""
    start = reader.at
    for number, kind in reader.fields():
        if number == _GROUP_CHUNKS:
            of, size = reader.items()
            out += reader.since(start)
            for _ in range(size):
                _write_value(out, of, _moved(reader.value(of), shift))
        elif number in (_GROUP_OFFSET, _GROUP_ORDINAL):
            out += reader.since(start)
            value = reader.value(kind)
            _write_number(out, _later(value, shift) if number == _GROUP_OFFSET else ordinal)
        else:
            reader.skip(kind)
            out += reader.since(start)
        start = reader.at
    out.append(0)


def _moved(chunk: list[Field], shift: int) -> list[Field]:
    def meta(fields: list[Field]) -> list[Field]:
        return [(n, kind, _later(value, shift) if n in _META_POSITIONS else value) for n, kind, value in fields]

    return [
        (n, kind, meta(value) if n == _CHUNK_META else _later(value, shift) if n in _CHUNK_POSITIONS else value)
        for n, kind, value in chunk
    ]


def _later(position: int, shift: int) -> int:
    return position + shift if position else 0  # 0: not given


class _Reader:
    """Values of Thrift's compact protocol, in a form from which the same bytes can be written."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.at = 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a struct; before the next, the value is read or skipped."""
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._number()
            yield number, header & 15

    def struct(self) -> list[Field]:
        return [(number, kind, None if kind in (_TRUE, _FALSE) else self.value(kind)) for number, kind in self.fields()]

    def items(self) -> tuple[int, int]:
        """Type and number of the items of a list; they are next."""
        header = self._byte()
        return header & 15, header >> 4 if header >> 4 < 15 else self._varint()

    def since(self, start: int) -> memoryview:
        """The bytes from `start` to here."""
        return self._data[start : self.at]

    def skip(self, kind: int) -> None:
        """Pass over the value of a field."""
        if kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner)
        elif kind in (_LIST, _SET):
            of, size = self.items()
            for _ in range(size):
                self._byte() if of in (_TRUE, _FALSE) else self.skip(of)
        elif kind not in (_TRUE, _FALSE):
            self.value(kind)

    def value(self, kind: int) -> Any:
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            of, size = self.items()
            return of, [self.value(of) for _ in range(size)]
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind in (_TRUE, _FALSE, _BYTE):  # the first two: in a list
            return self._byte()
        if kind == _MAP:
            raise ValueError("a Parquet footer has no maps")
        return self._number()

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _bytes(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self._data):
            raise IndexError("the data ends in a value")
        return bytes(self._data[self.at - size : self.at])

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)


def _write_struct(out: bytearray, fields: list[Field]) -> None:
    before = 0
    for number, kind, value in fields:
        if 0 < number - before < 16:
            out.append((number - before) << 4 | kind)
        else:
            out.append(kind)
            _write_number(out, number)
        before = number
        if kind not in (_TRUE, _FALSE):
            _write_value(out, kind, value)
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind == _STRUCT:
        _write_struct(out, value)
    elif kind in (_LIST, _SET):
        of, items = value
        _write_items(out, of, len(items))
        for item in items:
            _write_value(out, of, item)
    elif kind == _BINARY:
        _write_varint(out, len(value))
        out += value
    elif kind == _DOUBLE:
        out += value
    elif kind in (_TRUE, _FALSE, _BYTE):
        out.append(value)
    else:
        _write_number(out, value)


def _write_items(out: bytearray, of: int, size: int) -> None:
    out.append(min(size, 15) << 4 | of)
    if size >= 15:
        _write_varint(out, size)


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_number(out: bytearray, value: int) -> None:
    _write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
