"""Micro-batches made: the samples of their rows put together, converted, and told what their step has in all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import Backend, get_backend
from penstock.batching.options import Options
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError
from penstock.loaders.profile import Stages
from penstock.loaders.samples.batch import SampleBatch, converter_of
from penstock.loaders.samples.columns import SampleColumns
from penstock.loaders.samples.datasets import SampleDataset
from penstock.loaders.samples.layout import Form, Picked, assemble, blank, count_labels
from penstock.loaders.samples.schema import IGNORE
from penstock.order.plan import Step

__all__ = ["LabelCounts", "MicroBatch", "SampleCollator"]


Ints = npt.NDArray[np.int64]


class MicroBatch:
    """One micro-batch: its rows on all ranks, and which of them are this rank's."""

    __slots__ = ("behind", "count", "high", "low", "number", "rows", "step")

    def __init__(self, step: Step, number: int, count: int, rows: Ints, low: int, high: int, behind: Any) -> None:
        self.step, self.number, self.count, self.behind = step, number, count, behind
        self.rows, self.low, self.high = rows, low, high

    @property
    def mine(self) -> Ints:
        return self.rows[self.low : self.high]

    @property
    def size(self) -> int:
        """Rows of this rank."""
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
"""Of ids of batches that are put together as one: what stays near while it is worked on."""
_FILLED = 0.75
"""Batches are put together as one if at least this share of it is theirs."""


