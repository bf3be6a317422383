"""Kernels of exact deduplication, for numba: hashes of texts, and the table of keys that they are.

They are compiled by another process (`files.machine_code`), which alone imports this module. A table is an array of
`1 << bits` slots of `width` words; an empty slot begins with 0, and the upper bits of a key are its place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from penstock._optional import require
from penstock.corpus.dedup.hash_kernels import hash_texts
from penstock.corpus.dedup.kernel_calls import hash_texts as hash_with
from penstock.corpus.dedup.key_table import KeyTable
from penstock.files.machine_code import Functions, kernel

numba = require("numba", "fast")
types = numba.types

_AHEAD = 8


@kernel
def find_key(slots: Any, bits: Any, width: Any, keys: Any, row: Any) -> Any:
    """The slot of a key, or the empty one where it belongs."""
    mask = (np.int64(1) << bits) - 1
    at = np.int64(keys[row * width] >> np.uint64(64 - bits))
    while slots[at * width] != 0:
        word = 0
        while word < width and slots[at * width + word] == keys[row * width + word]:
            word += 1
        if word == width:
            break
        at = (at + 1) & mask
    return at


@kernel
def put_key(slots: Any, at: Any, width: Any, keys: Any, row: Any) -> Any:
    """Write a key."""
    for word in range(width):
        slots[at * width + word] = keys[row * width + word]
    return 0


@kernel
def slot_ahead(slots: Any, bits: Any, width: Any, keys: Any, row: Any, rows: Any) -> Any:
    """First word of the slot of a later key: it is asked of memory while the keys before are looked at."""
    if row + _AHEAD >= rows:
        return np.uint64(0)
    return slots[np.int64(keys[(row + _AHEAD) * width] >> np.uint64(64 - bits)) * width]


@kernel
def add_keys(
    slots: Any,
    bits: Any,
    width: Any,
    keys: Any,
    rows: Any,
    known: Any,
    is_known: Any,
    marks: Any,
    fresh: Any,
    prefetched: Any,
) -> Any:
    """Mark the rows whose key is `known`, in the table or in an earlier row. Add the others, also to `fresh`; how many
    they are. `prefetched` gets what was read ahead, or the compiler would leave that out."""
    added = 0
    touched = np.uint64(0)
    for row in range(rows):
        touched ^= slot_ahead(slots, bits, width, keys, row, rows)
        if is_known and known[row]:
            marks[row] = 1
            continue
        at = find_key(slots, bits, width, keys, row)
        if slots[at * width] != 0:
            marks[row] = 1
            continue
        put_key(slots, at, width, keys, row)
        for word in range(width):
            fresh[added * width + word] = keys[row * width + word]
        added += 1
    prefetched[0] = touched
    return added


@kernel
def move_keys(old: Any, count: Any, slots: Any, bits: Any, width: Any) -> Any:
    """Put the keys of a table of `count` slots into a larger one, which is empty; how many they are."""
    moved = 0
    for row in range(count):
        if old[row * width] != 0:
            put_key(slots, find_key(slots, bits, width, old, row), width, old, row)
            moved += 1
    return moved


_u8, _u64, _count = types.CPointer(types.uint8), types.CPointer(types.uint64), types.int64
_i64 = types.CPointer(types.int64)
SIGNATURES: dict[str, tuple[Any, Any]] = {
    "add_keys": (add_keys, _count(_u64, _count, _count, _u64, _count, _u8, _count, _u8, _u64, _u64)),
    "hash_texts": (hash_texts, _count(_u8, _i64, _count, _u8, _u64, _u64)),
    "move_keys": (move_keys, _count(_u64, _count, _u64, _count, _count)),
}


def check(functions: Functions) -> None:
    """Raise unless hashes are those of xxhash, and tables are the same with the functions and without."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(np.arange(2100))])
    data = rng.integers(0, 256, offsets[-1], np.uint8)
    digests = [xxhash.xxh3_128_digest(data.data[begin:end]) for begin, end in pairwise(offsets.tolist())]
    if hash_with(functions, data, offsets).astype(">u8").tobytes() != b"".join(digests):
        raise ValueError("the code of the kernels does not hash as it should")
    for width in (1, 2):
        plain, compiled = KeyTable(width), KeyTable(width)
        compiled.kernels = functions
        for _ in range(4):
            keys = rng.integers(1, 1000, (700, 1, width), np.uint64) << np.uint64(54)
            known = keys[:, :, 0] < np.uint64(100 << 54)
            for table in (plain, compiled):
                table.grow_for(table.stored + len(keys))
            wanted, found = plain.add_rows(keys, known), compiled.add_rows(keys, known)
            if plain.stored != compiled.stored or any((a != b).any() for a, b in zip(wanted, found, strict=True)):
                raise ValueError("the code of the kernels does not add keys as it should")
