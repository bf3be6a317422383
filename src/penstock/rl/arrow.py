"""Rollouts as a record batch and back: how they go through files and queues. Nothing is lost, nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError, SchemaError
from penstock.rl.read.columns import JSON_ROLE, as_lists, narrow
from penstock.rl.table import RolloutTable
from penstock.types import Field, Schema

__all__ = ["ROLLOUT_SCHEMA", "from_json", "from_record_batch", "to_record_batch"]

NUMBERS = ("token_rewards", "logprobs", "ref_logprobs", "values")
ROLLOUT_SCHEMA = Schema(
    [
        Field("prompt_ids", "list<int64>", nullable=False),
        Field("response_ids", "list<int64>", nullable=False),
        Field("loss_mask", "list<bool>", nullable=False),
        Field("reward", "float64", nullable=False),
        Field("group", "string", role=JSON_ROLE.decode(), nullable=False),
        Field("policy_version", "int64"),
        Field("tokenized", "bool", nullable=False),
        Field("id", "string", nullable=False),
        Field("finish_reason", "string"),
        Field("metadata", "string", role=JSON_ROLE.decode(), nullable=False),
        *(Field(name, "list<float32>") for name in NUMBERS),
    ]
)
"""Groups and metadata are JSON text; a column of numbers that the table does not have is null throughout."""


def to_record_batch(table: RolloutTable) -> pa.RecordBatch:
    """The table with the columns of `ROLLOUT_SCHEMA`.

    Metadata has to be what JSON can hold. Arrays in it become lists, and tuples too; everything else comes back as it
    was.
    """
    arrays = {
        "prompt_ids": _lists(table.prompt_ids, np.int64),
        "response_ids": _lists(table.response_ids, np.int64),
        "loss_mask": _lists(table.loss_mask, np.bool_),
        "reward": pa.array(np.asarray(table.rewards, np.float64)),
        "group": pa.array([_dumped(group, row, table) for row, group in enumerate(table.groups.tolist())], pa.string()),
        "policy_version": pa.array(table.versions, pa.int64(), mask=table.versions < 0),
        "tokenized": pa.array(np.asarray(table.tokenized, np.bool_)),
        "id": pa.array(table.ids.tolist(), pa.string()),
        "finish_reason": pa.array(table.finish_reasons.tolist(), pa.string()),
        "metadata": pa.array([_told(row, table) for row in range(len(table))], pa.string()),
    }
    for name in NUMBERS:
        column = getattr(table, name)
        arrays[name] = pa.nulls(len(table), pa.list_(pa.float32())) if column is None else _lists(column, np.float32)
    schema = ROLLOUT_SCHEMA.to_arrow()
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def from_record_batch(batch: pa.RecordBatch) -> RolloutTable:
    """The table that `to_record_batch` made the batch of."""
    missing = [name for name in ROLLOUT_SCHEMA.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"not a batch of rollouts: it lacks {missing}, and has {batch.schema.names}; to_record_batch makes one, "
            "and read_rollouts reads other forms"
        )
    numbers = {name: _ragged(batch, name, "floats") for name in NUMBERS if batch[name].null_count < batch.num_rows}
    return RolloutTable(
        prompt_ids=narrow(_ragged(batch, "prompt_ids", "ids")),
        response_ids=narrow(_ragged(batch, "response_ids", "ids")),
        loss_mask=_ragged(batch, "loss_mask", "mask"),
        rewards=np.array(batch["reward"].to_numpy(zero_copy_only=False), np.float64),
        groups=_objects(from_json(batch["group"])),
        versions=np.array(batch["policy_version"].fill_null(-1).to_numpy(zero_copy_only=False), np.int64),
        tokenized=np.array(batch["tokenized"].to_numpy(zero_copy_only=False), np.bool_),
        ids=_objects(batch["id"].to_pylist()),
        finish_reasons=_objects(batch["finish_reason"].to_pylist()),
        metadata=_objects(from_json(batch["metadata"])),
        **numbers,
    )


def from_json(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values of a column of JSON text."""
    return [None if text is None else {} if text == "{}" else json.loads(text) for text in column.to_pylist()]


def _lists(ragged: Ragged, dtype: Any) -> pa.Array:
    start, end = int(ragged.offsets[0]), int(ragged.offsets[-1])
    if end - start >= 2**31:
        raise SchemaError(f"{end - start} tokens in one batch are too many; send fewer rollouts at a time")
    values = pa.array(ragged.values[start:end].astype(dtype, copy=False))
    return pa.ListArray.from_arrays(pa.array((ragged.offsets - start).astype(np.int32)), values)


def _ragged(batch: pa.RecordBatch, name: str, kind: Any) -> Ragged:
    lists = as_lists(pa.chunked_array([batch[name]]), kind)
    if len(lists.odd) or lists.missing.any():
        raise SchemaError(f"column {name!r} has null in some rows, and not in others; it is not of to_record_batch")
    return lists.ragged


def _told(row: int, table: RolloutTable) -> str:
    metadata = table.metadata[row]
    for key in metadata:
        if not isinstance(key, str):
            raise DataError(f"rollout {table.ids[row]!r}: the keys of metadata are text, got {key!r}", row=row)
    return _dumped(dict(metadata), row, table) if metadata else "{}"


def _dumped(value: Any, row: int, table: RolloutTable) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"rollout {table.ids[row]!r}: metadata and groups travel as JSON, and {value!r:.80} does not: {error}",
            row=row,
        ) from error


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _objects(cells: list[Any]) -> npt.NDArray[np.object_]:
    found = np.empty(len(cells), np.object_)
    found[:] = cells
    return found
