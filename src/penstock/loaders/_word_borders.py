"""Where words begin among the tokens of a tokenizer, for hiding whole ones."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from penstock.transforms._tokenizers.loading import TokenizerSpec

__all__ = ["Flags", "Ids", "WordBorders"]

Ids: TypeAlias = npt.NDArray[Any]
Flags: TypeAlias = npt.NDArray[np.bool_]
Splitter: TypeAlias = Callable[[str], Iterable[tuple[int, int]]]
"""Text to the stretches that a tokenizer encodes one by one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WordBorders:
    """Where words begin in a row of ids, as far as two neighbours tell.

    A token begins a word if it says so itself (`opens`), if the one before it ends one (`closes`), or if the kinds of
    character on both sides of the border (`first`, `last`) are ones that are split (`splits[last, first]`).
    """

    opens: Flags
    closes: Flags
    first: npt.NDArray[np.uint8]
    last: npt.NDArray[np.uint8]
    splits: Flags

    @classmethod
    def starting(cls, opens: npt.ArrayLike) -> WordBorders:
        """Borders that the tokens alone decide: True for each id that begins a word."""
        given = np.asarray(opens, np.bool_)
        nothing = np.zeros(len(given), np.uint8)
        return cls(opens=given, closes=nothing > 0, first=nothing, last=nothing, splits=np.zeros((1, 1), np.bool_))

    @classmethod
    def of(cls, tokenizer: TokenizerSpec) -> WordBorders:
        """The words that this tokenizer's own way of splitting text makes.

        Exact for WordPiece. For the others what it does with two characters is asked for each pair of their kinds; so
        words that it tells apart by more than that (`'t` of "don't" when it is two tokens, every third digit) may count
        as two, or two as one.
        """
        loaded = load_tokenizer(tokenizer)
        habits = _habits(loaded)
        nowhere = cls.starting(np.zeros(loaded.vocab_size, np.bool_))
        if habits.continues:
            return cls.starting([not name.startswith(habits.continues) for name in habits.names])
        if habits.ends:
            closes = np.array([name.endswith(habits.ends) for name in habits.names], np.bool_)
            return replace(nowhere, closes=closes)
        pieces = [loaded.token_bytes(number) for number in range(loaded.vocab_size)]
        first = np.array([_kind_of_start(piece) for piece in pieces], np.uint8)
        last = np.array([_kind_of_end(piece) for piece in pieces], np.uint8)
        return replace(nowhere, first=first, last=last, splits=_splits(habits.split, loaded.name))

    def starts(self, ids: Ids) -> Flags:
        """Which tokens begin a word; the first of each row always does."""
        begins = self.opens[ids]
        begins[:, :1] = True
        before, here = ids[:, :-1], ids[:, 1:]
        begins[:, 1:] |= self.closes[before] | self.splits[self.last[before], self.first[here]]
        return begins

    def fingerprint(self) -> str:
        """The same exactly when the words are."""
        parts = (self.opens, self.closes, self.first, self.last, self.splits)
        return xxhash.xxh3_128_hexdigest(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


# Kinds of character, as the patterns that split text tell them apart, and one of each to ask with.
SPACE, NEWLINE, LOWER, UPPER, NUMBER, OTHER = range(6)
SAMPLES = (" ", "\n", "a", "B", "1", "!")


def _kind(character: str) -> int:
    if character.isspace():
        return NEWLINE if character in "\r\n" else SPACE
    category = unicodedata.category(character)
    if category[0] == "L":
        return UPPER if category in ("Lu", "Lt") else LOWER
    return NUMBER if category[0] == "N" else OTHER


def _kind_of_start(piece: bytes) -> int:
    text = piece[:4].decode("utf-8", "ignore") if piece and piece[0] & 0xC0 != 0x80 else ""
    return _kind(text[0]) if text else LOWER  # part of a character: most such are letters


def _kind_of_end(piece: bytes) -> int:
    for size in range(1, min(4, len(piece)) + 1):
        try:
            return _kind(piece[-size:].decode()[0])
        except UnicodeDecodeError:
            continue
    return LOWER


@dataclass(frozen=True, slots=True)
class _Habits:
    """How a tokenizer treats words."""

    split: Splitter
    names: Sequence[str] = ()
    """The tokens as its vocabulary has them, where one of the next two says something."""
    continues: str = ""
    """What the name of a token begins with that goes on with a word, such as ##."""
    ends: str = ""
    """What the name of a token ends with that ends a word, such as </w>."""


def _habits(loaded: Tokenizer) -> _Habits:
    """What the library behind a tokenizer shows of its words. Nothing else here looks inside."""
    reference = getattr(loaded, "_reference", None)
    if reference is None:  # of our own: bytes, characters
        return _Habits(_by_kind)
    pattern = getattr(getattr(reference, "_encoding", None), "_pat_str", None)
    if pattern is not None:
        import regex  # type: ignore[import-untyped,unused-ignore]  # comes with tiktoken

        return _Habits(lambda text: [match.span() for match in regex.finditer(pattern, text)])
    names, load = getattr(reference, "_tokens", None), getattr(reference, "_load", None)
    if names is None or load is None:  # SentencePiece
        return _Habits(_at_spaces)
    model = reference._model
    continues, ends = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    splitting = None if continues or ends else load().pre_tokenizer
    if splitting is None:  # the names say it, or it was converted from SentencePiece
        return _Habits(_at_spaces, names, continues, ends)
    return _Habits(lambda text: [span for _, span in splitting.pre_tokenize_str(text)])


def _at_spaces(text: str) -> list[tuple[int, int]]:
    """Words that begin with their space."""
    return _before(text, lambda last, here: here <= NEWLINE)


def _by_kind(text: str) -> list[tuple[int, int]]:
    alike = (SPACE, SPACE, LOWER, LOWER, NUMBER, OTHER)
    return _before(text, lambda last, here: here <= NEWLINE or (last > NEWLINE and alike[last] != alike[here]))


def _before(text: str, splits: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    kinds = [_kind(character) for character in text]
    cuts = [0, *(i for i in range(1, len(text)) if splits(kinds[i - 1], kinds[i])), len(text)]
    return list(pairwise(cuts))


def _splits(splitter: Splitter, name: str) -> Flags:
    if not any(start <= 1 < stop for start, stop in splitter("a a")):
        raise ConfigError(
            f"{name} drops the spaces between words and its tokens do not say which of them go on with a word; "
            "leave whole_words off, or pass word_starts="
        )
    made = np.zeros((len(SAMPLES), len(SAMPLES)), np.bool_)
    for last, left in enumerate(SAMPLES):
        for first, right in enumerate(SAMPLES):
            # White space at the end of a text is split otherwise than between words.
            before, behind = "q" if last <= NEWLINE else "", "q" if first <= NEWLINE else ""
            border = len(before + left)
            made[last, first] = any(border in span for span in splitter(before + left + right + behind))
    return made
