"""Interfaces of tokenizers.

`Tokenizer` is what every stage uses: columns of text in, columns of ids out. `Reference` is the library behind it,
which defines the ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ints, Ragged
from penstock.arrays.text import pieces
from penstock.errors import ConfigError

MOST_UNUSED = 1 << 24
"""Unused ids that a vocabulary may have: tables by id have an entry for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Ids of special tokens, as far as the tokenizer knows them."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)
    """Every special token by its text, such as `<|im_end|>`."""
    adds_bos: bool = False
    """True if the library of the tokenizer begins a text with BOS, as `tokenizer(text)` of `transformers` does."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids, and the place of each token in the UTF-8 bytes of its row: token k covers bytes starts[k] to ends[k]."""

    ids: pa.ListArray
    starts: npt.NDArray[np.int32]
    """One for each token of the column, counted from the first byte of the token's own row."""
    ends: npt.NDArray[np.int32]


class Tokenizer(Protocol):
    """A loaded tokenizer. Thread-safe; makes no Python object per token."""

    @property
    def name(self) -> str:
        """Name in messages and manifests."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of everything that decides the ids, the same on every machine."""
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
        """The ids of each text, `list<dtype>`, without BOS and EOS; a null text gives a null list.

        With `parse_special` the text of a special token becomes that token, as in a rendered chat; without it, it is
        ordinary text.
        """
        ...

    def encode_spans(self, texts: pa.Array, *, parse_special: bool = True) -> Encoded:
        """As `encode`, with the bytes that each token covers, from the same pass."""
        ...

    def decode(self, ids: npt.NDArray[np.integer]) -> str:
        """The text of ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token."""
        ...


def check_largest_id(vocab: Mapping[Any, int], name: str) -> None:
    """Raise for an id far beyond the size of the vocabulary: tables by id would not fit in memory."""
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


REFERENCE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Offsets:
    """Places of the tokens of one text, in characters."""

    ids: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class FastModel:
    """Loader of the fast form of a tokenizer."""

    load: Callable[[], Any]
    """A new gigatoken backend."""
    traps: str | None = None
    """Pattern (RE2) of texts that the fast form treats differently: rows that match go to the reference."""


@dataclass(frozen=True, slots=True)
class VocabularyTable:
    """The bytes of every token, for models whose tokens, joined, are the original text."""

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    """Token k is `data[offsets[k]:offsets[k + 1]]`."""
    special: npt.NDArray[np.bool_]
    prefixed: bool = False
    """True if a space is added before the text and after each special token."""
    compare: str = "never"
    """When to compare the bytes, because the text may have been normalised: never, non-ascii, always."""


class Reference(Protocol):
    """The library that defines the ids. Thread-safe."""

    name: str
    vocab_size: int
    special: SpecialTokens
    normalises: bool
    """True if text is normalised to a Unicode form, or changed in another way that depends on Unicode's tables."""

    def fingerprint(self) -> str: ...

    def ids(self, texts: list[str], *, parse_special: bool) -> Sequence[Ints]:
        """The ids of each text."""
        ...

    def offsets(self, texts: list[str], *, parse_special: bool) -> Sequence[Offsets]:
        """The ids of each text, and the characters each covers."""
        ...

    def decode(self, ids: Ints) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def table(self) -> VocabularyTable | None:
        """The bytes of every token, if the joined tokens are the text."""
        ...

    def fast(self, *, parse_special: bool) -> FastModel | str:
        """The loader of the fast form, or the reason why there is none."""
        ...

    def splitter(self) -> Reference:
        """A small tokenizer that normalises and splits text like this one, with ids that show every split.

        Itself if there is none; then a different split is visible only where it changes the ids.
        """
        ...

    def probes(self) -> list[str]:
        """Texts that are difficult for this very tokenizer."""
        ...


def reference_ids(reference: Reference, texts: pa.Array, *, parse_special: bool) -> Ragged:
    """The ids of a text column without nulls, in pieces: the libraries need about a hundred bytes per token."""
    parts = [
        Ragged.of(reference.ids(part.to_pylist(), parse_special=parse_special), np.uint32)
        for part in pieces(texts, REFERENCE_BYTES)
    ]
    return Ragged.joined(parts or [Ragged.of([], np.uint32)])


def literal(text: str) -> str:
    """The RE2 pattern that matches exactly this text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def as_token_table(
    tokens: Sequence[bytes], special: Sequence[int], *, prefixed: bool = False, compare: str = "never"
) -> VocabularyTable:
    """The table of these tokens, in the order of their ids."""
    bounds = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum([len(token) for token in tokens], out=bounds[1:])
    marks = np.zeros(len(tokens), np.bool_)
    marks[list(special)] = True
    return VocabularyTable(np.frombuffer(b"".join(tokens), np.uint8), bounds, marks, prefixed, compare)


def encode_segments(
    texts: Sequence[str], special: Mapping[str, int], encode: Callable[[list[str]], Sequence[Offsets]]
) -> list[Offsets]:
    """Each text with its special tokens as single ids, and the text between them encoded by `encode`.

    Every segment is encoded as a text of its own. Of two special tokens at the same place, the longer wins.
    """
    pattern = re.compile("(" + "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) + ")")
    cut = [pattern.split(text) if special else [text] for text in texts]
    plain = iter(encode([part for parts in cut for part in parts[::2] if part]))
    whole = []
    for parts in cut:
        ids: list[Ints] = []
        starts: list[Ints] = []
        ends: list[Ints] = []
        at = 0
        for number, part in enumerate(parts):
            if part:
                found = _token(special[part], len(part)) if number % 2 else next(plain)
                ids.append(found.ids)
                starts.append(found.starts + at)
                ends.append(found.ends + at)
            at += len(part)
        none = np.zeros(0, np.int64)
        whole.append(Offsets(*(np.concatenate([none, *given]) for given in (ids, starts, ends))))
    return whole


def _token(token: int, length: int) -> Offsets:
    return Offsets(np.array([token]), np.array([0]), np.array([length]))
