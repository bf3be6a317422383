"""Rows of tokens in any of their usual forms to the columns of a store: `input_ids` and `loss_mask`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError, SchemaError
from penstock.pipeline.stages import Transform
from penstock.store.foreign.base import check_ids
from penstock.store.foreign.saved_dataset import ATTENTION, LABELS, is_token_list, mask_column, token_column

TOKENS, MASK = "input_ids", "loss_mask"
_DERIVED = ("token_type_ids", "special_tokens_mask", "position_ids", "length")
_IGNORED = -100


class SelectTokens(Transform):
    """Tokens as `input_ids`, supervised ones as `loss_mask`, without padding; other columns stay as they are.

    Padding is where `attention_mask` is 0. Labels are the ids themselves where a token is supervised and -100 where it
    is not; labels that are anything else are refused, because a mask cannot express them.
    """

    def __init__(self, *, tokens: str | None = None, mask: str | None = None, vocab_size: int | None = None) -> None:
        self.tokens, self.mask, self.vocab_size = tokens, mask, vocab_size

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name = token_column(batch.schema, self.tokens)
        if name is None:
            raise SchemaError(f"the rows have no column of token ids (lists of integers): {batch.schema.names}")
        ids, lengths = _flat(batch.column(name), name)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        check_ids(ids, offsets, self.vocab_size, None, 0)
        used, mask = {name, *_DERIVED}, mask_column(batch.schema, self.mask)
        chosen: npt.NDArray[np.bool_] | None = None
        if mask is not None:
            chosen = self._aligned(batch, mask, lengths) != 0
            used.add(mask)
        elif LABELS in batch.schema.names and is_token_list(batch.schema.field(LABELS).type):
            chosen = _supervised(ids, self._aligned(batch, LABELS, lengths), offsets)
        used.add(LABELS)
        if ATTENTION in batch.schema.names and is_token_list(batch.schema.field(ATTENTION).type):
            kept = self._aligned(batch, ATTENTION, lengths) != 0
            used.add(ATTENTION)
            if not kept.all():
                lengths = np.diff(np.concatenate([[0], np.cumsum(kept)])[offsets])
                ids, chosen = ids[kept], None if chosen is None else chosen[kept]
        columns: dict[str, pa.Array] = {TOKENS: _lists(ids, lengths)}
        if chosen is not None:
            columns[MASK] = _lists(chosen, lengths)
        for other in batch.schema.names:
            if other not in used and other not in columns:
                columns[other] = batch.column(other)
        return pa.RecordBatch.from_pydict(columns)

    def _aligned(self, batch: pa.RecordBatch, name: str, lengths: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Values of a column that has one for each token."""
        values, there = _flat(batch.column(name), name)
        if (there != lengths).any():
            row = int(np.argmax(there != lengths))
            raise DataError(f"{name} has {there[row]} values for {lengths[row]} tokens (row {row} of its batch)")
        return values

    def __repr__(self) -> str:
        options = {"tokens": self.tokens, "mask": self.mask, "vocab_size": self.vocab_size}
        return f"SelectTokens({', '.join(f'{name}={value!r}' for name, value in options.items() if value is not None)})"


def has_mask(schema: pa.Schema) -> bool:
    """True if `SelectTokens` finds a mask of supervised tokens in such rows."""
    labelled = LABELS in schema.names and is_token_list(schema.field(LABELS).type)
    return labelled or mask_column(schema) is not None


def _flat(column: pa.Array, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    values = column.flatten()
    if column.null_count or values.null_count:
        raise DataError(f"{name} holds nulls, in place of a list or of a number in one; remove these rows")
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return values.to_numpy(zero_copy_only=False), lengths


def _supervised(
    ids: npt.NDArray[Any], labels: npt.NDArray[Any], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    chosen: npt.NDArray[np.bool_] = labels != _IGNORED
    other = chosen & (labels != ids)
    if other.any():
        place = int(np.argmax(other))
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        raise DataError(
            f"labels are not the input ids: row {row} of its batch has label {labels[place]} for the id {ids[place]}; "
            "labels may be the ids themselves or -100 here (labels that are shifted by one, or those of an encoder and "
            "decoder, are another kind of data)"
        )
    return chosen


def _lists(values: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values)))
