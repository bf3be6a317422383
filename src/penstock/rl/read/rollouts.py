"""Rollouts from whatever they are in: Python objects, files, Arrow, the arrays of other stacks.

read_rollouts([Rollout(prompt_ids=[1, 2], response_ids=[3, 4], reward=1.0)])
read_rollouts("rollouts/*.jsonl.gz")
read_rollouts(verl_batch)                                     # a DataProto, or a dict of padded arrays
read_rollouts("tau.json", tokenizer="model/", columns={"messages": "traj", "group": "task_id"})

reading_intake                    anything as columns under their own names
dialects                          what the names mean
reading_shapes, _turns, _text     prompts and responses, and what is known of each token
reading_names                     what is known of a rollout as a whole
reading_checks, _problems         what is wrong, told all at once; which rows stay
"""

from __future__ import annotations

import contextlib
import logging
import reprlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.errors import DataError
from penstock.rl.column_aliases import OPENRLHF, Meaning, meaning_of
from penstock.rl.read.columns import (
    Column,
    Intake,
    RolloutProblems,
    RowNames,
    as_numbers,
    as_objects,
    is_listed,
    narrow,
    take_in,
)
from penstock.rl.read.text import TextRule, Texts, fill_from_text
from penstock.rl.read.tokens import (
    TokenRules,
    check_ids,
    check_logprobs,
    checked_mask,
    checked_numbers,
    read_parts,
    read_turns,
    rows_to_keep,
)
from penstock.rl.rollout import RolloutTable
from penstock.rl.selection import check_group_prompts, check_unique_ids

if TYPE_CHECKING:
    from penstock.tokenizers.load import TokenizerSpec

__all__ = ["TextRule", "Whole", "read_rollouts", "read_whole"]


Objects = npt.NDArray[np.object_]


