"""What of the fast path's work is compared with the reference, and how.

Rows are compared in a sample, short ones whole, long ones at both ends. Characters are compared in texts made for it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import unicodedata
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.transforms._hashing import mix64
from penstock.transforms._tokenizers.contexts import VERSION, Contexts
from penstock.transforms._tokenizers.ragged import Flags, Ints, Ragged
from penstock.transforms._tokenizers.reference import FastModel, Reference
from penstock.transforms.columns import flags
from penstock.transforms.text import Utf8, utf8

__all__ = ["CharacterComparison", "compared_rows", "first_difference", "is_long"]

ONE_IN, LONG_ONE_IN, PLACES = 2048, 64, 4
WHOLE_BYTES, STRETCH_BYTES = 1 << 20, 1 << 14
LIBRARIES = ("gigatoken", "tokenizers", "tiktoken", "sentencepiece")

Encode: TypeAlias = Callable[[Utf8], Ragged]


def is_long(data: Utf8) -> Flags:
    """The rows that are too long to be compared whole: of each token the reference makes some hundred bytes."""
    long: Flags = np.diff(data.bounds) > WHOLE_BYTES
    return long


def compared_rows(data: Utf8, one_in: int = ONE_IN) -> Flags:
    """The rows that are compared with the reference: chosen by their length and by bytes from all over them alone."""
    lengths = np.diff(data.bounds).astype(np.int64)
    words = mix64(lengths.astype(np.uint64))
    usable = np.flatnonzero(lengths >= 8)
    if len(usable):
        parts = np.arange(PLACES)
        room = lengths[usable, None] - 8
        places = data.bounds[:-1].astype(np.int64)[usable, None] + room * parts // (PLACES - 1)
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
        text = data.data[data.bounds[row] : data.bounds[row + 1]].tobytes()
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
    return rows.values[rows.bounds[row] : rows.bounds[row + 1]]
