"""Sharding: the samples of a global batch for each rank.

A global batch is the same on any number of ranks; a sharding only distributes it. Every sample goes to exactly one
rank, and no rank is empty unless there are fewer samples than ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.distributed.balancing import attention_cost, karmarkar_karp
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError

Numbers = npt.NDArray[np.int64]


@runtime_checkable
class Sharding(Protocol):
    """Sharding of global batches: anything with this one method."""

    def shares(self, sizes: Numbers, world: int) -> list[Numbers]:
        """Numbers of the samples of each rank; `sizes` has the tokens of each sample of the global batch.

        Must depend on the arguments alone, or ranks would disagree.
        """
        ...


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Contiguous parts: the first rank gets the first samples. Counts differ by at most one."""

    def shares(self, sizes: Numbers, world: int) -> list[Numbers]:
        return np.split(np.arange(len(sizes)), share_cuts(len(sizes), world)[1:-1])


@dataclass(frozen=True, slots=True)
class Strided:
    """Round robin: sample i goes to rank i mod world. Counts differ by at most one."""

    def shares(self, sizes: Numbers, world: int) -> list[Numbers]:
        return [np.arange(rank, len(sizes), world) for rank in range(world)]


@dataclass(frozen=True, slots=True)
class Balanced:
    """Parts of about equal cost, so that no rank waits for the others at the end of a step.

    `cost` maps lengths of documents to costs; a sample of several documents, such as a packed row, costs their sum:
    tokens attend within their document only. With `equal_size` the counts of samples differ by at most one too; without
    it, one rank may get many cheap samples and another a few expensive ones. Within a rank, samples keep their order.
    """

    cost: Callable[[Numbers], npt.NDArray[Any]] = attention_cost
    equal_size: bool = True

    def shares(self, sizes: Numbers, world: int) -> list[Numbers]:
        return karmarkar_karp(self.cost(sizes), world, equal_size=self.equal_size)

    def shares_of_documents(self, lengths: Numbers, offsets: Numbers, world: int) -> list[Numbers]:
        """As `shares`; sample i consists of documents of the lengths `lengths[offsets[i] : offsets[i + 1]]`."""
        return karmarkar_karp(self.costs(lengths, offsets), world, equal_size=self.equal_size)

    def costs(self, lengths: Numbers, offsets: Numbers) -> npt.NDArray[np.float64]:
        """Cost of each sample: the sum over its documents."""
        count = len(offsets) - 1
        owners = np.repeat(np.arange(count), np.diff(offsets))
        return np.bincount(owners, self.cost(lengths), count).astype(np.float64, copy=False)


