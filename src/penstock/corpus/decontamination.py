"""Find training text that holds pieces of evaluation sets: n-grams of words in common."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.hashes import mix64
from penstock.arrays.text import plain, utf8
from penstock.corpus.quality.characters import COMBINING, LETTER, NUMERAL, kinds
from penstock.corpus.quality.content import code_points
from penstock.errors import SchemaError
from penstock.transforms.columns import append, as_names, brief, column, keep_rows
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import as_text

__all__ = ["Decontaminate"]

log = logging.getLogger(__name__)

Texts: TypeAlias = Iterable[str] | pa.Array | pa.ChunkedArray | pa.RecordBatch | pa.Table
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
# Hashing takes some 40 bytes for every character, so long columns are done in stretches of rows.
_STRETCH = 1 << 20


class Decontaminate(CountingTransform):
    """Leave out (or mark) rows that share n-grams of words with evaluation sets.

        Decontaminate({"gsm8k": questions, "arc": arc_table}, n=13)

    Words are runs of letters and digits in lower case; punctuation, spacing and case make no difference. A row is
    contaminated if at least `min_grams` of its n-grams, and a share of `min_share` of them, occur in one evaluation
    set; it is counted as `"contaminated: <set>"`, under the set with most in common (the first of several). With
    `action="mark"` rows stay, and the column `into` names the set, or is null.

    Sets are lists of strings, Arrow arrays, or batches and tables, of which every text column is taken. Evaluation
    texts shorter than n words have no n-gram, and cannot be found; their number is in `short_texts`, and in the log.
    Holds 18 to 26 bytes for every n-gram of every evaluation set, for training data of any size.
    """

    def __init__(
        self,
        sets: Mapping[str, Texts] | Texts,
        column: str = "text",
        *,
        n: int = 13,
        min_grams: int = 1,
        min_share: float = 0.0,
        action: Literal["drop", "mark"] = "drop",
        into: str = "contaminated",
    ) -> None:
        super().__init__()
        if n < 1 or min_grams < 1:
            raise ValueError(f"n and min_grams must be at least 1, got n={n} and min_grams={min_grams}")
        if not 0 <= min_share <= 1:
            raise ValueError(f"min_share must be from 0 to 1, got {min_share!r}")
        if action not in ("drop", "mark"):
            raise ValueError(f"action must be 'drop' or 'mark', got {action!r}")
        (self.column,) = as_names([column])
        self.n, self.min_grams, self.min_share, self.action, self.into = n, min_grams, min_share, action, into
        named = sets if isinstance(sets, Mapping) else {"evaluation": sets}
        self.sets = tuple(named)
        self.short_texts: dict[str, int] = {}
        found = [self._read(name, texts) for name, texts in named.items()]
        if not found or not sum(map(len, found)):
            raise ValueError(f"the evaluation sets hold no text of {n} words or more; pass longer texts or a smaller n")
        # An n-gram occurs once for every set that has it.
        every = np.concatenate(found)
        owner = np.repeat(np.arange(len(found), dtype=np.uint16), [len(hashes) for hashes in found])
        order = np.argsort(every, kind="stable")
        self._hashes, self._owners = every[order], owner[order]
        self._maybe = _flags(self._hashes)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        text = as_text(column(batch, self.column), self.column)
        owners = self._contaminated(text)
        bad = owners >= 0
        counts = np.bincount(owners[bad], minlength=len(self.sets)).tolist()
        reasons = {f"contaminated: {name}": n for name, n in zip(self.sets, counts)}
        if self.action == "mark":
            self.count_kept(reasons)
            names = pa.array(self.sets, pa.string()).take(pa.array(owners, mask=~bad))
            return append(batch, self.into, names)
        self.count(reasons)
        for number, (reason, rows) in enumerate(reasons.items()):
            if rows:
                self.dropped_examples.add(reason, batch, owners == number, self.column)
        return keep_rows(batch, ~bad) if bad.any() else batch

    def __getstate__(self) -> dict[str, Any]:
        """All but the flags, which are most of the bytes and are made again in milliseconds."""
        return {name: value for name, value in self.__dict__.items() if name != "_maybe"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._maybe = _flags(self._hashes)

    def memory_usage(self) -> int:
        return int(self._hashes.nbytes + self._owners.nbytes + self._maybe.nbytes)

    def describe(self) -> str:
        """Name, version, every option and a hash of the evaluation sets: equal strings keep equal rows."""
        sets = xxhash.xxh3_128_hexdigest(self._hashes.tobytes() + self._owners.tobytes())
        return (
            f"decontaminate/2(column={self.column!r}, n={self.n}, min_grams={self.min_grams}, "
            f"min_share={self.min_share!r}, action={self.action!r}, sets={list(self.sets)}, grams={sets})"
        )

    @property
    def fingerprint(self) -> str:
        """A short hash of `describe()`, for content keys."""
        return xxhash.xxh3_128_hexdigest(self.describe().encode())

    def __repr__(self) -> str:
        return f"Decontaminate({brief(list(self.sets))}, n={self.n}, {len(self._hashes)} n-grams)"

    def _read(self, name: str, texts: Texts) -> Hashes:
        hashes, short = [np.zeros(0, np.uint64)], 0
        for array in _arrays(texts, name):
            for grams, _, _, words in _grams(array, self.n):
                hashes.append(np.unique(grams))
                short += int(np.count_nonzero(words < self.n))
        if short:
            self.short_texts[name] = short
            log.warning("%d texts of %r have fewer than %d words, so they cannot be found", short, name, self.n)
        return np.unique(np.concatenate(hashes))

    def _contaminated(self, text: pa.Array) -> Integers:
        """For every row the number of the set it has most in common with, or -1."""
        owners = np.full(len(text), -1, np.int64)
        for grams, rows, first, words in _grams(text, self.n):
            candidates = np.flatnonzero(self._maybe[grams & np.uint64(len(self._maybe) - 1)])
            if not candidates.size:
                continue
            start = np.searchsorted(self._hashes, grams[candidates], side="left")
            sharing = np.searchsorted(self._hashes, grams[candidates], side="right") - start
            touched, row = np.unique(np.repeat(rows[candidates], sharing), return_inverse=True)
            if not touched.size:
                continue
            places = np.arange(len(row)) + np.repeat(start - np.cumsum(sharing) + sharing, sharing)
            hits = np.zeros((len(touched), len(self.sets)), np.int64)
            np.add.at(hits, (row, self._owners[places]), 1)
            number = hits.max(axis=1)
            bad = (number >= self.min_grams) & (number >= self.min_share * (words[touched] - self.n + 1))
            owners[first + touched[bad]] = hits.argmax(axis=1)[bad]
        return owners


def _flags(hashes: Hashes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Flags by the lower bits of hashes: most n-grams of training text are told apart by one look."""
    flags = np.zeros(1 << max(10, int(8 * len(hashes)).bit_length()), np.bool_)
    flags[hashes & np.uint64(len(flags) - 1)] = True
    return flags


