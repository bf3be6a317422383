"""Parquet files joined without decoding: pages as they are, and one footer for all row groups.

A page header has no positions, so the bytes of a row group are the same wherever it stands; positions are in the
footer, a struct of Thrift's compact protocol. So row groups can be encoded by several threads, each as a file of its
own, and the joined file has the same bytes as one that was written in one go.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["MAGIC", "join_footers", "split_file"]

MAGIC = b"PAR1"
_LENGTH = struct.Struct("<I")
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12

# Field numbers of parquet.thrift
_FILE_ROWS, _FILE_GROUPS = 3, 4
_GROUP_CHUNKS, _GROUP_OFFSET, _GROUP_ORDINAL = 1, 5, 7
_CHUNK_META, _CHUNK_POSITIONS = 3, (2, 4, 6)
"""Of a column chunk: its metadata; position of that, of the offset index and of the column index."""
_META_POSITIONS = (9, 10, 11, 14)
"""Of the metadata: positions of the data pages, the index pages, the dictionary page and the Bloom filter."""

Field = tuple[int, int, Any]
"""Number, type and value of a field."""


def split_file(data: memoryview) -> tuple[memoryview, memoryview]:
    """Row groups and footer of a whole Parquet file."""
    end = len(data) - len(MAGIC) - _LENGTH.size
    start = end - _LENGTH.unpack_from(data, end)[0]
    return data[len(MAGIC) : start], data[start:end]


def join_footers(footers: Sequence[bytes | memoryview], shifts: Sequence[int]) -> bytes:
    """Footer of a file that consists of the row groups of several files, with its length and the magic bytes.

    `shifts` has, for each file, the bytes by which its row groups moved.
    """
    rows, first = 0, None
    groups: list[list[Field]] = []
    for footer, shift in zip(footers, shifts, strict=True):
        fields = _Reader(footer).struct()
        rows += _get(fields, _FILE_ROWS)
        for group in _get(fields, _FILE_GROUPS)[1]:
            groups.append(_moved(group, shift, len(groups)))
        first = fields if first is None else first
    assert first is not None
    joined = _set(_set(first, _FILE_ROWS, lambda _: rows), _FILE_GROUPS, lambda _: (_STRUCT, groups))
    out = bytearray()
    _write_struct(out, joined)
    return bytes(out) + _LENGTH.pack(len(out)) + MAGIC


def _moved(group: list[Field], shift: int, ordinal: int) -> list[Field]:
    def later(position: int) -> int:
        return position + shift if position else 0  # 0: not given

    def chunk(fields: list[Field]) -> list[Field]:
        for number in _CHUNK_POSITIONS:
            fields = _set(fields, number, later)
        return _set(fields, _CHUNK_META, meta)

    def meta(fields: list[Field]) -> list[Field]:
        for number in _META_POSITIONS:
            fields = _set(fields, number, later)
        return fields

    group = _set(group, _GROUP_CHUNKS, lambda chunks: (chunks[0], [chunk(fields) for fields in chunks[1]]))
    return _set(_set(group, _GROUP_OFFSET, later), _GROUP_ORDINAL, lambda _: ordinal)


def _get(fields: list[Field], number: int) -> Any:
    return next(value for known, _, value in fields if known == number)


def _set(fields: list[Field], number: int, change: Any) -> list[Field]:
    return [(known, kind, change(value) if known == number else value) for known, kind, value in fields]


class _Reader:
    """Values of Thrift's compact protocol, in a form from which the same bytes can be written."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    def struct(self) -> list[Field]:
        fields: list[Field] = []
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else self._number()
            kind = header & 15
            fields.append((number, kind, None if kind in (_TRUE, _FALSE) else self._value(kind)))
        return fields

    def _value(self, kind: int) -> Any:
        if kind == _STRUCT:
            return self.struct()
        if kind in (_LIST, _SET):
            header = self._byte()
            size = header >> 4 if header >> 4 < 15 else self._varint()
            return header & 15, [self._value(header & 15) for _ in range(size)]
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
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        return bytes(self._data[self._at - size : self._at])

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
        out.append(min(len(items), 15) << 4 | of)
        if len(items) >= 15:
            _write_varint(out, len(items))
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


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_number(out: bytearray, value: int) -> None:
    _write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)
