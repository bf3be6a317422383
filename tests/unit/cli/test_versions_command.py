"""`penstock versions` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.files.checksums import FileFingerprint
from penstock.store import Lineage, StoreWriter, append, open_store

Call = Callable[..., Any]


def rows(first: int, count: int) -> pa.RecordBatch:
    ids = pa.array([[n] * 3 for n in range(first, first + count)], pa.list_(pa.uint8()))
    return pa.record_batch({"input_ids": ids})


@pytest.fixture
def store(here: Path) -> Path:
    """Three versions: ten rows, ten more, and in the third five others in their place."""
    made = Lineage(inputs=(FileFingerprint("a.jsonl", 3, "00"), FileFingerprint("b.jsonl", 3, "01")), tokenizer="x")
    with StoreWriter(here / "s", lineage=made) as writer:
        writer.write(rows(0, 10))
        writer.publish()
    append(here / "s", [rows(10, 10)], lineage=Lineage(transforms=("Tokenize(byte)", "Pack(3)")))
    with StoreWriter(here / "s", mode="overwrite", lineage=Lineage(tokenizer="[b]")) as writer:
        writer.write(rows(100, 5))
        writer.publish()
    return here / "s"


def test_versions_are_listed_with_what_made_them_and_the_current_one_is_marked(store: Path, penstock: Call) -> None:
    result = penstock("versions", str(store))
    assert result.exit_code == 0
    header, *lines = [line.split() for line in result.stdout.splitlines()]
    assert header == ["version", "created", "rows", "tokens", "shards", "size", "made", "of"]
    assert [line[0] for line in lines] == ["1", "2", "*3"]
    assert [line[2:5] for line in lines] == [["10", "30", "1"], ["20", "60", "2"], ["5", "15", "1"]]
    made = [" ".join(line[7:]) for line in lines]
    assert made == ["a.jsonl and 1 more file", "version 1 + Tokenize(byte), Pack(3)", "tokenizer [b]"]


def test_versions_as_json_are_one_object(store: Path, penstock: Call) -> None:
    facts = json.loads(penstock("versions", str(store), "--json").stdout)
    assert facts["current"] == 3
    assert [(each["version"], each["parent"], each["rows"]) for each in facts["versions"]] == [
        (1, None, 10),
        (2, 1, 20),
        (3, 2, 5),
    ]
    assert facts["versions"][0]["inputs"] == ["a.jsonl", "b.jsonl"]


def test_a_difference_is_with_the_current_version_unless_two_are_named(store: Path, penstock: Call) -> None:
    result = penstock("versions", str(store), "--diff", "1", "2")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[:4] == [
        ["version", "1", "to", "2", "added", "removed"],
        ["rows", "+10", "-0"],
        ["tokens", "+30", "-0"],
        ["shards", "+1", "-0"],
    ]
    facts = json.loads(penstock("versions", str(store), "--diff", "1", "--json").stdout)
    assert (facts["old"], facts["new"], facts["rows_added"], facts["rows_removed"]) == (1, 3, 5, 10)
    assert facts["changed"]["tokenizer"] == ["x", "[b]"]
    assert "[b]" in penstock("versions", str(store), "--diff", "1").stdout


def test_checkout_makes_a_version_the_current_one(store: Path, penstock: Call) -> None:
    result = penstock("versions", str(store), "--checkout", "2")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["version", "1", "*2", "3"]
    assert len(open_store(store)) == 20


def test_a_store_whose_manifest_is_damaged_is_listed_and_mended(store: Path, penstock: Call) -> None:
    (store / "manifest.json").write_text("{")
    result = penstock("versions", str(store))
    assert result.exit_code == 0
    assert "*" not in result.stdout
    assert "manifest" in result.stderr
    assert penstock("versions", str(store), "--checkout", "3").exit_code == 0
    assert penstock("versions", str(store)).stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diff", "7"], "version 7"),
        (["--checkout", "9"], "version 9"),
        (["--diff", "1", "--checkout", "2"], "--diff"),
        (["2"], "--diff"),
    ],
)
def test_what_cannot_be_is_an_error_with_exit_code_1(
    store: Path, penstock: Call, arguments: list[str], message: str
) -> None:
    result = penstock("versions", str(store), *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("penstock: ")
    assert message in result.stderr


def test_what_is_no_store_is_said_to_be_none(here: Path, penstock: Call) -> None:
    result = penstock("versions", str(here))
    assert result.exit_code == 1
    assert "manifest.json" in result.stderr
