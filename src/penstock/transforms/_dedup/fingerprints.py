"""One 128-bit key for each value: xxh3-128 of its bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import xxhash

from penstock.transforms._hashing import Words
from penstock.transforms.columns import plain
from penstock.transforms.text import utf8

__all__ = ["fingerprints"]

_ROWS = 2048  # digests as Python objects at a time


def fingerprints(array: pa.Array) -> Words:
    """Two words for each value, the first never 0. Text and bytes as they are, anything else as Python prints it."""
    array = plain(array)
    parts = [_words(array[start : start + _ROWS]) for start in range(0, len(array), _ROWS)]
    return np.concatenate(parts) if parts else np.zeros((0, 2), np.uint64)


def _words(array: pa.Array) -> Words:
    digest = xxhash.xxh3_128_digest
    if array.type in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        data, bounds = utf8(array)
        view = data.data
        digests = b"".join([digest(view[start:stop]) for start, stop in pairwise(bounds.tolist())])
    else:
        digests = b"".join([digest(repr(value).encode("utf-8", "surrogatepass")) for value in array.to_pylist()])
    words: Words = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)
    np.maximum(words[:, 0], 1, out=words[:, 0])
    return words
