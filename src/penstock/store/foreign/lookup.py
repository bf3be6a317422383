"""Recognition of token data of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from penstock._suggest import check_options
from penstock.errors import ConfigError, DataError
from penstock.store.foreign.base import ForeignOptions, ForeignReader, ForeignStore
from penstock.store.foreign.megatron import pair_at, read_megatron
from penstock.store.foreign.saved_dataset import STATE, ArrowTokens, columns_in_place, read_saved, saved_files
from penstock.store.foreign.token_file import read_token_file

_FLAT = frozenset({".bin"})
_MEGATRON, _TOKEN_FILE, _SAVED = "Megatron .bin and .idx", "flat .bin of tokens", "Hugging Face dataset of tokens"
_OPTIONS = {
    _MEGATRON: {"rows", "vocab_size"},
    _TOKEN_FILE: {"eot", "eot_side", "dtype", "vocab_size"},
    _SAVED: {"tokens", "mask", "vocab_size"},
}


def open_foreign(path: Path, shown: str | None = None, **options: Unpack[ForeignOptions]) -> ForeignStore | None:
    """The store over token data of another program at a path; None if there is none that can be read in place."""
    check_options(options, sorted(ForeignOptions.__annotations__))
    kind, readers = _MEGATRON, list[ForeignReader]()
    if (pair := pair_at(path)) is not None:
        readers = [read_megatron(*pair, options)]
        path = pair[0]
    elif path.suffix in _FLAT and path.is_file():
        kind, readers = _TOKEN_FILE, [read_token_file(path, options)]
    elif path.is_dir() and (files := saved_files(path)) is not None:
        kind, readers = _SAVED, [*(read_saved(files, options) or ())]
    if not readers:
        return None
    for name, value in options.items():
        if value is not None and name not in _OPTIONS[kind]:
            raise ConfigError(f"{name}={value!r} does not apply to {path} ({kind}); omit it")
    if not sum(reader.rows for reader in readers):
        raise DataError("there are no rows in it", file=str(path))
    chosen = options | _columns_of(readers[0])
    return ForeignStore(path.absolute(), readers, kind, chosen, shown)


def is_foreign(path: Path, *, alone: bool = False) -> bool:
    """True if a path names token data of another program that is read in place. Opens no large file.

    With `alone`, a dataset that has texts beside its tokens does not count: they may be meant.
    """
    if is_token_file(path):
        return True
    if not path.is_dir() or (files := saved_files(path)) is None or not files:
        return False
    schema = _schema_of(files[0])
    return schema is not None and columns_in_place(schema, {}) is not None and not (alone and has_texts(schema))


def refuse_archive(path: Path) -> None:
    """Refuse data of other programs that may hold tokens, but not in a form that can be read in place."""
    archive = path.is_file() and (".tar" in path.suffixes or path.suffix == ".tgz")
    if archive or any((path / name).is_file() for name in ("index.json", STATE)):
        raise ConfigError(
            f"{path} cannot be read in place; if it holds tokens, `penstock convert {path} OUT --to store` makes a "
            "store of it, and a loader that is given the path makes one in its cache"
        )


def is_token_file(path: Path) -> bool:
    """True if a path names files of Megatron, or a flat file of tokens."""
    return pair_at(path) is not None or (path.suffix in _FLAT and path.is_file())


def open_dataset(dataset: Any, **options: Unpack[ForeignOptions]) -> ForeignStore | None:
    """The store over a `datasets.Dataset` of tokens; None if its rows cannot be read in place."""
    if getattr(dataset, "_indices", None) is not None or dataset.format["type"] == "custom":
        return None  # rows in another order, or changed by a function when they are read
    table = dataset.data.table
    columns = columns_in_place(table.schema, options)
    if columns is None or not table.num_rows:
        return None
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    if any(_is_cut(batch.column(name)) for batch in batches for name in columns if name is not None):
        return None
    named = [Path(file["filename"]) for file in dataset.cache_files]
    path = named[0] if named else Path("dataset")
    reader = ArrowTokens(path, batches, *columns, schema=table.schema, stamped=False)
    return DatasetStore(dataset, path, reader, options | _columns_of(reader))


class DatasetStore(ForeignStore):
    """Rows of a `datasets.Dataset`. Pickling pickles the dataset, which names its files or carries its memory."""

    def __init__(self, dataset: Any, path: Path, reader: ArrowTokens, options: ForeignOptions) -> None:
        super().__init__(path, [reader], _SAVED, options, f"Dataset of {reader.rows} rows")
        self._dataset = dataset

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self._dataset, "options": dict(self._options)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = open_dataset(state["dataset"], **state["options"])
        assert found is not None
        self.__dict__.update(found.__dict__)


def has_texts(schema: pa.Schema) -> bool:
    """True if rows hold texts or messages."""
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    kinds = [getattr(field.type, "value_type", field.type) for field in schema]
    return any(not any(is_plain(kind) for is_plain in plain) for kind in kinds)


def _columns_of(reader: Any) -> ForeignOptions:
    if not isinstance(reader, ArrowTokens):
        return {}
    return {"tokens": reader.token_name, "mask": reader.mask_name}


def _schema_of(file: Path) -> pa.Schema | None:
    try:
        with pa.memory_map(str(file)) as opened:
            return pa.ipc.open_stream(opened).schema
    except (pa.ArrowException, OSError):
        return None


def _is_cut(column: Any) -> bool:
    """True for a slice, whose values do not begin where its buffer does."""
    return bool(column.offset or column.values.offset)
