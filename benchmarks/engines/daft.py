"""The job in Daft, on its native runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import daft
from daft.functions import lower, regexp_count
from job import MAX_WORDS, MIN_WORDS, tidy_row

from engines import Work

_NEW = daft.DataType.struct({"text": daft.DataType.string(), "words": daft.DataType.int64()})


def vector(source: Path, output: Path) -> Work:
    frame = daft.read_json(str(source)).with_column("text", lower(daft.col("text")))
    return _write(frame.with_column("words", regexp_count(daft.col("text"), r"\S+")), output)


def row(source: Path, output: Path) -> Work:
    untouched = [daft.col(name) for name in ("id", "lang", "score")]
    return _write(daft.read_json(str(source)).select(*untouched, _tidy(daft.col("text"))), output)


@daft.func(return_dtype=_NEW, unnest=True)
def _tidy(text: str) -> dict[str, Any]:
    return tidy_row({"text": text})


def _write(frame: daft.DataFrame, output: Path) -> Work:
    kept = frame.where(daft.col("words").between(MIN_WORDS, MAX_WORDS))
    return lambda: kept.write_parquet(str(output), compression="zstd")
