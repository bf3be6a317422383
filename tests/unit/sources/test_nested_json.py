"""Rows of JSON that are nested very deeply: refused with their place, whoever reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import DataError
from penstock.files.json_values import MAX_DEPTH, DepthError, dumps, is_too_deep, loads
from penstock.files.records import JsonItems, JsonLines
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource, JsonSource


def lists(levels: int) -> str:
    return "[" * levels + "]" * levels


def objects(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def unclosed(levels: int) -> str:
    return '[{"a":' * (levels // 2)


def with_brackets_in_text(levels: int) -> str:
    return '{"]}\\"]}":["]]]}}}\\\\",' * (levels // 2) + "1" + "]}" * (levels // 2)


def written(folder: Path, kind: type[JsonlSource], deep: str) -> Path:
    rows = ['{"id": 1, "meta": null}', f'{{"id": 2, "meta": {deep}}}', '{"id": 3, "meta": null}']
    file = folder / ("rows.json" if kind is JsonSource else "rows.jsonl")
    file.write_text(f"[{','.join(rows)}]" if kind is JsonSource else "\n".join(rows))
    return file


@pytest.mark.parametrize("kind", [JsonlSource, JsonSource])
@pytest.mark.parametrize("make", [lists, objects, with_brackets_in_text])
@pytest.mark.parametrize("levels", [MAX_DEPTH, 900, 5_000, 100_000])
def test_a_row_nested_too_deeply_is_named_and_may_be_left_out(tmp_path: Path, kind, make, levels: int) -> None:
    file = written(tmp_path, kind, make(levels))
    for options in ({}, {"columns": ["id"]}, {"mixed": "json"}):
        with pytest.raises(DataError, match=f"nested deeper than {MAX_DEPTH} levels") as caught:
            Pipeline(kind(file, **options), [], MemorySink()).run()
        assert (caught.value.file, caught.value.row) == (str(file), 1)
        report = Pipeline(kind(file, **options), [], sink := MemorySink(), PipelineConfig(on_error="skip")).run()
        assert [row["id"] for row in sink.rows()] == [1, 3]
        assert report.rows_out == 2
    assert set(kind(file).first_columns()) >= {"id", "meta"}


def test_a_row_nested_too_deeply_goes_to_the_quarantine(tmp_path: Path) -> None:
    file, aside = written(tmp_path, JsonlSource, lists(20_000)), tmp_path / "bad.jsonl"
    config = PipelineConfig(on_error="quarantine", quarantine=aside)
    assert Pipeline(JsonlSource(file), [], MemorySink(), config).run().rows_out == 2
    (entry,) = map(json.loads, aside.read_text().splitlines())
    assert entry["row"] == 1
    assert "nested deeper" in entry["reason"]


def test_a_line_that_opens_brackets_for_ever_is_a_row_like_others(tmp_path: Path) -> None:
    file = written(tmp_path, JsonlSource, unclosed(100_000))
    with pytest.raises(DataError, match="nested deeper") as caught:
        Pipeline(JsonlSource(file), [], MemorySink()).run()
    assert caught.value.row == 1


@pytest.mark.parametrize("kind", [JsonlSource, JsonSource])
@pytest.mark.parametrize("make", [lists, objects])
def test_the_deepest_row_that_is_taken_can_be_written_again(tmp_path: Path, kind, make) -> None:
    file = written(tmp_path, kind, make(MAX_DEPTH - 1))
    for mixed in ("error", "json"):
        Pipeline(kind(file, mixed=mixed), [], JsonlSink(tmp_path / "out.jsonl")).run()
        assert [row["id"] for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())] == [1, 2, 3]


def test_a_given_schema_makes_no_difference(tmp_path: Path) -> None:
    file = written(tmp_path, JsonlSource, lists(20_000))
    schema = pa.schema({"id": pa.int64(), "meta": pa.list_(pa.int64())})
    with pytest.raises(DataError, match="nested deeper"):
        Pipeline(JsonlSource(file, schema=schema), [], MemorySink()).run()


def test_long_rows_with_many_brackets_are_not_deep(tmp_path: Path) -> None:
    rows = [{"m": [[i, 1] for i in range(1_000)], "t": "[" * 1_000 + "\\" + '"{' * 500} for _ in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Pipeline(JsonlSource(tmp_path / "rows.jsonl"), [], sink := MemorySink()).run()
    assert sink.rows() == rows


def test_the_depth_of_a_text_is_that_of_its_value() -> None:
    rng = np.random.default_rng(7)

    def value(left: int):
        if left == 0:
            return rng.choice(['"', "\\", "[[", "}", 'a"\\"{', ""]).item()
        inner = value(left - 1)
        side = [value(int(rng.integers(0, min(left, 4)))) for _ in range(int(rng.integers(0, 2)))]
        return [*side, inner] if rng.random() < 0.5 else {"]\\" * int(rng.integers(0, 3)): inner, "k": side}

    def depth(found) -> int:
        inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
        return 0 if inside is None else 1 + max(map(depth, inside), default=0)

    for levels in (*range(MAX_DEPTH - 6, MAX_DEPTH + 4), 250):
        made = value(levels)
        text = json.dumps(made)
        assert is_too_deep(text) is is_too_deep(text.encode()) is (depth(made) > MAX_DEPTH)
        if depth(made) <= MAX_DEPTH:
            assert orjson.loads(dumps(loads(text))) == made
            continue
        with pytest.raises(DepthError):
            loads(text)
        data = np.frombuffer(b'{"a":1}\n{"a":' + text.encode() + b"}\n", np.uint8)
        for cutter in (JsonLines(), JsonItems(in_array=False)):
            with pytest.raises(DepthError):
                cutter.prepare(data)
