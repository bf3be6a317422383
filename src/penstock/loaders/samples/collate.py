"""Collator of samples: micro-batches to batches of a framework, with the loss denominator of their step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._forks import renewed
from penstock.arrays.ragged import offsets_of
from penstock.batching.backends import Backend, get_backend
from penstock.batching.options import Options
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError
from penstock.loaders.profile import Stages
from penstock.loaders.samples.columns import SampleColumns, join_ints
from penstock.loaders.samples.datasets import SampleDataset
from penstock.loaders.samples.layout import (
    PickedRows,
    SampleBatch,
    SampleLayout,
    assemble,
    blank,
    count_labels,
)
from penstock.loaders.samples.schema import IGNORE
from penstock.order.plan import Step
from penstock.order.samples import count_up_to

Ints = npt.NDArray[np.int64]


class MicroBatch:
    """Micro-batch: its rows on all ranks, and the range of this rank."""

    __slots__ = ("count", "high", "low", "next_position", "number", "rows", "step")

    def __init__(
        self, step: Step, number: int, count: int, rows: Ints, low: int, high: int, next_position: Any
    ) -> None:
        self.step, self.number, self.count, self.next_position = step, number, count, next_position
        self.rows, self.low, self.high = rows, low, high

    @property
    def mine(self) -> Ints:
        return self.rows[self.low : self.high]

    @property
    def size(self) -> int:
        """Number of rows of this rank."""
        return self.high - self.low


logger = logging.getLogger(__name__)

_OWN = frozenset(
    {
        *("step", "epoch", "micro_step", "micro_steps", "update", "sources", "source", "row", "sample"),
        *("blank", "truncated_tokens"),
    }
)
_NONE: Ints = np.zeros(0, np.int64) + IGNORE
_BYTES_AT_ONCE = 1 << 19
"""Bytes of ids of batches that are assembled together, so that they stay in the cache of the CPU."""
_FILLED = 0.75
"""Least share of tokens, without padding, at which batches are assembled together."""


class SampleCollator:
    """Collates the batches of one rank. Thread-safe."""

    def __init__(self, dataset: SampleDataset, layout: SampleLayout, options: Options, rank: Rank) -> None:
        self.dataset, self.layout, self.options, self.rank = dataset, layout, options, rank
        self.stages: Stages | None = None
        """Time spent by stage, if profiling is on."""
        self.truncated = {"rows": 0, "tokens": 0}
        self.most_fetched = 0
        """Most bytes of samples fetched at a time, as columns."""
        self._lock = renewed(threading.Lock())
        self.labels = LabelCounts(dataset, layout, rank)

    def make(self, micro: MicroBatch) -> SampleBatch:
        """One batch."""
        columns = self.dataset.columns()
        if columns is not None:
            return next(self.make_group([micro], columns))
        self.get_ready()
        return self.make_fetched([micro])[0]

    def get_ready(self) -> None:
        """Read what all threads need before they start."""
        _ = self.dataset.labels_by_token
        if self._asks_lengths:
            self.dataset.lengths()

    def make_fetched(self, micros: list[MicroBatch]) -> list[SampleBatch]:
        """Batches of samples that are fetched now. Where labels have to be counted, a whole step is fetched, once."""
        wanted: list[Ints] = []
        places: list[Ints] = []
        begun = 0
        steps: dict[int, int] = {}
        for micro in micros:
            counts = self.labels.counts_step(micro)
            if counts and id(micro.step) in steps:
                first = steps[id(micro.step)]
            else:
                wanted.append(micro.step.samples.rows if counts else micro.mine)
                first = steps[id(micro.step)] = begun
                begun += len(wanted[-1])
            places.append(first + (_within(micro.step.samples.rows, micro.mine) if counts else count_up_to(micro.size)))
        columns = self._fetch(join_ints(wanted))
        items = [
            self.labels.by_token(micro.step, columns, steps[id(micro.step)] + count_up_to(len(micro.step.samples.rows)))
            if self.labels.counts_step(micro)
            else None
            for micro in micros
        ]
        return list(self.make_group(micros, columns, join_ints(places), items))

    def _fetch(self, rows: Ints) -> SampleColumns:
        """Columns of some rows; of row 0 if there are none, for its schema."""
        stages = self.stages
        begun = stages.clock() if stages is not None else 0.0
        columns = self.dataset.fetch(rows if len(rows) else np.zeros(1, np.int64))
        self.most_fetched = max(self.most_fetched, columns.nbytes)
        if stages is not None:
            stages.add("fetch", stages.clock() - begun)
        return columns

    def make_group(
        self,
        micros: list[MicroBatch],
        columns: SampleColumns,
        at: Ints | None = None,
        items: Sequence[int | None] | None = None,
    ) -> Generator[SampleBatch, None, None]:
        """Batches of columns; batches of similar width are assembled together and then sliced.

        Their samples are rows `at` of the columns; None: the columns hold the whole dataset.
        """
        layout = self.layout
        self._check_tokens(columns)
        rows = join_ints([micro.mine for micro in micros])
        places = rows if at is None else at
        lengths = columns.lengths[places]
        cut = layout.truncation.parts(lengths, rows)
        sizes = [micro.size for micro in micros]
        begins = [0, *accumulate(sizes)]
        longest = _largest(cut.lengths, begins)
        if self._asks_lengths:
            longest = self._longest_on_all_ranks(micros, longest, columns.lengths if at is None else None)
        widths = [layout.width(most) for most in longest]
        reach = offsets_of(cut.lengths)[begins].tolist()
        made = ("input_ids", "attention_mask", *(("labels",) if layout.corruption is not None else ()))
        by_token = frozenset((*made, *columns.by_token))
        cuts = layout.truncation.max_length is not None and layout.truncation.policy != "error"
        counting = layout.corruption is not None or "labels" in columns.by_token
        ignored = None if counting else columns.ignored
        for first, last in self._together(sizes, widths):
            low, high = begins[first], begins[last]
            stages = self.stages
            begun = stages.clock() if stages is not None else 0.0
            together = {}
            if high > low:
                epoch, widest = micros[first].step.epoch, max(widths[first:last])
                picked = PickedRows(
                    places[low:high], rows[low:high], cut.starts[low:high], cut.lengths[low:high], widest
                )
                together = assemble(columns, picked, epoch, layout)
            if stages is not None:
                stages.add("collate", stages.clock() - begun)
            convert = self._backend.converter(together.values())
            parts = [(name, value, name in by_token) for name, value in together.items()]
            for number in range(first, last):
                micro, start, stop, width = micros[number], begins[number], begins[number + 1], widths[number]
                begun = stages.clock() if stages is not None else 0.0
                arrays = None
                if stop > start:
                    top, end = start - low, stop - low
                    arrays = {
                        name: convert(value[top:end, :width] if wide else value[top:end]) for name, value, wide in parts
                    }
                count = None if items is None else items[number]
                if counting and count is None:
                    if self.labels.counts_step(micro):
                        count = self.labels.by_token(micro.step, columns, micro.step.samples.rows)
                    else:
                        labels = together["labels"][start - low : stop - low] if arrays is not None else _NONE
                        count = int(np.count_nonzero(labels != IGNORE))
                elif ignored is not None:
                    count = self.labels.by_row(micro, ignored, places[start:stop] if at is not None else None)
                if count == 0 and len(micro.step.samples.rows):
                    self.labels.report_no_labels(micro)
                own = slice(start, stop)
                lost = lengths[own] - cut.lengths[own] if cuts else None
                tokens = reach[number + 1] - reach[number]
                batch = self._build(micro, columns, places[own], arrays, width, tokens, lost, count)
                if stages is not None:
                    stages.add("convert", stages.clock() - begun)
                yield batch

    def _longest_on_all_ranks(self, micros: list[MicroBatch], own: list[int], lengths: Ints | None) -> list[int]:
        """Longest row of each batch on any rank: a batch has the same width on all ranks."""
        rows = join_ints([micro.rows for micro in micros])
        known = self.dataset.lengths() if lengths is None else lengths
        begins = [0, *accumulate(len(micro.rows) for micro in micros)]
        given = _largest(self.layout.truncation.parts(known[rows], rows).lengths, begins)
        for micro, here, there in zip(micros, own, given):
            if here > there:
                raise DataError(
                    f"a sample of step {micro.step.number} has {here} tokens, more than in the lengths of "
                    f"{self.dataset.name}; correct the lengths"
                )
        return given

    def _together(self, sizes: list[int], widths: list[int]) -> Iterator[tuple[int, int]]:
        """Ranges of batches to assemble together: of similar width, and not too large."""
        rows, widest = sum(sizes), max(widths)
        needed = sum(size * width for size, width in zip(sizes, widths))
        count = len(sizes)
        if count == 1 or needed < _FILLED * rows * widest:
            yield from ((number, number + 1) for number in range(count))
            return
        most = max(_BYTES_AT_ONCE * count // max(rows * widest * self.layout.integer.itemsize, 1), 1)
        yield from ((low, min(low + most, count)) for low in range(0, count, most))

    def _build(
        self,
        micro: MicroBatch,
        columns: SampleColumns,
        at: Ints,
        arrays: dict[str, Any] | None,
        width: int,
        tokens: int,
        lost: Ints | None,
        items: int | None,
    ) -> SampleBatch:
        """Batch of rows `at` of the columns, with `tokens` tokens; `lost` of each row were cut off.

        `items` is the denominator of the loss, if it is not the number of rows of the step.
        """
        step, number, rows, size = micro.step, micro.number, micro.mine, len(at)
        metadata: dict[str, Any] = {
            "step": step.number,
            "epoch": step.epoch,
            "micro_step": number,
            "micro_steps": micro.count,
            "update": number + 1 == micro.count,
            "sources": step.names,
            "source": _zeros(size),
            "row": rows,
            "sample": count_up_to(size),
        }
        for name, cells in columns.metadata.items():
            metadata[_metadata_key(name)] = cells.take(at) if size else []
        if arrays is None:
            empty = blank(columns, width, self.layout)
            convert = self._backend.converter(empty.values())
            arrays = {name: convert(value) for name, value in empty.items()}
            metadata["blank"] = True
        if lost is not None:
            metadata["truncated_tokens"] = self._count_truncated(lost)
        return SampleBatch.of_arrays(arrays, metadata, len(step.samples.rows) if items is None else items, tokens)

    @property
    def _asks_lengths(self) -> bool:
        """True if the width of a batch depends on samples of other ranks."""
        return self.rank.world_size > 1 and not self.layout.to_max_length and self.dataset.has_tokens

    def _check_tokens(self, columns: SampleColumns) -> None:
        limit = self.layout.truncation.max_length
        if columns.ids is None and limit is not None:
            raise ConfigError(f"max_length={limit} needs input_ids, {self.dataset.name} has none; leave it out")

    def _count_truncated(self, cut: Ints) -> int:
        rows, tokens = int(np.count_nonzero(cut)), int(cut.sum())
        with self._lock:
            first = rows and not self.truncated["rows"]
            self.truncated["rows"] += rows
            self.truncated["tokens"] += tokens
        if first:
            logger.warning(
                "rows longer than max_length=%s are truncated (truncation=%r); see loader.truncated",
                self.layout.truncation.max_length,
                self.layout.truncation.policy,
            )
        return tokens

    @cached_property
    def _backend(self) -> Backend:
        return get_backend(self.options.backend)

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without locks and profiling."""
        left_out = {"_lock", "_backend"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out} | {"stages": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=renewed(threading.Lock()))


