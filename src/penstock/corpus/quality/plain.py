"""The rules of the filters in plain Python, one row at a time: slow, short, and the definition of what is right.

Every function gives 0 for a row to keep, or the number of the first rule it breaks. Rules with a NaN limit are off,
since nothing compares with NaN.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.corpus.quality.characters import SYMBOL, TERMINAL, characters
from penstock.corpus.quality.english import count_sentences, split_english

__all__ = ["LORE", "c4_lines", "fineweb_quality", "gopher_quality", "gopher_repetition", "split"]

LORE = (
    "lorem ipsum",
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
"""Phrases C4 looks for: the first drops the page, the others drop the line."""

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")


def split(text: str, words: str) -> list[str]:
    """The words of a text, by one of the two definitions."""
    return split_english(text) if words == "english" else text.split()


def gopher_quality(text: str, words: Sequence[str], stop_words: frozenset[str], limits: Sequence[float]) -> int:
    symbols = characters(SYMBOL)
    real = [word for word in words if not symbols.issuperset(word)]
    if len(real) < limits[0]:
        return 1
    if len(real) > limits[1]:
        return 2
    mean = sum(map(len, real)) / len(real) if real else 0.0
    if mean < limits[2]:
        return 3
    if mean > limits[3]:
        return 4
    n = max(len(words), 1)
    if text.count("#") / n > limits[4]:
        return 5
    if (text.count("...") + text.count("…")) / n > limits[4]:
        return 6
    lines = text.splitlines()
    if sum(line.lstrip().startswith(("•", "-")) for line in lines) / max(len(lines), 1) > limits[5]:
        return 7
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) / max(len(lines), 1) > limits[6]:
        return 8
    if sum(any(map(str.isalpha, word)) for word in words) / n < limits[7]:
        return 9
    return 10 if len(stop_words.intersection(words)) < limits[8] else 0


def gopher_repetition(
    text: str,
    words: Sequence[str],
    limits: Sequence[float],
    top: Sequence[tuple[int, float]],
    repeated: Sequence[tuple[int, float]],
) -> int:
    if not text:
        return 1
    paragraphs = re.split(r"\n{2,}", text.strip())
    again, letters = _repeated(paragraphs)
    if again / len(paragraphs) > limits[0]:
        return 2
    if letters / len(text) > limits[1]:
        return 3
    lines = re.split("\n+", text)
    again, letters = _repeated(lines)
    if again / len(lines) > limits[2]:
        return 4
    if letters / len(text) > limits[3]:
        return 5
    for i, (n, limit) in enumerate(top):
        if _top_gram(words, n) / len(text) > limit:
            return 6 + i
    for i, (n, limit) in enumerate(repeated):
        if _repeated_grams(words, n) / len(text) > limit:
            return 6 + len(top) + i
    return 0


def fineweb_quality(text: str, words: Sequence[str], limits: Sequence[float], accept_none: bool) -> int:
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        return 1
    terminal = characters(TERMINAL)
    finished = sum(line[-1] in terminal for line in lines) / len(lines)
    if finished < limits[0] and not (finished == 0 and accept_none):
        return 2
    if sum(len(line) <= limits[2] for line in lines) / len(lines) > limits[1]:
        return 3
    newlines = text.count("\n")
    if _repeated(lines)[1] / (len(text) - newlines) > limits[3]:
        return 4
    return 5 if newlines / len(words) > limits[4] else 0


def c4_lines(text: str, limits: Sequence[float], options: Sequence[bool]) -> tuple[str, int, list[int]]:
    """What is left of the text, the reason code, and the number of lines left out by reason."""
    citations, terminal, lorem, javascript, brackets, policies = options
    left_out = [0] * 5
    kept: list[str] = []
    sentences = 0
    for whole in text.splitlines():
        line = whole.strip()
        words = line.split()
        if any(len(word) > limits[2] for word in words):
            left_out[0] += 1
            continue
        if citations:
            line = _CITATION.sub("", line)
        if terminal and (not line.endswith((".", "?", "!", '"', "'")) or line.endswith("...")):
            left_out[1] += 1
            continue
        if len(words) < limits[1]:
            left_out[2] += 1
            continue
        lower = line.lower()
        if lorem and LORE[0] in lower:
            return "", 1, left_out
        if javascript and LORE[1] in lower:
            left_out[3] += 1
        elif brackets and "{" in line:
            return "", 2, left_out
        elif policies and any(phrase in lower for phrase in LORE[2:]):
            left_out[4] += 1
        else:
            sentences += count_sentences(split_english(line))
            kept.append(line)
    if sentences < limits[0]:
        return "", 3, left_out
    return "\n".join(kept).strip(), 0, left_out


def _repeated(pieces: Iterable[str]) -> tuple[int, int]:
    """How many pieces came before, and their characters."""
    seen: set[str] = set()
    again = letters = 0
    for piece in pieces:
        if piece in seen:
            again += 1
            letters += len(piece)
        seen.add(piece)
    return again, letters


def _top_gram(words: Sequence[str], n: int) -> int:
    grams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    if not grams:
        return 0
    gram, times = grams.most_common(1)[0]
    return len(gram) * times


def _repeated_grams(words: Sequence[str], n: int) -> int:
    seen: set[str] = set()
    letters = at = 0
    while at <= len(words) - n:
        gram = "".join(words[at : at + n])
        if gram in seen:
            letters += len(gram)
            at += n
        else:
            seen.add(gram)
            at += 1
    return letters
