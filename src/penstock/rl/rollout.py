"""Rollouts: one sample as users give it, a table of many as columns, and the table as an Arrow record batch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError, SchemaError
from penstock.types import Field, Schema

Ids = Sequence[int] | npt.NDArray[Any]
Numbers = Sequence[float] | npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

PER_TOKEN = ("token_rewards", "logprobs", "ref_logprobs", "values")
"""Optional columns with a number for each response token."""
JSON_ROLE = "rollout-json"
"""Role of columns that hold JSON text, in record batches of rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Prompt and response as token ids: the tokens that were generated are the tokens that are trained on.

    Text is tokenized only if there are no ids, and the batch says so: text that is decoded and encoded again often
    gives other tokens. Everything per token belongs to the response and has its length.
    """

    prompt_ids: Ids | None = None
    response_ids: Ids | None = None
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    response: str | None = None
    reward: float | None = None
    """Reward of the whole response; None or NaN if there is none."""
    token_rewards: Numbers | None = None
    logprobs: Numbers | None = None
    """Log-probabilities under the policy that generated the response."""
    ref_logprobs: Numbers | None = None
    values: Numbers | None = None
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None
    """0 for tokens that the policy did not generate: tool results, observations. None: 1 for all."""
    policy_version: int | None = None
    group: str | int | None = None
    """Name that rollouts of one prompt share. If no rollout has one, equal prompts are a group."""
    finish_reason: str | None = None
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """N rollouts as columns. An optional column is there for all rollouts, or None."""

    prompt_ids: Ragged
    response_ids: Ragged
    loss_mask: Ragged
    """bool, as long as the responses."""
    rewards: npt.NDArray[np.float64]
    """(N,) rewards of whole responses; NaN if there is none."""
    groups: npt.NDArray[np.object_]
    """(N,) names: str or int. A rollout without a group has its own, `~17`, until a loader groups prompts."""
    versions: Ints
    """(N,) policy versions; -1 if unknown."""
    tokenized: npt.NDArray[np.bool_]
    """(N,) True if the ids were made from text here."""
    ids: npt.NDArray[np.object_]
    finish_reasons: npt.NDArray[np.object_]
    metadata: npt.NDArray[np.object_]
    """(N,) mappings."""
    token_rewards: Ragged | None = None
    logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    values: Ragged | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> Ints:
        """(N,) tokens of prompt and response together."""
        return self.prompt_ids.lengths + self.response_ids.lengths

    @property
    def per_token(self) -> list[str]:
        """Names of the optional per-token columns that are there."""
        return [name for name in PER_TOKEN if getattr(self, name) is not None]

    def take(self, rows: npt.ArrayLike) -> Self:
        """Rollouts of these rows, in the order given."""
        chosen = np.asarray(rows, np.int64)
        taken: dict[str, Any] = {}
        for each in fields(self):
            if (column := getattr(self, each.name)) is not None:
                taken[each.name] = column.take(chosen) if isinstance(column, Ragged) else column[chosen]
        return replace(self, **taken)

    def rollout(self, row: int) -> Rollout:
        """One rollout; its arrays are views of the table's."""
        row = range(len(self))[row]
        reward, version = float(self.rewards[row]), int(self.versions[row])
        return Rollout(
            prompt_ids=self.prompt_ids[row],
            response_ids=self.response_ids[row],
            reward=None if np.isnan(reward) else reward,
            loss_mask=self.loss_mask[row],
            policy_version=None if version < 0 else version,
            group=self.groups[row],
            finish_reason=self.finish_reasons[row],
            id=self.ids[row],
            metadata=self.metadata[row],
            **{name: getattr(self, name)[row] for name in self.per_token},
        )

    def to_rollouts(self) -> list[Rollout]:
        """All rollouts, one by one."""
        return [self.rollout(row) for row in range(len(self))]

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """Rollouts of all tables, in order; all tables have the same columns."""
        given = list(tables)
        if not given:
            raise ValueError("there are no tables to join; give at least one")
        parts = [table for table in given if len(table)] or given[:1]
        if len(parts) == 1:
            return parts[0]
        found: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            lacking = [part for part, value in zip(parts, values) if value is None]
            if lacking and len(lacking) < len(parts):
                count = sum(map(len, lacking))
                raise DataError(
                    f"{count} rollouts, the first of them {lacking[0].ids[0]!r}, have no {column.name}, and "
                    f"{sum(map(len, parts)) - count} have; give it for all of them, or for none"
                )
            if lacking:
                found[column.name] = None
            else:
                found[column.name] = (Ragged.joined if isinstance(values[0], Ragged) else np.concatenate)(values)
        return cls(**found)

    @classmethod
    def empty(cls) -> Self:
        """Table of no rollouts."""
        ids, names = Ragged.of([], np.int64), np.empty(0, np.object_)
        flags, numbers = np.empty(0, np.bool_), np.empty(0, np.int64)
        return cls(ids, ids, Ragged.of([], np.bool_), np.empty(0), names, numbers, flags, names, names, names)


