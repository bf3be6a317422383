"""A tokenizer ready for use: the fast path where it is exact, the reference where it is not, in bounded pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import MOST, Flags, Ints, Ragged, list_array, row_offsets, spliced
from penstock.arrays.text import checked_text, pieces, utf8
from penstock.errors import ConfigError, DataError
from penstock.tokenizers.base import Encoded, SpecialTokens, narrowest
from penstock.tokenizers.fast import FastPath, Refused
from penstock.tokenizers.reference import REFERENCE_BYTES, Offsets, Reference, VocabularyTable, reference_ids

__all__ = ["LoadedTokenizer"]

FAST_BYTES = 4 << 20

Made = TypeVar("Made")
Encode: TypeAlias = Callable[[pa.Array], Ragged]
Spans: TypeAlias = tuple[Ragged, npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids, and the bytes at which each begins and ends."""


class LoadedTokenizer:
    """A tokenizer as every stage sees it, over the library that defines its ids.

    Ids come from gigatoken where that gives the ids of the reference: compared before the first row, on the first rows,
    and on a sample chosen by content. A difference in the first batch turns it off for good, and the batch is done
    again; after that it is an error, as what was delivered before may be wrong. With `fast=False` it is not used.
    Copies in other processes are made from the same data. What they delivered is not known here, so to a copy
    (`alone=False`) every difference is one too late, except before the first row.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        chat_template: str | None = None,
        special: SpecialTokens | None = None,
        fast: bool | None = True,
        alone: bool = True,
    ) -> None:
        self._reference, self._wanted, self._alone = reference, fast, alone
        self._special = reference.special if special is None else special
        self._chat_template = chat_template
        self._dtype = narrowest(reference.vocab_size)
        self._start()

    def _start(self) -> None:
        self._fast = {
            mode: FastPath(self._reference, parse_special=mode, wanted=self._wanted, alone=self._alone)
            for mode in (False, True)
        }
        self._table: VocabularyTable | None = None
        self._has_table: bool | None = None
        self._fingerprint: str | None = None

    @property
    def name(self) -> str:
        return self._reference.name

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            special = self._special
            self._fingerprint = f"{self._reference.fingerprint()}-bos={special.bos}-eos={special.eos}-pad={special.pad}"
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        return self._reference.vocab_size

    @property
    def dtype(self) -> pa.DataType:
        return self._dtype

    @property
    def special(self) -> SpecialTokens:
        return self._special

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode(self, texts: pa.Array, *, parse_special: bool = False) -> pa.ListArray:
        given = checked_text(texts)
        return list_array(self._exactly(given, lambda encode: encode(given), parse_special), self._dtype, texts)

    def encode_spans(self, texts: pa.Array, *, parse_special: bool = True) -> Encoded:
        table = self._token_table()
        given = checked_text(texts)
        if table is None:
            rows, starts, ends = self._all_spans(given, REFERENCE_BYTES, self._reference_spans, parse_special)
        else:
            rows, starts, ends = self._exactly(
                given,
                lambda encode: self._all_spans(
                    given, FAST_BYTES, lambda part, parse: self._table_spans(part, table, encode, parse), parse_special
                ),
                parse_special,
            )
        return Encoded(list_array(rows, self._dtype, texts), starts, ends)

    def decode(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        return self._reference.decode(ids)

    def token_bytes(self, token: int) -> bytes:
        return self._reference.token_bytes(token)

    def fit_budget(self, nbytes: int, *, parse_special: bool = False) -> None:
        """Load what encoding needs, and have it forget what it remembers once the process has grown by `nbytes`.

        What it remembers cannot be asked for, only seen in the size of the process; the engine sees that too, and
        makes do with less as it grows. Of usual text it is some hundred megabytes, so less is forgotten in vain.
        """
        self._fast[parse_special].fit(nbytes)

    def slow_because(self, *, parse_special: bool = False) -> str | None:
        """Why the fast path is not used; None while it is, or before it was tried."""
        return self._fast[parse_special].refusal

    def reference_rows(self, *, parse_special: bool = False) -> int:
        """Rows that took the reference for their characters, beside the fast path."""
        return self._fast[parse_special].reference_rows

    def with_special(self, **tokens: str | None) -> LoadedTokenizer:
        """The same tokenizer with another `bos`, `eos`, `pad` or `unk` token, given by its text."""
        ids = {}
        for kind, text in tokens.items():
            if text is not None:
                ids[kind] = self._special.named.get(text, self._only_id(text))
                if ids[kind] is None:
                    known = list(self._special.named)
                    raise ConfigError(f"{kind}={text!r} is not a token of {self.name}; its special tokens are {known}")
        return self._with(special=replace(self._special, **ids))  # type: ignore[arg-type]

    def with_template(self, chat_template: str) -> LoadedTokenizer:
        """The same tokenizer with another chat template."""
        return self._with(chat_template=chat_template)

    def without_fast(self, *, quietly: bool = False) -> LoadedTokenizer:
        """The same tokenizer, with ids from the reference alone; `quietly` says nothing of it in the log."""
        return self._with(fast=None if quietly else False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.vocab_size:,} ids)"

    def __getstate__(self) -> dict[str, Any]:
        return self._arguments() | {"alone": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _arguments(self) -> dict[str, Any]:
        return {
            "reference": self._reference,
            "special": self._special,
            "chat_template": self._chat_template,
            "fast": self._wanted,
            "alone": self._alone,
        }

    def _with(self, **changed: Any) -> LoadedTokenizer:
        return LoadedTokenizer(**(self._arguments() | changed))

    def _exactly(self, texts: pa.Array, work: Callable[[Encode], Made], parse_special: bool) -> Made:
        """What `work` makes of the ids of texts: those of the fast path or, if it is refused, those of the reference.

        All of it is made of the one or of the other, so that nothing is delivered before all of it was checked.
        """
        fast = self._fast[parse_special]
        try:
            made = work(
                lambda some: Ragged.joined(
                    [fast.encode(part) for part in pieces(some, FAST_BYTES)] or [Ragged.of([], np.uint32)]
                )
            )
            if len(texts):
                fast.deliver()
        except Refused:
            return work(lambda some: reference_ids(self._reference, some, parse_special=parse_special))
        return made

    def _only_id(self, text: str) -> int | None:
        ids = self._reference.ids([text], parse_special=True)[0]
        return int(ids[0]) if len(ids) == 1 else None

    def _token_table(self) -> VocabularyTable | None:
        if self._has_table is None:
            self._table = self._reference.table()
            self._has_table = self._table is not None
        return self._table

    def _all_spans(
        self, texts: pa.Array, piece_bytes: int, spans: Callable[[pa.Array, bool], Spans], parse_special: bool
    ) -> Spans:
        rows: list[Ragged] = []
        starts = [np.zeros(0, np.int32)]
        ends = [np.zeros(0, np.int32)]
        for piece in pieces(texts, piece_bytes):
            if utf8(piece).offsets[-1] > MOST:
                raise DataError(f"a text of {utf8(piece).offsets[-1]:,} bytes has no 32-bit offsets; split it before")
            part = spans(piece, parse_special)
            rows.append(part[0])
            starts.append(part[1])
            ends.append(part[2])
        return Ragged.joined(rows), np.concatenate(starts), np.concatenate(ends)

    def _table_spans(self, texts: pa.Array, table: VocabularyTable, encode: Encode, parse_special: bool) -> Spans:
        rows = encode(texts)
        lengths: Ints = np.diff(table.offsets)[rows.values]
        if table.prefixed:
            lengths = lengths - _added_spaces(rows, table)
        starts, ends = row_offsets(lengths, rows.offsets)
        wrong = _rows_that_differ(texts, rows, table, lengths)
        if not wrong.any():
            return rows, starts, ends
        mended = self._reference_spans(texts.filter(pa.array(wrong)), parse_special)
        right = np.repeat(~wrong, np.diff(rows.offsets))
        kept = np.concatenate(([0], np.cumsum(np.diff(rows.offsets)[~wrong])))
        whole = [
            spliced(wrong, Ragged(new, mended[0].offsets), Ragged(old[right], kept))
            for new, old in zip((mended[0].values, *mended[1:]), (rows.values, starts, ends))
        ]
        return whole[0], whole[1].values.astype(np.int32, copy=False), whole[2].values.astype(np.int32, copy=False)

    def _reference_spans(self, texts: pa.Array, parse_special: bool) -> Spans:
        given = texts.to_pylist()
        found = self._reference.offsets(given, parse_special=parse_special)
        spans = [_in_bytes(text, one) for text, one in zip(given, found)]
        none = np.zeros(0, np.int32)
        return (
            Ragged.of([one.ids for one in found], np.uint32),
            np.concatenate([none, *(starts for starts, _ in spans)]),
            np.concatenate([none, *(ends for _, ends in spans)]),
        )


def _in_bytes(text: str, found: Offsets) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Offsets in characters as offsets in UTF-8 bytes."""
    data = np.frombuffer(text.encode(), np.uint8)
    if len(data) == len(text):
        return found.starts.astype(np.int32), found.ends.astype(np.int32)
    first_bytes = np.append(np.flatnonzero(data & 0xC0 != 0x80), len(data)).astype(np.int32)
    return first_bytes[found.starts], first_bytes[found.ends]