class Whole:
    """The columns with one entry per rollout."""

    def __init__(self, intake: Intake, meaning: Meaning, problems: RolloutProblems) -> None:
        self._intake, self._meaning, self._problems = intake, meaning, problems
        self.ids = self._ids()
        self.finish_reasons = self._finish_reasons()
        self.rewards = self._rewards()
        self.versions = self._versions()
        self.groups = self._groups()
        self.metadata = self._metadata()
        self.tokenized = self._tokenized()

    def column(self, field: str) -> Column | None:
        """What was given for a field."""
        name = self._meaning.fields.get(field)
        return None if name is None else self._intake.columns[name]

    def cells(self, field: str) -> list[Any]:
        """The same as Python objects; None in every row if it was not given."""
        column = self.column(field)
        return [None] * self._intake.rows if column is None else as_objects(column)

    def _ids(self) -> Objects:
        cells = self.cells("id")
        if any(cell is not None for cell in cells):
            cells = [None if cell is None else str(cell) for cell in cells]
            self._problems.places.ids = cells
        given = np.array([cell is not None for cell in cells], np.bool_)
        if given.any():
            check_unique_ids(cells, given, self._meaning.fields["id"], self._problems)
        first, known, mark = self._problems.places.first_row, set(cells), ""
        while given.any() and any(f"{mark}{first + row}" in known for row in np.flatnonzero(~given).tolist()):
            mark += "~"
        return _objects([f"{mark}{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _finish_reasons(self) -> Objects:
        cells = [_reason(cell) for cell in self.cells("finish_reason")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | None)]
        self._problems.add(wrong, lambda row: f"finish_reason is {reprlib.repr(cells[row])}, expected text")
        return _objects(cells)

    def _rewards(self) -> npt.NDArray[np.float64]:
        column = self.column("reward")
        if column is None:
            return np.full(self._intake.rows, np.nan)
        name, found = self._meaning.fields["reward"], as_numbers(column)
        self._problems.add(
            found.odd,
            lambda row: (
                f"{name} is {found.describe(row)}, expected one number for the whole response; rewards of its tokens "
                "are token_rewards"
            ),
        )
        endless = np.flatnonzero(np.isinf(found.values))
        self._problems.add(endless, lambda row: f"{name} is {found.values[row]}, expected a finite number")
        return found.values

    def _versions(self) -> npt.NDArray[np.int64]:
        column = self.column("policy_version")
        if column is None:
            return np.full(self._intake.rows, -1, np.int64)
        found = as_numbers(column)
        known = ~np.isnan(found.values)
        with np.errstate(invalid="ignore"):
            wrong = known & ~((found.values >= 0) & (found.values % 1 == 0) & (found.values < 2**53))
        wrong[found.odd] = True
        cells = as_objects(column) if wrong.any() else []
        self._problems.add(
            np.flatnonzero(wrong),
            lambda row: f"policy_version is {reprlib.repr(cells[row])}, expected a whole number from 0 on",
        )
        return np.where(known & ~wrong, np.nan_to_num(found.values, posinf=0.0), -1).astype(np.int64)

    def _groups(self) -> Objects:
        """Names; if nobody gave one, each rollout has a group of its own, called by its number."""
        cells = [_name(cell) for cell in self.cells("group")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | int | None)]
        self._problems.add(wrong, lambda row: f"group is {reprlib.repr(cells[row])}, expected text or a whole number")
        named = sum(isinstance(cell, str | int) for cell in cells)
        if named:
            lacking = [row for row, cell in enumerate(cells) if cell is None]
            self._problems.add(
                lacking, f"group is missing, and {named} other rows have one; give it for all rows, or for none"
            )
        first = self._problems.places.first_row
        return _objects([f"~{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _metadata(self) -> Objects:
        cells = [self._mapping(row, cell) for row, cell in enumerate(self.cells("metadata"))]
        for name in self._meaning.extras:
            for row, value in enumerate(as_objects(self._intake.columns[name])):
                if value is None:
                    continue
                if name in cells[row]:
                    self._problems.add([row], f"{name!r} is a column and a key of metadata")
                cells[row][name] = value
        return _objects(cells)

    def _mapping(self, row: int, cell: Any) -> dict[str, Any]:
        if cell is None:
            return {}
        if isinstance(cell, str):
            with contextlib.suppress(ValueError):  # told below
                cell = orjson.loads(cell)
        if not isinstance(cell, Mapping):
            self._problems.add([row], f"metadata is {reprlib.repr(cell)}, expected a dict, or its JSON")
            return {}
        if isinstance(self.column("metadata"), pa.ChunkedArray):
            return {key: value for key, value in cell.items() if value is not None}
        return dict(cell)

    def _tokenized(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(cell) for cell in self.cells("tokenized")], np.bool_)


def read_whole(intake: Intake, meaning: Meaning, problems: RolloutProblems) -> Whole:
    """Everything that is one entry per rollout; what cannot be is a problem."""
    return Whole(intake, meaning, problems)


def _reason(cell: Any) -> Any:
    """The word for it: engines wrap it in an object, or an enumeration."""
    if isinstance(cell, Mapping) and "type" in cell:
        return cell["type"]
    return cell.value if isinstance(cell, Enum) else cell


def _name(cell: Any) -> Any:
    if isinstance(cell, bool | np.bool_):
        return float(cell)  # no name for a group
    if isinstance(cell, np.integer | np.str_):
        return cell.item()
    return cell


def _objects(cells: list[Any]) -> Objects:
    found = np.empty(len(cells), np.object_)
    found[:] = cells
    return found


logger = logging.getLogger(__name__)

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
    counts: MutableMapping[str, int] | None = None,
    first_row: int = 0,
) -> RolloutTable:
    """The rollouts in `data`, as one table. Token ids in are token ids out.

    - `data`: `Rollout`s, dicts, dataclasses; paths, directories or globs of JSON Lines, Parquet or Arrow files,
      compressed or not; Arrow tables and what can be read as one; a dict of columns, padded or ragged; a DataProto.
      A `RolloutTable` is returned as it is, if nothing is wrong with it.
    - `columns`: which column is which field, where the names do not say it: `{"reward": "score"}`. The names of TRL,
      verl, OpenRLHF, slime and inference engines are known. `{"metadata": ["a", "b"]}` keeps columns as metadata that
      would be taken for something else. Columns that nobody knows are metadata anyway.
    - `missing_rewards`: rollouts without a reward, or with NaN, are an "error"; or they get "zero", are "drop"ped, or
      "keep" NaN. Rewards per token are a reward. An infinite reward is always an error.
    - `empty_responses`, `all_masked`: responses without tokens, and those with no token to learn, are an "error", are
      "drop"ped, or are "keep"t. The defaults are errors since a producer that loses rewards or tokens is broken, and a
      run that goes on without them looks like one that works.
    - `group_prompts`: rollouts of one group with different prompts are an error, unless "any" is passed.
    - `text`: how text becomes ids in rows that have none, with `tokenizer`; `tokenized` says which rows. With a
      tokenizer, ids beyond its vocabulary are an error.
    - `counts` is added to: rows dropped and values set, by reason. Without it they are logged.
    - `first_row`: the number of the first row, where more was read before. Rollouts that name no group and no id are
      called by their numbers, so that those of two calls differ.

    Numbers per token are kept as float32. Those of tokens that are masked need not be there, or be numbers: NaN, null
    and infinity become 0 there. An id that two rollouts have, a group that some rollouts name and others do not, and
    log-probs above 0 by more than rounding are errors. Everything that is wrong is told in one `DataError`, with files
    and rows.
    """
    rules = TokenRules(missing_rewards, empty_responses, all_masked, group_prompts)
    if isinstance(data, RolloutTable):
        _check_table(data, rules)
        return data
    intake = take_in(data, first_row)
    if not intake.rows:
        raise DataError("there are no rollouts: the data has no rows")
    table, keep, changed = _Reading(intake, columns, tokenizer, text).finished(rules)
    changed = {reason: count for reason, count in changed.items() if count}
    if counts is not None:
        for reason, count in changed.items():
            counts[reason] = counts.get(reason, 0) + count
    elif changed:
        told = ", ".join(f"{reason}: {count}" for reason, count in changed.items())
        level = logging.INFO if keep.all() else logging.WARNING
        logger.log(level, "of %d rollouts %d were left out (%s)", len(table), int((~keep).sum()), told)
    return table if keep.all() else table.take(np.flatnonzero(keep))


