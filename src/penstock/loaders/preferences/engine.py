"""Batches of preferences by a plan: an order over pairs, both sides of which are gathered for each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import collate, width
from penstock.batching.options import Options
from penstock.errors import ConfigError
from penstock.loaders.plan_engine import PlanEngine, Share
from penstock.loaders.preferences.batch import PreferenceBatch
from penstock.loaders.preferences.mismatch import Mismatched, collate_mismatched, partners_of
from penstock.loaders.sampling import LoaderSource
from penstock.order.plan import Step
from penstock.order.samples import Samples
from penstock.store.gather import Placed, TokenTable
from penstock.store.preferences import PairTable, read_column

__all__ = ["PreferenceEngine"]

Ints = npt.NDArray[np.int64]


class _Share(Share):
    """What a rank takes of a step, with the length of each side and whose answers are borrowed."""

    __slots__ = ("borrowed", "lengths", "others")

    others: Ints
    """Rows whose answers go with the prompts of this rank."""
    borrowed: int
    """The first of them in the tables."""
    lengths: tuple[Ints, ...]


class PreferenceEngine(PlanEngine):
    """The batches of one rank of a plan over preferences, from any position on."""

    batch_class: type[TrainingBatch] = PreferenceBatch

    def __init__(self, stock: LoaderSource, options: Options, *, everything: bool, kl: bool) -> None:
        super().__init__([stock], options)
        table = stock.inputs.table
        self._sides: tuple[TokenTable, ...] = (table, table.rejected) if isinstance(table, PairTable) else (table,)
        self._everything, self._kl = everything, kl
        self._form = replace(self._form, fields=self._form.fields | {"loss_mask"})
        self._wanted = stock.form.fields
        self._columns: dict[str, npt.NDArray[Any]] = {}
        if kl and table.rows < 2:
            raise ConfigError(f"kl=True puts answers behind the prompts of others, and there is {table.rows} row only")

    def _share(self, step: Step) -> Share:
        mine = super()._share(step)
        share = _Share(step, mine.samples, mine.sources)
        share.others = np.zeros(0, np.int64)
        if self._kl:
            # The same samples with other rows are dealt to ranks in the same way.
            samples = step.samples
            others = partners_of(samples.rows, self._sides[0].rows)
            lent = Samples(samples.offsets, others, samples.starts, samples.lengths, samples.single)
            share.others = (
                super()._share(Step(step.number, step.epoch, lent, step.sources, step.names, step.wanted)).samples.rows
            )
        return share

    def _placed(self, shares: list[Any]) -> Iterator[Any]:
        if not shares:
            return
        own = np.concatenate([share.samples.rows for share in shares])
        rows = np.concatenate([own, *(share.others for share in shares)])
        nothing = np.zeros(len(rows), np.int64)
        prompts = self._column("prompt_length")[rows] if self._everything else None
        tables: list[Placed] = []
        for side in self._sides:
            places = side.locate(rows, nothing)
            if prompts is None:
                tables.append(Placed(side, places, side.locate_mask(rows, nothing)))
            else:
                tables.append(_Answers(side, places, prompts))
        lengths = [self._lengths(number, own) for number in range(len(self._sides))]
        low, borrowed = 0, len(own)
        for share in shares:
            high = low + len(share.samples.rows)
            share.tables, share.first, share.borrowed = tables, low, borrowed
            share.lengths = tuple(each[low:high] for each in lengths)
            yield share
            low, borrowed = high, borrowed + len(share.others)

    def _built(self, shares: list[Any]) -> Iterator[TrainingBatch]:
        for share in shares:
            self._look_at_files()
            yield self._build(share)

    def _build(self, share: Any) -> TrainingBatch:
        samples, form, sides = share.samples, self._form, len(self._sides)
        parts = len(samples.rows)
        numbers = np.arange(share.first, share.first + parts)
        offsets = np.concatenate([samples.offsets[:1], *(samples.offsets[1:] + n * parts for n in range(sides))])
        if not len(samples) or (form.split and not parts):
            offsets, form = np.zeros(sides + 1, np.int64), replace(form, split=False)
        both = Samples(
            offsets,
            np.tile(numbers, sides),
            np.zeros(sides * parts, np.int64),
            np.concatenate(share.lengths),
            single=samples.single and len(offsets) == sides * parts + 1,
        )
        tokens_in_row = width(samples if form.split else share.step.samples, form)
        arrays = collate(both, np.repeat(np.arange(sides), parts), share.tables, form, tokens_in_row)
        arrays["completion_mask"] = arrays["loss_mask"].astype(form.integer)
        if "loss_mask" not in self._wanted:
            del arrays["loss_mask"]
        arrays["sides"] = sides
        if sides == 2 and form.padding_free:
            arrays["chosen_tokens"] = int(share.lengths[0].sum())
        if sides == 1:
            arrays |= self._labelled(share, len(arrays["input_ids"]))
        return self._finish(share, arrays, int(sum(each.sum() for each in share.lengths)))

    def _labelled(self, share: Any, count: int) -> dict[str, Any]:
        """The label of each row, of each document where rows hold several, and what the KL term needs."""
        form, samples = self._form, share.samples
        labels = self._column("label")[samples.rows].astype(np.bool_)
        row_of = np.arange(len(samples.rows)) if form.split else samples.numbers()
        found: dict[str, Any] = {"label": labels}
        if not (form.packed or form.padding_free):
            found["label"] = np.zeros(count, np.bool_)
            found["label"][row_of] = labels
        if not self._kl:
            return found
        prompts, begins, answers = self._room(samples.rows, share.others)
        numbers = np.arange(len(samples.rows))
        parts = Mismatched(share.first + numbers, share.borrowed + numbers, prompts, begins, answers, row_of)
        together = share.step.samples.rows if not form.split else samples.rows
        others = share.others if form.split else partners_of(together, self._sides[0].rows)
        whole = np.add(*self._room(together, others)[::2])
        tokens = -(-int(whole.max(initial=1)) // form.multiple) * form.multiple
        return found | collate_mismatched(parts, share.tables[0], form, count=count, width=tokens)

    def _room(self, rows: Ints, others: Ints) -> tuple[Ints, Ints, Ints]:
        """Tokens of prompts, where the answers of others begin, and how many of their tokens fit behind the prompts."""
        prompts, begins = (self._column("prompt_length")[each].astype(np.int64) for each in (rows, others))
        answers = self._sides[0].lengths(others) - begins
        limit = self.stocks[0].sampling.length
        return prompts, begins, answers if limit is None else np.minimum(answers, limit - prompts)

    def _lengths(self, side: int, rows: Ints) -> Ints:
        table = self._sides[side]
        return table.lengths_chosen(rows) if isinstance(table, PairTable) else table.lengths(rows)

    def _column(self, name: str) -> npt.NDArray[Any]:
        """A number of every row, read once."""
        if name not in self._columns:
            self._columns[name] = read_column(self._sides[0].stores, name)
        return self._columns[name]


class _Answers(Placed):
    """Rows of which everything behind the prompt counts."""

    def __init__(self, table: TokenTable, places: Ints, prompts: npt.NDArray[Any]) -> None:
        super().__init__(table, places, None)
        self._prompts = prompts

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        behind = np.maximum(self._prompts[rows] - starts, 0)
        for low, skipped, length in zip(at.tolist(), behind.tolist(), lengths.tolist()):
            out[low + skipped : low + length] = True
