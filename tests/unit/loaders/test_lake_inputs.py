"""Tables of lakes as inputs: prepared with their version in the lineage, loaded, streamed, by YAML, from a bucket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import ResumeError
from penstock.loaders import ConversationDataLoader, MLXDataLoader, PretrainDataLoader, Recipe, prepare
from penstock.sources import DeltaSource
from penstock.store import open_store

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"


def rows(start: int, count: int = 40) -> pa.Table:
    numbers = range(start, start + count)
    texts = [f"A document with the number {n}, and some words more." for n in numbers]
    return pa.table({"text": texts, "n": numbers, "lang": ["de" if n % 2 else "en" for n in numbers]})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Versions 0 (40 rows), 1 (80 rows) and 2 (60 rows: some were deleted)."""
    write_deltalake(tmp_path / "docs", rows(0), partition_by=["lang"])
    write_deltalake(tmp_path / "docs", rows(40), mode="append")
    DeltaTable(tmp_path / "docs").delete("n < 20")
    return tmp_path / "docs"


def test_a_prepared_table_has_its_rows_its_partition_columns_and_its_version_in_the_lineage(
    tmp_path: Path, table: Path
) -> None:
    recipe = Recipe(tokenizer=TOKENIZER, keep=["n", "lang"])
    prepare(table, tmp_path / "a.store", recipe)
    with open_store(tmp_path / "a.store") as store:
        kept = sorted((store[i]["n"], store[i]["lang"]) for i in range(len(store)))
        (made_of,) = store.manifest.lineage[0].inputs
    assert kept == [(n, "de" if n % 2 else "en") for n in range(20, 80)]
    assert made_of.name == "Delta table docs, version 2"


def test_a_store_is_found_again_until_the_rows_of_the_table_change(tmp_path: Path, table: Path) -> None:
    recipe = Recipe(tokenizer=TOKENIZER)
    assert prepare(table, tmp_path / "a.store", recipe).report is not None
    assert prepare(table, tmp_path / "a.store", recipe).report is None
    DeltaTable(table).alter.set_table_properties({"delta.logRetentionDuration": "interval 40 days"})
    assert prepare(table, tmp_path / "a.store", recipe).report is None  # another version, and the same rows
    write_deltalake(table, rows(80), mode="append")
    again = prepare(table, tmp_path / "a.store", recipe, mode="overwrite")
    assert again.report is not None
    assert prepare(f"{table}@v2", tmp_path / "b.store", recipe).manifest.rows == 60
    assert prepare(DeltaSource(table, version=0), tmp_path / "c.store", recipe).manifest.rows == 40


def test_a_streaming_loader_reads_the_rows_of_the_version_and_resumes(table: Path) -> None:
    def loader(path: Any = table) -> PretrainDataLoader:
        return PretrainDataLoader(path, TOKENIZER, chunk_size=16, batch_size=4, backend="numpy", streaming=True)

    def ids(batches: Any) -> list[bytes]:
        return [np.asarray(batch.input_ids).tobytes() for batch in batches]

    with loader() as whole:
        wanted = ids(whole)
    assert wanted
    with loader() as first:
        batches = iter(first)
        begun = ids(next(batches) for _ in range(3))
        state = json.loads(json.dumps(first.state_dict()))
        write_deltalake(table, rows(80), mode="append")
        rest = ids(batches)
    assert begun + rest == wanted  # read as it was
    with loader() as moved, pytest.raises(ResumeError):
        moved.load_state_dict(state)
    with loader(f"{table}@v2") as resumed:
        resumed.load_state_dict(state)
        assert ids(resumed) == rest


def test_a_loader_of_samples_reads_the_table_and_not_its_files(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"input_ids": [[n, n + 1] for n in range(8)]}))
    DeltaTable(tmp_path / "t").delete("input_ids[1] < 4")
    with MLXDataLoader(tmp_path / "t", batch_size=4, shuffle=False, backend="numpy") as loader:
        assert sorted(row[0] for batch in loader for row in np.asarray(batch.input_ids).tolist()) == [4, 5, 6, 7]


def test_chats_of_a_table_are_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    write_deltalake(tmp_path / "t", pa.table({"messages": [chat] * 6, "lang": ["de", "en"] * 3}), partition_by=["lang"])
    options: dict[str, Any] = {"chat_template": "chatml", "max_length": 64, "batch_size": 2, "backend": "numpy"}
    with ConversationDataLoader(tmp_path / "t", TOKENIZER, cache_dir=tmp_path / "cache", **options) as loader:
        assert sum(len(batch.labels) for batch in loader) == 6


def test_a_table_is_read_by_yaml_and_by_the_commands(tmp_path: Path, table: Path) -> None:
    job = tmp_path / "job.yaml"
    source = {"path": str(table), "version": 1, "columns": ["n"], "filter": [["lang", "=", "de"], ["n", "<", 10]]}
    job.write_text(json.dumps({"source": source, "sink": str(tmp_path / "out.jsonl")}))
    result = CliRunner().invoke(app, ["run", str(job)])
    assert result.exit_code == 0, result.output
    found = sorted(json.loads(line)["n"] for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert found == [1, 3, 5, 7, 9]
    job.write_text(json.dumps({"source": {"type": "delta", **source}, "sink": str(tmp_path / "again.jsonl")}))
    assert CliRunner().invoke(app, ["run", str(job)]).exit_code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    command = ["prepare", f"{table}@v0", "--out", str(tmp_path / "a.store"), "--tokenizer", str(TOKENIZER)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert open_store(tmp_path / "a.store").manifest.rows == 40
