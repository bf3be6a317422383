"""The memory of this process as one array of numbers, so that what lies in many mapped files is one indexing.

A place is an address, counted in numbers of the type from a fixed beginning. Reading a place that nothing is mapped at
ends the process: places are made from buffers that somebody holds, and from nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LONGEST_STRETCH", "keep_freed", "memory_as", "place_of", "stretches_of"]

_BEGIN = 1 << 16
"""Nothing is ever mapped below it, and an array cannot begin at address 0."""
_BITS = 47
"""What an address has on the systems there are, for the programs that run on them."""
LONGEST_STRETCH = 1 << 13
"""Longer stretches are not worth a view of their own: copying them one by one costs as little."""


@lru_cache(maxsize=16)
def memory_as(dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """All memory as numbers of a type: a read-only view."""
    return np.asarray(_Memory(((1 << _BITS) // dtype.itemsize,), (dtype.itemsize,), dtype.str))


@lru_cache(maxsize=64)
def stretches_of(dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    """The array whose row p is the `length` numbers from place p on."""
    if length > LONGEST_STRETCH:
        raise ValueError(f"a stretch has at most {LONGEST_STRETCH} numbers, got {length}")
    shape = ((1 << _BITS) // dtype.itemsize, length)
    return np.asarray(_Memory(shape, (dtype.itemsize, dtype.itemsize), dtype.str))


def place_of(address: int, itemsize: int) -> int:
    """The place of an address; None of ours lies between two numbers."""
    place, rest = divmod(address - _BEGIN, itemsize)
    if rest or place < 0:
        raise ValueError(f"address {address:#x} is no place of numbers of {itemsize} bytes")
    return place


def keep_freed(nbytes: int) -> None:
    """Make the allocator keep up to about `nbytes` that are freed, instead of giving them back and asking again.

    Giving them back costs a page fault for every 4 KiB that is used next, which for the arrays of a batch is more than
    filling them. glibc keeps what is smaller than the largest block it has seen freed; elsewhere this does nothing.
    """
    np.empty(nbytes, np.uint8)


class _Memory:
    """What NumPy asks for to make an array of memory that somebody else holds."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], kind: str) -> None:
        self.__array_interface__ = {
            "data": (_BEGIN, True),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
            "version": 3,
        }
