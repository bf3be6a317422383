"""`DataProviderBase`: subclasses sample batches, the base class fills the queue.

    class Digits(DataProviderBase):
        def build_meta(self):
            return {"training_type": "CLM", "vocab_size": 10, "batch_schema": [
                {"name": "x", "dtype": "int64", "shape": [self.block_size], "role": "input"},
                {"name": "y", "dtype": "int64", "shape": [self.block_size], "role": "target"},
            ]}

        def sample_batch(self, split, rng):
            digits = rng.integers(10, size=(self.batch_size, self.block_size + 1))
            return {"x": digits[:, :-1], "y": digits[:, 1:]}

Batch k of a split is `sample_batch(split, rng)` with an `rng` that depends on (seed, split, k) alone: it is the same in
every provider process, however many there are.
"""

from __future__ import annotations

import functools
import operator
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.config.settings import PREPARE, SHARED, Setting, thaw
from penstock.config.shared import SharedConfig, TrackedConfig
from penstock.config.validator import validate
from penstock.errors import ConfigError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.batch_file import BatchColumns
from penstock.fsqueue.layout import LANES
from penstock.fsqueue.members import Backoff, QueueKeywords, QueueMember, QueueOptions
from penstock.fsqueue.provider_code import code_of
from penstock.fsqueue.publisher import Limits, Publisher
from penstock.fsqueue.queue import Description, Queue, schema_of
from penstock.fsqueue.status import look, queue_readings
from penstock.metrics.readings import key_of
from penstock.types import Field, Schema

PROVIDER_FILE = "prepare_streaming.py"
_PROGRESS_SECONDS = 0.5
# Longest pause while the backlog is full: it lasts the trainer for longer.
_LONGEST_PAUSE = 0.05
_NUMBERS = frozenset(np.dtype(code).name for code in "?bhilqBHILQefd")


def _check_not_main() -> None:
    """Exit if a provider's file is run directly: that would define a class and do nothing, or fail at an import."""
    file = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    if file.name == PROVIDER_FILE and file.is_file() and "__main__" not in file.read_text(encoding="utf-8"):
        raise SystemExit(
            f"{file} is a provider, which prepare.py loads with the shared config; run `python prepare.py <config>`, "
            f"with dataset = {file.absolute().parent.name!r} in the config"
        )


_check_not_main()


@dataclass(frozen=True, slots=True)
class ProviderProgress:
    """Progress of one provider."""

    batches: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    waiting: bool = False
    """True while it pauses because the backlog of every split is full."""
    backlog: Mapping[str, int] = field(default_factory=dict)
    """Ready files of each split at the last look."""


