"""MinHash signatures of text, folded into one 64-bit key for each band.

A word is a run of letters, marks and digits, in lower case. White space, punctuation and signs separate words and are
no part of them, so code and markup have as many words as names and numbers, with any spacing. Exceptions:

- Apostrophes and invisible characters are left out: "don't" is one word.
- A sign between two digits belongs to the number: 3.14, 12:30, 2024-01-31, 5+3. A comma does not: it separates lists.
- `+`, `<`, `=` and `>` between white space are words: "5 + 3" is not "5 = 3".
- Symbols outside ASCII, emoji among them, are words.
- Chinese, Japanese, Thai, Lao, Khmer, Burmese and similar scripts put no space between words: every character is one.

A shingle is `ngram` words in a row; a text of fewer words has one shingle, which is all of it.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from penstock.arrays.hashes import Words, as_seed, mix64
from penstock.arrays.text import Utf8
from penstock.corpus.kernels import PLAIN, kernel
from penstock.errors import ConfigError
from penstock.transforms.text import Integers

A = TypeVar("A", bound=np.ndarray[Any, Any])
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

_MOST = np.uint32(0xFFFFFFFF)
_FOLD = np.uint64(0xFF51AFD7ED558CCD)
_ROWS = 256  # at a time: their signatures take four times the memory of their keys

SKIP, SPACE, BREAK = 0, 1, 2
"""No character at all; white space; anything else that is no part of a word."""
JOINT = 1 << 29
"""Marks a sign that belongs to a number if digits are on both sides."""
ALONE = 1 << 30
"""Marks a sign that is a word if white space is on both sides."""
SOLO = 1 << 31
"""Marks a character that is a word of its own."""
CHAR_FACTOR = 0x9E3779B97F4A7C15
WORD_FACTOR = 0xD6E8FEB86659FD93

_JOINT_SIGNS, _ALONE_SIGNS = "._:/+-*^%=<>", "+<=>"
_APOSTROPHES = "'\u2018\u2019"
_SOLO_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19FF),  # Tai Le, New Tai Lue, Khmer
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x1B00, 0x1B7F),  # Balinese
    (0x3005, 0x312F),  # Japanese kana, bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x9FFF),  # Chinese characters
    (0xA000, 0xA4CF),  # Yi
    (0xA980, 0xA9FF),  # Javanese, Burmese
    (0xAA60, 0xAADF),  # Burmese, Tai Viet
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
)

_CHAR = np.uint64(CHAR_FACTOR)
_WORD = np.uint64(WORD_FACTOR)
_SKIP, _SPACE, _BREAK = np.uint32(SKIP), np.uint32(SPACE), np.uint32(BREAK)
_JOINT, _ALONE, _SOLO = np.uint32(JOINT), np.uint32(ALONE), np.uint32(SOLO)
_ZERO = np.uint64(0)
_ROOM = 2048  # shingles gathered before their minima are taken: two arrays of this many fit the first cache
_PAD = 64  # rest loops are slow: shingles are filled up to a multiple of this with repetitions, which change no minimum


def frozen(array: A) -> A:
    """A contiguous read-only view: numba compiles a kernel once more for every other kind of array."""
    view = cast(A, np.ascontiguousarray(array).view())
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class MinHash:
    """`bands * rows` random permutations of the shingles; two texts share a band key if `rows` minima in a row agree.

    With a share s of common shingles that happens with probability 1 - (1 - s**rows)**bands: 0.5 at s = 0.68 for 14
    bands of 8 rows, 0.99 at 0.85, below 0.01 at 0.4.
    """

    ngram: int
    bands: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        for name, least, most in (("ngram", 1, 100), ("bands", 1, 1000), ("rows", 2, 1000)):
            given = getattr(self, name)
            if not isinstance(given, int) or not least <= given <= most:
                raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {given!r}")
        as_seed(self.seed)

    def keys(self, text: Utf8) -> tuple[Words, np.ndarray[Any, np.dtype[np.bool_]]]:
        """A row of band keys for each text, none of them 0; and which texts have words at all."""
        rows = len(text.offsets) - 1
        keys, worded = np.empty((rows, self.bands), np.uint64), np.empty(rows, np.bool_)
        data, bounds = frozen(text.data), frozen(text.offsets.astype(np.int64, copy=False))
        for start in range(0, rows, _ROWS):
            part = slice(start, start + _ROWS)
            minima = self._minima(data, bounds[start : start + _ROWS + 1])
            keys[part], worded[part] = self._fold(minima), (minima != _MOST).any(axis=1)
        return keys, worded

    @property
    def _half(self) -> int:
        """Permutations before this one see the lower half of a shingle's hash, the others the upper half.

        So every band depends on all 64 bits: with 32, two of 100,000 texts of a single shingle would fall together.
        """
        return self.rows // 2 * self.bands

    @cached_property
    def _permutations(self) -> tuple[Numbers, Numbers]:
        """Factors (odd, so that x * factor + term is a permutation modulo 2**32) and terms."""
        drawn = mix64(np.arange(self.bands * self.rows, dtype=np.uint64) + mix64(np.array([self.seed], np.uint64)))
        return drawn.astype(np.uint32) | np.uint32(1), (drawn >> np.uint64(32)).astype(np.uint32)

    def _minima(self, data: Bytes, bounds: Integers) -> Numbers:
        minima = np.full((len(bounds) - 1, self.bands * self.rows), _MOST)
        gathered = np.empty(_ROOM + _PAD, np.uint32), np.empty(_ROOM + _PAD, np.uint32)
        ring = np.empty(self.ngram, np.uint64)
        row_minima(data, bounds, characters(), ring, *gathered, *self._permutations, self._half, minima)
        return minima

    def _fold(self, minima: Numbers) -> Words:
        """Minimum j belongs to row j // bands of band j % bands."""
        keys = np.repeat(mix64(np.arange(self.bands, dtype=np.uint64))[None], len(minima), axis=0)
        for row in range(self.rows):
            keys ^= minima[:, row * self.bands : (row + 1) * self.bands]
            keys *= _FOLD
            keys ^= keys >> np.uint64(32)
        return np.maximum(keys, np.uint64(1))


