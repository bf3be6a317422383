"""What of the fast path's work is compared with the reference, and how.

Rows are compared in a sample, short ones whole, long ones at both ends. Characters are compared in texts made for it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.hashes import mix64
from penstock.arrays.ragged import Flags, Ints, Ragged
from penstock.arrays.text import Utf8, flags, utf8
from penstock.tokenizers.characters import VERSION, Contexts
from penstock.tokenizers.reference import FastModel, Reference, literal

__all__ = ["CharacterComparison", "compared_rows", "first_difference", "is_long", "trap_pattern"]


ONE_IN, LONG_ONE_IN, PLACES = 2048, 64, 4
WHOLE_BYTES, STRETCH_BYTES = 1 << 20, 1 << 14
LIBRARIES = ("gigatoken", "tokenizers", "tiktoken", "sentencepiece")

Encode: TypeAlias = Callable[[Utf8], Ragged]


def is_long(data: Utf8) -> Flags:
    """The rows that are too long to be compared whole: of each token the reference makes some hundred bytes."""
    long: Flags = np.diff(data.offsets) > WHOLE_BYTES
    return long


def compared_rows(data: Utf8, one_in: int = ONE_IN) -> Flags:
    """The rows that are compared with the reference: chosen by their length and by bytes from all over them alone."""
    lengths = np.diff(data.offsets).astype(np.int64)
    words = mix64(lengths.astype(np.uint64))
    usable = np.flatnonzero(lengths >= 8)
    if len(usable):
        parts = np.arange(PLACES)
        room = lengths[usable, None] - 8
        places = data.offsets[:-1].astype(np.int64)[usable, None] + room * parts // (PLACES - 1)
        there = np.ndarray(data.data.size - 7, "<u8", data.data, strides=(1,))[places]
        words[usable] = mix64(words[usable] ^ np.bitwise_xor.reduce(mix64(there + parts.astype(np.uint64)), axis=1))
    often = np.where(is_long(data), np.uint64(min(LONG_ONE_IN, one_in)), np.uint64(one_in))
    chosen: Flags = words % often == 0
    return chosen


def first_difference(
    reference: Reference, texts: pa.Array, data: Utf8, rows: Ragged, chosen: Ints, *, parse_special: bool
) -> int | None:
    """The first of the chosen rows whose ids are not those of the reference.

    Of a long row the reference is asked for the two ends. Tokens near a cut may rightly be others, even many of them,
    so what seems to differ there is settled by the whole row.
    """
    long = is_long(data)[chosen]
    short = chosen[~long]
    expected = reference.ids(texts.take(pa.array(short)).to_pylist(), parse_special=parse_special) if len(short) else ()
    wrong = [row for row, right in zip(short.tolist(), expected) if not np.array_equal(_ids(rows, row), right)]
    for row in chosen[long].tolist():
        text = data.data[data.offsets[row] : data.offsets[row + 1]].tobytes()
        if _ends_agree(reference, text, _ids(rows, row), parse_special):
            continue
        if not np.array_equal(_ids(rows, row), reference.ids([text.decode()], parse_special=parse_special)[0]):
            wrong.append(row)
    return min(wrong, default=None)


class CharacterComparison:
    """Which texts of a few characters the two normalise or split differently.

    Seen in a small tokenizer whose ids show every split, which `load` makes fast, or else in the tokenizer itself.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        encode: Encode,
        load: Callable[[FastModel, int], Encode],
        traps: str | None,
        parse_special: bool,
    ) -> None:
        self.contexts = Contexts(normalised=reference.normalises, trapped=traps is not None)
        self._whole, self._encode, self._load = reference, encode, load
        self._traps, self._parse_special = traps, parse_special

    def different(self, texts: list[str]) -> list[str]:
        """Those of the texts for which fast and reference give other ids, unless such rows go to the reference."""
        if not texts:
            return []
        column = pa.array(texts, pa.large_string())
        made = self._fast(utf8(column))
        right = self._reference.ids(texts, parse_special=self._parse_special)
        wrong = [not np.array_equal(_ids(made, row), ids) for row, ids in enumerate(right)]
        if self._traps is not None:
            trapped = flags(pc.match_substring_regex(column, pattern=self._traps))
            wrong = (np.array(wrong) & ~trapped).tolist()
        return [text for text, differs in zip(texts, wrong) if differs]

    def key(self) -> str:
        """A key of everything that decides what is different."""
        parts = [self._reference.fingerprint(), self.contexts, VERSION, self._traps, unicodedata.unidata_version]
        if self._reference is self._whole:
            parts.append(self._parse_special)
        return str(xxhash.xxh3_128_hexdigest(f"{parts} {_versions()}".encode()))

    @functools.cached_property
    def _reference(self) -> Reference:
        return self._whole.splitter()

    @functools.cached_property
    def _fast(self) -> Encode:
        small = self._reference
        if small is self._whole:
            return self._encode
        model = small.fast(parse_special=self._parse_special)
        if isinstance(model, str):
            raise RuntimeError(model)
        return self._load(model, small.vocab_size)


