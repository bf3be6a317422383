"""Oracle of the quality filters: their rules in plain Python, one row at a time, as the definition of the kernels.

Every rule returns 0 for a row to keep, or the number of the first rule it violates. A NaN limit disables a rule.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.corpus.quality.c4 import PHRASES
from penstock.corpus.quality.characters import (
    CURRENCY,
    CURRENCY_SIGNS,
    ICON,
    LETTER,
    LOWER,
    MARK,
    PUNCTUATION,
    QUOTE,
    SENTENCE_END,
    SYMBOL,
    TERMINAL,
    UPPER,
    kinds,
)
from penstock.corpus.quality.words import UNITS, exceptions

__all__ = ["c4_lines", "fineweb_quality", "gopher_quality", "gopher_repetition", "split", "split_english"]


@functools.cache
def characters(bits: int) -> frozenset[str]:
    """All characters that are of one of these kinds."""
    return frozenset(map(chr, np.flatnonzero(kinds() & np.uint16(bits)).tolist()))


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
        if lorem and PHRASES[0] in lower:
            return "", 1, left_out
        if javascript and PHRASES[1] in lower:
            left_out[3] += 1
        elif brackets and "{" in line:
            return "", 2, left_out
        elif policies and any(phrase in lower for phrase in PHRASES[2:]):
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


_HOST = r"(?:[A-Za-z0-9\x80-\U0010ffff](?:[A-Za-z0-9_\-\x80-\U0010ffff]{0,62}[A-Za-z0-9\x80-\U0010ffff])?\.)+"
ADDRESS = re.compile(
    r"(?:[A-Za-z0-9_+\-.]{2,}://)?(?:\S+@)?"
    rf"(?:[0-9]{{1,3}}(?:\.[0-9]{{1,3}}){{3}}|{_HOST}[a-z\x80-\U0010ffff]{{2,63}})"
    r"(?::[0-9]{2,5})?(?:[/?#]\S*)?\Z"
)
"""A web or mail address: not cut inside."""


def split_english(text: str) -> list[str]:
    """The words of a text."""
    return [word for stretch in text.split() for word in split_stretch(stretch)]


def split_stretch(stretch: str) -> tuple[str, ...]:
    """The words of a stretch without whitespace."""
    return _split_short(stretch) if len(stretch) <= 64 else _split(stretch)


@functools.lru_cache(1 << 16)
def _split_short(stretch: str) -> tuple[str, ...]:
    return _split(stretch)


def _split(stretch: str) -> tuple[str, ...]:
    special = exceptions()
    start, stop = 0, len(stretch)
    front: list[str] = []
    while start < stop and stretch[start:stop] not in special and (length := _prefix(stretch, start)):
        front.append(stretch[start : start + length])
        start += length
    back: list[str] = []
    while start < stop and stretch[start:stop] not in special and (length := _suffix(stretch, start, stop)):
        back.append(stretch[stop - length : stop])
        stop -= length
    return (*front, *_middle(stretch[start:stop]), *reversed(back))


def _middle(stretch: str) -> list[str]:
    words: list[str] = []
    if stretch in exceptions():
        for length in exceptions()[stretch]:
            words.append(stretch[:length])
            stretch = stretch[length:]
        return words
    if not stretch or ADDRESS.match(stretch):
        return [stretch] if stretch else []
    done = at = 0
    while at < len(stretch):
        length = _infix(stretch, at)
        if length:
            words += [word for word in (stretch[done:at], stretch[at : at + length]) if word]
            done = at + length
        at += length or 1
    return words + ([stretch[done:]] if done < len(stretch) else [])


def _prefix(s: str, start: int) -> int:
    """How many characters are split off the front."""
    first, second = s[start], s[start + 1 : start + 2]
    if first == "." and second == ".":
        return _dots(s, start)
    if first in characters(MARK | QUOTE | ICON | CURRENCY) or first in "§%=—–":
        return 1
    if first == "+" and not (second and second in "0123456789"):
        return 1
    return next((len(sign) for sign in ("US$", "C$", "A$") if s.startswith(sign, start)), 0)


def _suffix(s: str, start: int, stop: int) -> int:
    """How many characters are split off the end."""
    last = s[stop - 1]
    before = s[stop - 2] if stop - 2 >= start else ""
    if last == "." and before == ".":
        return _dots_before(s, start, stop)
    if last == "…" and before == "…":
        return 2
    if last in characters(MARK | QUOTE | ICON) or last in "—–":
        return 1
    if last in "sS" and before and before in "'’":
        return 2
    if last == ".":
        return int(_splits_period(s, start, stop, before))
    if last == "+":
        return int(before != "" and before in "0123456789")
    for length in range(min(5, stop - start - 1), 0, -1):
        if s[stop - length - 1] in "0123456789" and s[stop - length : stop] in _AFTER_DIGITS:
            return length
    return 0


def _splits_period(s: str, start: int, stop: int, before: str) -> bool:
    if not before:
        return False
    if before in "0123456789%²-+|" or before in characters(LOWER | MARK | QUOTE):
        return True
    earlier = s[stop - 3] if stop - 3 >= start else ""
    if earlier == "°" and before in "FCK":
        return True
    capitals = characters(UPPER)
    return before in capitals and earlier in capitals


def _infix(s: str, at: int) -> int:
    """How many characters at this place stand between two words."""
    here, after = s[at], s[at + 1 : at + 2]
    if here == "." and after == ".":
        return _dots(s, at)
    if here == "…" or here in characters(ICON):
        return 1
    if at == 0 or not after:
        return 0
    before = s[at - 1]
    letters, quotes = characters(LETTER), characters(QUOTE)
    if here in "+-*^" and before in "0123456789" and after in "0123456789-":
        return 1
    if here == ".":
        lower, upper = characters(LOWER), characters(UPPER)
        return int((before in lower or before in quotes) and (after in upper or after in quotes))
    if here == ",":
        return int(before in letters and after in letters)
    if before not in letters and before not in "0123456789":
        return 0
    if here in ":<>=/":
        return int(after in letters)
    for length in range(1, _HYPHENS.get(here, 0) + 1):
        if s[at : at + length] == here * length and s[at + length : at + length + 1] in letters:
            return length
    return 0


_HYPHENS = {"-": 3, "–": 1, "—": 2, "~": 1}
"""How many of them in a row may join two words."""
_AFTER_DIGITS = frozenset([*UNITS, *CURRENCY_SIGNS, "US$", "C$", "A$"])


def _dots(s: str, at: int) -> int:
    stop = at
    while stop < len(s) and s[stop] == ".":
        stop += 1
    return stop - at


def _dots_before(s: str, start: int, stop: int) -> int:
    at = stop
    while at > start and s[at - 1] == ".":
        at -= 1
    return stop - at


def count_sentences(words: list[str]) -> int:
    """Sentences end after a word that is one terminal mark, where a word that is no punctuation follows."""
    ends, punctuation = characters(SENTENCE_END), characters(PUNCTUATION)
    sentences, ended = min(len(words), 1), False
    for word in words:
        if word in ends:
            ended = True
        elif ended and not all(character in punctuation for character in word):
            sentences += 1
            ended = False
    return sentences
