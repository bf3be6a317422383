"""Masked-language-model corruption: which tokens of a batch are hidden, and what the model is to say in their place.

    hide = MaskedLM.of(tokenizer, whole_words=True, seed=7)
    corrupted, labels = hide.corrupt(input_ids, attention_mask, rows, epoch)

What is hidden is a pure function of (seed, epoch, row, place in the row). It is the same whatever other rows are in the
batch, however wide and on which side it is padded, and whichever rank or worker makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataError
from penstock.loaders._word_borders import Flags, Ids, WordBorders
from penstock.loaders.collation import IGNORE
from penstock.order.permutation import derive_key
from penstock.transforms._hashing import mix64
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from penstock.transforms._tokenizers.loading import TokenizerSpec

__all__ = ["MaskedLM", "WordBorders"]


MASKS = ("[MASK]", "<mask>", "<|mask|>", "<MASK>", "[mask]")


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedLM:
    """Hide some tokens and ask for them: BERT's objective.

    Every token is chosen with `probability`; of the chosen ones a share `mask` becomes the mask token, a share `random`
    some other ordinary token, and the rest stays as it is. With `whole_words` words are chosen, with the same
    probability, and all their tokens with them. Special tokens and padding are never chosen nor put in; a row with
    any other token has at least one label, so short rows have a little more than their share.
    """

    mask_id: int
    vocab_size: int
    special_ids: Sequence[int] = ()
    probability: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    word_starts: WordBorders | npt.NDArray[np.bool_] | None = field(default=None, repr=False)
    """For `whole_words`: the borders, or True for each id that begins a word."""
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
            raise ConfigError("every id is special, so there is none to put in at random; pass random=0")
        if self.whole_words and self.word_starts is None:
            raise ConfigError("whole_words=True needs word_starts; MaskedLM.of(tokenizer, whole_words=True) finds them")
        if isinstance(self.word_starts, np.ndarray) and self.word_starts.shape != (self.vocab_size,):
            shape = self.word_starts.shape
            raise ConfigError(f"word_starts must have one value for each of {self.vocab_size} ids, got shape {shape}")

    @classmethod
    def of(cls, tokenizer: TokenizerSpec, **options: Any) -> MaskedLM:
        """For a tokenizer, anything `load_tokenizer` takes: the mask token, the special ones and the words are found.

        What is given among the options is taken as it is.
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
        """What the model is to see, and the labels: the id that was there where one was chosen, -100 elsewhere.

        `rows` are the numbers of the rows in the data set: they, not their places in the batch, decide what is chosen.
        """
        ids, shown = self._checked(input_ids, attention_mask)
        numbers = np.asarray(rows).astype(np.int64).view(np.uint64)
        if numbers.shape != ids.shape[:1]:
            raise DataError(f"rows must be one number for each of {len(ids)} rows, got shape {numbers.shape}")
        maskable = shown & ~self._special[ids]
        place = np.cumsum(shown, axis=1)  # counted without padding
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
        """Everything that decides what is hidden, as plain values."""
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
        """The number of each token's word, counted in its row from the first one that may be hidden."""
        begins = self._borders.starts(ids)
        begins[:, 1:] |= ~maskable[:, :-1]  # nothing goes on across a special token
        return np.cumsum(begins & maskable, axis=1)

    def _checked(self, input_ids: npt.ArrayLike, attention_mask: npt.ArrayLike | None) -> tuple[Ids, Flags]:
        ids = np.asarray(input_ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise DataError(f"input_ids must be integers in rows and columns, got {ids.dtype} of shape {ids.shape}")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            raise DataError(
                f"input_ids has ids from {ids.min()} to {ids.max()}, expected 0 to {self.vocab_size - 1}; "
                "is this the tokenizer that made them?"
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
