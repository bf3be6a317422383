"""Blocks that are decoded in pieces: each piece is transformed by itself, and a block counts once."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import StageError
from penstock.files.ranges import row_groups
from penstock.memory import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig, workers
from penstock.pipeline.buffers import Buffers
from penstock.pipeline.checkpoint import Checkpoint
from penstock.pipeline.stages import Block, Decoded
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource, ParquetSource
from penstock.testing import assert_resumes_exactly
from penstock.transforms import ExactDedup, FlatMap, Map

PIECE = 7
"""Most rows of a piece in these tests."""


@pytest.fixture(autouse=True, params=["alone", "shared"])
def small_pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """A worker transforms all pieces of a block, or the first one, and the others are for all workers."""
    seconds = -1.0 if request.param == "shared" else 1000.0
    with patch.object(row_groups, "_MOST_ROWS", PIECE), patch.object(workers, "_LONG", seconds):
        yield


class Refusal:
    """Passes all rows on, in order, but refuses some."""

    seen = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if any(row % 29 == 5 for row in batch["id"].to_pylist()):
            raise ValueError("unwanted")
        self.seen += batch.num_rows
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def refuse_some(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] % 17 == 3:
        raise ValueError("bad")
    return row | {"double": 2 * row["id"]}


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": row, "text": f"text {row * 7 % 61}"} for row in range(count)]


def write(path: Path, sizes: list[int]) -> Path:
    table = pa.Table.from_pylist(rows_of(sum(sizes)))
    with pq.ParquetWriter(path, table.schema) as writer:
        for start, size in zip(accumulate([0, *sizes]), sizes):
            writer.write_table(table.slice(start, size), row_group_size=max(1, size))
    return path


def expected(count: int) -> tuple[list[dict[str, Any]], int, list[int]]:
    """Rows that stay, how many are duplicates, and the rows that the last stage refuses, in plain Python."""
    kept, seen = [], set()
    duplicates, unwanted = 0, []
    for row in rows_of(count):
        if row["id"] % 17 == 3:
            continue
        if row["text"] in seen:
            duplicates += 1
            continue
        seen.add(row["text"])
        if row["id"] % 29 == 5:
            unwanted.append(row["id"])
        else:
            kept.append(row | {"double": 2 * row["id"]})
    return kept, duplicates, unwanted


def stages(directory: Path | None = None) -> list[Any]:
    return [Map(refuse_some), ExactDedup("text", directory=directory), Refusal()]


def quarantined(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(row["data"]["id"], row["reason"]) for row in map(json.loads, lines)]


@given(st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from(["1 MiB", "1 GiB"]))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_counts_and_bad_rows_are_those_of_a_loop(sizes: list[int], count: int, budget: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        path, sink, out = write(Path(home, "a.parquet"), sizes), MemorySink(), Path(home, "bad.jsonl")
        config = PipelineConfig(workers=count, on_error="quarantine", quarantine=out)
        report = Pipeline(ParquetSource(path), stages(), sink, config, budget=budget).run()
        kept, duplicates, unwanted = expected(sum(sizes))
        assert sink.rows() == kept
        assert (report.rows_in, report.rows_out) == (sum(sizes), len(kept))
        assert sum(report.dropped.values()) == duplicates
        bad = quarantined(out)
        assert [row for row, reason in bad if "bad" in reason] == [row for row in range(sum(sizes)) if row % 17 == 3]
        assert [row for row, reason in bad if "unwanted" in reason] == unwanted


def test_a_row_group_is_transformed_in_pieces(tmp_path: Path) -> None:
    sizes: list[int] = []

    def note(batch: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return batch

    sink = MemorySink()
    path = write(tmp_path / "a.parquet", [20, 5, 9])
    Pipeline(ParquetSource(path), [note], sink, PipelineConfig(workers=1)).run()
    assert sizes == [7, 7, 6, 5, 7, 2]
    assert sink.rows() == rows_of(34)


@pytest.mark.parametrize("batch_rows", ["auto", 11])
def test_a_run_resumes_inside_of_a_block(tmp_path: Path, batch_rows: Any) -> None:
    path = write(tmp_path / "a.parquet", [40, 3, 30])
    config = PipelineConfig(workers=2, batch_rows=batch_rows)
    assert_resumes_exactly(lambda: Pipeline(ParquetSource(path), [Map(lambda row: row | {"n": 1})], config=config))
    explode = FlatMap(lambda row: [row, row])
    assert_resumes_exactly(lambda: Pipeline(ParquetSource(path), [explode], config=config))


@pytest.mark.parametrize("failing", [2, 4, 6])
def test_a_checkpoint_inside_of_a_block_counts_and_quarantines_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    path, bad = write(tmp_path / "a.parquet", [40, 3, 30, 60]), tmp_path / "bad.jsonl"
    sink, consumed = JsonlSink(tmp_path / "out.jsonl"), []
    consume = sink.consume

    def fail_later(batch: pa.RecordBatch) -> None:
        consumed.append(batch.num_rows)
        if len(consumed) == failing:
            raise RuntimeError("the disk is gone")
        consume(batch)

    monkeypatch.setattr(sink, "consume", fail_later)

    def run(sink: JsonlSink) -> Any:
        config = PipelineConfig(workers=2, checkpoint_seconds=0, on_error="quarantine", quarantine=bad)
        pipeline = Pipeline(ParquetSource(path), stages(tmp_path / "seen"), sink, config)
        return pipeline.run(tmp_path / "checkpoint")

    with pytest.raises(StageError, match="the disk is gone"):
        run(sink)
    report = run(JsonlSink(tmp_path / "out.jsonl"))
    kept, duplicates, unwanted = expected(133)
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == kept
    assert (report.rows_in, report.rows_out, sum(report.dropped.values())) == (133, len(kept), duplicates)
    assert sorted(row for row, _ in quarantined(bad)) == sorted([*unwanted, *range(3, 133, 17)])


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("saves", [(3, 1), (3, 2, 1), (2, 1, 1, 3), (1, 1)])
def test_runs_that_end_again_while_rows_are_passed_over_repeat_and_lose_none(
    tmp_path: Path, saves: tuple[int, ...], expands: bool
) -> None:
    path, place = write(tmp_path / "a.parquet", [40, 20]), tmp_path / "out.jsonl"

    def run(last_save: int | None) -> None:
        save, count = Checkpoint.save, 0

        def saved(self: Checkpoint, *given: Any, **more: Any) -> None:
            nonlocal count
            save(self, *given, **more)
            count += 1
            if count == last_save:
                raise KeyboardInterrupt

        config = PipelineConfig(workers=2, checkpoint_seconds=0)
        stage: Any = FlatMap(lambda row: [row, row]) if expands else Map(dict)
        with patch.object(Checkpoint, "save", saved):
            Pipeline(ParquetSource(path), [stage], JsonlSink(place), config).run(tmp_path / "checkpoint")

    for last_save in saves:
        with pytest.raises(KeyboardInterrupt):
            run(last_save)
    run(None)
    found = [json.loads(line)["id"] for line in place.read_text().splitlines()]
    assert found == [row for row in range(60) for _ in range(1 + expands)]


@pytest.mark.parametrize("ordered", [True, False])
def test_the_first_bad_row_of_a_later_piece_is_named(tmp_path: Path, ordered: bool) -> None:
    def refuse(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 38 in batch["id"].to_pylist():
            raise ValueError("unwanted")
        return batch

    class InOrder(Refusal):
        def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return refuse(batch)

    path = write(tmp_path / "a.parquet", [20, 40])
    with pytest.raises(StageError, match=r"row 38\b.*unwanted"):
        Pipeline(ParquetSource(path), [InOrder() if ordered else refuse], MemorySink()).run()


def test_a_row_that_a_stage_refuses_comes_before_an_unreadable_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {row}}}\n' for row in range(8)) + "{\n" + '{"id": 9}\n')

    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 5:
            raise ValueError("unwanted")
        return row

    with pytest.raises(StageError, match=r"row 5\b.*unwanted"):
        Pipeline(JsonlSource(path), [Map(refuse)], MemorySink()).run()


def test_workers_share_the_pieces_of_a_block_that_takes_long(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def meet(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["id"][0].as_py():
            both.wait(60)  # for another worker, with another piece
        return batch

    path, sink = write(tmp_path / "a.parquet", [9 * PIECE]), MemorySink()
    with patch.object(workers, "_LONG", -1.0):
        Pipeline(ParquetSource(path), [meet], sink, PipelineConfig(workers=2)).run()
    assert sink.rows() == rows_of(9 * PIECE)


def test_rows_of_a_block_that_takes_long_are_there_before_all_of_it_is(tmp_path: Path) -> None:
    delivered = threading.Event()

    def wait(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch["id"][0].as_py() < 2 * PIECE or delivered.wait(60)
        return batch

    path = write(tmp_path / "a.parquet", [9 * PIECE])
    found = []
    with patch.object(workers, "_LONG", -1.0):
        for batch in Pipeline(ParquetSource(path), [wait], config=PipelineConfig(workers=1)):
            delivered.set()
            found += batch.to_pylist()
    assert found == rows_of(9 * PIECE)


def test_a_stop_gives_back_the_memory_of_pieces_that_wait(tmp_path: Path) -> None:
    budget = MemoryBudget("1 GiB")
    path = write(tmp_path / "a.parquet", [9 * PIECE] * 4)
    pipeline = Pipeline(ParquetSource(path), [Map(dict)], config=PipelineConfig(workers=2), budget=budget)
    for _ in pipeline:
        break
    pipeline.stop()
    assert budget.used == 0


def test_a_stop_ends_the_pieces_that_go_through_a_stage_in_order(tmp_path: Path) -> None:
    second, stopped = threading.Event(), threading.Event()
    cancel = Buffers.cancel

    class Slow(Refusal):
        calls = 0

        def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            self.calls += 1
            if self.calls == 2:
                second.set()
                stopped.wait(60)
            return batch

    def cancelled(self: Buffers) -> None:
        cancel(self)
        stopped.set()

    slow, budget = Slow(), MemoryBudget("1 GiB")
    path = write(tmp_path / "a.parquet", [9 * PIECE])
    pipeline = Pipeline(ParquetSource(path), [slow], config=PipelineConfig(workers=1), budget=budget)
    for _ in pipeline:
        break
    assert second.wait(60)
    with patch.object(Buffers, "cancel", cancelled):
        pipeline.stop()
    assert slow.calls == 2
    assert budget.used == 0


def test_a_source_with_a_decode_of_its_own_keeps_it(tmp_path: Path) -> None:
    class Doubled(ParquetSource):
        def decode(self, block: Block) -> Decoded:
            decoded = super().decode(block)
            doubled = pc.multiply(decoded.batch["id"], 2)
            return Decoded(decoded.batch.append_column("double", doubled), rows=decoded.rows)

    class DoubledInPieces(ParquetSource):
        def decode_pieces(self, block: Block) -> list[Decoded]:
            pieces = super().decode_pieces(block)
            return [
                Decoded(each.batch.append_column("double", pc.multiply(each.batch["id"], 2)), rows=each.rows)
                for each in pieces
            ]

    path = write(tmp_path / "a.parquet", [20, 5])
    for kind in (Doubled, DoubledInPieces):
        sink = MemorySink()
        Pipeline(kind(path), [], sink).run()
        assert sink.rows() == [row | {"double": 2 * row["id"]} for row in rows_of(25)]


def test_damage_costs_the_rows_behind_it_in_its_row_group(tmp_path: Path) -> None:
    path, options = tmp_path / "a.parquet", {"use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.table({"n": range(90)}), path, row_group_size=30, compression="none", **options)
    column = pq.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    stop = column.data_page_offset + column.total_compressed_size
    data[stop - 12 : stop] = b"\xff" * 12
    path.write_bytes(bytes(data))
    sink = MemorySink()
    report = Pipeline(ParquetSource(path, verify="pages"), [], sink, PipelineConfig(on_error="skip")).run()
    assert [row["n"] for row in sink.rows()] == [*range(30), *range(60, 90)]
    assert sum(report.skipped.values()) == 1
