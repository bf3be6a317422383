"""LitData: chunks of tokens, split into blocks by its TokensLoader."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

from feed_peers import BATCH, SEQUENCE
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs

_PART = 4096


def write(data: Path, out: Path) -> None:
    starts = list(range(0, len(open_tokens(data)), _PART))
    chunk = SEQUENCE * 8012  # 33 MB of uint16, the size that its documentation uses
    optimize(
        fn=partial(_part, data),
        inputs=starts,
        output_dir=str(out),
        num_workers=1,
        chunk_size=chunk,
        item_loader=TokensLoader(),
    )


def _part(data: Path, start: int) -> Iterator[torch.Tensor]:
    for row in open_tokens(data)[start : start + _PART]:
        yield torch.from_numpy(row.copy())


def documented(data: Path) -> Epochs:
    dataset = StreamingDataset(
        input_dir=str(data / "litdata"), item_loader=TokensLoader(block_size=SEQUENCE), shuffle=True, drop_last=False
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH)

    def epoch(number: int) -> Batches:
        for made in loader:
            ids = made.long()
            yield ids, ids.clone()

    return epoch
