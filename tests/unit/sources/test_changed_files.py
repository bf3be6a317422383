"""Input that somebody cuts, rewrites, extends or replaces while it is read: never a part of the rows and success."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ChangedFileError, DataError, ResumeError
from penstock.files.checksums import FileStamps, fingerprint_files
from penstock.files.compression import DamagedStreamError, open_input
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource, open_source

COUNT = 18_000
TABLE = pa.table({"n": range(COUNT), "text": [f"{number:06d}" * 20 for number in range(COUNT)]})
LINES = [json.dumps(row).encode() + b"\n" for row in TABLE.to_pylist()]


def parquet(path: Path) -> None:
    pq.write_table(TABLE, path, row_group_size=COUNT // 3, use_dictionary=False, compression="none")


def parquet_groups(path: Path) -> None:
    pq.write_table(TABLE, path, row_group_size=500, use_dictionary=False, compression="none")


def arrow(path: Path) -> None:
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=500)


def arrow_stream(path: Path) -> None:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=500)


def jsonl(path: Path) -> None:
    path.write_bytes(b"".join(LINES))


def jsonl_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(b"".join(LINES), 0))


def json_array(path: Path) -> None:
    path.write_bytes(b"[" + b",\n".join(line.strip() for line in LINES) + b"]")


def csv(path: Path) -> None:
    path.write_text("n,text\n" + "".join(f"{n},{'x' * 120}\n" for n in range(COUNT)))


def text(path: Path) -> None:
    path.write_text("".join(f"{n} {'x' * 120}\n" for n in range(COUNT)))


FORMATS: dict[str, Callable[[Path], None]] = {
    "in.parquet": parquet,
    "groups.parquet": parquet_groups,
    "in.arrow": arrow,
    "in.arrows": arrow_stream,
    "in.jsonl": jsonl,
    "in.jsonl.gz": jsonl_gz,
    "in.json": json_array,
    "in.csv": csv,
    "in.txt": text,
}


def rewrite(path: Path) -> None:
    """In place, the same size: only the time of the file tells."""
    data = path.read_bytes()
    with open(path, "r+b") as file:
        file.write(data)
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(path.read_bytes())
    os.utime(beside, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    beside.replace(path)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\n")


def run_while(
    path: Path, change: Callable[[Path], Any], *, on_error: Any = "raise", more: tuple[Path, ...] = ()
) -> Any:
    """A run in whose second batch the file changes, while most of it is not read yet."""
    batches: list[int] = []

    def watch(batch: pa.RecordBatch) -> pa.RecordBatch:
        batches.append(batch.num_rows)
        if len(batches) == 2:
            change(path)
        return batch

    config = PipelineConfig(workers=1, on_error=on_error, quarantine=path.parent / "bad.jsonl")
    source = open_source([path, *more])
    return Pipeline(source, [watch], JsonlSink(path.parent / "out.jsonl"), config, budget="2 MiB").run()


@pytest.mark.parametrize(("change", "on_error"), [(rewrite, "quarantine"), (replace, "raise"), (grow, "raise")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_changes_while_it_is_read_stops_the_run(
    tmp_path: Path, name: str, change: Callable[[Path], None], on_error: str
) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    with pytest.raises(ChangedFileError, match=str(name)):
        run_while(path, change, on_error=on_error)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("to", [0, 1_200_000])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_that_is_cut_while_it_is_read_stops_the_run(tmp_path: Path, name: str, to: int) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    size = path.stat().st_size
    with pytest.raises(ChangedFileError, match=rf"{name}.*{size}"):
        run_while(path, lambda file: os.truncate(file, to))


@pytest.mark.parametrize("second", [False, True])
def test_lines_that_are_cut_at_a_border_are_missed(tmp_path: Path, second: bool) -> None:
    path, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    jsonl(path)
    other.write_bytes(b"".join(LINES[:10]))
    border = sum(map(len, LINES[: COUNT // 2]))
    files = [other, path] if second else [path, other]
    source = JsonlSource(files, schema=pa.schema([("n", pa.int64()), ("text", pa.string())]))
    seen: list[int] = []

    def cut(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        if len(seen) == 2:
            os.truncate(path, border)
        return batch

    with pytest.raises(ChangedFileError, match=r"in\.jsonl"):
        Pipeline(source, [cut], MemorySink(), PipelineConfig(workers=1), budget="2 MiB").run()


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl", "in.csv"])
def test_a_file_that_changes_between_the_scan_and_the_rows_is_noticed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    source = open_source(path)
    assert len(source.schema) == 2
    rewrite(path)
    with pytest.raises(ChangedFileError, match=str(tmp_path)):
        list(_all_rows(source))
    source.reset()  # from here on it is the file as it is now
    assert sum(_all_rows(source)) == COUNT


def _all_rows(source: Any) -> Iterator[int]:
    while (batch := source.next_batch(4096)) is not None:
        yield batch.num_rows


def test_a_row_group_with_fewer_rows_than_the_footer_counts_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "in.parquet")
    whole = pq.ParquetFile.iter_batches

    def short(file: pq.ParquetFile, *args: Any, **options: Any) -> Iterator[pa.RecordBatch]:
        yield from list(whole(file, *args, **options))[:-1]

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", short)
    source = open_source(tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r"in\.parquet"):
        list(_all_rows(source))


@pytest.mark.parametrize("to", [0, 100])
@pytest.mark.parametrize("suffix", [".gz", ".zst", ".lz4"])
def test_a_compressed_file_that_is_cut_while_it_is_open_ends_with_an_error(
    tmp_path: Path, suffix: str, to: int
) -> None:
    sink = JsonlSink(tmp_path / f"in.jsonl{suffix}")
    rows = pa.RecordBatch.from_pydict({"x": [os.urandom(30).hex() for _ in range(10_000)]})
    sink.consume(rows)
    sink.flush()
    reader: Any = open_input(sink.path)
    room = memoryview(bytearray(1 << 16))
    assert reader.readinto(room)
    os.truncate(sink.path, to)
    with pytest.raises(DamagedStreamError):
        list(iter(lambda: reader.readinto(room), 0))
    reader.close()


def test_a_pipe_has_no_state_that_could_change(tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no pipes with names")
    os.mkfifo(tmp_path / "pipe")
    stamps = FileStamps()
    stamps.note(tmp_path / "pipe")
    os.utime(tmp_path / "pipe", ns=(1, 1))
    stamps.check(tmp_path / "pipe")


def test_a_file_that_was_removed_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    stamps = FileStamps()
    stamps.note(tmp_path / "a")
    stamps.check_all()
    (tmp_path / "a").unlink()
    with pytest.raises(ChangedFileError, match=str(tmp_path)):
        stamps.check_all()


def test_a_file_that_changes_while_it_is_hashed_has_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES[0])

    def changing(file: Path) -> str:
        grow(path)
        return "0" * 32

    monkeypatch.setattr("penstock.files.checksums.hash_file", changing)
    with pytest.raises(ChangedFileError, match=r"in\.jsonl"):
        fingerprint_files([path])


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt"])
def test_a_file_that_was_cut_behind_a_saved_place_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMATS[name](path)
    source = open_source(path)
    assert source.next_batch(100) is not None
    state = source.state_dict()
    source.close()
    grow(path)
    open_source(path).load_state_dict(state)  # lines may be added between two runs
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ResumeError, match=str(tmp_path)):
        open_source(path).load_state_dict(state)
