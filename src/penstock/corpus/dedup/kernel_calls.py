"""Machine code of exact deduplication, called with arrays: hashes of texts, and the table of keys that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.hashes import Words
from penstock.errors import DataError
from penstock.files.machine_code import Functions, MachineCode

__all__ = ["KERNELS", "Flags", "add_keys", "check_offsets", "hash_texts", "move_keys"]

Flags = np.ndarray[Any, np.dtype[np.bool_]]

KERNELS = MachineCode("penstock.corpus.dedup.key_kernels", __file__)
"""Loaded for many keys; see `SeenKeys`."""

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
"""What XXH3 mixes with the bytes of a text."""


def hash_texts(kernels: Functions, data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> Words:
    """xxh3-128 of each text, as two words."""
    check_offsets(data, offsets)
    offsets, sums = np.ascontiguousarray(offsets, np.int64), np.empty(8, np.uint64)
    words = np.empty((len(offsets) - 1, 2), np.uint64)
    kernels["hash_texts"](
        *(data.ctypes.data, offsets.ctypes.data, len(words)),
        *(_SECRET.ctypes.data, sums.ctypes.data, words.ctypes.data),
    )
    return words


def check_offsets(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.integer[Any]]) -> None:
    """Refuse the offsets of a damaged file, which may lead anywhere."""
    if offsets[0] != 0 or offsets[-1] != len(data) or (offsets[1:] < offsets[:-1]).any():
        raise DataError("the offsets of a column of text are damaged")


def add_keys(kernels: Functions, slots: Words, keys: Words, known: Flags | None) -> tuple[Flags, Words]:
    """Add keys to a table; flags of those that were `known`, or in it, or in an earlier row, and the others."""
    keys, prefetched = np.ascontiguousarray(keys), np.zeros(1, np.uint64)
    known = None if known is None else np.ascontiguousarray(known)
    duplicate, fresh = np.zeros(len(keys), np.bool_), np.empty(keys.shape, np.uint64)
    added = kernels["add_keys"](
        *(slots.ctypes.data, _bits(slots), slots.shape[1], keys.ctypes.data, len(keys)),
        *((0, False) if known is None else (known.ctypes.data, True)),
        *(duplicate.ctypes.data, fresh.ctypes.data, prefetched.ctypes.data),
    )
    return duplicate, fresh[:added]


def move_keys(kernels: Functions, old: Words, slots: Words) -> None:
    """Put the keys of a table into a larger one, which is empty."""
    kernels["move_keys"](old.ctypes.data, len(old), slots.ctypes.data, _bits(slots), slots.shape[1])


def _bits(slots: Words) -> int:
    return len(slots).bit_length() - 1
