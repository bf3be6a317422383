"""`DataProviderBase`: what samples a dataset, and nothing else, is written by hand; the base class fills the queue.

    class Digits(DataProviderBase):
        def build_meta(self):
            return {"training_type": "CLM", "vocab_size": 10, "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
            ]}

        def sample_batch(self, split, rng):
            digits = rng.integers(10, size=(self.batch_size, self.block_size + 1))
            return {"x": digits[:, :-1], "y": digits[:, 1:]}

Batch k of a split is `sample_batch(split, rng)` with an `rng` that follows from (seed, split, k) alone: it is the same
whichever provider process makes it, and however many there are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.config.settings import PREPARE, SHARED, Setting, thaw
from penstock.config.shared import SharedConfig, TrackedConfig
from penstock.config.validator import validate
from penstock.errors import ConfigError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.backoff import Backoff
from penstock.fsqueue.batch_file import BatchColumns
from penstock.fsqueue.members import Membership, MemberWatch
from penstock.fsqueue.provider_code import code_of
from penstock.fsqueue.publisher import Limits, Publisher
from penstock.fsqueue.queue import Description, Queue, schema_of
from penstock.fsqueue.reaper import LeaseReaper
from penstock.types import Field, Schema

__all__ = ["DataProviderBase", "ProviderProgress"]

_LANES = 64
_TOLD_EVERY = 0.5
_LONGEST_REST = 0.05
"""Between two looks for room, when there was none for a second: there is work for a while, so nobody waits for us."""
_NUMBERS = frozenset(np.dtype(code).name for code in "?bhilqBHILQefd")


@dataclass(frozen=True, slots=True)
class ProviderProgress:
    """What one provider has published so far."""

    batches: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    waiting: bool = False
    """Whether it rests because enough is waiting in every split."""
    backlog: Mapping[str, int] = field(default_factory=dict)
    """Files that waited in each split when it was looked at last."""


class DataProviderBase(ABC):
    """Subclasses write `build_meta` and `sample_batch`; the constructor may be extended, calling this one first.

    `config` is the shared config of the run, or any mapping with `dataset`, `batch_size` and `block_size`.
    """

    settings: ClassVar[Mapping[str, Setting]] = {}
    """What the provider reads of the config besides; files made with other values of these are stale."""

    def __init__(
        self,
        config: SharedConfig | Mapping[str, Any],
        *,
        data_dir: PathLike | None = None,
        queue_dir: PathLike | None = None,
        lease_seconds: float = 30.0,
        durable: bool = False,
    ) -> None:
        if taken := sorted(
            self.settings.keys() & {"lanes", "batches_per_file", "batch_size", "block_size", "seed", "provider_code"}
        ):
            raise ConfigError(
                f"{type(self).__name__}.settings: {taken[0]!r} is a setting of every queue; it is checked"
            )
        checked = validate(config, self.settings, owner=type(self).__name__)
        self.config: SharedConfig = TrackedConfig(checked)
        """For subclasses: what they read of it, files depend on."""
        self._config = checked
        self._described: set[str] | None = None
        self.dataset: str = self._config["dataset"]
        self.batch_size: int = self._config["batch_size"]
        self.block_size: int = self._config["block_size"]
        self.seed: int = self._config["seed"]
        home = self._config["data_root"] / self.dataset if data_dir is None else data_dir
        self.data_dir = require_local(home, "data_root" if data_dir is None else "data_dir")
        self.queue_dir = require_local(queue_dir or self._config["queue_dir"] or self.data_dir / "queue", "queue_dir")
        self.proportions: Mapping[str, float] = self._config["split_proportions"]
        self.lease_seconds, self.durable = lease_seconds, durable
        self.batch_index = 0
        """The number k of the batch that `sample_batch` is asked for."""
        self._columns: BatchColumns | None = None
        self._stopping = False

    @abstractmethod
    def build_meta(self) -> dict[str, Any]:
        """What a trainer has to know; plain values, with `batch_schema` among them."""

    @abstractmethod
    def sample_batch(self, split: str, rng: np.random.Generator) -> Mapping[str, Any]:
        """One batch: an array of `batch_size` rows for every entry of `batch_schema`.

        All randomness has to come from `rng`, so that a batch is the same whoever makes it.
        """

    def make_batch(self, split: str, k: int) -> dict[str, npt.NDArray[Any]]:
        """Batch k of a split, checked against `batch_schema`."""
        if self._columns is None:
            self._columns = BatchColumns(schema_of(self.build_meta()))
        self.batch_index = k
        known = len(self._noted.read)
        batch = self.sample_batch(split, np.random.default_rng([self.seed, _number_of(split), k]))
        if len(self._noted.read) != known and self._described is not None:
            self._check_nothing_new()
        if isinstance(batch, dict) and self._columns.fit(batch, self.batch_size):
            return batch
        return self._checked(batch, self._columns.schema, split, k)

    def run(
        self, *, max_batches: int | None = None, on_progress: Callable[[ProviderProgress], None] | None = None
    ) -> ProviderProgress:
        """Publish until `stop` is called, resting while enough waits; with `max_batches`, until each split has so many.

        Several processes may run at once: they share the work.
        """
        self._stopping = False
        if max_batches is None:
            max_batches = self._config["max_batches"]
        queue = Queue.create(self.queue_dir, self.description())
        facts = {"role": "provider", "dataset": self.dataset, "class": type(self).__qualname__}
        member = Membership(queue.members, "p", lease_seconds=self.lease_seconds, facts=facts)
        caretaker = LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=self.lease_seconds))
        limits = Limits(self._config["backlog_files"], self._config["backlog_bytes"])
        publishers = {
            split: Publisher(
                queue,
                split,
                member,
                limits=limits,
                compression=self._config["compression"],
                durable=self.durable,
                max_batches=max_batches,
            )
            for split, share in self.proportions.items()
            if share > 0
        }
        with queue.guarded():
            member.join()
            try:
                for publisher in publishers.values():
                    publisher.set_end()
                return self._fill(publishers, caretaker, on_progress)
            finally:
                member.leave()

    def stop(self) -> None:
        """Let `run` return when the file it is at is published. Safe to call from a signal handler."""
        self._stopping = True

    def description(self) -> Description:
        """What the queue's files will depend on: the metadata, the seed, the sizes, what was declared or read, and the
        provider's code."""
        meta = self.build_meta()
        self._described = {*self.settings, *self._read()}
        schema_of(meta)
        settings = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "batches_per_file": self._config["batches_per_file"],
            "lanes": _LANES,
            **{name: thaw(self._config[name]) for name in sorted(self._described)},
            "provider_code": code_of(type(self)),
        }
        return Description(meta, settings, list(self.proportions))

    @property
    def _noted(self) -> TrackedConfig:
        assert isinstance(self.config, TrackedConfig)
        return self.config

    def _read(self) -> set[str]:
        """What the subclass has read of the config, and the base class does not see to."""
        return self._noted.read - SHARED.keys() - PREPARE.keys()

    def _check_nothing_new(self) -> None:
        assert self._described is not None
        if new := sorted(self._read() - self._described):
            raise ConfigError(
                f"{type(self).__name__} read {', '.join(map(repr, new))} of the config for the first time in "
                "sample_batch, too late to tell batches apart by it; read it in __init__ or build_meta, or declare it "
                "in `settings`"
            )

    def _fill(
        self,
        publishers: Mapping[str, Publisher],
        caretaker: LeaseReaper,
        on_progress: Callable[[ProviderProgress], None] | None,
    ) -> ProviderProgress:
        began = told = time.monotonic()
        patience: Backoff | None = None
        while not self._stopping:
            if caretaker.due:
                caretaker.round()
            chosen = self._choose(publishers)
            if chosen is None:
                if all(publisher.ended for publisher in publishers.values()):
                    break
                patience = patience or Backoff(None, longest_seconds=_LONGEST_REST)
                patience.pause()
            else:
                patience = None
                self._publish(*chosen)
            if on_progress is not None and time.monotonic() - told >= _TOLD_EVERY:
                told = time.monotonic()
                on_progress(_progress(publishers, began, waiting=patience is not None))
        return _progress(publishers, began, waiting=False)

    def _choose(self, publishers: Mapping[str, Publisher]) -> tuple[Publisher, int] | None:
        """The split that is furthest behind its share and has room, and the number of the file to make for it."""
        behind = sorted(publishers.values(), key=lambda p: (p.files + 1) / self.proportions[p.split])
        for publisher in behind:
            number = publisher.reserve()
            if number is not None:
                return publisher, number
        return None

    def _publish(self, publisher: Publisher, number: int) -> None:
        numbers = publisher.batches_in(number)
        even = self._columns is not None and self._columns.same_size and self._config["compression"] is None
        try:
            batches = (self._record_batch(publisher.split, k) for k in numbers)
            publisher.publish(number, batches, same_size=len(numbers) if even else None)
        except BaseException:
            publisher.give_up(number)
            raise

    def _record_batch(self, split: str, k: int) -> pa.RecordBatch:
        arrays = self.make_batch(split, k)
        assert self._columns is not None
        return self._columns.to_batch(arrays)

    def _checked(self, batch: Mapping[str, Any], schema: Schema, split: str, k: int) -> dict[str, npt.NDArray[Any]]:
        """The batch as arrays; raises SchemaError, naming everything that is not as `batch_schema` says."""
        where = f"{type(self).__name__}.sample_batch({split!r}), batch {k}"
        if not isinstance(batch, Mapping):
            raise SchemaError(
                f"{where}: expected a dict of arrays named as in batch_schema, got {type(batch).__name__}"
            )
        problems = [f"{name!r} is missing" for name in schema.names if name not in batch]
        problems += [f"{name!r} is not in batch_schema" for name in batch if name not in schema]
        arrays: dict[str, npt.NDArray[Any]] = {}
        for entry in schema:
            if entry.name in batch:
                arrays[entry.name] = array = _as_array(batch[entry.name])
                problems += [f"{entry.name!r} {problem}" for problem in _misfits(array, entry, self.batch_size)]
        if problems:
            raise SchemaError(f"{where}: {'; '.join(problems)}")
        return arrays


