"""Tables that were made once, kept as Arrow files under a key of what they were made from."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.datasets.frames import column_names, column_of
from penstock.errors import DataError, StalledError
from penstock.files.atomic import AtomicFile
from penstock.files.checksums import ARROW_TAIL, HashedFile, check_file
from penstock.files.locks import FileLock

__all__ = ["content_of", "digest_of", "kept_table"]

log = logging.getLogger(__name__)

VERSION = 2
_STRAY_SECONDS = 24 * 3600


def digest_of(columns: Mapping[str, pa.Array | npt.NDArray[Any] | None]) -> str:
    """What texts, ids and numbers are, as 32 hex digits: the same for the same values, however their arrays are cut."""
    digest = xxhash.xxh3_128()
    for name, column in columns.items():
        if column is None:
            continue
        if isinstance(column, np.ndarray):
            digest.update(f"{name} {column.dtype} {column.shape}\n".encode())
            digest.update(np.ascontiguousarray(column).data)
            continue
        digest.update(f"{name} {column.type} {len(column)}\n".encode())
        wide = column.cast(pa.large_binary() if pa.types.is_binary(column.type) else pa.large_string())
        _, offsets, data = wide.buffers()
        bounds = (
            np.frombuffer(offsets, np.int64, len(wide) + 1, 8 * wide.offset) if len(wide) else np.zeros(1, np.int64)
        )
        digest.update((bounds - bounds[0]).data)
        digest.update(memoryview(data or b"")[bounds[0] : bounds[-1]])
        if wide.null_count:
            digest.update(np.packbits(np.asarray(wide.is_null())).data)
    return digest.hexdigest()


def content_of(data: Any) -> str | None:
    """The digest of rows that are a table, whatever holds them; None for other rows and values that are not plain."""
    names = column_names(data)
    try:
        return digest_of({name: _digestible(column_of(data, name)) for name in names}) if names else None
    except (DataError, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        return None


def _digestible(column: pa.Array) -> pa.Array | npt.NDArray[Any]:
    """Numbers as they lie in memory: as texts they would take many times as long."""
    plain = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return column.to_numpy(zero_copy_only=False) if plain and not column.null_count else column


def kept_table(
    directory: Path, key: Mapping[str, Any], make: Callable[[], pa.Table], *, rows: int, wait_seconds: float = 3600.0
) -> pa.Table:
    """The table of that key, mapped from its file; if there is none, of all that ask at once one makes it.

    A file that is damaged, or has not `rows` rows, is made anew.
    """
    said = orjson.dumps({"version": VERSION, **key}, option=orjson.OPT_SORT_KEYS)
    name = xxhash.xxh3_128_hexdigest(said)
    file = directory / f"encoded-{name}.arrow"
    found = _read(file, rows)
    if found is not None:
        return found
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / f".encoded-{name}.lock") as lock:
        if not lock.acquire(wait_seconds):
            raise StalledError(f"{file} has been in the making for more than {wait_seconds:g} s by {lock.owner()}")
        found = _read(file, rows)
        if found is None:
            _remove_strays(directory, file)
            table = make()
            with AtomicFile(file) as target:
                hashed = HashedFile(target.file)
                with pa.ipc.new_file(hashed, table.schema) as writer:
                    writer.write_table(table)
                    hashed.cut()
                    hashed.hold()
                hashed.finish(ARROW_TAIL)
            found = _read(file, rows)
            assert found is not None
    return found


def _remove_strays(directory: Path, file: Path) -> None:
    """What killed writers left: of this file all, as its lock is ours; of others what nobody has touched for a day."""
    for stray in directory.glob(".encoded-*.tmp"):
        with contextlib.suppress(OSError):
            own = stray.name.startswith(f".{file.name}.")
            if own or time.time() - stray.stat().st_mtime > _STRAY_SECONDS:
                stray.unlink()


def _read(file: Path, rows: int) -> pa.Table | None:
    if not file.is_file():
        return None
    try:
        check_file(file, ARROW_TAIL)
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        table.validate()
    except (pa.ArrowInvalid, DataError, OSError) as error:
        log.warning("%s is damaged (%s) and is made anew", file, error)
        return None
    if table.num_rows != rows:
        log.warning("%s has %d rows where %d are expected, and is made anew", file, table.num_rows, rows)
        return None
    return table
