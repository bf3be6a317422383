"""Masked language modelling: tokens of a batch that are masked, and their labels.

    hide = MaskedLM.of(tokenizer, whole_words=True, seed=7)
    corrupted, labels = hide.corrupt(input_ids, attention_mask, rows, epoch)

The masking is a pure function of (seed, epoch, row, place in the row). It does not depend on the other rows of the
batch, on the padding, or on the rank or worker.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock._suggest import named_options
from penstock.arrays.hashes import mix64
from penstock.batching.collate import IGNORE
from penstock.errors import ConfigError, DataError
from penstock.order.permutation import derive_key
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

Ids: TypeAlias = npt.NDArray[Any]
Flags: TypeAlias = npt.NDArray[np.bool_]
Splitter: TypeAlias = Callable[[str], Iterable[tuple[int, int]]]
"""Function from a text to the spans that a tokenizer encodes one by one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WordBorders:
    """Word borders in a row of ids, decided by neighbouring tokens.

    A token begins a word if it always does (`opens`), if the token before it ends one (`closes`), or if the tokenizer
    splits between the kinds of character at the border (`splits[last, first]`).
    """

    opens: Flags
    closes: Flags
    first: npt.NDArray[np.uint8]
    last: npt.NDArray[np.uint8]
    splits: Flags

    @classmethod
    def starting(cls, opens: npt.ArrayLike) -> WordBorders:
        """Borders from the tokens alone: True for each id that begins a word."""
        given = np.asarray(opens, np.bool_)
        nothing = np.zeros(len(given), np.uint8)
        return cls(opens=given, closes=nothing > 0, first=nothing, last=nothing, splits=np.zeros((1, 1), np.bool_))

    @classmethod
    def of(cls, tokenizer: TokenizerSpec) -> WordBorders:
        """Words as this tokenizer splits them.

        Exact for WordPiece. Other tokenizers are probed with each pair of kinds of character; so words that they split
        by other rules (`'t` of "don't" when it is two tokens, every third digit) may count as two, or two as one.
        """
        loaded = load_tokenizer(tokenizer)
        rules = _word_rules(loaded)
        nowhere = cls.starting(np.zeros(loaded.vocab_size, np.bool_))
        if rules.continues:
            return cls.starting([not name.startswith(rules.continues) for name in rules.names])
        if rules.ends:
            closes = np.array([name.endswith(rules.ends) for name in rules.names], np.bool_)
            return replace(nowhere, closes=closes)
        pieces = [loaded.token_bytes(number) for number in range(loaded.vocab_size)]
        first = np.array([_kind_of_start(piece) for piece in pieces], np.uint8)
        last = np.array([_kind_of_end(piece) for piece in pieces], np.uint8)
        return replace(nowhere, first=first, last=last, splits=_splits(rules.split, loaded.name))

    def starts(self, ids: Ids) -> Flags:
        """True for each token that begins a word; the first of a row always does."""
        begins = self.opens[ids]
        begins[:, :1] = True
        before, here = ids[:, :-1], ids[:, 1:]
        begins[:, 1:] |= self.closes[before] | self.splits[self.last[before], self.first[here]]
        return begins

    def fingerprint(self) -> str:
        """Hash of the borders."""
        parts = (self.opens, self.closes, self.first, self.last, self.splits)
        return xxhash.xxh3_128_hexdigest(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


# Kinds of character that splitting patterns distinguish, and a sample of each.
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
class _WordRules:
    """Rules of a tokenizer for words."""

    split: Splitter
    names: Sequence[str] = ()
    """Tokens of the vocabulary, if one of the next two is set."""
    continues: str = ""
    """Prefix of tokens that continue a word, such as ##."""
    ends: str = ""
    """Suffix of tokens that end a word, such as </w>."""


def _word_rules(loaded: Tokenizer) -> _WordRules:
    """Word rules of a tokenizer, read from its library. Only this function looks inside."""
    reference = getattr(loaded, "_reference", None)
    if reference is None:  # of our own: bytes, characters
        return _WordRules(_by_kind)
    pattern = getattr(getattr(reference, "_encoding", None), "_pat_str", None)
    if pattern is not None:
        import regex  # type: ignore[import-untyped,unused-ignore]  # comes with tiktoken

        return _WordRules(lambda text: [match.span() for match in regex.finditer(pattern, text)])
    names, load = getattr(reference, "_tokens", None), getattr(reference, "_load", None)
    if names is None or load is None:  # SentencePiece
        return _WordRules(_at_spaces)
    model = reference._model
    continues, ends = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    splitting = None if continues or ends else load().pre_tokenizer
    if splitting is None:  # marked in the names, or converted from SentencePiece
        return _WordRules(_at_spaces, names, continues, ends)
    return _WordRules(lambda text: [span for _, span in splitting.pre_tokenize_str(text)])


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
            f"{name} drops the spaces between words, so its words are unknown; omit whole_words, or pass word_starts="
        )
    made = np.zeros((len(SAMPLES), len(SAMPLES)), np.bool_)
    for last, left in enumerate(SAMPLES):
        for first, right in enumerate(SAMPLES):
            # White space at the end of a text is split differently from that between words.
            before, behind = "q" if last <= NEWLINE else "", "q" if first <= NEWLINE else ""
            border = len(before + left)
            made[last, first] = any(border in span for span in splitter(before + left + right + behind))
    return made


