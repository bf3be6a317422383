"""Everything that the batches of a stream depend on, in a form that other processes can open too."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from penstock._suggest import named_options
from penstock.batching.collate import BatchLayout
from penstock.corpus.recipe import Recipe
from penstock.distributed.ranks import Rank
from penstock.distributed.synchronization import Rendezvous
from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.files.ranges.read_ahead import SharedParts, window_for
from penstock.loaders.streamed.catalog import Catalog, InputFacts, OpenedInput, open_input_rows
from penstock.loaders.streamed.rows import WindowSampling
from penstock.loaders.streamed.sampled_windows import WindowFiller
from penstock.loaders.streamed.stream import StreamLane
from penstock.loaders.streamed.windows import BlockSequence, WindowBuilder, WindowLimits
from penstock.memory.budget import parse_bytes
from penstock.pipeline.stages import Fitting, Live
from penstock.sources.record_source import RecordSource


@named_options
@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of `streaming=True`. Only `streams` and the window sizes change the batches."""

    streams: int = 64
    """Number of streams, approximately; at most this many ranks can share the reading."""
    shuffle_window: int = 4096
    """Rows that a stream shuffles and packs at a time."""
    window_bytes: int | str = "2 MiB"
    """Most bytes of input in a window, if rows are large."""
    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A bad row stops the run, is skipped and counted, or is skipped and written to the `quarantine` file."""
    quarantine: PathLike | None = None
    steps_per_epoch: int | None = None
    """Most steps of an epoch. Several ranks without a rendezvous take exactly this many, and fill up with padding."""
    rendezvous: Rendezvous | PathLike | None = None
    """Place where ranks agree on the end of an epoch; by default the store of torch.distributed. A path is a directory
    that all ranks see, new for each start of the job."""
    timeout_seconds: float = 300.0
    """Longest wait of a rank without data for the others."""
    workers: int | Literal["auto", "thread", "process"] = "auto"
    """Number of workers that read, tokenize and pack windows. "thread" and "process" are short for `worker_type`."""
    worker_type: Literal["auto", "thread", "process"] = "auto"
    """Threads of this process, or processes beside it, which leave the interpreter to the trainer. "auto" begins with
    threads, and goes on with processes where there are cores for them; see `loader.workers`."""

    def __post_init__(self) -> None:
        self.window()
        if self.workers in ("thread", "process"):
            if self.worker_type not in ("auto", self.workers):
                raise ConfigError(
                    f"workers={self.workers!r} and worker_type={self.worker_type!r} contradict each other; pass one"
                )
            object.__setattr__(self, "worker_type", self.workers)
            object.__setattr__(self, "workers", "auto")
        if self.workers != "auto" and (
            isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1
        ):
            raise ConfigError(f"workers must be a positive number, 'auto', 'thread' or 'process', got {self.workers!r}")
        if self.worker_type not in ("auto", "thread", "process"):
            raise ConfigError(f"worker_type must be 'auto', 'thread' or 'process', got {self.worker_type!r}")
        if self.streams < 1:
            raise ConfigError(f"streams must be positive, got {self.streams}")
        if self.on_error not in ("raise", "skip", "quarantine"):
            raise ConfigError(f"on_error must be 'raise', 'skip' or 'quarantine', got {self.on_error!r}")
        if (self.on_error == "quarantine") != (self.quarantine is not None):
            raise ConfigError("on_error='quarantine' and a quarantine file go together; pass both or neither")
        if self.steps_per_epoch is not None and self.steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch must be positive, got {self.steps_per_epoch}")

    def window(self) -> WindowLimits:
        """Size of a window."""
        return WindowLimits(self.shuffle_window, parse_bytes(self.window_bytes))


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamSpec:
    """Description of the streams of one rank. What is opened by it is opened once in each process."""

    recipe: Recipe | None
    paths: Any
    """A list of paths, or a source."""
    sampling: WindowSampling
    form: BatchLayout
    global_batch: int
    rank: Rank
    seed: int
    shuffle: bool
    options: StreamOptions
    memory: int = field(default=1 << 30)
    """Bytes that caches of transforms may take a part of."""
    sent: InputFacts | None = None
    """Input of the training process, in a process beside it: both read the same, or there is an error."""

    def __getstate__(self) -> dict[str, Any]:
        """The description, and the input as it is known here; the ranks meet in the training process."""
        kept = {name: vars(self)[name] for name in self.__dataclass_fields__}
        facts = self.sent or InputFacts(self.catalog.files, self.catalog.stamps, self.input.described)
        return kept | {"options": replace(self.options, rendezvous=None), "sent": facts}

    @cached_property
    def input(self) -> OpenedInput:
        if self.sent is not None:
            return self.sent.open(self.recipe, self.paths)
        return open_input_rows(self.recipe, self.paths)

    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(self.input.source, self.global_batch, self.options.streams, self.sent)

    @cached_property
    def lanes(self) -> list[StreamLane]:
        """Streams that this rank reads, with the slots that they fill."""
        return _lanes(self.catalog.streams, self.global_batch, self.slots)

    @cached_property
    def slots(self) -> range:
        return self.catalog.sharding.slots_of(self.rank, self.global_batch)

    @property
    def window_bytes(self) -> int:
        return self.options.window().nbytes

    @cached_property
    def filler(self) -> WindowFiller:
        ready = self.input
        for transform in ready.transforms:
            if isinstance(transform, Fitting):
                transform.fit_budget(self.memory)
        # Of remote files every stream reads ahead for itself.
        if hasattr(ready.source, "read_ahead_bytes"):
            ready.source.read_ahead_bytes = window_for(2 * self.memory // max(1, len(self.lanes)))
        # Of a small input the streams read many small splits: what lies between two requests would be read twice.
        if isinstance(ready.source, RecordSource) and sum(size for _, size in self.catalog.files) <= window_for(
            self.memory // 2
        ):
            ready.source.shared_parts = SharedParts()
        builder = WindowBuilder(
            self.catalog,
            ready.transforms,
            tokens=ready.tokens,
            mask=ready.mask,
            limits=self._limits,
            seed=self.seed,
            shuffle=self.shuffle,
            on_error=self.options.on_error,
        )
        return WindowFiller(builder, self.sampling)

    @property
    def _limits(self) -> WindowLimits:
        """Size of a window. Where rows keep their order it changes no batch, so those of a live source are small."""
        limits = self.options.window()
        if self.shuffle or not self.sampling.in_order or not isinstance(self.input.source, Live):
            return limits
        return replace(limits, rows=min(limits.rows, self.global_batch))

    def sequences(self, epoch: int) -> list[BlockSequence]:
        """Blocks of every stream in an epoch."""
        assigned = self.catalog.assign(self.seed, epoch, shuffle=self.shuffle)
        return [BlockSequence(number, epoch, blocks) for number, blocks in enumerate(assigned)]


def _lanes(streams: int, global_batch: int, slots: range) -> list[StreamLane]:
    """Lanes (groups of streams that fill the same places of a global batch) of some of its places."""
    if streams >= global_batch:
        each = streams // global_batch
        return [StreamLane(range(slot, slot + 1), range(slot * each, (slot + 1) * each)) for slot in slots]
    each = global_batch // streams
    numbers = range(slots.start // each, (slots.stop - 1) // each + 1)
    return [StreamLane(range(number * each, (number + 1) * each), range(number, number + 1)) for number in numbers]
