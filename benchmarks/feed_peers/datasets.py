"""Hugging Face datasets: an Arrow dataset on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader

from feed_peers import BATCH, SEQUENCE
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs


def write(data: Path, out: Path) -> None:
    tokens = open_tokens(data)
    kind = pa.list_(pa.uint16(), SEQUENCE)
    parts = [
        pa.FixedSizeListArray.from_arrays(pa.array(tokens[start : start + 8192].reshape(-1)), type=kind)
        for start in range(0, len(tokens), 8192)
    ]
    datasets.Dataset(pa.table({"input_ids": pa.chunked_array(parts)})).save_to_disk(str(out))


def documented(data: Path) -> Epochs:
    dataset = datasets.load_from_disk(str(data / "arrow")).with_format("torch")

    def epoch(number: int) -> Batches:
        generator = torch.Generator().manual_seed(number)
        for made in DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=generator):
            ids = made["input_ids"]
            yield ids, ids.clone()

    return epoch


def arrow_by_hand(data: Path) -> Epochs:
    dataset: Any = datasets.load_from_disk(str(data / "arrow")).with_format("arrow")

    def epoch(number: int) -> Batches:
        order = np.random.default_rng(number).permutation(len(dataset))
        for start in range(0, len(order), BATCH):
            column = dataset[order[start : start + BATCH]].column(0)
            flat = pa.concat_arrays([chunk.flatten() for chunk in column.chunks]).to_numpy()
            ids = torch.from_numpy(flat.reshape(-1, SEQUENCE).astype(np.int64))
            yield ids, ids.clone()

    return epoch
