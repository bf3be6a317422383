"""`FormatChat`: chats to token ids and the mask of supervised tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import orjson
import pyarrow as pa

from penstock.arrays.ragged import list_array
from penstock.arrays.truncation import Policy, Truncation
from penstock.chat.bound_template import ChatOptions, bind_template
from penstock.chat.chosen_rows import chosen_rows
from penstock.chat.compile.prover import Layouts
from penstock.chat.formats import (
    checked_format,
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
from penstock.chat.masks import Flags, Ints, SpanTokens
from penstock.chat.messages import ROLES, Conversation
from penstock.chat.parts import KINDS
from penstock.chat.problems import RowProblem, TooLongError, Violation, alone
from penstock.chat.render import EVERYTHING, ExplainedPart, explain
from penstock.chat.rendered_batch import RenderedBatch, render_batch
from penstock.chat.templates import BUILT_IN, ChatTemplate, TemplateSettings, load_template, thought_sample
from penstock.chat.to_messages import ToMessages
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.pipeline.metrics import TOKENS, tokens_in
from penstock.tokenizers.token_rows import token_slices
from penstock.transforms.columns import as_names, column
from penstock.transforms.counts import CountingTransform
from penstock.transforms.tokenization import load_tokenizer

__all__ = [
    "CHAT_OPTIONS",
    "FormatChat",
    "Gate",
    "RowProblem",
    "ToMessages",
    "Violation",
    "detect_format",
    "json_columns",
]


VERSION = 3
"""Goes up when the same rows would give other tokens or masks."""
CHAT_OPTIONS = ("train_on", "include_eot", "format", "columns", "gate", "allow_lost", *TemplateSettings.__annotations__)
"""Options of `FormatChat` that a loader passes on, as `chat={...}`."""

logger = logging.getLogger(__name__)


class FormatChat(CountingTransform):
    """Conversations as token ids and a mask of the supervised tokens: columns `input_ids` and `loss_mask`.

        FormatChat("models/tiny", train_on="last")                # the template that comes with the tokenizer
        FormatChat(tokenizer, "chatml", max_length=4096, truncation="drop")

    - `template`: a built-in name, a .jinja file, Jinja text, or a `ChatTemplate`; without it, the tokenizer's own. The
      settings of a `ChatTemplate` (`markers`, `end_of_turn`, `special_tokens`, `variables`, `now`) are keywords too.
    - `train_on`: "assistant" turns, the "last" of them, "all" of the text, "flags" (messages that carry a flag), or a
      list of roles. A message's own flag (`train`, `training`, `weight`, ...) overrides it.
    - `include_eot`: supervise the token that ends a turn.
    - `max_length`, `truncation`: rows with more tokens are an "error", or "drop"ped, or cut on the "left" or "right",
      or "split" into pieces; or a `Truncation`. Pieces without a supervised token are dropped. `counts` has the rows,
      `dropped_tokens` the tokens. Truncation comes after the gate and ignores turns: after "left" and "split" a row may
      begin in the middle of a prompt, without BOS; after "right" and "split" it may end without the end-of-turn token.
    - `format`, `columns`: the chat format of the rows, or which column holds which role. By default it is detected.
    - `gate`: the checks each row has to pass; see `Gate`. A row that fails raises an error that shows the row. A
      mapping of switches works too, as in a configuration file.
    - `keep`: columns to keep.
    - `allow_lost`: kinds of parts that the template may leave out: "earlier_thoughts", "thoughts",
      "text_beside_calls", "tools" and others (docs/chat.md). Everything else a row says must be in its text, once,
      unchanged and in order. Lost parts are counted in the report.

    The mask comes from the positions of the turns in the text and of the tokens in the text, in one tokenization; a
    token belongs to the turn in which it begins. Preferences give two of each column, `chosen_...` and `rejected_...`.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Path | ChatTemplate | None = None,
        *,
        train_on: str | Iterable[str] = "assistant",
        include_eot: bool = True,
        max_length: int | None = None,
        truncation: str | Truncation = "error",
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        gate: Gate | Mapping[str, bool] = Gate(),  # noqa: B008 - a frozen value
        keep: str | Iterable[str] = (),
        allow_lost: Iterable[str] = (),
        **settings: Unpack[TemplateSettings],
    ) -> None:
        super().__init__()
        if not isinstance(truncation, Truncation):
            truncation = Truncation(cast(Policy, truncation), max_length)
        elif max_length is not None:
            raise ConfigError(f"max_length={max_length} is part of {truncation!r}; pass it there only")
        self._truncation = truncation
        self.max_length, self.truncation = truncation.max_length, truncation.policy
        chosen = ChatTemplate.of(template, settings)
        self.tokenizer = load_tokenizer(tokenizer)
        self.template = load_template(chosen.template, self.tokenizer.chat_template)
        self.train_on, self.include_eot = _checked_roles(train_on), include_eot
        self.format = checked_format(format, columns)
        self.columns = dict(columns) if columns is not None else None
        self.keep = as_names(keep) if keep else ()
        new = [prefix + name for prefix in ("", "chosen_", "rejected_") for name in ("input_ids", "loss_mask")]
        if set(new) & set(self.keep):
            raise ConfigError(f"keep={list(self.keep)} has the name of a new column: {', '.join(new)}")
        self.gate = Gate.of(gate)
        self.allow_lost = _checked_kinds(allow_lost)
        options = ChatOptions(self.train_on, include_eot, self.gate, chosen, frozenset(self.allow_lost))
        self._renderer, self._checker = bind_template(self.tokenizer, self.template, options)
        self._layouts = Layouts(self._renderer)
        self._typed_json = True
        self._render_samples()

    @property
    def json_columns(self) -> dict[str, tuple[str, ...]]:
        """Columns that the source should keep as JSON; see `Pipeline`."""
        return json_columns((self.columns or {}).values())

    def refuse_typed_json(self) -> None:
        """Refuse messages with typed objects inside: one Arrow type for all rows has changed them already."""
        self._typed_json = False

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        name = self._format_of(batch)
        sides = []
        with alone(batch):
            for side in render_batch(self._layouts, batch, name, self.columns):
                tokens, problems = self._tokens(side)
                if problems:
                    raise problems[0]
                sides.append(tokens)
                self.count_kept({f"lost: {kind}": n for kind, n in side.lost.items()})
            return self._output(batch, sides_of(name), sides)

    def explain(self, row: pa.RecordBatch) -> list[tuple[str, list[ExplainedPart], str | None]]:
        """For each side of one row: the place of every part, and the reason for a refusal, if there is one.

        Most rows have one side, called ""; preferences have "chosen" and "rejected".
        """
        name = self._format_of(row)
        (converted,) = conversations(row, name, self.columns, input_heading=self.template.input_heading)
        if isinstance(converted, RowProblem):
            raise converted.unnumbered()
        return [(prefix.rstrip("_"), *explain(self._renderer, side)) for prefix, side in zip(sides_of(name), converted)]

    def check_rows(self, batch: pa.RecordBatch) -> list[Violation]:
        """All violations of the gate in a batch, instead of an error at the first."""
        name = self._format_of(batch)
        return sorted(self._violations(batch, name), key=lambda violation: violation.row)

    def _violations(self, batch: pa.RecordBatch, name: str) -> list[Violation]:
        """As `check_rows`. If one row fails the whole batch, the batch is halved until that row is found."""
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
        second = self._violations(batch[half:], name)
        return self._violations(batch[:half], name) + [replace(v, row=v.row + half) for v in second]

    def _checked(self, batch: pa.RecordBatch, name: str) -> list[Violation]:
        prefixes = sides_of(name)
        try:
            sides = list(render_batch(self._layouts, batch, name, self.columns))
        except RowProblem:
            pass
        else:
            return [v for prefix, side in zip(prefixes, sides) for v in self._violations_of(side, prefix)]
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
            violations += [replace(v, row=numbers[v.row]) for v in self._violations_of(RenderedBatch.of(good), prefix)]
        return violations

    def _violations_of(self, side: RenderedBatch, prefix: str) -> list[Violation]:
        """Violations of rows that could be rendered."""
        tokens, problems = self._tokens(side)
        violations = [_violation(problem, problem.row or 0, prefix) for problem in problems]
        long = too_long(np.diff(tokens.offsets), self._truncation)
        return violations + [_violation(problem, problem.row or 0, prefix) for problem in long]

    @property
    def dropped_tokens(self) -> dict[str, int]:
        """Dropped tokens by reason, since the start or the last `reset`."""
        return tokens_in(self._changes.totals())

    @property
    def fingerprint(self) -> str:
        """Text that decides tokens and masks: part of the key of a store."""
        return orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS).decode()

    def describe(self) -> dict[str, Any]:
        """Everything that decides the output, as plain values."""
        renderer = self._renderer
        return {
            "transform": "FormatChat",
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "template": self.template.fingerprint,
            "variables": dict(renderer.variables),
            "now": renderer.now.isoformat() if renderer.now is not None else None,
            "markers": renderer.markers,
            "train_on": self.train_on,
            "include_eot": self.include_eot,
            "end_of_turn": renderer.ends.texts,
            "max_length": self.max_length,
            "truncation": self.truncation,
            "gate": asdict(self.gate),
            "allow_lost": list(self.allow_lost),
            "closing": [renderer.ends.closing, renderer.ends.call_closing],
            "format": self.format,
            "columns": self.columns,
            "keep": list(self.keep),
        }

    def fit_budget(self, nbytes: int) -> None:
        """Load the tokenizer, and limit its cache to these bytes."""
        fit = getattr(self.tokenizer, "fit_budget", None)
        if fit is not None:
            fit(nbytes, parse_special=True)

    def __repr__(self) -> str:
        name = self.template.name if self.template.name in BUILT_IN else "template"
        return f"FormatChat({self.tokenizer.name}, {name}, train_on={self.train_on!r})"

    def _render_samples(self) -> None:
        """Render sample conversations, so that a broken template fails at construction."""
        keys = self._renderer.traits.thought_keys
        plain = self._renderer.sample(1)
        samples = {"a sample conversation": plain}
        if keys:
            samples["a sample conversation with thoughts"] = thought_sample(keys[0], plain.tools)
        problems = {name: self._sample_problem(conversation) for name, conversation in samples.items()}
        refused = {name: problem for name, problem in problems.items() if problem is not None}
        if len(refused) == len(samples):
            name, problem = next(iter(refused.items()))
            raise ConfigError(f"{name} does not pass the gate: {problem.unnumbered()}") from problem
        longer = self._sample_problem(self._renderer.sample(2))
        if longer is not None and not refused:
            refused["a sample conversation of several turns"] = longer
        for name, problem in refused.items():
            logger.warning("%s: rows like %s will be refused: %s", self.template.name, name, problem.unnumbered())
        source = "its generation blocks" if self.template.program.has_generation else "the prompt for each turn"
        logger.info("%s: turns are found by %s", self.template.name, source)

    def _sample_problem(self, conversation: Conversation) -> RowProblem | None:
        everything = self.train_on == EVERYTHING
        renderer = self._renderer if everything else replace(self._renderer, train_on="assistant")
        try:
            _, problems = self._tokens(RenderedBatch.of([renderer.render(conversation)]))
        except RowProblem as problem:
            return problem
        except DataError as error:
            logger.info("%s could not be checked with a sample: %s", self.template.name, error)
            return None
        return problems[0] if problems else None

    def _format_of(self, batch: pa.RecordBatch) -> str:
        name = self.format if self.format != "auto" else detect_format(batch)
        refuse_labels(batch.schema, self.keep)
        refuse_label_values(batch, self.keep)
        refuse_flags(batch.schema, self.keep)
        typed = None if self._typed_json else typed_json(batch, self.json_columns)
        if typed is not None:
            raise SchemaError(
                f"the column {typed!r} has typed objects in it: an earlier stage gave all rows one type, which changes "
                "numbers and keys; put FormatChat first, or return the column as JSON text from that stage"
            )
        if name == "preference" and self.truncation == "split" and self.max_length is not None:
            raise SchemaError("preference pairs cannot be split; pass truncation='right', 'left', 'drop' or 'error'")
        return name

    def _tokens(self, side: RenderedBatch) -> tuple[SpanTokens, list[RowProblem]]:
        """The tokens of one side with their supervised spans, and the problems that the gate finds."""
        everything = self.train_on == EVERYTHING
        tokens = SpanTokens.of(self.tokenizer.encode_spans(side.spans.texts, parse_special=True), side.spans)
        if not everything:
            self._checker.settle_ends(tokens, side.spans)
        return tokens, self._checker.problems(tokens, side, everything=everything)

    def _output(self, batch: pa.RecordBatch, prefixes: tuple[str, ...], sides: list[SpanTokens]) -> pa.RecordBatch:
        masks = [tokens.mask() for tokens in sides]
        pieces = [
            truncated(tokens.offsets, mask, self._truncation, supervised=self.gate.supervised)
            for tokens, mask in zip(sides, masks)
        ]
        if len(pieces) > 1:
            pieces = in_all(pieces)
        if self.max_length is not None:
            cost = tally([tokens.offsets for tokens in sides], pieces, self.truncation)
            self.count(cost.dropped)
            self.count_kept(cost.changed)
            self.count_kept({TOKENS + reason: n for reason, n in cost.tokens.items()})
        output: dict[str, pa.Array] = {}
        fields: list[pa.Field] = []
        if self.keep:
            kept = chosen_rows(batch, pieces[0].rows)
            output |= {name: column(kept, name) for name in self.keep}
            fields += [kept.schema.field(name) for name in self.keep]
        for prefix, tokens, mask, piece in zip(prefixes, sides, masks, pieces):
            for name, values, dtype in (
                ("input_ids", tokens.ids, self.tokenizer.dtype),
                ("loss_mask", mask, pa.bool_()),
            ):
                lists = list_array(token_slices(values, piece.starts, piece.stops), dtype)
                output[prefix + name] = lists
                fields.append(pa.field(prefix + name, lists.type))
        return pa.RecordBatch.from_arrays(list(output.values()), schema=pa.schema(fields))


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


