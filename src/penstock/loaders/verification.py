"""Verification that a loader resumes exactly: stopped repeatedly, on other numbers of ranks, compared byte for byte.

verify_resume(lambda **more: PretrainDataLoader("corpus.store", batch_size=32, **more), steps=100).check()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import numpy as np
import orjson
import xxhash

from penstock.batching.batch import TrainingBatch
from penstock.distributed.sharding import Contiguous
from penstock.errors import ConfigError, ResumeError
from penstock.loaders.base import DataLoader

MakeLoader = Callable[..., DataLoader]
Digests = dict[str, str]
_MOST_STATE_BYTES = 4096
_FIELDS = ("input_ids", "labels", "attention_mask", "loss_mask", "position_ids", "document_ids")
_PREFERENCE = ("completion_mask", "KL_input_ids", "KL_attention_mask", "KL_completion_mask")


@dataclass(frozen=True, slots=True)
class ResumeRun:
    """One interrupted run."""

    stops: tuple[int, ...]
    """Steps before which it was stopped."""
    worlds: tuple[int, ...]
    """World size before the first stop, after it, and so on."""
    prefetch: int | None


@dataclass(slots=True)
class ResumeReport:
    """Report of all runs, and the first difference."""

    steps: int = 0
    """Steps compared in each run."""
    epoch_ends: tuple[int, ...] = ()
    """Compared steps that begin an epoch."""
    runs: list[ResumeRun] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """World sizes that were not tried, and why."""
    state_bytes: int = 0
    """Size of the largest state."""
    difference: str | None = None

    @property
    def stops(self) -> int:
        return sum(len(run.stops) for run in self.runs)

    def check(self) -> None:
        """Raise ResumeError if anything differed."""
        if self.difference is not None:
            raise ResumeError(self.difference)


def verify_resume(
    make_loader: MakeLoader,
    *,
    steps: int = 100,
    stops: int = 4,
    worlds: Sequence[int] = (1, 2, 4),
    prefetches: Sequence[int | None] = (0, 2, None),
    seed: int = 0,
    progress: Callable[[int, int], object] | None = None,
) -> ResumeReport:
    """Run a loader uninterrupted, then several times with stops, and compare all batches.

    `make_loader(**options)` makes a fresh loader with the options rank, world_size, batch_size and prefetch; the global
    batch stays that of a loader made without them. Each run is stopped `stops` times, at steps drawn with `seed` and at
    the ends of epochs; the state goes through JSON into fresh loaders of another world size. Half of the steps are at
    the beginning, half around the end of the first epoch if that is further away. `progress(done, steps_in_all)` is
    called after each step of each run.
    """
    if steps < 2 or stops < 1:
        raise ConfigError(f"steps must be at least 2 and stops at least 1, got {steps} and {stops}")
    report = ResumeReport()
    with make_loader() as loader:
        ranges = _ranges(loader, steps)
        total = sum(length for _, length in ranges) * (1 + len(prefetches))
        trial = _Trial(make_loader, loader, report, lambda done: progress and progress(done, total))
    usable = trial.usable(worlds)
    rng = np.random.default_rng(seed)
    for start, length in ranges:
        wanted, ends = trial.uninterrupted(start, length)
        report.steps += len(wanted)
        report.epoch_ends += tuple(int(wanted[end]["step"]) for end in ends)
        for number, prefetch in enumerate(prefetches):
            points = _points(rng, len(wanted), stops, ends)
            chosen = tuple(usable[(number + turn) % len(usable)] for turn in range(len(points) + 1))
            run = ResumeRun(tuple(int(wanted[point]["step"]) for point in points), chosen, prefetch)
            report.runs.append(run)
            report.difference = trial.interrupted(start, wanted, points, run)
            if report.difference is not None:
                return report
    return report


class _Trial:
    """Runs of one loader, uninterrupted and interrupted."""

    def __init__(
        self, make_loader: MakeLoader, base: DataLoader, report: ResumeReport, progress: Callable[[int], object]
    ) -> None:
        self._make, self._report = make_loader, report
        self._progress, self._done = progress, 0
        self._size, self._world = base.plan.global_batch, base.rank.world_size
        self._budgeted = base.options.max_tokens is not None

    def usable(self, worlds: Sequence[int]) -> list[int]:
        """World sizes that divide a global batch."""
        found = []
        for world in dict.fromkeys(worlds):
            if world < 1:
                raise ConfigError(f"a world size must be at least 1, got {world}")
            if self._budgeted and world != self._world:
                why = "with max_tokens each rank has its own batch, so another world size makes other steps"
                self._report.left_out.append(f"{world} ranks: {why}")
            elif self._size % world:
                why = f"they do not divide a global batch of {self._size} samples"
                self._report.left_out.append(f"{world} ranks: {why}")
            else:
                found.append(world)
        return found or [self._least]

    @property
    def _least(self) -> int:
        return self._world if self._budgeted else 1

    def uninterrupted(self, start: int, length: int) -> tuple[list[Digests], list[int]]:
        """Digests of some steps, and the numbers of those that begin an epoch."""
        with ExitStack() as stack:
            ranks = self._open(stack, self._least, 0, None, start)
            digests = [self._digested(together, ranks) for together in _together(ranks, length)]
        ends = [number for number in range(1, len(digests)) if digests[number]["epoch"] != digests[number - 1]["epoch"]]
        return digests, ends

    def interrupted(self, start: int, wanted: list[Digests], points: list[int], run: ResumeRun) -> str | None:
        """First difference from the uninterrupted run, if there is one."""
        state: bytes | None = None
        for low, high, world in zip([0, *points], [*points, len(wanted)], run.worlds, strict=True):
            where = f"{world} rank{'s' * (world > 1)}, prefetch={run.prefetch}, stopped before {list(run.stops)}"
            with ExitStack() as stack:
                ranks = self._open(stack, world, run.prefetch, state, start)
                if state is not None and any(_saved(loader) != state for loader in ranks):
                    return (
                        f"{where}: state_dict() after load_state_dict() differs from the loaded state: {state.decode()}"
                    )
                done = low
                for together in _together(ranks, high - low):
                    problem = _compare(wanted[done], self._digested(together, ranks))
                    if problem is not None:
                        return f"step {wanted[done]['step']}: {problem} ({where})"
                    done += 1
                if done != high:
                    return f"step {wanted[done]['step']}: the run ended before it ({where})"
                states = [_saved(loader) for loader in ranks]
            state = states[0]
            self._report.state_bytes = max(self._report.state_bytes, len(state))
            if any(other != state for other in states):
                return f"ranks have different states after step {wanted[high - 1]['step']}: {states} ({where})"
            if len(state) > _MOST_STATE_BYTES:
                return f"the state after step {wanted[high - 1]['step']} has {len(state)} bytes, over 4 KiB ({where})"
        return None

    def _digested(self, together: Sequence[TrainingBatch], ranks: Sequence[DataLoader]) -> Digests:
        self._done += 1
        self._progress(self._done)
        return _digests(together, ranks[0])

    def _open(
        self, stack: ExitStack, world: int, prefetch: int | None, state: bytes | None, start: int
    ) -> list[DataLoader]:
        """Loader for each rank, at the state or the start."""
        sizes = {} if self._budgeted else {"batch_size": self._size // world}
        ranks = []
        for rank in range(world):
            loader = stack.enter_context(self._make(rank=rank, world_size=world, prefetch=prefetch, **sizes))
            if state is not None:
                loader.load_state_dict(orjson.loads(state))
            elif start:
                loader.seek(start)
            ranks.append(loader)
        return ranks


def _ranges(loader: DataLoader, steps: int) -> list[tuple[int, int]]:
    """(first step, number of steps) of the compared ranges."""
    try:
        epoch = loader.plan.steps_in(0)
    except TypeError:  # endless
        return [(0, steps)]
    half = steps // 2
    return [(0, steps)] if epoch < steps else [(0, steps - half), (epoch - (half + 1) // 2, half)]


def _points(rng: np.random.Generator, length: int, stops: int, ends: Sequence[int]) -> list[int]:
    """Steps to stop at: random ones, and up to three ends of epochs."""
    if length < 2:
        return []
    random = rng.choice(np.arange(1, length), min(stops, length - 1), replace=False).tolist()
    return sorted({*random, *(rng.choice(ends, min(len(ends), 3), replace=False).tolist() if ends else ())})


def _together(ranks: Sequence[DataLoader], count: int) -> Iterator[tuple[TrainingBatch, ...]]:
    """Next batches of all ranks, across the ends of epochs; fewer if the run ends."""
    for batches in zip_longest(*(_first_batches(loader, count) for loader in ranks)):
        missing = [rank for rank, batch in enumerate(batches) if batch is None]
        if missing:
            step = next(batch.metadata["step"] for batch in batches if batch is not None)
            raise ResumeError(f"step {step}: ranks {missing} of {len(ranks)} have no batch, the others have one")
        yield batches


def _first_batches(loader: DataLoader, count: int) -> Iterator[TrainingBatch]:
    while count:
        before = count
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return
        if count == before:
            return


def _saved(loader: DataLoader) -> bytes:
    return orjson.dumps(loader.state_dict(), option=orjson.OPT_SORT_KEYS)


def _digests(batches: Sequence[TrainingBatch], loader: DataLoader) -> Digests:
    """Digests of a global batch by field, independent of the number of ranks.

    Samples count, not the padding row of a rank without any. Where the sharding changes the order of samples, the
    order is ignored.
    """
    found: Digests = {}
    parts = [_fields(batch, loader) for batch in batches]
    for name in parts[0]:
        pieces = [piece for each in parts for piece in each[name]]
        if not isinstance(loader.options.sharding_strategy, Contiguous):
            pieces.sort()
        found[name] = xxhash.xxh3_128_hexdigest(b"".join(pieces))
    for name in ("step", "epoch"):
        found[name] = "/".join(dict.fromkeys(str(batch.metadata[name]) for batch in batches))
    items = dict.fromkeys(str(batch.num_items_in_batch) for batch in batches)
    return found | {"num_items_in_batch": "/".join(items)}


def _fields(batch: TrainingBatch, loader: DataLoader) -> dict[str, list[bytes]]:
    """Bytes of each sample by field; of each document in a padding-free batch.

    A sample with several sides, such as a preference pair, has a row for each: first one side of all samples, then the
    other.
    """
    arrays, facts = batch.to_numpy(), batch.metadata
    sides = int(facts.get("sides", 1))
    names, sources = facts["sources"], facts["source"].tolist()
    owners = [f"{names[source]}:{row}" for source, row in zip(sources, facts["row"].tolist())]
    found = {"rows": [owner.encode() + b"\n" for owner in owners]}
    # One for each document, also in packed rows; a rank without any has one for its blank row.
    labels = arrays["label"] if "label" in arrays and owners else np.zeros(0, np.bool_)
    found["label"] = [value.tobytes() for value in labels]
    if loader.options.padding_free:
        cuts = arrays["cu_seqlens"] if "cu_seqlens" in arrays else np.array([0, batch.num_tokens])
        ends = [(int(low), int(high)) for low, high in pairwise(cuts) if low < batch.num_tokens]
        for name in (*_FIELDS, "completion_mask"):
            if name in arrays and name != "document_ids":  # they count within a rank
                found[name] = _by_sample([arrays[name][0, low:high].tobytes() for low, high in ends], sides)
        return found
    budgeted = loader.options.max_tokens is not None
    count = batch.batch_size // sides
    filled = range(count if owners else 0) if budgeted else np.unique(facts["sample"]).tolist()
    for name in (*_FIELDS, *_PREFERENCE):
        if name in arrays and len(arrays[name]) == batch.batch_size:
            rows = [arrays[name][row + side * count].tobytes() for side in range(sides) for row in filled]
            found[name] = _by_sample(rows, sides)
    return found


def _by_sample(pieces: list[bytes], sides: int) -> list[bytes]:
    """Pieces of all sides, joined for each sample."""
    count = len(pieces) // sides
    return [b"".join(pieces[sample::count]) for sample in range(count)]


def _compare(wanted: Digests, got: Digests) -> str | None:
    for name in ("step", "epoch"):
        if wanted[name] != got[name]:
            return f"expected {name} {wanted[name]}, got {name} {got[name]}"
    different = [name for name in wanted if wanted[name] != got.get(name)]
    return f"{', '.join(different)} differ from the uninterrupted run" if different else None