def _largest(numbers: Ints, begins: list[int]) -> list[int]:
    """Largest number of each range; 1 for an empty range."""
    if any(low == high for low, high in pairwise(begins)):
        return [int(numbers[low:high].max(initial=1)) for low, high in pairwise(begins)]
    found: list[int] = np.maximum.reduceat(numbers, begins[:-1]).tolist()
    return found


def _within(rows: Ints, some: Ints) -> Ints:
    """Indices of some rows among all rows of a step."""
    order = np.argsort(rows, kind="stable")
    found: Ints = order[np.searchsorted(rows, some, sorter=order)]
    return found


def _metadata_key(name: str) -> str:
    """Metadata key of a field; fields with the name of one of our keys get a prefix."""
    return f"sample_{name}" if name in _OWN else name


@lru_cache(maxsize=64)
def _zeros(count: int) -> Ints:
    numbers = np.zeros(count, np.int64)
    numbers.flags.writeable = False
    return numbers


class LabelCounts:
    """Numbers of labels of steps: the denominators of losses."""

    def __init__(self, dataset: SampleDataset, layout: SampleLayout, rank: Rank) -> None:
        self._dataset, self._layout, self._rank = dataset, layout, rank
        self._last: tuple[Step, int] | None = None
        self._warned = False

    def counts_step(self, micro: MicroBatch) -> bool:
        """True if the labels of the other batches of its step have to be counted."""
        return self._is_part(micro) and (self._layout.corruption is not None or self._dataset.labels_by_token)

    def _is_part(self, micro: MicroBatch) -> bool:
        """True if its step has other batches, here or on other ranks."""
        return self._rank.world_size > 1 or micro.count > 1

    def by_token(self, step: Step, columns: SampleColumns, at: Ints) -> int:
        """Labelled tokens of a step whose samples are rows `at` of the columns."""
        held = self._last
        if held is None or held[0] is not step:
            rows = step.samples.rows
            labels = count_labels(columns, at, rows, step.epoch, self._layout) if len(rows) else 0
            held = self._last = step, labels
        return held[1]

    def by_row(self, micro: MicroBatch, ignored: npt.NDArray[np.bool_], at: Ints | None) -> int:
        """Labelled rows of a step.

        `at` are the rows of the batch among the fetched ones; None: the columns hold the whole dataset.
        """
        rows = micro.step.samples.rows
        if at is None:
            return len(rows) - int(np.count_nonzero(ignored[rows]))
        left_out = ignored[at]
        if self._is_part(micro) and left_out.any():
            row = int(micro.mine[np.argmax(left_out)])
            raise DataError(
                f"labels of row {row} is {IGNORE} (ignored), and how many such rows the other batches of step "
                f"{micro.step.number} have is unknown for samples that are fetched one by one; drop such rows (or all "
                "labels), or pass the samples as a list or as columns",
                row=row,
            )
        return len(rows) - int(np.count_nonzero(left_out))

    def report_no_labels(self, micro: MicroBatch) -> None:
        """Report a step without labels: an error for masked language models, a warning otherwise."""
        rows = micro.step.samples.rows
        some = ", ".join(map(str, rows[:8].tolist())) + (", ..." if len(rows) > 8 else "")
        if self._layout.corruption is not None:
            raise DataError(
                f"step {micro.step.number} (rows {some}) has no token that can be masked, so its loss would be "
                "divided by 0; drop rows of special tokens only (loader.edit(loader.plan.ban(rows))), or use larger "
                "batches",
                row=int(rows[0]),
            )
        if not self._warned:
            self._warned = True
            logger.warning(
                "step %d (rows %s) has no label but %d: its num_items_in_batch is 0, and a loss divided by that is NaN",
                micro.step.number,
                some,
                IGNORE,
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}
