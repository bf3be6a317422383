"""Words and sentences on UTF-8 bytes; offsets of words are relative to the beginning of their row."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.corpus.quality.characters import (
    CURRENCY,
    DIGIT,
    ICON,
    LETTER,
    LOWER,
    MARK,
    PUNCTUATION,
    QUOTE,
    SENTENCE_END,
    SPACE,
    UPPER,
)
from penstock.corpus.quality.english import LONGEST_EXCEPTION
from penstock.corpus.quality.kernels.utf8 import (
    Array,
    code_at,
    code_before,
    compiled,
    grown,
    is_digit,
    same,
    skip_spaces,
)

__all__ = ["count_sentences", "is_address", "split_rows"]


@compiled
def is_address(data: Array, start: int, stop: int) -> bool:
    """A web or mail address: see `english.ADDRESS`."""
    if is_host(data, start, stop):
        return True
    scheme = True
    for at in range(start, stop):
        byte = data[at]
        if scheme and byte == 58 and at - start >= 2 and at + 2 < stop and data[at + 1] == 47 and data[at + 2] == 47:
            if is_host(data, at + 3, stop):
                return True
            scheme = False
        scheme = scheme and (is_host_byte(byte) or byte == 43) and byte < 0x80
        if byte == 64 and at > start and is_host(data, at + 1, stop):
            return True
    return False


@compiled
def is_host_byte(byte: int) -> bool:
    letter = (byte | 32) >= 97 and (byte | 32) <= 122
    return letter or is_digit(byte) or byte == 46 or byte == 45 or byte == 95 or byte >= 0x80


@compiled
def is_host(data: Array, start: int, stop: int) -> bool:
    """A host name or an IPv4 address, then perhaps a port and a path."""
    at = start
    while at < stop and is_host_byte(data[at]):
        at += 1
    if not (is_name(data, start, at) or is_dotted_quad(data, start, at)):
        return False
    if at < stop and data[at] == 58:
        port = at + 1
        while port < stop and is_digit(data[port]):
            port += 1
        if port - at - 1 < 2 or port - at - 1 > 5:
            return False
        at = port
    return at == stop or data[at] == 47 or data[at] == 63 or data[at] == 35


@compiled
def is_name(data: Array, start: int, stop: int) -> bool:
    label, labels, characters, lower = start, 0, 0, True
    for at in range(start, stop):
        byte = data[at]
        if byte == 46:
            if at == label or characters > 64 or is_joint(data[label]) or is_joint(data[at - 1]):
                return False
            label, labels, characters, lower = at + 1, labels + 1, 0, True
        else:
            characters += (byte & 0xC0) != 0x80
            lower = lower and ((byte >= 97 and byte <= 122) or byte >= 0x80)
    return labels > 0 and lower and characters >= 2 and characters <= 63


@compiled
def is_joint(byte: int) -> bool:
    return byte == 45 or byte == 95


@compiled
def is_dotted_quad(data: Array, start: int, stop: int) -> bool:
    digits, dots = 0, 0
    for at in range(start, stop):
        if data[at] == 46:
            if digits == 0:
                return False
            digits, dots = 0, dots + 1
        elif is_digit(data[at]):
            digits += 1
            if digits > 3:
                return False
        else:
            return False
    return dots == 3 and digits > 0


@compiled
def split_rows(data: Array, bounds: Array, english: bool, kinds: Array, exceptions: Any) -> tuple[Array, Array, Array]:
    """The words of all rows: starts, ends, and for each row the number of its first word."""
    rows = len(bounds) - 1
    starts = np.empty(len(data) // 4 + 64, np.int32)
    ends = np.empty(len(data) // 4 + 64, np.int32)
    firsts = np.zeros(rows + 1, np.int64)
    n = 0
    for row in range(rows):
        starts, ends, n = split_row(data, bounds[row], bounds[row + 1], english, kinds, exceptions, starts, ends, n)
        firsts[row + 1] = n
    return starts[:n], ends[:n], firsts


@compiled
def split_row(
    data: Array,
    begin: int,
    stop: int,
    english: bool,
    kinds: Array,
    exceptions: Any,
    starts: Array,
    ends: Array,
    n: int,
) -> tuple[Array, Array, int]:
    """Append the words of one row; the arrays grow when they are full."""
    at = begin
    while True:
        at = skip_spaces(data, at, stop, kinds)
        if at == stop:
            return starts, ends, n
        first = at
        digits = 0
        others = 0  # characters that are neither ASCII letters nor digits: no more than twice as many words
        while at < stop:
            byte = data[at]
            if byte < 0x80:
                if byte <= 32 and kinds[byte] & SPACE:
                    break
                kind = kinds[byte]
                others += not kind & (LETTER | DIGIT)
                digits += (kind & DIGIT) != 0
                at += 1
            else:
                code, width = code_at(data, at, stop)
                if kinds[code] & SPACE:
                    break
                others += 1
                at += width
        room = n + (min(2 * others + 6, at - first + 1) if english else 1)
        if room > len(starts):
            starts, ends = grown(starts, n, room), grown(ends, n, room)
        # Most stretches are nothing but letters: the rules leave them whole, and only exceptions split them.
        if english and (others or digits or exception_at(data, first, at, exceptions) >= 0):
            n = split_stretch(data, begin, first, at, kinds, exceptions, starts, ends, n)
        else:
            starts[n], ends[n] = first - begin, at - begin
            n += 1


@compiled
def split_stretch(
    data: Array, begin: int, start: int, stop: int, kinds: Array, exceptions: Any, starts: Array, ends: Array, n: int
) -> int:
    """The English words of a stretch without whitespace; see `english`."""
    special = exception_at(data, start, stop, exceptions)
    while start < stop and special < 0:
        length = prefix_length(data, start, stop, kinds)
        if length == 0:
            break
        starts[n], ends[n] = start - begin, start + length - begin
        n += 1
        start += length
        special = exception_at(data, start, stop, exceptions)
    behind = n
    while start < stop and special < 0:
        length = suffix_length(data, start, stop, kinds, exceptions)
        if length == 0:
            break
        starts[n], ends[n] = stop - length - begin, stop - begin
        n += 1
        stop -= length
        special = exception_at(data, start, stop, exceptions)
    middle = n
    if special >= 0:
        for length in exceptions[3][special]:
            if length:
                starts[n], ends[n] = start - begin, start + length - begin
                n += 1
                start += length
    elif start < stop:
        n = split_middle(data, begin, start, stop, kinds, starts, ends, n)
    if middle > behind:
        # What was split off the end stands before the middle, last first: turn all of it round, then the middle back.
        reverse(starts, ends, behind, n)
        reverse(starts, ends, behind, behind + n - middle)
    return n


@compiled
def split_middle(
    data: Array, begin: int, start: int, stop: int, kinds: Array, starts: Array, ends: Array, n: int
) -> int:
    done = at = start
    plain = True
    for i in range(start, stop):
        if data[i] >= 0x80 or not kinds[data[i]] & (LETTER | DIGIT):
            plain = False
            break
    if plain or is_address(data, start, stop):
        at = stop
    while at < stop:
        code, width = code_at(data, at, stop)
        if kinds[code] & (LETTER | DIGIT):
            at += width
            continue
        length = infix_length(data, start, at, stop, code, width, kinds)
        if length:
            if done < at:
                starts[n], ends[n] = done - begin, at - begin
                n += 1
            starts[n], ends[n] = at - begin, at + length - begin
            n += 1
            done = at + length
            at += length
        else:
            at += width
    if done < stop:
        starts[n], ends[n] = done - begin, stop - begin
        n += 1
    return n


@compiled
def reverse(starts: Array, ends: Array, first: int, stop: int) -> None:
    last = stop - 1
    while first < last:
        starts[first], starts[last] = starts[last], starts[first]
        ends[first], ends[last] = ends[last], ends[first]
        first += 1
        last -= 1


@compiled
def prefix_length(data: Array, start: int, stop: int, kinds: Array) -> int:
    code, width = code_at(data, start, stop)
    kind = kinds[code]
    if kind & (LETTER | DIGIT):
        for length in range(2, 4):  # C$ A$ US$
            if start + length <= stop and data[start + length - 1] == 36:
                if length == 2 and (code == 67 or code == 65):
                    return 2
                if length == 3 and code == 85 and data[start + 1] == 83:
                    return 3
        return 0
    if code == 46:
        at = start
        while at < stop and data[at] == 46:
            at += 1
        return at - start if at - start > 1 else 0
    if kind & (MARK | QUOTE | ICON | CURRENCY):
        return width
    if code == 0xA7 or code == 37 or code == 61 or code == 0x2014 or code == 0x2013:
        return width
    if code == 43 and not (start + 1 < stop and is_digit(data[start + 1])):
        return 1
    return 0


@compiled
def suffix_length(data: Array, start: int, stop: int, kinds: Array, exceptions: Any) -> int:
    code, width = code_before(data, start, stop)
    kind = kinds[code]
    before, before_width = 0, 0
    if stop - width > start:
        before, before_width = code_before(data, start, stop - width)
    if code == 46:
        if before_width == 0:
            return 0
        if before == 46:
            at = stop
            while at > start and data[at - 1] == 46:
                at -= 1
            return stop - at
        return 1 if splits_period(data, start, stop - 1 - before_width, before, kinds) else 0
    if code == 0x2026 and before == 0x2026:
        return 2 * width
    if kind & (MARK | QUOTE | ICON) or code == 0x2014 or code == 0x2013:
        return width
    if (code == 115 or code == 83) and (before == 39 or before == 0x2019):
        return 1 + before_width
    if code == 43:
        return 1 if before_width and is_digit(before) else 0
    units, unit_bounds = exceptions[4], exceptions[5]
    for length in range(min(8, stop - start - 1), 0, -1):
        if is_digit(data[stop - length - 1]):
            for unit in range(len(unit_bounds) - 1):
                first = unit_bounds[unit]
                if unit_bounds[unit + 1] - first == length and same(data, stop - length, units, first, length):
                    return length
    return 0


@compiled
def splits_period(data: Array, start: int, at: int, before: int, kinds: Array) -> bool:
    """Whether a period is split off after the character `before`, which begins at `at`."""
    kind = kinds[before]
    if is_digit(before) or kind & (LOWER | MARK | QUOTE):
        return True
    if before == 37 or before == 0xB2 or before == 45 or before == 43 or before == 124:
        return True
    if at == start:
        return False
    earlier, _ = code_before(data, start, at)
    if earlier == 0xB0 and (before == 70 or before == 67 or before == 75):
        return True
    return bool(kind & UPPER) and bool(kinds[earlier] & UPPER)


@compiled
def infix_length(data: Array, start: int, at: int, stop: int, code: int, width: int, kinds: Array) -> int:
    if code == 46 and at + 1 < stop and data[at + 1] == 46:
        last = at
        while last < stop and data[last] == 46:
            last += 1
        return last - at
    if code == 0x2026 or kinds[code] & ICON:
        return width
    if at == start or at + width >= stop:
        return 0
    before, _ = code_before(data, start, at)
    after, _ = code_at(data, at + width, stop)
    known, follows = kinds[before], kinds[after]
    arithmetic = code == 43 or code == 45 or code == 42 or code == 94
    if arithmetic and is_digit(before) and (is_digit(after) or after == 45):
        return 1
    if code == 46:
        return 1 if known & (LOWER | QUOTE) and follows & (UPPER | QUOTE) else 0
    if code == 44:
        return 1 if known & LETTER and follows & LETTER else 0
    if not known & (LETTER | DIGIT):
        return 0
    if code == 58 or code == 60 or code == 62 or code == 61 or code == 47:
        return 1 if follows & LETTER else 0
    most = 3 if code == 45 else 2 if code == 0x2014 else 1 if code == 0x2013 or code == 126 else 0
    last = at
    for _ in range(most):
        same_again, _ = code_at(data, last, stop)
        if same_again != code:
            return 0
        last += width
        if last >= stop:
            return 0
        after, _ = code_at(data, last, stop)
        if kinds[after] & LETTER:
            return last - at
    return 0


@compiled
def exception_at(data: Array, start: int, stop: int, exceptions: Any) -> int:
    """The number of the exception that is exactly these bytes, or -1."""
    slots, texts, bounds = exceptions[0], exceptions[1], exceptions[2]
    length = stop - start
    if length > LONGEST_EXCEPTION or length == 0 or not exceptions[6][data[start]] & (1 << length):
        return -1
    slot = np.int64(fnv(data, start, stop) & np.uint64(len(slots) - 1))
    while slots[slot] >= 0:
        number = slots[slot]
        first = bounds[number]
        if bounds[number + 1] - first == length and same(data, start, texts, first, length):
            return int(number)
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@compiled
def fnv(data: Array, start: int, stop: int) -> Any:
    """A cheap hash of a few bytes."""
    h = np.uint64(0xCBF29CE484222325)
    for at in range(start, stop):
        h = (h ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
    return h ^ (h >> np.uint64(29))


@compiled
def count_sentences(data: Array, begin: int, starts: Array, ends: Array, first: int, last: int, kinds: Array) -> int:
    """Sentences in the words from `first` to before `last`; see `english.count_sentences`."""
    sentences, ended = min(last - first, 1), False
    for word in range(first, last):
        start, stop = begin + starts[word], begin + ends[word]
        code, width = code_at(data, start, stop)
        if kinds[code] & SENTENCE_END and start + width == stop:
            ended = True
        elif ended:
            at = start
            while at < stop:
                code, width = code_at(data, at, stop)
                if not kinds[code] & PUNCTUATION:
                    sentences += 1
                    ended = False
                    break
                at += width
    return sentences
