"""`DatasetConsumer`: batches out of a queue, for a trainer.

    with DatasetConsumer("data/char_diffusion/queue") as consumer:
        model = Model(consumer.meta["vocab_size"])
        while training:
            x, y = consumer.get_batch("train")

What was delivered and is done with is deleted from the queue, which makes room for the provider to go on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from penstock.batching.backends.base import Backend, Device
from penstock.batching.backends.lookup import get_backend
from penstock.distributed.ranks import find_rank
from penstock.errors import ConfigError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat
from penstock.fsqueue.batch_file import Arrays, BatchColumns
from penstock.fsqueue.claiming_reader import SharedReader
from penstock.fsqueue.members import Membership, MemberWatch
from penstock.fsqueue.ordered_reader import StrictReader
from penstock.fsqueue.queue import Queue
from penstock.fsqueue.reaper import LeaseReaper
from penstock.fsqueue.split_reader import QueueReader, ReadCounts, Split

__all__ = ["DatasetConsumer"]

_STATE = StateFormat("queue splits", "a DatasetConsumer")


class DatasetConsumer:
    """The training side of a queue: waits until there is a batch, and returns it.

    `order="any"` shares the queue among any number of consumers, whoever comes first; `order="strict"` deals it out to
    the ranks in the order it was made, so that a run can be repeated and resumed exactly.

    `acknowledge="delivered"` deletes a file when the next one is asked for. With `"committed"` it stays until
    `commit(state)`, so that a trainer that dies goes on from its last checkpoint with nothing missing; the disk then
    has to hold what is read between two checkpoints.

    Batches are arrays of `backend` (torch, unless told otherwise), on `device`; a CUDA device is fed from pinned memory
    without waiting for the copy. Strings, and lists of different lengths, come out as lists, one entry a row. A file
    that cannot be read raises, or with `on_bad="skip"` is put aside and counted.

    Raises QueueNotFoundError when there is no queue at `queue_dir`.
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
        timeout_seconds: float | None = 600.0,
        lease_seconds: float = 30.0,
        poll_seconds: float | None = None,
        on_bad: Literal["raise", "skip"] = "raise",
    ) -> None:
        _one_of("order", order, ("any", "strict"))
        _one_of("acknowledge", acknowledge, ("delivered", "committed"))
        _one_of("on_bad", on_bad, ("raise", "skip"))
        _positive("timeout_seconds", timeout_seconds)
        _positive("poll_seconds", poll_seconds)
        self.order, self.acknowledge, self.on_bad = order, acknowledge, on_bad
        self.timeout_seconds, self.poll_seconds = timeout_seconds, poll_seconds
        self.rank = find_rank(rank, world_size)
        self._options = {
            "order": order,
            "acknowledge": acknowledge,
            "rank": self.rank.rank,
            "world_size": self.rank.world_size,
            "backend": backend if isinstance(backend, str) else backend.name,
            "device": device,
            "pin_memory": pin_memory,
            "timeout_seconds": timeout_seconds,
            "lease_seconds": lease_seconds,
            "poll_seconds": poll_seconds,
            "on_bad": on_bad,
        }
        self.device, self.pin_memory = device, pin_memory
        self._queue = Queue.open(queue_dir)
        self._columns = BatchColumns(self._queue.description.schema)
        self._pair = _pair_of(self._queue.meta)
        self._backend = get_backend(backend)
        facts = {"role": "consumer", "order": order, "rank": self.rank.rank, "world": self.rank.world_size}
        self._member = Membership(self._queue.members, "c", lease_seconds=lease_seconds, facts=facts)
        self._caretaker = LeaseReaper(self._queue, MemberWatch(self._queue.members, lease_seconds=lease_seconds))
        self._readers: dict[str, QueueReader] = {}
        # One that is dropped without close(), as in a notebook, must not hold its rank for the life of the process.
        self._let_go = weakref.finalize(self, _let_go, self._queue.path, self._readers, self._member)
        self._let_go.atexit = False
        self._closed = False
        self._check_device()

    @property
    def queue_dir(self) -> Path:
        return self._queue.path

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the provider's `build_meta` returned."""
        return self._queue.meta

    @property
    def fingerprint(self) -> str:
        """Changes with the metadata, and with whatever else the batches depend on."""
        return self._queue.fingerprint

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the batches were made with besides: the seed, the sizes, and what the provider declares."""
        return self._queue.settings

    @property
    def splits(self) -> list[str]:
        return list(self._queue.description.splits)

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        """The entries of `batch_schema`."""
        self._queue.split(split)
        schema: list[dict[str, Any]] | None = self.meta.get("batch_schema")
        return schema

    def get_batch(self, split: str = "train") -> Any:
        """The next batch, waiting for it: `(X, Y)` if a batch is an input x and a target y, else a dict by name.

        Raises StalledError, saying what is missing, after `timeout_seconds`, and StopIteration at the end of a split
        that was made to end.
        """
        arrays = self.get_arrays(split)
        if arrays is None:
            raise StopIteration(f"split {split!r} of {self.queue_dir} is at its end")
        return self._handed_over(arrays)

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
        """Batches until the split ends, if it does."""
        while (arrays := self.get_arrays(split)) is not None:
            yield self._handed_over(arrays)

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def counts(self, split: str = "train") -> ReadCounts:
        """What was delivered so far, delivered twice, lost, skipped, and how long it was waited for."""
        return self._reader(split).counts

    def state_dict(self) -> dict[str, Any]:
        """Where every split is that was read from; plain and small.

        In strict order it is the same on every rank, and loads on any number of them. In any order it belongs to this
        consumer: it names the files that it has.
        """
        facts = {
            "order": self.order,
            "fingerprint": self.fingerprint,
            "queue": self._queue.id,
            "splits": {split: reader.state() for split, reader in self._readers.items()},
        }
        return _STATE.write(facts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, with the batch that would have come next.

        Loading is no commit: with `acknowledge="committed"` an earlier state can still be gone back to afterwards.
        """
        self._check_state(state)
        for split, inner in state["splits"].items():
            reader = self._reader(split)
            with self._queue.guarded():
                reader.load(inner, same_queue=state.get("queue") == self._queue.id)

    def commit(self, state: Mapping[str, Any] | None = None) -> None:
        """What was delivered before `state` was taken (None: now) is done with, and may be deleted.

        Call it when the checkpoint that holds the state is safely on disk.
        """
        if self.acknowledge != "committed":
            raise ConfigError('commit is for consumers with acknowledge="committed"')
        state = self.state_dict() if state is None else state
        self._check_state(state)
        for split, inner in state["splits"].items():
            with self._queue.guarded():
                self._reader(split).commit(inner)

    def close(self) -> None:
        """Give back what was not delivered; a second call does nothing."""
        self._closed = True
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is another consumer, with the same arguments."""
        return _again, (self.queue_dir, self._options)

    def __repr__(self) -> str:
        return f"DatasetConsumer({str(self.queue_dir)!r}, order={self.order!r}, {self.rank})"

    def _check_device(self) -> None:
        """Raises now rather than at the first batch, which would be gone."""
        if self.device is None:
            return
        try:
            self._backend.to(self._backend.from_numpy(np.zeros(1, np.float32)), self.device)
        except Exception as error:  # of whatever kind the framework has for it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"device={self.device!r} cannot be used with {self._backend.name}: {reason}") from error

    def _reader(self, split: str) -> QueueReader:
        if self._closed:
            raise ConfigError("the consumer is closed; make another one, and give it the state of this one")
        if not self._member.joined:
            with self._queue.guarded():
                self._member.join()
        if split not in self._readers:
            self._queue.split(split)
            place = Split(
                self._queue, split, self._member, self._caretaker, self.timeout_seconds, self.poll_seconds, self.on_bad
            )
            on_commit = self.acknowledge == "committed"
            self._readers[split] = (
                StrictReader(place, self.rank, on_commit=on_commit)
                if self.order == "strict"
                else SharedReader(place, on_commit=on_commit)
            )
        return self._readers[split]

    def _handed_over(self, arrays: Arrays) -> Any:
        batch = {name: self._moved(array) for name, array in arrays.items()}
        return tuple(batch[name] for name in self._pair) if self._pair is not None else batch

    def _moved(self, array: Any) -> Any:
        if array.dtype == object:
            return array.tolist()
        moved = self._backend.from_numpy(array)
        if self.device is None and not self.pin_memory:
            return moved
        cuda = str(self.device).partition(":")[0] == "cuda"
        if self.pin_memory or (self.pin_memory is None and cuda):
            moved = self._backend.pin_memory(moved)
        return self._backend.to(moved, self.device, non_blocking=cuda)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        _STATE.read(state)
        if state["order"] != self.order:
            raise ResumeError(
                f"the state is of a consumer with order={state['order']!r}, this one has order={self.order!r}"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ResumeError(
                f"the state is of a queue with fingerprint {state['fingerprint']}, {self.queue_dir} has "
                f"{self.fingerprint}: its batches were made otherwise; use the config of the run, or start anew"
            )
        if state.get("queue") != self._queue.id and not (self.order == "strict" and self._queue.repeatable):
            raise ResumeError(
                f"the state is of a queue that was at {self.queue_dir} before this one was made, and what it names is "
                "gone; start anew"
            )


def _again(queue_dir: PathLike, options: Mapping[str, Any]) -> DatasetConsumer:
    return DatasetConsumer(queue_dir, **options)


def _pair_of(meta: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of input and target, if a batch is just these two: x and y."""
    entries = meta["batch_schema"]
    if [entry["name"] for entry in entries] == ["x", "y"]:
        roles = [entry.get("role") for entry in entries]
        if roles in (["input", "target"], [None, None]):
            return "x", "y"
    return None


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is one of {', '.join(map(repr, allowed))}, got {value!r}")


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be positive, or None, got {value!r}")


def _let_go(queue: Path, readers: dict[str, QueueReader], member: Membership) -> None:
    """Give back what was not delivered, and leave the queue."""
    closing = list(readers.values())
    readers.clear()
    try:
        if queue.is_dir():
            for reader in closing:
                reader.close()
    finally:
        member.leave()
