"""Grain: a random-access source over a memory map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import numpy as np
import torch

from feed_peers import BATCH
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs


class _Rows:
    def __init__(self, data: Path) -> None:
        self._tokens = open_tokens(data)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: Any) -> Any:
        return self._tokens[at].astype(np.int64)


def documented(data: Path) -> Epochs:
    return _epochs(data, grain.ReadOptions())


def two_threads(data: Path) -> Epochs:
    return _epochs(data, grain.ReadOptions(num_threads=2))


def _epochs(data: Path, options: Any) -> Epochs:
    rows = _Rows(data)

    def epoch(number: int) -> Batches:
        batches = grain.MapDataset.source(rows).shuffle(seed=number).batch(BATCH)
        return _tensors(batches.to_iter_dataset(options))

    return epoch


def gather_by_hand(data: Path) -> Epochs:
    rows = _Rows(data)

    def epoch(number: int) -> Batches:
        numbers = grain.MapDataset.range(len(rows)).shuffle(seed=number).batch(BATCH)
        return _tensors(numbers.map(rows.__getitem__).to_iter_dataset(grain.ReadOptions(num_threads=2)))

    return epoch


def _tensors(batches: Any) -> Batches:
    for made in batches:
        ids = torch.from_numpy(made)
        yield ids, ids.clone()