def _versions() -> list[str]:
    found = {dist.name: dist.version for dist in map(_distribution, LIBRARIES) if dist is not None}
    return [f"{name} {version}" for name, version in found.items()]


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ends_agree(reference: Reference, text: bytes, ids: Ints, parse_special: bool) -> bool:
    ends = [part.decode("utf-8", "ignore") for part in (text[:STRETCH_BYTES], text[-STRETCH_BYTES:])]
    head, tail = reference.ids(ends, parse_special=parse_special)
    sure_head, sure_tail = (len(part) * 3 // 4 for part in (head, tail))
    return np.array_equal(ids[:sure_head], head[:sure_head]) and np.array_equal(
        ids[max(len(ids) - sure_tail, 0) :], tail[len(tail) - sure_tail :]
    )


def _ids(rows: Ragged, row: int) -> Ints:
    return rows.values[rows.offsets[row] : rows.offsets[row + 1]]


# Whitespace that is no space to SentencePiece.
SPACES = r"\t\n\v\f\r\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# What may stand in one user-perceived character with what is before or behind it: marks, formatting characters and what
# is not assigned yet; Thai and Lao AM, the sound marks of narrow Kana, parts of Hangul syllables, flags, skin tones,
# and letters of Brahmic scripts that are written before the next.
CLUSTERS = (
    r"[^\p{L}\p{N}\p{P}\p{S}\p{Z}\p{Cc}\p{Co}]|[\x{e33}\x{eb3}\x{ff9e}\x{ff9f}"
    r"\x{1100}-\x{11ff}\x{a960}-\x{a97f}\x{d7b0}-\x{d7ff}\x{1f1e6}-\x{1f1ff}\x{1f3fb}-\x{1f3ff}"
    r"\x{d4e}\x{111c2}\x{111c3}\x{113d1}\x{1193f}\x{11941}\x{11a3a}\x{11a84}-\x{11a89}\x{11d46}\x{11f02}"
    r"\x{16d63}-\x{16d6a}\x{3131}-\x{318e}\x{ffa0}-\x{ffdc}]"
)
CONTROLS = r"\x{1}-\x{8}\x{b}\x{c}\x{e}-\x{1f}\x{7f}-\x{9f}"
CODE_POINTS = 0x32000
"""Behind them are no characters that normalise to others, except ideographs."""


def trap_pattern(symbols: Sequence[str], *, normalised: bool, folded: bool, squeezed: bool) -> str:
    """The pattern (RE2) for a model with these control tokens and user-defined symbols.

    gigatoken reads all of them from text as it is given, SentencePiece only the user-defined ones, and these from text
    as it is normalised too, with the space that it puts in front. Where a model normalises, SentencePiece applies the
    longest rule, and gigatoken goes by clusters. And it strips whitespace that SentencePiece does not.
    """
    patterns = [literal("\u0085"), literal("▁")]
    for symbol in symbols:
        spaced = literal(symbol).replace(literal("▁"), rf"[ \x{{2581}}{SPACES}]")
        patterns.append(f"(?i:{spaced})" if folded else spaced)
        if symbol.startswith("▁"):
            patterns.append(rf"\A(?:{patterns[-1].replace(spaced, spaced.partition(']')[2])})")
    if normalised:
        patterns.append(CLUSTERS)
        whole = "".join(symbols).replace("▁", " ")
        characters = set(whole.casefold() if folded else whole)
        patterns += _class(point for point in range(0x80, CODE_POINTS) if characters & _normal(chr(point), folded))
        if not squeezed:
            patterns.append(r"\r\n")
        if not squeezed or any("▁" in symbol for symbol in symbols):
            patterns.append(f"[{CONTROLS}]")
    if squeezed:
        patterns += [rf"\A *[{SPACES}]", rf"[{SPACES}] *\z"]
    return "|".join(patterns)


def _normal(character: str, folded: bool) -> set[str]:
    """The characters that one is changed to; none if it stays."""
    normal = unicodedata.normalize("NFKC", character)
    normal = normal.casefold() if folded else normal
    return set(normal) if normal != character else set()


def _class(points: Iterable[int]) -> list[str]:
    """A class of these characters; nothing if there are none."""
    runs = itertools.groupby(enumerate(points), key=lambda pair: pair[1] - pair[0])
    ranges = [[point for _, point in run] for _, run in runs]
    return ["[" + "".join(rf"\x{{{run[0]:x}}}-\x{{{run[-1]:x}}}" for run in ranges) + "]"] if ranges else []
