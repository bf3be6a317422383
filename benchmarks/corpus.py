"""Synthetic JSONL corpus that resembles web text; the same bytes on every machine, cached under `.data/`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO
from zlib import crc32

import numpy as np
import orjson
from job import MAX_WORDS, MIN_WORDS

DATA = Path(__file__).parent / ".data"
VERSION = 1
"""Part of the file name. Raise it when the generator changes, so that no run reads an older corpus."""

_SEED = 20_240_613
_VOCABULARY = 30_000
_MEAN_WORDS, _SIGMA = 355, 1.1  # About 2.2 KB a document, with a long tail.
_NON_ASCII = [
    "café",
    "日本",
    "😀",
    "naïve",
    "ÉCOLE",
    "Straße",
    "ДЛЯ",
    "données",
    "Ñandú",
    "東京都",
    "Æsir",
    "żółw",
    "🚀",
]
_ODD_SPACE_SHARE = 0.01
_ODD_SPACES = ["\u00a0", "\u3000"]  # White space to Python, not to RE2.
_LANGUAGES, _LANGUAGE_SHARES = ["en", "de", "fr", "ja", "ru", "es"], [0.7, 0.08, 0.07, 0.05, 0.05, 0.05]
_ROWS_AT_ONCE = 2_000


@dataclass(frozen=True, slots=True)
class Answer:
    """Expected output of the job for every engine. The checksum does not depend on the order of the rows."""

    rows: int
    words: int
    text_checksum: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Corpus file, its figures, and the expected answer of the job (by Python's `str.lower` and `str.split`)."""

    path: Path
    bytes: int
    rows: int
    answer: Answer

    @property
    def megabytes(self) -> float:
        return self.bytes / 1e6


def make_corpus(megabytes: float, non_ascii: float = 0.15) -> Corpus:
    """Corpus of this size, written unless an earlier run has cached it.

    `non_ascii` is the share of documents with words outside ASCII: typographic quotes alone bring web text to more
    than half, code is near zero.
    """
    path = DATA / f"corpus-v{VERSION}-{megabytes:g}mb-{non_ascii:g}.jsonl"
    facts = path.with_suffix(".answer.json")
    if not facts.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        corpus = _write(path, int(megabytes * 1e6), non_ascii)
        record = {"bytes": corpus.bytes, "rows": corpus.rows, "answer": asdict(corpus.answer)}
        _publish(facts, lambda file: file.write(json.dumps(record, indent=1).encode()))
    record = json.loads(facts.read_text())
    return Corpus(path, record["bytes"], record["rows"], Answer(**record["answer"]))


def repeat(corpus: Corpus, times: int) -> Path:
    """One file with `times` copies of the corpus: a large input that is cheap to make."""
    path = corpus.path.with_name(f"{corpus.path.stem}-x{times}.jsonl")
    if not path.exists():

        def copy(file: IO[bytes]) -> None:
            for _ in range(times):
                with corpus.path.open("rb") as one:
                    shutil.copyfileobj(one, file, 1 << 20)

        _publish(path, copy)
    return path


def read_through(path: Path) -> None:
    """Read the file into the page cache, so that the first engine does not pay for the disk."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass


def checksum(text: bytes) -> int:
    """Term of one document in `Answer.text_checksum`, which is the sum."""
    return crc32(text)


def _write(path: Path, target_bytes: int, non_ascii: float) -> Corpus:
    size = rows = kept = words = text_checksum = 0

    def write(file: IO[bytes]) -> None:
        nonlocal size, rows, kept, words, text_checksum
        for row in _documents(non_ascii):
            line = orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
            file.write(line)
            size += len(line)
            rows += 1
            count = len(row["text"].split())
            if MIN_WORDS <= count <= MAX_WORDS:
                kept += 1
                words += count
                text_checksum += checksum(row["text"].lower().encode())
            if size >= target_bytes:
                return

    _publish(path, write)
    return Corpus(path, size, rows, Answer(kept, words, text_checksum))


def _documents(non_ascii: float) -> Iterator[dict]:
    rng = np.random.default_rng(_SEED)
    table = _zipf_table()
    forms = _word_forms(rng)
    first_id = 0
    while True:
        # The mean of a log-normal is exp(sigma^2 / 2) times its median.
        lengths = np.exp(rng.standard_normal(_ROWS_AT_ONCE) * _SIGMA) * (_MEAN_WORDS / np.exp(_SIGMA**2 / 2))
        lengths = np.clip(lengths, 3, 50_000).astype(np.int64)
        ends = np.cumsum(lengths)
        picks = table[rng.integers(0, len(table), ends[-1])] * len(_FORM_SHARES)
        picks += rng.choice(len(_FORM_SHARES), size=ends[-1], p=_FORM_SHARES)
        languages = rng.choice(_LANGUAGES, size=_ROWS_AT_ONCE, p=_LANGUAGE_SHARES).tolist()
        scores = rng.random(_ROWS_AT_ONCE).round(6).tolist()
        foreign = (rng.random(_ROWS_AT_ONCE) < non_ascii).tolist()
        odd = (rng.random(_ROWS_AT_ONCE) < _ODD_SPACE_SHARE).tolist()
        for i, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist())):
            tokens = [forms[pick] for pick in picks[end - length : end].tolist()]
            if foreign[i]:
                for position, word in zip(rng.integers(0, length, 1 + length // 30).tolist(), _cycle(rng, _NON_ASCII)):
                    tokens[position] = word
            if odd[i]:
                tokens[0] += next(_cycle(rng, _ODD_SPACES)) + tokens[-1]
            text = " ".join(tokens).replace("\n ", "\n")
            yield {"id": first_id + i, "text": text, "lang": languages[i], "score": scores[i]}
        first_id += _ROWS_AT_ONCE


def _cycle(rng: np.random.Generator, words: list[str]) -> Iterator[str]:
    start = int(rng.integers(len(words)))
    while True:
        yield words[start % len(words)]
        start += 1


def _zipf_table() -> np.ndarray:
    """Word numbers, repeated by Zipf's law: a uniform draw from the table is a Zipf draw."""
    shares = 1 / np.arange(1, _VOCABULARY + 1)
    counts = np.maximum(1, np.round(shares / shares.sum() * (1 << 20))).astype(np.int64)
    return np.repeat(np.arange(_VOCABULARY), counts)


_FORM_SHARES = [0.80, 0.09, 0.01, 0.05, 0.035, 0.01, 0.005]


def _word_forms(rng: np.random.Generator) -> list[str]:
    """Forms of every word, in the order of `_FORM_SHARES`; frequent words are short."""
    starts = ["", "", *"bcdfghklmnprstvw", "st", "tr", "pl", "th"]
    middles = [*"aeiouaeiou", "ea", "ou"]
    ends = [*[""] * 10, *"nrstlm", "nd", "ng"]
    words: dict[str, None] = {}
    while len(words) < _VOCABULARY:
        syllables = 1 + int(np.log2(1 + len(words)) // 6) + int(rng.random() < 0.1)
        parts = [starts, middles, ends] * syllables
        words["".join(part[rng.integers(len(part))] for part in parts)] = None
    return [
        form
        for word in words
        for form in (word, word.capitalize(), word.upper(), f"{word},", f"{word}.", f'"{word}"', f"{word}.\n\n")
    ]


def _publish(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file atomically: an interrupted run leaves no partial file."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb", buffering=1 << 20) as file:
        write(file)
    partial.replace(path)
