"""The figures of a plan: steps, tokens, padding, what is learned and what is lost, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.collate import BatchForm
from penstock.batching.supervision import Supervision
from penstock.corpus.prepare import losses_of
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.sampling import LoaderSource
from penstock.order.edits import Ban, Skip
from penstock.order.overlong import Fit
from penstock.order.plan import Plan
from penstock.order.sample_orders import Order
from penstock.order.samples import Samples
from penstock.order.statistics import Chunk, capacity_of, chunks_of, passes_of
from penstock.store.preferences import PairTable

__all__ = ["EpochFigures", "PlanFigures", "SourceFigures", "plan_figures"]

Ints = npt.NDArray[np.int64]
_ROWS_AT_ONCE = 1 << 18
_AHEAD = 2
"""Batches made ahead if the loader decides by itself."""
_NARROW = ("mlx", "jax")
"""Backends whose token ids have four bytes and not eight."""


@dataclass(slots=True)
class EpochFigures:
    """One epoch of the loader."""

    epoch: int
    steps: int = 0
    """Delivered; skipped ones are not."""
    skipped: int = 0
    samples: int = 0
    tokens: int = 0
    slots: int = 0
    """Places for tokens in all batches, padding included."""


@dataclass(slots=True)
class SourceFigures:
    """One source, as far as the plan uses it."""

    name: str
    rows: int
    stored_tokens: int
    passes: float = 0.0
    """How often all of it is used."""
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    share: float = 0.0
    """Of all tokens."""


@dataclass(slots=True)
class PlanFigures:
    """What a plan comes to. Shares are None where there is nothing to divide by."""

    plan: str
    edits: int
    batch_size: int
    world_size: int
    global_batch: int
    """Samples in a step."""
    steps: int = 0
    skipped: int = 0
    samples: int = 0
    documents: int = 0
    """Parts of rows in all samples."""
    tokens: int = 0
    slots: int = 0
    padding_share: float | None = None
    packing_efficiency: float | None = None
    """Tokens by room, of samples that rows are packed into."""
    supervised: int = 0
    supervised_share: float | None = None
    longest_sample: int = 0
    longest_row: int = 0
    """Of a batch, padding included."""
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """By reason."""
    batch_bytes: int = 0
    """Of the largest batch of a rank."""
    prefetch_bytes: int = 0
    """Of as many of those as may wait for the trainer."""
    epochs: list[EpochFigures] = field(default_factory=list)
    sources: list[SourceFigures] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_figures(loader: DataLoader, epochs: int = 1, *, steps: int | None = None, backend: str = "") -> PlanFigures:
    """Every step of the first epochs counted, or of the first `steps`.

    Plans on lengths; only where rows have a mask is that read too. A million rows take about a second. How samples are
    dealt to ranks is taken to be the default, which changes figures only where a rank rounds up its own padding.
    `backend` is the one that batches are meant for, if not the loader's.
    """
    if any(isinstance(stock.inputs.table, PairTable) for stock in loader.stocks):
        raise ConfigError(
            f"{loader!r} has two sequences a row, chosen and rejected, and a plan is counted by one; there are "
            f"{loader.plan.steps_in(0)} steps in an epoch"
        )
    counting = _Counting(loader, backend or loader.options.backend)
    for chunk in chunks_of(loader.plan, epochs, steps):
        counting.add(chunk)
    whole = epochs if loader.plan.schedule is None and steps is None else None
    return counting.result(whole)


class _Counting:
    """The sums, chunk by chunk."""

    def __init__(self, loader: DataLoader, backend: str) -> None:
        self._plan: Plan = loader.plan
        self._stocks: Sequence[LoaderSource] = loader.stocks
        self._form: BatchForm = loader.stocks[0].form
        self._world = loader.rank.world
        self._supervision = [Supervision(stock.inputs.table) for stock in loader.stocks]
        self._orders: list[Order] = [feed.order for feed in loader.plan.feeds]
        self._drawn = np.zeros(len(self._orders), np.int64)
        self._room = self._packed = self._most_slots = 0
        self._lost: Counter[str] = Counter()
        self._backend = backend
        self._prefetch = loader.options.prefetch
        self._figures = PlanFigures(
            plan=self._plan.fingerprint,
            edits=self._plan.version,
            batch_size=loader.batch_size,
            world_size=self._world,
            global_batch=self._plan.global_batch,
            sources=[
                SourceFigures(stock.feed.name, stock.inputs.table.rows, stock.inputs.table.tokens)
                for stock in loader.stocks
            ],
        )

    def add(self, chunk: Chunk) -> None:
        self._drawn += chunk.drawn(len(self._orders))
        if chunk.left_over:
            self._lost["fills no batch (drop_last)"] += chunk.samples.tokens
            return
        epoch, found = self._epoch(chunk.epoch), self._figures
        samples, sources, bounds = self._delivered(chunk, epoch)
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

    def _epoch(self, number: int) -> EpochFigures:
        epochs = self._figures.epochs
        while len(epochs) <= number:
            epochs.append(EpochFigures(len(epochs)))
        return epochs[number]

    def result(self, passes: int | None) -> PlanFigures:
        """`passes` is how often a source was used, if that is known: counting it may mean planning it again."""
        found = self._figures
        for name in ("steps", "skipped", "samples", "tokens", "slots"):
            setattr(found, name, sum(getattr(epoch, name) for epoch in found.epochs))
        found.supervised = sum(source.supervised for source in found.sources)
        found.padding_share = _share(found.slots - found.tokens, found.slots)
        found.supervised_share = _share(found.supervised, found.tokens)
        found.packing_efficiency = _share(self._packed, self._room)
        for order, drawn, source in zip(self._orders, self._drawn.tolist(), found.sources):
            source.passes = passes_of(order, drawn) if passes is None else float(passes)
            source.share = source.tokens / found.tokens if found.tokens else 0.0
            # Of a pass that is not whole, in proportion: rows that are dropped have no place in the order.
            self._lost["rows too long (truncation=drop)"] += round(source.passes * _dropped(order))
        for stock, source in zip(self._stocks, found.sources):
            for store in stock.inputs.table.stores:
                for reason, tokens in losses_of(store).items():
                    self._lost[f"when prepared: {reason}"] += round(source.passes * tokens)
        found.lost_tokens = {reason: tokens for reason, tokens in sorted(self._lost.items()) if tokens}
        found.batch_bytes = self._most_slots * _bytes_of_a_slot(self._form, self._backend)
        found.prefetch_bytes = found.batch_bytes * (_AHEAD if self._prefetch is None else self._prefetch)
        return found

    def _delivered(self, chunk: Chunk, epoch: EpochFigures) -> tuple[Samples, Ints, Ints]:
        """Samples, the source of each part, and where steps begin, without what is skipped or banned."""
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
        return samples, sources, np.concatenate([[0], np.cumsum(counts)])

    def _slots(self, samples: Samples, sizes: Ints, bounds: Ints) -> Ints:
        """Places for tokens, (steps, ranks), as `collate` lays them out if neighbours stay together."""
        form, found = self._form, self._figures
        counts = np.diff(bounds)
        cuts = bounds[:-1, None] - (-counts[:, None] * np.arange(self._world + 1) // self._world)
        if form.padding_free:
            reach = np.concatenate([[0], np.cumsum(sizes)])
            slots = _rounded(np.maximum(np.diff(reach[cuts], axis=1), 1), form.multiple)
            found.longest_row = max(found.longest_row, int(slots.max(initial=0)))
            return slots
        rows = np.diff(cuts, axis=1)
        if form.split:
            real = np.concatenate([[0], np.cumsum(samples.lengths > 0)])
            rows = np.diff(real[samples.offsets[cuts]], axis=1)
        if form.length is not None:
            widths = np.full((len(counts), 1), form.length, np.int64)
        elif form.split:
            edges = np.append(cuts[:, :-1], bounds[-1])  # each rank's batch is as wide as its own longest row
            widths = _largest(samples.lengths, samples.offsets[edges]).reshape(len(counts), self._world)
        else:
            widths = _largest(sizes, bounds)[:, None]
        widths = _rounded(np.maximum(widths, 1), form.multiple)
        found.longest_row = max(found.longest_row, int(widths.max(initial=0)))
        return np.asarray(np.maximum(rows, 1) * widths)

    def _count_sources(self, samples: Samples, sources: Ints) -> None:
        full = np.diff(samples.offsets) > 0
        first = sources[samples.offsets[:-1][full]]
        for number, (source, order) in enumerate(zip(self._figures.sources, self._orders)):
            which = slice(None) if len(self._orders) == 1 else np.flatnonzero(sources == number)
            rows, starts, lengths = samples.rows[which], samples.starts[which], samples.lengths[which]
            parts = Samples(np.arange(len(rows) + 1), rows, starts, lengths)
            own = int(np.count_nonzero(first == number))
            source.samples += own
            source.tokens += parts.tokens
            source.supervised += int(self._supervision[number].count(parts).sum())
            if (capacity := capacity_of(order)) is not None:
                self._packed += parts.tokens
                self._room += own * capacity
            fit = _fit_of(order)
            if fit is not None and fit.truncation in ("left", "right"):
                self._lost[f"cut off (truncation={fit.truncation})"] += int((order.table.lengths(rows) - lengths).sum())


def _fit_of(order: Order) -> Fit | None:
    return getattr(order, "fit", None)


def _dropped(order: Order) -> int:
    """Tokens of rows that are in no sample, in a pass."""
    fit, table = _fit_of(order), order.table
    if fit is None or fit.truncation != "drop" or fit.max_length is None:
        return 0
    total = 0
    for low in range(0, table.rows, _ROWS_AT_ONCE):
        lengths = table.lengths(np.arange(low, min(low + _ROWS_AT_ONCE, table.rows)))
        total += int(lengths[lengths > fit.max_length].sum())
    return total


def _bytes_of_a_slot(form: BatchForm, backend: str) -> int:
    wide = 4 if backend in _NARROW else 8
    sizes = {"input_ids": wide, "labels": wide, "position_ids": wide, "loss_mask": 1}
    if not form.padding_free:
        sizes["attention_mask"] = wide
    if form.packed or form.padding_free:
        sizes["document_ids"] = 4
    return sum(size for name, size in sizes.items() if name in form.fields)


def _largest(values: Ints, bounds: Ints) -> Ints:
    """The largest value of each stretch, 0 for one without any."""
    found = np.zeros(len(bounds) - 1, np.int64)
    full = np.diff(bounds) > 0
    if full.any():
        found[full] = np.maximum.reduceat(values, bounds[:-1][full])
    return found


def _rounded(values: Ints, multiple: int) -> Ints:
    return np.asarray(-(-values // multiple) * multiple)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
