from __future__ import annotations

import tempfile
import threading
from collections import deque
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import wait_for

from penstock.engines.splits import FileSplit
from penstock.errors import ChangedFileError, ConfigError, DataError, ResumeError, SchemaError
from penstock.files.ranges.row_groups import ParquetReader, RowWidth
from penstock.files.states import with_checksum
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink
from penstock.sources import ParquetSource, columnar
from penstock.sources.splits import InputSplit
from penstock.testing import assert_source_contract

TABLE = pa.table({"n": range(100), "s": [f"row {i}" for i in range(100)], "v": [[i, None] for i in range(100)]})


def read(source: ParquetSource, max_rows: int = 1000) -> pa.Table:
    batches = []
    while (batch := source.next_batch(max_rows)) is not None:
        assert batch.schema.equals(source.schema)
        batches.append(batch)
    source.close()
    return pa.Table.from_batches(batches, source.schema)


def test_row_groups_come_in_order_and_as_they_were_written(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=30)
    for max_rows in (1, 7, 1000):
        assert read(ParquetSource(tmp_path / "a.parquet"), max_rows).equals(TABLE)
    assert ParquetSource(tmp_path / "a.parquet").size_hint() == 100


def test_a_parquet_source_keeps_the_contract_and_resumes_inside_row_groups(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 17), tmp_path / "1.parquet", row_group_size=5)
    pq.write_table(TABLE.slice(0, 0), tmp_path / "2.parquet")
    pq.write_table(TABLE.slice(17, 6), tmp_path / "3.pq")
    assert_source_contract(lambda: ParquetSource(tmp_path), TABLE.slice(0, 23).to_pylist())


def test_resuming_begins_at_the_row_group_that_holds_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=10)
    groups: list[int] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        groups.extend(options["row_groups"])
        return original(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    source = ParquetSource(tmp_path / "a.parquet")
    source.load_state_dict(with_checksum(source.state_dict() | {"row": 73}))
    assert read(source).equals(TABLE.slice(73))
    assert set(groups) == {7, 8, 9}


def test_only_the_columns_asked_for_are_read_in_that_order(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet", columns=["v", "n"])
    assert read(source).equals(TABLE.select(["v", "n"]))
    assert repr(source).endswith("a.parquet', columns=['v', 'n'])")
    with pytest.raises(SchemaError, match=r"'x'.*'n'"):
        ParquetSource(tmp_path / "a.parquet", columns=["x"]).next_batch(1)
    with pytest.raises(ConfigError, match="columns"):
        ParquetSource(tmp_path, columns="n")


def test_files_with_different_columns_and_widths_are_read_as_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1], pa.int32()), "s": [{"x": 1}]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"b": ["x"], "a": [2.5]}), tmp_path / "2.parquet")
    pq.write_table(pa.table({"a": pa.array([3], pa.int64()), "s": [{"x": 2, "y": "z"}]}), tmp_path / "3.parquet")
    source = ParquetSource(tmp_path)
    assert {field.name: str(field.type) for field in source.schema} == {
        "a": "double",
        "s": "struct<x: int64, y: string>",
        "b": "string",
    }
    assert read(source).to_pylist() == [
        {"a": 1.0, "s": {"x": 1, "y": None}, "b": None},
        {"a": 2.5, "s": None, "b": "x"},
        {"a": 3.0, "s": {"x": 2, "y": "z"}, "b": None},
    ]


def test_files_that_do_not_go_together_are_an_error_that_names_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [[1]]}), tmp_path / "2.parquet")
    with pytest.raises(SchemaError, match=r"2\.parquet"):
        ParquetSource(tmp_path).next_batch(1)


def test_integers_that_do_not_fit_the_type_of_all_files_are_an_error_that_names_the_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [2**53 + 1]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"a": [0.5]}), tmp_path / "2.parquet")
    with pytest.raises(SchemaError, match=r"'a'.*1\.parquet"):
        ParquetSource(tmp_path).next_batch(1)


