"""Functions as transforms: bare, with options, in pipelines and in other processes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock import DataProcessor as PublicDataProcessor
from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, ResumeError, StageError
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.transforms.functions import CustomTransform, DataProcessor, Transform, transform

TABLE = pa.table({"n": list(range(100)), "text": [f"row {i}" for i in range(100)]})


@transform
def doubled(row: dict[str, Any]) -> dict[str, Any]:
    """Twice the number."""
    return {**row, "n": 2 * row["n"]}


@transform
def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, "text", pc.utf8_upper(batch["text"]))


@transform
def shortened(row: dict[str, Any], *, length: int, mark: str = "") -> dict[str, Any]:
    return {**row, "text": row["text"][:length] + mark}


def rows_of(stages: list[Any], workers: Any = 2) -> list[dict[str, Any]]:
    sink = MemorySink()
    config = PipelineConfig(workers=workers, max_workers=2, batch_rows=30)
    Pipeline(MemorySource(TABLE), stages, sink, config=config).run()
    return sink.rows()


def test_data_processor_is_transform() -> None:
    assert DataProcessor is Transform is PublicDataProcessor


@pytest.mark.parametrize("workers", [2, "process"])
def test_decorated_functions_run_in_a_pipeline_bare_and_called(workers: Any) -> None:
    offset = 1000

    @transform(schema=pa.schema([("n", pa.int16()), ("text", pa.string())]))
    def moved(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "n": row["n"] + offset}

    rows = rows_of([doubled, upper(), shortened(length=4, mark="!"), moved], workers)
    assert rows[:2] == [{"n": 1000, "text": "ROW !"}, {"n": 1002, "text": "ROW !"}]
    assert [row["n"] for row in rows] == list(range(1000, 1200, 2))
    assert repr(moved) == "moved()"


def test_a_batch_function_is_known_by_its_annotation_or_by_saying_so() -> None:
    @transform(batch=True)
    def first(batch):  # type: ignore[no-untyped-def]
        return batch[:1]

    batch = TABLE.to_batches()[0]
    assert first.transform(batch).num_rows == 1
    assert upper.transform(batch)["text"][0].as_py() == "ROW 0"


def test_the_decorated_name_is_still_the_function() -> None:
    assert doubled({"n": 4}) == {"n": 8}
    assert shortened({"text": "abcdef"}, length=2) == {"text": "ab"}
    assert shortened(length=3)({"text": "abcdef"}) == {"text": "abc"}
    assert doubled.__doc__ == "Twice the number."
    assert doubled.__name__ == "doubled"


def test_options_add_up_and_show_in_the_name() -> None:
    first = shortened(length=4)
    second = first(mark="…")
    assert (repr(shortened), repr(first), repr(second)) == (
        "shortened()",
        "shortened(length=4)",
        "shortened(length=4, mark='…')",
    )
    assert isinstance(second, CustomTransform)
    assert first.options == {"length": 4}


def test_each_copy_learns_its_own_columns() -> None:
    @transform
    def cast(row: dict[str, Any], *, to: type) -> dict[str, Any]:
        return {"n": to(row["n"])}

    batch = pa.record_batch({"n": ["1", "2"]})
    assert cast(to=int).transform(batch).schema.field("n").type == pa.int64()
    assert cast(to=str).transform(batch).schema.field("n").type == pa.string()


def test_an_unknown_option_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'size'.*'length'"):
        shortened(size=3)
    with pytest.raises(ConfigError, match="'by'"):
        doubled(by=3)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"shortened\(\).*shortened\(length=\.\.\.\)"):
        shortened.transform(TABLE.to_batches()[0])


def test_only_functions_can_be_decorated() -> None:
    with pytest.raises(ConfigError, match="@transform"):
        transform(3)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="@transform"):
        transform(dict)


def test_an_error_in_the_function_names_it() -> None:
    @transform
    def picky(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("nothing suits")

    with pytest.raises(StageError, match=r"picky\(\)"):
        rows_of([picky])


def test_a_state_is_refused_if_the_options_are_others() -> None:
    pipeline = Pipeline(MemorySource(TABLE), [shortened(length=5)], config=PipelineConfig(batch_rows=30))
    next(batches := iter(pipeline))
    state = pipeline.state_dict()
    batches.close()  # type: ignore[attr-defined]
    with pytest.raises(ResumeError, match=r"shortened\(length=5\).*shortened\(length=12\)"):
        Pipeline(MemorySource(TABLE), [shortened(length=12)]).load_state_dict(state)
    again = Pipeline(MemorySource(TABLE), [shortened(length=5)])
    again.load_state_dict(state)
    assert sum(batch.num_rows for batch in again) == 70


def test_the_name_is_the_same_in_every_process_and_has_all_of_a_long_option() -> None:
    @transform
    def chosen(row: dict[str, Any], *, by: Any = None, words: Any = (), other: int = 0) -> dict[str, Any]:
        return row

    class Plain:
        pass

    assert repr(chosen(by=lambda row: row)) == repr(chosen(by=lambda row: row))
    assert repr(chosen(by=[Plain()])) == repr(chosen(by=[Plain()]))
    assert "0x" not in repr(chosen(by=str.lower)(words=Plain))
    assert repr(chosen(words={"c", "b", "a"})) == "chosen(words={'a', 'b', 'c'})"
    assert repr(chosen(words=set())) == "chosen(words=set())"
    assert repr(chosen(other=1, by=2)) == repr(chosen(by=2)(other=1)) == "chosen(by=2, other=1)"
    long = [f"word {i}" for i in range(1000)]
    assert len(repr(chosen(words=long))) < 150
    assert repr(chosen(words=long)) != repr(chosen(words=[*long[:-1], "another"]))
    assert repr(chosen(words=long)) == repr(chosen(words=list(long)))
