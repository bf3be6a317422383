"""Stretches: read each by itself, in any order and in any pieces, they hold every row once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DataError
from penstock.sources import (
    ArrowSource,
    CsvSource,
    IteratorSource,
    JsonlSource,
    MemorySource,
    ParquetSource,
    TextSource,
)
from penstock.sources.splits import InputSplit, open_split, split_input


def rows_of(source: Any, stretch: InputSplit, records: int = 1 << 30, nbytes: int = 1 << 30) -> list[tuple[int, str]]:
    """(place, text) of a stretch, read with these limits."""
    found: list[tuple[int, str]] = []
    with closing(open_split(source, stretch)) as reader:
        while (cut := reader.cut(records, nbytes)) is not None:
            rows = reader.decode(cut)
            found += zip(rows.places.tolist(), rows.batch.column("text").to_pylist())
    return found


def all_rows(source: Any, stretches: Sequence[InputSplit]) -> list[tuple[int, str]]:
    return [row for stretch in stretches for row in rows_of(source, stretch)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.text("ab\u00e9", max_size=12), min_size=1, max_size=30),
    ending=st.booleans(),
    target=st.integers(1, 40),
    records=st.integers(1, 5),
    nbytes=st.integers(1, 30),
)
def test_a_line_belongs_to_the_stretch_it_begins_in(
    tmp_path: Path, lines: list[str], ending: bool, target: int, records: int, nbytes: int
) -> None:
    path = tmp_path / "a.txt"
    data = "\n".join(lines) + ("\n" if ending else "")
    path.write_text(data, "utf-8")
    source = TextSource(path)
    places, expected = 0, []
    for line in data.removesuffix("\n").split("\n") if data else []:
        expected.append((places, line))
        places += len(line.encode()) + 1
    stretches = split_input(source, target)
    assert sum(stretch.nbytes for stretch in stretches) == len(data.encode())
    assert all_rows(source, stretches) == expected
    for stretch in stretches:
        own = rows_of(source, stretch)
        assert all(stretch.start <= place < (stretch.stop or 0) for place, _ in own)
        assert rows_of(source, stretch, records, nbytes) == own


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 30), min_size=1, max_size=25), st.integers(1, 60), st.integers(1, 4), st.integers(1, 60))
def test_a_reader_opened_where_another_stood_cuts_the_same(
    tmp_path: Path, sizes: list[int], target: int, records: int, nbytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{"x" * size}"}}\n' + "\n" * (size % 3) for size in sizes), "utf-8")
    source = JsonlSource(path)
    for stretch in split_input(source, target):
        with closing(open_split(source, stretch)) as whole:
            while True:
                with closing(open_split(source, stretch, whole.at)) as again:
                    one, other = whole.cut(records, nbytes), again.cut(records, nbytes)
                assert (one is None) == (other is None)
                if one is None or other is None:
                    break
                assert one.records <= records
                assert (one.first, one.records, one.nbytes) == (other.first, other.records, other.nbytes)
                assert bytes(one.data) == bytes(other.data)


def test_columnar_files_are_cut_between_groups(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{i}" * 10 for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=10)
    expected = list(enumerate(table.column("text").to_pylist()))
    for source in (ParquetSource(tmp_path / "a.parquet"), ArrowSource(tmp_path / "a.arrow")):
        for target in (1, 300, 1 << 20):
            stretches = split_input(source, target)
            assert all(stretch.start % 10 == 0 for stretch in stretches)
            assert all_rows(source, stretches) == expected
        assert len(split_input(source, 1)) == 10
        assert rows_of(source, stretches[0], records=7) == expected


def test_a_file_that_cannot_be_cut_is_one_stretch(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\n"one\nline"\n"two"\n', "utf-8")
    source = CsvSource(path)
    (stretch,) = split_input(source, 1)
    assert [text for _, text in rows_of(source, stretch, records=1)] == ["one\nline", "two"]


def test_rows_have_the_types_of_their_own_stretch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a long one, longer than the other", "n": 1}\n{"text": "b", "n": "x", "late": true}\n', "utf-8"
    )
    source = JsonlSource(path)
    first, second = split_input(source, 50)
    kinds = []
    for stretch in (first, second):
        with closing(open_split(source, stretch)) as reader:
            cut = reader.cut(10, 1 << 20)
            assert cut is not None
            kinds.append(reader.decode(cut).batch.schema)
    assert kinds == [
        pa.schema([("text", pa.string()), ("n", pa.int64())]),
        pa.schema([("text", pa.string()), ("n", pa.string()), ("late", pa.bool_())]),
    ]


def test_damage_is_told_behind_the_last_good_row_and_can_be_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n" + "x" * 100 + "\nc\n", "utf-8")
    source = TextSource(path, max_row_bytes=50)
    (stretch,) = split_input(source, 1 << 20)
    with closing(open_split(source, stretch)) as reader:
        cut = reader.cut(10, 1 << 20)
        assert cut is not None
        assert cut.records == 2
        with pytest.raises(DataError, match=r"a\.txt, byte 4: .*max_row_bytes"):
            reader.cut(10, 1 << 20)
        assert reader.skip_bad() == "longer than max_row_bytes"
        cut = reader.cut(10, 1 << 20)
        assert cut is not None
        assert reader.decode(cut).batch.to_pylist() == [{"text": "c"}]
        assert reader.decode(cut).places.tolist() == [105]


def test_a_source_that_is_read_from_its_beginning_on_is_one_split() -> None:
    source = IteratorSource(lambda: ({"a": n} for n in range(10)))
    (split,) = split_input(source, 1)
    reader = open_split(source, split, 4)
    rows = [
        batch.batch["a"].to_pylist() for cut in iter(lambda: reader.cut(3, 100), None) if (batch := reader.decode(cut))
    ]
    assert rows == [[4, 5, 6], [7, 8, 9]]
    assert split_input(MemorySource([{"a": n} for n in range(10)]), 20)[-1].stop == 10
