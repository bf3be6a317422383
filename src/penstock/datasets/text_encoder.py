"""Texts to token ids, with the tokens a model expects around each, cut to a length, all losses counted."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.transforms.counts import Counts
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

__all__ = ["TextEncoder"]

log = logging.getLogger(__name__)

VERSION = 1
"""Part of the fingerprint: raised when the same options come to give other ids."""
_PAIRS = (("[CLS]", "[SEP]"), ("<cls>", "<sep>"), ("<cls>", "<eos>"))
_MOST_LOADED = 4
_loaded: dict[tuple[str, Any], Tokenizer] = {}
"""The last tokenizers, so that the datasets of a competition share one: it is tried, and said to be slow, once."""
_ROWS, _TOKENS = "rows cut to max_length", "tokens cut off"


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer, and what is put before and behind each text.

    Those are [CLS] and [SEP] where the tokenizer has them, and otherwise its BOS and EOS tokens, as far as there are
    any; they stay when a text is cut, and count for `max_length`.
    """

    tokenizer: Tokenizer
    before: int | None = None
    after: int | None = None
    max_length: int | None = None
    _lost: Counts = field(default_factory=Counts, repr=False, compare=False)

    def __post_init__(self) -> None:
        length = self.max_length
        if length is None:
            return
        if isinstance(length, bool) or not isinstance(length, int) or length <= self._around:
            raise ConfigError(
                f"max_length must be a whole number above {self._around}, the tokens around a text, got {length!r}"
            )

    @classmethod
    def of(cls, tokenizer: Any, *, add_special_tokens: bool = True, max_length: int | None = None) -> Self:
        """With anything that `load_tokenizer` takes."""
        loaded = load_tokenizer(tokenizer)
        if loaded is not tokenizer:
            loaded = _shared(loaded)
        before, after = _around(loaded) if add_special_tokens else (None, None)
        return cls(loaded, before, after, max_length)

    @property
    def fingerprint(self) -> str:
        """The same exactly when the ids are."""
        return f"{VERSION}-{self.tokenizer.fingerprint}-{self.before}-{self.after}-{self.max_length}"

    @property
    def cut_rows(self) -> int:
        return self._lost.totals().get(_ROWS, 0)

    @property
    def cut_tokens(self) -> int:
        return self._lost.totals().get(_TOKENS, 0)

    def encode(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        """The ids of each text, as lists of the narrowest integers that hold the vocabulary."""
        if isinstance(texts, pa.ChunkedArray):
            return pa.chunked_array([self._encode(chunk) for chunk in texts.chunks], pa.list_(self.tokenizer.dtype))
        return self._encode(texts)

    @property
    def _around(self) -> int:
        return (self.before is not None) + (self.after is not None)

    def _encode(self, texts: pa.Array) -> pa.ListArray:
        if texts.null_count:
            raise DataError("a text is null, expected one for every row")
        ids = self.tokenizer.encode(texts)
        bounds = np.asarray(ids.offsets).astype(np.int64)
        lengths = np.diff(bounds)
        kept = lengths if self.max_length is None else np.minimum(lengths, self.max_length - self._around)
        if not self._around and kept is lengths:
            return ids
        self.count_cut(int(np.count_nonzero(lengths > kept)), int((lengths - kept).sum()), len(lengths))
        sizes = kept + self._around
        ends = np.cumsum(sizes)
        if len(ends) and ends[-1] > np.iinfo(np.int32).max:
            half = len(texts) // 2
            return pa.concat_arrays([self._encode(texts[:half]), self._encode(texts[half:])])
        values = np.empty(int(ends[-1]) if len(ends) else 0, ids.values.type.to_pandas_dtype())
        starts = ends - sizes
        inner = np.ones(len(values), np.bool_)
        if self.before is not None:
            values[starts], inner[starts] = self.before, False
        if self.after is not None:
            values[ends - 1], inner[ends - 1] = self.after, False
        values[inner] = _beginnings(np.asarray(ids.values), bounds, lengths, kept)
        offsets = np.concatenate([np.zeros(1, np.int32), ends.astype(np.int32)])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    def count_cut(self, rows: int, tokens: int, of: int) -> None:
        """Count texts that were cut, here or before they were kept somewhere; the first are announced."""
        if not rows:
            return
        if not self.cut_rows:
            log.warning(
                "%d of %d texts are longer than max_length=%s and are cut, by %d tokens in all; further cuts are "
                "counted in cut_rows and cut_tokens", rows, of, self.max_length, tokens,
            )  # fmt: skip
        self._lost.add({_ROWS: rows, _TOKENS: tokens})


def _shared(tokenizer: Tokenizer) -> Tokenizer:
    shared = _loaded.setdefault((tokenizer.fingerprint, getattr(tokenizer, "chat_template", None)), tokenizer)
    while len(_loaded) > _MOST_LOADED:
        _loaded.pop(next(iter(_loaded)), None)
    return shared


def _around(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    named = tokenizer.special.named
    for first, last in _PAIRS:
        if first in named and last in named:
            return named[first], named[last]
    return tokenizer.special.bos, tokenizer.special.eos


def _beginnings(values: Any, bounds: Any, lengths: Any, kept: Any) -> Any:
    """The first `kept` values of each row, end to end."""
    if kept is lengths or bool((kept == lengths).all()):
        return values[bounds[0] : bounds[-1]]
    places = np.arange(int(bounds[-1] - bounds[0])) - np.repeat(bounds[:-1] - bounds[0], lengths)
    return values[bounds[0] : bounds[-1]][places < np.repeat(kept, lengths)]
