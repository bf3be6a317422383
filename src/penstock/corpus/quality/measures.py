"""A column of text -> a reason code per row, by numba where it is installed, else by plain Python."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import Utf8, flags, from_utf8, utf8
from penstock.corpus.quality import plain
from penstock.corpus.quality.characters import CURRENCY_SIGNS, kinds
from penstock.corpus.quality.english import LONGEST_EXCEPTION, UNITS, exceptions

__all__ = [
    "Codes",
    "LineCounts",
    "WordRule",
    "c4_lines",
    "can_compile",
    "fineweb_quality",
    "gopher_quality",
    "gopher_repetition",
    "word_spans",
]

log = logging.getLogger(__name__)

Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]
WordRule: TypeAlias = Literal["english", "whitespace"]


@functools.cache
def can_compile() -> bool:
    """Whether numba is there. If it is not, that is said once."""
    if find_spec("numba") is not None:
        return True
    log.warning(
        "numba is not installed, so text filters run in plain Python, some fifty times slower with the same result; "
        "install it with: pip install 'penstock[fast]'"
    )
    return False


def word_spans(text: pa.Array, words: WordRule) -> tuple[Numbers, Numbers, Numbers]:
    """Where words begin and end, in bytes from the beginning of their row, and the number of each row's first word."""
    from penstock.corpus.quality import kernels as compiled

    data, bounds = _bytes(text)
    return compiled.split_rows(data, bounds, words == "english", kinds(), _exception_table())


def gopher_quality(
    text: pa.Array, words: WordRule, stop_words: Sequence[str], limits: Sequence[float], *, fast: bool
) -> Codes:
    if not fast:
        chosen = frozenset(stop_words)
        rows = (plain.gopher_quality(row, plain.split(row, words), chosen, limits) for row in _strings(text))
        return np.fromiter(rows, np.uint8, len(text))
    from penstock.corpus.quality import kernels as compiled

    stops = _packed(dict.fromkeys(stop_words))
    return compiled.gopher_quality(*_bytes(text), *word_spans(text, words), kinds(), *stops, _limits(limits))


def gopher_repetition(
    text: pa.Array,
    words: WordRule,
    limits: Sequence[float],
    top: Sequence[tuple[int, float]],
    repeated: Sequence[tuple[int, float]],
    *,
    fast: bool,
) -> Codes:
    if not fast:
        rows = (plain.gopher_repetition(row, plain.split(row, words), limits, top, repeated) for row in _strings(text))
        return np.fromiter(rows, np.uint8, len(text))
    from penstock.corpus.quality import kernels as compiled

    grams = [
        made
        for pairs in (top, repeated)
        for made in (np.array([n for n, _ in pairs], np.int64), _limits([limit for _, limit in pairs]))
    ]
    return compiled.gopher_repetition(*_bytes(text), *word_spans(text, words), kinds(), _limits(limits), *grams)


def fineweb_quality(
    text: pa.Array, words: WordRule, limits: Sequence[float], accept_none: bool, *, fast: bool
) -> Codes:
    if not fast:
        rows = (plain.fineweb_quality(row, plain.split(row, words), limits, accept_none) for row in _strings(text))
        return np.fromiter(rows, np.uint8, len(text))
    from penstock.corpus.quality import kernels as compiled

    firsts = word_spans(text, words)[2]
    return compiled.fineweb_quality(*_bytes(text), firsts, kinds(), _limits(limits), accept_none)


def c4_lines(
    text: pa.Array, limits: Sequence[float], options: Sequence[bool], *, fast: bool
) -> tuple[pa.Array, Codes, list[int]]:
    """What is left of every row, the reason codes, and the number of lines left out by reason."""
    if not fast:
        made = [plain.c4_lines(row, limits, options) for row in _strings(text)]
        left = pa.array([row for row, _, _ in made], text.type, mask=flags(text.is_null()))
        codes = np.fromiter((code for _, code, _ in made), np.uint8, len(made))
        return left, codes, [sum(lines) for lines in zip(*(lines for _, _, lines in made))] or [0] * 5
    from penstock.corpus.quality import kernels as compiled

    data, bounds, lines, row_lines, codes, left_out = compiled.c4_lines(
        *_bytes(text), kinds(), *_packed(plain.LORE), _limits(limits), np.array(options, np.bool_)
    )
    data.flags.writeable = False
    words = compiled.split_rows(data, lines, True, kinds(), _exception_table())
    sentences = compiled.row_sentences(data, lines, row_lines, *words, kinds())
    codes[(codes == 0) & (sentences < limits[0])] = 3
    left = from_utf8(Utf8(data, bounds), text)
    return pc.utf8_trim_whitespace(left), codes, left_out.tolist()


class LineCounts:
    """How many lines were left out for each reason, counted from several threads. A pickled copy starts from zero."""

    def __init__(self, reasons: int) -> None:
        self._lock = threading.Lock()
        self._numbers = [0] * reasons

    def add(self, numbers: Sequence[int]) -> None:
        with self._lock:
            self._numbers = [total + n for total, n in zip(self._numbers, numbers)]

    def totals(self) -> list[int]:
        return list(self._numbers)

    def clear(self) -> None:
        self._numbers = [0] * len(self._numbers)

    def __reduce__(self) -> tuple[type[LineCounts], tuple[int]]:
        return LineCounts, (len(self._numbers),)


def _strings(text: pa.Array) -> list[str]:
    return ["" if row is None else row for row in text.to_pylist()]


def _bytes(text: pa.Array) -> tuple[Numbers, Numbers]:
    """Bytes and bounds, always of the same types, so that a kernel is compiled once."""
    data, bounds = utf8(text)
    data = data[:]
    data.flags.writeable = False
    return data, bounds.astype(np.int64)


def _limits(limits: Sequence[float]) -> Numbers:
    return np.array(limits, np.float64)


def _packed(texts: Iterable[str]) -> tuple[Numbers, Numbers]:
    """Texts one after the other, and where each begins."""
    encoded = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return np.frombuffer(b"".join(encoded), np.uint8), bounds


@functools.cache
def _exception_table() -> tuple[Numbers, ...]:
    """What the English rules need in the kernels: a hash table of exceptions, their words, and units."""
    cuts = exceptions()
    texts, bounds = _packed(cuts)
    slots = np.full(4096, -1, np.int32)
    lengths = np.zeros((len(cuts), 4), np.int64)
    by_first_byte = np.zeros(256, np.int64)  # a bit for every length there is: most words need no look at the table
    for number, (word, pieces) in enumerate(cuts.items()):
        encoded = word.encode()
        assert len(encoded) <= LONGEST_EXCEPTION, word
        by_first_byte[encoded[0]] |= 1 << len(encoded)
        slot = _fnv(encoded) % len(slots)
        while slots[slot] >= 0:
            slot = (slot + 1) % len(slots)
        slots[slot] = number
        done = 0
        for i, length in enumerate(pieces):
            lengths[number, i] = len(word[done : done + length].encode())
            done += length
    units = _packed([*UNITS, *CURRENCY_SIGNS, "US$", "C$", "A$"])
    return slots, texts, bounds, lengths, *units, by_first_byte


def _fnv(data: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h ^ h >> 29
