"""Where the time of a loop goes: counted between its batches, with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import MemoryBudget, PretrainDataLoader
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.mlx_loader import MLXDataLoader
from penstock.loaders.profile import Profile, Stages, advice
from token_stores import make_rows, make_store


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Batch:
    def __init__(self, shape: tuple[int, int], tokens: int) -> None:
        self.input_ids = np.zeros(shape)
        self.num_tokens = tokens
        self.metadata = {"sample": np.arange(shape[0])}


SAMPLES = [{"input_ids": [1] * (n % 7 + 1), "labels": n % 2} for n in range(30)]


class Asked:
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return SAMPLES[row]


def test_waiting_and_training_are_told_apart() -> None:
    clock = Clock()
    profile = Profile(clock)
    for waited, trained in ((1.0, 3.0), (2.0, 2.0)):
        profile.wait()
        clock.now += waited
        profile.deliver(Batch((4, 10), 30))  # type: ignore[arg-type]
        clock.now += trained
    profile.wait()
    profile.stop()
    clock.now += 50  # after the loop
    results = profile.results()
    assert results["stages"] == {"wait": 3 / 8, "train": 5 / 8}
    assert results["throughput_samples_per_sec"] == 1.0
    assert results["avg_batch_time_ms"] == 4000.0
    assert (results["batches"], results["samples"], results["tokens"], results["seconds"]) == (2, 8, 60, 8.0)
    assert results["tokens_per_sec"] == 7.5
    assert results["padding_share"] == 0.25
    assert "38%" in results["advice"]


def test_what_is_done_with_a_batch_counts_while_it_is_done() -> None:
    clock = Clock()
    profile = Profile(clock)
    profile.wait()
    clock.now += 1
    profile.deliver(Batch((2, 2), 4))  # type: ignore[arg-type]
    clock.now += 3
    assert profile.results()["stages"] == {"wait": 0.25, "train": 0.75}


def test_making_is_timed_wherever_it_is_done() -> None:
    clock = Clock()
    profile = Profile(clock)

    def made() -> Generator[int, None, None]:
        for number in range(3):
            clock.now += 2
            yield number

    assert list(profile.timed(made())) == [0, 1, 2]
    assert profile.stages.seconds() == {"make": 6.0}


def test_closing_what_is_timed_closes_what_makes_it() -> None:
    closed = []

    def made() -> Generator[int, None, None]:
        try:
            yield from range(9)
        finally:
            closed.append(True)

    making = Profile().timed(made())
    assert next(making) == 0
    making.close()
    assert closed == [True]


def test_stages_add_up() -> None:
    clock = Clock()
    stages = Stages(clock)
    for _ in range(2):
        with stages.timed("fetch"):
            clock.now += 1.5
    stages.add("order", 0.5)
    assert stages.seconds() == {"fetch": 3.0, "order": 0.5}


@pytest.mark.parametrize(
    ("shares", "padding", "facts", "wanted"),
    [
        ({"wait": 0.01, "train": 0.99}, 0.1, {"buckets": False}, "fast enough"),
        ({"wait": 0.01, "train": 0.99}, 0.5, {"buckets": False}, "50% .* padding: set bucket_by_length=True"),
        ({"wait": 0.01, "train": 0.99}, 0.5, {"buckets": True}, "fast enough"),
        (
            {"wait": 0.5, "train": 0.5, "fetch": 0.4, "collate": 0.1},
            0,
            {"fetched": True, "workers": 1},
            "num_workers .now 1",
        ),
        ({"wait": 0.5, "train": 0.5, "fetch": 0.4, "collate": 0.1}, 0, {"fetched": True, "workers": 8}, "to_columns"),
        (
            {"wait": 0.5, "train": 0.5, "fetch": 0.4, "collate": 0.1},
            0,
            {"fetched": False},
            "columns once",
        ),
        ({"wait": 0.5, "train": 0.5, "collate": 0.4}, 0.6, {"buckets": False}, "60% of it is padding"),
        ({"wait": 0.5, "train": 0.5, "make": 0.4}, 0, {}, "batches: use larger batches"),
        ({"wait": 0.5, "train": 0.5}, 0, {}, "larger batches, or raise prefetch"),
        ({"wait": 0.5, "train": 0.5, "convert": 0.4}, 0, {"fetched": False}, "arrays: use larger batches.$"),
        (
            {"wait": 0.5, "train": 0.5, "fetch": 0.4},
            0,
            {"fetched": True, "workers": 1, "tuned": True},
            "samples: make __getitem__ cheaper",
        ),
    ],
)
def test_advice_is_about_what_would_help_most(
    shares: dict[str, float], padding: float, facts: Any, wanted: str
) -> None:
    import re

    said = advice(shares, padding, **facts)
    assert re.search(wanted, said), said
    assert said.endswith(".")
    assert said.count(". ") == 0


def loaders(home: Path) -> dict[str, Callable[[], DataLoader]]:
    make_store(home / "store", make_rows(30, 12))
    return {
        "asked": lambda: MLXDataLoader(Asked(), batch_size=4, num_workers=0),
        "threads": lambda: MLXDataLoader(Asked(), batch_size=4, num_workers=2),
        "columns": lambda: MLXDataLoader(SAMPLES, batch_size=4),
        "store": lambda: PretrainDataLoader(
            home / "store", chunk_size=12, packing=None, batch_size=4, backend="numpy", prefetch=0
        ),
        "ahead": lambda: PretrainDataLoader(
            home / "store", chunk_size=12, packing=None, batch_size=4, backend="numpy", prefetch=2
        ),
    }


@pytest.mark.parametrize("kind", ["asked", "threads", "columns", "store", "ahead"])
def test_every_loader_can_be_profiled_and_its_batches_stay_the_same(kind: str, tmp_path: Path) -> None:
    make = loaders(tmp_path)[kind]
    with make() as plain:
        wanted = [batch.input_ids.tolist() for _ in range(2) for batch in plain]
    with make() as loader:
        loader.enable_profiling()
        found = [batch.input_ids.tolist() for _ in range(2) for batch in loader]
        results = loader.get_profiling_results()
        assert found == wanted
        assert (results["batches"], results["samples"]) == (16, 60)
        assert results["throughput_samples_per_sec"] > 0
        assert results["avg_batch_time_ms"] > 0
        assert 0 <= results["padding_share"] < 1
        assert results["advice"]
        shares = results["stages"]
        assert shares["wait"] + shares["train"] == pytest.approx(1)
        due = {
            "asked": {"order", "fetch", "collate", "convert"},
        }
        assert set(shares) - {"wait", "train"} == due.get("asked" if kind in ("threads", "columns") else kind, {"make"})


def test_what_is_done_with_the_last_batch_counts_when_the_loop_is_left_there() -> None:
    clock = Clock()
    profile = Profile(clock)
    profile.wait()
    clock.now += 1
    profile.deliver(next(iter(MLXDataLoader(SAMPLES, batch_size=4))))
    clock.now += 3
    profile.stop()
    clock.now += 100
    results = profile.results()
    assert results["seconds"] == 4
    assert results["stages"]["train"] == 0.75


def test_results_can_be_read_when_the_loader_is_closed_and_nothing_is_read_again_for_them() -> None:
    budget = MemoryBudget("1 MiB")
    with MLXDataLoader(SAMPLES, batch_size=4, budget=budget) as loader:
        loader.enable_profiling()
        list(loader)
    assert loader.get_profiling_results()["samples"] == 30
    assert budget.used == 0


def test_batches_that_are_asked_for_count_too() -> None:
    with MLXDataLoader(SAMPLES, batch_size=4) as loader:
        loader.enable_profiling()
        for _ in range(3):
            loader.get_batch()
        assert loader.get_profiling_results()["samples"] == 12


def test_profiling_can_begin_and_end_within_a_loop() -> None:
    with MLXDataLoader(SAMPLES, batch_size=4) as loader:
        for number, _ in enumerate(loader):
            if number == 2:
                loader.enable_profiling()
        assert loader.get_profiling_results()["batches"] == 5
        loader.enable_profiling()
        for _ in loader:
            loader.disable_profiling()
        with pytest.raises(ConfigError, match="enable_profiling"):
            loader.get_profiling_results()


def test_results_of_nothing_are_refused() -> None:
    with MLXDataLoader(SAMPLES, batch_size=4) as loader:
        with pytest.raises(ConfigError, match="enable_profiling"):
            loader.get_profiling_results()
        loader.enable_profiling()
        with pytest.raises(ConfigError, match=r"(?i)profiling"):
            loader.get_profiling_results()


def test_a_blank_batch_has_no_samples() -> None:
    ranks = [MLXDataLoader(SAMPLES[:5], batch_size=2, rank=rank, world_size=4) for rank in range(4)]
    counted = []
    for loader in ranks:
        with loader:
            loader.enable_profiling()
            assert len(list(loader)) == 1
            counted.append(loader.get_profiling_results()["samples"])
    assert sum(counted) == 5
