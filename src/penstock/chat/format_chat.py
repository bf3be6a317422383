"""Chat data becomes tokens and the mask of those to train on: `ToMessages`, `FormatChat` and the supervision gate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock.chat.bound_template import ChatOptions, bind_template
from penstock.chat.compile.prover import Layouts
from penstock.chat.formats import (
    conversations,
    detect_format,
    json_columns,
    refuse_flags,
    refuse_label_values,
    refuse_labels,
    sides_of,
    typed_json,
)
from penstock.chat.gate import Gate
from penstock.chat.masks import SpanTokens
from penstock.chat.messages import ROLES, Conversation
from penstock.chat.parts import KINDS
from penstock.chat.problems import RowProblem, TooLongError, Violation, alone
from penstock.chat.render import EVERYTHING, ExplainedPart, explain
from penstock.chat.rendered_batch import RenderedBatch, render_batch
from penstock.chat.templates import BUILT_IN, Markers, load_template, thought_sample
from penstock.chat.to_messages import ToMessages, checked_format
from penstock.chat.truncation import POLICIES, TruncatedPieces, cut, gathered, in_all, tally
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.pipeline.metrics import TOKENS, tokens_in
from penstock.transforms.columns import as_names, column, take_rows
from penstock.transforms.counts import CountingTransform
from penstock.transforms.tokenization import load_tokenizer

__all__ = ["FormatChat", "Gate", "RowProblem", "ToMessages", "Violation", "detect_format", "json_columns"]

VERSION = 3
"""Goes up when the same rows would give other tokens or masks."""

logger = logging.getLogger(__name__)


class FormatChat(CountingTransform):
    """Conversations as token ids and a mask of the tokens to train on: columns `input_ids` and `loss_mask`.

        FormatChat("models/tiny", train_on="last")                # the template that comes with the tokenizer
        FormatChat(tokenizer, "chatml", max_length=4096, truncation="drop")

    - `template`: one of the built-in ones, a .jinja file, or a Jinja text; without it, the tokenizer's own.
    - `train_on`: "assistant" turns, the "last" of them, "all" of the text, "flags" (messages that say so themselves),
      or a list of roles. A message's own flag (`train`, `training`, `weight`, ...) has the last word.
    - `include_eot`: whether the token that ends a turn is trained on. `end_of_turn` says which, if it is not what the
      template writes behind an answer.
    - `markers`: what opens an assistant turn in the text and what ends it, for templates whose turns cannot be found
      otherwise.
    - `max_length`, `truncation`: rows with more tokens are an "error", or "drop"ped, or cut on the "left" or "right",
      or "split" into pieces. What is left without a token to train on goes too. `counts` has the rows, `dropped_tokens`
      the tokens. The cut comes after the gate and heeds no turns: what "left" and "split" leave may begin in the
      middle of a prompt, without BOS; what "right" and "split" leave may end without the token that ends the turn.
    - `gate`: the checks each whole row has to pass; see `Gate`. A row that fails raises an error that shows it. A
      mapping of switches does as well, as in a configuration file.
    - `keep`: columns to keep beside the new ones.
    - `now`: the time, for templates that ask; a text such as "2026-01-31" does as well.
    - `allow_lost`: kinds of parts that the template may leave out: "earlier_thoughts", "thoughts",
      "text_beside_calls", "tools" and others (docs/chat.md). Everything else a row says must be in its text, once, as
      it is and in order. What is lost is counted in the report.
    - `variables`: more variables for the template, such as `{"enable_thinking": False}`.
    - `special_tokens`: what must be one token of the vocabulary, if not what looks like one in the template.

    The mask comes from where the turns are in the text and where the tokens of one single tokenisation are in it; a
    token belongs to the turn in which it begins. Preferences give two of each column, `chosen_...` and `rejected_...`.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Path | None = None,
        *,
        train_on: str | Iterable[str] = "assistant",
        include_eot: bool = True,
        max_length: int | None = None,
        truncation: str = "error",
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        gate: Gate | Mapping[str, bool] = Gate(),  # noqa: B008 - a frozen value
        keep: str | Iterable[str] = (),
        markers: Markers | None = None,
        end_of_turn: str | Sequence[str] | None = None,
        special_tokens: Sequence[str] | None = None,
        variables: Mapping[str, Any] | None = None,
        now: datetime | date | str | None = None,
        allow_lost: Iterable[str] = (),
    ) -> None:
        super().__init__()
        if truncation not in POLICIES:
            raise ConfigError(f"truncation must be one of {', '.join(POLICIES)}, got {truncation!r}")
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length must be at least 1, got {max_length}")
        self.tokenizer = load_tokenizer(tokenizer)
        self.template = load_template(template, self.tokenizer.chat_template)
        self.train_on = _checked_roles(train_on)
        self.include_eot, self.max_length, self.truncation = include_eot, max_length, truncation
        self.format = checked_format(format, columns)
        self.columns = dict(columns) if columns is not None else None
        self.keep = as_names(keep) if keep else ()
        made = [prefix + name for prefix in ("", "chosen_", "rejected_") for name in ("input_ids", "loss_mask")]
        if set(made) & set(self.keep):
            raise ConfigError(f"keep={list(self.keep)} has a name that is made here: {', '.join(made)}")
        self.gate = Gate.of(gate)
        self.allow_lost = _checked_kinds(allow_lost)
        asked = ChatOptions(
            self.train_on,
            include_eot,
            self.gate,
            markers,
            end_of_turn,
            special_tokens,
            variables or {},
            _checked_time(now),
            frozenset(self.allow_lost),
        )
        self._renderer, self._checker = bind_template(self.tokenizer, self.template, asked)
        self._layouts = Layouts(self._renderer)
        self._typed_json = True
        self._try_on_a_sample()

    @property
    def json_columns(self) -> dict[str, tuple[str, ...]]:
        """Columns that are to reach it as the JSON they are in the file; see `Pipeline`."""
        return json_columns((self.columns or {}).values())

    def refuse_typed_json(self) -> None:
        """Take no objects inside of messages as types: in them rows have changed each other already."""
        self._typed_json = False

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name = self._format_of(batch)
        sides = []
        with alone(batch):
            for side in render_batch(self._layouts, batch, name, self.columns):
                tokens, found = self._tokens(side)
                if found:
                    raise found[0]
                sides.append(tokens)
                self.count_kept({f"lost: {kind}": n for kind, n in side.lost.items()})
            return self._delivered(batch, sides_of(name), sides)

    def explain(self, row: pa.RecordBatch) -> list[tuple[str, list[ExplainedPart], str | None]]:
        """For each side of one row: where every part of it went, and what the row is refused for, if it is.

        Most rows have one side, called ""; preferences have "chosen" and "rejected".
        """
        name = self._format_of(row)
        (made,) = conversations(row, name, self.columns, input_heading=self.template.input_heading)
        if isinstance(made, RowProblem):
            raise made.unnumbered()
        return [(prefix.rstrip("_"), *explain(self._renderer, side)) for prefix, side in zip(sides_of(name), made)]

    def check_rows(self, batch: pa.RecordBatch) -> list[Violation]:
        """Everything the gate has against the rows of a batch, instead of an error at the first."""
        name = self._format_of(batch)
        return sorted(self._violations(batch, name), key=lambda violation: violation.row)

    def _violations(self, batch: pa.RecordBatch, name: str) -> list[Violation]:
        """As `check_rows`. If a row makes it all fail, each half by itself, down to that row."""
        try:
            return self._checked(batch, name)
        except (ConfigError, SchemaError):
            raise
        except ValueError as error:
            if batch.num_rows == 1:
                kind = error.kind if isinstance(error, RowProblem) else "cannot be encoded"
                reason = error.reason if isinstance(error, DataError) else str(error)
                return [Violation(0, kind, reason.removeprefix("row 0 of the batch: "))]
        half = batch.num_rows // 2
        behind = self._violations(batch[half:], name)
        return self._violations(batch[:half], name) + [replace(v, row=v.row + half) for v in behind]

    def _checked(self, batch: pa.RecordBatch, name: str) -> list[Violation]:
        prefixes = sides_of(name)
        try:
            sides = list(render_batch(self._layouts, batch, name, self.columns))
        except RowProblem:
            pass
        else:
            return [found for prefix, side in zip(prefixes, sides) for found in self._found(side, prefix)]
        violations: list[Violation] = []
        rows = conversations(batch, name, self.columns, input_heading=self.template.input_heading)
        for i, prefix in enumerate(prefixes):
            good, numbers = [], []
            for at, row in enumerate(rows):
                if isinstance(row, RowProblem):
                    violations += [_violation(row, at, "")] if i == 0 else []
                    continue
                try:
                    good.append(self._renderer.render(row[i]))
                    numbers.append(at)
                except RowProblem as problem:
                    violations.append(_violation(problem, at, prefix))
            violations += [replace(v, row=numbers[v.row]) for v in self._found(RenderedBatch.of(good), prefix)]
        return violations

    def _found(self, side: RenderedBatch, prefix: str) -> list[Violation]:
        """What is wrong with rows that could be rendered."""
        tokens, problems = self._tokens(side)
        violations = [_violation(problem, problem.row or 0, prefix) for problem in problems]
        if self.max_length is not None and self.truncation == "error":
            lengths = np.diff(tokens.offsets)
            for row in np.flatnonzero(lengths > self.max_length).tolist():
                problem = TooLongError(f"{lengths[row]} tokens, more than max_length={self.max_length}")
                violations.append(_violation(problem, row, prefix))
        return violations

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Tokens that are in no row, by reason, since the start or the last `reset`."""
        return tokens_in(self._changes.totals())

    @property
    def fingerprint(self) -> str:
        """A text that is the same exactly when the tokens and masks are: for the key of what is stored."""
        return orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS).decode()

    def describe(self) -> dict[str, Any]:
        """Everything that decides the output, as plain values."""
        renderer = self._renderer
        return {
            "transform": "FormatChat",
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "template": xxhash.xxh3_128_hexdigest(self.template.source.encode()),
            "variables": dict(renderer.variables),
            "now": renderer.now.isoformat() if renderer.now is not None else None,
            "markers": renderer.markers,
            "train_on": self.train_on,
            "include_eot": self.include_eot,
            "end_of_turn": renderer.terminators,
            "max_length": self.max_length,
            "truncation": self.truncation,
            "gate": asdict(self.gate),
            "allow_lost": list(self.allow_lost),
            "closing": [renderer.closing, renderer.call_closing],
            "format": self.format,
            "columns": self.columns,
            "keep": list(self.keep),
        }

    def fit_budget(self, nbytes: int) -> None:
        """Load what the first batch needs, and have the tokenizer remember no more than fits."""
        fit = getattr(self.tokenizer, "fit_budget", None)
        if fit is not None:
            fit(nbytes, parse_special=True)

    def __repr__(self) -> str:
        name = self.template.name if self.template.name in BUILT_IN else "template"
        return f"FormatChat({self.tokenizer.name}, {name}, train_on={self.train_on!r})"

    def _try_on_a_sample(self) -> None:
        """Render sample conversations now, so that a template that fits no row fails at construction."""
        keys = self._renderer.traits.thought_keys
        plain = self._renderer.sample(1)
        samples = {"a sample conversation": plain}
        if keys:
            samples["a sample conversation with thoughts"] = thought_sample(keys[0], plain.tools)
        problems = {name: self._tried(conversation) for name, conversation in samples.items()}
        refused = {name: problem for name, problem in problems.items() if problem is not None}
        if len(refused) == len(samples):
            name, problem = next(iter(refused.items()))
            raise ConfigError(f"{name} does not pass the gate: {problem.unnumbered()}") from problem
        longer = self._tried(self._renderer.sample(2))
        if longer is not None and not refused:
            refused["a sample conversation of several turns"] = longer
        for name, problem in refused.items():
            logger.warning("%s: rows like %s will be refused: %s", self.template.name, name, problem.unnumbered())
        source = "its generation blocks" if self.template.program.has_generation else "the prompt for each turn"
        logger.info("%s: turns are found by %s", self.template.name, source)

    def _tried(self, conversation: Conversation) -> RowProblem | None:
        everything = self.train_on == EVERYTHING
        renderer = self._renderer if everything else replace(self._renderer, train_on="assistant")
        try:
            _, found = self._tokens(RenderedBatch.of([renderer.render(conversation)]))
        except RowProblem as problem:
            return problem
        except DataError as error:
            logger.info("%s could not be tried on a sample: %s", self.template.name, error)
            return None
        return found[0] if found else None

    def _format_of(self, batch: pa.RecordBatch) -> str:
        name = self.format if self.format != "auto" else detect_format(batch)
        refuse_labels(batch.schema, self.keep)
        refuse_label_values(batch, self.keep)
        refuse_flags(batch.schema, self.keep)
        typed = None if self._typed_json else typed_json(batch, self.json_columns)
        if typed is not None:
            raise SchemaError(
                f"the column {typed!r} has objects in it, and a stage before has made one type of them for all rows: "
                "numbers and keys of a row depend on other rows; put FormatChat first, or have the stage before it "
                "return the column as JSON text"
            )
        if name == "preference" and self.truncation == "split" and self.max_length is not None:
            raise SchemaError("preference pairs cannot be split; pass truncation='right', 'left', 'drop' or 'error'")
        return name

    def _tokens(self, side: RenderedBatch) -> tuple[SpanTokens, list[RowProblem]]:
        """The tokens of one batch with their supervised stretches, and what the gate has against them."""
        everything = self.train_on == EVERYTHING
        tokens = SpanTokens.of(self.tokenizer.encode_spans(side.spans.texts, parse_special=True), side.spans)
        if not everything:
            self._checker.settle_ends(tokens, side.spans)
        return tokens, self._checker.problems(tokens, side, everything=everything)

    def _delivered(self, batch: pa.RecordBatch, prefixes: tuple[str, ...], sides: list[SpanTokens]) -> pa.RecordBatch:
        masks = [tokens.mask() for tokens in sides]
        supervised = self.gate.supervised
        pieces: list[TruncatedPieces] = []
        for tokens, mask in zip(sides, masks):
            pieces.append(cut(tokens.offsets, mask, self.max_length, self.truncation, supervised=supervised))
        if len(pieces) > 1:
            pieces = in_all(pieces)
        if self.max_length is not None:
            cost = tally([tokens.offsets for tokens in sides], pieces, self.truncation)
            self.count(cost.dropped)
            self.count_kept(cost.changed)
            self.count_kept({TOKENS + reason: n for reason, n in cost.tokens.items()})
        made: dict[pa.Field, pa.Array] = {}
        if self.keep:
            kept = take_rows(batch, pieces[0].rows)
            made |= {kept.schema.field(name): column(kept, name) for name in self.keep}
        for prefix, tokens, mask, piece in zip(prefixes, sides, masks, pieces):
            lists = {
                "input_ids": _listed(*gathered(tokens.ids, piece), self.tokenizer.dtype),
                "loss_mask": _listed(*gathered(mask, piece), pa.bool_()),
            }
            made |= {pa.field(prefix + name, values.type): values for name, values in lists.items()}
        return pa.RecordBatch.from_arrays(list(made.values()), schema=pa.schema(list(made)))


def _checked_roles(train_on: str | Iterable[str]) -> str | tuple[str, ...]:
    if isinstance(train_on, str):
        if train_on not in ("assistant", "last", EVERYTHING, "flags"):
            raise ConfigError(
                f"train_on must be 'assistant', 'last', 'all', 'flags' or a list of roles, got {train_on!r}"
            )
        return train_on
    roles = tuple(train_on)
    if not roles or any(role not in ROLES for role in roles):
        raise ConfigError(f"train_on must list roles of {', '.join(ROLES)}, got {list(roles)}")
    return roles


def _checked_time(given: datetime | date | str | None) -> datetime | None:
    if given is None or isinstance(given, datetime):
        return given
    try:
        return datetime.fromisoformat(str(given))
    except ValueError:
        raise ConfigError(f"now must be a time such as 2026-01-31 or 2026-01-31T12:00, got {given!r}") from None


def _checked_kinds(given: Iterable[str]) -> tuple[str, ...]:
    kinds = (given,) if isinstance(given, str) else tuple(given)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"allow_lost has no kind {unknown[0]!r}; it has {', '.join(KINDS)}")
    return tuple(sorted(set(kinds)))


def _violation(problem: RowProblem, row: int, prefix: str) -> Violation:
    side = f"{prefix.rstrip('_')}: " if prefix else ""
    return Violation(row, problem.kind, side + problem.reason, problem.shown or "")


def _listed(values: np.ndarray[Any, Any], bounds: np.ndarray[Any, np.dtype[np.int64]], dtype: pa.DataType) -> pa.Array:
    if bounds[-1] >= 2**31:
        raise SchemaError(f"a batch of {bounds[-1]} tokens is too large; read with smaller batches")
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(values).cast(dtype))