class SampleCollator:
    """Makes the batches of one rank; any number of threads at once."""

    def __init__(self, origin: SampleDataset, form: Form, options: Options, rank: Rank) -> None:
        self.origin, self.form, self.options, self.rank = origin, form, options, rank
        self.stages: Stages | None = None
        """Where what is spent on making batches is added up, if anybody asks for it."""
        self.truncated = {"rows": 0, "tokens": 0}
        self.most_fetched = 0
        """Bytes of the most samples that were fetched at a time, as columns."""
        self._lock = threading.Lock()
        self.labels = LabelCounts(origin, form, rank)

    def make(self, micro: MicroBatch) -> SampleBatch:
        """One batch, of whatever the samples are."""
        columns = self.origin.columns()
        if columns is not None:
            return next(self.make_group([micro], columns))
        self.get_ready()
        return self.make_fetched([micro])[0]

    def get_ready(self) -> None:
        """Find out what threads need to know before they begin."""
        _ = self.origin.labels_by_token
        if self._asks_lengths:
            self.origin.lengths()

    def make_fetched(self, micros: list[MicroBatch]) -> list[SampleBatch]:
        """Batches of samples that are fetched for them; of a whole step where its labels are to be counted, once."""
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
            places.append(first + (_within(micro.step.samples.rows, micro.mine) if counts else _counted(micro.size)))
        columns = self._fetch(_joined(wanted))
        items = [
            self.labels.by_token(micro.step, columns, steps[id(micro.step)] + _counted(len(micro.step.samples.rows)))
            if self.labels.counts_step(micro)
            else None
            for micro in micros
        ]
        return list(self.make_group(micros, columns, _joined(places), items))

    def _fetch(self, rows: Ints) -> SampleColumns:
        """Samples; of no rows that of row 0, for what samples are like."""
        stages = self.stages
        begun = stages.clock() if stages is not None else 0.0
        columns = self.origin.fetch(rows if len(rows) else np.zeros(1, np.int64))
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
        """Batches of columns; those that are about as wide as each other are put together as one and cut apart.

        Their samples are rows `at` of the columns; None: the columns are all samples of the dataset.
        """
        form = self.form
        self._check_tokens(columns)
        rows = _joined([micro.mine for micro in micros])
        places = rows if at is None else at
        lengths = columns.lengths[places]
        cut = form.cut(lengths, rows)
        sizes = [micro.size for micro in micros]
        begins = [0, *accumulate(sizes)]
        longest = _largest(cut.lengths, begins)
        if self._asks_lengths:
            longest = self._longest_on_all_ranks(micros, longest, columns.lengths if at is None else None)
        widths = [form.width(most) for most in longest]
        reach = np.concatenate([[0], np.cumsum(cut.lengths)])[begins].tolist()
        made = ("input_ids", "attention_mask", *(("labels",) if form.corruption is not None else ()))
        by_token = frozenset((*made, *columns.by_token))
        cuts = form.max_length is not None and form.truncation != "error"
        counting = form.corruption is not None or "labels" in columns.by_token
        ignored = None if counting else columns.ignored
        for first, last in self._together(sizes, widths):
            low, high = begins[first], begins[last]
            stages = self.stages
            begun = stages.clock() if stages is not None else 0.0
            together = {}
            if high > low:
                epoch, widest = micros[first].step.epoch, max(widths[first:last])
                picked = Picked(places[low:high], rows[low:high], cut.slice(low, high), widest)
                together = assemble(columns, picked, epoch, form)
            if stages is not None:
                stages.add("collate", stages.clock() - begun)
            convert = converter_of(self._backend, together.values())
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
                    self.labels.tell_none(micro)
                own = slice(start, stop)
                lost = lengths[own] - cut.lengths[own] if cuts else None
                tokens = reach[number + 1] - reach[number]
                batch = self._build(micro, columns, places[own], arrays, width, tokens, lost, count)
                if stages is not None:
                    stages.add("convert", stages.clock() - begun)
                yield batch

    def _longest_on_all_ranks(self, micros: list[MicroBatch], own: list[int], lengths: Ints | None) -> list[int]:
        """The longest row of each batch on any rank: batches are as wide on all of them."""
        rows = _joined([micro.rows for micro in micros])
        known = self.origin.lengths() if lengths is None else lengths
        begins = [0, *accumulate(len(micro.rows) for micro in micros)]
        told = _largest(self.form.cut(known[rows], rows).lengths, begins)
        for micro, here, there in zip(micros, own, told):
            if here > there:
                raise DataError(
                    f"a sample of step {micro.step.number} has {here} tokens, more than the lengths of "
                    f"{self.origin.name} say"
                )
        return told

    def _together(self, sizes: list[int], widths: list[int]) -> Iterator[tuple[int, int]]:
        """Which batches to put together as one: all of them, as far as they are of about one width and not too many."""
        rows, widest = sum(sizes), max(widths)
        needed = sum(size * width for size, width in zip(sizes, widths))
        count = len(sizes)
        if count == 1 or needed < _FILLED * rows * widest:
            yield from ((number, number + 1) for number in range(count))
            return
        most = max(_BYTES_AT_ONCE * count // max(rows * widest * self.form.integer.itemsize, 1), 1)
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
        """A batch of the samples that are rows `at` of the columns. They have `tokens`; `lost` of each were cut off.

        `items` is what a loss is divided by, if it is not the rows of the step.
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
            "sample": _counted(size),
        }
        for name, cells in columns.beside.items():
            metadata[_beside(name)] = cells.take(at) if size else []
        if arrays is None:
            empty = blank(columns, width, self.form)
            convert = converter_of(self._backend, empty.values())
            arrays = {name: convert(value) for name, value in empty.items()}
            metadata["blank"] = True
        if lost is not None:
            metadata["truncated_tokens"] = self._count_truncated(lost)
        batch = SampleBatch.of_arrays(arrays, metadata, len(step.samples.rows) if items is None else items, tokens)
        return batch.pin_memory() if self.options.pin_memory else batch

    @property
    def _asks_lengths(self) -> bool:
        """Whether the width of a batch depends on samples that this rank does not fetch."""
        return self.rank.world_size > 1 and not self.form.to_max_length and self.origin.has_tokens

    def _check_tokens(self, columns: SampleColumns) -> None:
        if columns.ids is None and self.form.max_length is not None:
            raise ConfigError(
                f"max_length={self.form.max_length} is about tokens, and the samples of {self.origin.name} have no "
                "input_ids; leave it out"
            )

    def _count_truncated(self, cut: Ints) -> int:
        rows, tokens = int(np.count_nonzero(cut)), int(cut.sum())
        with self._lock:
            first = rows and not self.truncated["rows"]
            self.truncated["rows"] += rows
            self.truncated["tokens"] += tokens
        if first:
            logger.warning(
                "rows are longer than max_length=%s and are cut (truncation=%r); loader.truncated counts them",
                self.form.max_length,
                self.form.truncation,
            )
        return tokens

    @cached_property
    def _backend(self) -> Backend:
        return get_backend(self.options.backend)

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what belongs to this one."""
        left_out = {"_lock", "_backend"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out} | {"stages": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


def _joined(parts: list[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _largest(numbers: Ints, begins: list[int]) -> list[int]:
    """The largest number of each stretch, 1 where there is none."""
    if any(low == high for low, high in pairwise(begins)):
        return [int(numbers[low:high].max(initial=1)) for low, high in pairwise(begins)]
    found: list[int] = np.maximum.reduceat(numbers, begins[:-1]).tolist()
    return found


def _within(rows: Ints, some: Ints) -> Ints:
    """Where some rows stand among all rows of a step, each of which is there once."""
    order = np.argsort(rows, kind="stable")
    found: Ints = order[np.searchsorted(rows, some, sorter=order)]
    return found


def _beside(name: str) -> str:
    """What a value of samples is called in the metadata, which has names of its own."""
    return f"sample_{name}" if name in _OWN else name


@lru_cache(maxsize=64)
def _counted(count: int) -> Ints:
    numbers = np.arange(count)
    numbers.flags.writeable = False
    return numbers


@lru_cache(maxsize=64)
def _zeros(count: int) -> Ints:
    numbers = np.zeros(count, np.int64)
    numbers.flags.writeable = False
    return numbers


class LabelCounts:
    """How many labels steps have."""

    def __init__(self, origin: SampleDataset, form: Form, rank: Rank) -> None:
        self._origin, self._form, self._rank = origin, form, rank
        self._last: tuple[Step, int] | None = None
        self._told = False

    def counts_step(self, micro: MicroBatch) -> bool:
        """Whether it has to be counted how many labels the other batches of its step have."""
        return self._is_part(micro) and (self._form.corruption is not None or self._origin.labels_by_token)

    def _is_part(self, micro: MicroBatch) -> bool:
        """Whether its step has other batches, here or on other ranks."""
        return self._rank.world_size > 1 or micro.count > 1

    def by_token(self, step: Step, columns: SampleColumns, at: Ints) -> int:
        """Tokens with a label of a step whose samples are rows `at` of the columns."""
        held = self._last
        if held is None or held[0] is not step:
            rows = step.samples.rows
            labels = count_labels(columns, at, rows, step.epoch, self._form) if len(rows) else 0
            held = self._last = step, labels
        return held[1]

    def by_row(self, micro: MicroBatch, ignored: npt.NDArray[np.bool_], at: Ints | None) -> int:
        """Rows of a step whose label is to be learned.

        `at`: where the samples of the batch are among those that were fetched; None: all of the dataset are known.
        """
        rows = micro.step.samples.rows
        if at is None:
            return len(rows) - int(np.count_nonzero(ignored[rows]))
        left_out = ignored[at]
        if self._is_part(micro) and left_out.any():
            row = int(micro.mine[np.argmax(left_out)])
            raise DataError(
                f"labels of row {row} is {IGNORE}, which is not to be learned, and how many such rows the other "
                f"batches of step {micro.step.number} have is not known where samples are fetched one by one; drop "
                "such rows (or the labels, if none is needed), or pass the samples as a list or as columns",
                row=row,
            )
        return len(rows) - int(np.count_nonzero(left_out))

    def tell_none(self, micro: MicroBatch) -> None:
        """A step without a label: an error where the labels are made here, else they may not be meant for learning."""
        rows = micro.step.samples.rows
        some = ", ".join(map(str, rows[:8].tolist())) + (", ..." if len(rows) > 8 else "")
        if self._form.corruption is not None:
            raise DataError(
                f"step {micro.step.number} (rows {some}) has no token that could be hidden, so its loss would be "
                "divided by 0; drop rows of special tokens only (loader.edit(loader.plan.ban(rows))), or use larger "
                "batches",
                row=int(rows[0]),
            )
        if not self._told:
            self._told = True
            logger.warning(
                "step %d (rows %s) has no label but %d: its num_items_in_batch is 0, and a loss divided by that is NaN",
                micro.step.number,
                some,
                IGNORE,
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}