def _as_array(value: Any) -> npt.NDArray[Any]:
    """What a provider returned, as NumPy: arrays, torch tensors, and what else NumPy can look into."""
    detach = getattr(value, "detach", None)
    if detach is not None:
        value = detach().cpu().numpy()
    if isinstance(value, list | tuple) and any(isinstance(row, str) for row in value):
        return np.array(value, object)  # else NumPy would make strings of what is none
    if isinstance(value, list | tuple) and len({np.shape(row) for row in value}) > 1:
        rows = np.empty(len(value), object)  # of different lengths
        rows[:] = [np.asarray(row) for row in value]
        return rows
    return np.asarray(value)


def _misfits(array: npt.NDArray[Any], entry: Field, rows: int) -> Iterator[str]:
    """What is wrong with the array of a field, in words."""
    shape = entry.shape or ()
    if array.dtype == object and None in shape and array.shape == (rows,):
        for row in map(np.asarray, array):  # of different lengths
            yield from _differences(row, shape, entry.dtype, "a row of ")
    else:
        yield from _differences(array, (rows, *shape), entry.dtype)


def _differences(array: npt.NDArray[Any], shape: tuple[int | None, ...], dtype: str, where: str = "") -> Iterator[str]:
    fits = array.ndim == len(shape) and all(wanted in (None, given) for wanted, given in zip(shape, array.shape))
    if not fits:
        yield f"has {where}shape {list(array.shape)}, expected {list(shape)}"
    if array.dtype.name != dtype and (dtype in _NUMBERS or array.dtype.name in _NUMBERS):
        yield f"has {where}dtype {array.dtype.name}, expected {dtype}"


def _number_of(split: str) -> int:
    """A number for a split's name, so that its batches have randomness of their own."""
    return xxhash.xxh3_64_intdigest(split.encode())


def _progress(publishers: Mapping[str, Publisher], began: float, *, waiting: bool) -> ProviderProgress:
    return ProviderProgress(
        {split: publisher.batches for split, publisher in publishers.items()},
        {split: publisher.files for split, publisher in publishers.items()},
        sum(publisher.bytes for publisher in publishers.values()),
        time.monotonic() - began,
        waiting,
        {split: publisher.backlog for split, publisher in publishers.items()},
    )
