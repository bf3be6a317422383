"""Summary of a plan before training: steps, tokens, padding, supervised and lost tokens, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.batching.backends import BACKENDS
from penstock.batching.collate import BatchLayout
from penstock.batching.supervision import Supervision
from penstock.corpus.prepare import losses_of
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.rank_costs import Imbalance, RankCosts
from penstock.order.edits import Ban, Skip
from penstock.order.sample_orders import Order
from penstock.order.samples import Samples
from penstock.order.statistics import StepChunk, passes_of, step_chunks
from penstock.store.preferences import PairTable

Ints = npt.NDArray[np.int64]
_ROWS_AT_ONCE = 1 << 18
_PREFETCH = 2
"""Prefetched batches, if the loader decides by itself."""
_COUNTED_WINDOWS = 4
"""Windows from which the length of an epoch is estimated."""


@dataclass(slots=True)
class _Totals:
    """Counts over delivered steps."""

    steps: int = 0
    skipped: int = 0
    samples: int = 0
    tokens: int = 0
    slots: int = 0
    """Places for tokens in all batches, padding included."""


@dataclass(slots=True)
class EpochSummary(_Totals):
    """Summary of one epoch of the loader."""

    epoch: int = 0


@dataclass(slots=True)
class SourceSummary:
    """Summary of one source, as far as the plan uses it."""

    name: str
    rows: int
    stored_tokens: int
    passes: float = 0.0
    """Number of passes over the source."""
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    share: float = 0.0
    """Share of all tokens."""


@dataclass(slots=True)
class _Content(_Totals):
    """Counts and shares over all epochs. A share is None where there is nothing to divide by."""

    documents: int = 0
    """Parts of rows in all samples."""
    padding_share: float | None = None
    packing_efficiency: float | None = None
    """Filled share of the samples that rows are packed into."""
    supervised: int = 0
    supervised_share: float | None = None
    longest_sample: int = 0
    longest_row: int = 0
    """Longest row of a batch, padding included."""
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """Lost tokens by reason."""
    batch_bytes: int = 0
    """Bytes of the largest batch of a rank."""
    prefetch_bytes: int = 0
    """Bytes of as many of those as are prefetched."""


@dataclass(slots=True)
class PlanSummary(_Content):
    """Summary of a plan."""

    plan: str = ""
    edits: int = 0
    batch_size: int = 0
    world_size: int = 1
    global_batch: int = 0
    """Samples of a step."""
    imbalance: Imbalance | None = None
    """Of the ranks; None for a single rank."""
    epochs: list[EpochSummary] = field(default_factory=list)
    sources: list[SourceSummary] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        return {name: facts.pop(name) for name in ("plan", "edits", "batch_size", "world_size", "global_batch")} | facts


def summarize_plan(
    loader: DataLoader,
    epochs: int = 1,
    *,
    steps: int | None = None,
    backend: str = "",
    progress: Callable[[int, float | None], object] | None = None,
) -> PlanSummary:
    """Count every step of the first epochs, or of the first `steps`.

    Plans on lengths; only supervision masks are read. A million rows take about a second. Contiguous sharding is
    assumed, which matters only where a rank rounds up its own padding. `backend` is that of the batches, if not the
    loader's. `progress(steps, share)` is called meanwhile, with the share that is done if it is known.
    """
    if any(isinstance(source.inputs.table, PairTable) for source in loader.sources):
        raise ConfigError(
            f"{loader!r} has two sequences a row, chosen and rejected, and a summary counts one; an epoch has "
            f"{loader.plan.steps_in(0)} steps"
        )
    counter = PlanCounter(loader, backend)
    whole = epochs * loader.sources[0].inputs.table.tokens if len(loader.sources) == 1 else None
    done = tokens = 0
    for chunk in step_chunks(loader.plan, epochs, steps):
        counter.add(chunk)
        done, tokens = done + chunk.steps, tokens + chunk.samples.tokens
        if progress is not None:
            shares = [part / all_of_it for part, all_of_it in ((done, steps), (tokens, whole)) if all_of_it]
            progress(done, max(shares, default=None))
    return counter.result(epochs if loader.plan.schedule is None and steps is None else None)


@dataclass(frozen=True, slots=True)
class DeliveredSteps:
    """Steps without skipped ones and banned rows: `numbers[i]` holds the samples `bounds[i]` to `bounds[i + 1]`."""

    numbers: Ints
    bounds: Ints
    samples: Samples
    sources: Ints
    """Source of each part."""
    slots: Ints
    """Places for tokens, (steps, ranks)."""


class PlanCounter:
    """Sums over the steps of a plan, chunk by chunk. `backend` is that of the batches, if not the loader's."""

    def __init__(self, loader: DataLoader, backend: str = "") -> None:
        self._plan, self._sources = loader.plan, loader.sources
        self._layout: BatchLayout = loader.sources[0].layout
        self._world_size, self._prefetch = loader.rank.world_size, loader.options.prefetch
        self._backend = backend or loader.options.backend
        self._supervision = [Supervision(source.inputs.table) for source in loader.sources]
        self._orders: list[Order] = [source.order for source in loader.plan.sources]
        self._drawn = np.zeros(len(self._orders), np.int64)
        self._room = self._packed = self._most_slots = 0
        self._lost: Counter[str] = Counter()
        self.costs = RankCosts(loader.options.sharding_strategy, self._world_size)
        self._summary = PlanSummary(
            plan=self._plan.fingerprint,
            edits=len(self._plan.edits),
            batch_size=loader.batch_size,
            world_size=self._world_size,
            global_batch=self._plan.global_batch,
            sources=[
                SourceSummary(source.name, source.inputs.table.rows, source.inputs.table.tokens)
                for source in loader.sources
            ],
        )

    def add(self, chunk: StepChunk) -> DeliveredSteps | None:
        """Count a chunk; returns what is delivered of it, or None for samples that fill no batch."""
        self._drawn += chunk.drawn(len(self._orders))
        if chunk.left_over:
            self._lost["fills no batch (drop_last)"] += chunk.samples.tokens
            return None
        epoch, found = self._epoch(chunk.epoch), self._summary
        samples, sources, bounds, numbers = self._delivered(chunk, epoch)
        sizes = samples.sizes()
        slots = self._slots(samples, sizes, bounds)
        epoch.steps += len(bounds) - 1
        epoch.samples += len(samples)
        epoch.tokens += samples.tokens
        epoch.slots += int(slots.sum())
        self._most_slots = max(self._most_slots, int(slots.max(initial=0)))
        found.documents += len(samples.rows)
        found.longest_sample = max(found.longest_sample, int(sizes.max(initial=0)))
        self._count_sources(samples, sources)
        self.costs.add(samples, bounds, numbers)
        return DeliveredSteps(numbers, bounds, samples, sources, slots)

    def _epoch(self, number: int) -> EpochSummary:
        epochs = self._summary.epochs
        while len(epochs) <= number:
            epochs.append(EpochSummary(epoch=len(epochs)))
        return epochs[number]

    def result(self, passes: int | None, *, bounded: bool = False) -> PlanSummary:
        """Summary of all chunks. `passes` over each source, if known, saves planning the source again.

        With `bounded`, the length of an epoch and the tokens of dropped rows are estimated from a part of the rows, so
        that the work does not grow with the size of a source.
        """
        found = self._summary
        for name in ("steps", "skipped", "samples", "tokens", "slots"):
            setattr(found, name, sum(getattr(epoch, name) for epoch in found.epochs))
        found.supervised = sum(source.supervised for source in found.sources)
        found.padding_share = _share(found.slots - found.tokens, found.slots)
        found.supervised_share = _share(found.supervised, found.tokens)
        found.packing_efficiency = _share(self._packed, self._room)
        found.imbalance = self.costs.result()
        for order, drawn, source in zip(self._orders, self._drawn.tolist(), found.sources):
            if passes is not None:
                source.passes = float(passes)
            else:
                source.passes = drawn / max(samples_in_epoch(order), 1) if bounded else passes_of(order, drawn)
            source.share = source.tokens / found.tokens if found.tokens else 0.0
            # In proportion for a partial pass: dropped rows have no place in the order.
            self._lost["rows too long (truncation=drop)"] += round(source.passes * _dropped(order, bounded=bounded))
        for known, source in zip(self._sources, found.sources):
            for store in known.inputs.table.stores:
                for reason, tokens in losses_of(store).items():
                    self._lost[f"when prepared: {reason}"] += round(source.passes * tokens)
        found.lost_tokens = {reason: tokens for reason, tokens in sorted(self._lost.items()) if tokens}
        found.batch_bytes = self._most_slots * _bytes_of_a_slot(self._layout, self._backend)
        found.prefetch_bytes = found.batch_bytes * (_PREFETCH if self._prefetch is None else self._prefetch)
        return found

    def _delivered(self, chunk: StepChunk, epoch: EpochSummary) -> tuple[Samples, Ints, Ints, Ints]:
        """Samples, the source of each part, bounds and numbers of steps, without skipped steps and banned rows."""
        samples, sources, counts = chunk.samples, chunk.sources, np.diff(chunk.bounds)
        numbers = chunk.first + np.arange(chunk.steps)
        kept = np.ones(chunk.steps, np.bool_)
        for edit in self._plan.edits:
            if isinstance(edit, Skip):
                kept &= (numbers < edit.start) | (numbers >= edit.stop)
        if not kept.all():
            epoch.skipped += int((~kept).sum())
            of_sample = np.repeat(kept, counts)
            sources = sources[of_sample[samples.numbers()]]
            before, samples = samples.tokens, samples.take(np.flatnonzero(of_sample))
            self._lost["skipped steps"] += before - samples.tokens
            numbers, counts = numbers[kept], counts[kept]
        for edit in self._plan.edits:
            if isinstance(edit, Ban):
                step_of_part = np.repeat(numbers, counts)[samples.numbers()]
                gone = (sources == self._plan.names.index(edit.source)) & (step_of_part >= edit.step)
                gone &= np.isin(samples.rows, np.asarray(edit.rows, np.int64))
                self._lost["banned rows"] += int(samples.lengths[gone].sum())
                samples, sources = samples.where(~gone), sources[~gone]
        return samples, sources, offsets_of(counts), numbers

    def _slots(self, samples: Samples, sizes: Ints, bounds: Ints) -> Ints:
        """Places for tokens, (steps, ranks), as `collate` lays them out with contiguous sharding."""
        layout, found = self._layout, self._summary
        counts = np.diff(bounds)
        world = self._world_size
        cuts = bounds[:-1, None] - (-counts[:, None] * np.arange(world + 1) // world)
        if layout.padding_free:
            slots = _rounded(np.maximum(np.diff(offsets_of(sizes)[cuts], axis=1), 1), layout.multiple)
            found.longest_row = max(found.longest_row, int(slots.max(initial=0)))
            return slots
        rows = np.diff(cuts, axis=1)
        if layout.split:
            rows = np.diff(offsets_of(samples.lengths > 0)[samples.offsets[cuts]], axis=1)
        if layout.length is not None:
            widths = np.full((len(counts), 1), layout.length, np.int64)
        elif layout.split:
            edges = np.append(cuts[:, :-1], bounds[-1])  # each rank's batch is as wide as its own longest row
            widths = _largest(samples.lengths, samples.offsets[edges]).reshape(len(counts), world)
        else:
            widths = _largest(sizes, bounds)[:, None]
        widths = _rounded(np.maximum(widths, 1), layout.multiple)
        found.longest_row = max(found.longest_row, int(widths.max(initial=0)))
        return np.asarray(np.maximum(rows, 1) * widths)

    def _count_sources(self, samples: Samples, sources: Ints) -> None:
        full = np.diff(samples.offsets) > 0
        first = sources[samples.offsets[:-1][full]]
        for number, (source, order) in enumerate(zip(self._summary.sources, self._orders)):
            which = slice(None) if len(self._orders) == 1 else np.flatnonzero(sources == number)
            rows, starts, lengths = samples.rows[which], samples.starts[which], samples.lengths[which]
            parts = Samples(np.arange(len(rows) + 1), rows, starts, lengths)
            own = int(np.count_nonzero(first == number))
            source.samples += own
            source.tokens += parts.tokens
            source.supervised += int(self._supervision[number].count(parts).sum())
            if order.capacity is not None:
                self._packed += parts.tokens
                self._room += own * order.capacity
            if order.truncation is not None and (policy := order.truncation.policy) in ("left", "right"):
                self._lost[f"cut off (truncation={policy})"] += int((order.table.lengths(rows) - lengths).sum())


def samples_in_epoch(order: Order) -> float:
    """Samples of an epoch: exact where that is arithmetic or a few windows, else estimated from some windows."""
    if order.even is not None or order.windows <= _COUNTED_WINDOWS:
        return float(order.count(0))
    # Without the last window, which is shorter.
    windows = np.linspace(0, order.windows - 2, _COUNTED_WINDOWS).astype(np.int64).tolist()
    return sum(order.count_window(0, window) for window in windows) / len(windows) * order.windows


def _dropped(order: Order, *, bounded: bool = False) -> int:
    """Tokens of dropped rows in a pass; with `bounded`, of rows at even distances, in proportion."""
    truncation, table = order.truncation, order.table
    if truncation is None or truncation.policy != "drop" or truncation.max_length is None:
        return 0
    if bounded and table.rows > _ROWS_AT_ONCE:
        rows = np.arange(0, table.rows, -(-table.rows // _ROWS_AT_ONCE))
        return round(truncation.lost_tokens(table.lengths(rows)) * table.rows / len(rows))
    blocks = (np.arange(low, min(low + _ROWS_AT_ONCE, table.rows)) for low in range(0, table.rows, _ROWS_AT_ONCE))
    return sum(truncation.lost_tokens(table.lengths(rows)) for rows in blocks)


def _bytes_of_a_slot(layout: BatchLayout, backend: str) -> int:
    wide = BACKENDS[backend].integer.itemsize
    sizes = {"input_ids": wide, "labels": wide, "position_ids": wide, "loss_mask": 1}
    if not layout.padding_free:
        sizes["attention_mask"] = wide
    if layout.packed or layout.padding_free:
        sizes["document_ids"] = 4
    return sum(size for name, size in sizes.items() if name in layout.fields)


def _largest(values: Ints, bounds: Ints) -> Ints:
    """Largest value of each run; 0 for an empty one."""
    found = np.zeros(len(bounds) - 1, np.int64)
    full = np.diff(bounds) > 0
    if full.any():
        found[full] = np.maximum.reduceat(values, bounds[:-1][full])
    return found


def _rounded(values: Ints, multiple: int) -> Ints:
    return np.asarray(-(-values // multiple) * multiple)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
