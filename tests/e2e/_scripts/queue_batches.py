"""Batches that say which they are, and a file system that takes its time, so that a kill comes between two steps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.fsqueue import DataProviderBase

PER_FILE = 4
LEASE_SECONDS = 1.0


class Numbered(DataProviderBase):
    """Batch k is full of k, and of what follows from k."""

    def build_meta(self) -> dict[str, Any]:
        shape = [self.block_size]
        return {"batch_schema": [{"name": name, "dtype": "int64", "shape": shape} for name in ("x", "drawn")]}

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        shape = (self.batch_size, self.block_size)
        return {"x": np.full(shape, self.batch_index), "drawn": rng.integers(1 << 60, size=shape)}


def make_provider(queue: str | Path, **config: Any) -> Numbered:
    facts = {"dataset": "chaos", "batch_size": 4, "block_size": 64, "batches_per_file": PER_FILE, "backlog_files": 12}
    return Numbered(
        facts | {"split_proportions": {"train": 1.0}} | config, queue_dir=Path(queue), lease_seconds=LEASE_SECONDS
    )


class Judge:
    """Knows what every batch has to be."""

    def __init__(self, queue: str | Path) -> None:
        self._provider = make_provider(queue)

    def number_of(self, batch: dict[str, npt.NDArray[Any]]) -> int:
        """k; raises if it is not batch k to the last number."""
        k = int(batch["x"][0, 0])
        wanted = self._provider.make_batch("train", k)
        if batch.keys() != wanted.keys() or not all(np.array_equal(batch[name], wanted[name]) for name in wanted):
            raise AssertionError(f"batch {k} is torn")
        return k


def slow_down(seed: int, seconds: float = 0.004) -> None:
    """Let what changes a directory pause before and after, so that a kill hits between two such steps."""
    draw = random.Random(seed)

    def slowly(work: Callable[..., Any]) -> Callable[..., Any]:
        def working(*given: Any, **options: Any) -> Any:
            time.sleep(draw.random() * seconds)
            try:
                return work(*given, **options)
            finally:
                time.sleep(draw.random() * seconds)

        return working

    for name in ("rename", "unlink", "write"):
        setattr(os, name, slowly(getattr(os, name)))


def on_terminate(stop: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: stop())
