"""Compressed files are decompressed ahead, and nothing else changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.waits import wait_for

from penstock.errors import ChangedFileError, DataError
from penstock.files.checksums import FileStamps
from penstock.files.compression import open_output
from penstock.sources import CsvSource, JsonlSource, compressed_ahead
from penstock.sources.compressed_ahead import CompressedAhead

CODECS = (".zst", ".gz", ".bz2", ".xz", ".lz4")


def write_files(folder: Path, codec: str, count: int = 5, rows: int = 6000) -> list[Path]:
    paths, texts = [], random.Random(7)
    for number in range(count):
        lines = "".join(
            f'{{"id": {number * rows + row}, "text": "{texts.randbytes(12).hex()}"}}\n' for row in range(rows)
        )
        path = folder / f"part-{number}.jsonl{codec}"
        with path.open("wb") as file, open_output(file, codec) as out:
            out.write(lines.encode())
        paths.append(path)
    return paths


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_ahead, "available_cores", lambda: 3)
    monkeypatch.setattr(compressed_ahead, "_LEAST_BYTES", 0)
    monkeypatch.setattr(compressed_ahead, "_PIECE_BYTES", 1 << 16)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that were read as they were decompressed ahead."""
    numbers: list[int] = []
    take = CompressedAhead.take

    def note(self: CompressedAhead, number: int, offset: int) -> Any:
        found = take(self, number, offset)
        if found is not None:
            numbers.append(number)
        return found

    monkeypatch.setattr(CompressedAhead, "take", note)
    return numbers


def everything(source: JsonlSource) -> list[Any]:
    """Rows and errors, in their order."""
    said: list[Any] = [source.schema]
    while True:
        try:
            batch = source.next_batch(1000)
        except DataError as error:
            said.append(str(error))
            source.skip_file()
            continue
        if batch is None:
            return said
        said.append(batch.to_pydict())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "penstock-ahead"]


def without_ahead(monkeypatch: pytest.MonkeyPatch, read: Callable[[], list[Any]]) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(CompressedAhead, "take", lambda self, number, offset: None)
        return read()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_those_of_reading_without_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int], codec: str
) -> None:
    paths = write_files(tmp_path, codec)
    expected = without_ahead(monkeypatch, lambda: everything(JsonlSource(paths)))
    assert everything(JsonlSource(paths)) == expected
    assert sum(len(part["id"]) for part in expected[1:]) == 30_000
    assert taken == [2, 3, 4, 2, 3, 4], "once for the types, once for the rows"
    assert not threads()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_damage_is_found_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int], codec: str, damage: str
) -> None:
    paths = write_files(tmp_path, codec)
    data = bytearray(paths[2].read_bytes())
    middle = len(data) // 2
    if damage == "flipped":
        data[middle : middle + 40] = bytes(byte ^ 0xFF for byte in data[middle : middle + 40])
    paths[2].write_bytes(data if damage == "flipped" else data[: middle if damage == "cut" else 0])
    expected = without_ahead(monkeypatch, lambda: everything(JsonlSource(paths)))
    assert any(isinstance(part, str) for part in expected)
    assert everything(JsonlSource(paths)) == expected
    assert {2, 4} & set(taken)
    assert not threads()


def test_a_file_that_is_missing_is_an_error_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    paths = write_files(tmp_path, ".zst", count=3)

    def read() -> list[Any]:
        source = JsonlSource(paths)
        source.learn_first()
        paths[1].rename(tmp_path / "away")
        rows: list[Any] = []
        try:
            while (batch := source.next_batch(1000)) is not None:
                rows.append(batch.to_pydict())
        except OSError as error:
            rows.append(error.errno)
        source.close()
        (tmp_path / "away").rename(paths[1])
        return rows

    assert read() == without_ahead(monkeypatch, read)


def test_a_file_that_changes_after_it_was_begun_is_an_error(tmp_path: Path) -> None:
    paths = write_files(tmp_path, ".zst")
    source = JsonlSource(paths)
    source.learn_first()
    for _ in range(2):
        assert source.next_block(1 << 16) is not None
    paths[1].write_bytes(paths[1].read_bytes() * 2)
    with pytest.raises(ChangedFileError, match="had"):
        everything(source)
    source.close()