MASKS = ("[MASK]", "<mask>", "<|mask|>", "<MASK>", "[mask]")


@named_options
@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedLM:
    """Masked-language-model objective of BERT.

    Every token is chosen with `probability`; of the chosen ones a share `mask` becomes the mask token, a share `random`
    another ordinary token, and the rest is kept. With `whole_words`, words are chosen with the same probability, with
    all their tokens. Special tokens and padding are neither chosen nor inserted. A row with any other token has at
    least one label, so short rows have a little more than their share.
    """

    mask_id: int
    vocab_size: int
    special_ids: Sequence[int] = ()
    probability: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    word_starts: WordBorders | npt.NDArray[np.bool_] | None = field(default=None, repr=False)
    """Word borders for `whole_words`, or True for each id that begins a word."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(f"probability must be above 0 and at most 1, got {self.probability}")
        if self.mask < 0 or self.random < 0 or self.mask + self.random > 1 + 1e-9:
            raise ConfigError(
                f"mask and random must be shares of at most 1 together, got {self.mask} and {self.random}"
            )
        wrong = [number for number in (self.mask_id, *self.special_ids) if not 0 <= number < self.vocab_size]
        if wrong:
            raise ConfigError(
                f"mask_id and special_ids must be from 0 to vocab_size - 1 = {self.vocab_size - 1}: {wrong}"
            )
        if self.random and len(self._ordinary) == 0:
            raise ConfigError("every id is special, so random ids cannot be inserted; pass random=0")
        if self.whole_words and self.word_starts is None:
            raise ConfigError("whole_words=True needs word_starts; use MaskedLM.of(tokenizer, whole_words=True)")
        if isinstance(self.word_starts, np.ndarray) and self.word_starts.shape != (self.vocab_size,):
            shape = self.word_starts.shape
            raise ConfigError(f"word_starts must have one value for each of {self.vocab_size} ids, got shape {shape}")

    @classmethod
    def of(cls, tokenizer: TokenizerSpec, **options: Any) -> MaskedLM:
        """Objective for a tokenizer (anything `load_tokenizer` takes): finds its mask token, special tokens and words.

        Options that are given are used as they are.
        """
        loaded = load_tokenizer(tokenizer)
        special, found = loaded.special, dict(options)
        if "mask_id" not in found:
            found["mask_id"] = _mask_id(loaded)
        known = (special.bos, special.eos, special.pad, special.unk, found["mask_id"], *special.named.values())
        found.setdefault("special_ids", tuple(sorted({number for number in known if number is not None})))
        found.setdefault("vocab_size", loaded.vocab_size)
        if found.get("whole_words"):
            found.setdefault("word_starts", WordBorders.of(loaded))
        return cls(**found)

    def corrupt(
        self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike | None, rows: npt.ArrayLike, epoch: int = 0
    ) -> tuple[Ids, Ids]:
        """Corrupted input ids, and labels: the original id where a token was chosen, -100 elsewhere.

        `rows` are the numbers of the rows in the dataset, which decide the choice, not their places in the batch.
        """
        ids, shown = self._checked(input_ids, attention_mask)
        numbers = np.asarray(rows).astype(np.int64).view(np.uint64)
        if numbers.shape != ids.shape[:1]:
            raise DataError(f"rows must be one number for each of {len(ids)} rows, got shape {numbers.shape}")
        maskable = shown & ~self._special[ids]
        place = np.cumsum(shown, axis=1)  # without padding
        of_row = mix64(mix64(numbers) ^ np.uint64(derive_key(self.seed, "masked_lm", epoch)))[:, None]
        unit = self._words(ids, maskable) if self.whole_words else place
        drawn = mix64(of_row ^ mix64(unit.astype(np.uint64)))
        drawn[~maskable] = np.uint64(2**64 - 1)
        limit = np.uint64(min(int(self.probability * 2**64), 2**64 - 1))
        least = drawn.min(axis=1, keepdims=True, initial=np.uint64(2**64 - 1))
        chosen = maskable & (drawn <= np.maximum(limit, least))

        signed = ids.dtype if ids.dtype.kind == "i" and ids.dtype.itemsize >= 4 else np.dtype(np.int32)
        labels = np.where(chosen, ids.astype(signed, copy=False), np.array(IGNORE, signed))
        corrupted = ids.astype(ids.dtype if self.vocab_size - 1 <= np.iinfo(ids.dtype).max else signed)
        at_row, at = np.nonzero(chosen)
        second = mix64(mix64(of_row[at_row, 0] ^ np.uint64(0x5DEECE66D)) ^ mix64(place[at_row, at].astype(np.uint64)))
        share = (second >> np.uint64(11)).astype(np.float64) * 2.0**-53
        masked = share < self.mask
        corrupted[at_row[masked], at[masked]] = self.mask_id
        swapped = ~masked & (share < self.mask + self.random)
        if swapped.any():
            which = mix64(second[swapped]) % np.uint64(len(self._ordinary))
            corrupted[at_row[swapped], at[swapped]] = self._ordinary[which]
        return corrupted, labels

    def describe(self) -> dict[str, Any]:
        """Everything that decides the masking, as plain values."""
        special = xxhash.xxh3_64_hexdigest(np.array(sorted(set(self.special_ids)), np.int64).tobytes())
        words = self._borders.fingerprint() if self.whole_words else None
        shares = [self.probability, self.mask, self.random]
        return {
            "objective": "masked_lm",
            "shares": shares,
            "mask_id": self.mask_id,
            "vocab_size": self.vocab_size,
            "special": special,
            "words": words,
            "seed": self.seed,
        }

    @cached_property
    def _special(self) -> Flags:
        marks = np.zeros(self.vocab_size, np.bool_)
        marks[[self.mask_id, *self.special_ids]] = True
        return marks

    @cached_property
    def _ordinary(self) -> npt.NDArray[np.int64]:
        return np.flatnonzero(~self._special)

    @cached_property
    def _borders(self) -> WordBorders:
        given = self.word_starts
        assert given is not None
        return given if isinstance(given, WordBorders) else WordBorders.starting(given)

    def _words(self, ids: Ids, maskable: Flags) -> Ids:
        """Number of each token's word in its row, counted from the first maskable one."""
        begins = self._borders.starts(ids)
        begins[:, 1:] |= ~maskable[:, :-1]  # no word continues across a special token
        return np.cumsum(begins & maskable, axis=1)

    def _checked(self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike | None) -> tuple[Ids, Flags]:
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise DataError(f"input_ids must be integers in rows and columns, got {ids.dtype} of shape {ids.shape}")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise DataError(
                f"input_ids has ids from {ids.min()} to {ids.max()}, expected 0 to {self.vocab_size - 1}; use the "
                "tokenizer of the data"
            )
        shown = np.ones(ids.shape, np.bool_) if attention_mask is None else np.asarray(attention_mask) != 0
        if shown.shape != ids.shape:
            raise DataError(f"attention_mask has shape {shown.shape}, expected that of input_ids, {ids.shape}")
        return ids, shown


def _mask_id(tokenizer: Tokenizer) -> int:
    named = tokenizer.special.named
    for text in MASKS:
        if text in named:
            return int(named[text])
    raise ConfigError(
        f"{tokenizer.name} has no mask token: none of {list(MASKS)} is among its special tokens {list(named)[:20]}; "
        "add one, or pass mask_id="
    )
