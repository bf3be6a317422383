from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.pipeline_file import read_pipeline
from penstock.errors import ConfigError

ENDS = {"source": "corpus.jsonl", "sink": "out.parquet"}


def problems(text: str) -> list[str]:
    """What is wrong with the file, a line for each."""
    with pytest.raises(ConfigError) as caught:
        read_pipeline(ENDS | (yaml.safe_load(text) or {}), Path("p.yaml"))
    message = str(caught.value)
    first, _, rest = message.partition("\n")
    return [line.strip() for line in rest.splitlines()] if rest else [first.removeprefix("p.yaml: ")]


@pytest.mark.parametrize(
    ("text", "place", "fact"),
    [
        ("sinks: a", "sinks", "'sink'"),
        ("xyz: a", "xyz", "source, transforms, sink, config, budget, checkpoint"),
        ("source: null", "source", "{type: ..., path: ...}"),
        ("sink: null", "sink", "{type: ..., path: ...}"),
        ("source: 5", "source", "got 5"),
        ("source: {tpe: jsonl}", "source", "'type'"),
        ("source: {type: jsnl, path: a}", "source.type", "'jsonl'"),
        ("source: {type: xyz}", "source.type", "penstock plugins"),
        ("source: {type: jsonl}", "source", "'path'"),
        ("source: {type: jsonl, path: [1]}", "source.path", "got [1]"),
        ("source: {type: jsonl, pth: a}", "source", "'pth'; did you mean 'path'"),
        ("source: {path: corpus.jsonl, colums: [a]}", "source", "'colums'; did you mean 'columns'"),
        ("source: {path: corpus.jsonl, columns: id}", "source.columns", "got 'id'"),
        ("source: {type: jsonl, path: a, mixed: yes}", "source.mixed", "'error' or 'json', got True"),
        ("source: {type: csv, path: a, delimiter: ab}", "source", "delimiter"),
        ("sink: out.xyz", "sink", "'.xyz'"),
        ("sink: {type: memory}", "sink.type", "'memory'"),
        ("sink: {path: out.parquet, compresion: zstd}", "sink", "'compresion'; did you mean 'compression'"),
        ("sink: no/out.parquet", "sink", "'no'"),
        ("transforms: {lower: text}", "transforms", "got {'lower': 'text'}"),
        ("transforms: [5]", "transforms[0]", "got 5"),
        ("transforms: [{lower: text, strip: text}]", "transforms[0]", "lower, strip"),
        ("transforms: [{lowr: text}]", "transforms[0]", "'lower'"),
        ("transforms: [lower]", "transforms[0].lower", "'columns'"),
        ("transforms: [drop_nulls, {count_words: {colum: text}}]", "transforms[1].count_words", "'column'"),
        ("transforms: [{count_words: {column: text, xyz: 1}}]", "transforms[0].count_words", "column, into"),
        ("transforms: [{lower: 5}]", "transforms[0].lower", "got 5"),
        ("transforms: [{count_words: {column: [a]}}]", "transforms[0].count_words.column", "got ['a']"),
        (
            "transforms: [{drop_words: {column: a, probability: high}}]",
            "transforms[0].drop_words.probability",
            "'high'",
        ),
        (
            "transforms: [{drop_words: {column: a, probability: 1e-3}}]",
            "transforms[0].drop_words.probability",
            "1.0e-3",
        ),
        ("transforms: [{drop_words: {column: a, probability: 2}}]", "transforms[0].drop_words", "probability"),
        (
            "transforms: [{hashing_encoder: {columns: a, buckets: true}}]",
            "transforms[0].hashing_encoder.buckets",
            "True",
        ),
        (
            "transforms: [{min_max_scaler: {columns: a, range: [0, 1, 2], fit: true}}]",
            "transforms[0].min_max_scaler.range",
            "got [0, 1, 2]",
        ),
        ("transforms: [{rename: text}]", "transforms[0].rename", "got 'text'"),
        ("transforms: [{cast: {a: int65}}]", "transforms[0].cast", "int65"),
        ("transforms: [{filter: words >}]", "transforms[0].filter", "'words >'"),
        ("transforms: [{map: {total: f(}}]", "transforms[0].map", "'f('"),
        ("transforms: [{map: shout}]", "transforms[0].map", "module:name"),
        ("transforms: [{map: {function: shout}}]", "transforms[0].map.function", "module:name"),
        ("transforms: [{map: {functon: 'a:b', batch: true}}]", "transforms[0].map", "'function'"),
        ("transforms: [{map: 'cli_nowhere:f'}]", "transforms[0].map", "'cli_nowhere'"),
        ("transforms: [{map: 'json:dmps'}]", "transforms[0].map", "'dmps'"),
        ("transforms: [{map: 'math:pi'}]", "transforms[0].map", "3.14"),
        ("transforms: [{validate: {schema: {a: int65}}}]", "transforms[0].validate.schema", "'int65'"),
        ("transforms: [{validate: {schema: [a]}}]", "transforms[0].validate.schema", "got ['a']"),
        (
            "transforms: [{augment: {transform: {jitter: {columns: a, scal: 1}}}}]",
            "transforms[0].augment.transform.jitter",
            "'scale'",
        ),
        (
            "transforms: [{augment: {transform: {standard_scaler: {columns: a, fit: true}}}}]",
            "transforms[0].augment.transform",
            "fitted",
        ),
        ("transforms: [{standard_scaler: age}]", "transforms[0].standard_scaler", "'fit: true'"),
        ("config: 4", "config", "got 4"),
        ("config: {wokers: 4}", "config", "'wokers'; did you mean 'workers'"),
        ("config: {workers: many}", "config.workers", "got 'many'"),
        ("config: {workers: 0}", "config", "workers"),
        ("config: {on_error: skp}", "config.on_error", "'raise' or 'skip' or 'quarantine', got 'skp'"),
        ("budget: 1 MuB", "budget", "'1 MuB'"),
        ("budget: -1", "budget", "-1"),
        ("budget: [1]", "budget", "got [1]"),
        ("checkpoint: 5", "checkpoint", "got 5"),
    ],
)
def test_a_problem_names_its_place_in_the_file(corpus: Path, text: str, place: str, fact: str) -> None:
    (said,) = problems(text)
    assert said.startswith(f"{place}: ")
    assert fact in said


