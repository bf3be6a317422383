"""Hashes of values that are the same in every process, on every platform and in every release."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays.text import flags, plain, utf8

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]


def hash64(array: pa.Array, seed: int) -> Words:
    """A 64-bit hash of every value, which depends on nothing but the value and the seed. Null has one of its own."""
    array = plain(array)
    if pa.types.is_temporal(array.type) and array.type.bit_width in (32, 64):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    dtype = array.type
    nulls = flags(array.is_null()) if array.null_count else None
    if pa.types.is_null(dtype):
        hashes = np.zeros(len(array), np.uint64)
    elif pa.types.is_integer(dtype) or pa.types.is_boolean(dtype) or pa.types.is_floating(dtype):
        hashes = mix64(_bits(array) ^ mix64(np.array([seed], np.uint64)))
    elif dtype in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        data, bounds = utf8(array)
        view = data.data
        rows = (xxhash.xxh3_64_intdigest(view[start:stop], seed) for start, stop in pairwise(bounds.tolist()))
        hashes = np.fromiter(rows, np.uint64, len(array))
    else:
        # Decimals and nested values have no bytes that mean the same at every width: only their Python values do.
        rows = (xxhash.xxh3_64_intdigest(repr(value).encode(), seed) for value in array.to_pylist())
        hashes = np.fromiter(rows, np.uint64, len(array))
    if nulls is not None:
        hashes[nulls] = mix64(np.array([seed ^ 0x6E756C6C], np.uint64))
    return hashes


def mix64(words: Words) -> Words:
    """One step of splitmix64: every bit of the result depends on every bit of the word."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def as_seed(seed: int) -> int:
    """A seed that fits the hashes, checked."""
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, got {seed!r}")
    return seed


def _bits(array: pa.Array) -> Words:
    """Numbers as 64-bit words, equal for equal numbers of any width. Null is 0."""
    if pa.types.is_floating(array.type):
        floats = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return (np.where(np.isnan(floats), np.nan, floats) + 0.0).view(np.uint64)  # one NaN, one zero
    wide = pa.uint64() if array.type == pa.uint64() else pa.int64()
    return array.cast(wide).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)  # type: ignore[no-any-return]
