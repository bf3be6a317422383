"""English words and sentences by rule, as kernels on UTF-8 bytes.

Punctuation is split off, contractions are cut in two, abbreviations and addresses stay whole. The rules are those of
the tokenizer most filter pipelines use for English (spaCy's, without a model): a stretch without whitespace loses
punctuation at its front, then at its end, and the middle is cut at hyphens, slashes and the like between letters,
unless it is an exception or an address. On web text one stretch in twenty thousand comes out differently, in source
code one in a thousand: punctuation that looks like an emoticon is cut in two.
"""

# ruff: noqa: RUF001, SIM905
from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.arrays.text import checked_text, utf8
from penstock.corpus.kernels import PLAIN, kernel
from penstock.corpus.quality.characters import (
    CURRENCY,
    CURRENCY_SIGNS,
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
    Array,
    code_at,
    code_before,
    is_digit,
    kinds,
    same,
    skip_spaces,
)

WordRule: TypeAlias = Literal["english", "whitespace"]

UNITS = (
    "km km² km³ m m² m³ dm dm² dm³ cm cm² cm³ mm mm² mm³ ha µm nm yd in ft kg g mg µg t lb oz m/s km/h kmh mph hPa Pa "
    "mbar mb MB kb KB gb GB tb TB T G M K %"
).split()
"""Split off after a digit."""

_ABBREVIATIONS = """
Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. e.g. Feb. Fla.
Ga. Gen. Gov. I.E. I.e. i.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs.
Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. Ore. Pa.
Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. p.m. v.s. vs. ä. ö. ü.
"""
_UNTITLED = r"""
and/or w/o C++ 'em em 'll ll 're 's 'S ‘s ‘S 'd 'nuff nuff 'bout '' ' — <space> \t \n \")
"""
_EMOTICONS = r"""
:) :)) :))) :( :(( :((( :() :* :/ :0 :1 :3 :> :D :O :P :X :] :o :o) :p :x :| :} :-) :-)) :-))) :-( :-(( :-((( :-* :-/
:-0 :-3 :-> :-D :-O :-P :-X :-] :-o :-p :-x :-| :-} :'( :') :'-( :'-) ;) ;-) ;-D ;D ;_; =( =) =/ =3 =D =[ =] =| (-8 (-:
(-; (: (; (= (o: )-: ): [-: [: [= ]= 8) 8-) 8-D 8D <3 <33 <333 </3 <.< >.< >.> >:( >:o ><(((*> @_@ ^_^ ^__^ ^___^ -_-
-__- ._. (*_*) (-_-) (._.) (>_<) (^_^) (¬_¬) (ಠ_ಠ) ಠ_ಠ ಠ︵ಠ 0.0 0.o 0_0 0_o o.0 o.O o.o o_0 o_O o_o O.O O.o O_O
O_o V.V V_V v.v v_v XD XDD xD xDD ¯\(ツ)/¯
"""
_CLIPPED = "doin goin havin lovin nothin nuthin somethin ol"
_CAPITALISED_TOO = "'cause 'cos 'coz 'cuz ma'am o'clock"
_PRONOUNS = {
    "i": "m m-a ll ll-ve d d-ve ve",
    "you": "ll ll-ve d d-ve ve re",
    "he": "ll ll-ve d d-ve s",
    "she": "ll ll-ve d d-ve s",
    "it": "ll ll-ve d d-ve s",
    "we": "ll ll-ve d d-ve ve re",
    "they": "ll ll-ve d d-ve ve re",
}
_WH = "s ll ll-ve re ve d d-ve"
_ENDINGS = {
    **_PRONOUNS,
    **dict.fromkeys("who what when where why how there".split(), _WH),
    **dict.fromkeys("that this".split(), "s ll ll-ve d d-ve"),
    **dict.fromkeys("these those".split(), "ll ll-ve re ve d d-ve"),
    **dict.fromkeys("could might must should would not".split(), "ve"),
}
_NEGATED = "ca could do does did had may might must need ought sha should wo would"
_NEGATED_ONLY = "ai are is was were have has dare"
_WHOLE = "ill its hell shell shed were well whore".split()
_OTHERS = {"cannot": 3, "gonna": 3, "gotta": 3, "let's": 3, "c'mon": 3}


