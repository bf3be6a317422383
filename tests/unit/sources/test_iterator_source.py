from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.states import with_checksum
from penstock.sinks import MemorySink
from penstock.sources import IteratorSource
from penstock.testing import assert_source_contract

ROWS = [{"n": i, "s": f"row {i}"} for i in range(30)]


def rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


def batches() -> Iterator[Any]:
    yield pa.RecordBatch.from_pylist(ROWS[:4])
    yield pa.RecordBatch.from_pylist(ROWS[:0], schema=pa.RecordBatch.from_pylist(ROWS).schema)
    yield pa.Table.from_pylist(ROWS[4:15])
    yield from ROWS[15:20]
    yield pa.RecordBatch.from_pylist(ROWS[20:])


def read(source: IteratorSource, max_rows: int = 7) -> list[dict[str, Any]]:
    found = []
    while (batch := source.next_batch(max_rows)) is not None:
        found += batch.to_pylist()
    return found


@pytest.mark.parametrize("items", [rows, ROWS, batches, lambda: iter(ROWS)])
def test_rows_batches_and_tables_of_anything_that_starts_again_keep_the_contract(items: Any) -> None:
    assert_source_contract(lambda: IteratorSource(items), ROWS)


def test_an_iterator_runs_once_and_says_so() -> None:
    source = IteratorSource(iter(ROWS))
    assert read(source) == ROWS
    with pytest.raises(ConfigError, match="IteratorSource"):
        source.reset()
    with pytest.raises(ResumeError, match="IteratorSource"):
        source.load_state_dict({"row": 3, "schema": None})


def test_a_fresh_iterator_can_be_moved_to_a_saved_row() -> None:
    source = IteratorSource(iter(ROWS))
    source.next_batch(11)
    fresh = IteratorSource(iter(ROWS))
    fresh.load_state_dict(source.state_dict())
    assert read(fresh) == ROWS[11:]


@pytest.mark.parametrize("max_rows", [1, 5, 1000])
def test_the_schema_is_learned_from_the_same_rows_however_many_are_asked_for(max_rows: int) -> None:
    data = [{"a": None} for _ in range(200)] + [{"a": 1}, {"a": 2.5}]
    batch = IteratorSource(data).next_batch(max_rows)
    assert batch is not None
    assert batch.schema == pa.schema([("a", pa.float64())])


def test_rows_that_do_not_fit_the_learned_schema_are_named() -> None:
    data = [{"a": i} for i in range(300)] + [{"a": "x"}]
    source = IteratorSource(data)
    with pytest.raises(DataError, match=r"'a'.*'x'"):
        read(source)
    source = IteratorSource([{"a": i} for i in range(300)] + [{"a": 1, "b": 2}])
    with pytest.raises(DataError, match=r"row 300\b.*'b'"):
        read(source)


def test_something_else_than_rows_is_refused_with_its_place() -> None:
    with pytest.raises(DataError, match=r"row 0\b.*RecordBatch"):
        read(IteratorSource([1, 2]))
    source = IteratorSource([*ROWS[:3], None])
    assert source.next_batch(10).num_rows == 3  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"row 3\b.*NoneType"):
        source.next_batch(10)
    with pytest.raises(ConfigError, match=r"(?i)iterable.*\b5\b"):
        IteratorSource(5)  # type: ignore[arg-type]


def test_batches_of_another_schema_are_refused_unless_a_given_one_fits_both() -> None:
    data = [pa.record_batch({"a": [1]}), pa.record_batch({"a": ["x"]})]
    with pytest.raises(DataError, match=r"schema.*'a'"):
        read(IteratorSource(data))
    schema = pa.schema([("a", pa.float64())])
    both = [pa.record_batch({"b": [0], "a": [1]}), pa.record_batch({"a": [2.5]})]
    assert read(IteratorSource(both, schema=schema)) == [{"a": 1.0}, {"a": 2.5}]
    with pytest.raises(DataError, match="schema"):
        read(IteratorSource([pa.record_batch({"z": [1]})], schema=schema))


def test_thousands_of_empty_batches_are_no_end_and_no_trouble() -> None:
    nothing = pa.record_batch({"a": pa.array([], pa.int64())})
    assert read(IteratorSource([nothing] * 5000 + [pa.record_batch({"a": [1]})])) == [{"a": 1}]


