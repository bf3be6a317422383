"""Datasets of samples: columns, a list that becomes columns, or an object that is read sample by sample."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.filesystems import local_or_none
from penstock.files.listing import PathLike
from penstock.loaders.samples.columns import EXAMINED_ROWS, SampleColumns, columns_of_samples, columns_of_table, some_of
from penstock.loaders.samples.schema import Objective, SampleSchema, array_of, read_schema
from penstock.memory import MemoryBudget, format_bytes, object_nbytes
from penstock.memory.cache import LRUCache
from penstock.pipeline.prefetch import map_ahead
from penstock.sources.by_suffix import SourceFiles, find_source
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.lakes.base import LakeSource
from penstock.sources.lakes.lookup import open_lake
from penstock.sources.saved_dataset import SavedDatasetSource
from penstock.sources.tables import readable, refuse_splits
from penstock.store import Store, open_store
from penstock.store.foreign.lookup import is_token_file
from penstock.store.manifest import is_bucket_store, is_store, refuse_remote_store

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
_MOST_COLUMN_BYTES = 1 << 30
"""Most bytes of the columns of a list, without a budget."""
_TRIED = 64
"""Samples by which the size of a list is estimated."""
_CHUNK = 256
_TABLE_ROWS = 1 << 16
_OWNER = attrgetter("base")
"""Array that owns the memory of a view; None if it is no view."""


class SampleDataset:
    """Samples by number."""

    rows: int
    name: str

    @property
    def identity(self) -> str:
        """Fingerprint of the samples, as far as that is possible without reading them."""
        return f"{self.rows} rows"

    def columns(self) -> SampleColumns | None:
        """All samples as columns; None if they have to be fetched one by one."""
        raise NotImplementedError

    def fetch(self, rows: Ints) -> SampleColumns:
        """Some samples as columns."""
        raise NotImplementedError

    @property
    def labels_by_token(self) -> bool:
        """True if labels are token-wise."""
        columns = self.columns()
        return columns is not None and "labels" in columns.by_token

    def lengths(self) -> Ints:
        """Number of tokens of every sample."""
        columns = self.columns()
        assert columns is not None
        if columns.ids is None:
            raise self._no_lengths()
        return columns.lengths

    @property
    def has_tokens(self) -> bool:
        """True if samples have `input_ids`."""
        columns = self.columns()
        return columns is not None and columns.ids is not None

    @property
    def one_by_one(self) -> bool:
        """True if samples are fetched one by one, as far as that is decided."""
        return False

    def _no_lengths(self) -> ConfigError:
        return ConfigError(
            f"bucket_by_length needs input_ids, which samples of {self.name} do not have; use bucket_by_length=False"
        )

    def check_unchanged(self) -> None:
        """Refuse a dataset whose length has changed."""

    def close(self) -> None:
        """Release memory."""


class ColumnarDataset(SampleDataset):
    """Samples that are columns."""

    def __init__(
        self,
        read: Callable[[], pa.Table],
        rows: int,
        name: str,
        objective: Objective,
        keep: frozenset[str],
        *,
        identity: str | None = None,
    ) -> None:
        self.rows, self.name = rows, name
        self._read, self._objective, self._keep, self._identity = read, objective, keep, identity
        self._columns: SampleColumns | None = None

    @property
    def identity(self) -> str:
        if self._identity is None:
            digest = xxhash.xxh3_64()
            self.columns().identity(digest.update)
            self._identity = f"{self.rows} rows {digest.hexdigest()}"
        return self._identity

    def columns(self) -> SampleColumns:
        if self._columns is None:
            table = self._read()
            if not isinstance(table, pa.Table):
                raise SchemaError(
                    f"to_columns() of {self.name} must return a pyarrow.Table, got {type(table).__name__}"
                )
            if table.num_rows != self.rows:
                raise DataError(f"{self.name} has {self.rows} samples, and its columns {table.num_rows} rows")
            self._columns = columns_of_table(table, self._objective, self._keep)
        return self._columns

    def fetch(self, rows: Ints) -> SampleColumns:
        raise NotImplementedError("columns are never fetched")

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes: the columns without their source."""
        self.columns()
        return self.__dict__ | {"_read": None}


