"""Files of our own sinks with one bit flipped: an error that names the file, or the same rows; never others, no crash.

The flips are read in a process of their own, so that a crash is a failed test and not the end of all tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, DataError
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, MemorySink, ParquetSink
from penstock.sources import ArrowSource, MemorySource, ParquetSource, open_source

FLIPS = 200
ROWS: list[dict[str, Any]] = [
    {
        "id": number,
        "text": f"{number * 7919 % 1009} words of row {number}, " * (number % 5),
        "score": number / 7,
        "tags": [number % 3, None, number],
        "kind": "abc"[number % 3],
    }
    for number in range(300)
]
SCRIPT = """
import json, random, sys
from pathlib import Path
import pyarrow as pa
from penstock.errors import PenstockError
from penstock.sources import open_source

def read(path):
    source = open_source(path)
    try:
        batches = []
        while (batch := source.next_batch(70)) is not None:
            batches.append(batch)
        return pa.Table.from_batches(batches, source.schema).to_pylist()
    finally:
        source.close()

def count(path, flips, seed):
    data, wanted = path.read_bytes(), read(path)
    found = {"named": 0, "harmless": 0, "silent": [], "raw": []}
    for bit in random.Random(seed).sample(range(len(data) * 8), flips):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            if read(path) == wanted:
                found["harmless"] += 1
            else:
                found["silent"].append(bit)
        except PenstockError as error:
            if path.name in str(error):
                found["named"] += 1
            else:
                found["raw"].append([bit, repr(error)])
        except Exception as error:
            found["raw"].append([bit, repr(error)])
    return found

for name in sys.argv[3:]:
    print(json.dumps([name, count(Path(name), int(sys.argv[1]), int(sys.argv[2]))]), flush=True)
"""
FORMATS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "parquet": (ParquetSink, "out.parquet", {"row_group_bytes": "32 KiB"}),
    "parquet, plain": (ParquetSink, "plain.parquet", {"compression": "none", "dictionary": True}),
    "arrow": (ArrowSink, "out.arrow", {}),
    "arrow, zstd": (ArrowSink, "zstd.arrow", {"compression": "zstd"}),
    "jsonl.zst": (JsonlSink, "out.jsonl.zst", {}),
    "jsonl.lz4": (JsonlSink, "out.jsonl.lz4", {}),
    "jsonl.gz": (JsonlSink, "out.jsonl.gz", {}),
}


def write(sink: Any, rows: list[dict[str, Any]] = ROWS) -> Path:
    for first in range(0, len(rows), 100):
        sink.consume(pa.RecordBatch.from_pylist(rows[first : first + 100]))
    sink.flush()
    return Path(sink.path)


def write_foreign(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    table = table.append_column("coded", table["kind"].dictionary_encode())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each file, what reading it with one bit flipped came to, for as many files as were survived."""
    home = tmp_path_factory.mktemp("flipped")
    files = [write(sink(home / name, **options)) for sink, name, options in FORMATS.values()]
    files.append(write_foreign(home / "foreign.arrow"))
    command = [sys.executable, "-c", SCRIPT, str(FLIPS), "19", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {Path(name).name: counts for name, counts in map(json.loads, done.stdout.splitlines())}
    return found | {"": {"ended with": done.returncode, "said": done.stderr[-2000:]}}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_bit_is_an_error_that_names_the_file(flipped: dict[str, dict[str, Any]], kind: str) -> None:
    name = FORMATS[kind][1]
    assert name in flipped, flipped[""]
    assert flipped[name]["silent"] == []
    assert flipped[name]["raw"] == []
    assert flipped[name]["named"] > FLIPS // 2


def test_a_damaged_file_of_another_writer_does_not_end_the_process(flipped: dict[str, dict[str, Any]]) -> None:
    assert "foreign.arrow" in flipped, flipped[""]
    assert flipped["foreign.arrow"]["raw"] == []


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow", "out.jsonl.zst", "out.jsonl.lz4", "out.csv.zst"])
def test_others_read_what_the_sinks_write(name: str, tmp_path: Path) -> None:
    rows = [{key: row[key] for key in ("id", "text")} for row in ROWS]
    kinds: dict[str, Any] = {".parquet": ParquetSink, ".arrow": ArrowSink, ".jsonl": JsonlSink, ".csv": CsvSink}
    path = write(kinds[Path(name).suffixes[0]](tmp_path / name), rows)
    if name == "out.parquet":
        table = pq.read_table(path, page_checksum_verification=True)
        assert table.schema.metadata is None
        assert table.to_pylist() == rows
    elif name == "out.arrow":
        with pa.OSFile(str(path)) as file:
            assert pa.ipc.open_file(file).read_all().to_pylist() == rows
        with pa.OSFile(str(path)) as file:
            file.seek(8)  # the file format is a stream with something around it
            assert pa.ipc.open_stream(file).read_all().to_pylist() == rows
    else:
        with pa.CompressedInputStream(str(path), {".zst": "zstd", ".lz4": "lz4"}[path.suffix]) as stream:
            lines = stream.read().splitlines()
        assert len(lines) == len(rows) + (name == "out.csv.zst")


def test_only_the_columns_that_are_read_are_compared(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path / "out.parquet", compression="none", dictionary=False)
    sink.consume(pa.RecordBatch.from_pydict({"n": range(50_000), "score": [0.5] * 50_000, "kind": range(50_000)}))
    sink.flush()
    path = sink.path
    data = bytearray(path.read_bytes())
    scores = pq.read_metadata(path).row_group(0).column(1)
    data[scores.data_page_offset + scores.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"out\.parquet"):
        ParquetSource(path).next_batch(10)
    with closing(ParquetSource(path, columns=["kind"])) as source:
        batch = source.next_batch(10)
        assert batch is not None
        assert batch["kind"].to_pylist() == list(range(10))
    with closing(ParquetSource(path, verify="none")) as source:
        assert source.next_batch(10) is not None
    with pytest.raises(ConfigError, match=r"verify.*'all'"):
        ParquetSource(path, verify="all")  # type: ignore[arg-type]


def test_damage_costs_one_row_group_and_the_others_are_read(tmp_path: Path) -> None:
    path = write(ParquetSink(tmp_path / "out.parquet", row_group_bytes="1 KiB", compression="none"))
    data = bytearray(path.read_bytes())
    second = pq.read_metadata(path).row_group(1).column(1)
    data[second.data_page_offset + 100] ^= 1
    path.write_bytes(data)
    sink = MemorySink()
    report = Pipeline(ParquetSource(path), [], sink, PipelineConfig(on_error="skip")).run()
    assert report.rows_out == len(ROWS) - pq.read_metadata(path).row_group(1).num_rows


def test_page_checksums_of_other_writers_are_compared_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"n": range(1000)}), path, **options)
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)
    with closing(ParquetSource(path)) as source:
        assert source.next_batch(1000) is not None
    with pytest.raises(DataError, match=r"foreign\.parquet.*CRC"):
        ParquetSource(path, verify="pages").next_batch(1000)


