"""Directories of Hugging Face's `save_to_disk`: Arrow files, and JSON that says which of them are the data.

    state.json            {"_data_files": [{"filename": "data-00000-of-00002.arrow"}, ...], ...}
    dataset_info.json     features, sizes
    dataset_dict.json     of a DatasetDict: {"splits": ["train", "test"]}, each a directory as above

Older releases also wrote an index mapping: the rows of the data in another order, or some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.listing import FoundFiles
from penstock.files.ranges.remote_file import InputFile
from penstock.files.remote import local_copy
from penstock.sources.memory import MemorySource
from penstock.sources.tables import Rows, readable

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_INDICES = ("_indices_data_files", "_indices_files")
_COLUMN = "indices"


def data_files(files: FoundFiles) -> FoundFiles:
    """The files without those that describe a saved dataset, and with no others than its state names."""
    places = dict(zip(zip(files.folders, (file.name for file in files)), files))
    for folder, name in places:
        if name == SPLITS and (splits := _read(places[folder, name]).get("splits")):
            where = "/".join(folder).replace("//", "/")
            raise ConfigError(f"{where} holds the splits {splits} of a dataset; pass one of them: {where}/{splits[0]}")
    saved = [folder for folder, name in places if name == STATE and (folder, INFO) in places]
    chosen = [(place, file) for place, file in places.items() if place[0] not in saved]
    for folder in saved:
        state = _read(places[folder, STATE])
        names = [str(each["filename"]) for key in ("_data_files", *_INDICES) for each in state.get(key) or ()]
        for name in names:
            if (folder, name) not in places:
                raise DataError(f"{STATE} names {name}, which is not there; save the dataset again", file=name)
        chosen += [((folder, name), places[folder, name]) for name in names]
    if not saved:
        return files
    return FoundFiles([file for _, file in chosen], files.base, [folder for (folder, _), _ in chosen])


def has_mapping(files: Sequence[InputFile]) -> bool:
    """True if some of the Arrow files are the index mapping of a saved dataset."""
    return any(file.name.startswith(_COLUMN) and _is_mapping(_mapped(file)) for file in files)


class SavedDatasetSource(MemorySource):
    """A saved dataset with an index mapping: memory-mapped files, whose rows are taken by the mapping."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow",)

    def __init__(self, files: Sequence[InputFile]) -> None:
        tables = [_mapped(file) for file in files]
        data = pa.concat_tables([table for table in tables if not _is_mapping(table)])
        order = pa.concat_tables([table for table in tables if _is_mapping(table)])
        super().__init__(data)
        self.files = list(files)
        self._made = MappedRows(readable(data), order.column(_COLUMN))

    def __reduce__(self) -> tuple[Any, ...]:
        return SavedDatasetSource, (self.files,)


class MappedRows:
    """Rows of a table in the order of an index mapping."""

    def __init__(self, table: Rows, order: pa.ChunkedArray) -> None:
        self._table, self._order = table.slice(), order
        self.schema, self.num_rows = table.schema, len(order)
        self.nbytes = int(table.nbytes * self.num_rows // max(table.num_rows, 1))

    def slice(self, offset: int = 0, length: int | None = None) -> pa.Table:
        return self._table.take(self._order.slice(offset, length))


def _is_mapping(table: pa.Table) -> bool:
    return bool(table.column_names == [_COLUMN])


def _mapped(file: InputFile) -> pa.Table:
    """A table in a mapped file; of a remote one, in its local copy."""
    try:
        return pa.ipc.open_stream(pa.memory_map(str(local_copy(file)))).read_all()
    except pa.ArrowException as error:
        raise DataError(f"it is no Arrow stream, as save_to_disk writes it: {error}", file=str(file)) from error


def _read(file: InputFile) -> dict[str, Any]:
    try:
        found = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"it is not JSON: {error}", file=str(file)) from None
    return found if isinstance(found, dict) else {}
