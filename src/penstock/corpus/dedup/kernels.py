"""The loops of deduplication, compiled with numba: one pass over UTF-8 bytes, and probes of a hash table.

Importing this module needs numba; `kernels()` in the modules that use it says whether it is there. Every function has a
NumPy twin that gives the same result: `shingles.py` with `signatures.py`, and `tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from penstock.corpus.dedup.shingles import ALONE, BREAK, CHAR_FACTOR, JOINT, SKIP, SOLO, SPACE, WORD_FACTOR

__all__ = ["add_rows", "insert_all", "minima", "remove_all"]

F = TypeVar("F", bound=Callable[..., Any])

_CHAR = np.uint64(CHAR_FACTOR)
_WORD = np.uint64(WORD_FACTOR)
_SKIP, _SPACE, _BREAK = np.uint32(SKIP), np.uint32(SPACE), np.uint32(BREAK)
_JOINT, _ALONE, _SOLO = np.uint32(JOINT), np.uint32(ALONE), np.uint32(SOLO)
_ZERO = np.uint64(0)
_ROOM = 2048  # shingles gathered before their minima are taken: two arrays of this many fit the first cache
_PAD = 64  # rest loops are slow: shingles are filled up to a multiple of this with repetitions, which change no minimum


def compiled(function: F) -> F:
    try:
        return cast(F, numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # there is nowhere to write a cache to: compile in every process
        return cast(F, numba.njit(nogil=True, error_model="numpy")(function))


@compiled
def _mix(word: Any) -> Any:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


@compiled
def _lower_minima(low: Any, high: Any, count: int, factors: Any, terms: Any, half: int, minimum: Any) -> None:
    """Take the gathered shingles into the minima of a row: permutations before `half` use the low words."""
    padded = (count + _PAD - 1) // _PAD * _PAD
    for i in range(count, padded):
        low[i], high[i] = low[0], high[0]
    for j in range(len(factors)):
        words = low if j < half else high
        factor, term, least = factors[j], terms[j], minimum[j]
        for i in range(padded):
            least = min(least, np.uint32(words[i] * factor + term))
        minimum[j] = least


@compiled
def _code_at(data: Any, i: int, stop: int, codes: Any) -> Any:
    """The character whose first byte, not ASCII, is at i."""
    lead = np.uint32(data[i])
    one = np.uint32(data[i + 1] & 0x3F) if i + 1 < stop else np.uint32(0)
    if lead < 0xE0:
        return codes[(lead & np.uint32(0x1F)) << np.uint32(6) | one]
    two = np.uint32(data[i + 2] & 0x3F) if i + 2 < stop else np.uint32(0)
    if lead < 0xF0:
        return codes[(lead & np.uint32(0x0F)) << np.uint32(12) | one << np.uint32(6) | two]
    three = np.uint32(data[i + 3] & 0x3F) if i + 3 < stop else np.uint32(0)
    code = np.uint32((lead & np.uint32(0x07)) << np.uint32(18) | one << np.uint32(12) | two << np.uint32(6) | three)
    if code < np.uint32(0x10000):
        return codes[code]
    block = code >> np.uint32(12)
    if code >> np.uint32(17) == np.uint32(1) or block == np.uint32(0x1B) or block == np.uint32(0x1F):
        return np.uint32(code | _SOLO)
    return code


@compiled
def _sign_at(data: Any, i: int, start: int, stop: int, code: Any, codes: Any) -> Any:
    """The sign at i as part of a number, as a word, or as neither. The ends of a row are spaces."""
    before = data[i - 1] if i > start else np.uint8(0x20)
    after = data[i + 1] if i + 1 < stop else np.uint8(0x20)
    char = np.uint32(data[i])
    if np.uint8(0x30) <= before <= np.uint8(0x39) and np.uint8(0x30) <= after <= np.uint8(0x39):
        return char
    if code & _ALONE and before < 0x80 and after < 0x80 and codes[before] == _SPACE and codes[after] == _SPACE:
        return np.uint32(char | _SOLO)
    return _BREAK


@compiled
def minima(data: Any, bounds: Any, codes: Any, ngram: int, factors: Any, terms: Any, half: int, out: Any) -> None:
    """The MinHash signature of every row into `out`, which holds the largest numbers there are: rows without words."""
    ring = np.zeros(ngram, np.uint64)
    low = np.empty(_ROOM + _PAD, np.uint32)
    high = np.empty(_ROOM + _PAD, np.uint32)
    leaving = np.uint64(1)  # the factor of the word that leaves the window
    for _ in range(ngram):
        leaving = leaving * _WORD
    for row in range(len(bounds) - 1):
        i, stop = bounds[row], bounds[row + 1]
        char_sum = word_sum = _ZERO
        words, slot, count = 0, 0, 0
        inside = False
        ring[:] = _ZERO
        while i <= stop:
            # Behind the last byte stands a space, so that the last word ends like the others.
            code = _SPACE
            if i < stop:
                byte = data[i]
                if byte < 0x80:
                    code = codes[byte]
                    if _BREAK < code < _JOINT:
                        char_sum = char_sum * _CHAR + np.uint64(code)
                        inside = True
                        i += 1
                        continue
                    if code >= _JOINT:
                        code = _sign_at(data, i, bounds[row], stop, code, codes)
                elif byte < 0xC0:
                    code = _SKIP
                else:
                    code = _code_at(data, i, stop, codes)
                    if _JOINT <= code < _SOLO:  # a sign in more bytes than it needs is no sign
                        code = _BREAK
            i += 1
            alone = code >= _SOLO
            if code > _BREAK and not alone:
                char_sum = char_sum * _CHAR + np.uint64(code)
                inside = True
                continue
            if code == _SKIP:
                continue
            for second in range(2):  # the word before, then the character that is a word of its own
                if second:
                    if not alone:
                        break
                    char_sum = np.uint64(code)
                elif not inside:
                    continue
                hashed = _mix(char_sum)
                word_sum = word_sum * _WORD + hashed - ring[slot] * leaving
                ring[slot] = hashed
                slot = slot + 1 if slot + 1 < ngram else 0
                words += 1
                char_sum = _ZERO
                if words >= ngram:
                    mixed = _mix(word_sum)
                    low[count], high[count] = np.uint32(mixed), np.uint32(mixed >> np.uint64(32))
                    count += 1
                    if count == _ROOM:
                        _lower_minima(low, high, count, factors, terms, half, out[row])
                        count = 0
            inside = False
        if 0 < words < ngram:
            mixed = _mix(word_sum)
            low[0], high[0] = np.uint32(mixed), np.uint32(mixed >> np.uint64(32))
            count = 1
        if count:
            _lower_minima(low, high, count, factors, terms, half, out[row])


@compiled
def add_rows(slots: Any, shift: Any, keys: Any, known: Any, duplicate: Any, fresh: Any) -> tuple[int, Any]:
    """Mark rows with a key that is `known`, in the table or in an earlier row; add the new keys, also to `fresh`."""
    mask = len(slots) - 1
    width = slots.shape[1]
    added = 0
    touched = _ZERO
    for row in range(keys.shape[0]):
        before = added
        # Ask for the slots of the next row now: they come from memory all at once, while this row is looked at.
        if row + 1 < keys.shape[0]:
            for band in range(keys.shape[1]):
                touched ^= slots[np.int64(keys[row + 1, band, 0] >> shift), 0]
        seen = False
        for band in range(keys.shape[1]):
            if known.size and known[row, band]:
                seen = True
                continue
            key = keys[row, band]
            at = np.int64(key[0] >> shift)
            while slots[at, 0] != _ZERO and not _same(slots[at], key):
                at = (at + 1) & mask
            if slots[at, 0] != _ZERO:
                own = False  # a key may be twice in one row
                for i in range(before, added):
                    own = own or _same(fresh[i], key)
                seen = seen or not own
                continue
            for i in range(width):
                slots[at, i] = fresh[added, i] = key[i]
            added += 1
        duplicate[row] = seen
    return added, touched  # which has to be returned, or it would not be asked for


@compiled
def insert_all(slots: Any, shift: Any, keys: Any) -> None:
    """Put keys that are not in the table into it."""
    mask = len(slots) - 1
    for row in range(len(keys)):
        if keys[row, 0] == _ZERO:
            continue
        at = np.int64(keys[row, 0] >> shift)
        while slots[at, 0] != _ZERO:
            at = (at + 1) & mask
        for i in range(slots.shape[1]):
            slots[at, i] = keys[row, i]


@compiled
def remove_all(slots: Any, shift: Any, keys: Any) -> None:
    """Take keys that are in the table out of it, moving up those that had to stand behind them."""
    mask = len(slots) - 1
    for row in range(len(keys)):
        hole = np.int64(keys[row, 0] >> shift)
        while not _same(slots[hole], keys[row]):
            hole = (hole + 1) & mask
        at = hole
        while True:
            at = (at + 1) & mask
            if slots[at, 0] == _ZERO:
                break
            home = np.int64(slots[at, 0] >> shift)
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = slots[at]
                hole = at
        slots[hole] = _ZERO


@compiled
def _same(left: Any, right: Any) -> bool:
    for i in range(len(left)):  # noqa: SIM110 - numba compiles no generators
        if left[i] != right[i]:
            return False
    return True
