"""A provider whose batches say which they are, and ways to fill a queue with them and to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.errors import ConfigError as ConfigError
from penstock.fsqueue import DataProviderBase, DatasetConsumer, Queue
from penstock.fsqueue.batch_file import BatchColumns
from penstock.fsqueue.leases import LeaseReaper, MemberWatch
from penstock.fsqueue.members import QueueMember, QueueOptions
from penstock.fsqueue.publisher import Limits, Publisher

ROWS, LENGTH, PER_FILE = 2, 3, 4

PAIR = [
    {"name": "x", "dtype": "int64", "shape": [LENGTH], "role": "input"},
    {"name": "y", "dtype": "int64", "shape": [LENGTH], "role": "target"},
]


class Numbered(DataProviderBase):
    """The whole of x is k, and y is drawn: it tells whether the generator was the right one."""

    def build_meta(self) -> dict[str, Any]:
        return {"training_type": "CLM", "vocab_size": 65, "batch_schema": PAIR}

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        shape = (self.batch_size, self.block_size)
        return {"x": np.full(shape, self.batch_index), "y": rng.integers(1 << 40, size=shape)}


class Given(DataProviderBase):
    """Whatever a test wants."""

    schema: Any = PAIR
    meta: Mapping[str, Any] = MappingProxyType({})
    sample: Callable[[int, np.random.Generator], Any]

    def build_meta(self) -> dict[str, Any]:
        return {**self.meta, "batch_schema": self.schema}

    def sample_batch(self, split: str, rng: np.random.Generator) -> Any:
        return self.sample(self.batch_index, rng)


def provider(path: Path, kind: type[DataProviderBase] = Numbered, *, lease_seconds: float = 30.0, **config: Any) -> Any:
    """A provider of a small queue; more of the config may be said."""
    facts = {"dataset": "small", "batch_size": ROWS, "block_size": LENGTH, "batches_per_file": PER_FILE}
    facts |= {"split_proportions": {"train": 1.0}, **config}
    return kind(facts, queue_dir=path, lease_seconds=lease_seconds)


def given(path: Path, sample: Callable[[int, np.random.Generator], Any], schema: Any = PAIR, **config: Any) -> Any:
    """A provider of what `sample(k, rng)` returns."""
    return provider(path, type("Sampled", (Given,), {"schema": schema, "sample": staticmethod(sample)}), **config)


def fill(path: Path, batches: int, **config: Any) -> Path:
    """A queue that ends after so many batches, all of them made."""
    provider(path, **{"backlog_files": 1000, **config}).run(max_batches=batches)
    return path


def consumer(path: Path, **options: Any) -> DatasetConsumer:
    return DatasetConsumer(path, **{"backend": "numpy", "timeout_seconds": 120.0, **options})


def ks(batches: Iterator[Any] | DatasetConsumer) -> list[int]:
    """The numbers of batches."""
    return [k_of(batch) for batch in batches]


def k_of(batch: Any) -> int:
    x = batch[0] if isinstance(batch, tuple) else batch["x"]
    found = set(np.asarray(x).ravel().tolist())
    assert len(found) == 1, f"torn: {found}"
    return int(found.pop())


def take(reader: DatasetConsumer, count: int, split: str = "train") -> list[int]:
    return [k_of(reader.get_batch(split)) for _ in range(count)]


def names(path: Path, split: str = "train") -> list[str]:
    """What lies in a split beside its lanes and cursors."""
    return [name for name in listed(path / split) if name not in ("lanes", "cursors")]


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def numbers(path: Path, split: str = "train") -> list[int]:
    """The files that are there, taken or not."""
    return [file.number for file in Queue.open(path).split(split).files()]


class Clock:
    """A clock that goes when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


def reaper_of(path: Path, clock: Clock, lease_seconds: float = 10.0) -> LeaseReaper:
    """Another member's reaper, whose clock the test sets."""
    queue = Queue.open(path)
    return LeaseReaper(queue, MemberWatch(queue.members, lease_seconds=lease_seconds, clock=clock))


class Maker:
    """A provider in pieces: it can stop, or die, between any two of them."""

    def __init__(
        self,
        path: Path,
        *,
        max_batches: int | None = None,
        lease_seconds: float = 30.0,
        durable: bool = False,
        **limits: int,
    ):
        self.provider = provider(path)
        self.queue = Queue.create(path, self.provider.description())
        self.columns = BatchColumns(self.queue.description.schema)
        self.member = QueueMember(self.queue, "p", {}, QueueOptions(lease_seconds=lease_seconds, durable=durable))
        limited = Limits(**(limits or {"backlog_files": 1000}))
        self.publisher = Publisher(self.member, "train", limits=limited, max_batches=max_batches)

    def reserve(self) -> int:
        number = self.publisher.reserve()
        assert number is not None
        return number

    def publish(self, number: int) -> bool:
        numbers = self.publisher.batches_in(number)
        batches = (self.provider.make_batch("train", k) for k in numbers)
        return self.publisher.publish_arrays(number, batches, len(numbers), self.columns)

    def make(self) -> int:
        number = self.reserve()
        assert self.publish(number)
        return number