@functools.cache
def exceptions() -> dict[str, tuple[int, ...]]:
    """Stretches that the rules below would split wrongly, and the lengths of the words they are."""
    found: dict[str, tuple[int, ...]] = {f"{letter}.": (2,) for letter in "abcdefghijklmnopqrstuvwxyz"}
    for clipped in _CLIPPED.split():
        found |= {word: (len(word),) for word in (clipped, clipped + "'")}
    found |= {word: (len(word),) for word in _CAPITALISED_TOO.split()}
    found |= {word: (at, len(word) - at) for word, at in _OTHERS.items()}
    found |= {f"{hour}{half}": (len(str(hour)), len(half)) for hour in range(1, 13) for half in ("am", "pm")}
    found |= {f"{hour}{half}": (len(str(hour)), len(half)) for hour in range(1, 13) for half in ("a.m.", "p.m.")}
    for word, endings in _ENDINGS.items():
        for ending in endings.split():
            parts = ending.split("-")
            with_mark = ["'" + part if part != "a" else part for part in parts]
            found[word + "".join(with_mark)] = (len(word), *map(len, with_mark))
            found[word + "".join(parts)] = (len(word), *map(len, parts))
    for verb in (_NEGATED + " " + _NEGATED_ONLY).split():
        for negation, tail in (("n't", "'ve"), ("nt", "ve")):
            found[verb + negation] = (len(verb), len(negation))
            if verb in _NEGATED.split():
                found[verb + negation + tail] = (len(verb), len(negation), len(tail))
    capitalised = {_capitalised(word): cut for word, cut in found.items() if word[-1] != "."}
    found |= capitalised
    found |= {word: (len(word),) for word in (_ABBREVIATIONS + _UNTITLED + _EMOTICONS).split()}
    found |= {f"°{scale}.": (1, 1, 1) for scale in "CFKcfk"}
    found["y'all"], found["yall"] = (2, 3), (1, 3)
    found |= {word.replace("'", "’"): cut for word, cut in found.items() if "'" in word}
    return {word: cut for word, cut in found.items() if word.lower() not in _WHOLE}


def _capitalised(word: str) -> str:
    at = 1 if word[0] == "'" else 0
    return word[:at] + word[at : at + 1].upper() + word[at + 1 :]


LONGEST_EXCEPTION = 20
"""In bytes: longer stretches need not be looked up."""
SLOTS = 4096


def as_words(words: str) -> WordRule:
    """One of the two definitions of a word, checked."""
    if words == "english" or words == "whitespace":
        return words  # type: ignore[return-value]
    raise ValueError(f"words must be 'english' or 'whitespace', got {words!r}")


def as_bytes(text: pa.Array) -> tuple[Array, Array]:
    """UTF-8 bytes and row bounds of a column, always of the same types, so that a kernel is compiled once.

    Other bytes are refused: kernels check no bounds, and the room they are given is enough for characters.
    """
    data, bounds = utf8(checked_text(text))
    data = data[:]
    data.flags.writeable = False
    return data, bounds.astype(np.int64)


def packed(texts: Iterable[str]) -> tuple[Array, Array]:
    """Texts one after the other, and where each begins."""
    encoded = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), bounds


def word_spans(text: pa.Array, words: WordRule) -> tuple[Array, Array, Array]:
    """Start and end of every word, in bytes from the start of its row, and the number of each row's first word."""
    return words_between(*as_bytes(text), words == "english")


