"""Columns that stand in the names of directories, as Hive writes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from penstock import Pipeline
from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.checksums import fingerprint_files
from penstock.files.listing import list_files
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import CsvSource, JsonlSource, MemorySource, ParquetSource, open_source
from penstock.sources import by_suffix as opening
from penstock.sources.splits import open_split, split_input
from penstock.store.manifest import content_key

Write = Callable[[pa.Table, Path], None]


def write_arrow(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def write_jsonl(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def write_text(table: pa.Table, path: Path) -> None:
    path.write_text("\n".join(table["text"].to_pylist()) + "\n")


WRITERS: dict[str, Write] = {
    "parquet": pq.write_table,
    "arrow": write_arrow,
    "jsonl": write_jsonl,
    "json": lambda table, path: path.write_text(json.dumps(table.to_pylist())) and None,
    "csv": pcsv.write_csv,
    "txt": write_text,
}
formats = pytest.mark.parametrize("suffix", WRITERS)
columns_in_files = pytest.mark.parametrize("suffix", [name for name in WRITERS if name != "txt"])


def put(root: Path, folder: str, suffix: str = "parquet", **columns: Any) -> Path:
    """A file with a row or some, in a folder."""
    path = root / folder / f"part-0.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[suffix](pa.table(columns or {"text": [folder]}), path)
    return path


def rows_of(source: Any) -> list[dict[str, Any]]:
    sink = MemorySink()
    Pipeline(source, [], sink).run()
    return sink.rows()


@formats
def test_directories_are_columns_in_every_format(tmp_path: Path, suffix: str) -> None:
    put(tmp_path, "year=2024/lang=en", suffix, text=["a", "b"])
    put(tmp_path, "year=2025/lang=de", suffix, text=["c"])
    source: Any = open_source(tmp_path)
    assert source.schema.names == ["text", "year", "lang"]
    assert source.schema.field("year").type == pa.int64()
    assert rows_of(source) == [
        {"text": "a", "year": 2024, "lang": "en"},
        {"text": "b", "year": 2024, "lang": "en"},
        {"text": "c", "year": 2025, "lang": "de"},
    ]
    source.reset()
    assert source.next_batch(10).schema == source.schema


@formats
def test_a_single_partition_is_a_column_too(tmp_path: Path, suffix: str) -> None:
    put(tmp_path, "lang=en", suffix, text=["a"])
    assert rows_of(open_source(tmp_path)) == [{"text": "a", "lang": "en"}]


@formats
def test_stretches_have_the_columns_of_directories(tmp_path: Path, suffix: str) -> None:
    put(tmp_path, "lang=en", suffix, text=["a"])
    put(tmp_path, "lang=de", suffix, text=["b"])
    source = open_source(tmp_path)
    found = []
    for stretch in split_input(source, 1 << 20):
        reader = open_split(source, stretch)
        while (cut := reader.cut(10, 1 << 20)) is not None:
            found += reader.decode(cut).batch.to_pylist()
        reader.close()
    assert found == [{"text": "b", "lang": "de"}, {"text": "a", "lang": "en"}]


@pytest.mark.parametrize(
    ("folders", "values"),
    [
        (["n=1", "n=-2"], [-2, 1]),
        (["n=01", "n=2"], ["01", "2"]),
        (["n=1", "n=x"], ["1", "x"]),
        (["n=1", "n=99999999999999999999"], ["1", "99999999999999999999"]),
        (["n=__HIVE_DEFAULT_PARTITION__", "n=7"], [7, None]),
        (["n=__HIVE_DEFAULT_PARTITION__"], [None]),
        (["n=a%20b%2Fc%3D"], ["a b/c="]),
        (["n=a=b", "n="], ["", "a=b"]),
        (["n=1", "other"], [1, None]),
    ],
)
def test_values_are_integers_text_or_null(tmp_path: Path, folders: list[str], values: list[Any]) -> None:
    for folder in folders:
        put(tmp_path, folder)
    assert sorted((row["n"] for row in rows_of(open_source(tmp_path))), key=lambda n: (n is None, n)) == values


def test_only_what_is_below_the_directory_asked_for_counts(tmp_path: Path) -> None:
    root = tmp_path / "run=3"
    english, german = put(root, "lang=en", text=["a"]), put(root, "lang=de", text=["b"])

    def names(*paths: Any) -> list[str]:
        source: Any = open_source(list(paths) if len(paths) > 1 else paths[0])
        assert source.schema == ParquetSource(list(paths)).schema
        return list(source.schema.names)

    assert names(root) == ["text", "lang"]
    assert names(tmp_path) == ["text", "run", "lang"]
    assert names(f"{root}/*/*.parquet") == ["text", "lang"]
    assert names(f"{tmp_path}/**/*.parquet") == ["text", "run", "lang"]
    assert names(english, german) == ["text", "lang"]
    assert names(english.parent, german.parent) == ["text", "lang"]
    assert names(english) == ["text"]
    assert names(english.parent) == ["text"]


@columns_in_files
def test_a_column_of_the_file_that_agrees_is_taken_as_it_is(tmp_path: Path, suffix: str) -> None:
    put(tmp_path, "n=1", suffix, n=[1.0, 1.0], text=["a", "b"])
    put(tmp_path, "n=2", suffix, text=["c"])
    assert rows_of(open_source(tmp_path)) == [
        {"n": 1.0, "text": "a"},
        {"n": 1.0, "text": "b"},
        {"n": 2.0, "text": "c"},
    ]


@columns_in_files
def test_null_in_the_file_is_filled(tmp_path: Path, suffix: str) -> None:
    put(tmp_path, "lang=en", suffix, text=["a", "b"], lang=["en", None])
    assert [row["lang"] for row in rows_of(open_source(tmp_path))] == ["en", "en"]


@columns_in_files
@pytest.mark.parametrize("folder", ["lang=en", "lang=__HIVE_DEFAULT_PARTITION__"])
def test_a_column_of_the_file_that_disagrees_is_refused_with_both_values(
    tmp_path: Path, suffix: str, folder: str
) -> None:
    path = put(tmp_path, folder, suffix, text=["a", "b"], lang=["fr", "fr"])
    with pytest.raises(SchemaError, match=rf"{path.name}.*{folder}"):
        rows_of(open_source(tmp_path))


def test_a_value_that_does_not_fit_the_column_of_the_file_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "n=one", n=[1])
    with pytest.raises(SchemaError, match=r"'n'.*'one'"):
        rows_of(open_source(tmp_path))


def test_a_column_of_a_dictionary_agrees_or_not_by_its_values(tmp_path: Path) -> None:
    put(tmp_path, "lang=en", "arrow", lang=pa.array(["en", None]).dictionary_encode())
    assert [row["lang"] for row in rows_of(open_source(tmp_path))] == ["en", "en"]


def test_two_values_for_one_column_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "lang=en/lang=de")
    with pytest.raises(SchemaError, match=r"lang=en.*lang=de"):
        rows_of(open_source(tmp_path))


@pytest.mark.parametrize("kind", [ParquetSource, JsonlSource, CsvSource])
def test_columns_choose_among_directories_too(tmp_path: Path, kind: Any) -> None:
    suffix = kind.suffixes[0][1:]
    put(tmp_path, "year=2024/lang=en", suffix, text=["a"], other=[1])
    assert rows_of(kind(tmp_path, columns=["lang", "text"])) == [{"lang": "en", "text": "a"}]
    assert rows_of(kind(tmp_path, columns=["text"])) == [{"text": "a"}]
    with pytest.raises(ConfigError, match=r"'lang'.*lang=en"):
        rows_of(kind(tmp_path, columns=["lang"]))
    with pytest.raises(SchemaError, match="'missing'"):
        rows_of(kind(tmp_path, columns=["text", "missing"]))


@pytest.mark.parametrize("kind", [JsonlSource, CsvSource])
def test_a_given_schema_says_which_directories_are_columns_and_of_which_type(tmp_path: Path, kind: Any) -> None:
    put(tmp_path, "year=2024/lang=en", kind.suffixes[0][1:], text=["a"])
    text = pa.field("text", pa.string())
    assert rows_of(kind(tmp_path, schema=pa.schema([text]))) == [{"text": "a"}]
    typed = pa.schema([text, ("year", pa.string())])
    assert rows_of(kind(tmp_path, schema=typed)) == [{"text": "a", "year": "2024"}]


@formats
def test_a_state_of_a_partition_that_was_renamed_is_refused(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "d", "lang=en", suffix, text=["a", "b", "c"])
    source: Any = open_source(tmp_path / "d")
    assert source.next_batch(1).to_pylist() == [{"text": "a", "lang": "en"}]
    state = source.state_dict()
    again: Any = open_source(tmp_path / "d")
    again.load_state_dict(state)
    assert again.next_batch(1).to_pylist() == [{"text": "b", "lang": "en"}]
    (tmp_path / "d").rename(tmp_path / "moved")
    moved: Any = open_source(tmp_path / "moved")
    moved.load_state_dict(state)
    assert moved.next_batch(1).to_pylist() == [{"text": "b", "lang": "en"}]
    (tmp_path / "moved/lang=en").rename(tmp_path / "moved/lang=de")
    with pytest.raises(ResumeError, match=rf"'lang=en/part-0\.{suffix}'.*'lang=de/part-0\.{suffix}'"):
        open_source(tmp_path / "moved").load_state_dict(state)  # type: ignore[attr-defined]


def test_a_checkpointed_run_goes_on_with_the_columns_of_directories(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "d", f"n={number}", "jsonl", text=["a", "b"])
    report = Pipeline(open_source(tmp_path / "d"), [], JsonlSink(tmp_path / "out.jsonl")).run(tmp_path / "checkpoint")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert report.rows_out == 6
    assert [row["n"] for row in rows] == [0, 0, 1, 1, 2, 2]


def test_files_keep_their_directories_when_they_are_copied_and_listed_again(tmp_path: Path) -> None:
    put(tmp_path, "lang=en")
    files = list_files(tmp_path)
    assert list_files(copy.deepcopy(files)).partitions == [("lang=en",)]
    assert rows_of(ParquetSource(open_source(tmp_path).files)) == [{"text": "lang=en", "lang": "en"}]  # type: ignore[attr-defined]


def test_a_source_of_others_that_knows_no_such_columns_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        opening._MAKERS, ".parquet", lambda files: MemorySource([{"text": str(file)} for file in files])
    )
    put(tmp_path, "plain")
    open_source(tmp_path)
    assert not caplog.messages
    put(tmp_path, "lang=en")
    open_source(tmp_path)
    (said,) = caplog.messages
    assert "MemorySource" in said
    assert "lang=en" in said


def test_local_copies_of_remote_files_have_the_directories_of_the_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    bucket = fsspec.filesystem("memory")
    bucket.pipe("/partitioned/lang=en/a.jsonl", b'{"text": "a"}\n')
    try:
        assert rows_of(open_source("memory://partitioned")) == [{"text": "a", "lang": "en"}]
        assert rows_of(open_source("memory://partitioned/*/a.jsonl")) == [{"text": "a", "lang": "en"}]
        assert rows_of(open_source("memory://partitioned/lang=en/a.jsonl")) == [{"text": "a"}]
    finally:
        bucket.rm("/partitioned", recursive=True)


def test_a_renamed_partition_is_another_input_and_a_renamed_file_is_not(tmp_path: Path) -> None:
    path = put(tmp_path / "d", "lang=en", text=["a"])

    def key() -> str:
        return content_key(fingerprint_files(list_files(tmp_path / "d")))

    english = key()
    path = path.rename(path.with_name("other.parquet"))
    assert key() == english
    path.parent.rename(tmp_path / "d/lang=de")
    assert key() != english
