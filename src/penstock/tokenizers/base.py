"""What penstock asks of a tokenizer, whoever made it: columns of text in, columns of ids out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError

__all__ = ["Encoded", "SpecialTokens", "Tokenizer", "check_largest_id", "narrowest"]

MOST_UNUSED = 1 << 24
"""Ids without a token that a vocabulary may have: tables by id have a place for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """The ids that mean something to a model, as far as the tokenizer knows them."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)
    """Every special token by its text, such as `<|im_end|>`."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids, and where each token stands in the UTF-8 bytes of its row: token k covers bytes starts[k] to ends[k]."""

    ids: pa.ListArray
    starts: npt.NDArray[np.int32]
    """One for each token of the column, counted from the first byte of the token's own row."""
    ends: npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """A loaded tokenizer. Safe to call from several threads; never makes a Python object for each token."""

    @property
    def name(self) -> str:
        """How it is called in messages and manifests."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids: the same in every process, on every machine."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def dtype(self) -> pa.DataType:
        """The narrowest unsigned integer that holds every id."""
        ...

    @property
    def special(self) -> SpecialTokens: ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that came with the tokenizer."""
        ...

    def encode(self, texts: pa.Array, *, parse_special: bool = False) -> pa.ListArray:
        """The ids of each text, `list<dtype>`, nothing added in front or behind; a null text gives a null list.

        With `parse_special` the text of a special token becomes that token, as in a rendered chat; without it, it is
        text like any other, since it came from the data.
        """
        ...

    def encode_spans(self, texts: pa.Array, *, parse_special: bool = True) -> Encoded:
        """As `encode`, from one and the same pass also the bytes that each token covers."""
        ...

    def decode(self, ids: npt.NDArray[np.integer]) -> str:
        """The text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for."""
        ...


def check_largest_id(vocab: Mapping[Any, int], name: str) -> None:
    """Refuse an id far beyond the size of the vocabulary: tables with a place for each id would not fit in memory."""
    token, number = max(vocab.items(), key=lambda item: item[1], default=("", 0))
    if number >= len(vocab) + MOST_UNUSED:
        raise ConfigError(
            f"token {token!r} of {name} has id {number:,}, but the vocabulary has {len(vocab):,} tokens; expected ids "
            f"below {len(vocab) + MOST_UNUSED:,}; correct the id in the tokenizer's file"
        )


def narrowest(vocab_size: int) -> pa.DataType:
    """The narrowest unsigned integer type for ids below `vocab_size`."""
    if vocab_size <= 1 << 8:
        return pa.uint8()
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()
