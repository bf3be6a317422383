"""Raw files in directories that stand for columns: prepared, kept, streamed, and another input when renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ResumeError
from penstock.loaders import ConversationDataLoader, PretrainDataLoader, Recipe, prepare
from penstock.sources import open_source
from penstock.store import open_store

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
CHAT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}


def put(root: Path, folder: str, suffix: str) -> Path:
    path = root / folder / f"part-0.{suffix}"
    path.parent.mkdir(parents=True)
    rows = [{"text": f"A document, number {number}."} for number in range(4)]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_directories_is_kept_in_the_store(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "d", "lang=en", suffix)
    put(tmp_path / "d", "lang=de", suffix)
    prepare(tmp_path / "d", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, keep=["lang"]))
    with open_store(tmp_path / "a.store") as store:
        assert [store[i]["lang"] for i in range(len(store))] == ["de"] * 4 + ["en"] * 4


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_renamed_partition_is_prepared_anew_and_a_moved_directory_is_not(tmp_path: Path, suffix: str) -> None:
    path = put(tmp_path / "d", "lang=en", suffix)
    recipe = Recipe(tokenizer=TOKENIZER, keep=["lang"])
    assert prepare(tmp_path / "d", tmp_path / "a.store", recipe).report is not None
    (tmp_path / "d").rename(tmp_path / "moved")
    assert prepare(tmp_path / "moved", tmp_path / "a.store", recipe).report is None
    (tmp_path / "moved/lang=en").rename(tmp_path / "moved/lang=de")
    with open_store(prepare(tmp_path / "moved", tmp_path / "b.store", recipe).path) as store:
        assert store[0]["lang"] == "de"
    keys = [open_store(tmp_path / f"{name}.store").manifest.lineage[0].key for name in "ab"]
    assert keys[0] != keys[1]
    assert not path.exists()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_stream_of_partitions_is_refused_the_state_of_others(tmp_path: Path, suffix: str) -> None:
    put(tmp_path / "d", "lang=en", suffix)

    def loader() -> PretrainDataLoader:
        return PretrainDataLoader(tmp_path / "d", TOKENIZER, chunk_size=8, batch_size=1, streaming=True)

    with loader() as first:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
    with loader() as again:
        again.load_state_dict(state)
    (tmp_path / "d/lang=en").rename(tmp_path / "d/lang=de")
    with loader() as other, pytest.raises(ResumeError):
        other.load_state_dict(state)


@pytest.mark.parametrize("streaming", [False, True])
def test_chats_in_partitions_are_chats(tmp_path: Path, streaming: bool) -> None:
    for lang in ("en", "de"):
        path = tmp_path / "d" / f"lang={lang}" / "part-0.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(f"{json.dumps(CHAT)}\n" * 2)
    options: dict[str, Any] = {"chat_template": "chatml", "max_length": 64, "batch_size": 4, "backend": "numpy"}
    with ConversationDataLoader(
        tmp_path / "d", TOKENIZER, streaming=streaming, cache_dir=tmp_path / "cache", **options
    ) as loader:
        batches = list(loader)
    assert sum(int((batch.labels != -100).any(axis=1).sum()) for batch in batches) == 4


PARTITIONED = [
    {"text": "one", "lang": "de", "day": date(2024, 1, 2), "shard": 1},
    {"text": "two", "lang": "a b/c%=ü", "day": date(2024, 1, 2), "shard": 2},
    {"text": "three", "lang": None, "day": date(1999, 12, 31), "shard": None},
    {"text": "four", "lang": 'x:y?#"', "day": date(2024, 1, 2), "shard": -5},
    {"text": "five", "lang": "0012", "day": date(2024, 1, 2), "shard": 10},
]
LEVELS = ["lang", "day", "shard"]


def by_pyarrow(table: pa.Table, path: Path) -> None:
    pq.write_to_dataset(table, path, partition_cols=LEVELS)


def by_polars(table: pa.Table, path: Path) -> None:
    pl.DataFrame(table).write_parquet(path, partition_by=LEVELS)


def by_pandas(table: pa.Table, path: Path) -> None:
    table.to_pandas().to_parquet(path, partition_cols=LEVELS)


def by_duckdb(table: pa.Table, path: Path) -> None:
    with duckdb.connect() as database:
        database.register("rows", table)
        database.execute(f"COPY rows TO '{path}' (FORMAT parquet, PARTITION_BY (lang, day, shard))")


@pytest.mark.parametrize("write", [by_pyarrow, by_polars, by_pandas, by_duckdb])
def test_partitions_of_every_writer_are_read_prepared_and_kept(
    tmp_path: Path, write: Callable[[pa.Table, Path], None]
) -> None:
    write(pa.Table.from_pylist(PARTITIONED), tmp_path / "d")
    source = open_source(tmp_path / "d")
    batches = list(iter(lambda: source.next_batch(10), None))
    found = {row["text"]: row for batch in batches for row in batch.to_pylist()}
    # Days are text, unless the files themselves hold them as well.
    assert {text: row | {"day": str(row["day"])} for text, row in found.items()} == {
        row["text"]: row | {"day": str(row["day"])} for row in PARTITIONED
    }
    prepare(tmp_path / "d", tmp_path / "a.store", Recipe(tokenizer=TOKENIZER, keep=["lang", "shard"]))
    with open_store(tmp_path / "a.store") as store:
        kept = {(store[i]["lang"], store[i]["shard"]) for i in range(len(store))}
    assert kept == {(row["lang"], row["shard"]) for row in PARTITIONED}
