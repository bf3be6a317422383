"""Batches from streams: `streaming=True` behind the interface of every loader."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.loaders.inputs import Paths, check_plain, check_stores, pad_id_of, stores_at
from penstock.loaders.source import Sampling, batch_layout
from penstock.loaders.streamed.reader import StreamOptions, StreamPosition, StreamReader, StreamStep
from penstock.store import Store

if TYPE_CHECKING:
    from penstock.corpus.recipe import Recipe

__all__ = ["StreamEngine"]

_ONE_BY_ONE = (
    "batches of a stream come one after the other; prepare the data (streaming=False) to get them by number, or from "
    "worker processes of torch"
)


class StreamEngine:
    """The batches of one rank of a stream, from any position on.

    Cursors of a rank are those of the streams it reads. On several ranks, `gather_states(loader.state_dict())` makes a
    state of all of them; from one that lacks some, those streams are read again from the beginning of the epoch.
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
        if isinstance(paths, Store):
            paths = paths.path
        if options.sharding is not None:
            raise ConfigError("streams belong to ranks by their number, so a stream takes no sharding=")
        if options.drop_last:
            raise ConfigError("drop_last=True needs to know where an epoch ends before it does, and a stream does not")
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
            form,
            global_batch=self.batch_size * self.rank.world_size,
            rank=self.rank,
            seed=options.seed,
            shuffle=options.shuffle,
            packing=sampling.strategy,
            length=sampling.length,
            truncation=sampling.truncation,
            max_tokens=options.max_tokens,
            options=streaming if isinstance(streaming, StreamOptions) else None,
            budget=options.budget,
        )

    @property
    def names(self) -> str:
        return ", ".join(str(path) for path in self.reader.paths)

    def start(self) -> StreamPosition:
        return self.reader.start()

    def seek(self, step: int) -> StreamPosition:
        raise ConfigError(
            f"a stream cannot go to step {step} but by reading up to it; load a state, or prepare the data"
        )

    def seek_epoch(self, epoch: int, position: StreamPosition) -> StreamPosition:
        """Steps are counted on, since nobody knows how many an epoch has."""
        return self.reader.start(epoch, position.step)

    def one(self, position: StreamPosition, batch_size: int | None) -> tuple[TrainingBatch, StreamPosition]:
        if batch_size is not None and batch_size != self.batch_size:
            raise ConfigError(
                f"streams are dealt out for batches of {self.batch_size}, so there are none of {batch_size}; pass "
                f"batch_size={batch_size} when making the loader"
            )
        step = self.reader.next(position)
        if step is None:
            step = self.reader.next(self.reader.next_epoch(position))
        if step is None:
            raise EOFError("there is nothing in the stream")
        return self._batch(step), step.position

    def item(self, epoch: int, number: int) -> TrainingBatch:
        raise TypeError(_ONE_BY_ONE)

    def position_of(self, epoch: int, number: int) -> StreamPosition:
        raise TypeError(_ONE_BY_ONE)

    def number_of(self, position: StreamPosition) -> int:
        raise TypeError(_ONE_BY_ONE)

    def count(self, epoch: int) -> int:
        return self.reader.steps_in(epoch)

    def batches(self, position: StreamPosition) -> Generator[tuple[TrainingBatch, StreamPosition], None, None]:
        """The batches of the rest of an epoch. One is held back until it is known whether it is the last."""
        step = self.reader.next(position)
        if step is None:
            position = self.reader.next_epoch(position)
            step = self.reader.next(position)
        while step is not None:
            following = self.reader.next(step.position)
            behind = step.position if following is not None else self.reader.next_epoch(step.position)
            yield self._batch(step), behind
            step = following

    def to_state(self, position: StreamPosition) -> dict[str, Any]:
        return self.reader.to_state(position)

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> StreamPosition:
        if new_batch_size:
            raise ConfigError("streams are dealt out for one size of batches, so a stream cannot go on with another")
        return self.reader.from_state(state)

    def close(self) -> None:
        self.reader.close()

    def _batch(self, step: StreamStep) -> TrainingBatch:
        options = self.options
        form = self.reader.form
        batch = TrainingBatch.of_collated(
            step.arrays,
            step.metadata,
            get_backend(options.backend),
            step.tokens,
            packed=form.packed or form.padding_free,
        )
        return batch.pin_memory() if options.pin_memory else batch
