"""Raw files in directories that stand for columns: prepared, kept, streamed, and another input when renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import ResumeError
from penstock.loaders import ConversationDataLoader, PretrainDataLoader, Recipe, prepare
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
