"""torchdata: StatefulDataLoader over a map-style dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from feed_peers import BATCH
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, data: Path) -> None:
        self.tokens = open_tokens(data)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens[at].astype(np.int64))


class _Gathered(_Rows):
    def __getitems__(self, at: list[int]) -> torch.Tensor:
        return torch.from_numpy(self.tokens[at].astype(np.int64))


def documented(data: Path) -> Epochs:
    return _epochs(_Rows(data))


def gather_by_hand(data: Path) -> Epochs:
    return _epochs(_Gathered(data), collate_fn=_same)


def _same(batch: Any) -> Any:
    return batch


def _epochs(dataset: _Rows, **options: Any) -> Epochs:
    def epoch(number: int) -> Batches:
        generator = torch.Generator().manual_seed(number)
        for ids in StatefulDataLoader(dataset, batch_size=BATCH, shuffle=True, generator=generator, **options):
            yield ids, ids.clone()

    return epoch
