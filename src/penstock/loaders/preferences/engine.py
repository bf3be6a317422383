"""Batches of preferences: a plan over pairs, whose two sides are gathered for each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import BatchLayout, Tokens, collate, width
from penstock.batching.options import Options
from penstock.batching.supervision import supervised_tokens
from penstock.errors import ConfigError
from penstock.loaders.plan_engine import PlanEngine, Share
from penstock.loaders.preferences.batch import PreferenceBatch
from penstock.loaders.source import LoaderSource
from penstock.order.plan import Step
from penstock.order.samples import Samples
from penstock.store.gather import Held, Placed, TokenTable
from penstock.store.preferences import PairTable, read_column

Ints = npt.NDArray[np.int64]


def no_slices(context: str) -> ConfigError:
    """Error of a loader of preferences that is asked for slices of sequences."""
    return ConfigError(
        f"context={context!r} slices texts and chats, and answers of preferences are compared whole; leave out context"
    )


class _Share(Share):
    """Share of a rank in a step, with the length of each side and the rows whose answers are borrowed."""

    __slots__ = ("borrowed", "lengths", "others")

    others: Ints
    """Rows whose answers are paired with the prompts of this rank."""
    borrowed: int
    """Number of the first of them in the tables."""
    lengths: tuple[Ints, ...]


class PreferenceEngine(PlanEngine):
    """Batches of one rank of a plan over preferences, from any position on."""

    def __init__(self, source: LoaderSource, options: Options, *, whole_answers: bool, kl: bool) -> None:
        super().__init__([source], options)
        table = source.inputs.table
        self._sides: tuple[TokenTable, ...] = (table, table.rejected) if isinstance(table, PairTable) else (table,)
        self._whole_answers, self._kl = whole_answers, kl
        self._layout = replace(self._layout, fields=self._layout.fields | {"loss_mask"})
        self._wanted = source.layout.fields
        self._columns: dict[str, npt.NDArray[Any]] = {}
        if kl and table.rows < 2:
            raise ConfigError(f"kl=True pairs prompts with answers of other rows and needs 2 rows, got {table.rows}")

    def facts(self) -> dict[str, Any]:
        """Options of this kind of loader that decide its arrays, as plain values."""
        whole = "all" if self._whole_answers else "supervised"
        return {"completion": whole, "kl": self._kl, "loss_mask": "loss_mask" in self._wanted}

    def _share(self, step: Step) -> Share:
        mine = super()._share(step)
        share = _Share(step, mine.samples, mine.sources)
        share.others = np.zeros(0, np.int64)
        if self._kl:
            # The same samples with other rows are sharded in the same way.
            samples = step.samples
            others = partners_of(samples.rows, self._sides[0].rows)
            lent = Samples(samples.offsets, others, samples.starts, samples.lengths, samples.single)
            share.others = (
                super()._share(Step(step.number, step.epoch, lent, step.sources, step.names, step.wanted)).samples.rows
            )
        return share

    def _request(self, shares: list[Any]) -> int:
        rows = [rows for share in shares for rows in (share.samples.rows, share.others)]
        # Both sides of a row are in one part.
        return self._sides[0].request(np.concatenate(rows)) if rows else 0

    def _placed(self, shares: list[Any]) -> Iterator[Any]:
        if not shares:
            return
        own = np.concatenate([share.samples.rows for share in shares])
        rows = np.concatenate([own, *(share.others for share in shares)])
        nothing = np.zeros(len(rows), np.int64)
        prompts = self._column("prompt_length")[rows] if self._whole_answers else None
        tables: list[Placed] = []
        for side in self._sides:
            held = side.held()
            places = side.locate(rows, nothing, held)
            if prompts is None:
                tables.append(Placed(side, places, side.locate_mask(rows, nothing, held), held))
            else:
                tables.append(_Answers(side, places, prompts, held))
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
            self._check_files()
            yield self._build(share)

    def _build(self, share: Any) -> TrainingBatch:
        samples, layout, sides = share.samples, self._layout, len(self._sides)
        parts = len(samples.rows)
        numbers = np.arange(share.first, share.first + parts)
        offsets = np.concatenate([samples.offsets[:1], *(samples.offsets[1:] + n * parts for n in range(sides))])
        if not len(samples) or (layout.split and not parts):
            offsets, layout = np.zeros(sides + 1, np.int64), replace(layout, split=False)
        both = Samples(
            offsets,
            np.tile(numbers, sides),
            np.zeros(sides * parts, np.int64),
            np.concatenate(share.lengths),
            single=samples.single and len(offsets) == sides * parts + 1,
        )
        tokens_in_row = width(samples if layout.split else share.step.samples, layout)
        arrays = collate(both, np.repeat(np.arange(sides), parts), share.tables, layout, tokens_in_row)
        arrays["completion_mask"] = arrays["loss_mask"].astype(layout.integer)
        if "loss_mask" not in self._wanted:
            del arrays["loss_mask"]
        arrays["sides"] = sides
        if sides == 2 and layout.padding_free:
            arrays["chosen_tokens"] = int(share.lengths[0].sum())
        if sides == 1:
            arrays |= self._labelled(share, len(arrays["input_ids"]))
        if "num_items_in_batch" in arrays and self.rank.world_size > 1:
            arrays["num_items_in_batch"] = supervised_tokens(share.step.samples, share.step.sources, self._tables)
        tokens = int(sum(each.sum() for each in share.lengths))
        backend = get_backend(self.options.backend)
        return PreferenceBatch.of_collated(arrays, self._metadata(share), backend, tokens, packed=layout.joined)

    def _labelled(self, share: Any, count: int) -> dict[str, Any]:
        """Label of each row (of each document in packed rows), and the arrays of the KL term."""
        layout, samples = self._layout, share.samples
        labels = self._column("label")[samples.rows].astype(np.bool_)
        row_of = np.arange(len(samples.rows)) if layout.split else samples.numbers()
        found: dict[str, Any] = {"label": labels}
        if not (layout.packed or layout.padding_free):
            found["label"] = np.zeros(count, np.bool_)
            found["label"][row_of] = labels
        if not self._kl:
            return found
        prompts, begins, answers = self._room(samples.rows, share.others)
        numbers = np.arange(len(samples.rows))
        parts = Mismatched(share.first + numbers, share.borrowed + numbers, prompts, begins, answers, row_of)
        together = share.step.samples.rows if not layout.split else samples.rows
        others = share.others if layout.split else partners_of(together, self._sides[0].rows)
        whole = np.add(*self._room(together, others)[::2])
        tokens = -(-int(whole.max(initial=1)) // layout.multiple) * layout.multiple
        return found | collate_mismatched(parts, share.tables[0], layout, count=count, width=tokens)

    def _room(self, rows: Ints, others: Ints) -> tuple[Ints, Ints, Ints]:
        """Tokens of the prompts, starts of the other rows' answers, and tokens of those that fit after the prompts."""
        prompts, begins = (self._column("prompt_length")[each].astype(np.int64) for each in (rows, others))
        answers = self._sides[0].lengths(others) - begins
        limit = self.sources[0].sampling.length
        return prompts, begins, answers if limit is None else np.minimum(answers, limit - prompts)

    def _lengths(self, side: int, rows: Ints) -> Ints:
        table = self._sides[side]
        return table.lengths_chosen(rows) if isinstance(table, PairTable) else table.lengths(rows)

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Column with one number a row, read once."""
        if name not in self._columns:
            self._columns[name] = read_column(self._sides[0].stores, name)
        return self._columns[name]


class _Answers(Placed):
    """Rows of which every token after the prompt is supervised."""

    def __init__(self, table: TokenTable, places: Ints, prompts: npt.NDArray[Any], held: Held) -> None:
        super().__init__(table, places, None, held)
        self._prompts = prompts

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        prompts = np.maximum(self._prompts[rows] - starts, 0)
        for low, skipped, length in zip(at.tolist(), prompts.tolist(), lengths.tolist()):
            out[low + skipped : low + length] = True


@dataclass(frozen=True, slots=True)
class Mismatched:
    """Prompts with the answers of other rows, for KTO's KL term: prompt `rows[i]`, then the answer of `others[i]`."""

    rows: Ints
    others: Ints
    prompts: Ints
    """Tokens of the prompts of `rows`."""
    begins: Ints
    """Starts of the answers of `others`."""
    answers: Ints
    """Tokens of these answers that fit."""
    row_of: Ints
    """Row of the batch for each."""


