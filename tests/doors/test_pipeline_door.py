"""The door of design document 003: every name it prints is where docs/where-is.md says, and works as it says."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

WHERE_IS = Path(__file__).parents[2] / "docs" / "where-is.md"

# "Names people will import", package by package.
PROMISED = {
    "penstock": "Pipeline PipelineConfig MemoryBudget BufferPool MemoryPressureHandler Source Transform Sink "
    "DataProcessor Schema Field",
    "penstock.sources": "CsvSource JsonSource JsonlSource ParquetSource ArrowSource TextSource MemorySource "
    "IteratorSource open_source",
    "penstock.transforms": "Map Filter FlatMap",
    "penstock.sinks": "ParquetSink ArrowSink JsonlSink CsvSink MemorySink",
}


def table_rows() -> list[tuple[str, str]]:
    """(what the document calls it, where it can be imported from), one for each import."""
    lines = [line for line in WHERE_IS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 3 for row in cells)
    return [
        (row[0], place) for row in cells if row[2] != "import" for place in re.findall(r"`(penstock[\w.]*)`", row[2])
    ]


def look_up(place: str) -> Any:
    """The object at a dotted place: the longest part that is a module, then attributes."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(place)


@pytest.mark.parametrize(("name", "place"), table_rows(), ids=lambda text: text)
def test_every_name_of_the_document_is_where_the_table_says(name: str, place: str) -> None:
    look_up(place)


def test_every_row_of_the_table_has_a_place() -> None:
    text = WHERE_IS.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| import |")]
    assert not [row for row in rows if "`penstock" not in row.rsplit("|", 2)[1]]


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in PROMISED.items() for name in names.split()]
)
def test_the_names_people_import_are_public(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert name in module.__all__
    assert getattr(module, name) is not None


@pytest.mark.parametrize(
    "name", ["CsvSource", "JsonSource", "JsonlSource", "ParquetSource", "ArrowSource", "TextSource"]
)
def test_the_first_argument_of_a_file_source_is_its_paths(name: str) -> None:
    assert next(iter(inspect.signature(look_up(f"penstock.sources.{name}")).parameters)) == "paths"


@pytest.mark.parametrize("name", ["ParquetSink", "ArrowSink", "JsonlSink", "CsvSink"])
def test_the_first_argument_of_a_file_sink_is_its_path(name: str) -> None:
    assert next(iter(inspect.signature(look_up(f"penstock.sinks.{name}")).parameters)) == "path"


@pytest.mark.parametrize(
    ("protocol", "methods"),
    [
        ("Source", ["next_batch", "size_hint", "memory_usage"]),
        ("Transform", ["transform", "memory_usage", "reset"]),
        ("Sink", ["consume", "flush", "memory_usage"]),
    ],
)
def test_the_protocols_have_the_methods_of_the_traits(protocol: str, methods: list[str]) -> None:
    there = [name for name in vars(look_up(f"penstock.{protocol}")) if not name.startswith("_")]
    assert there == methods


def test_a_pipeline_takes_what_the_struct_holds() -> None:
    parameters = inspect.signature(look_up("penstock.Pipeline")).parameters
    assert list(parameters) == ["source", "transforms", "sink", "config", "budget"]
