"""Engines of the speed suite; this list imports none of them.

Each file belongs to one engine. Its functions take the input and the output, prepare (plan, cluster), and return the
work; only the work is timed. There are two versions of the job: `vector` uses the best column operations of the engine,
`row` calls one Python function (`job.tidy_row`) per row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """Engine and its options. `vector` and `row` name a function: file.function."""

    name: str
    package: str
    vector: str | None = None
    row: str | None = None
    note: str = ""
    """Note for readers of the figures."""
    listens: bool = False
    """True if it opens ports on every interface and should run without a network."""

    def prepare(self, version: str, source: Path, output: Path) -> Work:
        """Import the engine and prepare everything but the work."""
        place = {"vector": self.vector, "row": self.row}[version]
        if place is None:
            raise ValueError(f"{self.name} has no {version} version")
        file, _, function = place.partition(".")
        return getattr(importlib.import_module(f"engines.{file}"), function)(source, output)


ENGINES = [
    Engine(
        name="penstock",
        package="penstock",
        vector="penstock.vector",
        row="penstock.row",
        note="budget 256 MiB, default config; row: workers='process', as the documentation advises",
    ),
    Engine(
        name="penstock-threads",
        package="penstock",
        row="penstock.row_in_threads",
        note="the default config for a function per row",
    ),
    Engine(
        name="polars",
        package="polars",
        vector="polars.vector",
        row="polars.row",
        note="str.count_matches, less CPU than str.split by a pattern; row: the function inside map_batches",
    ),
    Engine(
        name="polars-tuned",
        package="polars",
        vector="polars.vector_small_groups",
        row="polars.row_small_groups",
        note="as polars, with row groups of 10,000 rows: far less memory than by default",
    ),
    Engine(
        name="daft",
        package="daft",
        vector="daft.vector",
        row="daft.row",
        note="regexp_count; its zstd level cannot be set; row: one daft.func that returns both columns",
    ),
    Engine(
        name="datasets",
        package="datasets",
        vector="datasets.vector",
        row="datasets.row",
        note="streaming, with a ParquetWriter: its own to_parquet collects the whole stream and fixes the codec",
    ),
    Engine(
        name="duckdb",
        package="duckdb",
        vector="duckdb.vector",
        note="translate and string_split, faster than its regular expressions; knows only ASCII white space",
    ),
    Engine(
        name="pyarrow",
        package="pyarrow",
        vector="pyarrow.vector",
        note="a loop over open_json, blocks of 8 MiB; utf8_split_whitespace, faster than counting by a pattern",
    ),
    Engine(name="python", package="orjson", row="python.row", note="a loop over orjson.loads, one thread"),
    Engine(name="ray", package="ray", row="ray.row", note="read_json, map, filter, all by default", listens=True),
    Engine(
        name="ray-tuned",
        package="ray",
        row="ray.row_few_blocks",
        note="as ray, with 8 blocks instead of the 200 it chooses",
        listens=True,
    ),
]
