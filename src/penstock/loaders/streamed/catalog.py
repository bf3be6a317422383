"""Blocks of the input and their assignment to streams, computed from file sizes alone."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock.corpus.recipe import OpenedRecipe, Recipe
from penstock.distributed.sharding import CanonicalStreams, canonical_streams
from penstock.errors import ChangedFileError, ConfigError
from penstock.files.checksums import FileStamps
from penstock.files.listing import names_of
from penstock.files.ranges.remote_file import RemoteFile
from penstock.order.permutation import Permutation, derive_key
from penstock.sources import MemorySource, StoreSource, TokenFileSource, open_source
from penstock.sources.file_source import FileSource
from penstock.sources.inputs import Input, shown_input
from penstock.sources.lakes.base import LakeSource
from penstock.sources.record_source import RecordSource
from penstock.sources.splits import InputSplit, has_files, input_files, split_input
from penstock.store.foreign.saved_dataset import token_column
from penstock.transforms.token_columns import MASK, TOKENS, SelectTokens, has_mask

Ints = npt.NDArray[np.int64]
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 1 << 19
_BLOCKS_PER_STREAM, _LEAST_BLOCKS_PER_STREAM = 32, 4
_MOST_BLOCKS = 1 << 17
_MOST_ETAGS = 256
"""More files than these have one hash in a state: it does not tell which of them changed."""

ROW = "penstock.row"
"""Column with the number of the input row in its window, which transforms keep."""


@dataclass(frozen=True, slots=True)
class InputFacts:
    """Files of an input, and what its rows are made with, as the process that opened it first found them."""

    files: list[tuple[str, int]]
    """Name and bytes of every file."""
    stamps: FileStamps
    """Stamps of the files at the time they were listed."""
    described: list[str | None]

    def open(self, recipe: Recipe | None, paths: Input) -> OpenedInput:
        """Open the input once more, if it is still the same."""
        self.stamps.check_all()
        opened = open_input_rows(recipe, paths)
        for file in getattr(opened.source, "files", ()):
            self.stamps.check(file)
        names, known = ({name: None for name, _ in files} for files in (input_files(opened.source), self.files))
        for name in [*names, *known]:
            if name not in known or name not in names:
                happened = "added" if name in names else "removed"
                raise ChangedFileError(f"it was {happened} after the stream was opened", file=name)
        if opened.described != self.described:
            kind, name = self._differing(opened, recipe, paths)
            reason = f"a worker process that was started later found another {kind} there than the stream began with"
            raise ChangedFileError(reason, file=name)
        return opened

    def _differing(self, opened: OpenedInput, recipe: Recipe | None, paths: Input) -> tuple[str, str]:
        """First thing that makes the rows and is another now: kind and name."""
        if recipe is None or isinstance(opened.source, StoreSource):
            return "store", shown_input(paths)
        if opened.described[1] != self.described[1] and recipe.template is not None:
            return "chat template", str(recipe.template)
        if opened.described[0] == self.described[0]:
            return "transform", next(str(mine) for mine, its in zip(self.described, opened.described) if mine != its)
        given = recipe.tokenizer
        return "tokenizer", str(given) if isinstance(given, (str, Path)) else recipe.load_tokenizer().name


@dataclass(frozen=True)
class Catalog:
    """Blocks of an input, and the streams that share them.

    A block is 512 KiB, so that a window has rows of several places. It is smaller if a stream would have fewer than 32,
    larger if there would be more than 131,072, and a whole file or row group where the format cannot be split. There
    are fewer streams if each would have fewer than four blocks, because some would end long before the others.
    """

    source: Any
    global_batch: int
    wanted: int
    """Number of streams to aim at."""
    facts: InputFacts | None = None
    """Files as another process found them, which decide; None: as they are now."""

    @cached_property
    def files(self) -> list[tuple[str, int]]:
        """Name and bytes of every file."""
        if self.facts is not None:
            return self.facts.files
        found = input_files(self.source)
        if isinstance(self.source, StoreSource):
            names: Any = [name for name, _ in found]
        else:
            names = self.source.files if has_files(self.source) else ()
        for name in names:
            if isinstance(name, RemoteFile) or Path(name).exists():  # or it is reported when it is opened
                self.stamps.note(name)
        return found

    @cached_property
    def stamps(self) -> FileStamps:
        """Stamps of the files at the time they were split."""
        return FileStamps() if self.facts is None else self.facts.stamps

    @cached_property
    def blocks(self) -> list[InputSplit]:
        total = sum(size for _, size in self.files)
        target = total // (_BLOCKS_PER_STREAM * self.wanted)
        found = split_input(self.source, max(_LEAST_BYTES, min(target, _MOST_BYTES), total // _MOST_BLOCKS))
        if self.facts is not None:
            self.stamps.check_all()  # the files that were split are those of the other process
        return found

    @cached_property
    def sharding(self) -> CanonicalStreams:
        sizes = [block.nbytes for block in self.blocks]
        wanted = sum(sizes) // (_LEAST_BLOCKS_PER_STREAM * max(sizes)) if sizes else 1
        streams = canonical_streams(self.global_batch, max(1, min(wanted, self.wanted)))
        if streams > len(self.blocks):  # one would have no block, and its slots no sample in any batch
            streams = 1
        return CanonicalStreams(streams)

    @property
    def streams(self) -> int:
        return self.sharding.streams

    @cached_property
    def by_bytes(self) -> bool:
        """True if rows are located by byte, because their number in the file is unknown."""
        return isinstance(self.source, RecordSource)

    def located(self, block: int, place: int) -> tuple[str, int | None, int | None]:
        """File, row and byte of a place in a block, as far as they are known; rows of a store count over all shards."""
        (name,), _, found = self.origins(np.array([block]), np.array([place]))
        return (name, None, int(found[0])) if self.by_bytes else (name, int(found[0]), None)

    def origins(self, blocks: Ints, places: Ints) -> tuple[list[str], Ints, Ints]:
        """Files, and for each place the index of its file and its row or byte."""
        files = self._file_of[blocks]
        if self._store is not None:
            return [str(self._store.path)], np.zeros_like(files), places + self._shard_starts[files]
        distinct, source = np.unique(files, return_inverse=True)
        return [self.files[file][0] for file in distinct.tolist()], source, places

    @property
    def many_files(self) -> bool:
        """True if `origins` has more than one name; the shards of a store have one."""
        return self._store is None and len(self.files) > 1

    @cached_property
    def _store(self) -> StoreSource | None:
        return self.source if isinstance(self.source, StoreSource) else None

    @cached_property
    def _file_of(self) -> Ints:
        return np.array([block.file for block in self.blocks], np.int64)

    @cached_property
    def _shard_starts(self) -> Ints:
        return np.cumsum([0, *(shard.rows for shard in self.source.manifest.shards)])

    def assign(self, seed: int, epoch: int, *, shuffle: bool) -> list[Ints]:
        """Blocks of each stream, in order.

        A block goes to the slots with the fewest bytes so far, and there to the stream with the fewest.
        """
        order = np.arange(len(self.blocks))
        if shuffle:
            order = Permutation(len(order), derive_key(seed, "blocks", epoch))(order)
        assigned: list[list[int]] = [[] for _ in range(self.streams)]
        each = max(1, self.streams // self.global_batch)
        lanes = [
            (0, lane, [(0, stream) for stream in range(lane, lane + each)]) for lane in range(0, len(assigned), each)
        ]
        for block in order.tolist():
            nbytes = self.blocks[block].nbytes
            total, lane, streams = lanes[0]
            mine, stream = streams[0]
            assigned[stream].append(block)
            heapq.heapreplace(streams, (mine + nbytes, stream))
            heapq.heapreplace(lanes, (total + nbytes, lane, streams))
        return [np.array(blocks, np.int64) for blocks in assigned]

    def identity(self) -> list[Any]:
        """Names and sizes that the order of the input depends on; not the content, and the directory only if it holds a
        column."""
        if not has_files(self.source):
            sampled = getattr(self.source, "sampled_identity", None)
            return [type(self.source).__name__, *(sampled() if sampled is not None else ())]
        names = names_of(getattr(self.source, "files", [Path(name) for name, _ in self.files]))
        own = self.source.identity() if isinstance(self.source, LakeSource) else []
        return [*([name, size] for name, (_, size) in zip(names, self.files)), *own]

    def etags(self) -> dict[str, str]:
        """Short hashes of the ETags of remote files, by name, for states; empty for local files."""
        files = [file for file in getattr(self.source, "files", ()) if isinstance(file, RemoteFile)]
        known = [(name, file.etag) for name, file in zip(names_of(files), files) if file.etag is not None]
        found = {name: xxhash.xxh3_64_hexdigest(etag.encode())[:8] for name, etag in known}
        if len(found) <= _MOST_ETAGS:
            return found
        return {"": xxhash.xxh3_64_hexdigest(orjson.dumps(found))}

    def check_unchanged(self, block: int) -> None:
        """Raise an error if a file has changed since it was split."""
        if not has_files(self.source):
            return
        number = self.blocks[block].file
        name, size = self.files[number]
        files = getattr(self.source, "files", None)
        if files is not None and isinstance(files[number], RemoteFile):
            self.stamps.check(files[number])
            return
        now = Path(name).stat().st_size
        if now != size:
            raise ConfigError(
                f"{name} has {now} bytes and had {size} when it was split; files must not change meanwhile: "
                "add new files under other names, and open the stream again"
            )
        self.stamps.check(name)


@dataclass(frozen=True, slots=True)
class OpenedInput:
    """Source of the input, and the transforms that make tokens of its rows."""

    source: Any
    transforms: list[Any]
    described: list[str | None]
    tokens: str
    mask: str | None


def open_input_rows(recipe: Recipe | None, paths: Input) -> OpenedInput:
    """Open files, a token store or other data, and read no more than their columns."""
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
        if isinstance(source, FileSource | MemorySource | TokenFileSource) and token_column(source.schema) is not None:
            select, mask = SelectTokens(), MASK if has_mask(source.schema) else None
            return OpenedInput(source, [select], [repr(select), None], TOKENS, mask)
        raise ConfigError(f"{shown_input(paths)} holds raw rows, which need a tokenizer; pass tokenizer=")
    source, steps = opened.for_streams(ROW)
    described = [steps.tokenizer.fingerprint, steps.template, *steps.described]
    return OpenedInput(source, steps.transforms, described, steps.tokens, steps.mask)
