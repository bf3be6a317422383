from __future__ import annotations

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
