"""XXH3 with 128 bits, as a kernel for numba: the hashes of many texts in one call.

The same as `xxhash.xxh3_128`, which is called once for each text and holds the interpreter lock. Offsets and constants
are those of the specification of XXH3; there is no seed. `secret` has its 192 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock._optional import require
from penstock.files.machine_code import intrinsic, kernel

__all__ = ["hash_texts"]

numba, ir = require("numba", "fast"), require("llvmlite.ir", "fast")
types = numba.types

_STRIPE, _BLOCK, _STRIPES = 64, 1024, 16
_SHORT, _MIDDLE = 128, 240
"""Longest texts that are mixed as a whole, and in a simple loop."""

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_MIX_1, _MIX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW_HALF = np.uint64(0xFFFFFFFF)

_word, _wide, _half = ir.IntType(64), ir.IntType(128), ir.IntType(32)
_lanes = ir.VectorType(_word, 8)
_bytes, _words, _count = types.CPointer(types.uint8), types.CPointer(types.uint64), types.int64


def _at(builder: Any, data: Any, position: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(data, [position]), kind.as_pointer())


@intrinsic
def word_at(typing: Any, data: Any, position: Any) -> Any:
    """Eight bytes, wherever they lie."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[0], args[1], _word), align=1)

    return types.uint64(_bytes, _count), emit


@intrinsic
def half_at(typing: Any, data: Any, position: Any) -> Any:
    """Four bytes, wherever they lie."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(_at(builder, args[0], args[1], _half), align=1), _word)

    return types.uint64(_bytes, _count), emit


@intrinsic
def high_product(typing: Any, left: Any, right: Any) -> Any:
    """Upper half of a product of 128 bits."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.mul(builder.zext(args[0], _wide), builder.zext(args[1], _wide))
        return builder.trunc(builder.lshr(product, ir.Constant(_wide, 64)), _word)

    return types.uint64(types.uint64, types.uint64), emit


@intrinsic
def swapped(typing: Any, value: Any) -> Any:
    """The bytes of a word in the other order."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bswap(args[0])

    return types.uint64(types.uint64), emit


@intrinsic
def add_stripe(typing: Any, sums: Any, data: Any, position: Any, secret: Any, key: Any) -> Any:
    """Add 64 bytes to the eight sums: the product of the halves of each word, and the word to its neighbour."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, data, position, secret, key = args
        place = builder.bitcast(sums, _lanes.as_pointer())
        text = builder.load(_at(builder, data, position, _lanes), align=1)
        mixed = builder.xor(text, builder.load(_at(builder, secret, key, _lanes), align=1))
        low = builder.and_(mixed, ir.Constant(_lanes, [ir.Constant(_word, 0xFFFFFFFF)] * 8))
        high = builder.lshr(mixed, ir.Constant(_lanes, [ir.Constant(_word, 32)] * 8))
        pairs = ir.Constant(ir.VectorType(_half, 8), [ir.Constant(_half, lane ^ 1) for lane in range(8)])
        turned = builder.shuffle_vector(text, ir.Constant(_lanes, ir.Undefined), pairs)
        found = builder.add(builder.load(place, align=8), builder.add(turned, builder.mul(low, high)))
        builder.store(found, place, align=8)
        return context.get_dummy_value()

    return types.void(_words, _bytes, _count, _bytes, _count), emit


@kernel
def folded(left: Any, right: Any) -> Any:
    return (left * right) ^ high_product(left, right)


@kernel
def avalanche(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(37))) * _MIX_1
    return value ^ (value >> np.uint64(32))


@kernel
def avalanche_64(value: Any) -> Any:
    """That of XXH64, for the shortest texts."""
    value = (value ^ (value >> np.uint64(33))) * _P64_2
    value = (value ^ (value >> np.uint64(29))) * _P64_3
    return value ^ (value >> np.uint64(32))


@kernel
def mixed_words(data: Any, at: Any, secret: Any, key: Any) -> Any:
    return folded(word_at(data, at) ^ word_at(secret, key), word_at(data, at + 8) ^ word_at(secret, key + 8))


@kernel
def sum_of_words(data: Any, at: Any) -> Any:
    return word_at(data, at) + word_at(data, at + 8)