def words_between(data: Array, bounds: Array, english: bool) -> tuple[Array, Array, Array]:
    """`word_spans` of rows that are given as bytes."""
    rows, row = len(bounds) - 1, 0
    starts, ends = np.empty(len(data) // 4 + 64, np.int32), np.empty(len(data) // 4 + 64, np.int32)
    firsts = np.zeros(rows + 1, np.int64)
    while True:
        row = split_rows(data, bounds, row, english, kinds(), exception_table(), starts, ends, firsts)
        if row == rows:
            return starts[: firsts[-1]], ends[: firsts[-1]], firsts
        starts, ends = np.concatenate([starts, starts]), np.concatenate([ends, ends])  # twice the room


@functools.cache
def exception_table() -> Array:
    """The English rules for the kernels, in one array, since every array in a call has its cost.

    For every first byte a bit for each length there is, so that most words need no look at the rest; SLOTS places of a
    hash table of exceptions; units, each after its length, and a 0; exceptions, each after its length and the lengths
    of at most four words.
    """
    entries: list[int] = []
    for unit in [*UNITS, *CURRENCY_SIGNS, "US$", "C$", "A$"]:
        entries += [len(unit.encode()), *unit.encode()]
    entries.append(0)
    table = np.zeros(256 + SLOTS, np.int32)
    for word, pieces in exceptions().items():
        encoded = word.encode()
        assert len(encoded) <= LONGEST_EXCEPTION, word
        table[encoded[0]] |= 1 << len(encoded)
        slot = _fnv(encoded) % SLOTS
        while table[256 + slot]:
            slot = (slot + 1) % SLOTS
        table[256 + slot] = len(table) + len(entries)
        ends = [*itertools.accumulate(pieces, initial=0)]
        cuts = [len(word[start:end].encode()) for start, end in itertools.pairwise(ends)]
        entries += [len(encoded), *(cuts + 3 * [0])[:4], *encoded]
    return np.concatenate([table, np.array(entries, np.int32)])


def _fnv(data: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h ^ h >> 29


@kernel()
def is_address(data: Array, start: int, stop: int) -> bool:
    """A web or mail address."""
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


@kernel()
def is_host_byte(byte: int) -> bool:
    letter = (byte | 32) >= 97 and (byte | 32) <= 122
    return letter or is_digit(byte) or byte == 46 or byte == 45 or byte == 95 or byte >= 0x80


@kernel()
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


@kernel()
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


@kernel()
def is_joint(byte: int) -> bool:
    return byte == 45 or byte == 95


@kernel()
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


@kernel(plain=8 * PLAIN)  # each filter splits the rows anew
def split_rows(
    data: Array,
    bounds: Array,
    row: int,
    english: bool,
    kinds: Array,
    exceptions: Array,
    starts: Array,
    ends: Array,
    firsts: Array,
) -> int:
    """The words from `row` on: starts, ends, and the number of each row's first. Returns the row that has no room."""
    while row < len(bounds) - 1:
        n = split_row(data, bounds[row], bounds[row + 1], english, kinds, exceptions, starts, ends, firsts[row])
        if n < 0:
            break
        row += 1
        firsts[row] = n
    return row


@kernel()
def split_row(
    data: Array,
    begin: int,
    stop: int,
    english: bool,
    kinds: Array,
    exceptions: Array,
    starts: Array,
    ends: Array,
    n: int,
) -> int:
    """Append the words of one row; returns their number, or -1 if there is no room."""
    at = begin
    while True:
        at = skip_spaces(data, at, stop, kinds)
        if at == stop:
            return n
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
            return -1
        # Most stretches are nothing but letters: the rules leave them whole, and only exceptions split them.
        if english and (others or digits or exception_at(data, first, at, exceptions) >= 0):
            n = split_stretch(data, begin, first, at, kinds, exceptions, starts, ends, n)
        else:
            starts[n], ends[n] = first - begin, at - begin
            n += 1


@kernel()
def split_stretch(
    data: Array, begin: int, start: int, stop: int, kinds: Array, exceptions: Array, starts: Array, ends: Array, n: int
) -> int:
    """The English words of a stretch without whitespace."""
    special = exception_at(data, start, stop, exceptions)
    while start < stop and special < 0:
        length = prefix_length(data, start, stop, kinds)
        if length == 0:
            break
        starts[n], ends[n] = start - begin, start + length - begin
        n += 1
        start += length
        special = exception_at(data, start, stop, exceptions)
    suffixes = n
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
        for i in range(special + 1, special + 5):
            length = exceptions[i]
            if length:
                starts[n], ends[n] = start - begin, start + length - begin
                n += 1
                start += length
    elif start < stop:
        n = split_middle(data, begin, start, stop, kinds, starts, ends, n)
    if middle > suffixes:
        # What was split off the end stands before the middle, last first: turn all of it round, then the middle back.
        reverse(starts, ends, suffixes, n)
        reverse(starts, ends, suffixes, suffixes + n - middle)
    return n


@kernel()
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


@kernel()
def reverse(starts: Array, ends: Array, first: int, stop: int) -> None:
    last = stop - 1
    while first < last:
        starts[first], starts[last] = starts[last], starts[first]
        ends[first], ends[last] = ends[last], ends[first]
        first += 1
        last -= 1


@kernel()
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


@kernel()
def suffix_length(data: Array, start: int, stop: int, kinds: Array, exceptions: Array) -> int:
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
    for length in range(min(8, stop - start - 1), 0, -1):
        if is_digit(data[stop - length - 1]):
            unit = 256 + SLOTS
            while exceptions[unit]:
                if exceptions[unit] == length and same(data, stop - length, exceptions, unit + 1, length):
                    return length
                unit += exceptions[unit] + 1
    return 0


@kernel()
def splits_period(data: Array, start: int, at: int, before: int, kinds: Array) -> bool:
    """True if a period is split off after the character `before`, which begins at `at`."""
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


@kernel()
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


@kernel()
def exception_at(data: Array, start: int, stop: int, exceptions: Array) -> int:
    """The place in `exceptions` of the one that is exactly these bytes, or -1."""
    length = stop - start
    if length > LONGEST_EXCEPTION or length == 0 or not exceptions[data[start]] & (1 << length):
        return -1
    slot = np.int64(fnv(data, start, stop) & np.uint64(SLOTS - 1))
    while exceptions[256 + slot]:
        found = int(exceptions[256 + slot])
        if exceptions[found] == length and same(data, start, exceptions, found + 5, length):
            return found
        slot = (slot + 1) & (SLOTS - 1)
    return -1


@kernel()
def fnv(data: Array, start: int, stop: int) -> Any:
    """A cheap hash of a few bytes."""
    h = np.uint64(0xCBF29CE484222325)
    for at in range(start, stop):
        h = (h ^ np.uint64(data[at])) * np.uint64(0x100000001B3)
    return h ^ (h >> np.uint64(29))


@kernel()
def count_sentences(data: Array, begin: int, starts: Array, ends: Array, first: int, last: int, kinds: Array) -> int:
    """Sentences in the words from `first` to before `last`."""
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
