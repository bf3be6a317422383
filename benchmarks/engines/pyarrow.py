"""The job with nothing but pyarrow: a loop over the batches of its JSON reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq
from job import MAX_WORDS, MIN_WORDS, ZSTD

from engines import Work

_BLOCK_BYTES = 8 << 20
Columns = TypeVar("Columns", pa.RecordBatch, pa.Table)


def vector(source: Path, output: Path) -> Work:
    options = pj.ReadOptions(block_size=_BLOCK_BYTES)
    return lambda: write_parquet(map(tidy_batch, pj.open_json(source, read_options=options)), output)


def tidy_batch(batch: Columns) -> Columns:
    """Split on white space: twice as fast as counting by a pattern, and it supports Unicode."""
    text = pc.utf8_lower(batch["text"])
    words = pc.list_value_length(pc.utf8_split_whitespace(pc.utf8_trim_whitespace(text)))
    tidied = batch.set_column(batch.schema.get_field_index("text"), "text", text).append_column("words", words)
    return tidied.filter(pc.and_(pc.greater_equal(words, MIN_WORDS), pc.less_equal(words, MAX_WORDS)))


def write_parquet(batches: Iterable[pa.RecordBatch | pa.Table], output: Path) -> None:
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(output, batch.schema, **ZSTD)
        writer.write(batch)
    if writer is not None:
        writer.close()
