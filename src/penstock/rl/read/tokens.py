"""Token columns of rollouts: prompts, responses, masks and per-token numbers, from any layout that stacks use.

Padding is removed, sequences that hold prompt and response are split, turns are joined, and the result is checked. All
cuts work on whole arrays. Per-token numbers are cut along with a response if they are as long as it is; otherwise they
stay as they are, and the check of lengths reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import Ragged, is_list, offsets_of
from penstock.arrays.text import plain
from penstock.rl.column_aliases import DIALECTS, ColumnFields, similar_names
from penstock.rl.read.columns import (
    EXPECTED,
    Column,
    Kind,
    ListColumn,
    RolloutProblems,
    as_lists,
    as_numbers,
    as_objects,
)
from penstock.rl.rollout import PER_TOKEN

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

LOGPROB_ROUNDING = 0.01
"""Log-probabilities of bfloat16 logits may exceed 0 by this, from rounding."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Prompt, response, mask and per-token numbers; None for columns that were not given."""

    prompt: ListColumn | None
    response: ListColumn | None
    mask: ListColumn | None = None
    per_token: dict[str, ListColumn] = field(default_factory=dict)


def read_token_columns(columns: dict[str, Column], names: ColumnFields, problems: RolloutProblems) -> TokenColumns:
    """Token columns of rollouts in any layout but turns."""
    reader = _LayoutReader(columns, names, problems)
    per_token = {name: found for name in PER_TOKEN if (found := reader.lists(name, "floats")) is not None}
    if "sequences" in names.fields:
        return _from_sequences(reader, per_token)
    if "tokens" in names.fields:
        return _from_tokens(reader, per_token)
    prompt, response = reader.lists("prompt_ids", "ids"), reader.lists("response_ids", "ids")
    parts = TokenColumns(prompt, response, reader.lists("loss_mask", "mask"), per_token)
    return parts if response is None else _unpadded(reader, parts, response)


@dataclass(frozen=True, slots=True)
class _LayoutReader:
    """Columns by the fields of a rollout."""

    columns: dict[str, Column]
    names: ColumnFields
    problems: RolloutProblems

    def lists(self, name: str, kind: Kind) -> ListColumn | None:
        """Field as lists; a value that is no list of such numbers is a problem."""
        column = self.names.fields.get(name)
        if column is None:
            return None
        found = as_lists(self.columns[column], kind)
        self.problems.add(found.odd, lambda row: f"{column} is {found.describe(row)}, expected {EXPECTED[kind]}")
        return found

    def check_lengths(self, name: str, found: ListColumn, expected: Ints, of: str) -> bool:
        """Add a problem for rows whose list has another length; True if there are none."""
        wrong = np.flatnonzero(found.lengths != expected)
        column, lengths = self.names.column(name), found.lengths
        self.problems.add(wrong, lambda row: f"{column} has {lengths[row]} entries, expected {expected[row]}, {of}")
        return not len(wrong)

    def unknown_padding(self, name: str, remedy: str) -> None:
        self.problems.add_whole(
            f"{self.names.column(name)} is one padded array for all rows, and no mask marks its padding; give "
            f"{remedy}, or a list of arrays without padding"
        )


# -- padding -----------------------------------------------------------------------------------------------------------


def _unpadded(reader: _LayoutReader, parts: TokenColumns, response: ListColumn) -> TokenColumns:
    attention, mask = reader.lists("attention_mask", "mask"), parts.mask
    completion, tool = reader.lists("completion_mask", "mask"), reader.lists("tool_mask", "mask")
    prompt_mask = reader.lists("prompt_mask", "mask")
    if completion is not None:
        parts = replace(parts, mask=_both(completion, tool) if mask is None else _both(mask, completion))
    elif tool is not None:
        parts = replace(parts, mask=tool if mask is None else _both(mask, tool))
    if attention is not None:
        return _by_attention(reader, parts, response, attention)
    prompt, padded = parts.prompt, reader.names.dialect.padded
    if prompt is not None and prompt_mask is not None:
        parts = replace(parts, prompt=_masked(reader, prompt, prompt_mask, "prompt_mask"))
    elif prompt is not None and prompt.padded and padded:
        reader.unknown_padding("prompt_ids", "attention_mask or prompt_mask")
    ends = completion if completion is not None else mask
    if not (response.padded and padded):
        return parts
    if ends is None or not np.array_equal(ends.lengths, response.lengths):
        reader.unknown_padding("response_ids", "attention_mask")
        return parts
    return _cut(parts, response, last_true(ends.ragged) + 1)


