"""Sources of files in a bucket: the same rows as from disk, by ranges, in the state in which they were listed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.servers import Proxy, S3Server, environment_of

from penstock import Pipeline
from penstock.errors import ChangedFileError, DataError, ResumeError
from penstock.files.listing import list_files
from penstock.files.objects import ChangedObjectError, open_bucket
from penstock.files.ranges.read_ahead import KeptParts
from penstock.files.ranges.remote_file import RemoteFile
from penstock.files.ranges.row_groups import ParquetReader
from penstock.sinks import MemorySink, ParquetSink
from penstock.sources import MemorySource, ParquetSource, open_source, record_source

ROWS = [{"id": number, "text": f"row {number} " * 9} for number in range(4000)]
TABLE = pa.Table.from_pylist(ROWS)


def put(url: str, data: Any) -> None:
    bucket, key = open_bucket(url)
    bucket.write(key, bytes(data))


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def parquet(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def arrow(table: pa.Table, new: Any) -> bytes:
    file = pa.BufferOutputStream()
    with new(file, table.schema) as writer:
        writer.write_table(table, 500)
    return file.getvalue().to_pybytes()


FILES: dict[str, Any] = {
    "a.jsonl": lambda: lines(ROWS),
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.jsonl.gz": lambda: gzip.compress(lines(ROWS[:1])) + gzip.compress(lines(ROWS[1:])),
    "a.jsonl.bz2": lambda: bz2.compress(lines(ROWS[:1000])) + bz2.compress(lines(ROWS[1000:])),
    "a.jsonl.xz": lambda: lzma.compress(lines(ROWS[:1000])) + lzma.compress(lines(ROWS[1000:])),
    "a.jsonl.zst": lambda: pa.compress(lines(ROWS), "zstd", asbytes=True),
    "a.jsonl.lz4": lambda: pa.compress(lines(ROWS), "lz4", asbytes=True),
    "a.csv": lambda: b"id,text\n" + "".join(f'{row["id"]},"{row["text"]}"\n' for row in ROWS).encode(),
    "a.parquet": lambda: parquet(TABLE, row_group_size=700),
    "one-group.parquet": lambda: parquet(TABLE),
    "a.arrow": lambda: arrow(TABLE, pa.ipc.new_file),
    "a.arrows": lambda: arrow(TABLE, pa.ipc.new_stream),
    "a.arrow.gz": lambda: gzip.compress(arrow(TABLE, pa.ipc.new_file)),
}


@pytest.mark.parametrize("name", FILES)
def test_rows_are_those_of_the_file_and_resume_exactly(s3_url: str, name: str) -> None:
    put(f"{s3_url}/{name}", FILES[name]())
    source: Any = open_source(f"{s3_url}/{name}")
    sink = MemorySink()
    Pipeline(source, [], sink, budget="16 MiB").run()
    assert pa.Table.from_batches(sink.batches).to_pylist() == ROWS
    begun: Any = open_source(f"{s3_url}/{name}")
    first = [begun.next_batch(123) for _ in range(5)]
    state = json.loads(json.dumps(begun.state_dict()))
    begun.close()
    resumed: Any = open_source(f"{s3_url}/{name}")
    resumed.load_state_dict(state)
    rest = list(iter(lambda: resumed.next_batch(1000), None))
    assert pa.Table.from_batches(first + rest).to_pylist() == ROWS


def test_text_comes_by_lines(s3_url: str) -> None:
    put(f"{s3_url}/a.txt", "".join(f"{row['text']}\n" for row in ROWS).encode())
    source: Any = open_source(f"{s3_url}/a.txt")
    found = [row["text"] for batch in iter(lambda: source.next_batch(999), None) for row in batch.to_pylist()]
    assert found == [row["text"] for row in ROWS]


def test_directories_globs_and_partitions_are_as_for_local_files(s3_url: str) -> None:
    for name in ("year=2020/b c.jsonl", "year=2021/ü%20.jsonl", "year=2021/.hidden.jsonl", "readme.md"):
        put(f"{s3_url}/{name}", b'{"x": 1}\n')
    bucket, prefix = open_bucket(s3_url)
    bucket.write(f"{prefix}/year=2022", b"")  # as some tools mark a directory
    found = list_files(s3_url, (".jsonl",))
    assert [str(file) for file in found] == [f"{s3_url}/year=2020/b c.jsonl", f"{s3_url}/year=2021/ü%20.jsonl"]
    assert found.partitions == [("year=2020",), ("year=2021",)]
    assert list_files(f"{s3_url}/**/*.jsonl") == found
    assert list_files(f"{s3_url}/year=202[1]/*") == found[1:]
    source: Any = open_source(s3_url)
    assert source.next_batch(1).to_pylist() == [{"x": 1, "year": 2020}]
    assert list_files(found[1]) == found[1:]


def test_nothing_found_is_an_error_that_names_the_url(s3_url: str) -> None:
    put(f"{s3_url}/a.csv", b"x\n1\n")
    for url, said in (
        (f"{s3_url}/none", f"no such file or directory: '{s3_url}/none'"),
        (f"{s3_url}/none.jsonl", f"no such file or directory: '{s3_url}/none.jsonl'"),
        (f"{s3_url}/*.jsonl", "no file matches"),
        ("s3://absent/a.jsonl", "no such bucket: 's3://absent'"),
    ):
        with pytest.raises(FileNotFoundError, match=said.replace("*", r"\*")):
            list_files(url)
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl file in directory .*; it holds: \.csv"):
        list_files(s3_url, (".jsonl",))


@pytest.fixture
def proxy(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Proxy through which all clients of the test go from now on."""
    with Proxy(s3.port) as between:
        for name, value in environment_of(between.endpoint).items():
            monkeypatch.setenv(name, value)
        yield between