def test_an_iterator_that_became_shorter_or_changed_its_columns_is_refused() -> None:
    source = IteratorSource(ROWS)
    source.next_batch(20)
    state = source.state_dict()
    with pytest.raises(ResumeError, match=r"row 20\b"):
        IteratorSource(ROWS[:10]).load_state_dict(state)
    wide = [{f"column {i}": j for i in range(1000)} for j in range(5)]
    source = IteratorSource(wide)
    source.next_batch(2)
    state = source.state_dict()
    assert len(str(state)) < 4096
    fresh = IteratorSource(wide)
    fresh.load_state_dict(state)
    assert read(fresh) == wide[2:]
    with pytest.raises(ResumeError):
        IteratorSource([{**row, "new": 1} for row in wide]).load_state_dict(state)


def test_resuming_does_not_hold_the_rows_it_passes_over() -> None:
    seen = []

    def many() -> Iterator[dict[str, Any]]:
        for i in range(5000):
            seen.append(i)
            yield {"n": i}

    source = IteratorSource(many, schema=pa.schema([("n", pa.int64())]))
    source.load_state_dict(with_checksum(source.state_dict() | {"row": 4500}))
    assert len(seen) == 4500
    assert source.memory_usage() == 0
    assert read(source)[0] == {"n": 4500}


def test_what_the_iterator_raises_comes_through() -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        raise ZeroDivisionError("inside the iterator")

    with pytest.raises(ZeroDivisionError, match="inside the iterator"):
        read(IteratorSource(broken))


def numbers_with_bad_rows() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [{"n": number} for number in range(1000)]
    for bad in (300, 301, 777):
        rows[bad] = {"n": "no number"}
    return rows


def test_rows_that_do_not_fit_are_left_out_and_counted() -> None:
    sink = MemorySink()
    config = PipelineConfig(on_error="skip", batch_rows=100)
    report = Pipeline(IteratorSource(numbers_with_bad_rows), [], sink, config=config).run()
    assert sink.table()["n"].to_pylist() == [n for n in range(1000) if n not in (300, 301, 777)]
    assert sum(report.skipped.values()) == 3


def test_rows_that_do_not_fit_are_put_into_quarantine_with_their_number(tmp_path: Path) -> None:
    config = PipelineConfig(on_error="quarantine", quarantine=tmp_path / "bad.jsonl")
    Pipeline(IteratorSource(numbers_with_bad_rows), [], MemorySink(), config=config).run()
    kept = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in kept] == [300, 301, 777]


def read_into(seen: list[int], source: IteratorSource) -> None:
    while (batch := source.next_batch(250)) is not None:
        seen += batch["n"].to_pylist()


def test_a_bad_row_is_an_error_in_its_place_and_reading_goes_on_behind_it() -> None:
    source = IteratorSource(numbers_with_bad_rows)
    seen: list[int] = []
    for bad in (300, 301, 777):
        with pytest.raises(DataError, match=f"row {bad}"):
            read_into(seen, source)
        assert source.skip_file() == "the row does not fit"
    read_into(seen, source)
    assert seen == [n for n in range(1000) if n not in (300, 301, 777)]


def test_resuming_passes_over_bad_rows() -> None:
    source = IteratorSource(numbers_with_bad_rows)
    while (source.next_batch(256) is not None) and source.state_dict()["row"] < 300:
        pass
    source.skip_file()
    source.skip_file()
    fresh = IteratorSource(numbers_with_bad_rows)
    fresh.load_state_dict(source.state_dict())
    batch = fresh.next_batch(3)
    assert batch is not None
    assert batch["n"].to_pylist() == [302, 303, 304]


def test_rows_that_do_not_go_together_are_an_error_even_where_bad_rows_may_be_left_out() -> None:
    source = IteratorSource([{"n": 1}, {"n": "one"}])
    with pytest.raises(SchemaError, match="'n'"):
        Pipeline(source, [], MemorySink(), config=PipelineConfig(on_error="skip")).run()


def test_a_row_that_fits_nothing_does_not_take_the_rows_before_it_along() -> None:
    sink = MemorySink()
    rows = [{"n": 1}, {"n": object()}, {"n": 2}]
    Pipeline(IteratorSource(rows), [], sink, config=PipelineConfig(on_error="skip")).run()
    assert sink.table()["n"].to_pylist() == [1, 2]
