"""Code points, whitespace and lines on UTF-8 bytes."""

# ruff: noqa: SIM110, SIM300
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np

from penstock.corpus.quality.characters import LINE_BREAK, SPACE

__all__ = [
    "Array",
    "code_at",
    "code_before",
    "compiled",
    "count_characters",
    "grown",
    "is_digit",
    "line_stop",
    "same",
    "skip_spaces",
    "skip_spaces_back",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function as machine code that does not hold the interpreter's lock, kept on disk for the next process."""
    try:
        return cast(Function, numba.njit(nogil=True, cache=True)(function))
    except RuntimeError:  # there is no directory to keep it in
        return cast(Function, numba.njit(nogil=True)(function))


@compiled
def code_at(data: Array, at: int, stop: int) -> tuple[Any, int]:
    """The code point that begins here, and its width in bytes. Bytes that are no UTF-8 are U+FFFD, one by one."""
    first = np.int64(data[at])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        if at + 1 < stop and first >= 0xC2:
            return (first & 0x1F) << 6 | (np.int64(data[at + 1]) & 0x3F), 2
    elif first < 0xF0:
        if at + 2 < stop:
            return (first & 0x0F) << 12 | (np.int64(data[at + 1]) & 0x3F) << 6 | (np.int64(data[at + 2]) & 0x3F), 3
    elif at + 3 < stop:
        code = (first & 0x07) << 18 | (np.int64(data[at + 1]) & 0x3F) << 12
        code |= (np.int64(data[at + 2]) & 0x3F) << 6 | (np.int64(data[at + 3]) & 0x3F)
        if code <= 0x10FFFF:
            return code, 4
    return 0xFFFD, 1


@compiled
def code_before(data: Array, start: int, at: int) -> tuple[Any, int]:
    """The code point that ends before `at`, and its width. `at` must be beyond `start`."""
    first = at - 1
    while first > start and at - first < 4 and (np.int64(data[first]) & 0xC0) == 0x80:
        first -= 1
    code, width = code_at(data, first, at)
    if first + width != at:
        return 0xFFFD, 1
    return code, width


@compiled
def skip_spaces(data: Array, at: int, stop: int, kinds: Array) -> int:
    while at < stop:
        code, width = code_at(data, at, stop)
        if not kinds[code] & SPACE:
            break
        at += width
    return at


@compiled
def skip_spaces_back(data: Array, start: int, at: int, kinds: Array) -> int:
    while at > start:
        code, width = code_before(data, start, at)
        if not kinds[code] & SPACE:
            break
        at -= width
    return at


@compiled
def line_stop(data: Array, at: int, stop: int, kinds: Array) -> tuple[int, int]:
    """Where the line that begins here ends, and where the next begins, as `str.splitlines` has it."""
    while at < stop:
        byte = data[at]
        if byte >= 32 and byte < 0x80:
            at += 1
            continue
        code, width = code_at(data, at, stop)
        if kinds[code] & LINE_BREAK:
            if code == 13 and at + 1 < stop and data[at + 1] == 10:
                return at, at + 2
            return at, at + width
        at += width
    return stop, stop


@compiled
def count_characters(data: Array, start: int, stop: int) -> int:
    n = 0
    for at in range(start, stop):
        n += (data[at] & 0xC0) != 0x80
    return n


@compiled
def same(left: Array, at: int, right: Array, there: int, length: int) -> bool:
    for i in range(length):
        if left[at + i] != right[there + i]:
            return False
    return True


@compiled
def grown(array: Array, n: int, room: int) -> Array:
    larger = np.empty(max(room, 2 * len(array)), array.dtype)
    larger[:n] = array[:n]
    return larger


@compiled
def is_digit(byte: int) -> bool:
    return 48 <= byte and byte <= 57
