"""`DatasetConsumer`: batches of a queue for a trainer.

    with DatasetConsumer("data/char_diffusion/queue") as consumer:
        model = Model(consumer.meta["vocab_size"])
        while training:
            x, y = consumer.get_batch("train")

Consumed files are deleted, which makes room for the provider.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import numpy as np

from penstock.batching.backends.base import Backend, Device
from penstock.batching.backends.lookup import get_backend
from penstock.distributed.ranks import Rank, find_rank
from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.fsqueue.batch_file import Arrays, BatchColumns
from penstock.fsqueue.claiming_reader import ClaimingReader
from penstock.fsqueue.members import QueueKeywords, QueueMember, QueueOptions, check_choice
from penstock.fsqueue.ordered_reader import OrderedReader
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.split_reader import QueueReader, ReadCounts, SplitFiles, check_queue_state
from penstock.fsqueue.status import look, queue_readings
from penstock.metrics.readings import Readings, key_of

_STATE = StateFormat("queue splits", "a DatasetConsumer")


class DatasetConsumer:
    """Training side of a queue: blocks until a batch is available, and returns it.

    `order="any"` shares the queue among any number of consumers. `order="strict"` gives each rank its batches in the
    order of their numbers, so that a run can be repeated and resumed exactly.

    `acknowledge="delivered"` deletes a file when the next one is requested. With `"committed"` it stays until
    `commit(state)`, so that a trainer that dies resumes from its last checkpoint without a gap; the disk then holds
    the files between two checkpoints.

    Batches are arrays of `backend` (torch by default) on `device`; a CUDA device is fed from pinned memory without
    waiting for the copy. Strings, and lists of different lengths, are lists with one entry per row. An unreadable file
    raises, or with `on_error="skip"` is set aside and counted. Fields of `QueueOptions` can be given as keywords.

    Raises QueueNotFoundError if there is no queue at `queue_dir`.
    """

    def __init__(
        self,
        queue_dir: PathLike,
        *,
        order: Literal["any", "strict"] = "any",
        acknowledge: Literal["delivered", "committed"] = "delivered",
        rank: int | None = None,
        world_size: int | None = None,
        backend: str | Backend = "torch",
        device: Device = None,
        pin_memory: bool | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        options: QueueOptions | Mapping[str, Any] | None = None,
        **keywords: Unpack[QueueKeywords],
    ) -> None:
        check_reading(order, acknowledge, on_error)
        self.order, self.acknowledge, self.on_error = order, acknowledge, on_error
        self.options = QueueOptions.of(options, keywords, without=("durable",))
        self.rank = find_rank(rank, world_size)
        self.device, self.pin_memory = device, pin_memory
        self._queue = Queue.open(queue_dir)
        self._columns = BatchColumns(self._queue.description.schema)
        self._pair = _pair_of(self._queue.meta)
        self._backend = get_backend(backend)
        self._member = QueueMember.consumer(self._queue, order, self.rank, self.options)
        self._readers: dict[str, QueueReader] = {}
        self._member.readings = partial(_readings, self._queue, self._readers)
        # A consumer that is dropped without close(), as in a notebook, must release its rank.
        self._release = weakref.finalize(self, _release, self._member, self._readers)
        self._release.atexit = False
        self._closed = False
        self._check_device()

    @property
    def queue_dir(self) -> Path:
        return self._queue.path

    @property
    def meta(self) -> Mapping[str, Any]:
        """Metadata of the provider (`build_meta`)."""
        return self._queue.meta

    @property
    def fingerprint(self) -> str:
        """Hash of the metadata and of everything else that the batches depend on."""
        return self._queue.fingerprint

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings that the batches were made with: the seed, the sizes, and those of the provider."""
        return self._queue.settings

    @property
    def splits(self) -> list[str]:
        return list(self._queue.description.splits)

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        """Entries of `batch_schema`."""
        self._queue.split(split)
        schema: list[dict[str, Any]] | None = self.meta.get("batch_schema")
        return schema

    def get_batch(self, split: str = "train") -> Any:
        """The next batch: `(X, Y)` if it consists of an input x and a target y, else a dict by name.

        Blocks until there is one. Raises StalledError after `timeout_seconds`, and StopIteration at the end of a split
        that has one.
        """
        arrays = self.get_arrays(split)
        if arrays is None:
            raise StopIteration(f"split {split!r} of {self.queue_dir} has ended")
        return self._to_backend(arrays)

    def get_arrays(self, split: str = "train") -> Arrays | None:
        """The next batch as NumPy arrays by name; None at the end."""
        reader = self._reader(split)
        with self._queue.guarded():
            delivered = reader.next()
        if delivered is None:
            return None
        self._member.done += 1
        return delivered.opened.arrays(delivered.index, self._columns)

    def batches(self, split: str = "train") -> Iterator[Any]:
        """Batches until the end of the split, if it has one."""
        while (arrays := self.get_arrays(split)) is not None:
            yield self._to_backend(arrays)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def counts(self, split: str = "train") -> ReadCounts:
        """Batches delivered, redelivered, lost and skipped so far, and seconds of waiting."""
        return self._reader(split).counts

    def metrics(self) -> dict[str, float]:
        """Metrics of the queue and of this consumer, under the names that exporters use; lists the queue."""
        return _readings(self._queue, self._readers)

    def state_dict(self) -> dict[str, Any]:
        """Position in every split that was read from; plain and small.

        In strict order it is the same on every rank, and loads on any number of ranks. In any order it belongs to this
        consumer: it names the files that it has claimed.
        """
        facts = {
            "order": self.order,
            "fingerprint": self.fingerprint,
            "queue": self._queue.id,
            "splits": {split: reader.state() for split, reader in self._readers.items()},
        }
        return _STATE.write(facts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the batch after those that were delivered when the state was taken.

        Loading does not commit: with `acknowledge="committed"` an earlier state can still be loaded afterwards.
        """
        same_queue = self._check_state(state)
        for split, inner in state["splits"].items():
            reader = self._reader(split)
            with self._queue.guarded():
                reader.load(inner, same_queue=same_queue)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge what was delivered before `state` was taken (None: now): it may be deleted.

        Call it once the checkpoint that holds the state is on disk.
        """
        if self.acknowledge != "committed":
            raise ConfigError('commit needs a consumer with acknowledge="committed"')
        state = self.state_dict() if state is None else state
        self._check_state(state)
        for split, inner in state["splits"].items():
            with self._queue.guarded():
                self._reader(split).commit(inner)

    def close(self) -> None:
        """Release what was not delivered; a second call does nothing."""
        self._closed = True
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._member.end_metrics(error)
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is another consumer with the same arguments."""
        keywords = {
            "order": self.order,
            "acknowledge": self.acknowledge,
            "rank": self.rank.rank,
            "world_size": self.rank.world_size,
            "backend": self._backend.name,
            "device": self.device,
            "pin_memory": self.pin_memory,
            "on_error": self.on_error,
            "options": self.options,
        }
        return _unpickle, (self.queue_dir, keywords)

    def __repr__(self) -> str:
        return f"DatasetConsumer({str(self.queue_dir)!r}, order={self.order!r}, {self.rank})"

    def _check_device(self) -> None:
        """Raise now rather than at the first batch, which would be lost."""
        if self.device is None:
            return
        try:
            self._backend.to(self._backend.from_numpy(np.zeros(1, np.float32)), self.device)
        except Exception as error:  # each framework has its own kinds
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"device={self.device!r} cannot be used with {self._backend.name}: {reason}") from error

    def _reader(self, split: str) -> QueueReader:
        if self._closed:
            raise ConfigError("the consumer is closed; make another one and load the state of this one")
        self._member.join()
        if split not in self._readers:
            opened = SplitFiles(
                self._member, split, self.options.timeout_seconds, self.options.poll_seconds, self.on_error
            )
            self._readers[split] = open_reader(opened, self.order, self.rank, self.acknowledge == "committed")
        return self._readers[split]

    def _to_backend(self, arrays: Arrays) -> Any:
        batch = {name: self._to_device(array) for name, array in arrays.items()}
        return tuple(batch[name] for name in self._pair) if self._pair is not None else batch

    def _to_device(self, array: Any) -> Any:
        if array.dtype == object:
            return array.tolist()
        moved = self._backend.from_numpy(array)
        if self.device is None and not self.pin_memory:
            return moved
        cuda = str(self.device).partition(":")[0] == "cuda"
        if self.pin_memory or (self.pin_memory is None and cuda):
            moved = self._backend.pin_memory(moved)
        return self._backend.to(moved, self.device, non_blocking=cuda)

    def _check_state(self, state: Mapping[str, Any]) -> bool:
        _STATE.read(state)
        return check_queue_state(state, self._queue, self.order)


def check_reading(order: str, acknowledge: str, on_error: str) -> None:
    """Raise ConfigError for unknown ways of reading."""
    check_choice("order", order, ("any", "strict"))
    check_choice("acknowledge", acknowledge, ("delivered", "committed"))
    check_choice("on_error", on_error, ("raise", "skip"))


def open_reader(split: SplitFiles, order: str, rank: Rank, on_commit: bool) -> QueueReader:
    """The reader of an order."""
    if order == "strict":
        return OrderedReader(split, rank, on_commit=on_commit)
    return ClaimingReader(split, on_commit=on_commit)


def _readings(queue: Queue, readers: Mapping[str, QueueReader]) -> Readings:
    """Metrics of a queue, and of the readers of one consumer."""
    found = queue_readings(look(queue))
    for split, reader in list(readers.items()):
        counts = reader.counts
        values = {
            "batches": counts.delivered,
            "wait_seconds": counts.waited_seconds,
            "redelivered_batches": counts.redelivered,
            "lost_files": counts.lost,
            "skipped_batches": counts.skipped,
        }
        for name, value in values.items():
            found[key_of(f"penstock_queue_member_{name}_total", split=split)] = value
    return found


def _unpickle(queue_dir: PathLike, keywords: Mapping[str, Any]) -> DatasetConsumer:
    return DatasetConsumer(queue_dir, **keywords)


def _pair_of(meta: Mapping[str, Any]) -> tuple[str, str] | None:
    """Names of input and target, if a batch consists of these two: x and y."""
    entries = meta["batch_schema"]
    roles = [entry.get("role") for entry in entries]
    if [entry["name"] for entry in entries] == ["x", "y"] and roles in (["input", "target"], [None, None]):
        return "x", "y"
    return None


def _release(member: QueueMember, readers: dict[str, QueueReader]) -> None:
    """Release what was not delivered, and leave the queue."""
    member.end_metrics()
    closing = list(readers.values())
    readers.clear()
    try:
        if member.queue.path.is_dir():
            for reader in closing:
                reader.close()
    finally:
        member.leave()
