"""Notebooks and terminals: stores, batches, plans and reports as people see them; stores as tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from page_reader import parsed
from penstock.batching.batch import TrainingBatch
from penstock.errors import SchemaError
from penstock.loaders import PretrainDataLoader
from penstock.pipeline import Pipeline
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource
from penstock.store import open_store
from penstock.tokenizers.simple import ByteTokenizer
from penstock.transforms import Filter
from report_stores import chat_store
from token_stores import make_masks, make_rows, make_store

IDS = np.array([[72, 105, 33, 0], [60, 98, 62, 10]])
BATCH = {"input_ids": IDS, "labels": np.array([[-100, 105, 33, -100], [-100, -100, 62, 10]])}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rows = make_rows(200, 9)
    return make_store(tmp_path / "a.store", rows, make_masks(rows), shard_bytes=400)


def test_a_store_is_a_table_of_arrow_polars_and_pandas(store: Path) -> None:
    with open_store(store) as opened:
        whole = opened.to_arrow()
        assert whole.num_rows == 200
        assert whole.schema.equals(opened.schema)
        assert whole["input_ids"].to_pylist() == [row["input_ids"].tolist() for row in opened]
        part = opened.to_arrow(["input_ids"], slice(150, 153))
        assert part.column_names == ["input_ids"]
        assert part["input_ids"].to_pylist() == whole["input_ids"].to_pylist()[150:153]
        assert opened.to_arrow(rows=slice(10, 0, -5))["input_ids"].to_pylist() == [
            whole["input_ids"].to_pylist()[at] for at in (10, 5)
        ]
        assert opened.to_arrow(rows=[3, 3, -1]).num_rows == 3
        assert opened.to_arrow(rows=slice(5, 5)).num_rows == 0
        assert opened.to_polars(rows=slice(0, 4))["input_ids"].to_list() == whole["input_ids"].to_pylist()[:4]
        assert opened.to_pandas(["loss_mask"], slice(2, 3))["loss_mask"][0].tolist() == whole["loss_mask"][2].as_py()
        with pytest.raises(SchemaError, match="column 'x' not in"):
            opened.to_arrow(["x"])


def test_an_arrow_table_of_a_store_copies_nothing(tmp_path: Path) -> None:
    path = make_store(tmp_path / "big.store", [[1] * 50_000] * 40)
    with open_store(path) as opened:
        before = pa.total_allocated_bytes()
        table = opened.to_arrow()
        assert table.nbytes > 4_000_000
        assert pa.total_allocated_bytes() - before < 100_000


def test_a_store_shows_figures_lengths_and_a_coloured_row_in_a_notebook(tmp_path: Path) -> None:
    with open_store(chat_store(tmp_path, 8)) as opened:
        tree = parsed(opened._repr_html_())
        assert "8" in tree.all("dl")[0].text
        assert tree.all("svg", role="img")
        ids = [token.attributes["title"] for token in tree.all("i") if token.attributes.get("title")]
        assert ids == [f"id {token}" for token in opened[0]["input_ids"].tolist()]
        assert tree.all("span", class_="trained")
        assert not tree.all("script")


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_batch_shows_its_mask_in_a_notebook(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    tree = parsed(TrainingBatch.from_numpy(BATCH, backend=backend)._repr_html_())
    assert [len(run.all("i")) for run in tree.all("span", class_="trained")] == [2, 2]
    assert "row 1: 4 tokens, 2 supervised" in tree.text


def test_a_batch_prints_brackets_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    mask = {"attention_mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])}
    batch = TrainingBatch.from_numpy(BATCH | mask, backend="numpy")
    batch.show(ByteTokenizer(), rows=1)
    assert capsys.readouterr().out.splitlines() == ["row 0: 4 tokens, 2 supervised, 1 of padding", "H|[[i|!|]]\\x00"]
    batch.show(tokens=2)
    assert "72 |[[105 ]]" in capsys.readouterr().out


def test_a_batch_prints_colours_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    TrainingBatch.from_numpy(BATCH, backend="numpy").show(ByteTokenizer(), rows=1)
    out = capsys.readouterr().out
    assert "\x1b[1;4;32mi\x1b[0m" in out  # bold, underlined as the second token, green
    assert "[[" not in out


def test_a_plan_and_a_report_show_tables_in_a_notebook(store: Path) -> None:
    with PretrainDataLoader(store, ByteTokenizer(), chunk_size=8, batch_size=2, backend="numpy") as loader:
        tree = parsed(loader.plan._repr_html_())
        assert loader.plan.fingerprint in tree.text
        assert len(tree.all("tr")) == 2
    rows = store.parent / "rows.jsonl"
    rows.write_text("".join(f'{{"n": {number}}}\n' for number in range(10)))
    report = Pipeline(JsonlSource(rows), [Filter("n > 1", reason="<b>")], JsonlSink(rows.with_name("out.jsonl"))).run()
    tree = parsed(report._repr_html_())
    assert ["dropped", "2", "<b>"] in [[cell.text for cell in line.all("td")] for line in tree.all("tr")]
    assert len(tree.all("table")[1].all("tr")) == 1 + len(report.stages)
