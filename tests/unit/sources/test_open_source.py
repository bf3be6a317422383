from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock import plugins
from penstock.errors import ConfigError, PluginError
from penstock.pipeline import Pipeline, Source
from penstock.sinks import JsonlSink, StoreSink, open_sink
from penstock.sources import (
    ArrowSource,
    CsvSource,
    JsonlSource,
    JsonSource,
    MemorySource,
    ParquetSource,
    StoreSource,
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
    with pytest.raises(ConfigError, match=r"'\.xls'.*a\.xls"):
        open_source(tmp_path)
    (tmp_path / "a.xls").rename(tmp_path / "a")
    with pytest.raises(ConfigError, match="'files without a suffix'"):
        open_source(tmp_path)
    (tmp_path / "a").rename(tmp_path / "a.csv")
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        open_source(tmp_path)


def test_a_format_that_a_plugin_brings_is_opened_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_ini(files: list[Path]) -> Source:
        return MemorySource([{"file": file.name} for file in files])

    found = plugins.Format("ini", (".ini",), source=read_ini)
    monkeypatch.setattr("penstock.sources.by_suffix.formats", lambda: (found,))
    (tmp_path / "a.ini").touch()
    batch = open_source(tmp_path / "a.ini").next_batch(5)
    assert batch is not None
    assert batch.equals(pa.record_batch({"file": ["a.ini"]}))


def make_store(path: Path) -> Path:
    ids = pa.array([[5, 6, 7], [8]], pa.list_(pa.uint16()))
    Pipeline(MemorySource(pa.table({"input_ids": ids, "id": ["a", "b"]})), [], StoreSink(path)).run()
    return path


def test_the_directory_of_a_store_is_opened_as_a_store(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store")
    for given in (store, str(store), [store], (path for path in [store])):
        source = open_source(given, columns=["id"])
        assert type(source) is StoreSource
        batch = source.next_batch(5)
        assert batch is not None
        assert batch.to_pylist() == [{"id": "a"}, {"id": "b"}]


def test_a_store_among_other_paths_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a.store")
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"a\.store.*b\.jsonl"):
        open_source([tmp_path / "b.jsonl", store])


def test_a_directory_of_files_with_a_manifest_among_them_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "corpus"}')
    assert type(open_source(tmp_path)) is JsonSource


def test_a_plugin_that_cannot_be_loaded_is_in_the_way_of_unknown_formats_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> tuple[plugins.Format, ...]:
        raise PluginError("plugin 'ini' (penstock.formats, from odd) cannot be loaded; update or uninstall odd")

    monkeypatch.setattr("penstock.sources.by_suffix.formats", broken)
    monkeypatch.setattr("penstock.sinks.formats.formats", broken)
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "a.ini").touch()
    assert type(open_source(tmp_path / "a.jsonl")) is JsonlSource
    assert type(open_sink(tmp_path / "b.jsonl.gz")) is JsonlSink
    with pytest.raises(PluginError, match="'ini'"):
        open_source(tmp_path / "a.ini")
    with pytest.raises(PluginError, match="'ini'"):
        open_sink(tmp_path / "b.ini")


def test_a_plugin_cannot_take_the_place_of_a_built_in_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plugins.Format("mine", (".jsonl", ".mine"), source=TextSource, sink=open_sink)
    monkeypatch.setattr("penstock.sources.by_suffix.formats", lambda: (found,))
    monkeypatch.setattr("penstock.sinks.formats.formats", lambda: (found,))
    for name in ("a.jsonl", "a.mine"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        open_source([tmp_path / "a.jsonl", tmp_path / "a.mine"])
    assert type(open_source(tmp_path / "a.jsonl")) is JsonlSource
    assert type(open_sink(tmp_path / "b.jsonl")) is JsonlSink