def test_all_problems_are_told_at_once(corpus: Path) -> None:
    said = problems("sorce: a\ntransforms: [{lowr: a}, {lower: 5}]\nconfig: {wokers: 1}\nbudget: x")
    expected = [
        "sorce: .*'source'",
        r"transforms\[0\]: .*'lowr'.*'lower'",
        r"transforms\[1\]\.lower: .*\b5\b",
        "config: .*'wokers'.*'workers'",
        "budget: .*'x'",
    ]
    for problem, facts in zip(said, expected, strict=True):
        assert re.match(facts, problem)


def test_a_module_that_fails_to_import_says_how(corpus: Path, module: Callable[..., None]) -> None:
    module("cli_broken", "1 / 0\n")
    [broken] = problems("transforms: [{map: 'cli_broken:f'}]")
    assert re.match(r"transforms\[0\]\.map: .*'cli_broken'.*ZeroDivisionError", broken)
    module("cli_needs", "import cli_missing_module\n")
    [missing] = problems("transforms: [{map: 'cli_needs:f'}]")
    assert re.match(r"transforms\[0\]\.map: .*'cli_needs'.*'cli_missing_module'", missing)


def test_a_function_that_is_not_there_has_a_near_one(corpus: Path, module: Callable[..., None]) -> None:
    module("cli_near", "def double(row): return row\n")
    (said,) = problems("transforms: [{map: 'cli_near:duble'}]")
    assert re.search(r"cli_near\.py.*'double'", said)


def test_a_description_is_built_without_reading_or_writing(corpus: Path) -> None:
    before = sorted(corpus.parent.iterdir())
    tree: dict[str, Any] = ENDS | {
        "transforms": [{"standard_scaler": {"columns": ["age"], "fit": True}}],
        "config": {"workers": 3},
        "budget": "1 MiB",
        "checkpoint": "kept",
    }
    plan = read_pipeline(tree, Path("p.yaml"))
    assert str(plan.pipeline) == (
        "JsonlSource('corpus.jsonl') -> StandardScaler('age') -> ParquetSink('out.parquet')  [budget 1.0 MiB]"
    )
    assert (plan.to_fit, plan.checkpoint, plan.pipeline.config.workers) == ((0,), Path("kept"), 3)
    assert sorted(corpus.parent.iterdir()) == before


def test_every_built_in_transform_has_a_name_in_the_catalogue() -> None:
    from penstock import transforms
    from penstock.cli.plugins import built_in

    classes = {name for name in transforms.__all__ if hasattr(getattr(transforms, name), "transform")}
    assert {maker.__name__ for maker in built_in("transforms").values()} == classes
    assert {"count_words", "flat_map", "standard_scaler", "scrub_pii", "c4_quality"} <= set(built_in("transforms"))
    files = {"arrow", "csv", "json", "jsonl", "mds", "parquet", "store", "text", "token_file", "web_dataset"}
    elsewhere = {"delta", "iceberg", "kafka", "nats", "redis_stream", "sql"}
    sources = {*files, *elsewhere, "async_iterator", "iterator", "memory", "queue"}
    assert set(built_in("sources")) == sources
    sinks = {"arrow", "csv", "jsonl", "parquet", "queue", "store"}
    assert set(built_in("sinks")) == sinks | elsewhere - {"iceberg"}
