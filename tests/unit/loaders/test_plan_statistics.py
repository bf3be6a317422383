"""The figures of a plan, against those of the batches that the loader really makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.batching.supervision import Supervision
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.plan_summary import summarize_plan
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.order.samples import Samples
from penstock.order.statistics import step_chunks
from penstock.sinks import StoreSink
from penstock.store import open_store
from penstock.store.gather import TokenTable

Kind = type[PretrainDataLoader] | type[ConversationDataLoader]


def write_store(path: Path, lengths: Sequence[int], *, mask: bool = False, shard_bytes: int = 1 << 26) -> Path:
    rng = np.random.default_rng(len(lengths))
    rows: dict[str, Any] = {"input_ids": [rng.integers(1, 99, length).tolist() for length in lengths]}
    schema = [("input_ids", pa.list_(pa.uint16()))]
    if mask:
        rows["loss_mask"] = [(rng.random(length) < 0.5).tolist() for length in lengths]
        schema.append(("loss_mask", pa.list_(pa.bool_())))
    sink = StoreSink(path, shard_bytes=shard_bytes)
    sink.consume(pa.RecordBatch.from_pydict(rows, schema=pa.schema(schema)))
    sink.flush()
    return path


def sums(make: Any, world: int, epochs: int) -> dict[str, Any]:
    """Everything that can be counted in the batches of all ranks."""
    found = {"steps": 0, "tokens": 0, "slots": 0, "supervised": 0, "longest_row": 0, "documents": 0}
    by_source: dict[str, int] = {}
    per_epoch: list[int] = []
    most = 0
    for rank in range(world):
        with make(rank=rank, world_size=world) as loader:
            for _ in range(epochs):
                batches = list(loader)
                if rank == 0:
                    per_epoch.append(len(batches))
                    found["steps"] += len(batches)
                for batch in batches:
                    found["tokens"] += batch.num_tokens
                    found["slots"] += batch.input_ids.size
                    found["supervised"] += int((batch.labels != -100).sum())
                    found["longest_row"] = max(found["longest_row"], batch.input_ids.shape[1])
                    found["documents"] += len(batch.metadata["row"])
                    others = sum(value.nbytes for value in batch.metadata.values() if hasattr(value, "nbytes"))
                    most = max(most, batch.make_fields().nbytes - others)
                    for source in batch.metadata["source"].tolist():
                        name = batch.metadata["sources"][source]
                        by_source[name] = by_source.get(name, 0) + 1
    return found | {"per_epoch": per_epoch, "by_source": by_source, "most_bytes": most}


def assert_figures_are_those_of_the_batches(make: Any, world: int, epochs: int) -> None:
    with make(rank=0, world_size=world) as loader:
        figures = summarize_plan(loader, epochs).to_dict()
    if not figures["steps"]:
        with make(rank=0, world_size=world) as loader, pytest.raises(ConfigError, match="drop_last"):
            list(loader)
        return
    real = sums(make, world, epochs)
    for name in ("steps", "tokens", "slots", "supervised", "longest_row", "documents"):
        assert figures[name] == real[name], name
    counted = [epoch["steps"] for epoch in figures["epochs"]]
    assert counted + [0] * (epochs - len(counted)) == real["per_epoch"]
    # Beside places for tokens there are a few numbers that say where documents begin.
    assert figures["batch_bytes"] <= real["most_bytes"] <= figures["batch_bytes"] + 4 * (figures["documents"] + 99)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    chosen = {
        "batch_size": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "padding_free": draw(st.booleans()),
        "pad_to_multiple_of": draw(st.sampled_from([None, 1, 7])),
        "packing": draw(st.sampled_from([None, "concat", "best_fit", "first_fit"])),
    }
    if chosen["packing"] in (None, "best_fit") and draw(st.integers(0, 3)) == 0:
        chosen |= {"max_tokens": 40, "packing": None, "drop_last": False}
    return chosen


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 30), min_size=8, max_size=40).filter(lambda lengths: sum(lengths) > 20),
    options=options(),
    world=st.integers(1, 3),
    epochs=st.integers(1, 2),
    mask=st.booleans(),
    truncation=st.sampled_from(["left", "right", "split"]),
)
def test_every_figure_is_that_of_the_batches(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    options: dict[str, Any],
    world: int,
    epochs: int,
    mask: bool,
    truncation: str,
) -> None:
    store = write_store(tmp_path_factory.mktemp("s") / "s", lengths, mask=mask)
    loader: Kind = ConversationDataLoader if mask else PretrainDataLoader
    length = {"max_length" if mask else "chunk_size": 16}

    def make(**more: Any) -> DataLoader:
        return loader(store, **length, truncation=truncation, backend="numpy", prefetch=0, **{**options, **more})  # type: ignore[arg-type]

    try:
        make(rank=0, world_size=world).close()
    except ConfigError as error:
        if options["drop_last"] and "fewer than a global batch" in str(error):
            return
        raise
    assert_figures_are_those_of_the_batches(make, world, epochs)


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_figures_of_a_mixture_are_those_of_its_batches(tmp_path: Path, stopping: str, packing: Any) -> None:
    rng = np.random.default_rng(1)
    a = write_store(tmp_path / "a", rng.integers(1, 17, 60).tolist())
    b = write_store(tmp_path / "b", rng.integers(1, 17, 25).tolist())

    def make(**more: Any) -> DataLoader:
        loader = MixedDataLoader(
            {"a": a, "b": b},
            {"a": 0.7, "b": 0.3},
            packing=packing,
            chunk_size=16,
            batch_size=3,
            stopping_strategy=stopping,
            backend="numpy",
            prefetch=0,
            **more,
        )
        loader.edit(loader.plan.skip(2, 4).ban({"a": [3, 4, 5]}, step=1).reweight(5, {"a": 0.2, "b": 0.8}))
        return loader

    assert_figures_are_those_of_the_batches(make, 2, 2)
    with make() as loader:
        figures = summarize_plan(loader, 1)
    assert figures.skipped == 2
    assert figures.lost_tokens["skipped steps"] > 0
    assert sum(source.tokens for source in figures.sources) == figures.tokens
    assert sum(source.share for source in figures.sources) == pytest.approx(1)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.integers(1, 25), min_size=2, max_size=3),
    shares=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    packing=st.sampled_from(["concat", "best_fit", None]),
    stopping=st.sampled_from(["first_exhausted", "all_exhausted"]),
    change=st.integers(1, 6),
    batch_size=st.integers(1, 7),
    max_epochs=st.sampled_from([None, 2]),
    block=st.sampled_from([1, 10, 1 << 16]),
)
def test_blocks_of_a_mixture_are_its_steps(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[int],
    shares: list[int],
    packing: Any,
    stopping: str,
    change: int,
    batch_size: int,
    max_epochs: int | None,
    block: int,
) -> None:
    folder = tmp_path_factory.mktemp("m")
    rng = np.random.default_rng(sum(rows))
    names = "abc"[: len(rows)]
    sources = {n: write_store(folder / n, rng.integers(1, 17, count).tolist()) for n, count in zip(names, rows)}
    with MixedDataLoader(
        sources,
        dict(zip(names, shares)),
        packing=packing,
        chunk_size=16,
        batch_size=batch_size,
        stopping_strategy=stopping,
        max_epochs=max_epochs,
        backend="numpy",
    ) as loader:
        plan = loader.plan.reweight(change, dict(zip(names, reversed(shares[: len(rows)]))))
        found = 0
        with mock.patch("penstock.order.statistics._SAMPLES_AT_ONCE", block):
            chunks = list(step_chunks(plan, 2))
        for chunk in chunks:
            assert chunk.first == found
            for number in range(chunk.steps):
                step = plan.step(found)
                low, high = chunk.bounds[number], chunk.bounds[number + 1]
                assert list(chunk.samples.slice(low, high)) == list(step.samples)
                assert chunk.epoch == step.epoch
                found += 1
        assert found == plan.steps_in(0) + plan.steps_in(1)


def test_edits_of_a_single_source_change_the_figures_as_they_change_the_batches(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [5, 9, 3, 7] * 10)

    def make(**more: Any) -> DataLoader:
        loader = PretrainDataLoader(store, chunk_size=16, packing="best_fit", batch_size=2, backend="numpy", **more)
        loader.edit(loader.plan.skip(1, 3).ban(range(0, 40, 3), step=4))
        return loader

    assert_figures_are_those_of_the_batches(make, 2, 3)
    with make() as loader:
        lost = summarize_plan(loader, 1).lost_tokens
        assert lost.keys() == {"skipped steps", "banned rows"}
        whole = summarize_plan(
            PretrainDataLoader(store, chunk_size=16, packing="best_fit", batch_size=2, backend="numpy")
        )
        assert summarize_plan(loader, 1).tokens + sum(lost.values()) == whole.tokens == 240


def test_what_is_cut_off_dropped_or_left_over_is_counted_by_reason(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [4, 20, 30, 8, 5])

    def lost(**options: Any) -> dict[str, int]:
        with PretrainDataLoader(store, chunk_size=16, packing=None, backend="numpy", **options) as loader:
            return summarize_plan(loader, 2).lost_tokens

    assert lost(truncation="right") == {"cut off (truncation=right)": 2 * (4 + 14)}
    assert lost(truncation="drop") == {"rows too long (truncation=drop)": 2 * 50}
    assert lost(truncation="split") == {}
    left = lost(truncation="split", drop_last=True, batch_size=6, shuffle=False)
    assert left == {"fills no batch (drop_last)": 2 * 5}  # 7 parts, the last of which is the row of 5


def test_a_part_of_a_plan_is_counted_if_asked_for(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [10] * 50)
    with PretrainDataLoader(store, chunk_size=10, batch_size=4, backend="numpy") as loader:
        figures = summarize_plan(loader, 3, steps=5)
    assert (figures.steps, figures.samples, figures.tokens) == (5, 20, 200)
    assert figures.sources[0].passes == pytest.approx(0.4)


def test_passes_over_sources_are_told_to_the_sample(tmp_path: Path) -> None:
    a, b = write_store(tmp_path / "a", [8] * 30), write_store(tmp_path / "b", [8] * 10)
    weights = {"a": 0.5, "b": 0.5}
    with MixedDataLoader({"a": a, "b": b}, weights, chunk_size=8, batch_size=2, backend="numpy") as loader:
        figures = summarize_plan(loader, 1)
    assert [source.passes for source in figures.sources] == pytest.approx([1 / 3, 1.0])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=30).filter(any),
    data=st.data(),
)
def test_supervised_tokens_of_any_part_are_those_of_the_mask(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], data: st.DataObject
) -> None:
    path = write_store(tmp_path_factory.mktemp("m") / "s", lengths, mask=True, shard_bytes=256)
    with open_store(path) as store:
        table = TokenTable([store, open_store(path)])
        parts = []
        for _ in range(data.draw(st.integers(1, 10))):
            row = data.draw(st.integers(0, 2 * len(lengths) - 1))
            start = data.draw(st.integers(0, lengths[row % len(lengths)]))
            parts.append((row, start, data.draw(st.integers(0, lengths[row % len(lengths)] - start))))
        rows, starts, sizes = (np.array(column, np.int64) for column in zip(*parts))
        counted = Supervision(table).count(Samples(np.arange(len(rows) + 1), rows, starts, sizes))
        masks = [np.asarray(store[row % len(lengths)]["loss_mask"])[start : start + size] for row, start, size in parts]
        assert counted.tolist() == [int(mask[1:].sum()) for mask in masks]


def test_counting_a_plan_leaves_the_loader_where_it_is(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [7] * 40)
    with PretrainDataLoader(store, chunk_size=8, batch_size=2, backend="numpy") as loader:
        loader.get_batch()
        state = loader.state_dict()
        before = summarize_plan(loader)
        assert loader.state_dict() == state
        loader.edit(loader.plan.skip(3, 5))
        after = summarize_plan(loader)
    assert (before.steps - after.steps, after.skipped) == (2, 2)


def test_what_was_left_out_when_files_were_prepared_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sample = Path(__file__).parents[3] / "examples" / "sample"
    options: dict[str, Any] = {"chat_template": "chatml", "backend": "numpy", "cache_dir": tmp_path}
    with ConversationDataLoader(sample / "chats.jsonl", sample / "tokenizer", 2048, **options) as loader:
        whole = summarize_plan(loader)
    assert whole.lost_tokens == {}
    with ConversationDataLoader(
        sample / "chats.jsonl", sample / "tokenizer", 64, truncation="drop", **options
    ) as loader:
        cut = summarize_plan(loader)
    assert sum(cut.lost_tokens.values()) == whole.tokens - cut.tokens > 0
    assert "chats.jsonl" in caplog.text
