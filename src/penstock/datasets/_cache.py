"""Tables that were made once, kept as Arrow files under a key of what they were made from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from penstock.errors import StalledError
from penstock.files.atomic import AtomicFile
from penstock.files.locking import FileLock

__all__ = ["kept_table"]

log = logging.getLogger(__name__)

VERSION = 1


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
            table = make()
            with AtomicFile(file) as target, pa.ipc.new_file(target.file, table.schema) as writer:
                writer.write_table(table)
            found = _read(file, rows)
            assert found is not None
    return found


def _read(file: Path, rows: int) -> pa.Table | None:
    if not file.is_file():
        return None
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        table.validate()
    except (pa.ArrowInvalid, OSError) as error:
        log.warning("%s is damaged (%s) and is made anew", file, error)
        return None
    if table.num_rows != rows:
        log.warning("%s has %d rows where %d are expected, and is made anew", file, table.num_rows, rows)
        return None
    return table
