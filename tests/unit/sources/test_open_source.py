from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock import plugins
from penstock.errors import ConfigError
from penstock.pipeline import Source
from penstock.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    JsonSource,
    MemorySource,
    ParquetSource,
    TextSource,
    open_source,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", JsonlSource),
        ("a.ndjson.gz", JsonlSource),
        ("a.json", JsonSource),
        ("a.JSON.zst", JsonSource),
        ("a.csv", CsvSource),
        ("a.tsv.xz", CsvSource),
        ("a.parquet", ParquetSource),
        ("a.pq", ParquetSource),
        ("a.arrow", ArrowSource),
        ("a.feather", ArrowSource),
        ("a.ipc", ArrowSource),
        ("a.arrows.lz4", ArrowSource),
        ("a.txt", TextSource),
        ("a.md", TextSource),
    ],
)
def test_the_suffix_picks_the_source(tmp_path: Path, name: str, kind: type) -> None:
    (tmp_path / name).touch()
    assert type(open_source(tmp_path / name)) is kind
    assert type(open_source(tmp_path)) is kind
    assert type(open_source([tmp_path / name])) is kind


def test_options_go_to_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1;2\n")
    batch = open_source(tmp_path / "a.csv", names=["x", "y"], delimiter=";").next_batch(5)
    assert batch is not None
    assert batch.to_pylist() == [{"x": 1, "y": 2}]


def test_an_unknown_suffix_and_several_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xls").touch()
    with pytest.raises(ConfigError, match=r"no source reads '\.xls' \(a\.xls\); known: \.arrow, .*install a plugin"):
        open_source(tmp_path)
    (tmp_path / "a.xls").rename(tmp_path / "a")
    with pytest.raises(ConfigError, match="no source reads 'files without a suffix'"):
        open_source(tmp_path)
    (tmp_path / "a").rename(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ConfigError, match=r"holds files of several formats \(\.csv, \.jsonl\); open them one by one"):
        open_source(tmp_path)


def test_a_format_that_a_plugin_brings_is_opened_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_ini(files: list[Path]) -> Source:
        return MemorySource([{"file": file.name} for file in files])

    found = plugins.Format("ini", (".ini",), source=read_ini)
    monkeypatch.setattr("penstock.sources.opening.formats", lambda: (found,))
    (tmp_path / "a.ini").touch()
    batch = open_source(tmp_path / "a.ini").next_batch(5)
    assert batch is not None
    assert batch.equals(pa.record_batch({"file": ["a.ini"]}))
