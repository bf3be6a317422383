"""xxh3-128 of many values in one call, compiled with numba: the digests of `xxhash`, without a Python object for each.

Importing this module needs numba. Its twin is the loop over `xxhash.xxh3_128_digest` in `fingerprints.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from penstock.corpus.dedup.kernels import compiled

__all__ = ["digests"]

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_KEY = np.array([int.from_bytes(_SECRET[i : i + 8], "little") for i in range(len(_SECRET) - 7)], np.uint64)
"""The secret from each of its bytes on, as a word."""

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_MIX_1, _MIX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_STRIPE, _STRIPES, _LANES = 64, 16, 8  # bytes of a stripe, stripes of a block, words of a stripe


_ir: Any = import_module("llvmlite.ir")  # which has no types


def _load(typing: Any, data: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, given[0])
        place = builder.gep(array.data, [given[1]])
        return builder.load(builder.bitcast(place, _ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


def _multiply(typing: Any, left: Any, right: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        wide, narrow = _ir.IntType(128), _ir.IntType(64)
        whole = builder.mul(builder.zext(given[0], wide), builder.zext(given[1], wide))
        upper = builder.trunc(builder.lshr(whole, _ir.Constant(wide, 64)), narrow)
        return context.make_tuple(builder, signature.return_type, [upper, builder.trunc(whole, narrow)])

    both: Any = types.UniTuple(types.uint64, 2)  # type: ignore[no-untyped-call]
    return both(types.uint64, types.uint64), generate


_word: Any = intrinsic(_load)
"""The eight bytes from a place on, wherever that is, as a word. Put together from bytes it takes five times as long."""
_product: Any = intrinsic(_multiply)
"""The upper and the lower word of a product of two words."""


@compiled
def digests(data: Any, bounds: Any, out: Any) -> None:
    """The digest of every value between two bounds, as its upper and its lower word."""
    sums = np.empty(_LANES, np.uint64)
    for row in range(len(bounds) - 1):
        at, size = np.int64(bounds[row]), np.int64(bounds[row + 1] - bounds[row])
        if size > 240:
            out[row, 0], out[row, 1] = _long(data, at, size, sums)
        elif size > 16:
            out[row, 0], out[row, 1] = _middle(data, at, size)
        elif size > 8:
            out[row, 0], out[row, 1] = _nine_to_sixteen(data, at, size)
        elif size > 3:
            out[row, 0], out[row, 1] = _four_to_eight(data, at, size)
        else:
            out[row, 0], out[row, 1] = _up_to_three(data, at, size)


@compiled
def _up_to_three(data: Any, at: Any, size: Any) -> Any:
    low, high = _KEY[64] ^ _KEY[72], _KEY[80] ^ _KEY[88]
    if size:
        first, middle, last = data[at], data[at + (size >> 1)], data[at + size - 1]
        word = np.uint32(np.uint32(first) << 16 | np.uint32(middle) << 24 | np.uint32(last) | np.uint32(size) << 8)
        turned = _swapped(np.uint64(word)) >> np.uint64(32)
        low = np.uint64(word) ^ ((_KEY[0] ^ _KEY[4]) & _LOW)
        high = ((turned << np.uint64(13) | turned >> np.uint64(19)) & _LOW) ^ ((_KEY[8] ^ _KEY[12]) & _LOW)
    return _strong(high), _strong(low)


@compiled
def _four_to_eight(data: Any, at: Any, size: Any) -> Any:
    word = np.uint64(0)
    for i in range(4):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
        word |= np.uint64(data[at + size - 4 + i]) << np.uint64(8 * i + 32)
    high, low = _product(word ^ _KEY[16] ^ _KEY[24], _P64_1 + np.uint64(size << 2))
    high += low << np.uint64(1)
    low ^= high >> np.uint64(3)
    low = (low ^ low >> np.uint64(35)) * _MIX_2
    return _weak(high), low ^ low >> np.uint64(28)


@compiled
def _nine_to_sixteen(data: Any, at: Any, size: Any) -> Any:
    first, last = _word(data, at), _word(data, at + size - 8)
    high, low = _product(first ^ last ^ _KEY[32] ^ _KEY[40], _P64_1)
    low += np.uint64(size - 1) << np.uint64(54)
    last ^= _KEY[48] ^ _KEY[56]
    high += last + (last & _LOW) * (_P32_2 - np.uint64(1))
    low ^= _swapped(high)
    upper, lower = _product(low, _P64_2)
    return _weak(upper + high * _P64_2), _weak(lower)


@compiled
def _middle(data: Any, at: Any, size: Any) -> Any:
    low, high = np.uint64(size) * _P64_1, np.uint64(0)
    end = at + size
    if size <= 128:
        for pair in range((size - 1) // 32, -1, -1):
            low, high = _mixed(data, at + 16 * pair, end - 16 * pair - 16, 32 * pair, low, high)
    else:
        for pair in range(4):
            low, high = _mixed(data, at + 32 * pair, at + 32 * pair + 16, 32 * pair, low, high)
        low, high = _weak(low), _weak(high)
        for pair in range(4, size // 32):
            low, high = _mixed(data, at + 32 * pair, at + 32 * pair + 16, 32 * pair - 125, low, high)
        low, high = _mixed(data, end - 16, end - 32, 103, low, high)
    upper = low * _P64_1 + high * _P64_4 + np.uint64(size) * _P64_2
    return np.uint64(0) - _weak(upper), _weak(low + high)


@compiled
def _mixed(data: Any, one: Any, two: Any, key: Any, low: Any, high: Any) -> Any:
    """Sixteen bytes from each of two places taken in."""
    a, b, c, d = _word(data, one), _word(data, one + 8), _word(data, two), _word(data, two + 8)
    low = low + _folded(a ^ _KEY[key], b ^ _KEY[key + 8]) ^ c + d
    high = high + _folded(c ^ _KEY[key + 16], d ^ _KEY[key + 24]) ^ a + b
    return low, high


@compiled
def _long(data: Any, at: Any, size: Any, sums: Any) -> Any:
    for lane in range(_LANES):
        sums[lane] = _START[lane]
    stripes = (size - 1) // _STRIPE
    for first in range(0, stripes, _STRIPES):
        _take(data, at + first * _STRIPE, min(_STRIPES, stripes - first), 0, sums)
        if first + _STRIPES <= stripes:
            for lane in range(_LANES):
                word = sums[lane]
                sums[lane] = (word ^ word >> np.uint64(47) ^ _KEY[128 + 8 * lane]) * _P32_1
    _take(data, at + size - _STRIPE, 1, 121, sums)
    high, low = ~(np.uint64(size) * _P64_2), np.uint64(size) * _P64_1
    for lane in range(0, _LANES, 2):
        one, two = sums[lane], sums[lane + 1]
        low += _folded(one ^ _KEY[11 + 8 * lane], two ^ _KEY[19 + 8 * lane])
        high += _folded(one ^ _KEY[117 + 8 * lane], two ^ _KEY[125 + 8 * lane])
    return _weak(high), _weak(low)


@compiled
def _take(data: Any, at: Any, stripes: Any, key: Any, sums: Any) -> None:
    """Take in stripes that follow one another: two lanes at a time, each adding its words to the other."""
    for lane in range(0, _LANES, 2):
        one, two = sums[lane], sums[lane + 1]
        for stripe in range(stripes):
            place, turn = at + stripe * _STRIPE + 8 * lane, key + 8 * (stripe + lane)
            a, b = _word(data, place), _word(data, place + 8)
            mixed = a ^ _KEY[turn]
            one += b + (mixed & _LOW) * (mixed >> np.uint64(32))
            mixed = b ^ _KEY[turn + 8]
            two += a + (mixed & _LOW) * (mixed >> np.uint64(32))
        sums[lane], sums[lane + 1] = one, two


@compiled
def _folded(left: Any, right: Any) -> Any:
    upper, lower = _product(left, right)
    return upper ^ lower


@compiled
def _weak(word: Any) -> Any:
    word = (word ^ word >> np.uint64(37)) * _MIX_1
    return word ^ word >> np.uint64(32)


@compiled
def _strong(word: Any) -> Any:
    word = (word ^ word >> np.uint64(33)) * _P64_2
    word = (word ^ word >> np.uint64(29)) * _P64_3
    return word ^ word >> np.uint64(32)


@compiled
def _swapped(word: Any) -> Any:
    """The bytes in the other order."""
    swapped = np.uint64(0)
    for i in range(8):
        swapped = swapped << np.uint64(8) | word >> np.uint64(8 * i) & np.uint64(0xFF)
    return swapped