class _Reading:
    """One data set on its way into a table. Each step tells its problems; the last one refuses if there are any."""

    def __init__(
        self,
        intake: Intake,
        columns: Mapping[str, str | Sequence[str]] | None,
        tokenizer: TokenizerSpec | None,
        text: TextRule,
    ) -> None:
        listed = {name: is_listed(column) for name, column in intake.columns.items()}
        self.meaning = _settled(meaning_of(list(intake.columns), columns, listed), listed)
        self.problems = RolloutProblems(intake.places)
        self.whole = read_whole(intake, self.meaning, self.problems)
        self.tokenizer = None
        if tokenizer is not None:
            from penstock.transforms.tokenization import load_tokenizer  # for those who have one

            self.tokenizer = load_tokenizer(tokenizer)
        parts = read_parts(intake.columns, self.meaning, self.problems)
        turns = self.whole.column("turns")
        if turns is not None:
            parts = read_turns(turns, parts, self.problems)
        texts = Texts(
            prompt=self.whole.cells("prompt"),
            response=self.whole.cells("response"),
            messages=self.whole.cells("messages"),
            tools=self.whole.cells("tools"),
            finish_reasons=self.whole.finish_reasons.tolist(),
            arrow=intake.arrow,
        )
        self.parts, made = fill_from_text(parts, texts, self.tokenizer, text, self.problems)
        self.tokenized = made | self.whole.tokenized

    def finished(self, rules: TokenRules) -> tuple[RolloutTable, npt.NDArray[np.bool_], dict[str, int]]:
        """The table of all rows, which of them to keep, and how many not for which reason."""
        whole, problems = self.whole, self.problems
        prompt, response = self.parts.prompt, self.parts.response
        if prompt is None or response is None:
            problems.refuse()
            raise DataError("no row has a prompt and a response; give prompt_ids and response_ids, or text")
        check_ids(prompt, self._called("prompt_ids"), self.tokenizer, problems)
        check_ids(response, self._called("response_ids"), self.tokenizer, problems)
        mask = checked_mask(self.parts.mask, response, self._called("loss_mask"), problems)
        changed: dict[str, int] = {}
        numbers = {
            name: checked_numbers(lists, response, mask, self._called(name), problems, changed)
            for name, lists in self.parts.per_token.items()
        }
        for name in LOGPROBS:
            check_logprobs(numbers.get(name), mask, self._called(name), problems)
        keep = rows_to_keep(rules, response, mask, whole.rewards, numbers, problems, changed)
        problems.refuse()
        table = RolloutTable(
            prompt_ids=narrow(prompt.ragged),
            response_ids=narrow(response.ragged),
            loss_mask=mask,
            rewards=whole.rewards,
            groups=whole.groups,
            versions=whole.versions,
            tokenized=self.tokenized,
            ids=whole.ids,
            finish_reasons=whole.finish_reasons,
            metadata=whole.metadata,
            **numbers,
        )
        if rules.group_prompts == "equal":
            check_group_prompts(table, table.groups.tolist(), problems)
            problems.refuse()
        return table, keep, changed

    def _called(self, field: str) -> str:
        return self.meaning.fields.get(field, field)


def _check_table(table: RolloutTable, rules: TokenRules) -> None:
    """What must hold of a table that somebody made, as of all others."""
    problems = RolloutProblems(RowNames(ids=table.ids.tolist()))
    check_unique_ids(table.ids.tolist(), np.ones(len(table), np.bool_), "id", problems)
    for name in LOGPROBS:
        check_logprobs(getattr(table, name), table.loss_mask, name, problems)
    if rules.group_prompts == "equal":
        check_group_prompts(table, table.groups.tolist(), problems)
    problems.refuse()


def _settled(meaning: Meaning, listed: Mapping[str, bool]) -> Meaning:
    """OpenRLHF has rewards of responses and of tokens under one name."""
    name = meaning.fields.get("reward")
    if meaning.dialect is not OPENRLHF or name is None or not listed[name] or "token_rewards" in meaning.fields:
        return meaning
    rest = {field: column for field, column in meaning.fields.items() if field != "reward"}
    return replace(meaning, fields={**rest, "token_rewards": name})
