"""Protocols of the pipeline: source, transform, sink, optional abilities, and the values between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyarrow as pa

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

State = dict[str, Any]
"""Plain, JSON-able values from which a stage resumes."""


class Source(Protocol):
    """Source of batches. Subclass it for the defaults, or implement `next_batch` alone."""

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        """At most `max_rows` rows; None at the end. An empty batch is not the end."""
        ...

    def size_hint(self) -> int | None:
        """Number of rows in all, if that is known without reading them."""
        return None

    def memory_usage(self) -> int:
        """Bytes held between calls, except for batches already delivered."""
        return 0


class Transform(Protocol):
    """One batch in, one batch out (possibly empty, possibly longer).

    Without a `state_dict` it is taken to be a pure function of the batch, and runs on several threads at once.
    """

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch after this step."""
        ...

    def memory_usage(self) -> int:
        """Bytes held between calls."""
        return 0

    def reset(self) -> None:
        """Forget what was learned from earlier batches, before another run."""
        return


@runtime_checkable
class Expanding(Protocol):
    """A transform that may make many rows of one: the engine gives it few rows at a time."""

    expands: bool


DataProcessor = Transform
"""The LLM data module's name for a transform: one class, two names."""


class Sink(Protocol):
    """Destination of batches."""

    def consume(self, batch: pa.RecordBatch) -> None:
        """Take one batch. It is not changed afterwards, so keeping a reference is allowed."""
        ...

    def flush(self) -> None:
        """The end: the rows consumed become visible, all at once."""
        ...

    def memory_usage(self) -> int:
        """Bytes held between calls."""
        return 0


