from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DataError, ResumeError
from penstock.files.compression import ByteReader, open_input
from penstock.files.records import CsvRecords, Cutter, Lines
from penstock.memory.pool import BufferPool
from penstock.sources import CsvSource, JsonlSource, TextSource, record_source
from penstock.sources.blocks import BlockPosition, BlockReader, FileLayout, RawBlock


def reader(
    *paths: Path,
    cutter: Cutter | None = None,
    limit: int = 1 << 20,
    place: BlockPosition | None = None,
    empty: bool = False,
) -> BlockReader:
    layout = FileLayout(0, cutter or Lines())
    return BlockReader(
        paths,
        lambda number: layout,
        pool=BufferPool("1 MiB"),
        max_row_bytes=limit,
        allow_empty=empty,
        place=place or BlockPosition(),
    )


def everything(blocks: BlockReader, max_bytes: int) -> list[RawBlock]:
    found = []
    while (block := blocks.next(max_bytes)) is not None:
        found.append(block)
    return found


lines = st.lists(st.text(st.sampled_from("ab\u00e9"), max_size=30), min_size=1, max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(files=st.lists(lines, min_size=1, max_size=3), max_bytes=st.integers(1, 80), ended=st.booleans())
def test_blocks_of_any_size_hold_every_byte_once_and_know_their_places(
    tmp_path: Path, files: list[list[str]], max_bytes: int, ended: bool
) -> None:
    paths = []
    for number, content in enumerate(files):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text("\n".join(content) + ("\n" if ended else "") or "\n")
    blocks = everything(reader(*paths, empty=True), max_bytes)
    for number, path in enumerate(paths):
        whole = path.read_bytes()
        here = [block for block in blocks if block.place.file == number]
        assert b"".join(block.data.to_pybytes() for block in here) == whole
        for block in here:
            before = whole[: block.place.offset]
            assert whole[block.place.offset :].startswith(block.data.to_pybytes())
            assert block.place.row == before.count(b"\n")
            assert not before or before.endswith(b"\n")
        assert sum(block.records for block in here) == len(Lines().spans(memory(whole))[0])


def memory(data: bytes):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.frombuffer(data, np.uint8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(content=lines, first=st.integers(1, 60), second=st.integers(1, 60))
def test_reading_on_from_any_place_gives_the_rest(tmp_path: Path, content: list[str], first: int, second: int) -> None:
    path = tmp_path / "a.txt.gz"
    whole = "".join(f"{line}\n" for line in content).encode()
    path.write_bytes(gzip.compress(whole))
    blocks = reader(path)
    places = [blocks.place]
    while blocks.next(first) is not None:
        places.append(blocks.place)
    for place in places:
        rest = b"".join(block.data.to_pybytes() for block in everything(reader(path, place=place), second))
        assert rest == (whole[place.offset :] if place.file == 0 else b"")


@pytest.mark.parametrize("max_bytes", [1, 50, 1000, 1 << 20])
def test_a_record_that_is_too_long_is_refused_whatever_the_block_size_and_skipped_alone(
    tmp_path: Path, max_bytes: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n" + b"x" * 99 + b"\n" + b"y" * 100 + b"\n" + b"three\n" + b"z" * 5000 + b"\nfour\n")
    blocks = reader(path, limit=100)
    good, bad = [], []
    while True:
        try:
            block = blocks.next(max_bytes)
        except DataError as error:
            bad.append((error.row, error.offset))
            assert blocks.skip_bad() == "longer than max_row_bytes"
            continue
        if block is None:
            break
        good += block.data.to_pybytes().splitlines()
    assert good == [b"one", b"x" * 99, b"three", b"four"]
    assert bad == [(2, 104), (4, 211)]


def test_a_record_that_is_too_long_and_the_last_ends_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n" + b"x" * 3_000_000)
    (tmp_path / "b.txt").write_bytes(b"two\n")
    blocks = reader(tmp_path / "a.txt", tmp_path / "b.txt", limit=1000)
    assert blocks.next(100) is not None
    with pytest.raises(DataError, match=r"row 1\b.*max_row_bytes=1000"):
        blocks.next(100)
    blocks.skip_bad()
    [block] = everything(blocks, 100)
    assert (block.place, block.data.to_pybytes()) == (BlockPosition(1), b"two\n")


def test_where_a_newline_need_not_end_a_record_a_long_one_costs_the_rest_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'1\n"' + b"x\n" * 200 + b'"\n2\n')
    blocks = reader(tmp_path / "a.csv", cutter=CsvRecords(), limit=100)
    assert blocks.next(50) is not None
    with pytest.raises(DataError, match=r"row 1\b.*byte 2\b"):
        blocks.next(50)
    assert blocks.skip_bad() == "the rest of the file is unreadable"
    assert blocks.next(50) is None


def test_an_endless_line_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch()
    os.truncate(path, 1 << 32)
    blocks = reader(path, limit=1 << 20)
    with pytest.raises(DataError, match=r"row 0\b.*byte 0\b"):
        blocks.next(1 << 16)
    assert blocks.held_bytes <= (1 << 20) + 1


@pytest.mark.parametrize("max_bytes", [10, 1 << 20])
def test_a_cut_gzip_gives_its_whole_records_and_then_the_error_again_and_again(tmp_path: Path, max_bytes: int) -> None:
    path = tmp_path / "a.txt.gz"
    rows = [os.urandom(20).hex().encode() for _ in range(2000)]
    whole = gzip.compress(b"".join(row + b"\n" for row in rows))
    path.write_bytes(whole[: len(whole) // 2])
    blocks = reader(path)
    good: list[bytes] = []
    for _ in range(10_000):
        try:
            block = blocks.next(max_bytes)
        except DataError as error:
            failure = error
            break
        assert block is not None
        good += block.data.to_pybytes().splitlines()
    assert len(good) > 500
    assert good == rows[: len(good)]
    assert (failure.row, failure.offset) == (len(good), 41 * len(good))
    assert "Truncated compressed stream" in str(failure)
    with pytest.raises(DataError, match=r"a\.txt\.gz"):
        everything(blocks, max_bytes)
    blocks.skip_bad()
    assert blocks.next(max_bytes) is None


def test_a_file_that_became_shorter_is_not_the_one_that_was_saved(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n")
    with pytest.raises(ResumeError, match=r"a\.txt.*byte 100\b"):
        reader(tmp_path / "a.txt", place=BlockPosition(0, 100, 3)).next(10)


def test_empty_files_are_refused_or_passed_over(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt.gz", "c.txt.xz"):
        (tmp_path / name).touch()
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "e.txt").write_bytes(b"x\n")
    paths = sorted(tmp_path.iterdir())
    blocks = reader(*paths)
    for path in paths[:-1]:
        with pytest.raises(DataError, match=rf"{path.name}.*\bempty\b"):
            blocks.next(10)
        blocks.skip_bad()
    assert len(everything(blocks, 10)) == 1
    assert len(everything(reader(*paths, empty=True), 10)) == 1


def test_memory_for_blocks_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123456789\n" * 50_000)
    pool = BufferPool("4 MiB")
    layout = FileLayout(0, Lines())
    blocks = BlockReader(
        [path], lambda number: layout, pool=pool, max_row_bytes=1000, allow_empty=False, place=BlockPosition()
    )
    while (block := blocks.next(8192)) is not None:
        del block
    assert pool.stats().allocated <= 4
    assert pool.stats().reused > 50


@pytest.mark.parametrize("after", [b"", b"6\n7\n", b"6\n7"])
def test_a_record_longer_than_a_block_is_a_block_of_its_own(tmp_path: Path, after: bytes) -> None:
    long = b"x" * (3 << 20) + b"\n"
    (tmp_path / "a.txt").write_bytes(b"1\n2\n" + long + after)
    found = everything(reader(tmp_path / "a.txt", limit=64 << 20), 1 << 12)
    assert [(block.data.to_pybytes(), block.records) for block in found] == [
        (b"1\n2\n", 2),
        (long, 1),
        *([(after, 2)] if after else []),
    ]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
@pytest.mark.parametrize("stopped", range(1, 9))
def test_reading_goes_on_with_the_next_record_after_it_was_interrupted_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, stopped: int
) -> None:
    whole = b"".join(b"line %d\n" % number for number in range(1000))
    path = tmp_path / f"lines{suffix}"
    path.write_bytes(gzip.compress(whole) if suffix.endswith(".gz") else whole)
    calls = count(1)

    class Interrupted:
        """A file that is read when Ctrl-C comes."""

        def __init__(self, file: ByteReader) -> None:
            self.readinto_file, self.close = file.readinto, file.close

        def readinto(self, buffer: Any) -> int | None:
            got = self.readinto_file(buffer)
            if next(calls) == stopped:
                raise KeyboardInterrupt
            return got

    opened = lambda *given, **named: Interrupted(open_input(*given, **named))  # noqa: E731
    monkeypatch.setattr("penstock.sources.blocks.open_input", opened)
    lines, interruptions, found = reader(path), 0, b""
    while True:
        try:
            block = lines.next(1500)
        except KeyboardInterrupt:
            interruptions += 1
            continue
        if block is None:
            break
        found += block.data.to_pybytes()
    assert interruptions == 1
    assert found == whole


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", [JsonlSource, CsvSource, TextSource])
def test_a_block_that_could_not_be_decoded_is_read_again(
    tmp_path: Path, kind: Any, resumed: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"rows{kind.suffixes[0]}"
    rows = [json.dumps({"n": n}) if kind is JsonlSource else str(n) for n in range(3000)]
    path.write_text("\n".join(["n"] * (kind is CsvSource) + rows) + "\n")
    monkeypatch.setattr(record_source, "_BATCH_BYTES", 5000)

    def read(source: Any, failing: int = 0) -> Iterator[Any]:
        decode, calls = source.decode, count(1)

        def fail_once(block: Any) -> Any:
            if next(calls) == failing:
                raise error
            return decode(block)

        source.decode = fail_once
        while (batch := source.next_batch(50)) is not None:
            yield from batch.column(0).to_pylist()

    source, found = kind(path), []
    with pytest.raises(error):
        found.extend(read(source, failing=3))
    taken = kind(path) if resumed else source
    if resumed:
        taken.load_state_dict(source.state_dict())
    assert 0 < len(found) < 3000
    found += read(taken)
    assert found == list(read(kind(path)))