class FetchedDataset(SampleDataset):
    """Samples that are fetched one by one, by any number of threads."""

    def __init__(self, dataset: Any, objective: Objective, keep: frozenset[str], cache: LRUCache[Any] | None) -> None:
        self.dataset, self.rows, self.name = dataset, length_of(dataset), type(dataset).__name__
        self._objective, self._keep, self._cache = objective, keep, cache
        self._schema: SampleSchema | None = None
        self._lengths: Ints | None = None
        self._share_memory = SharedMemoryCheck()
        self.copies = False
        """True once samples were found to share memory: their arrays are copied as they come."""

    @property
    def identity(self) -> str:
        return name_of(self.dataset, self.rows)

    @property
    def schema(self) -> SampleSchema:
        """Schema by row 0, and by the next rows where that is ambiguous."""
        if self._schema is None:
            others = map(self._sample, range(1, min(self.rows, EXAMINED_ROWS + 1)))
            self._schema = read_schema(self._sample(0), self._objective, self._keep, others)
        return self._schema

    @property
    def labels_by_token(self) -> bool:
        kind = self.schema.kinds.get("labels")
        return kind is not None and kind.role == "tokens"

    @property
    def has_tokens(self) -> bool:
        return self.schema.has_tokens

    @property
    def one_by_one(self) -> bool:
        return True

    def columns(self) -> SampleColumns | None:
        return None

    def fetch(self, rows: Ints) -> SampleColumns:
        numbers: list[int] = rows.tolist()
        samples = [self._kept(row) for row in numbers]
        if not self.copies and self._cache is None and self._share_memory(samples, self.schema.kinds):
            self.copies = True  # what the first samples held is lost
            samples = [self._kept(row) for row in numbers]
        return columns_of_samples(samples, self.schema, numbers.__getitem__)

    def lengths(self) -> Ints:
        """Lengths of `dataset.lengths`, or of all samples, which are read once."""
        if self._lengths is None:
            if not self.has_tokens:
                raise self._no_lengths()
            given = getattr(self.dataset, "lengths", None)
            given = given() if callable(given) else given
            if given is not None:
                found = np.asarray(given).astype(np.int64)
                if found.shape != (self.rows,):
                    raise DataError(f"{self.name}.lengths has shape {found.shape}, expected ({self.rows},)")
            else:
                logger.info(
                    "%s: reading all %d samples once for their lengths; a `lengths` attribute of the dataset, or "
                    "to_columns(), avoids that",
                    self.name,
                    self.rows,
                )
                _ = self.schema
                ranges = (np.arange(low, min(low + _CHUNK, self.rows)) for low in range(0, self.rows, _CHUNK))
                found = np.concatenate(list(map_ahead(lambda rows: self.fetch(rows).lengths, ranges)))
            self._lengths = found
        return self._lengths

    def check_unchanged(self) -> None:
        now = length_of(self.dataset)
        if now != self.rows:
            raise DataError(
                f"{self.name} had {self.rows} samples when the loader was made, it has {now} now; make a new one: the "
                "order depends on their number"
            )

    def _kept(self, row: int) -> Any:
        if self._cache is None:
            return own_arrays(self._sample(row)) if self.copies else self._sample(row)
        return self._cache.get_or_build(
            row, lambda: own_arrays(_plain(self._sample(row), row, self.schema)), object_nbytes
        )

    def _sample(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except Exception as error:
            if isinstance(error, DataError) and error.row is not None:
                raise
            raise DataError(
                f"row {row} of {self.name} could not be fetched: {type(error).__name__}: {error}", row=row
            ) from error

    def close(self) -> None:
        if self._cache is not None:
            self._cache.clear()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without the cache."""
        return self.__dict__ | {"_cache": None}


class ListDataset(FetchedDataset):
    """List of samples, converted to columns on first use if they fit into memory."""

    def __init__(self, dataset: Sequence[Any], objective: Objective, keep: frozenset[str], budget: MemoryBudget | None):
        super().__init__(dataset, objective, keep, None)
        self._budget = budget
        self._tried = self._too_large = False
        self._columns: SampleColumns | None = None

    @cached_property
    def identity(self) -> str:
        """Fingerprint of some of the samples."""
        digest, named = xxhash.xxh3_64(), name_of(self.dataset, self.rows)
        if not self.rows:
            return named
        try:
            self.fetch(some_of(self.rows)).identity(digest.update)
        except (DataError, SchemaError):
            return named  # the batch with that sample raises the error
        return f"{named} {digest.hexdigest()}"

    @property
    def one_by_one(self) -> bool:
        return self._too_large

    def columns(self) -> SampleColumns | None:
        if not self._tried:
            most = _MOST_COLUMN_BYTES if self._budget is None else self._budget.available // 2
            tried = self.fetch(np.arange(min(self.rows, _TRIED)))
            needed = tried.nbytes * self.rows // max(tried.rows, 1)
            self._too_large = needed > most
            if self._too_large:
                logger.info(
                    "a list of %d samples is read one by one: its columns would take about %s, %s are available",
                    self.rows,
                    format_bytes(needed),
                    format_bytes(most),
                )
            else:
                self._columns = columns_of_samples(self.dataset, self.schema)
                if self._budget is not None:
                    self._budget.hold("columns", self._columns.nbytes, by=self)
                logger.info(
                    "a list of %d samples was converted to columns of %s; later changes to it have no effect",
                    self.rows,
                    format_bytes(self._columns.nbytes),
                )
            self._tried = True
        return self._columns

    def close(self) -> None:
        if self._budget is not None:
            self._budget.hold("columns", 0, by=self)
        self._columns, self._tried = None, False

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_budget": None}


def name_of(dataset: Any, rows: int) -> str:
    """Fingerprint of a dataset without reading it: its own, if it has one."""
    for name in ("fingerprint", "_fingerprint"):
        found = getattr(dataset, name, None)
        if isinstance(found, str):
            return f"{rows} rows {found}"
    return f"{rows} rows"


def length_of(dataset: Any) -> int:
    try:
        rows = len(dataset)
    except TypeError as error:
        raise ConfigError(f"{type(dataset).__name__} has no length: {error}") from None
    return rows


def own_arrays(value: Any) -> Any:
    """The sample with arrays of its own: a dataset may reuse its buffers, and a loop may change what it gets."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) is dict:
        return {name: own_arrays(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(own_arrays, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*map(own_arrays, value))
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "clone"):
        return value.clone()
    return value


class SharedMemoryCheck:
    """Finds samples that share memory: a dataset may fill one buffer, or one list, again and again."""

    def __call__(self, samples: list[Any], names: Iterable[str]) -> bool:
        """True if two samples have the same list, or arrays that begin at the same place."""
        if set(map(type, samples)) != {dict} and not all(isinstance(sample, Mapping) for sample in samples):
            return False  # an error, which names the row, when they become columns
        return any(self._shared([sample.get(name) for sample in samples]) for name in names)

    def _shared(self, values: list[Any]) -> bool:
        first = values[0]
        if hasattr(first, "data_ptr"):  # of torch
            return len({each.data_ptr() for each in values if hasattr(each, "data_ptr")}) < len(values)
        if set(map(type, values)) != {np.ndarray}:
            return isinstance(first, (np.ndarray, list, dict)) and len(set(map(id, values))) < len(values)
        owners = set(map(id, map(_OWNER, values)))
        if owners == {id(None)}:
            owners = set(map(id, values))  # no views
        if len(owners) == len(values):
            return False
        return len({each.__array_interface__["data"][0] for each in values}) < len(values)


def _plain(sample: Any, row: int, schema: SampleSchema) -> Any:
    """The sample with NumPy arrays: lazy arrays can only be computed in the thread that made them."""
    if not isinstance(sample, Mapping):
        return sample
    kinds = schema.kinds
    plain = dict(sample)
    for name, value in sample.items():
        if name in kinds and kinds[name].role != "meta" and (array := array_of(name, value, row)) is not None:
            plain[name] = array
    return plain


def as_sample_dataset(
    dataset: Any,
    objective: Objective,
    *,
    keep: frozenset[str] = frozenset(),
    cache_bytes: int = 0,
    budget: MemoryBudget | None = None,
) -> SampleDataset:
    """Dataset of anything that a loader takes."""
    if isinstance(dataset, (str, os.PathLike)):
        refuse_remote_store(dataset)
        local = local_or_none(dataset)
        stored = is_bucket_store(dataset) if local is None else is_store(local) or is_token_file(local)
        dataset = open_store(dataset) if stored else _table_at(dataset)
    refuse_splits(dataset)
    if isinstance(dataset, Store):
        return _of_store(dataset, objective, keep)
    if isinstance(dataset, Mapping) or hasattr(dataset, "__arrow_c_stream__"):
        table = _table_of(dataset)
        return ColumnarDataset(lambda: table, table.num_rows, "table", objective, keep)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"a dataset needs __len__ and __getitem__, {type(dataset).__name__} lacks them; iterables are for "
            "StreamingPipeline"
        )
    if getattr(type(dataset), "__getitem__", None) in (list.__getitem__, tuple.__getitem__):
        return ListDataset(dataset, objective, keep, budget)
    read = _columns_of(dataset)
    if read is not None:
        rows = length_of(dataset)
        named = name_of(dataset, rows)
        identity = named if named != name_of(None, rows) else None  # else that of the columns
        return ColumnarDataset(read, rows, type(dataset).__name__, objective, keep, identity=identity)
    cache: LRUCache[Any] | None = None
    if cache_bytes:
        # Every epoch uses each sample once: evicting would remove a sample just before its next use.
        cache = LRUCache(cache_bytes, budget=budget, owner="samples", evict=False)
    return FetchedDataset(dataset, objective, keep, cache)


def _table_at(path: PathLike) -> pa.Table:
    """Columns of Arrow and Parquet files, and of a saved dataset of Hugging Face."""
    try:
        found = open_lake(path) or find_source(path)
    except (FileNotFoundError, ConfigError) as error:
        raise ConfigError(f"{os.fspath(path)!r} is not a token store: {error}") from error
    if isinstance(found, LakeSource):
        return _all_rows(found)
    if not isinstance(found, SourceFiles) or found.kind not in (ArrowSource, ParquetSource, SavedDatasetSource):
        raise ConfigError(
            f"{os.fspath(path)!r} is not a token store, nor Parquet or Arrow files with columns of tokens; make a "
            "store with penstock.prepare, or pass a dataset, a table, or a list of samples"
        )
    return _all_rows(found.open())


def _all_rows(source: Any) -> pa.Table:
    batches = list(iter(lambda: source.next_batch(_TABLE_ROWS), None))
    return pa.Table.from_batches(batches, source.schema)


def _columns_of(dataset: Any) -> Callable[[], pa.Table] | None:
    """Function that reads a dataset as columns; None if it has none, or if samples differ from the columns."""
    if getattr(dataset, "transform", None) is not None:
        return None  # it applies to samples
    if callable(getattr(dataset, "to_columns", None)):
        return cast("Callable[[], pa.Table]", dataset.to_columns)
    if callable(getattr(dataset, "with_format", None)) and hasattr(dataset, "features"):
        if getattr(dataset, "format", {}).get("type") == "custom":
            return None  # a function is applied to each sample
        return lambda: pa.table(dataset.with_format("arrow")[:])
    return None


def _table_of(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return readable(data).slice()
    try:
        columns = {name: _column(value) for name, value in data.items()} if isinstance(data, Mapping) else data
        return readable(pa.table(columns)).slice()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SchemaError(
            f"{type(data).__name__} cannot be read as columns: {error}; pass a list of samples, or a mapping of names "
            "to columns of one length"
        ) from None


def _column(values: Any) -> Any:
    """Values for Arrow: arrays of several dimensions become nested lists."""
    if not isinstance(values, np.ndarray) or values.ndim < 2:
        return values
    column = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in values.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _of_store(store: Store, objective: Objective, keep: frozenset[str]) -> ColumnarDataset:
    column = store.manifest.tokens_column
    if column is None:
        raise SchemaError(f"{store.shown} has no tokens; prepare it with a tokenizer")

    def read() -> pa.Table:
        table = pa.Table.from_batches(store.batches(), schema=store.schema)
        names = ["input_ids" if name == column else name for name in table.column_names]
        return table.rename_columns(names)

    digest = xxhash.xxh3_64()
    for shard in store.manifest.shards:
        digest.update(f"{shard.name} {shard.index_checksum}\n".encode())
    return ColumnarDataset(read, len(store), store.shown, objective, keep, identity=digest.hexdigest())