def test_a_source_resumes_in_any_file(tmp_path: Path, taken: list[int]) -> None:
    paths = write_files(tmp_path, ".zst")
    whole = everything(JsonlSource(paths))[1:]
    ids = [number for part in whole for number in part["id"]]
    for rows in (10, 6000, 6010, 29_999):
        source = JsonlSource(paths)
        left = rows
        while left:
            batch = source.next_batch(left)
            assert batch is not None
            left -= batch.num_rows
        state = source.state_dict()
        source.close()
        assert not threads()
        other = JsonlSource(paths)
        other.load_state_dict(state)
        assert [number for part in everything(other)[1:] for number in part["id"]] == ids[rows:]
    assert taken


def test_progress_counts_the_bytes_that_were_read(tmp_path: Path, taken: list[int]) -> None:
    paths = write_files(tmp_path, ".zst")
    sizes = [path.stat().st_size for path in paths]
    source = JsonlSource(paths)
    seen = []
    while source.next_batch(1000) is not None:
        seen.append(source.file_bytes_read())
    assert taken
    assert seen == sorted(seen)
    assert 0 < seen[0] <= sizes[0]
    assert seen[-1] == sum(sizes)


def test_little_memory_small_files_and_plain_files_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    paths = write_files(tmp_path, ".zst", count=2)
    source = JsonlSource(paths)
    source.fit_budget(64 << 20)
    everything(source)
    monkeypatch.setattr(compressed_ahead, "_LEAST_BYTES", 1 << 30)
    everything(JsonlSource(paths))
    monkeypatch.setattr(compressed_ahead, "_LEAST_BYTES", 0)
    everything(JsonlSource(write_files(tmp_path, "", count=2)))
    assert taken == []


def test_csv_is_decompressed_ahead_too(tmp_path: Path, taken: list[int]) -> None:
    for number in range(3):
        with (tmp_path / f"{number}.csv.zst").open("wb") as file, open_output(file, ".zst") as out:
            out.write(b"a,b\n" + b"".join(b"%d,x\n" % row for row in range(5000)))
    source = CsvSource(tmp_path)
    rows = 0
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.num_rows
    assert rows == 15_000
    assert taken.count(2) >= 1


@pytest.mark.parametrize("failing", [5, 6, 7, 8, 9])
def test_reading_goes_on_where_it_was_after_an_error_of_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    source = JsonlSource(write_files(tmp_path, ".zst"))
    source.learn_first()
    allocate, pieces = pa.allocate_buffer, count(1)

    def fail_once(size: int) -> pa.Buffer:
        if next(pieces) == failing:
            raise MemoryError
        return allocate(size)

    monkeypatch.setattr(compressed_ahead, "pa", SimpleNamespace(allocate_buffer=fail_once))
    ids: list[int] = []
    failed = 0
    while True:
        try:
            batch = source.next_batch(1000)
        except MemoryError:
            failed += 1
            continue
        if batch is None:
            break
        ids += batch.column("id").to_pylist()
    assert failed == 1
    assert ids == list(range(30_000))
    assert not threads()


def test_what_waits_is_counted_and_within_its_limit(tmp_path: Path) -> None:
    paths = write_files(tmp_path, ".zst", rows=60_000)
    limit = 12 << 16
    begun = CompressedAhead(paths, limit, FileStamps())
    begun.begin_after(-1)
    taken = begun.take(0, 0)
    assert taken is not None
    begun.begin_after(0)
    wait_for(lambda: begun.held_bytes == limit, "a third of it is of the file that is read")
    assert taken.readinto(memoryview(bytearray(10))) == 10
    begun.close()
    assert begun.held_bytes == 0
    assert not threads()


def test_a_file_that_is_closed_while_it_is_read_does_not_look_as_if_it_ended(tmp_path: Path) -> None:
    begun = CompressedAhead(write_files(tmp_path, ".zst", count=1), 1 << 20, FileStamps())
    begun.begin_after(-1)
    taken = begun.take(0, 0)
    assert taken is not None
    begun.close()
    with pytest.raises(ValueError, match="closed"):
        taken.readinto(memoryview(bytearray(10)))


def test_files_are_read_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    source = JsonlSource(write_files(tmp_path, ".zst"))
    source.learn_first()

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rows = 0
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.num_rows
    assert rows == 30_000
    assert taken == []