def test_metadata_such_as_that_of_pandas_is_left_behind(tmp_path: Path) -> None:
    pq.write_table(TABLE.replace_schema_metadata({"pandas": "{}"}), tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet")
    batch = source.next_batch(10)
    source.close()
    assert batch is not None
    assert batch.schema.metadata is None


@pytest.mark.parametrize("first", [pa.string(), pa.string_view(), pa.large_string()])
def test_views_and_plain_values_of_several_files_are_plain_values(tmp_path: Path, first: pa.DataType) -> None:
    second = pa.string() if first == pa.string_view() else pa.string_view()
    for name, text, data in (("a", first, pa.binary()), ("b", second, pa.binary_view())):
        table = pa.table({"text": pa.array([name, None], text), "data": pa.array([b"x", b"y"], data)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    source = ParquetSource(tmp_path)
    plain = pa.large_string() if first == pa.large_string() else pa.string()
    assert source.schema == pa.schema([("text", plain), ("data", pa.binary())])
    assert read(source)["text"].to_pylist() == ["a", None, "b", None]


def test_wide_rows_are_read_a_few_at_a_time_even_if_they_are_small_in_the_file(tmp_path: Path) -> None:
    wide = pa.table({"t": ["x" * 200_000] * 64 + ["y" * 200_000] * 64})
    pq.write_table(wide, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 500_000
    source = ParquetSource(tmp_path / "a.parquet")
    assert source.next_batch(1) is not None
    assert source.memory_usage() < 2 << 20
    source.close()


def test_a_truncated_file_is_damaged_and_the_others_are_read(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 5), tmp_path / "1.parquet")
    pq.write_table(TABLE, tmp_path / "2.parquet")
    pq.write_table(TABLE.slice(5, 5), tmp_path / "3.parquet")
    whole = (tmp_path / "2.parquet").read_bytes()
    (tmp_path / "2.parquet").write_bytes(whole[: len(whole) // 2])
    source = ParquetSource(tmp_path)
    assert source.size_hint() is None
    assert source.next_batch(100).num_rows == 5  # type: ignore[union-attr]
    for _ in range(2):
        with pytest.raises(DataError, match=r"2\.parquet.*row 0\b"):
            source.next_batch(100)
    source.skip_file()
    assert read(source).equals(TABLE.slice(5, 5))
    with pytest.raises(DataError, match=r"2\.parquet"):
        ParquetSource(tmp_path / "2.parquet").next_batch(1)


def test_a_damaged_row_group_is_an_error_behind_the_good_ones(tmp_path: Path) -> None:
    source = ParquetSource(damaged(tmp_path / "a.parquet", 2))
    rows = 0
    with pytest.raises(DataError, match=r"row 50\b"):  # noqa: PT012
        while (batch := source.next_batch(10)) is not None:
            rows += batch.num_rows
    assert rows == 50
    with pytest.raises(DataError, match=r"row 50\b"):
        source.next_batch(10)


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"a\.parquet"):
        ParquetSource(tmp_path).next_batch(1)


def test_a_state_from_other_files_is_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path)
    source.next_batch(50)
    state = source.state_dict()
    source.close()
    pq.write_table(TABLE.slice(0, 10), tmp_path / "a.parquet")
    with pytest.raises(ResumeError, match=r"a\.parquet"):
        ParquetSource(tmp_path).load_state_dict(state)
    shorter = ParquetSource(tmp_path)
    shorter.load_state_dict(with_checksum(state | {"head": None, "size": None}))
    with pytest.raises(ResumeError, match=r"a\.parquet.*row 50\b"):
        shorter.next_batch(1)
    shorter.close()
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    with pytest.raises(ResumeError, match=r"'a\.parquet'.*'b\.parquet'"):
        ParquetSource(tmp_path).load_state_dict(state)
    pq.write_table(TABLE, tmp_path / "c.parquet")
    with pytest.raises(ResumeError, match=r"\b1\b.*\b2\b"):
        ParquetSource(tmp_path).load_state_dict(state)


def test_the_origin_is_the_first_row_of_the_batch_in_its_file(tmp_path: Path) -> None:
    pq.write_table(TABLE.slice(0, 5), tmp_path / "1.parquet")
    pq.write_table(TABLE.slice(5, 5), tmp_path / "2.parquet")
    source = ParquetSource(tmp_path)
    origins = []
    while source.next_batch(3) is not None:
        origin = source.origin()
        assert origin is not None
        origins.append((Path(origin.file).name, origin.row))
    assert origins == [("1.parquet", 0), ("1.parquet", 3), ("2.parquet", 0), ("2.parquet", 3)]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_blocks_hold_the_rows_wherever_reading_begins_and_however_it_goes_on(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    table = TABLE.slice(0, sum(sizes))
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "a.parquet")
        with pq.ParquetWriter(path, TABLE.schema) as writer:
            for start, size in zip(accumulate([0, *sizes]), sizes):
                writer.write_table(table.slice(start, size))
        source = ParquetSource(path, columns=data.draw(st.sampled_from([None, ["s", "n"]])))
        source.fit_budget(data.draw(st.sampled_from([1 << 10, 1 << 14, 1 << 16, 1 << 30])))
        begin = data.draw(st.integers(0, len(table)))
        source.load_state_dict(with_checksum(source.state_dict() | {"row": begin}))
        batches: list[pa.RecordBatch] = []
        while True:
            if data.draw(st.booleans()):
                batch = source.next_batch(data.draw(st.integers(1, 5)))
            else:
                block = source.next_block(data.draw(st.sampled_from([1, 300, 1 << 20])))
                batch = source.decode(block).batch if block is not None else None
                assert block is None or block.origin.row == begin + sum(b.num_rows for b in batches)
            if batch is None:
                break
            assert batch.num_rows
            batches.append(batch)
        source.close()
        assert pa.Table.from_batches(batches, source.schema).equals(table.slice(begin).select(source.schema.names))


def test_row_groups_that_are_large_against_the_budget_are_read_in_pieces(tmp_path: Path) -> None:
    wide = pa.table({"t": ["x" * 20_000] * 64})
    pq.write_table(wide, tmp_path / "a.parquet", row_group_size=16)
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    for budget, rows in (("64 MiB", 16), ("1 MiB", 1)):
        source = ParquetSource(tmp_path / "a.parquet")
        source.fit_budget(MemoryBudget(budget).capacity)
        block = source.next_block(1 << 14)
        assert block is not None
        assert isinstance(block.data, pa.RecordBatch) == (rows == 1)
        assert 20_000 * rows <= block.nbytes < 21_000 * rows
        assert source.decode(block).batch.num_rows == rows
        source.close()


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_row_groups_that_are_decoded_ahead_come_in_order(data: st.DataObject) -> None:
    cores = data.draw(st.integers(2, 4))
    files = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=6), min_size=1, max_size=3))
    table = pa.table(
        {"n": range(sum(map(sum, files))), "s": [f"row {i} " * (i % 7) for i in range(sum(map(sum, files)))]}
    )
    rest = table
    with (
        tempfile.TemporaryDirectory() as home,
        patch.multiple(columnar, available_cores=lambda: cores, _LEAST_BUDGET=0),
    ):
        for number, sizes in enumerate(files):
            with pq.ParquetWriter(Path(home, f"{number}.parquet"), table.schema) as writer:
                for size in sizes:
                    writer.write_table(rest.slice(0, size), row_group_size=max(1, size))
                    rest = rest.slice(size)
        source = ParquetSource(home)
        source.fit_budget(data.draw(st.sampled_from([1 << 10, 1 << 12, 1 << 16])))
        source._piece_bytes = data.draw(st.sampled_from([64, 512]))
        source._whole_bytes = data.draw(st.sampled_from([0, 0, 256]))
        begin = data.draw(st.integers(0, sum(files[0])))
        source.load_state_dict(with_checksum(source.state_dict() | {"row": begin}))
        read, stop = [], data.draw(st.none() | st.integers(0, 4))
        while (block := source.next_block(data.draw(st.sampled_from([1, 300])))) is not None:
            read.append(source.decode(block).batch)
            assert source.memory_usage() >= 0
            if len(read) == stop:
                break
        source.close()
        whole = pa.Table.from_batches(read, source.schema)
        assert whole.equals(table.slice(begin, whole.num_rows if stop is not None else None))
    assert not [thread.name for thread in threading.enumerate() if thread.name == "penstock-ahead"]