def wide(rows: int) -> pa.Table:
    noise = [f"{number * 7919 % 1000003:x}" * 40 for number in range(rows)]
    return pa.table({"id": range(rows), **{f"text{number}": noise for number in range(6)}})


@pytest.mark.parametrize("own", [False, True])
def test_only_the_columns_that_are_needed_are_sent(s3_url: str, proxy: Proxy, tmp_path: Path, own: bool) -> None:
    options = {"row_group_size": 5000, "compression": "none", "use_dictionary": False}
    data = parquet(wide(20_000), **options)
    if own:
        Pipeline(MemorySource(wide(20_000)), [], ParquetSink(tmp_path / "own.parquet", compression="none")).run()
        data = (tmp_path / "own.parquet").read_bytes()
    put(f"{s3_url}/wide.parquet", data)
    before = proxy.bytes_down
    sink_: MemorySink = MemorySink()
    Pipeline(ParquetSource(f"{s3_url}/wide.parquet", columns=["id"]), [], sink_).run()
    assert pa.Table.from_batches(sink_.batches)["id"].to_pylist() == list(range(20_000))
    assert proxy.bytes_down - before < len(data) / 5


@pytest.mark.parametrize("rows_each", [3_000, 500])
def test_a_pipeline_requests_each_row_group_once(s3_url: str, proxy: Proxy, rows_each: int) -> None:
    table = wide(3_000)
    data = parquet(table, row_group_size=rows_each, compression="none", use_dictionary=False)
    for number in range(3):
        put(f"{s3_url}/{number}.parquet", data)
    before = proxy.bytes_down
    sink_: MemorySink = MemorySink()
    Pipeline(ParquetSource(s3_url), [], sink_).run()
    assert pa.Table.from_batches(sink_.batches).equals(pa.concat_tables([table] * 3))
    assert proxy.bytes_down - before < 3.3 * len(data)


def test_rows_that_are_wider_than_the_first_ones_keep_to_the_budget(s3_url: str) -> None:
    texts = [""] * 1000 + ["y" * 8000] * 20_000
    put(f"{s3_url}/a.parquet", parquet(pa.table({"id": range(21_000), "text": texts}), row_group_size=21_000))
    del texts
    pipeline = Pipeline(ParquetSource(f"{s3_url}/a.parquet"), budget="64 MiB")
    assert sum(batch.num_rows for batch in pipeline) == 21_000
    assert pipeline.budget.peak < 80 << 20


