"""Positions of the tokens in the pieces of a shard, from the beginnings of the pieces alone."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pyarrow as pa

HEAD_BYTES = 2048
"""Beginning of a piece that is read first; it nearly always holds all that is needed."""


def find_values(
    head: Any, length: int, schema: pa.Schema, column: str, read_more: Callable[[int], Any]
) -> tuple[int, int]:
    """Positions in a piece of `length` bytes of the first offset of a column of lists (-1 for none), and of its values.

    `read_more(size)` is asked for a longer beginning. The rest of the piece is memory that is never touched.
    """
    size = int.from_bytes(bytes(memoryview(head)[4:8]), "little") + 8
    if size > len(head):
        head = read_more(size)
    if not 8 < size <= length:
        raise pa.ArrowInvalid(f"a record batch of {length} bytes has metadata of {size}")
    empty = mmap.mmap(-1, length)
    empty[:size] = bytes(memoryview(head)[:size])
    whole = pa.py_buffer(empty)
    lists = pa.ipc.read_record_batch(whole, schema).column(schema.get_field_index(column))
    values = lists.values.buffers()[1]
    offsets = -1 if pa.types.is_fixed_size_list(lists.type) else lists.buffers()[1].address - whole.address
    return offsets, 0 if values is None else values.address - whole.address