def _by_attention(
    reader: _LayoutReader, parts: TokenColumns, response: ListColumn, attention: ListColumn
) -> TokenColumns:
    """One mask over prompt and response together, as in verl."""
    prompt = parts.prompt
    before = prompt.lengths if prompt is not None else np.zeros(len(response), np.int64)
    if not reader.check_lengths("attention_mask", attention, before + response.lengths, "prompt and response together"):
        return parts
    shown = windows(attention.ragged, before, response.lengths)
    running = np.concatenate(([0], np.cumsum(shown.values)))
    lengths = np.asarray(running[shown.offsets[1:]] - running[shown.offsets[:-1]], np.int64)
    holes = np.flatnonzero(last_true(shown) + 1 != lengths)
    name = reader.names.column("attention_mask")
    reader.problems.add(holes, f"{name} has zeros between the tokens of the response; padding must follow them")
    if prompt is not None:
        shown_prompt = ListColumn.of(windows(attention.ragged, np.zeros_like(before), before))
        parts = replace(parts, prompt=_masked(reader, prompt, shown_prompt, "attention_mask"))
    return parts if len(holes) else _cut(parts, response, lengths)


def _cut(parts: TokenColumns, response: ListColumn, lengths: Ints) -> TokenColumns:
    """First tokens of each response, and of every column that is as long as it."""
    full = response.lengths

    def cut(lists: ListColumn | None) -> ListColumn | None:
        if lists is None or not np.array_equal(lists.lengths, full):
            return lists
        return lists.with_ragged(windows(lists.ragged, np.zeros_like(lengths), lengths))

    per_token = {name: cut(lists) or lists for name, lists in parts.per_token.items()}
    return TokenColumns(parts.prompt, cut(response), cut(parts.mask), per_token)


def _masked(reader: _LayoutReader, lists: ListColumn, mask: ListColumn, name: str) -> ListColumn:
    """Tokens of a prompt where its mask is 1."""
    tokens = f"the tokens of {reader.names.column('prompt_ids')}"
    if not reader.check_lengths(name, mask, lists.lengths, tokens) or mask.ragged.values.all():
        return lists
    return lists.with_ragged(_filtered(lists.ragged.values, mask.ragged.values, mask.ragged.offsets))


def _filtered(values: npt.NDArray[Any], keep: Flags, offsets: Ints) -> Ragged:
    """Values to keep, in the rows that `offsets` had before."""
    return Ragged(values[keep], offsets_of(keep)[offsets])


def _both(first: ListColumn, second: ListColumn | None) -> ListColumn:
    if second is None or not np.array_equal(first.lengths, second.lengths):
        return first
    return replace(first, ragged=Ragged(first.ragged.values & second.ragged.values, first.ragged.offsets))


# -- prompt and response in one sequence -------------------------------------------------------------------------------


