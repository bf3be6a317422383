"""The job without an engine: a loop, orjson, and pyarrow as the writer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from job import WRITE_ROWS, keep_row, tidy_row

from engines import Work
from engines.pyarrow import write_parquet

_SCHEMA = pa.schema(
    [("id", pa.int64()), ("text", pa.string()), ("lang", pa.string()), ("score", pa.float64()), ("words", pa.int64())]
)


def row(source: Path, output: Path) -> Work:
    return lambda: write_parquet(_batches(source), output)


def _batches(source: Path) -> Iterator[pa.RecordBatch]:
    rows: list[dict[str, Any]] = []
    with source.open("rb") as file:
        for line in file:
            row = tidy_row(orjson.loads(line))
            if not keep_row(row):
                continue
            rows.append(row)
            if len(rows) == WRITE_ROWS:
                yield pa.RecordBatch.from_pylist(rows, _SCHEMA)
                rows = []
    yield pa.RecordBatch.from_pylist(rows, _SCHEMA)