def _checked_kinds(given: Iterable[str]) -> tuple[str, ...]:
    kinds = (given,) if isinstance(given, str) else tuple(given)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"allow_lost has no kind {unknown[0]!r}; valid kinds: {', '.join(KINDS)}")
    return tuple(sorted(set(kinds)))


def _violation(problem: RowProblem, row: int, prefix: str) -> Violation:
    side = f"{prefix.rstrip('_')}: " if prefix else ""
    return Violation(row, problem.kind, side + problem.reason, problem.shown or "")


TOO_LONG = "longer than max_length"
SILENCED = "nothing supervised after truncation"
CHANGED = {"left": "truncated on the left", "right": "truncated on the right", "split": "split"}


@dataclass(frozen=True, slots=True)
class MaskedPieces:
    """Pieces of rows: piece i is tokens `starts[i]` to `stops[i]` of the batch, all of row `rows[i]`."""

    rows: Ints
    starts: Ints
    stops: Ints

    def where(self, kept: Flags) -> MaskedPieces:
        return MaskedPieces(self.rows[kept], self.starts[kept], self.stops[kept])


@dataclass(frozen=True, slots=True)
class TruncationCounts:
    """Rows and tokens that truncation removed or changed, by reason."""

    dropped: dict[str, int]
    """Rows of which nothing is left."""
    changed: dict[str, int]
    """Rows kept with something missing, or in several pieces."""
    tokens: dict[str, int]
    """Tokens that are in no piece."""