def test_the_width_of_rows_is_known_where_the_file_is_read_in_small_parts(s3_url: str) -> None:
    rng = np.random.default_rng(0)
    others = {f"n{number}": pa.array([rng.bytes(16) for _ in range(1110)]) for number in range(14)}
    texts = [""] * 1000 + [str(number) + "y" * 8000 for number in range(110)]
    put(f"{s3_url}/a.parquet", parquet(pa.table({**others, "text": texts}), compression="none"))
    widths = []
    for window in (1 << 18, 1 << 20, 1 << 25):
        (file,) = list_files(f"{s3_url}/a.parquet")
        reader = ParquetReader(file, lambda schema: None, 1 << 16, None, pages=False, window=window)
        assert reader.next(1) is not None
        widths.append(reader._width.of(reader._file.metadata.row_group(0), None))
        reader.close()
    assert widths == [pytest.approx(widths[0])] * 3
    assert widths[0] > 1000


def test_footers_are_requested_once(s3_url: str, proxy: Proxy) -> None:
    for number in range(5):
        put(f"{s3_url}/{number}.parquet", parquet(TABLE.slice(0, 10)))
    source: Any = open_source(s3_url)
    before = proxy.requests
    assert source.schema == TABLE.schema
    assert source.size_hint() == 50
    assert proxy.requests - before <= 5


