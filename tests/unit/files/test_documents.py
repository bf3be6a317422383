from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.files.documents import read_document, set_value

KEYS = ("source", "transforms", "sink", "config")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'source: corpus.jsonl'"),
        ("# nothing\n", "empty"),
        ("- a\n", "'source: corpus.jsonl'"),
        ("source: a\nsink: b\nsource: c\n", ", line 3, column 1: "),
        ("config: {workers: 1, workers: 2}\n", ", line 1, column 22: "),
        ("source: [a\nsink: b\n", ", line 2, column 5: "),
        ("source: !!python/object/apply:os.getcwd []\n", ", line 1, column 9: "),
    ],
)
def test_a_file_that_is_no_description_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}") + ".*" + re.escape(message)):
        read_document(path, such_as="source: corpus.jsonl")


def test_a_file_that_is_not_utf_8_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"source: \xff\xff\xff\n")
    with pytest.raises(ConfigError, match=r"p\.yaml"):
        read_document(path, such_as="source: corpus.jsonl")


def test_anchors_and_merged_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("config: &c {workers: 2, on_error: skip}\nother: {<<: *c, workers: 3}\n")
    assert read_document(path, such_as="source: corpus.jsonl")["other"] == {"workers": 3, "on_error": "skip"}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("config.workers=2", {"config": {"workers": 2, "on_error": "skip"}}),
        ("config.on_error=raise", {"config": {"workers": 1, "on_error": "raise"}}),
        ("transforms.1.lower=title", {"transforms": ["drop_nulls", {"lower": "title"}]}),
        ("transforms.0={strip: text}", {"transforms": [{"strip": "text"}, {"lower": "text"}]}),
        ("transforms.1.filter=words >= 5", {"transforms": ["drop_nulls", {"lower": "text", "filter": "words >= 5"}]}),
        ("source.columns=[a, b]", {"source": {"columns": ["a", "b"]}}),
        ("config=", {"config": None}),
        ("sink='1'", {"sink": "1"}),
    ],
)
def test_set_puts_a_yaml_value_in_its_place(assignment: str, expected: dict[str, Any]) -> None:
    tree: dict[str, Any] = {
        "config": {"workers": 1, "on_error": "skip"},
        "transforms": ["drop_nulls", {"lower": "text"}],
    }
    set_value(tree, assignment, known=KEYS)
    assert {key: tree[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("confg.workers=2", "'config'"),
        ("transforms.2.lower=a", "--set transforms.2.lower"),
        ("transforms.lower=a", "'lower'"),
        ("config.workers.max=3", "config.workers"),
        ("sink=[a", "--set"),
    ],
)
def test_set_with_no_place_to_go_says_why(assignment: str, message: str) -> None:
    tree: dict[str, Any] = {"config": {"workers": 1}, "transforms": ["drop_nulls", {"lower": "text"}]}
    with pytest.raises(ConfigError, match=re.escape(message)):
        set_value(tree, assignment, known=KEYS)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BOMB + "source: *a9", "aliases"),
        ("a: &a [*a]", "contains it"),
        ("source: 2024-13-45", "quotes"),
        ("source: 2024-01-01 25:61:61", "quotes"),
        ("source: " + "9" * 5_000, "quotes"),
        ("source: " + "[" * 5_000 + "]" * 5_000, "levels"),
        ("source: " + "{a: " * 5_000 + "}" * 5_000, "levels"),
        ("\n".join(f"{' ' * i}a:" for i in range(3_000)), "levels"),
        ("source: 1e99999999999:30", None),
        ("source: !!int x", "quotes"),
        ("source: !!float x", "quotes"),
        ("source: !!timestamp x", None),
        ("source: !!binary \u00ff", None),
        ("? [a, b]\n: 1", None),
    ],
)
def test_what_yaml_cannot_make_a_value_of_is_an_error_with_the_file(
    tmp_path: Path, text: str, word: str | None
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    if word is None:
        with contextlib.suppress(ConfigError):
            read_document(tmp_path / "a.yaml", such_as="source: x")
        return
    with pytest.raises(ConfigError, match=rf"a\.yaml.*{word}"):
        read_document(tmp_path / "a.yaml", such_as="source: x")


def test_aliases_are_fine_where_they_save_some_lines(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}")
    found = read_document(tmp_path / "a.yaml", such_as="source: x")
    assert found == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