def _from_sequences(reader: _LayoutReader, per_token: dict[str, ListColumn]) -> TokenColumns:
    """Sequences with an action mask over their last tokens, as in OpenRLHF.

    The mask is as long as the sequence, or one shorter (the first token is no action), or covers the response only: in
    each case its last entry is that of the last token. The response starts at the first action.
    """
    whole, actions = reader.lists("sequences", "ids"), reader.lists("action_mask", "mask")
    assert whole is not None
    attention = reader.lists("attention_mask", "mask")
    failed = TokenColumns(whole, None)
    if actions is None:
        reader.problems.add_whole("sequences need an action_mask, which marks the response; name it in columns")
        return failed
    if attention is None and whole.padded:
        reader.unknown_padding("sequences", "attention_mask")
        return failed
    total, covered = whole.lengths, actions.lengths
    wrong = np.flatnonzero(total < covered)
    reader.problems.add(wrong, lambda row: f"action_mask has {covered[row]} entries for {total[row]} tokens")
    if len(wrong):
        return failed
    begin, end = np.zeros_like(total), total
    if attention is not None:
        if not reader.check_lengths("attention_mask", attention, total, "the tokens of the sequence"):
            return failed
        begin, end = np.minimum(first_true(attention.ragged), total), last_true(attention.ragged) + 1
    ahead = total - covered  # tokens before the first that the mask covers
    start = np.clip(first_true(actions.ragged) + ahead, begin, np.maximum(begin, end))
    lengths = np.maximum(end - start, 0)

    def of_response(lists: ListColumn) -> ListColumn:
        if not np.array_equal(lists.lengths, covered):
            return lists  # as long as the response, or reported by the check of lengths
        return lists.with_ragged(windows(lists.ragged, start - ahead, lengths))

    return TokenColumns(
        whole.with_ragged(windows(whole.ragged, begin, start - begin)),
        whole.with_ragged(windows(whole.ragged, start, lengths)),
        of_response(actions),
        {name: of_response(lists) for name, lists in per_token.items()},
    )


def _from_tokens(reader: _LayoutReader, per_token: dict[str, ListColumn]) -> TokenColumns:
    """Sequences with the length of the response at their end, as in slime."""
    whole = reader.lists("tokens", "ids")
    assert whole is not None
    column = reader.names.fields.get("response_length")
    if column is None:
        reader.problems.add_whole(
            "tokens hold prompt and response, and there is no response_length to split them; name it in columns, or "
            "pass columns={'response_ids': 'tokens'} if they are only the response"
        )
        return TokenColumns(whole, None)
    counts = as_numbers(reader.columns[column])
    total, given = whole.lengths, counts.values
    wrong = ~((given >= 0) & (given <= total) & (given % 1 == 0))
    wrong[counts.odd] = True
    reader.problems.add(
        np.flatnonzero(wrong),
        lambda row: (
            f"{column} is {'missing' if np.isnan(given[row]) else f'{given[row]:g}'}, expected 0 to {total[row]}, the "
            "number of tokens"
        ),
    )
    if wrong.any():
        return TokenColumns(whole, None)
    lengths = given.astype(np.int64)
    prompt = whole.with_ragged(windows(whole.ragged, np.zeros_like(total), total - lengths))
    response = whole.with_ragged(windows(whole.ragged, total - lengths, lengths))
    return TokenColumns(prompt, response, reader.lists("loss_mask", "mask"), per_token)


