"""Engine of loaders with `streaming=True`."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.files.filesystems import is_object_url, name_of, shown
from penstock.loaders.source import Paths, Sampling, batch_layout, check_plain, check_stores, pad_id_of, stores_at
from penstock.loaders.streamed.reader import StreamOptions, StreamPosition, StreamReader, StreamStep
from penstock.metrics.readings import Readings
from penstock.sources.inputs import as_input
from penstock.store import Store
from penstock.store.foreign.base import ForeignStore
from penstock.store.home import BucketHome
from penstock.store.manifest import bucket_stores

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe

_ONE_BY_ONE = (
    "a stream has no random access; prepare the data (streaming=False) to get batches by number, or to use worker "
    "processes of torch"
)


def _with_policy(streaming: StreamOptions, options: Options) -> StreamOptions:
    """Options of the stream with the policy for bad rows that the loader was given."""
    if options.on_error == "raise":
        return streaming
    if streaming.on_error not in ("raise", options.on_error):
        raise ConfigError(
            f"on_error={options.on_error!r} and StreamOptions(on_error={streaming.on_error!r}) contradict each other; "
            "pass one of them"
        )
    return replace(streaming, on_error=options.on_error, quarantine=options.quarantine or streaming.quarantine)


class StreamEngine:
    """Batches of one rank of a stream, from any position.

    A state has the cursors of the streams that this rank reads. `gather_states(loader.state_dict())` joins the states
    of all ranks; streams without a cursor are read again from the beginning of the epoch.
    """

    def __init__(
        self,
        paths: Paths,
        recipe: Recipe | None,
        sampling: Sampling,
        options: Options,
        streaming: StreamOptions | bool,
        *,
        preference: bool | None = None,
    ) -> None:
        if not isinstance(streaming, (bool, StreamOptions)):
            raise ConfigError(f"streaming must be True, False or StreamOptions(...), got {streaming!r}")
        if isinstance(paths, ForeignStore):
            raise ConfigError(f"{paths!r} is open and read in place, so there is nothing to stream; omit streaming=")
        if isinstance(paths, Store):
            paths = paths.home.url if isinstance(paths.home, BucketHome) else paths.path
        paths = as_input(paths)  # once: it may be an iterator
        for path in paths if isinstance(paths, list) else ():
            if is_object_url(path) and (name_of(path).endswith(".store") or bucket_stores(path)):
                raise ConfigError(
                    f"{shown(os.fspath(path))!r} is the URL of a store in a bucket, whose pieces are fetched as they "
                    "are needed; leave out streaming=True"
                )
        if options.sharding is not None:
            raise ConfigError("streaming=True assigns streams to ranks by number; leave out sharding=")
        if not isinstance(options.shuffle, bool):
            raise ConfigError("streaming=True shuffles within windows of its own; pass shuffle=True or False")
        if options.drop_last:
            raise ConfigError("drop_last=True needs the length of an epoch, which a stream does not know; leave it out")
        self.options, self.rank = options, options.find_rank()
        tokenizer = None if recipe is None else recipe.load_tokenizer()
        if tokenizer is not None:
            check_stores(paths, tokenizer)
        for store in stores_at(paths) if preference is None else ():
            check_plain(store.manifest, store.shown)
        form = batch_layout(sampling, options, pad_id_of(tokenizer))
        self.batch_size = 1 if form.split else options.batch_size
        self.reader = StreamReader(
            recipe,
            paths,
            sampling,
            form,
            global_batch=self.batch_size * self.rank.world_size,
            rank=self.rank,
            seed=options.seed,
            shuffle=options.shuffle,
            max_tokens=options.max_tokens,
            options=_with_policy(streaming if isinstance(streaming, StreamOptions) else StreamOptions(), options),
            budget=options.memory,
        )

    @property
    def workers(self) -> str:
        """Workers that make the batches, and the reason for them."""
        return str(self.reader.workers)

    @property
    def names(self) -> str:
        return self.reader.names

    @property
    def at_hand(self) -> int:
        """Batches that other processes have made already."""
        return self.reader.at_hand

    @property
    def elsewhere(self) -> bool:
        """True if other processes make the batches."""
        return self.reader.elsewhere

    def start(self) -> StreamPosition:
        return self.reader.start()

    def seek(self, step: int) -> StreamPosition:
        raise ConfigError(f"a stream cannot seek to step {step}; load a state, or prepare the data (streaming=False)")

    def seek_epoch(self, epoch: int, position: StreamPosition) -> StreamPosition:
        """Beginning of an epoch; steps are counted on, because their number in an epoch is unknown."""
        return self.reader.start(epoch, position.step)

    def one(self, position: StreamPosition, batch_size: int | None) -> tuple[TrainingBatch, StreamPosition]:
        if batch_size not in (None, self.batch_size) and self.reader.form.split:
            raise ConfigError(
                f"batch_size={batch_size} does not work with max_tokens={self.options.max_tokens}, which decides the "
                "number of rows; call get_batch() without a size"
            )
        step = self._read(position, batch_size) or self._read(self.reader.next_epoch(position), batch_size)
        if step is None:
            raise EOFError("the stream is empty")
        return self._batch(step), step.position

    def _read(self, position: StreamPosition, batch_size: int | None) -> StreamStep | None:
        if batch_size in (None, self.batch_size):
            return self.reader.next(position)
        return self.reader.read(position, batch_size)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        raise TypeError(_ONE_BY_ONE)

    def position_of(self, epoch: int, number: int) -> StreamPosition:
        raise TypeError(_ONE_BY_ONE)

    def number_of(self, position: StreamPosition) -> int:
        raise TypeError(_ONE_BY_ONE)

    def count(self, epoch: int) -> int:
        return self.reader.steps_in(epoch)

    def batches(self, position: StreamPosition) -> Generator[tuple[TrainingBatch, StreamPosition], None, None]:
        """Batches of the rest of an epoch. Each is held back until it is known whether it is the last."""
        step = self.reader.next(position)
        if step is None:
            position = self.reader.next_epoch(position)
            step = self.reader.next(position)
        while step is not None:
            following = self.reader.next(step.position)
            last = following is None
            yield self._batch(step), self.reader.next_epoch(step.position) if last else step.position
            step = following

    def to_state(self, position: StreamPosition) -> dict[str, Any]:
        return self.reader.to_state(position)

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> StreamPosition:
        if new_batch_size:
            raise ConfigError("streams are assigned for one batch size; a stream cannot resume with another")
        return self.reader.from_state(state)

    def interrupt(self) -> bool:
        """Make a batch that waits for rows of a live source fail; then the engine has to be closed, and works again."""
        return self.reader.interrupt()

    def many_files(self) -> bool:
        """True if batches may be of different files, which they name."""
        return self.reader.catalog.many_files

    def readings(self) -> Readings:
        """Metrics of the rows that were read: see `StreamCounts`."""
        return self.reader.counts.readings()

    def close(self) -> None:
        self.reader.close()

    def _batch(self, step: StreamStep) -> TrainingBatch:
        return TrainingBatch.of_compact(step.compact, step.metadata, get_backend(self.options.backend), step.tokens)