def test_threads_decode_row_groups_ahead_within_an_eighth_of_the_budget(tmp_path: Path) -> None:
    rows = pa.table({"text": [f"{number:06}" * 200 for number in range(4000)]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=500, use_dictionary=False)
    source, budget = ParquetSource(tmp_path / "a.parquet"), 1 << 20
    with patch.multiple(columnar, available_cores=lambda: 4, _LEAST_BUDGET=0):
        source.fit_budget(budget)
    first = source.next_block(1 << 14)
    assert first is not None
    ahead = source._opened._ahead  # type: ignore[union-attr]
    wait_for(lambda: len(ahead) == 3 and all(pieces.held_bytes for _, pieces in ahead), "three row groups ahead")
    held = [pieces.held_bytes for _, pieces in ahead]
    assert sum(held) <= budget // 8 + 3 * source._piece_bytes
    source.close()


def damaged(path: Path, group: int) -> Path:
    pq.write_table(TABLE.select(["n"]), path, row_group_size=25, compression="zstd", use_dictionary=False)
    place = pq.read_metadata(path).row_group(group).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[place : place + 60] = b"\xff" * 60
    path.write_bytes(bytes(data))
    return path


def test_rows_of_the_next_file_are_as_wide_as_its_own(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": [f"{number:0100}" for number in range(2000)]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"t": ["x" * 20_000] * 2000}), tmp_path / "b.parquet")
    source = ParquetSource(tmp_path)
    with patch.multiple(columnar, available_cores=lambda: 2, _LEAST_BUDGET=0):
        source.fit_budget(1 << 20)
    assert source.next_block(1 << 14) is not None
    assert source.next_block(1 << 14) is not None
    assert source._following is not None
    ((_, ahead),) = source._following[1]._ahead
    wait_for(lambda: ahead.held_bytes, "a piece of the next file")
    assert ahead.held_bytes < 1 << 16
    source.close()


def test_row_groups_of_another_width_are_not_decoded_ahead(tmp_path: Path) -> None:
    narrow, wide = pa.table({"t": [f"{number:0100}" for number in range(2000)]}), pa.table({"t": ["x" * 20_000] * 2000})
    with pq.ParquetWriter(tmp_path / "a.parquet", narrow.schema) as writer:
        for rows in (narrow, narrow, wide, wide, wide):
            writer.write_table(rows)
    source = ParquetSource(tmp_path / "a.parquet")
    with patch.multiple(columnar, available_cores=lambda: 4, _LEAST_BUDGET=0):
        source.fit_budget(1 << 20)
    assert source.next_block(1 << 14) is not None
    ahead = source._opened._ahead  # type: ignore[union-attr]
    assert [group for group, _ in ahead] == [1]
    source.close()


def test_damage_in_a_row_group_that_is_probed_ahead_is_reported_in_its_place(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in files:
        pq.write_table(pa.table({"n": pa.nulls(40_000, pa.null())}), path, row_group_size=20_000)
        column = pq.read_metadata(path).row_group(1 if path == files[0] else 0).column(0)
        place = column.dictionary_page_offset or column.data_page_offset
        data = bytearray(path.read_bytes())
        data[place : place + 10] = b"\xff" * 10
        path.write_bytes(bytes(data))
    source = ParquetSource(files)
    with patch.multiple(columnar, available_cores=lambda: 4, _LEAST_BUDGET=0):
        source.fit_budget(1 << 20)
    found: list[tuple[str, int | None] | int] = []
    while True:
        try:
            if (block := source.next_block(1 << 20)) is None:
                break
            found.append(source.decode(block).batch.num_rows)
        except DataError as error:
            found.append((Path(str(error.file)).name, error.row))
            source.skip_file()
    source.close()
    assert [each for each in found if not isinstance(each, int)] == [("a.parquet", 20_000), ("b.parquet", 0)]
    assert sum(each for each in found if isinstance(each, int)) == 40_000


def test_a_next_file_that_changes_after_it_was_begun_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in files:
        pq.write_table(pa.table({"n": range(60_000)}), path, use_dictionary=False)
    source = ParquetSource(files)
    with patch.multiple(columnar, available_cores=lambda: 2, _LEAST_BUDGET=0):
        source.fit_budget(1 << 20)
    assert source.next_block(1 << 14) is not None
    source.reset()
    assert source.next_block(1 << 14) is not None
    assert source.next_block(1 << 14) is not None
    assert source._following is not None
    pq.write_table(pa.table({"n": range(1, 60_001)}), tmp_path / "new", use_dictionary=False)
    (tmp_path / "new").replace(files[1])
    with pytest.raises(ChangedFileError, match=r"b\.parquet"):
        deque(iter(partial(source.next_block, 1 << 14), None))
    source.close()


class _LatePieces:
    """Pieces of a thread that is so late that they are decoded when they are taken."""

    held_bytes = 0

    def __init__(self, pieces: Any, *, nbytes: int) -> None:
        self.close, self._pieces = pieces.close, pieces

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> pa.RecordBatch:
        return next(self._pieces)


def test_rows_of_a_file_that_took_the_place_of_another_are_not_delivered(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.parquet", 100_000
    for place, first in ((path, 0), (tmp_path / "new", rows)):
        numbers = pa.table({"n": range(first, first + rows)})
        pq.write_table(numbers, place, row_group_size=20_000, use_dictionary=False, compression="none")
    source, read = ParquetSource(path), ParquetReader.next
    with (
        patch.multiple(columnar, available_cores=lambda: 2, _LEAST_BUDGET=0),
        patch.object(columnar, "_PiecesAhead", _LatePieces),
    ):
        source.fit_budget(1 << 20)

    def replacing(reader: ParquetReader, max_rows: int) -> pa.RecordBatch | None:
        if reader._group == 1 and not reader._left and (tmp_path / "new").exists():
            (tmp_path / "new").replace(path)
        return read(reader, max_rows)

    seen: list[int] = []
    blocks = iter(partial(source.next_block, 1 << 14), None)
    with patch.object(ParquetReader, "next", replacing), pytest.raises(ChangedFileError):
        seen.extend(number for block in blocks for number in source.decode(block).batch["n"].to_pylist())
    source.close()
    assert seen == list(range(20_000))


def test_only_what_is_read_on_is_decoded_ahead(tmp_path: Path) -> None:
    path = damaged(tmp_path / "a.parquet", 2)
    rejected = 0
    with (
        patch.multiple(columnar, available_cores=lambda: 4, _LEAST_BUDGET=0),
        patch.object(columnar, "_PiecesAhead") as begun,
    ):
        source = ParquetSource(path)
        source.fit_budget(1 << 26)
        while (block := source.next_block(1 << 20)) is not None:
            rejected += len(source.decode(block).rejected)
        part = FileSplit(ParquetSource(path), InputSplit(0, 25, 50, 100))
        part.fit_budget(1 << 20)
        while part.next_batch(1000) is not None:
            pass
        source.close()
        part.close()
    assert rejected == 1
    assert not begun.called


@pytest.mark.parametrize("budget", [8, (256 << 20) - 1])
def test_a_small_budget_decodes_nothing_ahead(tmp_path: Path, budget: int) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=10)
    source = ParquetSource(tmp_path / "a.parquet")
    with patch.object(columnar, "available_cores", lambda: 4), patch.object(columnar, "_PiecesAhead") as begun:
        source.fit_budget(budget)
        source._whole_bytes = 0
        rows = 0
        while (block := source.next_block(1)) is not None:
            rows += source.decode(block).batch.num_rows
    source.close()
    assert rows == TABLE.num_rows
    assert not begun.called


@pytest.mark.parametrize("budget", ["8 KiB", "64 MiB"], ids=["in pieces", "as a whole"])
@pytest.mark.parametrize("workers", [1, 3])
def test_damage_costs_a_row_group_and_the_others_are_read(tmp_path: Path, budget: str, workers: int) -> None:
    files = [damaged(tmp_path / "1.parquet", 2), damaged(tmp_path / "2.parquet", 0)]
    sink = MemorySink()
    config = PipelineConfig(workers=workers, on_error="skip")
    report = Pipeline(ParquetSource(files), [], sink, config, MemoryBudget(budget)).run()
    assert [row["n"] for row in sink.rows()] == [*range(50), *range(75, 100), *range(25, 100)]
    assert report.skipped == {f"{ParquetSource(files)!r}: the rest of a row group is unreadable": 2}
    with pytest.raises(DataError, match=r"1\.parquet.*row 50\b") as caught:
        Pipeline(ParquetSource(files), [], MemorySink(), PipelineConfig(workers=workers), MemoryBudget(budget)).run()
    assert (caught.value.file, caught.value.row) == (str(files[0]), 50)


def test_rows_before_the_damage_are_kept_and_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = pa.table({"n": range(100_000)})
    pq.write_table(rows, path, row_group_size=4096, compression="zstd", use_dictionary=False, data_page_size=2048)
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 1500] = b"\xff" * 1500
    path.write_bytes(bytes(data))
    source = ParquetSource(path)
    source.fit_budget(1 << 20)  # small pieces, so that some of the row group can be read
    source._whole_bytes = 1 << 24
    block = source.next_block(1 << 20)
    assert block is not None
    decoded = source.decode(block)
    source.close()
    kept = decoded.batch.column("n").to_pylist()
    (lost,) = decoded.rejected
    assert decoded.rows == tuple(kept)
    assert lost.row is not None
    assert 4096 < lost.row < 8192
    assert kept == [*range(lost.row), *range(8192, 16384)]


def rare(count: int) -> pa.Table:
    """One long text in a thousand rows, and none or an empty one in the others, in columns of all kinds."""
    texts = ["x" * 20_000 + str(row % 9_000) if row % 1000 == 0 else "" for row in range(count)]
    some = pa.array([text or None for text in texts])
    all_ = pa.array(texts)
    ends = pa.array(range(count + 1), pa.int32())
    return pa.table(
        {
            "id": range(count),
            "some": some,
            "all": all_,
            "struct": pa.StructArray.from_arrays([all_], names=["text"]),
            "list": pa.ListArray.from_arrays(ends, all_),
            "map": pa.MapArray.from_arrays(ends, all_, pa.array(range(count))),
            "lists": pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([some], names=["text"])),
        }
    )


@pytest.mark.parametrize("name", rare(1).schema.names)
def test_long_texts_that_are_rare_do_not_make_all_pieces_small(tmp_path: Path, name: str) -> None:
    table = rare(50_000).select(["id", name])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50_000)
    source = ParquetSource(tmp_path / "a.parquet")
    source.fit_budget(64 << 20)
    pieces = 0
    while (block := source.next_block(1 << 20)) is not None:
        pieces += source.decode(block).batch.num_rows > 0
    source.close()
    assert pieces < 60


