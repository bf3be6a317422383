"""Exact deduplication with penstock and with Polars, for `dedup.py`.

An engine is a function of the corpus. It returns the timed function, which returns the ids of the rows to drop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

__all__ = ["EXACT", "Dropped", "as_jsonl", "others", "penstock"]

Dropped = np.ndarray
"""Ids of the rows that an engine drops."""


def penstock_exact(path: Path) -> Callable[[], Dropped]:
    """Return only the ids: the text is not needed after hashing."""
    from penstock.transforms import Drop, ExactDedup

    dedup = ExactDedup("text")
    return penstock(path, [dedup.preparation(), Drop("text"), dedup])


def penstock_exact_rows(path: Path) -> Callable[[], Dropped]:
    from penstock.transforms import ExactDedup, dedup_stages

    return penstock(path, dedup_stages(ExactDedup("text")))


def penstock(path: Path, stages: list[Any], source: Any = None) -> Callable[[], Dropped]:
    from penstock import Pipeline, PipelineConfig
    from penstock.sources import ParquetSource

    first = pq.ParquetFile(path).read_row_group(0, columns=["id", "text"]).to_batches()[0]
    for stage in stages:
        first = stage.transform(first)  # compiled code is loaded here
    source = source or ParquetSource(path, columns=["id", "text"])
    pipeline = Pipeline(source, stages, config=PipelineConfig(workers=2))

    def work() -> Dropped:
        # Not `to_numpy`: its first call imports pandas, if installed, which should not be timed.
        kept = np.concatenate([np.from_dlpack(batch.column("id")) for batch in pipeline])
        return others(kept, pq.read_metadata(path).num_rows)

    return work


def polars_exact(path: Path) -> Callable[[], Dropped]:
    return _polars(path, lambda rows: _first(rows).select("id").collect())


def polars_exact_hash(path: Path) -> Callable[[], Dropped]:
    return _polars(path, lambda rows: _first_hash(rows).select("id").collect())


def polars_exact_rows(path: Path) -> Callable[[], Dropped]:
    return _polars(path, lambda rows: _first(rows).collect())


def polars_exact_rows_hash(path: Path) -> Callable[[], Dropped]:
    return _polars(path, lambda rows: _first_hash(rows).collect())


def polars_exact_batches(path: Path) -> Callable[[], Dropped]:
    import polars as pl

    return _polars(path, lambda rows: pl.concat([b.select("id") for b in _first(rows).collect_batches()]))


def _polars(path: Path, collect: Callable[[Any], Any]) -> Callable[[], Dropped]:
    import polars as pl

    def work() -> Dropped:
        kept = collect(pl.scan_parquet(path).select("id", "text")).get_column("id").to_numpy()
        return others(kept, pq.read_metadata(path).num_rows)

    return work


def _first(rows: Any) -> Any:
    return rows.unique(subset="text", keep="first", maintain_order=True)


def _first_hash(rows: Any) -> Any:
    import polars as pl

    return rows.filter(pl.col("text").hash().is_first_distinct())


def penstock_exact_file(path: Path) -> Callable[[], Dropped]:
    from penstock import Pipeline
    from penstock.sinks import ParquetSink
    from penstock.sources import JsonlSource
    from penstock.transforms import ExactDedup

    def write(target: Path) -> None:
        Pipeline(JsonlSource(as_jsonl(path)), [ExactDedup("text")], ParquetSink(target)).run()

    return _to_file(path, write)


def polars_exact_file(path: Path) -> Callable[[], Dropped]:
    import polars as pl

    return _to_file(path, lambda target: _first(pl.scan_ndjson(as_jsonl(path))).sink_parquet(target))


def polars_exact_file_fast(path: Path) -> Callable[[], Dropped]:
    """Write with the compression level of penstock; the default of Polars is higher."""
    import polars as pl

    return _to_file(
        path, lambda target: _first(pl.scan_ndjson(as_jsonl(path))).sink_parquet(target, compression_level=1)
    )


def _to_file(path: Path, write: Callable[[Path], None]) -> Callable[[], Dropped]:
    target = path.with_name("out") / "dedup-exact.parquet"
    target.parent.mkdir(exist_ok=True)
    target.unlink(missing_ok=True)

    def work() -> Dropped:
        write(target)
        kept = pq.read_table(target, columns=["id"]).column(0).to_numpy()
        return others(kept, pq.read_metadata(path).num_rows)

    return work


def others(kept: np.ndarray, rows: int) -> Dropped:
    missing = np.ones(rows, np.bool_)
    missing[kept] = False
    return np.flatnonzero(missing)


def as_jsonl(path: Path) -> Path:
    """Write ids and texts of the corpus as JSON Lines."""
    lines = path.with_suffix(".jsonl")
    if not lines.exists():
        import orjson

        partial = lines.with_suffix(".partial")
        with partial.open("wb") as file:
            for batch in pq.ParquetFile(path).iter_batches(columns=["id", "text"]):
                file.writelines(orjson.dumps(row) + b"\n" for row in batch.to_pylist())
        partial.rename(lines)
    return lines


EXACT: dict[str, tuple[str, Callable[[Path], Callable[[], Dropped]], int]] = {
    # suite, engine, maximum rows
    "penstock-exact": ("exact", penstock_exact, 1 << 40),
    "polars-exact": ("exact", polars_exact, 1 << 40),
    "polars-exact-hash": ("exact", polars_exact_hash, 1 << 40),
    "penstock-exact-rows": ("exact-rows", penstock_exact_rows, 1 << 40),
    "polars-exact-rows": ("exact-rows", polars_exact_rows, 1 << 40),
    "polars-exact-batches": ("exact-rows", polars_exact_batches, 1 << 40),
    "polars-exact-rows-hash": ("exact-rows", polars_exact_rows_hash, 1 << 40),
    "penstock-exact-short": ("exact-short", penstock_exact_rows, 1 << 40),
    "polars-exact-short": ("exact-short", polars_exact_rows, 1 << 40),
    "polars-exact-short-hash": ("exact-short", polars_exact_rows_hash, 1 << 40),
    "penstock-exact-file": ("exact-file", penstock_exact_file, 1 << 40),
    "polars-exact-file": ("exact-file", polars_exact_file, 1 << 40),
    "polars-exact-file-fast": ("exact-file", polars_exact_file_fast, 1 << 40),
}
