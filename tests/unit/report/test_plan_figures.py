"""Figures of a plan over its steps, against a plain loop over the batches that loaders really make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.distributed.balancing import attention_cost
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.mixed import MixedDataLoader
from penstock.loaders.plan_summary import summarize_plan
from penstock.loaders.pretrain import PretrainDataLoader
from penstock.order.schedules import Schedule
from penstock.report.plan_figures import PlanFigures, plan_figures
from penstock.sinks import StoreSink

Make = Callable[..., DataLoader]


def write_store(path: Path, lengths: Sequence[int]) -> Path:
    rng = np.random.default_rng(len(lengths))
    rows = {"input_ids": [rng.integers(1, 99, length).tolist() for length in lengths]}
    sink = StoreSink(path)
    sink.consume(pa.RecordBatch.from_pydict(rows, schema=pa.schema([("input_ids", pa.list_(pa.uint16()))])))
    sink.flush()
    return path


def lengths_of(count: int, seed: int, longest: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest, count).tolist()


def by_batches(make: Make, world: int, epochs: int) -> dict[int, dict[str, Any]]:
    """Tokens by source, places for tokens, and samples of each step, counted in the batches of all ranks."""
    found: dict[int, dict[str, Any]] = {}
    for rank in range(world):
        with make(rank=rank, world_size=world) as loader:
            for _ in range(epochs):
                for batch in loader:
                    facts = found.setdefault(
                        batch.metadata["step"], {"tokens": 0, "slots": 0, "documents": [], "samples": 0}
                    )
                    facts["tokens"] += batch.num_tokens
                    facts["slots"] += batch.input_ids.size
                    facts["documents"] += batch.metadata["source"].tolist()
    return found


def by_steps(loader: DataLoader, epochs: int) -> dict[int, dict[str, Any]]:
    """Samples and tokens of each source by step, read one by one."""
    plan, sources = loader.plan, len(loader.plan.sources)
    position, found = plan.start(), dict[int, dict[str, Any]]()
    while position.epoch < epochs and not plan.ended(position):
        step, following = plan.read(position)
        if step is None:
            position = plan.next_delivered(following)
            continue
        tokens, samples = [0] * sources, [0] * sources
        at = 0
        for parts in step.samples:
            for number, (_, _, length) in enumerate(parts):
                source = int(step.sources[at])
                tokens[source] += length
                samples[source] += number == 0
                at += 1
        found[step.number] = {"tokens": tokens, "samples": samples}
        position = plan.next_delivered(following)
    return found


def assert_points_are_sums_of_batches(make: Make, world: int, epochs: int, points: int) -> PlanFigures:
    with make(rank=0, world_size=world) as loader:
        figures = plan_figures(loader, epochs, points=points)
        steps = by_steps(loader, epochs)
        summary = summarize_plan(loader, epochs)
    batches = by_batches(make, world, epochs)
    assert figures.summary == summary
    assert figures.coverage.whole
    series = figures.series
    assert len(series) <= points
    assert (
        figures.coverage.counted
        == max(batches) + 1
        == series.first[-1] + np.count_nonzero(np.arange(series.first[-1], series.stop[-1]) <= max(batches))
    )
    for point, (first, stop) in enumerate(zip(series.first.tolist(), series.stop.tolist())):
        here = [number for number in range(first, stop) if number in batches]
        assert series.steps[point] == len(here)
        assert series.slots[point] == sum(batches[number]["slots"] for number in here)
        assert series.tokens[point].sum() == sum(batches[number]["tokens"] for number in here)
        assert series.tokens[point].tolist() == [sum(each) for each in zip(*(steps[n]["tokens"] for n in here))]
        shares = [1 - batches[number]["tokens"] / batches[number]["slots"] for number in here]
        assert np.isclose(series.least_padding[point], min(shares))
        assert np.isclose(series.most_padding[point], max(shares))
        assert np.isclose(
            series.padding[point], 1 - series.tokens[point].sum() / sum(batches[number]["slots"] for number in here)
        )
    return figures


@settings(
    max_examples=15, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(12, 60),
    seed=st.integers(0, 3),
    batch_size=st.integers(1, 4),
    packing=st.sampled_from([None, "concat", "best_fit", "first_fit"]),
    truncation=st.sampled_from(["left", "split", "drop"]),
    drop_last=st.booleans(),
    padding_free=st.booleans(),
    world=st.integers(1, 2),
    epochs=st.integers(1, 3),
    points=st.sampled_from([2, 4, 10, 200]),
)
def test_points_are_sums_over_the_batches_of_one_source(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    seed: int,
    world: int,
    epochs: int,
    points: int,
    **options: Any,
) -> None:
    store = write_store(tmp_path_factory.mktemp("s") / "s", lengths_of(count, seed))

    def make(**more: Any) -> DataLoader:
        return PretrainDataLoader(store, chunk_size=32, seed=seed, backend="numpy", prefetch=0, **options, **more)

    try:
        make(rank=0, world_size=world).close()
    except ConfigError as error:
        if "fewer than a global batch" in str(error):
            return
        raise
    figures = assert_points_are_sums_of_batches(make, world, epochs, points)
    reached = figures.epochs[0]
    assert reached[-1] == epochs
    assert (np.diff(reached) >= 0).all()
    assert figures.targets() is None


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
@pytest.mark.parametrize("packing", ["concat", "best_fit", None])
def test_points_of_a_mixture_are_sums_over_its_batches(tmp_path: Path, stopping: str, packing: Any) -> None:
    sources = {
        "web": write_store(tmp_path / "web", lengths_of(90, 1)),
        "code": write_store(tmp_path / "code", lengths_of(40, 2)),
    }

    def make(**more: Any) -> DataLoader:
        return MixedDataLoader(
            sources,
            weights={"web": 0.7, "code": 0.3},
            stopping_strategy=stopping,
            chunk_size=48,
            packing=packing,
            batch_size=3,
            backend="numpy",
            prefetch=0,
            **more,
        )

    figures = assert_points_are_sums_of_batches(make, 2, 2, 10)
    with make(rank=0, world_size=2) as loader:
        steps = by_steps(loader, 2)
    for point, (first, stop) in enumerate(zip(figures.series.first.tolist(), figures.series.stop.tolist())):
        samples = [steps[number]["samples"] for number in range(first, stop) if number in steps]
        assert figures.series.drawn[point].tolist() == [sum(each) for each in zip(*samples)]


def scheduled(tmp_path: Path, **more: Any) -> DataLoader:
    sources = {
        "web": write_store(tmp_path / "web", lengths_of(400, 1)),
        "code": write_store(tmp_path / "code", lengths_of(300, 2)),
    }
    points = [(0, {"web": 0.9, "code": 0.1}), (20, {"web": 0.2, "code": 0.8})]
    options = {"batch_size": 8, "chunk_size": 48, "backend": "numpy"}
    return MixedDataLoader(sources, weights=Schedule.of(points, "linear"), **{**options, **more})


def test_targets_are_the_weights_of_the_schedule_and_drawn_samples_follow_them(tmp_path: Path) -> None:
    with scheduled(tmp_path) as loader:
        figures = plan_figures(loader)
        targets = figures.targets()
        schedule = loader.plan.schedule
    assert targets is not None
    assert schedule is not None
    series = figures.series
    assert (series.stop - series.first == 1).all()
    for point, step in enumerate(series.first.tolist()):
        weights = schedule.weights_at(step)
        assert np.allclose(targets[point], [float(weights["web"]), float(weights["code"])])
    # Each count is within one sample of its target at every prefix.
    assert (np.abs(series.reached - np.cumsum(targets * 8, axis=0)) < 1).all()
    assert np.allclose(series.sample_shares.sum(axis=1), 1)


def test_epochs_of_a_source_are_counted_in_passes_over_its_samples(tmp_path: Path) -> None:
    with scheduled(tmp_path, packing="best_fit", stopping_strategy="all_exhausted") as loader:
        figures = plan_figures(loader, 2)
        for which, source in enumerate(loader.plan.sources):
            counts = [source.order.count(epoch) for epoch in range(9)]
            for reached, passes in zip(figures.series.reached[:, which].tolist(), figures.epochs[which]):
                whole = int(passes)
                assert np.isclose(sum(counts[:whole]) + (passes - whole) * counts[whole], reached)
    assert [source.passes for source in figures.summary.sources] == [
        figures.epochs[0][-1],
        figures.epochs[1][-1],
    ]


def test_skipped_steps_and_banned_rows_are_drawn_but_not_delivered(tmp_path: Path) -> None:
    with scheduled(tmp_path) as loader:
        before = plan_figures(loader)
        loader.edit(loader.plan.skip(3, 6).ban({"web": range(100)}, step=8))
        after = plan_figures(loader)
    assert (after.series.drawn == before.series.drawn).all()
    assert after.series.steps.tolist()[:8] == [1, 1, 1, 0, 0, 0, 1, 1]
    assert np.isnan(after.series.padding[3:6]).all()
    assert after.summary.lost_tokens["banned rows"] == (
        before.series.tokens.sum() - after.series.tokens.sum() - after.summary.lost_tokens["skipped steps"]
    )


def test_drawn_bins_are_the_documents_of_the_samples(tmp_path: Path) -> None:
    with scheduled(tmp_path, packing="best_fit") as loader:
        figures = plan_figures(loader, points=4)
        assert [example.number for example in figures.examples] == figures.series.first.tolist()
        for example in figures.examples:
            step = loader.plan.step(example.number)
            assert example.size == len(step)
            assert example.width == 48
            lengths = [[length for _, _, length in parts] for parts in step.samples]
            assert [[length for _, length in span.documents] for span in example.samples] == lengths
            drawn = [source for span in example.samples for source, _ in span.documents]
            assert drawn == step.sources.tolist()


def test_costs_of_ranks_are_those_of_the_documents_they_get(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", lengths_of(200, 5, longest=200))

    def make(rank: int, sharding: Any = None) -> DataLoader:
        more = {} if sharding is None else {"sharding": sharding}
        return PretrainDataLoader(
            store, chunk_size=256, packing=None, batch_size=4, rank=rank, world_size=3, backend="numpy", **more
        )

    with make(0) as loader:
        figures = plan_figures(loader)
    worst = figures.costs.worst
    assert worst is not None
    costs: dict[int, list[float]] = {}
    for rank in range(3):
        with make(rank) as loader:
            for number, batch in enumerate(loader):
                lengths = batch.attention_mask.sum(axis=1)
                costs.setdefault(number, []).append(float(attention_cost(lengths).sum()))
    assert np.allclose(worst.contiguous, costs[worst.step])
    excess = {step: max(each) / (sum(each) / 3) for step, each in costs.items()}
    assert np.isclose(excess[worst.step], max(excess.values()))
    assert figures.summary.imbalance is not None
    slowest, means = sum(max(each) for each in costs.values()), sum(sum(each) / 3 for each in costs.values())
    assert np.isclose(figures.summary.imbalance.contiguous, slowest / means)
    assert figures.summary.imbalance.balanced < figures.summary.imbalance.contiguous


@pytest.mark.parametrize("drop_last", [False, True])
def test_distant_steps_of_a_long_plan_are_those_that_counting_finds(tmp_path: Path, drop_last: bool) -> None:
    store = write_store(tmp_path / "s", lengths_of(500, 3))
    with PretrainDataLoader(
        store, chunk_size=16, packing="concat", batch_size=7, drop_last=drop_last, backend="numpy"
    ) as loader:
        exact, bounded = plan_figures(loader, 3, points=4096), plan_figures(loader, 3, most_documents=1, points=20)
    compare(exact, bounded)


@pytest.mark.parametrize("stopping", ["first_exhausted", "all_exhausted", "never"])
@pytest.mark.parametrize("changes", [False, True])
def test_distant_steps_of_a_long_mixture_are_those_that_counting_finds(
    tmp_path: Path, stopping: str, changes: bool
) -> None:
    more: dict[str, Any] = {} if changes else {"weights": {"web": 0.75, "code": 0.25}}
    sources = {name: write_store(tmp_path / name, lengths_of(n, n)) for name, n in (("web", 9000), ("code", 5000))}
    points = [(0, {"web": 0.9, "code": 0.1}), (20, {"web": 0.2, "code": 0.8})]
    options = {"weights": Schedule.of(points, "linear"), "chunk_size": 4, "batch_size": 64} | more
    with MixedDataLoader(sources, stopping_strategy=stopping, backend="numpy", **options) as loader:
        exact = plan_figures(loader, 2, points=1 << 14)
        bounded = plan_figures(loader, 2, most_documents=1, points=30)
    assert exact.coverage.endless == (stopping == "never")
    compare(exact, bounded)


def compare(exact: PlanFigures, bounded: PlanFigures) -> None:
    """The bounded figures stopped early, and every distant step is one of the exact series."""
    assert exact.coverage.whole
    if bounded.coverage.whole:  # small enough for one chunk
        assert bounded.summary == exact.summary
        return
    assert bounded.coverage.total == exact.coverage.counted
    assert bounded.coverage.counted < exact.coverage.counted
    assert bounded.coverage.distant == len(bounded.series)
    assert (exact.series.stop - exact.series.first == 1).all()
    steps = bounded.series.first
    assert steps[0] == 0
    assert steps[-1] == exact.coverage.counted - 1
    for name in ("steps", "tokens", "slots", "packed", "room", "reached"):
        assert (getattr(bounded.series, name) == getattr(exact.series, name)[steps]).all(), name
    assert "single steps at even distances" in str(bounded.coverage)


def test_a_long_packed_plan_is_counted_from_its_beginning_and_its_steps_are_estimated(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", lengths_of(500, 3))
    with PretrainDataLoader(store, chunk_size=64, packing="best_fit", batch_size=4, backend="numpy") as loader:
        exact, bounded = plan_figures(loader, 3), plan_figures(loader, 3, most_documents=1)
    assert bounded.coverage.total is None
    assert bounded.coverage.estimate == pytest.approx(exact.coverage.counted, abs=3)
    assert bounded.coverage.counted < exact.coverage.counted
    assert not bounded.coverage.distant
    steps = bounded.coverage.counted
    assert bounded.series.tokens.sum() == exact.series.tokens[:steps].sum()
    assert f"about {bounded.coverage.estimate:,} steps" in str(bounded.coverage)
