"""Lines of JSON, as a pipeline reads them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from penstock.errors import DataError
from penstock.sources import CsvSource, JsonlSource

FOLDER = Path(tempfile.mkdtemp(prefix="penstock-fuzz-"))


def run(data: bytes) -> None:
    read(JsonlSource, "rows.jsonl", data)
    read(JsonlSource, "rows.jsonl", data, mixed="json")


def read(kind: type[JsonlSource | CsvSource], name: str, data: bytes, **options: Any) -> None:
    """All rows, without those that are refused by name; each batch must be sound."""
    (FOLDER / name).write_bytes(data)
    source = kind(FOLDER / name, allow_empty=True, **options)
    last: tuple[int | None, str] | None = None
    try:
        while True:
            try:
                batch = source.next_batch(1000)
            except DataError as error:
                if error.row is None:
                    raise
                if last == (error.row, error.reason):  # of the rest of the file, not of a row
                    source.skip_file()
                last = error.row, error.reason
                continue
            if batch is None:
                return
            batch.validate(full=True)
            batch.to_pylist()
    finally:
        source.close()
