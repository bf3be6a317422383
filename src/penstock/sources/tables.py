"""Tables that are read slice by slice: Arrow's newer layouts, and the datasets of Hugging Face.

They have what a source needs of a `pyarrow.Table`: `schema`, `num_rows`, `nbytes` and `slice`.
"""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa

from penstock.errors import ConfigError

_DATASETS = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")


class Rows(Protocol):
    """Rows by number, as Arrow data."""

    @property
    def schema(self) -> pa.Schema: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def slice(self, offset: int = 0, length: int | None = None) -> pa.Table: ...


def readable(table: pa.Table) -> Rows:
    """The table without metadata; its slices have types that all of Arrow's functions know, which views are not."""
    table = table.replace_schema_metadata(None)
    wanted = pa.schema([field.with_type(_without_views(field.type)) for field in table.schema])
    return table if wanted.equals(table.schema) else CastRows(table, wanted)


class CastRows:
    """A table whose slices are converted when they are taken."""

    def __init__(self, table: pa.Table, schema: pa.Schema) -> None:
        self._table, self.schema = table, schema
        self.num_rows, self.nbytes = int(table.num_rows), int(table.nbytes)

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        return self._table.slice(offset, length).cast(self.schema)


class DatasetRows:
    """Rows of a `datasets.Dataset`, in the order of its index mapping."""

    def __init__(self, dataset: Any) -> None:
        self._view = dataset.with_format("arrow")
        stored = dataset.data.table
        self.schema = stored.select(dataset.column_names).schema.remove_metadata()
        self.num_rows = len(dataset)
        self.nbytes = int(stored.nbytes * self.num_rows // max(stored.num_rows, 1))

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        stop = self.num_rows if length is None else min(self.num_rows, offset + length)
        if offset >= stop:
            return self.schema.empty_table()
        table = self._view[offset:stop].select(self.schema.names)
        return table.replace_schema_metadata(None).cast(self.schema)


def dataset_rows(dataset: Any) -> Rows:
    """Rows of a `datasets.Dataset`: its Arrow data, without a copy if it has no index mapping."""
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "the dataset has a function that changes rows when they are read (set_transform, with_transform), and here "
            "its Arrow data is read; apply the function with dataset.map(...), or remove it with "
            "dataset.with_format(None)"
        )
    if dataset._indices is not None:
        return DatasetRows(dataset)
    return readable(dataset.data.table.select(dataset.column_names))


def refuse_splits(data: Any) -> None:
    """Refuse several datasets at once: they are splits of one, such as training and test data."""
    if kind_of(data) in ("DatasetDict", "IterableDatasetDict") or (
        isinstance(data, dict) and data and all(kind_of(each) is not None for each in data.values())
    ):
        names = [str(name) for name in data]
        raise ConfigError(f"the input has the splits {names}; pass one of them, such as data[{names[0]!r}]")


def _without_views(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind):
        inner = _without_views(kind.value_type)
        return kind if inner == kind.value_type else inner
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    wide = pa.types.is_large_list(kind) or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    if wide or pa.types.is_list(kind):
        inner = kind.value_field.with_type(_without_views(kind.value_type))
        return pa.large_list(inner) if wide else pa.list_(inner)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), kind.list_size)
    return kind


def kind_of(data: Any) -> str | None:
    """Class of an object of Hugging Face's `datasets`: `Dataset`, `IterableDataset`, `DatasetDict` ...; or None."""
    for kind in type(data).__mro__:
        if kind.__module__.partition(".")[0] == "datasets" and kind.__name__ in _DATASETS:
            return kind.__name__
    return None
