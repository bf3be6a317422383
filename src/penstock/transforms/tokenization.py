"""`Tokenize`: a text column to a column of token ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pyarrow as pa

from penstock.arrays.ragged import Ragged, list_array
from penstock.arrays.text import flags
from penstock.arrays.truncation import Policy
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.pipeline.metrics import TOKENS, tokens_in
from penstock.tokenizers.base import Encoded, SpecialTokens, Tokenizer
from penstock.tokenizers.load import TokenizerSpec, load_tokenizer
from penstock.tokenizers.simple import ByteTokenizer, CharTokenizer
from penstock.tokenizers.token_rows import TokenTruncation
from penstock.transforms.columns import append, as_names, column, take_rows
from penstock.transforms.counts import CountingTransform
from penstock.transforms.text import as_text

__all__ = [
    "ByteTokenizer",
    "CharTokenizer",
    "Encoded",
    "SpecialTokens",
    "Tokenize",
    "Tokenizer",
    "load_tokenizer",
]

VERSION = 1
"""Part of the fingerprint: goes up when the same options give other ids."""


class Tokenize(CountingTransform):
    """Put the token ids of a text column into a column of lists, in the narrowest integers that hold the vocabulary.

        Tokenize("model/", add_eos=True)                                      # whole documents
        Tokenize("model/", max_length=2048, truncation="right")               # the beginning of each
        Tokenize("model/", max_length=512, truncation="split", stride=64)     # windows that share 64 tokens

    `tokenizer` is anything `load_tokenizer` takes. With `add_bos`, every row begins with BOS; by default where the
    tokenizer itself begins a text with it (`tokenizer.special.adds_bos`). With `add_eos`, EOS ends a document: it
    follows the last piece only, and not a document that was cut on the right. A token that is present already is not
    added again.

    A row has at most `max_length` tokens, BOS and EOS included. A longer row is an error, is dropped, is cut on the
    left or right, or is split into consecutive rows that share `stride` tokens and repeat the other columns. Rows of
    fewer than `min_length` tokens are dropped. Every dropped token is counted in `dropped_tokens`.

    The text of a special token in the data is ordinary text, unless `parse_special` is set. The text column is dropped
    and the others stay; `keep` names the columns to keep instead. A null text is an error; put `DropNulls` before.

    `fast=False` uses only the library that defines the ids. The ids are the same either way, so it is not part of the
    fingerprint; the fast tokenizer is checked during the run, and a late difference stops the run.
    """

    def __init__(
        self,
        tokenizer: TokenizerSpec,
        column: str = "text",
        into: str = "input_ids",
        *,
        add_bos: bool | None = None,
        add_eos: bool = False,
        max_length: int | None = None,
        truncation: Policy = "error",
        stride: int = 0,
        min_length: int = 0,
        parse_special: bool = False,
        keep: str | Iterable[str] | None = None,
        fast: bool = True,
    ) -> None:
        super().__init__()
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer, fast=fast)
        (self.column,), (self.into,) = as_names([column]), as_names([into])
        self.keep = _names(keep)
        self.parse_special = parse_special
        special = self.tokenizer.special
        adds_bos = special.adds_bos if add_bos is None else add_bos
        self.cut = TokenTruncation(
            bos=_needed(special.bos, "bos", self.tokenizer) if adds_bos else None,
            eos=_needed(special.eos, "eos", self.tokenizer) if add_eos else None,
            max_length=max_length,
            truncation=truncation,
            stride=stride,
            min_length=min_length,
        )

    @property
    def fingerprint(self) -> str:
        """Text that decides the ids: part of the key of a store."""
        return orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS).decode()

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Dropped tokens by reason, since the start or the last `reset`."""
        return tokens_in(self._changes.totals())

    def describe(self) -> dict[str, Any]:
        """Everything that decides the output, as plain values."""
        cut = self.cut
        return {
            "transform": "Tokenize",
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "column": self.column,
            "into": self.into,
            "bos": cut.bos,
            "eos": cut.eos,
            "max_length": cut.max_length,
            "truncation": cut.truncation,
            "stride": cut.stride,
            "min_length": cut.min_length,
            "parse_special": self.parse_special,
            "keep": None if self.keep is None else list(self.keep),
        }

    def fit_budget(self, nbytes: int) -> None:
        """Load the tokenizer, and limit its cache to these bytes."""
        fit = getattr(self.tokenizer, "fit_budget", None)
        if fit is not None:
            fit(nbytes, parse_special=self.parse_special)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        texts = as_text(column(batch, self.column), self.column)
        if texts.null_count:
            row = int(flags(texts.is_null()).argmax())
            raise DataError(
                f"column {self.column!r}, row {row} of the batch is null, expected text; "
                f"put DropNulls({self.column!r}) or FillNulls before (transforms= of a loader, --transform), or leave "
                "such rows out with on_error='skip'",
                row=row,
            )
        kept = batch.select(self._kept(batch))
        if self.into in kept.schema.names:
            raise SchemaError(f"column {self.into!r} already exists; pass another name with into=..., or drop it first")
        ids = self.tokenizer.encode(texts, parse_special=self.parse_special)
        rows = self.cut.rows(Ragged.of_lists(ids))
        self.count(rows.dropped)
        self.count_kept(rows.changed)
        self.count_kept({TOKENS + reason: n for reason, n in rows.dropped_tokens.items()})
        if rows.owners is not None:
            kept = take_rows(kept, rows.owners)
        made = list_array(rows.ids, self.tokenizer.dtype)
        if not kept.num_columns:  # a batch without columns has no rows to append to
            return pa.record_batch({self.into: made})
        return append(kept, self.into, made)

    def __repr__(self) -> str:
        return f"Tokenize({self.tokenizer.name!r}, {self.column!r})"

    def _kept(self, batch: pa.RecordBatch) -> list[str]:
        if self.keep is None:
            return [name for name in batch.schema.names if name != self.column]
        for name in self.keep:
            column(batch, name)  # a missing one is an error that names it
        return list(self.keep)


def _names(keep: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Column names; there may be none."""
    given = (keep,) if isinstance(keep, str) else keep if keep is None else tuple(keep)
    return as_names(given) if given else given


def _needed(token: int | None, kind: str, tokenizer: Tokenizer) -> int:
    if token is None:
        raise ConfigError(
            f"add_{kind}=True, but {tokenizer.name} has no {kind.upper()} token; name one with "
            f"load_tokenizer(..., {kind}='...'), one of {list(tokenizer.special.named)}"
        )
    return token
