from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.files.compression import open_output
from penstock.observe import Extent, Rates, lost_rows
from penstock.sources import IteratorSource, JsonlSource, MemorySource, ParquetSource


def at(seconds: float, rows: int, nbytes: int) -> dict[str, Any]:
    """A snapshot; everything that was read is done."""
    return {"seconds": seconds, "rows_done": rows, "bytes_in": nbytes, "file_bytes_done": nbytes}


def watched(pipeline: Pipeline) -> list[dict[str, Any]]:
    """A snapshot after each batch that came out."""
    return [pipeline.snapshot() for _ in pipeline]


def test_text_files_are_measured_in_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"a": 1}\n')
    extent = Extent.of(JsonlSource(tmp_path))
    assert extent == Extent(files=2, file_bytes=18)
    assert extent.share(at(1, 1, 9)) == 0.5


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".xz"])
def test_files_are_measured_in_bytes_on_disk_compressed_or_not(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(5)
    for name in ("a", "b", "c"):
        with open(tmp_path / f"{name}.jsonl{suffix}", "wb") as file, open_output(file, suffix) as lines:
            for number in range(2000):
                lines.write(b'{"a": %d, "b": "%s"}\n' % (number, rng.randbytes(200).hex().encode()))
    source = JsonlSource(tmp_path)
    extent = Extent.of(source)
    assert extent.file_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    pipeline = Pipeline(source, config=PipelineConfig(workers=1), budget="1 MiB")
    shares = [extent.share(snapshot) for snapshot in watched(pipeline)]
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert any(0.1 < share < 0.3 for share in shares)  # in the middle of the first file


def test_rows_that_are_read_and_not_out_yet_are_not_done(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 20_000)
    source = JsonlSource(tmp_path)
    extent = Extent.of(source)
    pipeline = Pipeline(source, config=PipelineConfig(workers=1), budget="1 MiB")
    batches = iter(pipeline)
    delivered = next(batches).num_rows * len('{"a": 1}\n')
    while pipeline.snapshot()["bytes_in"] < delivered + 1000:
        time.sleep(0.001)  # reads ahead
    snapshot = pipeline.snapshot()
    share = extent.share(snapshot)
    assert share is not None
    assert share < snapshot["bytes_in"] / extent.file_bytes
    pipeline.stop()


def test_a_resumed_run_begins_where_it_stopped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 20_000)
    first = Pipeline(JsonlSource(tmp_path), config=PipelineConfig(workers=1), budget="1 MiB")
    seen = 0
    for batch in first:
        seen += batch.num_rows
        if seen > 10_000:
            break
    state = first.state_dict()
    first.stop()
    again = Pipeline(JsonlSource(tmp_path), config=PipelineConfig(workers=1), budget="1 MiB")
    again.load_state_dict(state)
    shares = [Extent.of(again.source).share(snapshot) for snapshot in watched(again)]
    assert shares[0] > 0.4
    assert shares[-1] == 1.0


def test_columnar_files_are_measured_in_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(40)}), path)
    extent = Extent.of(ParquetSource(path))
    assert (extent.files, extent.rows) == (1, 40)
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
    rates = Rates(Extent(file_bytes=10_000))
    for second in range(11):
        rates.add(at(float(second), 10 * second, 100 * second))
    for second in range(11, 31):
        rates.add(at(float(second), 100 + 20 * (second - 10), 1000 + 200 * (second - 10)))
    assert rates.rows_per_second == pytest.approx(20)
    assert rates.bytes_per_second == pytest.approx(200)
    assert rates.share == 0.5
    assert rates.seconds_left == pytest.approx(25)


def test_the_time_before_the_first_row_is_not_slowness() -> None:
    rates = Rates(Extent(file_bytes=1000))
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