@dataclass(frozen=True, slots=True)
class CanonicalStreams:
    """Fixed number of streams that fill the slots of every global batch, on any number of ranks.

    The number of streams is a multiple of the global batch, or divides it (`canonical_streams` picks one). With m
    streams to a slot, they take turns from step to step; with m slots to a stream, it fills m neighbours in each step.
    A rank has neighbouring slots, and so reads neighbouring streams. If the streams are a multiple of the global batch,
    no two ranks read the same one; otherwise that holds for world sizes that divide their number, and for others some
    streams are read by two ranks (see `exclusive`).
    """

    streams: int = 64

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ConfigError(f"streams must be at least 1, got {self.streams}")

    def shares(self, sizes: Numbers, world: int) -> list[Numbers]:
        return Contiguous().shares(sizes, world)

    def at(self, step: int, global_batch: int) -> Numbers:
        """Stream of each slot of a step."""
        slots = np.arange(global_batch)
        per_slot, per_stream = self._ratio(global_batch)
        return slots * per_slot + step % per_slot if per_slot > 1 else slots // per_stream

    def slots_of(self, rank: Rank, global_batch: int) -> range:
        """Slots of a rank, in every step."""
        cuts = share_cuts(global_batch, rank.world_size)
        return range(int(cuts[rank.rank]), int(cuts[rank.rank + 1]))

    def exclusive(self, global_batch: int, world: int) -> bool:
        """True if no stream is read by two ranks."""
        per_stream = self._ratio(global_batch)[1]
        return not np.any(share_cuts(global_batch, world) % per_stream)

    def _ratio(self, global_batch: int) -> tuple[int, int]:
        """Streams to a slot and slots to a stream; one of them is 1."""
        if global_batch < 1 or (self.streams % global_batch and global_batch % self.streams):
            raise ConfigError(
                f"{self.streams} streams do not fit a global batch of {global_batch}: one must be a multiple of the "
                "other; use canonical_streams(global_batch)"
            )
        return max(1, self.streams // global_batch), max(1, global_batch // self.streams)


def canonical_streams(global_batch: int, wanted: int = 64) -> int:
    """Number of streams for a global batch: near `wanted`, at most twice that.

    A multiple of the global batch where one is small enough, since every world size divides those cleanly; otherwise a
    divisor. It does not depend on the world size, so that a run can resume on another one. A large prime global batch
    leaves a single stream, which every rank has to read.
    """
    if global_batch < 1 or wanted < 1:
        raise ConfigError(f"global_batch and wanted must be at least 1, got {global_batch} and {wanted}")
    limit = 2 * wanted
    multiples = range(global_batch, limit + 1, global_batch)
    fitting = multiples or [number for number in range(1, limit + 1) if global_batch % number == 0]
    return min(fitting, key=lambda number: (max(number / wanted, wanted / number), -number))


@runtime_checkable
class DocumentSharding(Sharding, Protocol):
    """Sharding that looks at the documents of samples, not at their sizes alone."""

    def shares_of_documents(self, lengths: Numbers, offsets: Numbers, world: int) -> list[Numbers]:
        """As `shares`; sample i consists of documents of the lengths `lengths[offsets[i] : offsets[i + 1]]`."""
        ...


def shares_of(
    sharding: Sharding, sizes: Numbers, world: int, documents: tuple[Numbers, Numbers] | None = None
) -> list[Numbers]:
    """Checked result of `sharding.shares`: every sample exactly once, and no rank empty without need.

    `documents` are the lengths of all documents and the offsets of each sample's, where samples may hold several.
    """
    if documents is not None and isinstance(sharding, DocumentSharding):
        found = sharding.shares_of_documents(*documents, world)
    else:
        found = sharding.shares(sizes, world)
    shares = [np.asarray(share) for share in found]
    if len(shares) != world:
        raise ConfigError(f"{sharding!r} made {len(shares)} shares for {world} ranks, expected one for each")
    for rank, share in enumerate(shares):
        if share.ndim != 1 or (share.size and share.dtype.kind not in "iu"):
            raise ConfigError(
                f"{sharding!r} gave rank {rank} an array of {share.dtype} with {share.ndim} dimensions, expected a "
                "flat array of sample numbers"
            )
    taken = np.concatenate(shares).astype(np.int64)
    outside = taken[(taken < 0) | (taken >= len(sizes))]
    if outside.size:
        raise ConfigError(f"{sharding!r} assigned sample {outside[0]} of a global batch of {len(sizes)}")
    times = np.bincount(taken, minlength=len(sizes))
    if np.any(times != 1):
        wrong = int(np.flatnonzero(times != 1)[0])
        raise ConfigError(
            f"{sharding!r} assigned sample {wrong} {times[wrong]} times; every sample goes to exactly one rank"
        )
    empty = [rank for rank, share in enumerate(shares) if not share.size]
    if empty and len(sizes) >= world:
        raise ConfigError(
            f"{sharding!r} left rank {empty[0]} without a sample, with {len(sizes)} samples for {world} ranks"
        )
    return [share.astype(np.int64, copy=False) for share in shares]


def share_cuts(count: int, world: int) -> Numbers:
    """Bounds of contiguous shares; earlier ranks get the remainder, so that rank 0 is the last to be empty."""
    return -(-np.arange(world + 1) * count // world)