def windows(ragged: Ragged, starts: Ints, lengths: Ints) -> Ragged:
    """`lengths[i]` entries of each row from `starts[i]` on."""
    if not starts.any() and np.array_equal(lengths, ragged.lengths):
        return ragged
    offsets = offsets_of(lengths)
    index = np.repeat(ragged.offsets[:-1] + starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return Ragged(ragged.values[index], offsets)


def first_true(flags: Ragged) -> Ints:
    """Index of the first True of each row; the length of the row if there is none."""
    where = np.flatnonzero(flags.values)
    rows, at = np.unique(np.searchsorted(flags.offsets, where, "right") - 1, return_index=True)
    found = flags.lengths.copy()
    found[rows] = where[at] - flags.offsets[rows]
    return found


def last_true(flags: Ragged) -> Ints:
    """Index of the last True of each row; -1 if there is none."""
    where = np.flatnonzero(flags.values)[::-1]
    rows, at = np.unique(np.searchsorted(flags.offsets, where, "right") - 1, return_index=True)
    found = np.full(len(flags), -1, np.int64)
    found[rows] = where[at] - flags.offsets[rows]
    return found


# -- turns -------------------------------------------------------------------------------------------------------------

POLICY_ROLES = ("assistant", "gpt", "model", "policy", "bot", "ai")
OTHER_ROLES = ("system", "developer", "user", "human", "tool", "function", "ipython", "environment", "observation")
"""Roles other than the policy; unknown ones are taken for such, unless the policy has no turn."""
TURN_IDS = ("ids", "token_ids", "tokens")
TURN_KEYS = ("role", *TURN_IDS, "loss_mask", *PER_TOKEN)
TURN_ALIASES = {"mask": "loss_mask", "reward": "token_rewards", "rewards": "token_rewards"}
"""Likely wrong names of keys, besides those of other stacks."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """Turns of all rows, end to end."""

    bounds: Ints
    """Row i has the turns bounds[i] to bounds[i + 1]."""
    columns: dict[str, Column]

    @property
    def rows(self) -> Ints:
        """Row of each turn."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


def read_turns(column: Column, given: TokenColumns, problems: RolloutProblems) -> TokenColumns:
    """`[{"role": "assistant", "ids": [...], "logprobs": [...]}, {"role": "tool", "ids": [...]}, ...]` for each row.

    Turns before the first of the policy are the prompt, unless prompt ids were given. The rest is the response, masked
    where another role wrote, unless a turn has its own `loss_mask`. Turns of others may lack log-probs.
    """
    turns = _split_turns(column, problems)
    if turns is None:
        return given
    _check_keys(turns.columns, problems)
    rows, count = turns.rows, int(turns.bounds[-1])
    name = next((name for name in TURN_IDS if name in turns.columns), None)
    roles = as_objects(turns.columns.get("role", [None] * count))
    own = np.array([role in POLICY_ROLES for role in roles], np.bool_)
    problems.add(
        rows[np.flatnonzero([not isinstance(role, str) for role in roles])],
        "a turn has no role, which tells the policy's turns from others",
    )
    _check_roles(turns, roles, own, problems)
    if name is None:
        problems.add_whole(f"turns have no token ids; give each of them {TURN_IDS[0]!r}, or give messages as text")
        return given
    ids = as_lists(turns.columns[name], "ids")
    bad = ids.missing.copy()
    bad[ids.odd] = True
    first = {int(rows[turn]): int(turn) for turn in np.flatnonzero(bad)[::-1].tolist()}

    def describe(row: int) -> str:
        turn = first[row]
        value = "missing" if ids.missing[turn] else ids.describe(turn)
        return f"{name} of turn {turn - turns.bounds[row]} ({roles[turn]!r}) is {value}, expected {EXPECTED['ids']}"

    problems.add(np.unique(rows[bad]), describe)
    masks = _per_turn(turns, "loss_mask", ids, rows, problems)
    numbers = {key: lists for key in PER_TOKEN if (lists := _per_turn(turns, key, ids, rows, problems)) is not None}
    for key, lists in numbers.items():
        lacking = own & lists.missing & (ids.lengths > 0)
        problems.add(np.unique(rows[lacking]), f"a turn of the policy lacks {key}, which others have")
    starts = turns.bounds[1:].copy()
    spoken, where = np.unique(rows[own], return_index=True)
    starts[spoken] = np.flatnonzero(own)[where]
    if given.prompt is not None:
        starts = turns.bounds[:-1]
    edges = ids.ragged.offsets[turns.bounds]
    in_response = np.repeat(np.arange(count) >= starts[rows], ids.lengths)
    flags = np.repeat(own, ids.lengths)
    if masks is not None:
        flags[np.repeat(~masks.missing, ids.lengths)] = masks.ragged.values
    values = ids.ragged.values
    prompt = given.prompt if given.prompt is not None else ListColumn.of(_filtered(values, ~in_response, edges))
    per_token = dict(given.per_token)
    for key, lists in numbers.items():
        spread = np.full(len(values), np.nan, np.float32)
        spread[np.repeat(~lists.missing, ids.lengths)] = lists.ragged.values
        per_token[key] = ListColumn.of(_filtered(spread, in_response, edges))
    response, mask = (ListColumn.of(_filtered(each, in_response, edges)) for each in (values, flags))
    return TokenColumns(prompt, response, mask, per_token)


def _split_turns(column: Column, problems: RolloutProblems) -> _Turns | None:
    if isinstance(column, pa.ChunkedArray):
        array = plain(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
        kind = array.type
        if is_list(kind) and pa.types.is_struct(kind.value_type):
            lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
            parts = enumerate(array.flatten().flatten())
            return _Turns(
                offsets_of(lengths), {kind.value_type.field(i).name: pa.chunked_array([part]) for i, part in parts}
            )
    rows = as_objects(column)
    wrong = [
        row
        for row, turns in enumerate(rows)
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, Mapping) for turn in turns)
    ]
    problems.add(wrong, lambda row: f"turns is {rows[row]!r:.60}, expected a list of dicts with role and ids")
    if wrong:
        return None
    flat = [turn for turns in rows for turn in turns]
    names = dict.fromkeys(key for turn in flat for key in turn)
    return _Turns(offsets_of([*map(len, rows)]), {name: [turn.get(name) for turn in flat] for name in names})