def partners_of(rows: Ints, total: int) -> Ints:
    """Rows whose answers are paired with the prompts of a global batch: each the row before, the last for the first.

    A row that is alone in its batch takes the answer of the next row of the data.
    """
    return np.roll(rows, 1) if len(rows) != 1 else (rows + 1) % total


def collate_mismatched(
    parts: Mismatched, table: Tokens, layout: BatchLayout, *, count: int, width: int
) -> dict[str, npt.NDArray[Any]]:
    """Arrays `KL_input_ids`, `KL_attention_mask` and `KL_completion_mask` of `count` rows."""
    ids = np.full((count, width), layout.pad_id, layout.integer)
    attended = np.zeros((count, width), layout.integer)
    learned = np.zeros(count * width, np.bool_)
    whole = parts.prompts + parts.answers
    at = parts.row_of * width
    if layout.side == "left":
        at = at + width - whole
    table.copy(parts.rows, np.zeros_like(at), parts.prompts, ids.reshape(-1), at)
    table.copy(parts.others, parts.begins, parts.answers, ids.reshape(-1), at + parts.prompts)
    table.copy_mask(parts.others, parts.begins, parts.answers, learned, at + parts.prompts)
    for low, length in zip(at.tolist(), whole.tolist()):
        attended.reshape(-1)[low : low + length] = 1
    blank = np.setdiff1d(np.arange(count), parts.row_of)
    attended[blank, -1 if layout.side == "left" else 0] = 1
    return {
        "KL_input_ids": ids,
        "KL_attention_mask": attended,
        "KL_completion_mask": learned.reshape(count, width).astype(layout.integer),
    }
