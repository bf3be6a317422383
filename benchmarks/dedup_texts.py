"""Texts for the recall suite: code, prose and languages without spaces, from files that every machine has."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["KINDS", "edited", "plain", "texts"]

KINDS = ["code", "prose", "unspaced"]

_PIECE = 2_000  # approximate characters per document
_LEAST = 400
_MOST_BYTES = 400_000
_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_SPACES = re.compile(r"(\s+)")
_JOINT = "\u2060"
"""Separates the words of a text without spaces while it is edited; removed before the text is returned."""


def texts(kind: str, rows: int) -> list[str]:
    """Distinct documents; fewer than `rows` if the machine has no more."""
    make = {"code": _code, "prose": _prose, "unspaced": _unspaced}[kind]
    found: dict[str, None] = {}
    for text in make():
        found[text] = None
        if len(found) == rows:
            break
    return list(found)


def edited(kind: str, text: str, share: float, rng: np.random.Generator) -> str:
    """Text with this share of its words replaced. Words are separated by spaces or by the separator above."""
    if kind == "unspaced":
        words = text.split(_JOINT)
        for at in _places(len(words), share, rng):
            words[at] = f"{chr(0x4E00 + int(rng.integers(5000)))}{chr(0x4E00 + int(rng.integers(5000)))}"
        return _JOINT.join(words)
    pieces = _SPACES.split(text)
    words_at = [at for at, piece in enumerate(pieces) if piece and not piece.isspace()]
    for at in _places(len(words_at), share, rng):
        pieces[words_at[at]] = f"edit{rng.integers(1000)}"
    return "".join(pieces)


def plain(kind: str, text: str) -> str:
    """Text without the separator."""
    return text.replace(_JOINT, "") if kind == "unspaced" else text


def _places(words: int, share: float, rng: np.random.Generator) -> list[int]:
    return rng.choice(words, round(share * words), replace=False).tolist() if share else []


def _code() -> Iterator[str]:
    """Python sources, split at blank lines."""
    for whole in _sources():
        document = ""
        for block in whole.split("\n\n"):
            document += block + "\n\n"
            if len(document) >= _PIECE:
                yield document
                document = ""
        if len(document) >= _LEAST:
            yield document


def _prose() -> Iterator[str]:
    """Docstrings, concatenated."""
    for whole in _sources():
        document = ""
        for found in _DOCSTRING.finditer(whole):
            lines = [line.strip() for line in found.group(1).splitlines()]
            document += "\n".join(lines) + "\n\n"
            if len(document) >= _PIECE:
                yield document
                document = ""
        if len(document) >= _LEAST:
            yield document


def _sources() -> Iterator[str]:
    homes = {Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")}
    files = sorted({file for home in homes for file in home.rglob("*.py")}, key=str)
    random.Random(1).shuffle(files)
    for file in files:
        try:
            if file.stat().st_size <= _MOST_BYTES:
                yield file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def _unspaced() -> Iterator[str]:
    """Synthetic Chinese, Japanese and Thai in turn: words of a vocabulary with Zipf frequencies."""
    rng = np.random.default_rng(11)
    makers = [_chinese_words, _japanese_words, _thai_words]
    vocabularies = [sorted({make(rng) for _ in range(20_000)}) for make in makers]
    for words in vocabularies:
        rng.shuffle(words)
    marks = [["\uff0c", "。", "、"], ["、", "。", "「", "」"], [" ", " ", " ฯ "]]
    while True:
        for words, stops in zip(vocabularies, marks):
            ranks = np.minimum(rng.zipf(1.15, 1 + int(rng.lognormal(5.6, 0.6))) - 1, len(words) * 50) % len(words)
            pieces = [words[rank] for rank in ranks.tolist()]
            for at in range(7, len(pieces), 9):
                pieces[at] += stops[int(rng.integers(len(stops)))]
            text = _JOINT.join(pieces)
            if len(text) >= _LEAST:
                yield text


def _chinese_words(rng: np.random.Generator) -> str:
    return "".join(chr(0x4E00 + int(rng.integers(3500))) for _ in range(int(rng.choice([1, 2, 2, 2, 3]))))


def _japanese_words(rng: np.random.Generator) -> str:
    kana = [chr(code) for code in range(0x3042, 0x3094)]
    stem = "".join(chr(0x4E00 + int(rng.integers(2000))) for _ in range(int(rng.choice([0, 1, 2, 2]))))
    return stem + "".join(kana[int(rng.integers(len(kana)))] for _ in range(int(rng.choice([1, 2, 3]))))


def _thai_words(rng: np.random.Generator) -> str:
    consonants = [chr(code) for code in range(0x0E01, 0x0E2F)]
    vowels = ["ะ", "า", "ิ", "ี", "ุ", "ู", "ั", "่", "้", "็", "ำ", ""]
    word = ""
    for _ in range(int(rng.choice([1, 2, 2, 3]))):
        word += rng.choice(["", "", "เ", "แ", "โ", "ไ"]) + rng.choice(consonants) + rng.choice(vowels)
        word += rng.choice(["", *consonants[:20]])
    return str(word)
