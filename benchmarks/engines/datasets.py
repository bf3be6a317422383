"""The job in Hugging Face datasets, streaming."""

from __future__ import annotations

from pathlib import Path

import datasets
from job import WRITE_ROWS, keep_row, tidy_row

from engines import Work
from engines.pyarrow import tidy_batch, write_parquet


def vector(source: Path, output: Path) -> Work:
    stream = _stream(source).with_format("arrow").map(tidy_batch, batched=True, batch_size=WRITE_ROWS // 5)
    return lambda: write_parquet(stream.iter(WRITE_ROWS), output)


def row(source: Path, output: Path) -> Work:
    stream = _stream(source).map(tidy_row).filter(keep_row).with_format("arrow")
    return lambda: write_parquet(stream.iter(WRITE_ROWS), output)


def _stream(source: Path) -> datasets.IterableDataset:
    return datasets.load_dataset("json", data_files=str(source), split="train", streaming=True)
