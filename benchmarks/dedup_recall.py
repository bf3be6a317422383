"""Recall of near copies in code, prose and languages without spaces, and the number of wrongly dropped rows.

    python benchmarks/dedup.py --suite recall --rows 50000

Every other document has a copy, a quarter of them each with 0, 1, 2 and 3% of the words replaced. A copy is found if it
or its original is dropped. A dropped row is right if another row shares at least half of its shingles, counted exactly.
The shingles are those of the best peer: five runs of letters and digits, or, in languages without spaces, five
characters. Peers get these shingles hashed, so engines differ only in the definition of a word and in MinHash.
"""

from __future__ import annotations

import importlib.util
import re
from typing import NamedTuple

import numpy as np
from dedup_exact import Dropped
from dedup_texts import KINDS, edited, plain, texts
from table import table

__all__ = ["recall_tables"]

EDITS = [0.0, 0.01, 0.02, 0.03]
NGRAM, BANDS, ROWS = 5, 14, 8
SIMILAR = 0.5

_WORDS = {"letters and digits": r"[^\W_]+", r"\w+": r"\w+", "characters": r"\w"}


class Copies(NamedTuple):
    """Shuffled documents; `original` is the row that a copy was made from, or -1."""

    texts: list[str]
    original: np.ndarray
    edit: np.ndarray


class Grams(NamedTuple):
    """Distinct shingle hashes of each row, and the offset of each row."""

    hashes: np.ndarray
    starts: np.ndarray

    def of(self, row: int) -> np.ndarray:
        return self.hashes[self.starts[row] : self.starts[row + 1]]


def recall_tables(rows: int) -> str:
    """One table per kind of text."""
    parts = []
    for kind in KINDS:
        copies = _with_copies(kind, rows)
        grams = {name: _grams(copies.texts, pattern) for name, pattern in _WORDS.items()}
        judge = grams["characters" if kind == "unspaced" else "letters and digits"]
        found = {"penstock": _penstock(copies.texts)}
        for name in ("letters and digits", "characters" if kind == "unspaced" else r"\w+"):
            found[f"NumPy, {name}"] = _reference(grams[name])
            if importlib.util.find_spec("rensa") is not None:
                found[f"rensa, {name}"] = _rensa(grams[name])
        lines = []
        for name, dropped in found.items():
            share, right = _recall(copies, dropped), _best_jaccard(judge, dropped) >= SIMILAR
            lines.append([name, *(f"{one:.3f}" for one in share), f"{right.mean():.4f}", f"{len(dropped):,}"])
        heads = ["engine, words", *(f"{share:.0%}" for share in EDITS), "precision", "dropped"]
        parts.append(f"### {kind}, {len(copies.texts):,} documents\n\n{table(heads, lines)}")
    return "\n\n".join(parts)


def _with_copies(kind: str, rows: int) -> Copies:
    originals = texts(kind, rows - rows // 3)
    rng = np.random.default_rng(7)
    chosen = rng.permutation(len(originals))[: len(originals) // 2].tolist()
    shares = [EDITS[i % len(EDITS)] for i in range(len(chosen))]
    written = originals + [edited(kind, originals[at], share, rng) for at, share in zip(chosen, shares)]
    source = np.array([-1] * len(originals) + chosen)
    edit = np.array([-1.0] * len(originals) + shares)
    order = rng.permutation(len(written))
    place = np.argsort(order)
    return Copies(
        [plain(kind, written[i]) for i in order], np.where(source >= 0, place[source], -1)[order], edit[order]
    )


def _penstock(documents: list[str]) -> Dropped:
    import pyarrow as pa

    from penstock import Pipeline
    from penstock.sinks import MemorySink
    from penstock.sources import MemorySource
    from penstock.transforms import MinHashDedup

    sink = MemorySink()
    rows = pa.table({"id": np.arange(len(documents)), "text": documents})
    Pipeline(MemorySource(rows), [MinHashDedup("text", ngram=NGRAM, bands=BANDS, rows=ROWS)], sink).run()
    return np.setdiff1d(np.arange(len(documents)), sink.table().column("id").to_numpy())


def _rensa(grams: Grams) -> Dropped:
    from rensa import RMinHash, RMinHashLSH

    lsh = RMinHashLSH(threshold=0.7, num_perm=BANDS * ROWS, num_bands=BANDS)
    flags: list[bool] = []
    for first in range(0, len(grams.starts) - 1, 1000):
        starts = grams.starts[first : first + 1001]
        part = grams.hashes[starts[0] : starts[-1]]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            part, (starts - starts[0]).astype(np.uint64), BANDS * ROWS, 42
        )
        flags += lsh.insert_matrix_and_query_duplicate_flags(matrix, first)
    return np.flatnonzero(flags)


def _reference(grams: Grams) -> Dropped:
    """Textbook MinHash: one random function per minimum, one dictionary per band."""
    rng = np.random.default_rng(3)
    rows = len(grams.starts) - 1
    minima = np.empty((BANDS * ROWS, rows), np.uint64)
    for j in range(BANDS * ROWS):
        words = grams.hashes ^ rng.integers(0, 1 << 64, dtype=np.uint64)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(31)
        words *= np.uint64(0x94D049BB133111EB)
        minima[j] = np.minimum.reduceat(words, grams.starts[:-1])
    duplicate = np.zeros(rows, np.bool_)
    for band in minima.reshape(BANDS, ROWS, rows):
        seen: set[bytes] = set()
        for row, key in enumerate(np.ascontiguousarray(band.T)):
            duplicate[row] |= key.tobytes() in seen
            seen.add(key.tobytes())
    return np.flatnonzero(duplicate)


def _grams(documents: list[str], pattern: str) -> Grams:
    find = re.compile(pattern).findall
    numbers: dict[str, int] = {}
    parts = []
    for document in documents:
        words = np.array([numbers.setdefault(word, len(numbers)) for word in find(document.lower())] or [0], np.uint64)
        words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        sums = np.zeros(max(1, len(words) - NGRAM + 1), np.uint64)
        for i in range(min(NGRAM, len(words))):
            sums = sums * np.uint64(0xD6E8FEB86659FD93) + words[i : i + len(sums)]
        sums ^= sums >> np.uint64(32)
        parts.append(np.unique(sums))
    return Grams(np.concatenate(parts), np.concatenate(([0], np.cumsum([len(part) for part in parts]))))


def _recall(copies: Copies, dropped: Dropped) -> list[float]:
    at = np.flatnonzero(copies.original >= 0)
    found = np.isin(at, dropped) | np.isin(copies.original[at], dropped)
    return [float(found[copies.edit[at] == share].mean()) for share in EDITS]


def _best_jaccard(grams: Grams, dropped: Dropped) -> np.ndarray:
    """Largest share of common shingles with another row, for every dropped row."""
    sizes = np.diff(grams.starts)
    order = np.argsort(grams.hashes, kind="stable")
    ordered, owner = grams.hashes[order], np.repeat(np.arange(len(sizes)), sizes)[order]
    best = np.zeros(len(dropped))
    for i, row in enumerate(dropped.tolist()):
        own = grams.of(row)
        first, last = np.searchsorted(ordered, own), np.searchsorted(ordered, own, side="right")
        lengths = last - first
        places = np.repeat(first - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        rows = owner[places]
        common = np.bincount(rows[rows != row], minlength=1)
        others = np.flatnonzero(common)
        if len(others):
            best[i] = (common[others] / (sizes[row] + sizes[others] - common[others])).max()
    return best