class DataProviderBase(ABC):
    """Base class of providers: subclasses define `build_meta` and `sample_batch`.

    `config` is the shared config of the run, or any mapping with `dataset`, `batch_size` and `block_size`. A subclass
    may extend the constructor, calling this one first. Fields of `QueueOptions` can be given as keywords.
    """

    settings: ClassVar[Mapping[str, Setting]] = {}
    """Settings of the config that the provider reads; files made with other values are stale."""

    def __init__(
        self,
        config: SharedConfig | Mapping[str, Any],
        *,
        data_dir: PathLike | None = None,
        queue_dir: PathLike | None = None,
        options: QueueOptions | Mapping[str, Any] | None = None,
        **keywords: Unpack[QueueKeywords],
    ) -> None:
        if taken := sorted(
            self.settings.keys() & {"lanes", "batches_per_file", "batch_size", "block_size", "seed", "provider_code"}
        ):
            raise ConfigError(
                f"{type(self).__name__}.settings: {taken[0]!r} is a setting of every queue; use another name"
            )
        checked = validate(config, self.settings, owner=type(self).__name__)
        self.config: SharedConfig = TrackedConfig(checked)
        """Config for subclasses; it records what they read, since files depend on it."""
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
        self.options = QueueOptions.of(options, keywords, without=("timeout_seconds", "poll_seconds"))
        if self.options.metrics is None and self._config["metrics"] is not None:
            self.options = replace(self.options, metrics=self._config["metrics"])
        self.batch_index = 0
        """Number k of the batch that `sample_batch` makes."""
        self._columns: BatchColumns | None = None
        self._stopping = self._paused = False
        self._filling: tuple[Queue, Mapping[str, Publisher]] | None = None

    @abstractmethod
    def build_meta(self) -> dict[str, Any]:
        """Metadata for the trainer: plain values, including `batch_schema`."""

    @abstractmethod
    def sample_batch(self, split: str, rng: np.random.Generator) -> Mapping[str, Any]:
        """One batch: an array of `batch_size` rows for every entry of `batch_schema`.

        All randomness must come from `rng`, so that every process makes the same batch.
        """

    def make_batch(self, split: str, k: int) -> dict[str, npt.NDArray[Any]]:
        """Batch k of a split, checked against `batch_schema`."""
        k = operator.index(k)  # of NumPy, too
        if k < 0:
            raise ConfigError(f"batches of split {split!r} are numbered from 0, got k={k}")
        columns = self._columns_of_batches()
        self.batch_index = k
        known = len(self._tracked.read)
        batch = self.sample_batch(split, np.random.default_rng(_words(self.seed, _number_of(split), k)))
        if len(self._tracked.read) != known and self._described is not None:
            self._check_nothing_new()
        if isinstance(batch, dict) and columns.fit(batch, self.batch_size):
            return batch
        return self._checked(batch, columns.schema, split, k)

    def run(
        self, *, max_batches: int | None = None, on_progress: Callable[[ProviderProgress], None] | None = None
    ) -> ProviderProgress:
        """Publish until `stop` is called, or until each split has `max_batches`; pauses while the backlog is full.

        Several processes may run at once and share the work.
        """
        self._stopping = False
        if max_batches is None:
            max_batches = self._config["max_batches"]
        queue = Queue.create(self.queue_dir, self.description())
        facts = {"dataset": self.dataset, "class": type(self).__qualname__}
        member = QueueMember.provider(queue, facts, self.options)
        limits = Limits(self._config["backlog_files"], self._config["backlog_bytes"])
        publishers = {
            split: Publisher(
                member, split, limits=limits, compression=self._config["compression"], max_batches=max_batches
            )
            for split, share in self.proportions.items()
            if share > 0
        }
        self._filling = queue, publishers
        member.readings = self.metrics
        with queue.guarded():
            member.join()
            try:
                for publisher in publishers.values():
                    publisher.set_end()
                return self._fill(member, publishers, on_progress)
            except BaseException as error:
                member.end_metrics(error)
                raise
            finally:
                member.leave()

    def metrics(self) -> dict[str, float]:
        """Metrics of the queue and of this provider, under the names that exporters use; empty before `run`."""
        if self._filling is None:
            return {}
        queue, publishers = self._filling
        found = queue_readings(look(queue))
        for split, publisher in publishers.items():
            found[key_of("penstock_queue_member_batches_total", split=split)] = publisher.batches
        found["penstock_queue_member_bytes_total"] = sum(publisher.bytes for publisher in publishers.values())
        found["penstock_queue_member_paused"] = float(self._paused)
        return found

    def stop(self) -> None:
        """Make `run` return after the current file. Safe to call from a signal handler."""
        self._stopping = True

    def description(self) -> Description:
        """Description of the queue: metadata, seed, sizes, settings declared or read, and the provider's code."""
        meta = self.build_meta()
        self._described = {*self.settings, *self._read()}
        schema_of(meta)
        settings = {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "block_size": self.block_size,
            "batches_per_file": self._config["batches_per_file"],
            "lanes": LANES,
            **{name: thaw(self._config[name]) for name in sorted(self._described)},
            "provider_code": code_of(type(self)),
        }
        return Description(meta, settings, list(self.proportions))

    @property
    def _tracked(self) -> TrackedConfig:
        assert isinstance(self.config, TrackedConfig)
        return self.config

    def _read(self) -> set[str]:
        """Settings that only the subclass has read."""
        return self._tracked.read - SHARED.keys() - PREPARE.keys()

    def _check_nothing_new(self) -> None:
        assert self._described is not None
        if new := sorted(self._read() - self._described):
            raise ConfigError(
                f"{type(self).__name__} read {', '.join(map(repr, new))} of the config for the first time in "
                "sample_batch, after the fingerprint was made; read it in __init__ or build_meta, or declare it in "
                "`settings`"
            )

    def _fill(
        self,
        member: QueueMember,
        publishers: Mapping[str, Publisher],
        on_progress: Callable[[ProviderProgress], None] | None,
    ) -> ProviderProgress:
        began = reported = time.monotonic()
        backoff: Backoff | None = None
        while not self._stopping:
            member.reap_if_due()
            chosen = self._choose(publishers)
            if chosen is None:
                if all(publisher.ended for publisher in publishers.values()):
                    break
                backoff = backoff or Backoff(None, longest_seconds=_LONGEST_PAUSE)
                self._paused = True
                backoff.pause()
            else:
                backoff, self._paused = None, False
                self._publish(*chosen)
            if on_progress is not None and time.monotonic() - reported >= _PROGRESS_SECONDS:
                reported = time.monotonic()
                on_progress(_progress(publishers, began, waiting=backoff is not None))
        self._paused = False
        return _progress(publishers, began, waiting=False)

    def _choose(self, publishers: Mapping[str, Publisher]) -> tuple[Publisher, int] | None:
        """Reserve a file of the split that is furthest below its share and has room."""
        by_need = sorted(publishers.values(), key=lambda p: (p.files + 1) / self.proportions[p.split])
        for publisher in by_need:
            number = publisher.reserve()
            if number is not None:
                return publisher, number
        return None

    def _publish(self, publisher: Publisher, number: int) -> None:
        numbers = publisher.batches_in(number)
        columns = self._columns_of_batches()
        try:
            batches = (self.make_batch(publisher.split, k) for k in numbers)
            publisher.publish_arrays(number, batches, len(numbers), columns)
        except BaseException:
            publisher.give_up(number)
            raise

    def _columns_of_batches(self) -> BatchColumns:
        if self._columns is None:
            self._columns = BatchColumns(schema_of(self.build_meta()))
        return self._columns

    def _checked(self, batch: Mapping[str, Any], schema: Schema, split: str, k: int) -> dict[str, npt.NDArray[Any]]:
        """The batch as arrays; raises SchemaError with every difference from `batch_schema`."""
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
    """NumPy array of an array, a torch tensor, or a list."""
    detach = getattr(value, "detach", None)
    if detach is not None:
        value = detach().cpu().numpy()
    if isinstance(value, list | tuple) and any(isinstance(row, str) for row in value):
        return np.array(value, object)  # NumPy would turn other rows into strings
    if isinstance(value, list | tuple) and len({np.shape(row) for row in value}) > 1:
        rows = np.empty(len(value), object)  # of different lengths
        rows[:] = [np.asarray(row) for row in value]
        return rows
    return np.asarray(value)


def _misfits(array: npt.NDArray[Any], entry: Field, rows: int) -> Iterator[str]:
    """Differences of an array from its field."""
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


@functools.cache
def _number_of(split: str) -> int:
    """Number of a split name, which seeds its own randomness."""
    return xxhash.xxh3_64_intdigest(split.encode())


def _words(*numbers: int) -> npt.NDArray[np.uint32]:
    """Words of integers that seed a generator: those that NumPy makes of a list, in a tenth of the time."""
    data = b"".join(number.to_bytes(max(4, -(-number.bit_length() // 32) * 4), "little") for number in numbers)
    return np.frombuffer(data, "<u4").astype(np.uint32)


def _progress(publishers: Mapping[str, Publisher], began: float, *, waiting: bool) -> ProviderProgress:
    return ProviderProgress(
        {split: publisher.batches for split, publisher in publishers.items()},
        {split: publisher.files for split, publisher in publishers.items()},
        sum(publisher.bytes for publisher in publishers.values()),
        time.monotonic() - began,
        waiting,
        {split: publisher.backlog for split, publisher in publishers.items()},
    )
