"""Permutation by arithmetic: a shuffle that maps any index forwards and backwards without a table.

An index is split into a low half of `bits` bits and a high half in [0, radix), where `radix << bits` is the smallest
such domain that holds `size`. Rounds of a Feistel network change one half by a keyed hash of the other. The few values
outside of [0, size) are mapped again until they are inside (cycle walking), which keeps the mapping one-to-one. Both
halves fit 32 bits, so a round is a handful of vector instructions.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError

_MAX_SIZE = 1 << 62
_ROUNDS = 8
# Halves of a few bits mix badly: at size 8 not all pairs of values are equally likely. Such sizes use a sorted table.
_TABLE_SIZE = 1 << 10
_CHUNK = 1 << 14  # values mapped at once: their halves stay in the first two caches
_SPREAD = np.uint32(0x9E3779B1)
_WORD = np.uint64(32)

_Values = npt.NDArray[np.uint64]


def derive_key(seed: int, *parts: int | str) -> int:
    """64-bit key from a seed and the names or numbers of its purpose.

    Equal on every machine and in every release: resumable orders depend on it.

        derive_key(seed, "shuffle", source, epoch)
    """
    digest = xxhash.xxh3_64()
    for part in (seed, *parts):
        # With the kind and length of each part: ("a", "b"), ("ab",), (1,) and ("1",) are four keys.
        kind = b"s" if isinstance(part, str) else b"i"
        text = part if isinstance(part, str) else f"{operator.index(part):d}"
        spelled = text.encode("utf-8", "surrogatepass")
        digest.update(kind + len(spelled).to_bytes(8, "little") + spelled)
    return int(digest.intdigest())


@dataclass(frozen=True)
class Permutation:
    """Keyed pseudo-random permutation of [0, size): `permutation(indices)`, and back with `inverse(values)`.

    Both take an int, or an integer array of any shape, and return an int, or int64 of that shape. No table is kept
    above a size of 1,024, and every value costs the same. Meant for shuffling, not for secrets.
    """

    size: int
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.size <= _MAX_SIZE:
            raise ConfigError(f"the size of a permutation must be from 0 to 2**62, got {self.size}")
        if not 0 <= self.key < 1 << 64:
            raise ConfigError(f"the key of a permutation must be from 0 to 2**64 - 1, got {self.key}; use derive_key()")

    def __len__(self) -> int:
        return self.size

    @overload
    def __call__(self, indices: int) -> int: ...
    @overload
    def __call__(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]: ...
    def __call__(self, indices: npt.ArrayLike) -> int | npt.NDArray[np.int64]:
        """Values of these indices."""
        return self._map(indices, "index", forwards=True)

    @overload
    def inverse(self, values: int) -> int: ...
    @overload
    def inverse(self, values: npt.ArrayLike) -> npt.NDArray[np.int64]: ...
    def inverse(self, values: npt.ArrayLike) -> int | npt.NDArray[np.int64]:
        """Indices of these values: `inverse(permutation(i)) == i`."""
        return self._map(values, "value", forwards=False)

    def _map(self, given: npt.ArrayLike, what: str, *, forwards: bool) -> int | npt.NDArray[np.int64]:
        places = self._checked(given, what)
        if self.size <= _TABLE_SIZE:
            there, back = self._tables
            found = (there if forwards else back)[places]
        else:
            found = self._walk(places.ravel(), forwards).view(np.int64).reshape(places.shape)
        return int(found) if np.ndim(given) == 0 else found

    def _checked(self, given: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
        """Places as unsigned integers below the size; a negative one wraps to a huge one and is refused too."""
        if isinstance(given, int) and not 0 <= given < self.size:
            raise self._out_of_range(what, given)
        places = np.asarray(given)
        if places.size == 0:
            return places.astype(np.uint64)
        if places.dtype.kind not in "iu":
            raise TypeError(f"a permutation maps integers, got {places.dtype} as {what}: {given!r}")
        unsigned = places.astype(np.int64, copy=False).view(np.uint64)
        if int(unsigned.max()) >= self.size:
            raise self._out_of_range(what, int(places.ravel()[int(np.argmax(unsigned >= self.size))]))
        return unsigned

    def _out_of_range(self, what: str, place: int) -> IndexError:
        return IndexError(f"{what} {place} is out of range for a permutation of size {self.size}")

    @cached_property
    def _tables(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tables of a small size, forwards and backwards: indices sorted by a keyed hash."""
        drawn = np.arange(1, self.size + 1, dtype=np.uint64)
        drawn *= np.uint64(0x9E3779B97F4A7C15)
        drawn += np.uint64(derive_key(self.key, self.size))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            drawn ^= drawn >> np.uint64(shift)
            drawn *= np.uint64(factor)
        drawn ^= drawn >> np.uint64(31)
        there = np.argsort(drawn, kind="stable").astype(np.int64, copy=False)
        return there, np.argsort(there).astype(np.int64, copy=False)

    @cached_property
    def _round_keys(self) -> list[tuple[np.uint32, np.uint32]]:
        """Offset and odd factor for the hash of each round."""
        keys = [derive_key(self.key, self.size, number) for number in range(_ROUNDS)]
        return [(np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32 | 1)) for key in keys]

    def _walk(self, places: _Values, forwards: bool) -> _Values:
        found = self._network(places, forwards)
        astray = np.flatnonzero(found >= np.uint64(self.size))
        while len(astray):
            again = self._network(found[astray], forwards)
            found[astray] = again
            astray = astray[again >= np.uint64(self.size)]
        return found

    def _network(self, places: _Values, forwards: bool) -> _Values:
        bits = (self.size - 1).bit_length() // 2
        radix = -(-self.size >> bits)
        rounds = list(enumerate(self._round_keys))
        found = np.empty(len(places), np.uint64)
        for start in range(0, len(places), _CHUNK):
            part = slice(start, start + _CHUNK)
            _run_rounds(rounds if forwards else rounds[::-1], places[part], found[part], bits, radix, forwards)
        return found


def _run_rounds(
    rounds: list[tuple[int, tuple[np.uint32, np.uint32]]],
    places: _Values,
    found: _Values,
    bits: int,
    radix: int,
    forwards: bool,
) -> None:
    """Map a few thousand values through the network, in place: memory traffic dominates the cost."""
    low = (places & np.uint64((1 << bits) - 1)).astype(np.uint32)
    high = np.right_shift(places, np.uint64(bits), out=found).astype(np.uint32)
    hashed, spare = np.empty_like(low), np.empty_like(low)
    top, shift, wide, modulus = np.uint32(32 - bits), np.uint32(15), np.uint64(radix), np.uint32(radix)
    for number, (offset, factor) in rounds:
        np.multiply(high if number % 2 else low, _SPREAD, out=hashed)
        hashed += offset
        np.right_shift(hashed, shift, out=spare)
        hashed ^= spare
        hashed *= factor
        if number % 2:
            hashed >>= top
            low ^= hashed
            continue
        # From 32 bits to [0, radix): the high word of the product. Then add or subtract it modulo the radix.
        np.multiply(hashed, wide, out=found)
        found >>= _WORD
        hashed[:] = found
        if not forwards:
            np.subtract(modulus, hashed, out=hashed)
        high += hashed
        # Below the radix the difference wraps to a huge number, so the smaller of the two is the remainder.
        np.subtract(high, modulus, out=hashed)
        np.minimum(high, hashed, out=high)
    found[:] = high
    found <<= np.uint64(bits)
    found |= low
