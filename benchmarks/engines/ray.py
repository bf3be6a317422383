"""The job in Ray Data, on a local cluster that is started before the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import ray.data
from job import ZSTD, keep_row, tidy_row

from engines import Work


def row(source: Path, output: Path) -> Work:
    return _rows(source, output)


def row_few_blocks(source: Path, output: Path) -> Work:
    return _rows(source, output, override_num_blocks=8)


def _rows(source: Path, output: Path, **options: Any) -> Work:
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def work() -> None:
        rows = ray.data.read_json(str(source), **options)
        rows.map(tidy_row).filter(keep_row).write_parquet(str(output), **ZSTD)

    return work