@pytest.mark.parametrize("damage", ["gone", "replaced"])
def test_a_file_that_is_gone_while_it_is_open_is_read_on(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"] * 50}), path)
    reader = ParquetReader(path, lambda schema: None, 4 << 20, None, pages=False)
    path.unlink()
    if damage == "replaced":
        path.write_bytes(b"\xff" * 1000)
    batch = reader.next(10)
    reader.close()
    assert batch is not None
    assert batch.num_rows == 10


def test_a_file_that_is_gone_when_its_rows_are_decoded_is_no_damage(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet")
    block = source.next_block(1 << 16)
    source.close()
    (tmp_path / "a.parquet").unlink()
    assert block is not None
    with pytest.raises(ChangedFileError, match=r"a\.parquet"):
        source.decode(block)


def test_the_width_of_rows_is_taken_from_files_before_that_are_encoded_alike(tmp_path: Path) -> None:
    def group(name: str, texts: list[str], **options: Any) -> Any:
        pq.write_table(pa.table({"text": texts, "id": range(len(texts))}), tmp_path / name, **options)
        return pq.read_metadata(tmp_path / name).row_group(0)

    texts = [f"{number:05}" * 40 for number in range(1000)]
    width = RowWidth()
    first = group("first.parquet", texts)
    assert width.of(first, None) == 0
    width.note(first, None, 212.0)
    assert width.of(group("alike.parquet", texts[::-1]), None) == pytest.approx(212, rel=0.1)
    assert width.of(group("wider.parquet", [text + "x" * 150 for text in texts]), None) > 300
    # One long text in a dictionary: few bytes as encoded, many as decoded.
    assert width.of(group("repeated.parquet", ["x" * 10_000] * 1000), None) == 0
    assert width.of(group("plain.parquet", texts, use_dictionary=False), None) == 0
    assert width.of(first, ["id"]) == 0


def test_small_files_whose_rows_are_wider_than_those_before_stay_within_the_budget(tmp_path: Path) -> None:
    for number in range(6):
        wide = number % 2
        texts = ["x" * 50_000] * 500 if wide else [f"{row}" for row in range(500)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number}.parquet")
    budget = MemoryBudget("64 MiB")
    sizes: list[int] = []
    for batch in Pipeline(ParquetSource(tmp_path), budget=budget):
        sizes.append(batch.num_rows)
        assert batch.nbytes < budget.capacity // 8
    assert sum(sizes) == 3000


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_rows_whose_delivery_was_interrupted_are_read_again(tmp_path: Path, error: type[BaseException]) -> None:
    pq.write_table(pa.table({"n": range(1000)}), tmp_path / "a.parquet", row_group_size=300)
    source = ParquetSource(tmp_path / "a.parquet")
    rows_of, calls = source.rows_of, count(1)

    def fail_once(*given: Any) -> Any:
        if next(calls) == 3:
            raise error
        return rows_of(*given)

    source.rows_of = fail_once  # type: ignore[method-assign]
    found: list[int] = []

    def read() -> None:
        while (batch := source.next_batch(100)) is not None:
            found.extend(batch["n"].to_pylist())

    with pytest.raises(error):
        read()
    assert len(found) == 200
    read()
    assert found == list(range(1000))


@pytest.mark.parametrize("where", ["the next row group", "the next file"])
def test_rows_that_are_wider_than_those_before_keep_to_the_budget(tmp_path: Path, where: str) -> None:
    short, long = (pa.table({"id": range(40_000), "text": [text] * 40_000}) for text in ("a", "y" * 8000))
    if where == "the next file":
        pq.write_table(short, tmp_path / "0.parquet", row_group_size=40_000)
        pq.write_table(long, tmp_path / "1.parquet", row_group_size=40_000)
    else:
        with pq.ParquetWriter(tmp_path / "0.parquet", short.schema) as writer:
            for table in (short, long):
                writer.write_table(table, row_group_size=40_000)
    del short, long
    pipeline = Pipeline(ParquetSource(tmp_path), config=PipelineConfig(workers=2), budget="64 MiB")
    assert sum(batch.num_rows for batch in pipeline) == 80_000
    assert pipeline.budget.peak < 80 << 20


def test_long_texts_that_lie_side_by_side_keep_to_the_budget(tmp_path: Path) -> None:
    texts = pa.array([""] * 190_000 + ["y" * 50_000] * 5_000)  # 250 MB in memory, behind rows of nothing
    pq.write_table(pa.table({"id": range(195_000), "text": texts}), tmp_path / "a.parquet", row_group_size=195_000)
    del texts
    pipeline = Pipeline(ParquetSource(tmp_path / "a.parquet"), config=PipelineConfig(workers=2), budget="64 MiB")
    assert sum(batch.num_rows for batch in pipeline) == 195_000
    assert pipeline.budget.peak < 80 << 20


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_are_wider_than_the_first_ones_keep_to_the_budget(tmp_path: Path, nested: bool) -> None:
    texts = pa.array([""] * 1000 + ["y" * 8000] * 40_000)  # a few kilobytes in the file, 320 MB in memory
    if nested:
        texts = pa.ListArray.from_arrays(pa.array(range(0, 41_001), pa.int32()), texts)
    pq.write_table(pa.table({"id": range(41_000), "text": texts}), tmp_path / "a.parquet", row_group_size=41_000)
    del texts
    pipeline = Pipeline(ParquetSource(tmp_path / "a.parquet"), config=PipelineConfig(workers=2), budget="64 MiB")
    assert sum(batch.num_rows for batch in pipeline) == 41_000
    assert pipeline.budget.peak < 80 << 20
