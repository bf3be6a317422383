"""Folders of Hugging Face's `save_to_disk` and `datasets.Dataset` objects whose rows are tokens, read where they are.

Lists of `input_ids` in memory-mapped Arrow files are what a shard of a store holds too. Rows that need a change are not
read in place: padded ones, masks given as `labels`, and rows in another order than the file's (`shuffle`, `select`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.ragged import is_any_list
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.store.foreign.base import ForeignOptions, check_ids, content_mark
from penstock.store.shards import ShardStamp

TOKEN_COLUMNS = ("input_ids", "tokens", "input_ids.npy", "tokens.npy", "npy")
"""Names of a column of tokens; those with an ending are members of WebDataset archives."""
MASK_COLUMNS = ("loss_mask", "assistant_masks", "completion_mask")
ATTENTION, LABELS = "attention_mask", "labels"
STATE, INFO = "state.json", "dataset_info.json"
_INDICES = ("_indices_data_files", "_indices_files")


def is_token_list(kind: pa.DataType) -> bool:
    """True for a column of lists of integers."""
    return is_any_list(kind) and bool(pa.types.is_integer(kind.value_type))


def token_column(schema: pa.Schema, wanted: str | None = None) -> str | None:
    """The column of tokens; None if there is none."""
    if wanted is not None:
        if wanted not in schema.names or not is_token_list(schema.field(wanted).type):
            raise SchemaError(f"tokens={wanted!r} is no column of lists of integers; there are {_columns(schema)}")
        return wanted
    found = [name for name in TOKEN_COLUMNS if name in schema.names and is_token_list(schema.field(name).type)]
    return found[0] if found else None


def mask_column(schema: pa.Schema, wanted: str | None = None) -> str | None:
    """The column of supervised tokens; None if there is none."""
    if wanted is not None:
        if wanted not in schema.names:
            raise SchemaError(f"mask={wanted!r} is no column; there are {_columns(schema)}")
        return wanted
    found = [name for name in MASK_COLUMNS if name in schema.names]
    if len(found) > 1:
        raise ConfigError(f"the rows have several masks, {', '.join(found)}; name one of them: mask={found[0]!r}")
    return found[0] if found else None


def saved_files(folder: Path) -> list[Path] | None:
    """Arrow files of a saved dataset in order; None if the folder is none, or its rows are in another order."""
    try:
        state = orjson.loads((folder / STATE).read_bytes())
        if not (folder / INFO).is_file() or not isinstance(state, dict):
            return None
        if any(state.get(key) for key in _INDICES):
            return None
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError(f"{STATE} names {name}, which is not there; save the dataset again", file=str(folder))
    return [folder / name for name in names]


def read_saved(files: Sequence[Path], options: ForeignOptions) -> list[ArrowTokens] | None:
    """Shards of the files of a saved dataset; None if they hold no tokens that can be read in place."""
    found = []
    for path in files:
        try:
            with pa.memory_map(str(path)) as file:
                stream = pa.ipc.open_stream(pa.BufferReader(file.read_buffer()))
            if (columns := columns_in_place(stream.schema, options)) is None:
                return None
            batches = [batch for batch in stream if batch.num_rows]
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"it is no Arrow stream, as save_to_disk writes it: {error}; save the dataset again", file=str(path)
            ) from error
        found.append(ArrowTokens(path, batches, *columns, schema=stream.schema, stamped=True))
    return found


def columns_in_place(schema: pa.Schema, options: ForeignOptions) -> tuple[str, str | None] | None:
    """Columns of tokens and mask; None if there are no tokens, or the rows need a change."""
    tokens = token_column(schema, options.get("tokens"))
    labelled = LABELS in schema.names and is_token_list(schema.field(LABELS).type)
    if tokens is None or (labelled and options.get("mask") is None):
        return None
    return tokens, mask_column(schema, options.get("mask"))


class ArrowTokens:
    """Record batches of rows with tokens, as one shard."""

    def __init__(
        self,
        path: Path,
        batches: Sequence[pa.RecordBatch],
        tokens: str,
        mask: str | None,
        *,
        schema: pa.Schema,
        stamped: bool,
    ) -> None:
        self.path, self._batches, self._stamped = path, list(batches), stamped
        self.token_name, self.mask_name = tokens, mask
        self.stamp = ShardStamp(*([path] if stamped else []))
        self._attention = ATTENTION if ATTENTION in schema.names else None
        kept = [name for name in schema.names if not (name == ATTENTION and is_token_list(schema.field(name).type))]
        self.schema = pa.schema([schema.field(name).remove_metadata() for name in kept])
        self.starts = [0, *np.cumsum([batch.num_rows for batch in self._batches]).tolist()]
        self.rows = int(self.starts[-1])
        parts = [self._lengths_of(number) for number in range(len(self._batches))]
        self.lengths: npt.NDArray[np.int32] = np.concatenate([np.zeros(0, np.int32), *parts])
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        masks = [_true(batch.column(mask).flatten()) for batch in self._batches] if mask is not None else None
        self.supervised = None if masks is None else sum(masks)
        self._limit: int | None = None
        self._unchecked = np.ones(len(self._batches), np.bool_)
        if self._batches:
            self._check(0)  # what is wrong with all rows is said when the data is opened

    @cached_property
    def mark(self) -> str:
        if self._stamped:
            return content_mark((self.path,))
        digest = xxhash.xxh3_128()
        for batch in self._batches:
            for name in filter(None, (self.token_name, self.mask_name)):
                column = batch.column(name)
                for buffer in (column.value_lengths(), column.flatten()):
                    for part in pa.concat_arrays([buffer]).buffers():
                        if part is not None:
                            digest.update(part)
        return digest.hexdigest()

    def limit_ids(self, vocab_size: int | None) -> None:
        self._limit = vocab_size
        self._unchecked[:] = True

    def find(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def batch(self, piece: int, *, mapped: bool = True) -> pa.RecordBatch:
        self.stamp.check()
        if self._unchecked[piece]:
            self._check(piece)
            self._unchecked[piece] = False
        return self._batches[piece].select(self.schema.names)

    @contextmanager
    def reading(self, row: int) -> Any:
        """The same as of a shard: errors of Arrow name the file."""
        try:
            yield
        except pa.ArrowException as error:
            raise DataError(str(error), file=str(self.path), row=row) from error

    def _lengths_of(self, piece: int) -> npt.NDArray[np.int32]:
        column = self._batches[piece].column(self.token_name)
        if column.null_count:
            row = self.starts[piece] + pc.index(pc.is_null(column), True).as_py()
            raise DataError(f"{self.token_name} is null; remove the row", file=str(self.path), row=row)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths.min() < 0 or lengths.max() > np.iinfo(np.int32).max):
            raise DataError("the lengths of its rows are damaged; save the dataset again", file=str(self.path))
        return np.asarray(lengths, np.int32)

    def _check(self, piece: int) -> None:
        """Check that Arrow's sizes hold, ids are in the vocabulary, nothing is padded, and the mask fits."""
        batch, first = self._batches[piece], self.starts[piece]
        with self.reading(first):
            batch.validate()
        column = batch.column(self.token_name)
        values = column.flatten()
        if values.null_count:
            raise DataError(f"{self.token_name} holds nulls among its ids", file=str(self.path), row=first)
        lengths = self.lengths[first : first + batch.num_rows].astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        check_ids(values.to_numpy(), offsets, self._limit, self.path, first)
        if self._attention is not None:
            self._check_attention(batch.column(self._attention), offsets, first)
        if self.mask_name is not None:
            sizes = batch.column(self.mask_name).value_lengths().to_numpy(zero_copy_only=False)
            if (sizes != lengths).any():
                row = int(np.argmax(sizes != lengths))
                raise DataError(
                    f"{self.mask_name} has {sizes[row]} values for {lengths[row]} tokens",
                    file=str(self.path),
                    row=first + row,
                )

    def _check_attention(self, column: pa.Array, offsets: npt.NDArray[np.int64], first: int) -> None:
        if not is_token_list(column.type) and not pa.types.is_boolean(getattr(column.type, "value_type", pa.null())):
            return
        attended = column.flatten().to_numpy(zero_copy_only=False) != 0
        if attended.all():
            return
        row = first + int(np.searchsorted(offsets, int(np.argmin(attended)), side="right")) - 1
        raise DataError(
            f"row {row} is padded: {ATTENTION} is 0 for some of its tokens, and padding is no text to train on; "
            "`penstock convert DATA OUT --to store` leaves it out",
            file=str(self.path),
            row=row,
        )


def _true(values: pa.Array) -> int:
    return int(np.count_nonzero(values.to_numpy(zero_copy_only=False)))


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
