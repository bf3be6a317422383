"""`FormatPreference`: pairs of answers to one prompt, or labelled answers, to tokens and masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged, list_array
from penstock.chat.chosen_rows import chosen_rows
from penstock.chat.format_chat import FormatChat, detect_format
from penstock.chat.problems import RowProblem, TooLongError, Violation, alone
from penstock.chat.render import ExplainedPart
from penstock.errors import ConfigError, SchemaError
from penstock.pipeline.metrics import TOKENS
from penstock.store.manifest import LABELS, label_column
from penstock.tokenizers.token_rows import token_slices
from penstock.transforms.columns import as_names, column
from penstock.transforms.counts import CountingTransform

__all__ = ["FormatPreference", "preference_kind"]

Ints = npt.NDArray[np.int64]
Kind = Literal["pairs", "labels"]
VERSION = 1
"""Goes up when the same rows would give other tokens or masks."""
POLICIES = ("error", "drop", "left", "right")
PROMPT_LENGTH = "prompt_length"
TOO_LONG, NO_ANSWER = "longer than max_length", "no prompt or no answer left after truncation"
CUT = {"left": "prompt cut on the left", "right": "truncated on the right"}
CUT_PROMPT = "prompt longer than max_prompt_length"


class PromptNotSharedError(RowProblem):
    """A pair whose sides do not begin with the same tokens."""


class LabelError(RowProblem):
    """A label that is neither true nor false."""


def preference_kind(schema: pa.Schema, format: str = "auto") -> Kind | None:
    """Kind of preference in the rows: pairs (chosen, rejected), labels (good or bad), or None."""
    try:
        shape = detect_format(schema) if format == "auto" else format
    except SchemaError:
        return None
    label = label_column(schema)
    if shape == "preference" and label is not None:
        raise SchemaError(
            f"the rows have pairs (chosen, rejected) and labels ({label!r}) both; drop or rename the columns of one"
        )
    if shape == "preference":
        return "pairs"
    return None if label is None else "labels"


class FormatPreference(CountingTransform):
    """Preferences as token ids and masks of the answers to compare.

        FormatPreference("models/tiny", max_length=2048, truncation="left")

    Pairs (columns `chosen` and `rejected`) give `chosen_input_ids`, `chosen_loss_mask`, `rejected_input_ids`,
    `rejected_loss_mask`; both sides begin with the same `prompt_length` tokens, which is checked row by row. Rows with
    a label (a boolean `label`, or `kto_tag`) give `input_ids`, `loss_mask`, `label` and `prompt_length`.

    - `tokenizer`, `template` and everything else: as of `FormatChat`. Of a labelled conversation the last answer is
      supervised, unless `train_on` is given.
    - `max_prompt_length`: a longer prompt loses its beginning, on both sides alike.
    - `max_length`, `truncation`: limit for each side with its prompt. Longer rows are an "error", or "drop"ped; "left"
      cuts the beginning of the prompt, the same on both sides, and "right" the end of the answers. A row without a
      prompt or without an answer is dropped. `counts` has the rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Path | None = None,
        *,
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        truncation: str = "error",
        keep: str | Iterable[str] = (),
        train_on: str | Iterable[str] | None = None,
        **chat: Any,
    ) -> None:
        super().__init__()
        if truncation not in POLICIES:
            hint = did_you_mean(str(truncation), POLICIES)
            raise ConfigError(f"truncation must be one of {', '.join(POLICIES)}, got {truncation!r}{hint}")
        for name, length in {"max_length": max_length, "max_prompt_length": max_prompt_length}.items():
            if length is not None and length < 1:
                raise ConfigError(f"{name} must be at least 1, got {length}")
        if train_on == "all":
            raise ConfigError("train_on='all' trains on prompts too, and preferences are about answers; leave it out")
        self.max_length, self.max_prompt_length, self.truncation = max_length, max_prompt_length, truncation
        self.keep = as_names(keep) if keep else ()
        made = ("label", PROMPT_LENGTH)
        if set(made) & set(self.keep):
            raise ConfigError(f"keep={list(self.keep)} has the name of a new column: {', '.join(made)}")
        self._train_on = train_on if train_on is None or isinstance(train_on, str) else tuple(train_on)
        self._chat = FormatChat(tokenizer, template, train_on=train_on or "assistant", keep=self.keep, **chat)
        self._options = {"template": template, "keep": self.keep, **chat}
        self._last_answer: FormatChat | None = None
        self.tokenizer, self.template = self._chat.tokenizer, self._chat.template
        self.gate, self.format = self._chat.gate, self._chat.format

    @property
    def json_columns(self) -> dict[str, tuple[str, ...]]:
        """Columns that the source should keep as JSON; see `Pipeline`."""
        return self._chat.json_columns

    def refuse_typed_json(self) -> None:
        """Refuse messages with typed objects inside: one Arrow type for all rows has changed them already."""
        self._chat.refuse_typed_json()

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        kind = self._kind_of(batch)
        with alone(batch):
            rows = self._read(batch, kind)
            problems = self._problems(rows)
            if problems:
                raise problems[0]
        return self._output(rows)

    def explain(self, row: pa.RecordBatch) -> list[tuple[str, list[ExplainedPart], str | None]]:
        """As of `FormatChat`, for the chosen and the rejected answer, or for the labelled one."""
        kind = self._kind_of(row)
        chats, _ = self._without_label(row, kind)
        return self._for(chats, kind).explain(chats)

    def check_rows(self, batch: pa.RecordBatch) -> list[Violation]:
        """All problems of the rows of a batch, instead of an error at the first."""
        kind = self._kind_of(batch)
        chats, _ = self._without_label(batch, kind)
        found = self._for(chats, kind).check_rows(chats)
        good = np.setdiff1d(np.arange(batch.num_rows), [violation.row for violation in found])
        if len(good):
            for problem in self._problems(self._read(chosen_rows(batch, good), kind)):
                found.append(Violation(int(good[problem.row or 0]), problem.kind, problem.reason, problem.shown or ""))
        return sorted(found, key=lambda violation: violation.row)

    @property
    def fingerprint(self) -> str:
        """Text that decides tokens and masks: part of the key of a store."""
        return orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS).decode()

    def describe(self) -> dict[str, Any]:
        """Everything that decides the output, as plain values."""
        return {
            "transform": "FormatPreference",
            "version": VERSION,
            "chat": self._chat.describe(),
            "train_on": self._train_on,
            "max_length": self.max_length,
            "max_prompt_length": self.max_prompt_length,
            "truncation": self.truncation,
        }

    def fit_budget(self, nbytes: int) -> None:
        """Limit the cache of the tokenizer to these bytes."""
        self._chat.fit_budget(nbytes)

    def __repr__(self) -> str:
        return repr(self._chat).replace("FormatChat(", "FormatPreference(", 1)

    def _kind_of(self, batch: pa.RecordBatch) -> Kind:
        kind = preference_kind(batch.schema, self.format)
        if kind is None:
            raise SchemaError(
                f"the columns {batch.schema.names} hold no preferences: pairs have 'chosen' and 'rejected', and "
                f"labelled rows a chat and a boolean {' or '.join(map(repr, LABELS))}"
            )
        return kind

    def _for(self, chats: pa.RecordBatch, kind: Kind) -> FormatChat:
        """The transform for these rows: of a labelled conversation, the last answer is supervised."""
        shape = self.format if self.format != "auto" else detect_format(chats)
        if self._train_on is not None or kind == "pairs" or shape == "prompt_completion":
            return self._chat
        if self._last_answer is None:
            self._last_answer = FormatChat(self.tokenizer, train_on="last", **self._options)
        return self._last_answer

    def _without_label(self, batch: pa.RecordBatch, kind: Kind) -> tuple[pa.RecordBatch, pa.Array | None]:
        """The chats, and their labels."""
        if kind == "pairs":
            return batch, None
        name = label_column(batch.schema)
        assert name is not None
        return batch.drop_columns([name]), column(batch, name)

    def _read(self, batch: pa.RecordBatch, kind: Kind) -> _PreferenceRows:
        chats, labels = self._without_label(batch, kind)
        made = self._for(chats, kind).transform(chats)
        prefixes = ("chosen_", "rejected_") if kind == "pairs" else ("",)
        sides = {prefix: _Side.of(made, prefix) for prefix in prefixes}
        return _PreferenceRows(made, sides, labels)

    def _problems(self, rows: _PreferenceRows) -> list[RowProblem]:
        """Problems of rows whose chats passed the gate."""
        found: dict[int, RowProblem] = {}
        for row in rows.bad_labels():
            found[row] = LabelError(f"the label is {rows.label_at(row)!r}, expected true or false", row=row)
        first = next(iter(rows.sides.values()))
        for row in np.flatnonzero(first.prompts == 0).tolist():
            found.setdefault(row, PromptNotSharedError("there is no prompt before the answer", row=row))
        for row in rows.unshared():
            found.setdefault(row, PromptNotSharedError(self._difference(rows, row), row=row))
        if self.max_length is not None and self.truncation == "error":
            starts = self._prompt_cuts(first.prompts)
            for prefix, side in rows.sides.items():
                for row in np.flatnonzero(side.lengths - starts > self.max_length).tolist():
                    which = f"{prefix.rstrip('_')}: " if prefix else ""
                    found.setdefault(
                        row,
                        TooLongError(
                            f"{which}{side.lengths[row]} tokens with the prompt, more than max_length="
                            f"{self.max_length}; raise it, or pass truncation='left' (cut the prompt), 'right' (cut "
                            "the answers) or 'drop'",
                            row=row,
                        ),
                    )
        return [found[row] for row in sorted(found)]

    def _difference(self, rows: _PreferenceRows, row: int) -> str:
        chosen, rejected = (side.prompt(row) for side in rows.sides.values())
        same = int(np.argmin(np.append(chosen[: len(rejected)] == rejected[: len(chosen)], False)))
        texts = [repr(self.tokenizer.decode(part[same : same + 8])) for part in (chosen, rejected)]
        return (
            "chosen and rejected do not begin with the same prompt: template or tokenizer write it differently "
            f"before each answer, from token {same} on ({texts[0]} before chosen, {texts[1]} before rejected)"
        )

    def _prompt_cuts(self, prompts: Ints) -> Ints:
        """Tokens that each prompt loses at its beginning for being longer than `max_prompt_length`."""
        if self.max_prompt_length is None:
            return np.zeros(len(prompts), np.int64)
        return np.maximum(prompts - self.max_prompt_length, 0)

    def _output(self, rows: _PreferenceRows) -> pa.RecordBatch:
        sides = list(rows.sides.values())
        prompts = sides[0].prompts
        starts = self._prompt_cuts(prompts)
        by_prompt = starts > 0
        longest = np.max([side.lengths for side in sides], axis=0) - starts
        limit = self.max_length if self.max_length is not None else np.iinfo(np.int64).max
        long = longest > limit
        kept = ~long if self.truncation == "drop" else np.ones(len(prompts), np.bool_)
        if self.truncation == "left":
            starts = starts + np.where(long, longest - limit, 0)
            kept &= starts < prompts
        stops = [
            np.minimum(side.lengths, starts + limit) if self.truncation == "right" else side.lengths for side in sides
        ]
        for side, ends in zip(sides, stops):
            kept &= side.supervised(prompts, ends) | (self.truncation != "right")
        self._count(rows, kept, long, by_prompt, [int((ends - starts)[kept].sum()) for ends in stops])
        numbers = np.flatnonzero(kept)
        made: dict[pa.Field, pa.Array] = {}
        if self.keep:
            taken = chosen_rows(rows.made, numbers)
            made |= {taken.schema.field(name): column(taken, name) for name in self.keep}
        if rows.labels is not None:
            made[pa.field("label", pa.bool_())] = rows.labels.cast(pa.bool_()).take(pa.array(numbers))
        made[pa.field(PROMPT_LENGTH, pa.int32())] = pa.array((prompts - starts)[kept], pa.int32())
        for (prefix, side), ends in zip(rows.sides.items(), stops):
            first, last = (side.offsets[:-1] + starts)[kept], (side.offsets[:-1] + ends)[kept]
            for name, values in {"input_ids": side.ids, "loss_mask": side.mask}.items():
                dtype = rows.made.schema.field(prefix + name).type.value_type
                lists = list_array(token_slices(values, first, last), dtype)
                made[pa.field(prefix + name, lists.type)] = lists
        return pa.RecordBatch.from_arrays(list(made.values()), schema=pa.schema(list(made)))

    def _count(self, rows: _PreferenceRows, kept: Any, long: Any, by_prompt: Any, left: list[int]) -> None:
        gone = TOO_LONG if self.truncation == "drop" else NO_ANSWER
        self.count({gone: int(np.count_nonzero(~kept))})
        cut = CUT.get(self.truncation, TOO_LONG)
        self.count_kept({cut: int(np.count_nonzero(long & kept)), CUT_PROMPT: int(np.count_nonzero(by_prompt & kept))})
        whole = [side.lengths for side in rows.sides.values()]
        lost = sum(int(lengths[~kept].sum()) for lengths in whole)
        missing = sum(int(lengths[kept].sum()) for lengths in whole) - sum(left)
        reason = cut if self.truncation in CUT and long.any() else CUT_PROMPT
        self.count_kept({TOKENS + gone: lost, TOKENS + reason: missing})


