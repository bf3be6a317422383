"""Turns with token ids, of the policy and of others, as one response whose other tokens are masked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged
from penstock.arrays.text import plain
from penstock.rl.column_aliases import DIALECTS, PER_TOKEN, alike
from penstock.rl.read.columns import EXPECTED, Column, ListColumn, as_lists, as_objects
from penstock.rl.read.problems import RolloutProblems
from penstock.rl.read.shapes import PromptResponse

__all__ = ["OWN_ROLES", "read_turns"]

OWN_ROLES = ("assistant", "gpt", "model", "policy", "bot", "ai")
"""Who speaks when the policy does."""
IDS = ("ids", "token_ids", "tokens")
OTHERS = ("system", "developer", "user", "human", "tool", "function", "ipython", "environment", "observation")
"""Who speaks when the policy does not; other roles are taken for such, unless nobody else spoke."""
KEYS = ("role", *IDS, "loss_mask", *PER_TOKEN)
MEANT = {"mask": "loss_mask", "reward": "token_rewards", "rewards": "token_rewards"}
"""What somebody may have called a key, beside what other stacks do."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of all rows, one behind the other."""

    bounds: Ints
    """Row i has the turns bounds[i] to bounds[i + 1]."""
    columns: dict[str, Column]

    @property
    def rows(self) -> Ints:
        """The row of each turn."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


def read_turns(column: Column, given: PromptResponse, problems: RolloutProblems) -> PromptResponse:
    """`[{"role": "assistant", "ids": [...], "logprobs": [...]}, {"role": "tool", "ids": [...]}, ...]` for each row.

    Turns before the first of the policy are the prompt, unless prompt ids were given. From there on everything is the
    response, masked where another spoke; a turn's own `loss_mask` has the last word on it. What others said has no
    log-probs: they may be left out there.
    """
    turns = _taken_apart(column, problems)
    if turns is None:
        return given
    _check_keys(turns.columns, problems)
    rows, count = turns.rows, int(turns.bounds[-1])
    name = next((name for name in IDS if name in turns.columns), None)
    roles = as_objects(turns.columns.get("role", [None] * count))
    own = np.array([role in OWN_ROLES for role in roles], np.bool_)
    nameless = np.flatnonzero([not isinstance(role, str) for role in roles])
    at = np.arange(count) - turns.bounds[rows]
    problems.add(rows[nameless], "a turn has no role, which says whether the policy wrote it")
    _check_roles(turns, roles, own, problems)
    if name is None:
        problems.add_whole(f"turns have no token ids; give each of them {IDS[0]!r}, or give messages with text alone")
        return given
    ids = as_lists(turns.columns[name], "ids")
    bad = ids.missing.copy()
    bad[ids.odd] = True
    number = {int(rows[turn]): int(turn) for turn in np.flatnonzero(bad)[::-1].tolist()}

    def tell(row: int) -> str:
        turn = number[row]
        what = "missing" if ids.missing[turn] else ids.describe(turn)
        return f"{name} of turn {at[turn]} ({roles[turn]!r}) is {what}, expected {EXPECTED['ids']}"

    problems.add(np.unique(rows[bad]), tell)
    masks = _per_turn(turns, "loss_mask", ids, rows, problems)
    numbers = {key: _per_turn(turns, key, ids, rows, problems) for key in PER_TOKEN}
    for key, lists in numbers.items():
        if lists is not None:
            lacking = own & lists.missing & (ids.lengths > 0)
            problems.add(np.unique(rows[lacking]), f"a turn of the policy lacks {key}, which others have")
    firsts = turns.bounds[1:].copy()
    spoken, where = np.unique(rows[own], return_index=True)
    firsts[spoken] = np.flatnonzero(own)[where]
    if given.prompt is not None:
        firsts = turns.bounds[:-1]
    in_response = np.arange(count) >= firsts[rows]
    edges = ids.ragged.offsets[turns.bounds]
    behind = np.repeat(in_response, ids.lengths)
    flags = np.repeat(own, ids.lengths)
    if masks is not None:
        told = np.repeat(~masks.missing, ids.lengths)
        flags[told] = masks.ragged.values
    prompt = given.prompt if given.prompt is not None else ListColumn.of(_kept(ids.ragged.values, ~behind, edges))
    per_token = dict(given.per_token)
    for key, lists in numbers.items():
        if lists is not None:
            per_token[key] = ListColumn.of(_kept(_spread(lists, ids), behind, edges))
    return PromptResponse(
        prompt,
        ListColumn.of(_kept(ids.ragged.values, behind, edges)),
        ListColumn.of(_kept(flags, behind, edges)),
        per_token,
    )


def _check_keys(columns: Mapping[str, Column], problems: RolloutProblems) -> None:
    """Tells a key that is nearly one of ours, or what others call it: it would be passed over."""
    for key in columns:
        if key in KEYS or not isinstance(key, str):
            continue
        for field in ("role", "ids", "loss_mask", *PER_TOKEN):
            if field in columns or (field == "ids" and any(name in columns for name in IDS)):
                continue
            theirs = (name for dialect in DIALECTS for name in dialect.names.get(field, ()))
            if alike(key, field) or MEANT.get(key) == field or key in theirs:
                problems.add_whole(
                    f"turns have {key!r}, which looks like {field!r} and would be passed over; rename it: what is read "
                    f"of a turn is {', '.join(KEYS)}, each with one entry a token but the role"
                )
                break


def _check_roles(turns: Turns, roles: list[Any], own: npt.NDArray[np.bool_], problems: RolloutProblems) -> None:
    """Tells rows in which nobody is the policy, though somebody may be: by another name, or written otherwise."""
    meant = np.array([isinstance(role, str) and role.strip().lower() in OWN_ROLES for role in roles], np.bool_) & ~own
    unknown = np.array([isinstance(role, str) and role not in OTHERS for role in roles], np.bool_) & ~own
    spoke = np.bincount(turns.rows[own], minlength=len(turns.bounds) - 1) > 0
    bad = np.unique(turns.rows[meant | (unknown & ~spoke[turns.rows])])

    def tell(row: int) -> str:
        seen = dict.fromkeys(roles[turns.bounds[row] : turns.bounds[row + 1]])
        return (
            f"turns have the roles {', '.join(map(repr, seen))}, and the policy is one of "
            f"{', '.join(map(repr, OWN_ROLES))}, written like this; rename the role of its turns"
        )

    problems.add(bad, tell)


def _per_turn(turns: Turns, key: str, ids: ListColumn, rows: Ints, problems: RolloutProblems) -> ListColumn | None:
    """What a turn says of each of its tokens; None if no turn does."""
    if key not in turns.columns:
        return None
    lists = as_lists(turns.columns[key], "mask" if key == "loss_mask" else "floats")
    wrong = ~lists.missing & (lists.lengths != ids.lengths)
    wrong[lists.odd] = True
    if wrong.any():
        first = {int(rows[turn]): int(turn) for turn in np.flatnonzero(wrong)[::-1].tolist()}
        problems.add(
            np.unique(rows[wrong]),
            lambda row: (
                f"{key} of turn {first[row] - turns.bounds[row]} has {lists.lengths[first[row]]} entries for "
                f"{ids.lengths[first[row]]} tokens"
            ),
        )
        return None
    return None if lists.missing.all() else lists


def _spread(lists: ListColumn, ids: ListColumn) -> npt.NDArray[Any]:
    """The numbers of all tokens, NaN for those of turns without."""
    found = np.full(len(ids.ragged.values), np.nan, np.float32)
    found[np.repeat(~lists.missing, ids.lengths)] = lists.ragged.values
    return found


def _kept(values: npt.NDArray[Any], keep: npt.NDArray[np.bool_], edges: Ints) -> Ragged:
    running = np.concatenate(([0], np.cumsum(keep)))
    return Ragged(values[keep], running[edges])


def _taken_apart(column: Column, problems: RolloutProblems) -> Turns | None:
    if isinstance(column, pa.ChunkedArray):
        array = plain(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
        kind = array.type
        if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type):
            lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
            flat = array.flatten()
            fields = {kind.value_type.field(i).name: pa.chunked_array([part]) for i, part in enumerate(flat.flatten())}
            return Turns(np.concatenate(([0], np.cumsum(lengths))), dict(fields))
    rows = as_objects(column)
    wrong = [
        row
        for row, turns in enumerate(rows)
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping) for turn in turns)
    ]
    problems.add(wrong, lambda row: f"turns is {rows[row]!r:.60}, expected a list of dicts with role and ids")
    if wrong:
        return None
    flat_turns = [turn for turns in rows for turn in turns]
    names = dict.fromkeys(key for turn in flat_turns for key in turn)
    cells: dict[str, Column] = {name: [turn.get(name) for turn in flat_turns] for name in names}
    return Turns(np.cumsum([0, *map(len, rows)]), cells)