@cache
def characters() -> Numbers:
    """Code of each character up to U+FFFF: SKIP, SPACE, BREAK, or its lower case, with the marks above."""
    codes = np.array([_character(chr(code)) for code in range(1 << 16)], np.uint32)
    for first, last in _SOLO_RANGES:
        codes[first : last + 1][codes[first : last + 1] > BREAK] |= np.uint32(SOLO)
    codes.flags.writeable = False
    return codes


def _character(char: str) -> int:
    category = unicodedata.category(char)
    if char.isspace():
        return SPACE
    if category in ("Cc", "Cf") or char in _APOSTROPHES or "\ufe00" <= char <= "\ufe0f":  # variation selectors
        return SKIP
    if char in _JOINT_SIGNS:
        return ord(char) | JOINT | (ALONE if char in _ALONE_SIGNS else 0)
    if category[0] == "S" and not char.isascii():
        return ord(char) | SOLO
    if category[0] in "PS":
        return BREAK
    lower = char.lower()
    return ord(lower if len(lower) == 1 else char)


@kernel()
def _mix(word: Any) -> Any:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return word ^ word >> np.uint64(31)


@kernel()
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


@kernel()
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


@kernel()
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


@kernel(plain=PLAIN // 2)
def row_minima(
    data: Any, bounds: Any, codes: Any, ring: Any, low: Any, high: Any, factors: Any, terms: Any, half: int, out: Any
) -> None:
    """The MinHash signature of every row into `out`, which holds the largest numbers there are: rows without words.

    `ring` has room for the words of a shingle, `low` and `high` for the hashes of shingles.
    """
    ngram = len(ring)
    leaving = np.uint64(1)  # the factor of the word that leaves the window
    for _ in range(ngram):
        leaving = leaving * _WORD
    for row in range(len(bounds) - 1):
        i, stop = bounds[row], bounds[row + 1]
        char_sum = word_sum = _ZERO
        words, slot, count = 0, 0, 0
        inside = False
        for slot in range(ngram):
            ring[slot] = _ZERO
        while i <= stop:
            # A space after the last byte ends the last word like the others.
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
