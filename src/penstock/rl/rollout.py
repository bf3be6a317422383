"""One rollout: a prompt, what the policy answered, and everything that is known of each token of it."""

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
from penstock.rl.read.columns import JSON_ROLE, as_lists, narrow
from penstock.types import Field, Schema

__all__ = ["ROLLOUT_SCHEMA", "Rollout", "RolloutTable", "from_json", "from_record_batch", "to_record_batch"]


Ids = Sequence[int] | npt.NDArray[Any]
Numbers = Sequence[float] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and a response, as token ids: what the engine generated is what is trained on.

    Text is there for those who have nothing else. It is tokenised only if there are no ids, and the batch says so:
    text that was decoded and encoded again is often not the tokens it came from.

    Everything per token belongs to the response and has its length.
    """

    prompt_ids: Ids | None = None
    response_ids: Ids | None = None
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    response: str | None = None
    reward: float | None = None
    """Of the whole response; None or NaN when there is none."""
    token_rewards: Numbers | None = None
    logprobs: Numbers | None = None
    """Of the policy that generated it."""
    ref_logprobs: Numbers | None = None
    values: Numbers | None = None
    loss_mask: Sequence[int] | npt.NDArray[Any] | None = None
    """0 for tokens that the policy did not write: tool results, observations. None: all are its own."""
    policy_version: int | None = None
    group: str | int | None = None
    """Rollouts of one prompt have the same. Where no rollout has one, equal prompts are a group."""
    finish_reason: str | None = None
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """N rollouts. Columns that nobody gave are None; a column that some gave, all have to give."""

    prompt_ids: Ragged
    response_ids: Ragged
    loss_mask: Ragged
    """bool, as long as the responses."""
    rewards: npt.NDArray[np.float64]
    """(N,) of the whole responses; NaN where there is none."""
    groups: npt.NDArray[np.object_]
    """(N,) names: str or int. Rollouts without a group have one of their own, `~17`, before a loader groups prompts."""
    versions: Ints
    """(N,) of the policy; -1 where it is not known."""
    tokenized: npt.NDArray[np.bool_]
    """(N,) whether the ids were made here, of text."""
    ids: npt.NDArray[np.object_]
    """(N,) names that are told in messages and metadata."""
    finish_reasons: npt.NDArray[np.object_]
    metadata: npt.NDArray[np.object_]
    """(N,) mappings, as they were given."""
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

    def take(self, rows: npt.ArrayLike) -> Self:
        """Some rollouts, in the order given."""
        chosen = np.asarray(rows, np.int64)
        columns = ((column.name, getattr(self, column.name)) for column in fields(self))
        return replace(self, **{name: _taken(column, chosen) for name, column in columns if column is not None})

    def rollout(self, row: int) -> Rollout:
        """One of them, its arrays views of the table's. That its ids were made of text is not part of it."""
        row = range(len(self))[row]
        reward, version = float(self.rewards[row]), int(self.versions[row])
        numbers = {name: getattr(self, name) for name in ("token_rewards", "logprobs", "ref_logprobs", "values")}
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
            **{name: column[row] for name, column in numbers.items() if column is not None},
        )

    def to_rollouts(self) -> list[Rollout]:
        """All of them, one by one."""
        return [self.rollout(row) for row in range(len(self))]

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """One after the other; all have the same columns."""
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
                count, others = sum(map(len, lacking)), sum(map(len, parts)) - sum(map(len, lacking))
                raise DataError(
                    f"{count} rollouts, the first of them {lacking[0].ids[0]!r}, have no {column.name}, and {others} "
                    "have; give it for all of them, or for none"
                )
            if lacking:
                found[column.name] = None
            elif isinstance(values[0], Ragged):
                found[column.name] = Ragged.joined(values)
            else:
                found[column.name] = np.concatenate(values)
        return cls(**found)


def _taken(column: Any, rows: Ints) -> Any:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


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