def objects(cells: Sequence[Any]) -> npt.NDArray[np.object_]:
    """Array of objects, one for each cell."""
    found = np.empty(len(cells), np.object_)
    found[:] = cells
    return found


def narrow_ids(ragged: Ragged) -> Ragged:
    """Ids as int32 if all of them fit, else as int64."""
    values = ragged.values
    if values.dtype == np.int32 or (len(values) and (values.max() > 2**31 - 1 or values.min() < -(2**31))):
        return ragged
    return Ragged(values.astype(np.int32), ragged.offsets)


# -- Arrow -------------------------------------------------------------------------------------------------------------

ROLLOUT_SCHEMA = Schema(
    [
        Field("prompt_ids", "list<int64>", nullable=False),
        Field("response_ids", "list<int64>", nullable=False),
        Field("loss_mask", "list<bool>", nullable=False),
        Field("reward", "float64", nullable=False),
        Field("group", "string", role=JSON_ROLE, nullable=False),
        Field("policy_version", "int64"),
        Field("tokenized", "bool", nullable=False),
        Field("id", "string", nullable=False),
        Field("finish_reason", "string"),
        Field("metadata", "string", role=JSON_ROLE, nullable=False),
        *(Field(name, "list<float32>") for name in PER_TOKEN),
    ]
)
"""Groups and metadata are JSON text; a per-token column that the table does not have is all null."""


def to_record_batch(table: RolloutTable) -> pa.RecordBatch:
    """Table with the columns of `ROLLOUT_SCHEMA`.

    Metadata must be JSON-able. Arrays and tuples in it become lists; everything else comes back unchanged.
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
        "metadata": pa.array([_dumped_metadata(row, table) for row in range(len(table))], pa.string()),
    }
    for name in PER_TOKEN:
        column = getattr(table, name)
        arrays[name] = pa.nulls(len(table), pa.list_(pa.float32())) if column is None else _lists(column, np.float32)
    schema = ROLLOUT_SCHEMA.to_arrow()
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def from_record_batch(batch: pa.RecordBatch) -> RolloutTable:
    """Table that `to_record_batch` made the batch from."""
    missing = [name for name in ROLLOUT_SCHEMA.names if name not in batch.schema.names]
    if missing:
        raise SchemaError(
            f"not a batch of rollouts: it lacks {missing}, and has {batch.schema.names}; make one with "
            "to_record_batch, or read other forms with read_rollouts"
        )
    return RolloutTable(
        prompt_ids=narrow_ids(_ragged(batch, "prompt_ids", np.int64)),
        response_ids=narrow_ids(_ragged(batch, "response_ids", np.int64)),
        loss_mask=_ragged(batch, "loss_mask", np.bool_),
        rewards=np.array(batch["reward"].to_numpy(zero_copy_only=False), np.float64),
        groups=objects(from_json(batch["group"])),
        versions=np.array(batch["policy_version"].fill_null(-1).to_numpy(zero_copy_only=False), np.int64),
        tokenized=np.array(batch["tokenized"].to_numpy(zero_copy_only=False), np.bool_),
        ids=objects(batch["id"].to_pylist()),
        finish_reasons=objects(batch["finish_reason"].to_pylist()),
        metadata=objects(from_json(batch["metadata"])),
        **{name: _ragged(batch, name, np.float32) for name in PER_TOKEN if batch[name].null_count < batch.num_rows},
    )


def from_json(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Values of a column of JSON text."""
    try:
        return [None if text is None else {} if text == "{}" else json.loads(text) for text in column.to_pylist()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"metadata and groups are stored as JSON, and one is not: {error}") from error


def _lists(ragged: Ragged, dtype: Any) -> pa.Array:
    values = ragged.flat
    if len(values) >= 2**31:
        raise SchemaError(f"{len(values)} tokens are too many for one batch; send fewer rollouts at a time")
    offsets = pa.array((ragged.offsets - ragged.offsets[0]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(values.astype(dtype, copy=False)))


def _ragged(batch: pa.RecordBatch, name: str, dtype: Any) -> Ragged:
    lists = batch[name]
    if lists.null_count or lists.values.null_count:
        raise SchemaError(f"column {name!r} has null in some rows, and not in others; it is not of to_record_batch")
    rows = Ragged.of_lists(lists)
    return Ragged(np.asarray(rows.values, dtype), rows.offsets)


def _dumped_metadata(row: int, table: RolloutTable) -> str:
    metadata = table.metadata[row]
    for key in metadata:
        if not isinstance(key, str):
            raise DataError(f"rollout {table.ids[row]!r}: keys of metadata must be text, got {key!r}", row=row)
    return _dumped(dict(metadata), row, table) if metadata else "{}"


def _dumped(value: Any, row: int, table: RolloutTable) -> str:
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"rollout {table.ids[row]!r}: metadata and groups are stored as JSON, which {value!r:.80} is not: {error}",
            row=row,
        ) from error


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
