"""One 128-bit key for each value: xxh3-128 of its bytes."""

from __future__ import annotations

import sys
from functools import cache
from itertools import pairwise
from types import ModuleType

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays.hashes import Words
from penstock.arrays.text import Utf8, plain, utf8
from penstock.corpus.dedup.minhash import frozen, kernels

__all__ = ["WORTH_NUMBA", "fingerprints"]

WORTH_NUMBA = 2_000_000
"""Rows from which on compiled loops are used: loading them takes as long as hashing some millions without."""
_ROWS = 2048  # digests as Python objects at a time


def fingerprints(array: pa.Array, rows_before: int = 0) -> Words:
    """Two words for each value, the first never 0. Text and bytes as they are, anything else as Python prints it.

    After many `rows_before` numba does it, if it is installed: a tenth of the time for short values, and without
    holding the interpreter lock.
    """
    array = plain(array)
    if array.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        text = utf8(array)
        native = _native() if rows_before >= WORTH_NUMBA else None
        if native is not None:
            words: Words = np.empty((len(array), 2), np.uint64)
            native.digests(frozen(text.data), frozen(text.offsets.astype(np.int64, copy=False)), words)
        else:
            words = _joined([_of_bytes(text, start) for start in range(0, len(array), _ROWS)])
    else:
        words = _joined([_of_values(array[start : start + _ROWS]) for start in range(0, len(array), _ROWS)])
    np.maximum(words[:, 0], 1, out=words[:, 0])
    return words


def _of_bytes(text: Utf8, start: int) -> Words:
    digest, view = xxhash.xxh3_128_digest, text.data.data
    bounds = text.offsets[start : start + _ROWS + 1].tolist()
    return _words([digest(view[begin:end]) for begin, end in pairwise(bounds)])


def _of_values(array: pa.Array) -> Words:
    digest = xxhash.xxh3_128_digest
    return _words([digest(repr(value).encode("utf-8", "surrogatepass")) for value in array.to_pylist()])


def _words(digests: list[bytes]) -> Words:
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64).reshape(-1, 2)


def _joined(parts: list[Words]) -> Words:
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.uint64)


@cache
def _native() -> ModuleType | None:
    """The compiled loop; None without numba, or where words begin with their upper byte."""
    if kernels() is None or sys.byteorder != "little":
        return None
    from penstock.corpus.dedup import xxh3

    return xxh3
