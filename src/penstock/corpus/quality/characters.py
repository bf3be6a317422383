"""Kinds of characters: one table of bits by code point, and kernels that walk UTF-8 bytes by character and line."""

# ruff: noqa: RUF001, SIM110, SIM300
from __future__ import annotations

import functools
import unicodedata
from typing import Any, TypeAlias

import numpy as np

from penstock.corpus.kernels import kernel

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Kinds: TypeAlias = np.ndarray[Any, np.dtype[np.uint16]]

SPACE, LETTER, LOWER, UPPER, DIGIT = 1, 2, 4, 8, 16
LINE_BREAK = 32
"""Characters at which `str.splitlines` cuts."""
SYMBOL = 64
"""A word of nothing but these is no word to Gopher's rules."""
TERMINAL = 128
"""Marks that end a line of prose, in the scripts of the world."""
SENTENCE_END = 256
MARK, QUOTE, CURRENCY, ICON = 512, 1024, 2048, 4096
"""Characters split off a word: punctuation, quotes, currency signs, pictographs."""
PUNCTUATION = 8192
"""Unicode's general category P."""
NUMERAL = 16384
"""A decimal digit of any script."""
COMBINING = 32768
"""A mark on the character before it, which is part of its word."""

# Nothing beyond this code point is a letter, a symbol or punctuation; the table is filled only so far.
_LAST_OF_INTEREST = 0x323B0

_TERMINAL = """
21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 17d9-17da
1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 2e2e 2e3c 2e53-2e54
3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb fe52 fe56-fe57 ff01 ff0e ff1f
ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 111c5-111c6 111cd 111de-111df 11238-11239
1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c
11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 16b44 16e98 1bc9f 1da88
"""
_SYMBOLS_BESIDES = """
0-8 b-1f 22-2d 2f 3a-3e 40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d 3010-3011
ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e
"""
# Terminal marks that end no sentence by the English rules, most of them younger than the rules.
_NO_SENTENCE_END = """
61d-61e 700 837 839 83d-83e 17d4-17d6 17d9-17da 1803 1b7d-1b7e 2e53-2e54 10f55-10f59 10f86-10f89 11944 11946 11ef7-11ef8
11f43-11f44 16e98
"""
_LINE_BREAKS = "a-d 1c-1e 85 2028-2029"
_MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉〈〉⟦⟧"
CURRENCY_SIGNS = "$£€¥฿﷼" + "".join(map(chr, range(0x20A0, 0x20C0)))


def points(ranges: str) -> list[int]:
    """Code points from hexadecimal ranges: `"21 3a-40"`."""
    bounds = [part.partition("-") for part in ranges.split()]
    return [c for low, _, high in bounds for c in range(int(low, 16), int(high or low, 16) + 1)]


@functools.cache
def kinds() -> Kinds:
    """For every code point, the bits of what it is. Some 2 MB, made once."""
    table = np.zeros(0x110000, np.uint16)
    for c in range(_LAST_OF_INTEREST):
        character = chr(c)
        category = unicodedata.category(character)
        if character.isalpha():
            table[c] = LETTER | LOWER * character.islower() | UPPER * character.isupper()
        elif category[0] == "P":
            table[c] = PUNCTUATION
        elif category == "So":
            table[c] = ICON
        elif character.isspace():
            table[c] = SPACE
        elif category == "Nd":
            table[c] = NUMERAL
        elif category[0] == "M":
            table[c] = COMBINING
    table[ord("0") : ord("9") + 1] |= DIGIT
    terminal = points(_TERMINAL)
    table[terminal] |= TERMINAL | SYMBOL | SENTENCE_END
    table[points(_NO_SENTENCE_END)] &= ~np.uint16(SENTENCE_END)
    table[points(_SYMBOLS_BESIDES)] |= SYMBOL
    table[points(_LINE_BREAKS)] |= LINE_BREAK
    for bit, members in ((MARK, _MARKS), (QUOTE, _QUOTES), (CURRENCY, CURRENCY_SIGNS)):
        table[[ord(character) for character in members]] |= bit
    table.flags.writeable = False
    return table


@kernel()
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


@kernel()
def code_before(data: Array, start: int, at: int) -> tuple[Any, int]:
    """The code point that ends before `at`, and its width. `at` must be beyond `start`."""
    first = at - 1
    while first > start and at - first < 4 and (np.int64(data[first]) & 0xC0) == 0x80:
        first -= 1
    code, width = code_at(data, first, at)
    if first + width != at:
        return 0xFFFD, 1
    return code, width


@kernel()
def skip_spaces(data: Array, at: int, stop: int, kinds: Array) -> int:
    while at < stop:
        code, width = code_at(data, at, stop)
        if not kinds[code] & SPACE:
            break
        at += width
    return at


@kernel()
def skip_spaces_back(data: Array, start: int, at: int, kinds: Array) -> int:
    while at > start:
        code, width = code_before(data, start, at)
        if not kinds[code] & SPACE:
            break
        at -= width
    return at


@kernel()
def line_stop(data: Array, at: int, stop: int, kinds: Array) -> tuple[int, int]:
    """End of the line that begins here, and start of the next, as `str.splitlines` has it."""
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


@kernel()
def count_characters(data: Array, start: int, stop: int) -> int:
    n = 0
    for at in range(start, stop):
        n += (data[at] & 0xC0) != 0x80
    return n


@kernel()
def same(left: Array, at: int, right: Array, there: int, length: int) -> bool:
    for i in range(length):
        if left[at + i] != right[there + i]:
            return False
    return True


def most_lines(data: Array, bounds: Array) -> int:
    """Lines of the row with most newlines."""
    return int(np.diff(np.searchsorted(np.flatnonzero(data == 10), bounds)).max(initial=0)) + 1


@kernel()
def clear(slots: Array, size: int, value: int) -> None:
    for i in range(size):  # numba takes a second to compile the assignment of a slice
        slots[i] = value


@kernel()
def is_digit(byte: int) -> bool:
    return 48 <= byte and byte <= 57