def _arrays(texts: Texts, name: str) -> Iterator[pa.Array]:
    """The texts of an evaluation set, as text columns."""
    if isinstance(texts, str):
        raise ValueError(f"the evaluation set {name!r} is one string, expected a list of strings or Arrow data")
    if isinstance(texts, pa.RecordBatch | pa.Table):
        columns = [texts.column(i) for i in range(texts.num_columns)]
        chosen = [one for one in columns if _is_text(one.type)]
        if not chosen:
            raise SchemaError(f"the evaluation set {name!r} has no text column, only {texts.schema.names}")
    elif isinstance(texts, pa.Array | pa.ChunkedArray):
        chosen = [texts]
    else:
        chosen = [pa.array(list(texts), pa.large_string())]
    for one in chosen:
        for chunk in one.chunks if isinstance(one, pa.ChunkedArray) else [one]:
            yield as_text(chunk, name)


def _is_text(dtype: pa.DataType) -> bool:
    return plain(pa.array([], dtype)).type in (pa.string(), pa.large_string())


def _grams(text: pa.Array, n: int) -> Iterator[tuple[Hashes, Integers, int, Integers]]:
    """For every stretch of rows: hashes of all n-grams, the row of each within the stretch, the first row, words."""
    if not len(text):
        return
    bounds = utf8(text).offsets
    first = 0
    while first < len(text):
        last = max(int(np.searchsorted(bounds, bounds[first] + _STRETCH, side="right")) - 1, first + 1)
        part = text.slice(first, last - first)
        hashes, rows = _word_hashes(pc.utf8_lower(part).fill_null(""))
        words = np.bincount(rows, minlength=len(part))
        grams = hashes[: max(len(hashes) - n + 1, 0)]
        for i in range(1, n):
            grams = mix64(grams) + hashes[i : i + len(grams)]
        whole = rows[: len(grams)] == rows[n - 1 :]
        yield mix64(grams[whole]), rows[: len(grams)][whole], first, words
        first = last


def _word_hashes(text: pa.Array) -> tuple[Hashes, Integers]:
    """A hash of every word, and its row.

    The sum of code point times BASE ** place over a word, scaled by BASE ** -start, does not depend on where it stands.
    """
    points, bounds = code_points(utf8(text))
    inside = np.zeros(len(points) + 2, np.bool_)
    inside[1:-1] = (kinds()[points] & np.uint16(LETTER | NUMERAL | COMBINING)) != 0
    start = inside[1:] & ~inside[:-1]
    stop = inside[:-1] & ~inside[1:]
    cuts = bounds[1:-1]
    across = cuts[inside[cuts] & inside[cuts + 1]]  # a word at the end of a row ends there, even if another follows
    start[across] = stop[across] = True
    starts, stops = np.flatnonzero(start), np.flatnonzero(stop)
    powers = _powers(BASE, len(points))
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum(points.astype(np.uint64) * powers, out=sums[1:])
    hashes = (sums[stops] - sums[starts]) * _powers(INVERSE, len(points))[starts] + (stops - starts).astype(np.uint64)
    return mix64(hashes), np.searchsorted(bounds, starts, side="right") - 1


def _powers(base: np.uint64, n: int) -> Hashes:
    powers = np.full(n, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers) if n else powers