def _check_keys(columns: Mapping[str, Column], problems: RolloutProblems) -> None:
    """Report a key that resembles one of ours, or is another stack's name of it: it would be ignored."""
    for key in columns:
        if key in TURN_KEYS or not isinstance(key, str):
            continue
        for name in ("role", "ids", "loss_mask", *PER_TOKEN):
            if name in columns or (name == "ids" and any(each in columns for each in TURN_IDS)):
                continue
            theirs = (each for dialect in DIALECTS for each in dialect.names.get(name, ()))
            if similar_names(key, name) or TURN_ALIASES.get(key) == name or key in theirs:
                problems.add_whole(
                    f"turns have {key!r}, which looks like {name!r} and would be ignored; rename it; the keys of a "
                    f"turn are {', '.join(TURN_KEYS)}, with one entry a token except for the role"
                )
                break


def _check_roles(turns: _Turns, roles: list[Any], own: Flags, problems: RolloutProblems) -> None:
    """Report rows without a turn of the policy whose roles suggest one."""
    meant = np.array([isinstance(role, str) and role.strip().lower() in POLICY_ROLES for role in roles], np.bool_)
    unknown = np.array([isinstance(role, str) and role not in OTHER_ROLES for role in roles], np.bool_) & ~own
    spoke = np.bincount(turns.rows[own], minlength=len(turns.bounds) - 1) > 0

    def describe(row: int) -> str:
        seen = dict.fromkeys(roles[turns.bounds[row] : turns.bounds[row + 1]])
        return (
            f"turns have the roles {', '.join(map(repr, seen))}, and that of the policy must be one of "
            f"{', '.join(map(repr, POLICY_ROLES))}; rename the role of its turns"
        )

    problems.add(np.unique(turns.rows[(meant & ~own) | (unknown & ~spoke[turns.rows])]), describe)


def _per_turn(turns: _Turns, key: str, ids: ListColumn, rows: Ints, problems: RolloutProblems) -> ListColumn | None:
    """Per-token lists of turns; None if no turn has one."""
    if key not in turns.columns:
        return None
    lists = as_lists(turns.columns[key], "mask" if key == "loss_mask" else "floats")
    wrong = ~lists.missing & (lists.lengths != ids.lengths)
    wrong[lists.odd] = True
    first = {int(rows[turn]): int(turn) for turn in np.flatnonzero(wrong)[::-1].tolist()}
    problems.add(
        np.unique(rows[wrong]),
        lambda row: (
            f"{key} of turn {first[row] - turns.bounds[row]} has {lists.lengths[first[row]]} entries for "
            f"{ids.lengths[first[row]]} tokens"
        ),
    )
    return None if wrong.any() or lists.missing.all() else lists


