"""What a loader was given, told by what it can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, SchemaError
from penstock.files.places import local_or_none
from penstock.loaders._samples.kinds import Objective
from penstock.loaders._samples.origins import Columnar, Fetched, Listed, Origin, length_of, name_of
from penstock.memory import MemoryBudget
from penstock.memory.hot import HotCache
from penstock.store import Store, open_store
from penstock.store.manifest import is_store
from penstock.store.remote import refuse_remote_store

__all__ = ["open_origin"]


def open_origin(
    dataset: Any,
    objective: Objective,
    *,
    keep: frozenset[str] = frozenset(),
    cache_bytes: int = 0,
    budget: MemoryBudget | None = None,
) -> Origin:
    """What a loader was given, by what it can do."""
    if isinstance(dataset, (str, os.PathLike)):
        refuse_remote_store(dataset)
        local = local_or_none(dataset)
        if local is None or not is_store(local):
            raise ConfigError(
                f"{os.fspath(dataset)!r} is no token store; make one with penstock.prepare, or pass a dataset, a "
                "table, or a list of samples"
            )
        dataset = open_store(dataset)
    if isinstance(dataset, Store):
        return _of_store(dataset, objective, keep)
    if isinstance(dataset, Mapping) or hasattr(dataset, "__arrow_c_stream__"):
        table = _table_of(dataset)
        return Columnar(lambda: table, table.num_rows, "table", objective, keep)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a dataset has __len__ and __getitem__, and {type(dataset).__name__} has not; what can only be iterated "
            "is for StreamingPipeline"
        )
    if getattr(type(dataset), "__getitem__", None) in (list.__getitem__, tuple.__getitem__):
        return Listed(dataset, objective, keep, budget)
    read = _columns_of(dataset)
    if read is not None:
        rows = length_of(dataset)
        named = name_of(dataset, rows)
        told = named if named != name_of(None, rows) else None  # else the columns are looked at
        return Columnar(read, rows, type(dataset).__name__, objective, keep, identity=told)
    cache: HotCache[Any] | None = HotCache(cache_bytes, budget=budget, owner="samples") if cache_bytes else None
    return Fetched(dataset, objective, keep, cache)


def _columns_of(dataset: Any) -> Callable[[], pa.Table] | None:
    """How to read a dataset as columns, if it offers that and they are what its samples are."""
    if getattr(dataset, "transform", None) is not None:
        return None  # which is done to samples
    if callable(getattr(dataset, "to_columns", None)):
        return cast("Callable[[], pa.Table]", dataset.to_columns)
    if callable(getattr(dataset, "with_format", None)) and hasattr(dataset, "features"):
        if getattr(dataset, "format", {}).get("type") == "custom":
            return None  # a function is applied to what is asked for
        return lambda: pa.table(dataset.with_format("arrow")[:])
    return None


def _table_of(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    try:
        return pa.table({name: _column(value) for name, value in data.items()} if isinstance(data, Mapping) else data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SchemaError(
            f"{type(data).__name__} is taken as columns, and cannot be read as such: {error}; pass a list of samples, "
            "or a mapping of names to columns of one length"
        ) from None


def _column(values: Any) -> Any:
    """Values as Arrow takes them: an array of several dimensions is a row of lists."""
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _of_store(store: Store, objective: Objective, keep: frozenset[str]) -> Columnar:
    column = store.manifest.tokens_column
    if column is None:
        raise SchemaError(f"{store.shown} holds no tokens; prepare it with a tokenizer")

    def read() -> pa.Table:
        table = pa.Table.from_batches(store.batches(), schema=store.schema)
        names = ["input_ids" if name == column else name for name in table.column_names]
        return table.rename_columns(names)

    digest = xxhash.xxh3_64()
    for shard in store.manifest.shards:
        digest.update(f"{shard.name} {shard.index_checksum}\n".encode())
    return Columnar(read, len(store), store.shown, objective, keep, identity=digest.hexdigest())
