"""The job in Polars: scan_ndjson to sink_parquet on the streaming engine."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from job import MAX_WORDS, MIN_WORDS, WRITE_ROWS, ZSTD, tidy_row

from engines import Work

_NEW = pl.Struct({"text": pl.String, "words": pl.Int64})


def vector(source: Path, output: Path) -> Work:
    return _sink(_vector_plan(source), output, row_group_rows=None)


def vector_small_groups(source: Path, output: Path) -> Work:
    return _sink(_vector_plan(source), output, row_group_rows=WRITE_ROWS)


def row(source: Path, output: Path) -> Work:
    return _sink(_row_plan(source), output, row_group_rows=None)


def row_small_groups(source: Path, output: Path) -> Work:
    return _sink(_row_plan(source), output, row_group_rows=WRITE_ROWS)


def _vector_plan(source: Path) -> pl.LazyFrame:
    return (
        pl.scan_ndjson(source)
        .with_columns(pl.col("text").str.to_lowercase())
        .with_columns(pl.col("text").str.count_matches(r"\S+").alias("words"))
    )


def _row_plan(source: Path) -> pl.LazyFrame:
    return (
        pl.scan_ndjson(source)
        .with_columns(pl.col("text").map_batches(_tidy, return_dtype=_NEW, is_elementwise=True).alias("new"))
        .drop("text")
        .unnest("new")
    )


def _tidy(texts: pl.Series) -> pl.Series:
    rows = [tidy_row({"text": text}) for text in texts.to_list()]
    columns = {"text": [row["text"] for row in rows], "words": [row["words"] for row in rows]}
    return pl.DataFrame(columns, schema={"text": pl.String, "words": pl.Int64}).to_struct("new")


def _sink(plan: pl.LazyFrame, output: Path, row_group_rows: int | None) -> Work:
    kept = plan.filter(pl.col("words").is_between(MIN_WORDS, MAX_WORDS))
    return lambda: kept.sink_parquet(output, engine="streaming", row_group_size=row_group_rows, **ZSTD)