# -- checks ------------------------------------------------------------------------------------------------------------


def check_ids(lists: ListColumn, name: str, tokenizer: Tokenizer | None, problems: RolloutProblems) -> None:
    """Report negative ids, and ids outside of the tokenizer's vocabulary."""
    most = 2**63 - 1 if tokenizer is None else tokenizer.vocab_size - 1
    values = lists.ragged.values
    if not len(values) or (values.min() >= 0 and (tokenizer is None or values.max() <= most)):
        return
    reach = "2**63 - 1" if tokenizer is None else f"{most}, the vocabulary of {tokenizer.name}"
    problems.add_tokens(
        lists.ragged,
        (values < 0) | (values > most),
        lambda value, token: f"{name} has {value} at token {token}, expected ids from 0 to {reach}",
    )


def checked_mask(mask: ListColumn | None, response: ListColumn, name: str, problems: RolloutProblems) -> Ragged:
    """Loss mask; all tokens of a row without one are supervised."""
    flags = np.ones(len(response.ragged.values), np.bool_)
    if mask is not None and _same_lengths(mask, response, name, problems):
        if not mask.missing.any():
            return mask.ragged
        flags[np.repeat(~mask.missing, response.lengths)] = mask.ragged.values
    return Ragged(flags, response.ragged.offsets)


def checked_numbers(
    lists: ListColumn, response: ListColumn, mask: Ragged, name: str, problems: RolloutProblems, changed: dict[str, int]
) -> Ragged | None:
    """Numbers that are finite on supervised tokens, and 0 instead of others on masked ones; None for no column."""
    if lists.missing.all() and not len(lists.odd):
        return None
    lacking = np.flatnonzero(lists.missing & (response.lengths > 0))
    others = int((~lists.missing).sum())
    problems.add(lacking, f"{name} is missing, and {others} other rows have it; give it for all rows, or for none")
    if not _same_lengths(lists, response, name, problems) or len(lacking):
        return None
    values = lists.ragged.values
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.sum(values)):  # so is every one of them
            return lists.ragged
    endless = ~np.isfinite(values)
    if not endless.any():
        return lists.ragged
    problems.add_tokens(
        lists.ragged,
        endless & mask.values,
        lambda value, token: (
            f"{name} has {value} at token {token} of the response, which is supervised; expected a finite number"
        ),
    )
    changed[f"{name} of masked tokens set to 0"] = int(endless.sum())
    return Ragged(np.where(endless, np.float32(0), values), lists.ragged.offsets)


def check_logprobs(column: Ragged | None, mask: Ragged, name: str, problems: RolloutProblems) -> None:
    """Report log-probs of supervised tokens that are clearly above 0."""
    if column is None or not np.fmax.reduce(column.values, initial=0.0) > LOGPROB_ROUNDING:
        return
    flat = Ragged(column.flat, column.offsets - column.offsets[0])
    problems.add_tokens(
        flat,
        (flat.values > LOGPROB_ROUNDING) & mask.flat.astype(np.bool_),
        lambda value, token: (
            f"{name} has {value:g} at token {token} of the response, expected log-probabilities, which are at most 0 "
            f"(up to {LOGPROB_ROUNDING:g} passes as rounding); if these are probabilities, give their logarithms"
        ),
    )


def _same_lengths(lists: ListColumn, response: ListColumn, name: str, problems: RolloutProblems) -> bool:
    """True if every list has as many entries as its response has tokens."""
    wrong = np.flatnonzero(~lists.missing & (lists.lengths != response.lengths))
    problems.add(
        wrong,
        lambda row: f"{name} has {lists.lengths[row]} entries, the response has {response.lengths[row]} tokens",
    )
    return not len(wrong)
