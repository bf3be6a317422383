"""Minimal work as a reference: rows of a memory map, widened, and a copy for the labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from feed_peers import BATCH
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs


def gather(data: Path) -> Epochs:
    tokens = open_tokens(data)

    def epoch(number: int) -> Batches:
        order = np.random.default_rng(number).permutation(len(tokens))
        for start in range(0, len(order), BATCH):
            ids = tokens[order[start : start + BATCH]].astype(np.int64)
            yield torch.from_numpy(ids), torch.from_numpy(ids.copy())

    return epoch