def test_little_is_read_for_the_first_rows(s3_url: str, proxy: Proxy) -> None:
    data = lines(ROWS * 20)
    for number in range(3):
        put(f"{s3_url}/{number}.jsonl", data)
    source: Any = open_source(s3_url, schema=TABLE.schema)
    before = proxy.bytes_down
    assert source.next_batch(10).num_rows == 10
    source.close()
    assert proxy.bytes_down - before < len(data) / 2


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_made_of_what_the_scan_of_types_has_read_as_far_as_memory_goes(
    s3_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, packed: bool, kept: str
) -> None:
    rows = [{"id": number, "text": random.Random(number).randbytes(60).hex()} for number in range(12_000)]
    stored = 0
    for number in range(3):
        data = lines(rows[number::3])
        data = gzip.compress(data) if packed else data
        put(f"{s3_url}/{number}.jsonl{'.gz' if packed else ''}", data)
        stored += len(data)
    if kept == "some":
        monkeypatch.setattr(record_source, "_KEPT_SHARE", (512 << 20) // (stored // 2))
    sink_: MemorySink = MemorySink()
    source: Any = open_source(s3_url)
    before = proxy.bytes_down
    Pipeline(source, [], sink_, budget="64 MiB" if kept == "none" else "512 MiB").run()
    sent = (proxy.bytes_down - before) / stored
    assert pa.Table.from_batches(sink_.batches).to_pylist() == rows[0::3] + rows[1::3] + rows[2::3]
    least, most = {"all": (1.0, 1.1), "some": (1.2, 1.9), "none": (2.0, 2.1)}[kept]
    assert least <= sent <= most


def test_what_the_scan_of_types_has_read_counts_as_held_until_it_is_used(s3_url: str) -> None:
    data = lines(ROWS)
    put(f"{s3_url}/a.jsonl", data)
    source: Any = open_source(f"{s3_url}/a.jsonl")
    assert source.schema == TABLE.schema
    held = source.memory_usage()
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301 - made here
    assert sum(batch.num_rows for batch in iter(lambda: copy.next_batch(1000), None)) == len(ROWS)
    source.close()
    assert held - source.memory_usage() == len(data)
    assert source.next_batch(3).to_pylist() == ROWS[:3]


def test_kept_parts_are_the_first_ones_and_are_given_up_as_they_are_passed() -> None:
    first, second = (RemoteFile("s3://b", key, 20, None) for key in ("a", "b"))
    kept = KeptParts(25)
    for file, start, data in ((first, 0, b"x" * 10), (first, 10, b"y" * 10), (second, 0, b"z" * 10), (second, 10, b"")):
        kept.keep(file, start, memoryview(data))
    assert kept.held_bytes == 20
    assert kept.part_at(first, 9) == (0, b"x" * 10)
    assert kept.part_at(first, 10) == (10, b"y" * 10)
    assert (kept.held_bytes, kept.is_at_last) == (10, True)
    assert kept.part_at(second, 0) is None
    assert kept.held_bytes == 0


def test_a_slow_server_that_cuts_connections_changes_nothing(s3_url: str, proxy: Proxy) -> None:
    put(f"{s3_url}/a.jsonl", lines(ROWS * 3))
    put(f"{s3_url}/b.jsonl.gz", gzip.compress(lines(ROWS)))
    proxy.latency_seconds, proxy.reset_after, proxy.resets = 0.005, 200_000, 5
    sink = MemorySink()
    Pipeline(open_source(s3_url), [], sink).run()
    assert pa.Table.from_batches(sink.batches).to_pylist() == ROWS * 4
    assert proxy.resets_done == 5


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.parquet", "a.arrow"])
def test_an_object_that_is_replaced_or_deleted_is_refused(s3_url: str, name: str) -> None:
    url = f"{s3_url}/{name}"
    put(url, FILES[name]())
    source: Any = open_source(url)
    put(url, FILES[name]()[:-1])
    with pytest.raises(ChangedObjectError, match=name):
        source.next_batch(10)
    source = open_source(url, **({"allow_empty": True}))
    open_bucket(url)[0].delete(open_bucket(url)[1])
    with pytest.raises(ChangedFileError, match="deleted"):
        source.next_batch(10)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_state_is_refused_if_its_object_was_replaced(s3_url: str, tmp_path: Path, name: str) -> None:
    url, data = f"{s3_url}/{name}", FILES[name]()
    put(url, data)
    source: Any = open_source(url)
    source.next_batch(10)
    state = source.state_dict()
    assert s3_url not in json.dumps(state)
    (tmp_path / name).write_bytes(data)
    on_disk: Any = open_source(tmp_path / name)  # a copy with its name and size is taken
    on_disk.load_state_dict(state)
    assert on_disk.next_batch(1).to_pylist() == ROWS[10:11]
    moved: Any = open_source(url)  # and so is the state of a copy, where the object has the same bytes
    moved.load_state_dict(on_disk.state_dict())
    assert moved.next_batch(1).to_pylist() == ROWS[11:12]
    put(url, data.replace(b"row 3999", b"row 9999"))
    with pytest.raises(ResumeError, match=f"{name} is not the file the state was saved in: its ETag"):
        open_source(url).load_state_dict(state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz"])
def test_a_truncated_stream_is_damage_and_gives_what_was_before_it(s3_url: str, name: str) -> None:
    put(f"{s3_url}/{name}", FILES[name]()[:-40])
    source: Any = open_source(f"{s3_url}/{name}", schema=TABLE.schema)
    rows: list[Any] = []
    with pytest.raises(DataError, match=f"{name}.*damaged or cut short"):
        rows.extend(iter(lambda: source.next_batch(500), None))
    assert len(rows) > 2


def test_a_remote_file_hides_its_password_and_can_be_sent_to_other_processes() -> None:
    file = RemoteFile("s3://key:secret@bucket?region=eu", "a/b.jsonl.gz", 3, '"e"', 5)
    assert "secret" not in f"{file} {file!r}"
    assert file.url == "s3://key:secret@bucket/a/b.jsonl.gz?region=eu"
    assert (file.name, file.suffix, file.suffixes) == ("b.jsonl.gz", ".gz", [".jsonl", ".gz"])
    assert pickle.loads(pickle.dumps(file)) == file  # noqa: S301 - it is our own
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (3, 5)