def _added_spaces(rows: Ragged, table: VocabularyTable) -> Ints:
    """1 for each token that begins with a space which is not in the text: those that open a row or follow a special."""
    opening = np.zeros(len(rows.values), np.bool_)
    opening[1:] = table.special[rows.values[:-1]]
    opening[rows.offsets[:-1][np.diff(rows.offsets) > 0]] = True
    first = np.zeros(len(table.offsets) - 1, np.uint8)
    filled = np.diff(table.offsets) > 0
    first[filled] = table.data[table.offsets[:-1][filled]]
    added: Ints = (opening & (first == 32)[rows.values] & ~table.special[rows.values]).astype(np.int64)
    return added


def _rows_that_differ(texts: pa.Array, rows: Ragged, table: VocabularyTable, lengths: Ints) -> Flags:
    """The rows whose tokens, put end to end, are not the text."""
    data, bounds = utf8(texts)
    sums = np.concatenate(([0], np.cumsum(lengths)))
    wrong: Flags = np.diff(sums[rows.offsets]) != np.diff(bounds)
    if table.compare == "never" or len(data) == 0 or (table.compare == "non-ascii" and data.max() < 0x80):
        return wrong
    # Lengths agree: the same number of bytes, row by row, so that the bytes can be laid side by side.
    right = ~wrong
    of_token, of_byte = np.repeat(right, np.diff(rows.offsets)), np.repeat(right, np.diff(bounds))
    ids, taken = rows.values[of_token], lengths[of_token]
    ends = np.cumsum(taken)
    first = table.offsets[1:][ids] - taken  # a space that is not in the text stands in front
    places = np.repeat(first - (ends - taken), taken) + np.arange(ends[-1] if len(ends) else 0)
    owner = np.repeat(np.flatnonzero(right), np.diff(bounds)[right])
    wrong[owner[table.data[places] != data[of_byte]]] = True
    return wrong
