"""Ranks of equal cost: packed rows are assigned by the documents in them, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import PretrainDataLoader
from penstock.distributed import Balanced, Strided, attention_cost
from penstock.loaders import summarize_plan
from token_stores import make_store

LENGTH = 512


def quadratic(lengths: Any) -> Any:
    return np.asarray(lengths, np.float64) ** 2


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows from 4 tokens to a whole sample: packed samples are all full, and cost from 3 to 100 %."""
    lengths = np.clip(np.random.default_rng(7).lognormal(4, 1.3, 800), 4, LENGTH).astype(int).tolist()
    rows = [[number % 1000 + 1] * length for number, length in enumerate(lengths)]
    return make_store(tmp_path_factory.mktemp("balanced") / "store", rows)


def make(store: Path, rank: int, world: int, total: int = 24, **more: Any) -> PretrainDataLoader:
    options = {"chunk_size": LENGTH, "packing": "best_fit", "backend": "numpy", "batch_size": total // world}
    return PretrainDataLoader(store, rank=rank, world_size=world, **{**options, **more})


def samples_of(batch: Any) -> list[tuple[int, ...]]:
    """Samples of a batch, by the rows of data in each."""
    numbers = batch.metadata["sample"]
    return [tuple(batch.metadata["row"][numbers == sample].tolist()) for sample in np.unique(numbers)]


def imbalance(store: Path, world: int, cost: Any, **more: Any) -> float:
    """Largest over mean cost of ranks, from the boundaries that the batches have."""
    ranks = [list(make(store, rank, world, **more)) for rank in range(world)]
    slowest = mean = 0.0
    for batches in zip(*ranks, strict=True):
        found = []
        for batch in batches:
            real = batch.document_ids.reshape(-1)[batch.cu_seqlens[:-1]] > 0
            found.append(float(cost(np.diff(batch.cu_seqlens)[real]).sum()))
        slowest, mean = slowest + max(found), mean + sum(found) / world
    return slowest / mean


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_packed_rows_are_balanced_by_their_documents(store: Path, packing: str) -> None:
    contiguous = imbalance(store, 4, quadratic, packing=packing)
    balanced = imbalance(store, 4, quadratic, packing=packing, sharding=Balanced(cost=quadratic))
    assert contiguous > 1.15
    assert balanced < 1.02


@pytest.mark.parametrize(
    "sharding", [None, Balanced(), Balanced(cost=quadratic), Strided()], ids=["default", "balanced", "cost", "strided"]
)
def test_the_plan_measures_what_the_batches_have(store: Path, sharding: Any) -> None:
    with make(store, 0, 4, sharding=sharding) as loader:
        found = summarize_plan(loader).imbalance
    cost = sharding.cost if isinstance(sharding, Balanced) else attention_cost
    assert found is not None
    assert found.contiguous == pytest.approx(imbalance(store, 4, cost))
    used = Balanced() if sharding is None else sharding
    assert found.balanced == pytest.approx(imbalance(store, 4, cost, sharding=used))
    assert found.sharding == type(used).__name__.lower()
    with make(store, 0, 1) as loader:
        assert summarize_plan(loader).imbalance is None


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(worlds=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=3), data=st.data())
def test_balancing_changes_the_ranks_of_samples_alone_on_any_world_and_after_a_resume(
    store: Path, worlds: list[int], data: st.DataObject
) -> None:
    with make(store, 0, 1) as loader:
        wanted = [sorted(samples_of(batch)) for batch in loader]
    state: Any = None
    done = 0
    for number, world in enumerate(worlds):
        ranks = [make(store, rank, world, sharding=Balanced()) for rank in range(world)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        last = number == len(worlds) - 1
        steps = len(wanted) - done if last else data.draw(st.integers(0, min(3, len(wanted) - done)))
        for _ in range(steps):
            batches = [loader.get_batch() for loader in ranks]
            assert sorted(sample for batch in batches for sample in samples_of(batch)) == wanted[done]
            done += 1
        states = [loader.state_dict() for loader in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
        for loader in ranks:
            loader.close()
    assert done == len(wanted)