@dataclass(frozen=True, slots=True)
class _Side:
    """Tokens of one side of some rows, and the length of each prompt."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_]
    offsets: Ints
    prompts: Ints

    @classmethod
    def of(cls, made: pa.RecordBatch, prefix: str) -> _Side:
        tokens, mask = column(made, f"{prefix}input_ids"), column(made, f"{prefix}loss_mask")
        ids = Ragged.of_lists(tokens)
        flat, bounds, learned = ids.values, ids.offsets, Ragged.of_lists(mask).values
        # The first supervised token of a row, or its end, by a search in all supervised positions.
        places = np.append(np.flatnonzero(learned), len(flat))
        first = np.minimum(places[np.searchsorted(places, bounds[:-1])], bounds[1:])
        return cls(flat, learned, bounds, first - bounds[:-1])

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def prompt(self, row: int) -> npt.NDArray[Any]:
        return self.ids[self.offsets[row] : self.offsets[row] + self.prompts[row]]

    def supervised(self, starts: Ints, stops: Ints) -> npt.NDArray[np.bool_]:
        """True for each row with a supervised token in this range."""
        total = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        low = self.offsets[:-1] + starts
        found: npt.NDArray[np.bool_] = total[np.maximum(self.offsets[:-1] + stops, low)] > total[low]
        return found


@dataclass(frozen=True, slots=True)
class _PreferenceRows:
    """Rows as tokens, before truncation."""

    made: pa.RecordBatch
    sides: Mapping[str, _Side]
    labels: pa.Array | None

    def bad_labels(self) -> list[int]:
        if self.labels is None:
            return []
        if pa.types.is_boolean(self.labels.type):
            return np.flatnonzero(self.labels.is_null().to_numpy(zero_copy_only=False)).tolist()
        return [row for row, value in enumerate(self.labels.to_pylist()) if value not in (0, 1)]

    def label_at(self, row: int) -> Any:
        return None if self.labels is None else self.labels[row].as_py()

    def unshared(self) -> list[int]:
        """Rows whose sides begin with different prompts."""
        if len(self.sides) < 2:
            return []
        one, other = self.sides.values()
        differ = one.prompts != other.prompts
        alike = np.flatnonzero(~differ)
        lengths = one.prompts[alike]
        moves = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        pair = [side.ids[np.repeat(side.offsets[:-1][alike], lengths) + moves] for side in (one, other)]
        owner = np.repeat(alike, lengths)
        differ[owner[pair[0] != pair[1]]] = True
        return np.flatnonzero(differ).tolist()
