from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.pipeline_file import read_plan
from penstock.errors import ConfigError

ENDS = {"source": "corpus.jsonl", "sink": "out.parquet"}


def problems(text: str) -> list[str]:
    """What is wrong with the file, a line for each."""
    with pytest.raises(ConfigError) as caught:
        read_plan(ENDS | (yaml.safe_load(text) or {}), Path("p.yaml"))
    message = str(caught.value)
    first, _, rest = message.partition("\n")
    return [line.strip() for line in rest.splitlines()] if rest else [first.removeprefix("p.yaml: ")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sinks: a", "sinks: unknown key; did you mean 'sink'?"),
        ("xyz: a", "xyz: unknown key; the keys are source, transforms, sink, config, budget, checkpoint"),
        ("source: null", "source: is missing; write 'source: <path>', or 'source: {type: ..., path: ...}'"),
        ("sink: null", "sink: is missing; write 'sink: <path>', or 'sink: {type: ..., path: ...}'"),
        ("source: 5", "source: expected a path, got 5"),
        ("source: {tpe: jsonl}", "source: needs a type or a path, has tpe; did you mean 'type'?"),
        ("source: {type: jsnl, path: a}", "source.type: no source is called 'jsnl'; did you mean 'jsonl'?"),
        ("source: {type: xyz}", "source.type: no source is called 'xyz'; `penstock plugins` lists them"),
        ("source: {type: jsonl}", "source: the argument 'path' is missing"),
        ("source: {type: jsonl, path: [1]}", "source.path: expected text or a list of text, got [1]"),
        ("source: {type: jsonl, pth: a}", "source: unknown argument 'pth'; did you mean 'path'?"),
        ("source: {path: corpus.jsonl, colums: [a]}", "source: unknown argument 'colums'; did you mean 'columns'?"),
        ("source: {path: corpus.jsonl, columns: id}", "source.columns: expected a list of text or null, got 'id'"),
        ("source: {type: jsonl, path: a, mixed: yes}", "source.mixed: expected 'error' or 'json', got True"),
        ("source: {type: csv, path: a, delimiter: ab}", "source: delimiter must be one "),
        ("sink: out.xyz", "sink: no sink writes '.xyz'; known: .arrow, "),
        ("sink: {type: memory}", "sink.type: no sink is called 'memory'; `penstock plugins` lists them"),
        (
            "sink: {path: out.parquet, compresion: zstd}",
            "sink: unknown argument 'compresion'; did you mean 'compression'?",
        ),
        ("sink: no/out.parquet", "sink: no such directory: 'no'; make it first"),
        ("transforms: {lower: text}", "transforms: expected a list of steps ('- lower: text'), got {'lower': 'text'}"),
        ("transforms: [5]", "transforms[0]: expected one step such as 'lower: text', got 5"),
        (
            "transforms: [{lower: text, strip: text}]",
            "transforms[0]: expected one step such as 'lower: text', got the keys lower, strip",
        ),
        ("transforms: [{lowr: text}]", "transforms[0]: no transform is called 'lowr'; did you mean 'lower'?"),
        ("transforms: [lower]", "transforms[0].lower: the argument 'columns' is missing"),
        (
            "transforms: [drop_nulls, {count_words: {colum: text}}]",
            "transforms[1].count_words: unknown argument 'colum'; did you mean 'column'?",
        ),
        (
            "transforms: [{count_words: {column: text, xyz: 1}}]",
            "transforms[0].count_words: unknown argument 'xyz'; it takes column, into",
        ),
        (
            "transforms: [{lower: 5}]",
            "transforms[0].lower: expected text or a list of text, got 5; put quotes around it",
        ),
        ("transforms: [{count_words: {column: [a]}}]", "transforms[0].count_words.column: expected text, got ['a']"),
        (
            "transforms: [{drop_words: {column: a, probability: high}}]",
            "transforms[0].drop_words.probability: expected a number, got 'high'",
        ),
        (
            "transforms: [{drop_words: {column: a, probability: 1e-3}}]",
            "transforms[0].drop_words.probability: expected a number, got '1e-3', which YAML takes for text; "
            "write it with a point, as 1.0e-3, and without quotes",
        ),
        (
            "transforms: [{drop_words: {column: a, probability: 2}}]",
            "transforms[0].drop_words: probability must be between 0 and 1, got 2",
        ),
        (
            "transforms: [{hashing_encoder: {columns: a, buckets: true}}]",
            "transforms[0].hashing_encoder.buckets: expected a whole number, got True",
        ),
        (
            "transforms: [{min_max_scaler: {columns: a, range: [0, 1, 2], fit: true}}]",
            "transforms[0].min_max_scaler.range: expected a list of 2, got [0, 1, 2]",
        ),
        ("transforms: [{rename: text}]", "transforms[0].rename: expected a mapping, got 'text'"),
        ("transforms: [{cast: {a: int65}}]", "transforms[0].cast: "),
        ("transforms: [{filter: words >}]", "transforms[0].filter: not an expression: 'words >': "),
        ("transforms: [{map: {total: f(}}]", "transforms[0].map: not an expression: 'f(': "),
        (
            "transforms: [{map: shout}]",
            "transforms[0].map: expected a function as module:name or a mapping, got 'shout'",
        ),
        (
            "transforms: [{map: {function: shout}}]",
            "transforms[0].map.function: expected a function as module:name or a mapping, got 'shout'",
        ),
        (
            "transforms: [{map: {functon: 'a:b', batch: true}}]",
            "transforms[0].map: unknown argument 'functon'; did you mean 'function'?",
        ),
        (
            "transforms: [{map: 'cli_nowhere:f'}]",
            "transforms[0].map: no module 'cli_nowhere' for 'cli_nowhere:f'; "
            "put it beside the YAML file, or install it",
        ),
        ("transforms: [{map: 'json:dmps'}]", "transforms[0].map: no 'dmps' in "),
        ("transforms: [{map: 'math:pi'}]", "transforms[0].map: 'math:pi' is 3.14"),
        (
            "transforms: [{validate: {schema: {a: int65}}}]",
            "transforms[0].validate.schema: column 'a': unknown type 'int65'; did you mean 'int64'?",
        ),
        (
            "transforms: [{validate: {schema: [a]}}]",
            "transforms[0].validate.schema: expected a mapping of columns to types",
        ),
        (
            "transforms: [{augment: {transform: {jitter: {columns: a, scal: 1}}}}]",
            "transforms[0].augment.transform.jitter: unknown argument 'scal'; did you mean 'scale'?",
        ),
        (
            "transforms: [{augment: {transform: {standard_scaler: {columns: a, fit: true}}}}]",
            "transforms[0].augment.transform: a step inside another cannot be fitted; put it into the list by itself",
        ),
        (
            "transforms: [{standard_scaler: age}]",
            "transforms[0].standard_scaler: has to learn from the data: "
            "add 'fit: true' for a first pass over the source and the steps before",
        ),
        ("config: 4", "config: expected keys such as 'workers: 4', got 4"),
        ("config: {wokers: 4}", "config: unknown key 'wokers'; did you mean 'workers'?"),
        ("config: {workers: many}", "config.workers: expected a whole number or 'auto' or 'process', got 'many'"),
        ("config: {workers: 0}", "config: workers must be a positive number, 'auto' or 'process', got 0"),
        ("config: {on_error: skp}", "config.on_error: expected 'raise' or 'skip' or 'quarantine', got 'skp'"),
        ("budget: 1 MuB", "budget: not a size: '1 MuB'; write a number of bytes, or one with a unit such as '256 MiB'"),
        ("budget: -1", "budget: a memory budget must be positive, got -1"),
        ("budget: [1]", "budget: expected a whole number or text, got [1]"),
        ("checkpoint: 5", "checkpoint: expected a directory, got 5"),
    ],
)
def test_a_problem_names_its_place_in_the_file(corpus: Path, text: str, problem: str) -> None:
    (said,) = problems(text)
    assert said.startswith(problem)


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
    plan = read_plan(tree, Path("p.yaml"))
    assert str(plan.pipeline) == (
        "JsonlSource('corpus.jsonl') -> StandardScaler('age') -> ParquetSink('out.parquet')  [budget 1.0 MiB]"
    )
    assert (plan.to_fit, plan.checkpoint, plan.pipeline.config.workers) == ((0,), Path("kept"), 3)
    assert sorted(corpus.parent.iterdir()) == before


def test_every_built_in_transform_has_a_name_in_the_catalogue() -> None:
    from penstock import transforms
    from penstock.cli.stage_catalog import built_in

    classes = {name for name in transforms.__all__ if hasattr(getattr(transforms, name), "transform")}
    assert {maker.__name__ for maker in built_in("transforms").values()} == classes
    assert {"count_words", "flat_map", "standard_scaler", "scrub_pii", "c4_quality"} <= set(built_in("transforms"))
    sources = {"arrow", "csv", "iterator", "json", "jsonl", "memory", "parquet", "queue", "store", "text"}
    assert set(built_in("sources")) == sources
    assert set(built_in("sinks")) == {"arrow", "csv", "jsonl", "parquet", "queue", "store"}
