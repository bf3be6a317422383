from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.observe import Extent, Rates, lost_rows
from penstock.sources import IteratorSource, JsonlSource, MemorySource, ParquetSource


def at(seconds: float, rows: int, nbytes: int) -> dict[str, Any]:
    return {"seconds": seconds, "rows_in": rows, "bytes_in": nbytes}


def test_text_files_are_measured_in_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n')
    extent = Extent.of(JsonlSource(tmp_path))
    assert extent == Extent(files=2, file_bytes=18, rows=None, readable_bytes=18)
    assert extent.share(at(1, 1, 9)) == 0.5


def test_compressed_files_have_a_size_but_no_end_in_sight(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 100))
    extent = Extent.of(JsonlSource(path))
    assert extent == Extent(files=1, file_bytes=path.stat().st_size)
    assert extent.share(at(1, 50, 450)) is None


def test_columnar_files_are_measured_in_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(40)}), path)
    extent = Extent.of(ParquetSource(path))
    assert (extent.files, extent.rows, extent.readable_bytes) == (1, 40, None)
    assert extent.share(at(1, 10, 10_000)) == 0.25


def test_a_damaged_footer_is_left_to_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    assert Extent.of(ParquetSource(path)).rows is None


def test_data_in_memory_has_rows_and_an_iterator_nothing() -> None:
    assert Extent.of(MemorySource([{"a": 1}, {"a": 2}])) == Extent(rows=2)
    assert Extent.of(IteratorSource([{"a": 1}])) == Extent()


def test_a_missing_file_is_an_error_before_the_run() -> None:
    with pytest.raises(FileNotFoundError, match=r"'nope\.jsonl'"):
        Extent.of(JsonlSource("nope.jsonl"))


def test_share_never_passes_the_whole() -> None:
    assert Extent(rows=10).share(at(1, 11, 0)) == 1.0


def test_rates_are_those_of_the_last_seconds() -> None:
    rates = Rates(Extent(readable_bytes=10_000))
    for second in range(11):
        rates.add(at(float(second), 10 * second, 100 * second))
    for second in range(11, 31):
        rates.add(at(float(second), 100 + 20 * (second - 10), 1000 + 200 * (second - 10)))
    assert rates.rows_per_second == pytest.approx(20)
    assert rates.bytes_per_second == pytest.approx(200)
    assert rates.share == 0.5
    assert rates.seconds_left == pytest.approx(25)


def test_the_time_before_the_first_row_is_not_slowness() -> None:
    rates = Rates(Extent(readable_bytes=1000))
    for second in range(61):
        rates.add(at(float(second), 0, 0))  # the scan for the schema
    rates.add(at(61.0, 10, 100))
    assert rates.rows_per_second == pytest.approx(10)
    assert rates.seconds_left == pytest.approx(9)


def test_nothing_is_known_before_the_first_snapshot() -> None:
    rates = Rates(Extent(rows=5))
    assert (rates.share, rates.seconds_left, rates.rows_per_second) == (None, None, 0.0)


def test_rows_lost_rows_are_read_off_the_stages() -> None:
    stages = [
        {"kind": "source", "rows_in": 0, "rows_out": 0},
        {"kind": "decode", "rows_in": 100, "rows_out": 97},
        {"kind": "transform", "rows_in": 97, "rows_out": 90},
        {"kind": "transform", "rows_in": 90, "rows_out": 180},
        {"kind": "sink", "rows_in": 170, "rows_out": 170},
    ]
    assert lost_rows({"stages": stages}) == (7, 3)