@runtime_checkable
class Stateful(Protocol):
    """A stage whose future depends on its past. The engine runs it alone and in order."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State, /) -> None: ...


@runtime_checkable
class Acknowledged(Protocol):
    """A source that keeps rows until they are acknowledged, as a queue does, and yields the others again.

    `hold` is called before a run. From then on, until the source is closed, it keeps all unacknowledged rows.
    `delivered` and `commit` acknowledge the rows before a state of the source: the loop over the pipeline has passed
    them (`delivered`), or they are published or in a checkpoint (`commit`). Both are called from another thread than
    the reading one, with ever later states, and never by a run that fails.
    """

    def hold(self) -> None: ...

    def delivered(self, state: State, /) -> None: ...

    def commit(self, state: State, /) -> None: ...


@runtime_checkable
class Fitting(Protocol):
    """A stage with buffers of its own, which are made to fit the memory budget: called once, before a run."""

    def fit_budget(self, nbytes: int, /) -> None: ...


@runtime_checkable
class FitInParts(Protocol):
    """A transform that learns from rows, in parts that merge: what it has learned does not depend on how rows are cut.

    `fit` forgets what was learned before. `to_dict` returns plain values, fit for JSON, of which `from_dict`, a class
    method, makes a transform that `merge` takes, in the order of the rows.
    """

    def fit(self, data: Any, /) -> Any: ...

    def partial_fit(self, batch: pa.RecordBatch, /) -> Any: ...

    def merge(self, other: Any, /) -> Any: ...

    def to_dict(self) -> dict[str, Any]: ...

    def from_dict(self, saved: Mapping[str, Any], /) -> Any: ...


@runtime_checkable
class Finishing(Protocol):
    """A transform that still holds rows when the input ends."""

    def finish(self) -> pa.RecordBatch | None: ...


@runtime_checkable
class TwoPart(Protocol):
    """A transform that runs in order, with a part that needs no order: the engine puts it before, on all workers."""

    def preparation(self) -> Transform: ...


@runtime_checkable
class FirstOfKey(Protocol):
    """A transform that drops every row with a key that an earlier row had, so that rows can be partitioned by key."""

    reason: str
    """What dropped rows are counted as."""

    def row_keys(self, batch: pa.RecordBatch, /) -> tuple[Any, Any]:
        """Keys as an array of 64-bit words (rows, keys of a row, words of a key), and which rows have any (None: all).

        The first word of a key is spread evenly.
        """
        ...

    def without_keys(self, batch: pa.RecordBatch, /) -> pa.RecordBatch:
        """The batch as it leaves this stage, if none of its rows goes."""
        ...


@runtime_checkable
class Remembering(Protocol):
    """A transform whose state refers to what it keeps on disk: `sync` makes that as durable as a checkpoint is."""

    @property
    def resumable(self) -> bool:
        """True if it stores anything durably, so that another process can resume."""
        ...

    def sync(self) -> None: ...


@runtime_checkable
class Durable(Protocol):
    """A sink that survives kill -9: what it consumed before `checkpoint()` is never lost, what came after never kept.

    `checkpoint` makes everything consumed so far durable and returns a token; `restore(token)` in a new process goes
    back to exactly that point. `abort` drops what neither a checkpoint nor `flush` has secured. `flush` must be
    repeatable after `restore`.
    """

    def checkpoint(self) -> State: ...

    def restore(self, token: State, /) -> None: ...

    def abort(self) -> None: ...


@runtime_checkable
class Committing(Protocol):
    """A durable sink whose checkpoints commit rows where others see them: its run must be known before the first."""

    checkpoint_text: Callable[[State], str] | None
    """Text of the whole checkpoint for a token; `checkpoint` commits it together with the rows."""

    def committed_text(self, token: State, /) -> str | None:
        """The text that was committed last, if that was after the token; None otherwise."""
        ...


@runtime_checkable
class Publishing(Protocol):
    """A sink that publishes rows permanently during the run, in order; `flush` publishes the rest."""

    @property
    def rows_published(self) -> int:
        """Number of consumed rows that are published; it only grows during a run."""
        ...


@runtime_checkable
class Live(Protocol):
    """A source that may wait for rows for a long time, as for those of an iterator that others fill."""

    max_wait_seconds: float | None
    """Longest wait of a row for the others of its batch; None: until the batch is full."""

    @property
    def reading_thread(self) -> int | None:
        """Number of the thread that reads, if it is another than the one that calls `next_batch`."""
        ...

    def interrupt(self) -> None:
        """Make a `next_batch` that waits return, because the run is stopped; called from another thread."""
        ...


@runtime_checkable
class Awaiting(Protocol):
    """A source that awaits its rows: on the event loop of the caller during `async for` and `run_async`."""

    def use_loop(self, loop: AbstractEventLoop | None, /) -> None:
        """Await rows on this event loop from now on, or on one of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a batch: a file (or a name in angle brackets), its first row, its byte offset if there is one."""

    file: str
    row: int = 0
    offset: int | None = None


@runtime_checkable
class Located(Protocol):
    """A source that knows the origin of the batch it has just returned."""

    def origin(self) -> Origin | None: ...


@runtime_checkable
class Measured(Protocol):
    """A source of files that knows how many of their bytes it has read: the progress of a run."""

    def file_bytes_read(self) -> int:
        """Bytes of all files, as they are on disk, before the next row."""
        ...


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejected row, with everything needed to find it again."""

    file: str | None
    row: int | None
    offset: int | None
    stage: str
    kind: str
    """The reason in few words, the same for all rows with the same trouble: it is what gets counted."""
    reason: str
    data: Any = None
    """The row as a dict, or its raw bytes when it could not be parsed."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the raw input, cut but not yet decoded."""

    origin: Origin
    data: Any
    nbytes: int
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of a block: the good ones, and those rejected."""

    batch: pa.RecordBatch
    rejected: tuple[Rejected, ...] = ()
    rows: Sequence[int] | None = None
    """Row numbers of the batch's rows relative to the block, when they are not those from its first on."""


@runtime_checkable
class BlockSource(Protocol):
    """A source that can cut its input cheaply, and leave the decoding to the workers.

    `next_block` is called from one thread, in order. `decode` is a pure function of the block, called from any thread.
    """

    def next_block(self, max_bytes: int) -> Block | None: ...

    def decode(self, block: Block) -> Decoded: ...

    def offset_of(self, block: Block, row: int) -> int | None:
        """Byte offset in the file (after decompression) of a row counted from the block's first."""
        ...


@runtime_checkable
class PieceSource(BlockSource, Protocol):
    """A source whose blocks may be large, and are decoded into several batches: each is transformed by itself."""

    def decode_pieces(self, block: Block) -> list[Decoded]:
        """Rows of a block, as one batch or more: those that `decode` returns."""
        ...