def test_a_file_that_others_wrote_anew_is_not_measured_by_the_old_checksums(tmp_path: Path) -> None:
    path = write(ParquetSink(tmp_path / "out.parquet"))
    pq.write_table(pq.read_table(path).slice(0, 10), path)
    with closing(ParquetSource(path)) as source:
        batch = source.next_batch(100)
        assert batch is not None
        assert batch.num_rows == 10
    arrow = write(ArrowSink(tmp_path / "out.arrow"))
    table = pa.ipc.open_file(pa.py_buffer(arrow.read_bytes())).read_all()
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.slice(0, 10))
    with closing(ArrowSource(arrow)) as again:
        batch = again.next_batch(100)
        assert batch is not None
        assert batch.num_rows == 10


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
def test_a_segment_damaged_before_it_is_joined_is_not_published(name: str, tmp_path: Path) -> None:
    sink = (ParquetSink if name == "out.parquet" else ArrowSink)(tmp_path / name)
    sink.restore({})
    for first in (0, 100):
        sink.consume(pa.RecordBatch.from_pylist(ROWS[first : first + 100]))
        sink.checkpoint()
    parts = (tmp_path / f".{name}.penstock-parts").iterdir()
    segment = min(part for part in parts if part.suffix == Path(name).suffix)
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 1
    segment.write_bytes(data)
    with pytest.raises(DataError, match=segment.name):
        sink.flush()
    assert not (tmp_path / name).exists()


def test_a_file_without_rows_has_checksums_too(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64())])
    for sink in (ParquetSink(tmp_path / "none.parquet"), ArrowSink(tmp_path / "none.arrow")):
        Pipeline(MemorySource([], schema=schema), [], sink).run()
        source = open_source(sink.path)
        assert source.next_batch(1) is None
        assert source.schema == schema
