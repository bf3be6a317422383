"""`read_rollouts`: rollouts from Python objects, files, Arrow, and the arrays of other RL stacks.

read_rollouts([Rollout(prompt_ids=[1, 2], response_ids=[3, 4], reward=1.0)])
read_rollouts("rollouts/*.jsonl.gz")
read_rollouts(verl_batch)                                     # a DataProto, or a dict of padded arrays
read_rollouts(outputs)                                        # of vLLM, SGLang, an OpenAI-style server
read_rollouts("tau.json", tokenizer="model/")                 # transcripts of tau-bench

columns            data in any form as columns, their values, and problems
../column_aliases  names of the fields in other stacks
engines            outputs of vLLM, SGLang and OpenAI-style servers
adapters           the same as functions, with rewards
tokens             prompts, responses and per-token numbers
text               token ids of text
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError
from penstock.rl.column_aliases import OPENRLHF, ColumnFields, resolve_columns
from penstock.rl.read.columns import (
    Column,
    GivenColumns,
    ListColumn,
    RolloutProblems,
    RowNames,
    as_numbers,
    as_objects,
    has_lists,
    read_columns,
)
from penstock.rl.read.text import TextRule, Texts, fill_from_text
from penstock.rl.read.tokens import (
    check_ids,
    check_logprobs,
    checked_mask,
    checked_numbers,
    read_token_columns,
    read_turns,
)
from penstock.rl.rollout import RolloutTable, narrow_ids, objects
from penstock.rl.selection import check_group_prompts, check_unique_ids

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

__all__ = ["TextRule", "column_fields", "read_rollouts"]

logger = logging.getLogger(__name__)

Objects = npt.NDArray[np.object_]
LOGPROBS = ("logprobs", "ref_logprobs")


def read_rollouts(
    data: Any,
    *,
    tokenizer: TokenizerSpec | None = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    missing_rewards: Literal["error", "zero", "drop", "keep"] = "error",
    empty_responses: Literal["error", "drop", "keep"] = "error",
    all_masked: Literal["error", "drop", "keep"] = "error",
    group_prompts: Literal["equal", "any"] = "equal",
    text: TextRule = TextRule(),  # noqa: B008 - a frozen value
    template: str | Path | None = None,
    counts: MutableMapping[str, int] | None = None,
    first_row: int = 0,
) -> RolloutTable:
    """Rollouts in `data` as one table. Token ids are not changed.

    - `data`: `Rollout`s, dicts, dataclasses; paths, directories or globs of JSON Lines, Parquet or Arrow files,
      compressed or not; Arrow tables and what can be read as one; a dict of columns, padded or ragged; a DataProto;
      outputs of vLLM, SGLang and OpenAI-style servers, for whose rewards see `rollouts_from_vllm` and its like. A
      `RolloutTable` is checked and returned.
    - `columns`: the column of each field whose name is unknown: `{"reward": "score"}`. The names of TRL, verl,
      OpenRLHF, slime and inference engines are known. `{"metadata": ["a", "b"]}` keeps columns as metadata that would
      be read as something else. Unknown columns are metadata.
    - `missing_rewards`: rollouts without a reward, or with NaN, are an "error", get "zero", are "drop"ped, or "keep"
      NaN. Rewards per token are a reward. An infinite reward is always an error.
    - `empty_responses`, `all_masked`: responses without tokens, and those without a supervised token, are an "error",
      are "drop"ped, or are "keep"t. Errors are the default because a producer that loses rewards or tokens is broken,
      and training without them looks normal.
    - `group_prompts`: different prompts in one group are an error, unless "any" is passed.
    - `text`: tokenization of rows without ids, with `tokenizer`; `tokenized` marks these rows. `template` is short for
      `text=TextRule(chat_template=...)`. With a tokenizer, ids
      outside of its vocabulary are an error.
    - `counts` is updated with the rows dropped and values set, by reason. Without it they are logged.
    - `first_row`: number of the first row, if earlier rows were read by another call. Rollouts without a group or an id
      are named by their numbers, which must differ between calls.

    Arrays of tokens may be reused afterwards: their numbers are copied. Per-token numbers are float32. On masked tokens
    they may be missing: NaN, null and infinity become 0 there. An id that two rollouts have, a group that only some
    rollouts name, and log-probs above 0 by more than rounding are errors. All problems are raised as one `DataError`,
    with files and rows.
    """
    rules = _RowRules(missing_rewards, empty_responses, all_masked, group_prompts)
    if isinstance(data, RolloutTable):
        _check_table(data, rules)
        return data
    if template is not None:
        text = replace(text, chat_template=template)
    given = read_columns(data, first_row, engines=columns is None)
    if not given.num_rows:
        raise DataError("there are no rollouts: the data has no rows")
    table, keep, changed = _Reading(given, columns, tokenizer, text).finish(rules)
    changed = {reason: count for reason, count in changed.items() if count}
    if counts is not None:
        for reason, count in changed.items():
            counts[reason] = counts.get(reason, 0) + count
    elif changed:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in changed.items())
        level = logging.INFO if keep.all() else logging.WARNING
        logger.log(level, "%d of %d rollouts were dropped (%s)", int((~keep).sum()), len(table), reasons)
    return table if keep.all() else table.take(np.flatnonzero(keep))


def column_fields(given: GivenColumns, columns: Mapping[str, str | Sequence[str]] | None) -> ColumnFields:
    """Fields of the columns that were given."""
    listed = {name: has_lists(column) for name, column in given.columns.items()}
    names = resolve_columns(list(given.columns), columns, listed)
    reward = names.fields.get("reward")
    if names.dialect is OPENRLHF and reward and listed[reward] and "token_rewards" not in names.fields:
        # OpenRLHF has rewards of responses and of tokens under one name.
        rest = {field: column for field, column in names.fields.items() if field != "reward"}
        return replace(names, fields={**rest, "token_rewards": reward})
    return names


class _Reading:
    """Data set that is read into a table. Each step adds its problems; `finish` raises them."""

    def __init__(
        self,
        given: GivenColumns,
        columns: Mapping[str, str | Sequence[str]] | None,
        tokenizer: TokenizerSpec | None,
        text: TextRule,
    ) -> None:
        self.given = list(given.columns.values())
        self.names = column_fields(given, columns)
        self.problems = RolloutProblems(given.rows)
        self.rows = rows = _RowColumns(given, self.names, self.problems)
        self.tokenizer = None
        if tokenizer is not None:
            from penstock.transforms.tokenization import load_tokenizer  # only text needs it

            self.tokenizer = load_tokenizer(tokenizer)
        parts = read_token_columns(given.columns, self.names, self.problems)
        turns = rows.column("turns")
        if turns is not None:
            parts = read_turns(turns, parts, self.problems)
        texts = Texts(
            prompt=rows.cells("prompt"),
            response=rows.cells("response"),
            messages=rows.cells("messages"),
            tools=rows.cells("tools"),
            finish_reasons=rows.finish_reasons.tolist(),
            arrow=given.arrow,
        )
        self.parts, made = fill_from_text(parts, texts, self.tokenizer, text, self.problems)
        self.tokenized = made | np.array([bool(cell) for cell in rows.cells("tokenized")], np.bool_)

    def finish(self, rules: _RowRules) -> tuple[RolloutTable, npt.NDArray[np.bool_], dict[str, int]]:
        """Table of all rows, the rows to keep, and the counts of changes by reason."""
        rows, problems, name_of = self.rows, self.problems, self.names.column
        prompt, response = self.parts.prompt, self.parts.response
        if prompt is None or response is None:
            problems.refuse()
            raise DataError("no row has a prompt and a response; give prompt_ids and response_ids, or text")
        check_ids(prompt, name_of("prompt_ids"), self.tokenizer, problems)
        check_ids(response, name_of("response_ids"), self.tokenizer, problems)
        mask = checked_mask(self.parts.mask, response, name_of("loss_mask"), problems)
        changed: dict[str, int] = {}
        numbers = {
            name: checked_numbers(lists, response, mask, name_of(name), problems, changed)
            for name, lists in self.parts.per_token.items()
        }
        for name in LOGPROBS:
            check_logprobs(numbers.get(name), mask, name_of(name), problems)
        keep = _rows_to_keep(rules, response, mask, rows.rewards, numbers, problems, changed)
        problems.refuse()
        table = RolloutTable(
            prompt_ids=self._owned(narrow_ids(prompt.ragged)),
            response_ids=self._owned(narrow_ids(response.ragged)),
            loss_mask=self._owned(mask),
            rewards=rows.rewards,
            groups=rows.groups,
            versions=rows.versions,
            tokenized=self.tokenized,
            ids=rows.ids,
            finish_reasons=rows.finish_reasons,
            metadata=rows.metadata,
            **{name: None if column is None else self._owned(column) for name, column in numbers.items()},
        )
        if rules.group_prompts == "equal":
            check_group_prompts(table, table.groups.tolist(), problems)
            problems.refuse()
        return table, keep, changed

    def _owned(self, column: Ragged) -> Ragged:
        """Column in memory of its own: batches read it later, when the caller may have reused the arrays given."""
        given = [array for array in self.given if isinstance(array, np.ndarray)]
        shared = any(np.may_share_memory(column.values, array) for array in given)
        return Ragged(column.values.copy(), column.offsets) if shared else column


def _check_table(table: RolloutTable, rules: _RowRules) -> None:
    """Check a table that the caller made."""
    problems = RolloutProblems(RowNames(ids=table.ids.tolist()))
    check_unique_ids(table.ids.tolist(), np.ones(len(table), np.bool_), "id", problems)
    for name in LOGPROBS:
        check_logprobs(getattr(table, name), table.loss_mask, name, problems)
    if rules.group_prompts == "equal":
        check_group_prompts(table, table.groups.tolist(), problems)
    problems.refuse()


class _RowColumns:
    """Columns with one entry per rollout."""

    def __init__(self, given: GivenColumns, names: ColumnFields, problems: RolloutProblems) -> None:
        self._given, self._names, self._problems = given, names, problems
        self.ids = self._ids()
        self.finish_reasons = self._finish_reasons()
        self.rewards = self._rewards()
        self.versions = self._versions()
        self.groups = self._groups()
        self.metadata = self._metadata()

    def column(self, field: str) -> Column | None:
        """Column of a field."""
        name = self._names.fields.get(field)
        return None if name is None else self._given.columns[name]

    def cells(self, field: str) -> list[Any]:
        """The same as Python objects; all None if it was not given."""
        column = self.column(field)
        return [None] * self._given.num_rows if column is None else as_objects(column)

    def _ids(self) -> Objects:
        cells = [None if cell is None else str(cell) for cell in self.cells("id")]
        given = np.array([cell is not None for cell in cells], np.bool_)
        if given.any():
            self._problems.rows.ids = cells
            check_unique_ids(cells, given, self._names.fields["id"], self._problems)
        first, known, mark = self._given.rows.first_row, set(cells), ""
        while given.any() and any(f"{mark}{first + row}" in known for row in np.flatnonzero(~given).tolist()):
            mark += "~"
        return objects([f"{mark}{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _finish_reasons(self) -> Objects:
        cells = [_finish_reason(cell) for cell in self.cells("finish_reason")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | None)]
        self._problems.add(wrong, lambda row: f"finish_reason is {reprlib.repr(cells[row])}, expected text")
        return objects(cells)

    def _rewards(self) -> npt.NDArray[np.float64]:
        column = self.column("reward")
        if column is None:
            return np.full(self._given.num_rows, np.nan)
        name, found = self._names.fields["reward"], as_numbers(column)
        self._problems.add(
            found.odd,
            lambda row: (
                f"{name} is {found.describe(row)}, expected one number for the whole response; give rewards of tokens "
                "as token_rewards"
            ),
        )
        endless = np.flatnonzero(np.isinf(found.values))
        self._problems.add(endless, lambda row: f"{name} is {found.values[row]}, expected a finite number")
        return found.values

    def _versions(self) -> npt.NDArray[np.int64]:
        column = self.column("policy_version")
        if column is None:
            return np.full(self._given.num_rows, -1, np.int64)
        found = as_numbers(column)
        known = ~np.isnan(found.values)
        with np.errstate(invalid="ignore"):
            wrong = known & ~((found.values >= 0) & (found.values % 1 == 0) & (found.values < 2**53))
        wrong[found.odd] = True
        cells = as_objects(column) if wrong.any() else []
        self._problems.add(
            np.flatnonzero(wrong),
            lambda row: f"policy_version is {reprlib.repr(cells[row])}, expected a whole number of at least 0",
        )
        return np.where(known & ~wrong, np.nan_to_num(found.values, posinf=0.0), -1).astype(np.int64)

    def _groups(self) -> Objects:
        """Names; if no rollout has one, each has a group of its own, named by its number."""
        cells = [_group_name(cell) for cell in self.cells("group")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | int | None)]
        self._problems.add(wrong, lambda row: f"group is {reprlib.repr(cells[row])}, expected text or a whole number")
        named = sum(isinstance(cell, str | int) for cell in cells)
        if named:
            lacking = [row for row, cell in enumerate(cells) if cell is None]
            self._problems.add(
                lacking, f"group is missing, and {named} other rows have one; give it for all rows, or for none"
            )
        first = self._given.rows.first_row
        return objects([f"~{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _metadata(self) -> Objects:
        cells = [self._mapping(row, cell) for row, cell in enumerate(self.cells("metadata"))]
        for name in self._names.extras:
            for row, value in enumerate(as_objects(self._given.columns[name])):
                if value is None:
                    continue
                if name in cells[row]:
                    self._problems.add([row], f"{name!r} is a column and a key of metadata")
                cells[row][name] = value
        return objects(cells)

    def _mapping(self, row: int, cell: Any) -> dict[str, Any]:
        if cell is None:
            return {}
        if isinstance(cell, str):
            with contextlib.suppress(ValueError):  # reported below
                cell = orjson.loads(cell)
        if not isinstance(cell, Mapping):
            self._problems.add([row], f"metadata is {reprlib.repr(cell)}, expected a dict, or its JSON")
            return {}
        if isinstance(self.column("metadata"), pa.ChunkedArray):
            return {key: value for key, value in cell.items() if value is not None}
        return dict(cell)


def _finish_reason(cell: Any) -> Any:
    """Finish reason; engines wrap it in an object, or an enumeration."""
    if isinstance(cell, Mapping) and "type" in cell:
        return cell["type"]
    return cell.value if isinstance(cell, Enum) else cell


def _group_name(cell: Any) -> Any:
    if isinstance(cell, bool | np.bool_):
        return float(cell)  # not a valid name
    if isinstance(cell, np.integer | np.str_):
        return cell.item()
    return cell


@dataclass(frozen=True, slots=True)
class _RowRules:
    """Rules for rows without a reward or without supervised tokens, and for groups."""

    missing_rewards: str
    empty_responses: str
    all_masked: str
    group_prompts: str = "equal"

    def __post_init__(self) -> None:
        for name, known in {
            "missing_rewards": ("error", "zero", "drop", "keep"),
            "empty_responses": ("error", "drop", "keep"),
            "all_masked": ("error", "drop", "keep"),
            "group_prompts": ("equal", "any"),
        }.items():
            given = getattr(self, name)
            if given not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {given!r}{did_you_mean(str(given), known)}"
                )


def _rows_to_keep(
    rules: _RowRules,
    response: ListColumn,
    mask: Ragged,
    rewards: npt.NDArray[np.float64],
    numbers: Mapping[str, Any],
    problems: RolloutProblems,
    changed: dict[str, int],
) -> npt.NDArray[np.bool_]:
    """Rows that stay; missing rewards are set if that is the rule."""
    keep = np.ones(len(response), np.bool_)
    empty = response.lengths == 0
    masked = np.zeros(len(response), np.bool_)
    if not empty.all():
        masked[~empty] = ~np.logical_or.reduceat(mask.values, mask.offsets[:-1][~empty])
    unscored = np.isnan(rewards) & (numbers.get("token_rewards") is None)
    if rules.missing_rewards == "zero":
        changed["reward missing, set to 0"] = int(unscored.sum())
        rewards[unscored] = 0.0
    for bad, rule, reason, problem in (
        (
            empty,
            rules.empty_responses,
            "empty response",
            "the response is empty; set empty_responses= (of a loader: all_masked=) to keep or drop such rollouts",
        ),
        (
            masked,
            rules.all_masked,
            "all masked",
            "the loss mask is 0 everywhere, so no token is supervised; set all_masked= to keep or drop such rollouts",
        ),
        (
            unscored,
            rules.missing_rewards,
            "missing reward",
            "there is no reward, or it is NaN; give one (for outputs of engines: rollouts_from_vllm(outputs, "
            "rewards=...)), or set missing_rewards= to keep or drop such rollouts",
        ),
    ):
        if rule == "error":
            problems.add(np.flatnonzero(bad), problem)
        elif rule == "drop":
            changed[reason] = int((bad & keep).sum())
            keep &= ~bad
    return keep
