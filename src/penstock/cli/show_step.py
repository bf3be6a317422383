"""The batches of one step, token by token: what `penstock show CONFIG --step N` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.cli.loading import open_rank
from penstock.cli.tokens import Pieces, pieces_of, tokenizer_of
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.configuration import LoaderConfig
from penstock.loaders.inputs import Inputs
from penstock.transforms.tokenization import Tokenizer

__all__ = ["Document", "documents_of_step"]


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of a row of a batch: the tokens of one document, or padding."""

    rank: int
    sample: int
    """Which row of the batch."""
    source: str | None
    """None for padding."""
    row: int | None
    tokens: Any
    labels: Any
    tokenizer: Tokenizer
    side: str = ""
    """Of a preference pair: chosen or rejected."""

    @property
    def supervised(self) -> Any:
        return self.labels != -100

    def pieces(self) -> Pieces:
        if self.source is None:
            return [("padding", "")] * len(self.tokens)
        return list(pieces_of(self.tokenizer, self.tokens, self.supervised))

    def __str__(self) -> str:
        where = f"rank {self.rank}, row {self.sample}"
        if self.source is None:
            return f"{where}: padding"
        return f"{where}: {self.source} row {self.row}" + (f", {self.side}" if self.side else "")


def documents_of_step(
    config: LoaderConfig, step: int, *, rank: int | None = None, tokenizer: str | None = None
) -> Iterator[Document]:
    """Every document of a step, rank by rank, in the order in which they lie in the batches."""
    world = int(config.arguments.get("world_size") or 1)
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: the file is made for {world} ranks, from 0 to {world - 1}")
    for each in range(world) if rank is None else [rank]:
        # Everything that says where documents are; NumPy, since nothing is computed.
        with open_rank(config, each, backend="numpy", fields=None, prefetch=0, device=None, pin_memory=False) as loader:
            yield from _documents(loader, step, each, tokenizer)


def _documents(loader: DataLoader, number: int, rank: int, tokenizer: str | None) -> Iterator[Document]:
    if loader.plan.skipped(number):
        raise ConfigError(f"step {number} is skipped by an edit, so there is no batch of it")
    try:
        loader.seek(number)
        batch = loader.get_batch()
    except (IndexError, StopIteration) as error:
        raise ConfigError(str(error)) from error
    tokenizers = [_tokenizer(stock.inputs, tokenizer) for stock in loader.stocks]
    names = batch.metadata["sources"]
    assert batch.labels is not None
    parts, filled = _parts(loader, batch)
    for row, low, high, real in _stretches(batch):
        tokens, labels = batch.input_ids[row, low:high], batch.labels[row, low:high]
        if real and row in filled:
            source, number, side = next(parts)
            yield Document(rank, row, names[source], number, tokens, labels, tokenizers[source], side)
        else:
            yield Document(rank, row, None, None, tokens, labels, tokenizers[0])


def _parts(loader: DataLoader, batch: Any) -> tuple[Iterator[tuple[int, int, str]], set[int]]:
    """(source, row, side) of every part with tokens, in order; and the rows of the batch that are not blank."""
    sources, rows, samples = (batch.metadata[name] for name in ("source", "row", "sample"))
    lengths = np.zeros(len(rows), np.int64)
    for number, stock in enumerate(loader.stocks):
        which = sources == number
        lengths[which] = stock.inputs.table.lengths(rows[which])
    some = lengths > 0
    sides = ("chosen", "rejected") if batch.metadata.get("sides") == 2 else ("",)
    own = list(zip(sources[some].tolist(), rows[some].tolist()))
    parts = ((source, row, side) for side in sides for source, row in own)
    if loader.options.padding_free or loader.options.max_tokens is not None:
        return parts, set(range(batch.batch_size)) if some.any() else set()
    half = batch.batch_size // len(sides)
    return parts, {sample + half * number for number in range(len(sides)) for sample in samples[some].tolist()}


def _stretches(batch: Any) -> Iterator[tuple[int, int, int, bool]]:
    """(row, from, to, whether it is a document and not padding)."""
    marks = batch.document_ids if batch.document_ids is not None else batch.attention_mask
    for row in range(batch.batch_size):
        cuts = [0, *(np.flatnonzero(np.diff(marks[row])) + 1).tolist(), marks.shape[1]]
        for low, high in pairwise(cuts):
            yield row, low, high, bool(marks[row, low])


def _tokenizer(inputs: Inputs, given: str | None) -> Tokenizer:
    """The tokenizer given, that of the file, or the one that the store names, if it still is the same."""
    if given is None and inputs.tokenizer is not None:
        return inputs.tokenizer
    return tokenizer_of(inputs.table.stores[0].manifest, given)