def truncated(offsets: Ints, mask: Flags, truncation: Truncation, *, supervised: bool) -> MaskedPieces:
    """The pieces of all rows; with `supervised`, pieces of long rows without a supervised token are dropped."""
    lengths = np.diff(offsets)
    for problem in too_long(lengths, truncation):
        advice = "; raise it, or pass truncation='right', 'left', 'split' or 'drop'"
        raise TooLongError(problem.reason + advice, row=problem.row)
    parts = truncation.parts(lengths)
    starts = offsets[parts.rows] + parts.starts
    pieces = MaskedPieces(parts.rows, starts, starts + parts.lengths)
    if not supervised or parts.lengths is lengths:
        return pieces
    total = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
    whole = parts.lengths == lengths[parts.rows]
    return pieces.where(whole | (total[pieces.stops] > total[pieces.starts]))


def too_long(lengths: Ints, truncation: Truncation) -> list[TooLongError]:
    """An error for each row that is too long, with the policy "error"."""
    if truncation.max_length is None or truncation.policy != "error":
        return []
    return [
        TooLongError(f"{lengths[row]} tokens, more than max_length={truncation.max_length}", row=row)
        for row in np.flatnonzero(lengths > truncation.max_length).tolist()
    ]


def in_all(sides: Sequence[MaskedPieces]) -> list[MaskedPieces]:
    """The pieces of rows that have a piece on every side."""
    kept = sides[0].rows
    for side in sides[1:]:
        kept = np.intersect1d(kept, side.rows)
    return [side.where(np.isin(side.rows, kept)) for side in sides]


def tally(offsets: Sequence[Ints], sides: Sequence[MaskedPieces], policy: str) -> TruncationCounts:
    """Counts of rows and tokens, over all sides."""
    rows = len(offsets[0]) - 1
    kept = np.zeros(rows, np.bool_)
    kept[sides[0].rows] = True
    gone = TOO_LONG if policy == "drop" else SILENCED
    changed = np.zeros(rows, np.bool_)
    tokens = {gone: 0}
    for side, ends in zip(sides, offsets):
        lengths = np.diff(ends)
        left = np.bincount(side.rows, side.stops - side.starts, rows).astype(np.int64)
        pieces = np.bincount(side.rows, minlength=rows)
        changed |= kept & ((left < lengths) | (pieces > 1))
        tokens[gone] += int(lengths[~kept].sum())
        lost = SILENCED if policy == "split" else CHANGED.get(policy, gone)
        tokens[lost] = tokens.get(lost, 0) + int((lengths - left)[kept].sum())
    return TruncationCounts(
        {gone: int(np.count_nonzero(~kept))},
        {CHANGED.get(policy, gone): int(np.count_nonzero(changed))},
        {reason: n for reason, n in tokens.items() if n},
    )