@kernel
def hash_tiny(data: Any, at: Any, size: Any, secret: Any) -> Any:
    """Both halves, the lower first, of the hash of up to 16 bytes."""
    length = np.uint64(size)
    if size > 8:
        first, last = word_at(data, at), word_at(data, at + size - 8)
        mixed = first ^ last ^ word_at(secret, 32) ^ word_at(secret, 40)
        last = last ^ word_at(secret, 48) ^ word_at(secret, 56)
        low, high = mixed * _P64_1, high_product(mixed, _P64_1)
        low = low + ((length - np.uint64(1)) << np.uint64(54))
        high = high + last + (last & _LOW_HALF) * (_P32_2 - np.uint64(1))
        low = low ^ swapped(high)
        return avalanche(low * _P64_2), avalanche(high_product(low, _P64_2) + high * _P64_2)
    if size >= 4:
        both = half_at(data, at) + (half_at(data, at + size - 4) << np.uint64(32))
        both = both ^ word_at(secret, 16) ^ word_at(secret, 24)
        factor = _P64_1 + (length << np.uint64(2))
        low, high = both * factor, high_product(both, factor)
        high = high + (low << np.uint64(1))
        low = low ^ (high >> np.uint64(3))
        low = (low ^ (low >> np.uint64(35))) * _MIX_2
        return low ^ (low >> np.uint64(28)), avalanche(high)
    if size:
        first, middle, last = np.uint64(data[at]), np.uint64(data[at + (size >> 1)]), np.uint64(data[at + size - 1])
        low = (first << np.uint64(16)) | (middle << np.uint64(24)) | last | (length << np.uint64(8))
        high = swapped(low) >> np.uint64(32)
        high = ((high << np.uint64(13)) | (high >> np.uint64(19))) & _LOW_HALF
        low = low ^ half_at(secret, 0) ^ half_at(secret, 4)
        return avalanche_64(low), avalanche_64(high ^ half_at(secret, 8) ^ half_at(secret, 12))
    low = word_at(secret, 64) ^ word_at(secret, 72)
    return avalanche_64(low), avalanche_64(word_at(secret, 80) ^ word_at(secret, 88))


@kernel
def hash_middle(data: Any, at: Any, size: Any, secret: Any) -> Any:
    """As `hash_tiny`, of 17 to 240 bytes."""
    length = np.uint64(size)
    low, high = length * _P64_1, np.uint64(0)
    if size <= _SHORT:
        pair = (size - 1) // 32
        while pair >= 0:
            front, back, key = at + 16 * pair, at + size - 16 * (pair + 1), 32 * pair
            low = (low + mixed_words(data, front, secret, key)) ^ sum_of_words(data, back)
            high = (high + mixed_words(data, back, secret, key + 16)) ^ sum_of_words(data, front)
            pair -= 1
    else:
        for part in range(size // 32):
            front, back, key = at + 32 * part, at + 32 * part + 16, 32 * part if part < 4 else 32 * part - 125
            low = (low + mixed_words(data, front, secret, key)) ^ sum_of_words(data, back)
            high = (high + mixed_words(data, back, secret, key + 16)) ^ sum_of_words(data, front)
            if part == 3:
                low, high = avalanche(low), avalanche(high)
        front, back = at + size - 16, at + size - 32
        low = (low + mixed_words(data, front, secret, 103)) ^ sum_of_words(data, back)
        high = (high + mixed_words(data, back, secret, 119)) ^ sum_of_words(data, front)
    return avalanche(low + high), np.uint64(0) - avalanche(low * _P64_1 + high * _P64_4 + length * _P64_2)


@kernel
def merged(sums: Any, secret: Any, key: Any, begin: Any) -> Any:
    for pair in range(4):
        begin += folded(
            sums[2 * pair] ^ word_at(secret, key + 16 * pair), sums[2 * pair + 1] ^ word_at(secret, key + 16 * pair + 8)
        )
    return avalanche(begin)


@kernel
def hash_long(data: Any, at: Any, size: Any, secret: Any, sums: Any) -> Any:
    """As `hash_tiny`, of more than 240 bytes; `sums` are eight words that are written on."""
    sums[0], sums[1], sums[2], sums[3] = _P32_3, _P64_1, _P64_2, _P64_3
    sums[4], sums[5], sums[6], sums[7] = _P64_4, _P32_2, _P64_5, _P32_1
    blocks = (size - 1) // _BLOCK
    for block in range(blocks):
        for stripe in range(_STRIPES):
            add_stripe(sums, data, at + block * _BLOCK + stripe * _STRIPE, secret, 8 * stripe)
        for lane in range(8):
            one = sums[lane]
            sums[lane] = (one ^ (one >> np.uint64(47)) ^ word_at(secret, 128 + 8 * lane)) * _P32_1
    for stripe in range((size - 1 - blocks * _BLOCK) // _STRIPE):
        add_stripe(sums, data, at + blocks * _BLOCK + stripe * _STRIPE, secret, 8 * stripe)
    add_stripe(sums, data, at + size - _STRIPE, secret, 121)
    length = np.uint64(size)
    return merged(sums, secret, 11, length * _P64_1), merged(sums, secret, 117, ~(length * _P64_2))


@kernel
def hash_texts(data: Any, offsets: Any, rows: Any, secret: Any, sums: Any, hashes: Any) -> Any:
    """Write the hash of each text, the upper half first."""
    for row in range(rows):
        at, size = offsets[row], offsets[row + 1] - offsets[row]
        if size <= 16:
            low, high = hash_tiny(data, at, size, secret)
        elif size <= _MIDDLE:
            low, high = hash_middle(data, at, size, secret)
        else:
            low, high = hash_long(data, at, size, secret, sums)
        hashes[2 * row], hashes[2 * row + 1] = high, low
    return 0
