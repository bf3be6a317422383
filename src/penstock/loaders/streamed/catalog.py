"""What there is to read, in blocks, and which stream reads which of them: arithmetic on sizes, nothing else."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.corpus.recipe import OpenedRecipe, Recipe
from penstock.distributed.sharding import CanonicalStreams, canonical_streams
from penstock.errors import ConfigError
from penstock.files.fingerprints import FileStamps
from penstock.files.listing import PathLike, names_of
from penstock.order.permutation import Permutation, derive_key
from penstock.sources import StoreSource, open_source
from penstock.sources.record_source import RecordSource
from penstock.sources.splits import InputSplit, input_files, split_input

__all__ = ["Catalog", "OpenedInput", "open_input_rows"]


Ints = npt.NDArray[np.int64]
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 19
_BLOCKS_PER_STREAM, _LEAST_BLOCKS_PER_STREAM = 32, 4
_MOST_BLOCKS = 1 << 17

ROW = "penstock.row"
"""The column that says, behind all transforms, which row of the window a row was made of."""


@dataclass(frozen=True)
class Catalog:
    """The blocks of an input, and how many streams share them.

    A block is 512 KiB, so that a window takes rows from several places; less if there would be fewer than 32 for each
    stream, more if there would be more than 131,072 in all; a whole file or row group where the format allows no other.
    Where blocks are few or large, there are fewer streams: each should have four at least, or its slots would be empty
    long before the others.
    """

    source: Any
    global_batch: int
    wanted: int
    """About how many streams there should be."""

    @cached_property
    def files(self) -> list[tuple[str, int]]:
        """(name, bytes) of every file."""
        found = input_files(self.source)
        for name, _ in found:
            if Path(name).exists():  # or it is reported when it is opened
                self.stamps.note(name)
        return found

    @cached_property
    def stamps(self) -> FileStamps:
        """What the files were like when they were cut."""
        return FileStamps()

    @cached_property
    def blocks(self) -> list[InputSplit]:
        total = sum(size for _, size in self.files)
        target = total // (_BLOCKS_PER_STREAM * self.wanted)
        return split_input(self.source, max(_LEAST_BYTES, min(target, _MOST_BYTES), total // _MOST_BLOCKS))

    @cached_property
    def sharding(self) -> CanonicalStreams:
        sizes = [block.nbytes for block in self.blocks]
        wanted = sum(sizes) // (_LEAST_BLOCKS_PER_STREAM * max(sizes)) if sizes else 1
        return CanonicalStreams(canonical_streams(self.global_batch, max(1, min(wanted, self.wanted))))

    @property
    def streams(self) -> int:
        return self.sharding.streams

    @cached_property
    def by_bytes(self) -> bool:
        """Whether a row is found by the byte that it begins with, for it is not known which row of its file it is."""
        return isinstance(self.source, RecordSource)

    def located(self, block: int, place: int) -> tuple[str, int | None, int | None]:
        """File, row and byte of what begins at a place of a block, as far as they are known.

        The rows of a store are counted over all of its shards.
        """
        (name,), _, found = self.origins(np.array([block]), np.array([place]))
        return (name, None, int(found[0])) if self.by_bytes else (name, int(found[0]), None)

    def origins(self, blocks: Ints, places: Ints) -> tuple[list[str], Ints, Ints]:
        """The same for many: the files, which of them each is from, and its row or byte."""
        files = self._file_of[blocks]
        if self._store is not None:
            return [str(self._store.path)], np.zeros_like(files), places + self._shard_starts[files]
        distinct, source = np.unique(files, return_inverse=True)
        return [self.files[file][0] for file in distinct.tolist()], source, places

    @cached_property
    def _store(self) -> StoreSource | None:
        return self.source if isinstance(self.source, StoreSource) else None

    @cached_property
    def _file_of(self) -> Ints:
        return np.array([block.file for block in self.blocks], np.int64)

    @cached_property
    def _shard_starts(self) -> Ints:
        return np.cumsum([0, *(shard.rows for shard in self.source.manifest.shards)])

    def dealt(self, seed: int, epoch: int, *, shuffle: bool) -> list[Ints]:
        """For each stream its blocks in order.

        Each goes to the slots that have the fewest bytes so far, and of their streams to the one that has the fewest.
        """
        order = np.arange(len(self.blocks))
        if shuffle:
            order = Permutation(len(order), derive_key(seed, "blocks", epoch))(order)
        hands: list[list[int]] = [[] for _ in range(self.streams)]
        each = max(1, self.streams // self.global_batch)
        lanes = [(0, lane, [(0, stream) for stream in range(lane, lane + each)]) for lane in range(0, len(hands), each)]
        for block in order.tolist():
            nbytes = self.blocks[block].nbytes
            total, lane, streams = lanes[0]
            mine, stream = streams[0]
            hands[stream].append(block)
            heapq.heapreplace(streams, (mine + nbytes, stream))
            heapq.heapreplace(lanes, (total + nbytes, lane, streams))
        return [np.array(hand, np.int64) for hand in hands]

    def identity(self) -> list[Any]:
        """What the order of the input depends on: names and sizes, not what is in the files, nor the directory, unless
        it stands for a column."""
        names = names_of(getattr(self.source, "files", [Path(name) for name, _ in self.files]))
        return [[name, size] for name, (_, size) in zip(names, self.files)]

    def check_unchanged(self, block: int) -> None:
        """Raise if a file is not what it was when it was cut: one of another size is read at the wrong places."""
        name, size = self.files[self.blocks[block].file]
        now = Path(name).stat().st_size
        if now != size:
            raise ConfigError(
                f"{name} has {now} bytes and had {size} when it was cut into blocks; files must not change while they "
                "are streamed: add new ones under other names, and open the stream anew"
            )
        self.stamps.check(name)


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """The input, and how its rows become tokens."""

    source: Any
    transforms: list[Any]
    described: list[str | None]
    tokens: str
    mask: str | None


def open_input_rows(recipe: Recipe | None, paths: list[PathLike]) -> OpenedInput:
    """Files or a token store, looked at just far enough to know their columns."""
    # Without `keep`: a stream adds a column of row numbers of its own.
    opened = (
        None if recipe is None else OpenedRecipe.of(replace(recipe, keep=(), tokenizer=recipe.load_tokenizer()), paths)
    )
    source = open_source(paths) if opened is None else opened.source
    if isinstance(source, StoreSource):
        manifest = source.manifest
        if manifest.tokens_column is None:
            raise ConfigError(f"{source.path} holds no tokens; prepare it with a tokenizer")
        return OpenedInput(source, [], ["store", manifest.checksum], manifest.tokens_column, manifest.mask_column)
    if opened is None:
        raise ConfigError(f"{paths} are raw files, so it must be said how they become tokens; pass a tokenizer")
    source, steps = opened.for_streams(ROW)
    described = [steps.tokenizer.fingerprint, steps.template, *steps.described]
    return OpenedInput(source, steps.transforms, described, steps.tokens, steps.mask)
