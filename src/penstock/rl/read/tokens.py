"""Rollouts as they lie in other people's arrays, as a prompt and a response: padding cut off, one sequence cut in two,
turns put one behind the other.

Whatever is cut is cut by whole arrays. Numbers per token of a response are cut along with it if they are as long as it
was; otherwise they are left as they are, for the check of lengths to find.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged
from penstock.arrays.text import plain
from penstock.errors import ConfigError
from penstock.rl.column_aliases import DIALECTS, PER_TOKEN, Meaning, alike
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

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

__all__ = [
    "LOGPROB_ROUNDING",
    "OWN_ROLES",
    "PromptResponse",
    "TokenRules",
    "check_ids",
    "check_logprobs",
    "checked_mask",
    "checked_numbers",
    "firsts",
    "lasts",
    "read_parts",
    "read_turns",
    "rows_to_keep",
    "windows",
]


Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """Prompt, response, and what is known of each token of it; None for what no column says."""

    prompt: ListColumn | None
    response: ListColumn | None
    mask: ListColumn | None = None
    per_token: dict[str, ListColumn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShapeReader:
    """The columns that the fields are in."""

    columns: dict[str, Column]
    meaning: Meaning
    problems: RolloutProblems

    def lists(self, name: str, kind: Kind) -> ListColumn | None:
        """A field as lists; what is not a list of such numbers is a problem."""
        column = self.meaning.fields.get(name)
        if column is None:
            return None
        found = as_lists(self.columns[column], kind)
        self.problems.add(found.odd, lambda row: f"{column} is {found.describe(row)}, expected {EXPECTED[kind]}")
        return found

    def called(self, name: str) -> str:
        """What a field is called in the data."""
        return self.meaning.fields.get(name, name)


def read_parts(columns: dict[str, Column], meaning: Meaning, problems: RolloutProblems) -> PromptResponse:
    """The token columns of rollouts of any shape."""
    reader = ShapeReader(columns, meaning, problems)
    per_token = {name: found for name in PER_TOKEN if (found := reader.lists(name, "floats")) is not None}
    if "sequences" in meaning.fields:
        return _from_sequences(reader, per_token)
    if "tokens" in meaning.fields:
        return _from_tokens(reader, per_token)
    prompt, response = reader.lists("prompt_ids", "ids"), reader.lists("response_ids", "ids")
    parts = PromptResponse(prompt, response, reader.lists("loss_mask", "mask"), per_token)
    return parts if response is None else _unpadded(reader, parts, response)


# -- padding -----------------------------------------------------------------------------------------------------------


def _unpadded(reader: ShapeReader, parts: PromptResponse, response: ListColumn) -> PromptResponse:
    attention, mask = reader.lists("attention_mask", "mask"), parts.mask
    completion, tool = reader.lists("completion_mask", "mask"), reader.lists("tool_mask", "mask")
    prompt_mask = reader.lists("prompt_mask", "mask")
    if completion is not None:
        parts = replace(parts, mask=_both(completion, tool) if mask is None else _both(mask, completion))
    elif tool is not None:
        parts = replace(parts, mask=tool if mask is None else _both(mask, tool))
    prompt = parts.prompt
    if attention is not None:
        return _by_attention(reader, parts, response, attention)
    if prompt is not None and prompt_mask is not None:
        prompt = _kept(reader, prompt, prompt_mask, "prompt_ids", "prompt_mask")
    elif prompt is not None and prompt.padded and reader.meaning.dialect.padded:
        reader.problems.add_whole(
            f"{reader.called('prompt_ids')} is one array for all rows, filled up to one length, and nothing says what "
            "of it is padding; give attention_mask (or prompt_mask), or a list of arrays of their own lengths"
        )
    parts = replace(parts, prompt=prompt)
    ends = completion if completion is not None else mask
    if not (response.padded and reader.meaning.dialect.padded):
        return parts
    if ends is None or not np.array_equal(ends.lengths, response.lengths):
        reader.problems.add_whole(
            f"{reader.called('response_ids')} is one array for all rows, filled up to one length, and no mask of that "
            "length says what of it is padding; give attention_mask, or a list of arrays of their own lengths"
        )
        return parts
    return _cut(parts, response, lasts(ends.ragged) + 1)


def _by_attention(
    reader: ShapeReader, parts: PromptResponse, response: ListColumn, attention: ListColumn
) -> PromptResponse:
    """One mask over prompt and response together, as verl has it."""
    prompt = parts.prompt
    before = prompt.lengths if prompt is not None else np.zeros(len(response), np.int64)
    wrong = attention.lengths != before + response.lengths
    reader.problems.add(
        np.flatnonzero(wrong),
        lambda row: (
            f"{reader.called('attention_mask')} has {attention.lengths[row]} entries, the prompt has {before[row]} "
            f"tokens and the response {response.lengths[row]}"
        ),
    )
    if wrong.any():
        return parts
    behind = windows(attention.ragged, before, response.lengths)
    lengths = _sums(behind)
    holes = np.flatnonzero(lasts(behind) + 1 != lengths)
    reader.problems.add(
        holes,
        lambda row: (
            f"{reader.called('attention_mask')} has zeros between the tokens of the response; padding is behind"
        ),
    )
    if prompt is not None:
        shown = ListColumn.of(windows(attention.ragged, np.zeros_like(before), before))
        prompt = _kept(reader, prompt, shown, "prompt_ids", "attention_mask")
    return parts if len(holes) else _cut(replace(parts, prompt=prompt), response, lengths)


def _cut(parts: PromptResponse, response: ListColumn, lengths: Ints) -> PromptResponse:
    """The first tokens of each response, and of everything that is as long as it was."""
    full = response.lengths

    def cut(lists: ListColumn | None) -> ListColumn | None:
        if lists is None or not np.array_equal(lists.lengths, full):
            return lists
        return lists.with_ragged(windows(lists.ragged, np.zeros_like(lengths), lengths))

    per_token = {name: cut(lists) or lists for name, lists in parts.per_token.items()}
    return PromptResponse(parts.prompt, cut(response), cut(parts.mask), per_token)


def _kept(reader: ShapeReader, lists: ListColumn, mask: ListColumn, name: str, by: str) -> ListColumn:
    """The tokens that a mask of their length leaves."""
    wrong = mask.lengths != lists.lengths
    reader.problems.add(
        np.flatnonzero(wrong),
        lambda row: (
            f"{reader.called(by)} has {mask.lengths[row]} entries for the {lists.lengths[row]} tokens of "
            f"{reader.called(name)}"
        ),
    )
    if wrong.any() or mask.ragged.values.all():
        return lists
    left = np.concatenate(([0], np.cumsum(mask.ragged.values)))
    kept = Ragged(lists.ragged.values[mask.ragged.values], left[mask.ragged.offsets])
    return lists.with_ragged(kept)


def _both(first: ListColumn, second: ListColumn | None) -> ListColumn:
    if second is None or not np.array_equal(first.lengths, second.lengths):
        return first
    return replace(first, ragged=Ragged(first.ragged.values & second.ragged.values, first.ragged.offsets))


# -- one sequence ------------------------------------------------------------------------------------------------------


def _from_sequences(reader: ShapeReader, per_token: dict[str, ListColumn]) -> PromptResponse:
    """Prompt and response in one, and a mask of actions over the last tokens of it, as OpenRLHF has it.

    The mask is as long as the sequence, or one shorter (the first token is nobody's action), or covers the response
    alone: in each case its last entry is that of the last token. The response begins with the first action.
    """
    whole, actions = reader.lists("sequences", "ids"), reader.lists("action_mask", "mask")
    assert whole is not None
    attention = reader.lists("attention_mask", "mask")
    if actions is None:
        reader.problems.add_whole("sequences need an action_mask, which says where the response is; pass it in columns")
        return PromptResponse(whole, None)
    if attention is None and whole.padded:
        reader.problems.add_whole(
            "sequences is one array for all rows, filled up to one length, and nothing says what of it is padding; "
            "give attention_mask, or a list of arrays of their own lengths"
        )
        return PromptResponse(whole, None)
    total, covered = whole.lengths, actions.lengths
    if _refused(reader, total < covered, lambda row: f"action_mask has {covered[row]} entries for {total[row]} tokens"):
        return PromptResponse(whole, None)
    begin, end = np.zeros_like(total), total
    if attention is not None:
        shown = attention.lengths
        if _refused(
            reader, shown != total, lambda row: f"attention_mask has {shown[row]} entries for {total[row]} tokens"
        ):
            return PromptResponse(whole, None)
        begin, end = np.minimum(firsts(attention.ragged), total), lasts(attention.ragged) + 1
    ahead = total - covered  # tokens before the first that the mask is about
    start = np.clip(firsts(actions.ragged) + ahead, begin, np.maximum(begin, end))
    lengths = np.maximum(end - start, 0)

    def of_response(lists: ListColumn) -> ListColumn:
        if not np.array_equal(lists.lengths, covered):
            return lists  # of the length of the response, or wrong: the check of lengths tells
        return lists.with_ragged(windows(lists.ragged, start - ahead, lengths))

    return PromptResponse(
        whole.with_ragged(windows(whole.ragged, begin, start - begin)),
        whole.with_ragged(windows(whole.ragged, start, lengths)),
        of_response(actions),
        {name: of_response(lists) for name, lists in per_token.items()},
    )


def _from_tokens(reader: ShapeReader, per_token: dict[str, ListColumn]) -> PromptResponse:
    """Prompt and response in one, and how many tokens at the end are the response, as slime has it."""
    whole = reader.lists("tokens", "ids")
    assert whole is not None
    column = reader.meaning.fields.get("response_length")
    mask = reader.lists("loss_mask", "mask")
    if column is None:
        reader.problems.add_whole(
            "tokens hold prompt and response in one, and no response_length says where the response begins; pass it in "
            "columns, or columns={'response_ids': 'tokens'} if they are the response alone"
        )
        return PromptResponse(whole, None)
    counts = as_numbers(reader.columns[column])
    total, given = whole.lengths, counts.values
    wrong = ~((given >= 0) & (given <= total) & (given % 1 == 0))
    wrong[counts.odd] = True
    if _refused(reader, wrong, lambda row: f"{column} is {_shown(given[row])}, expected 0 to {total[row]}, its tokens"):
        return PromptResponse(whole, None)
    lengths = given.astype(np.int64)
    prompt = whole.with_ragged(windows(whole.ragged, np.zeros_like(total), total - lengths))
    response = whole.with_ragged(windows(whole.ragged, total - lengths, lengths))
    return PromptResponse(prompt, response, mask, per_token)


def _refused(reader: ShapeReader, wrong: Flags, tell: Callable[[int], str]) -> bool:
    reader.problems.add(np.flatnonzero(wrong), tell)
    return bool(wrong.any())


def _shown(number: float) -> str:
    return "missing" if np.isnan(number) else f"{number:g}"


# -- rows of different lengths -----------------------------------------------------------------------------------------


def windows(ragged: Ragged, starts: Ints, lengths: Ints) -> Ragged:
    """Of each row the `lengths[i]` entries from `starts[i]` on."""
    if not starts.any() and np.array_equal(lengths, ragged.lengths):
        return ragged
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.repeat(ragged.offsets[:-1] + starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return Ragged(ragged.values[index], offsets)


def _sums(flags: Ragged) -> Ints:
    running = np.concatenate(([0], np.cumsum(flags.values)))
    return np.asarray(running[flags.offsets[1:]] - running[flags.offsets[:-1]], np.int64)


def firsts(flags: Ragged) -> Ints:
    """The place of the first True in each row; the length of the row where there is none."""
    where = np.flatnonzero(flags.values)
    rows, at = np.unique(np.searchsorted(flags.offsets, where, "right") - 1, return_index=True)
    found = flags.lengths.copy()
    found[rows] = where[at] - flags.offsets[rows]
    return found


def lasts(flags: Ragged) -> Ints:
    """The place of the last True in each row; -1 where there is none."""
    where = np.flatnonzero(flags.values)[::-1]
    rows, at = np.unique(np.searchsorted(flags.offsets, where, "right") - 1, return_index=True)
    found = np.full(len(flags), -1, np.int64)
    found[rows] = where[at] - flags.offsets[rows]
    return found


OWN_ROLES = ("assistant", "gpt", "model", "policy", "bot", "ai")
"""Who speaks when the policy does."""
IDS = ("ids", "token_ids", "tokens")
OTHERS = ("system", "developer", "user", "human", "tool", "function", "ipython", "environment", "observation")
"""Who speaks when the policy does not; other roles are taken for such, unless nobody else spoke."""
KEYS = ("role", *IDS, "loss_mask", *PER_TOKEN)
MEANT = {"mask": "loss_mask", "reward": "token_rewards", "rewards": "token_rewards"}
"""What somebody may have called a key, beside what other stacks do."""


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
    prompt = given.prompt if given.prompt is not None else ListColumn.of(_kept_turns(ids.ragged.values, ~behind, edges))
    per_token = dict(given.per_token)
    for key, lists in numbers.items():
        if lists is not None:
            per_token[key] = ListColumn.of(_kept_turns(_spread(lists, ids), behind, edges))
    return PromptResponse(
        prompt,
        ListColumn.of(_kept_turns(ids.ragged.values, behind, edges)),
        ListColumn.of(_kept_turns(flags, behind, edges)),
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


def _kept_turns(values: npt.NDArray[Any], keep: npt.NDArray[np.bool_], edges: Ints) -> Ragged:
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


LOGPROB_ROUNDING = 0.01
"""What a log-probability may be above 0 by: those of bfloat16 logits are, by rounding."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What to do with rows that have nothing to learn from."""

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


def check_ids(lists: ListColumn, name: str, tokenizer: Tokenizer | None, problems: RolloutProblems) -> None:
    """Refuse ids below 0, and those that the tokenizer does not have."""
    most = 2**63 - 1 if tokenizer is None else tokenizer.vocab_size - 1
    values = lists.ragged.values
    if not len(values) or (values.min() >= 0 and values.max() <= most):
        return
    rows, at = _first_of_each(lists.ragged, (values < 0) | (values > most))
    reach = "2**63 - 1" if tokenizer is None else f"{most}, the vocabulary of {tokenizer.name}"
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]} at token {shown[row] - lists.ragged.offsets[row]}, expected ids "
            f"from 0 to {reach}"
        ),
    )


def checked_mask(mask: ListColumn | None, response: ListColumn, name: str, problems: RolloutProblems) -> Ragged:
    """Which tokens are the policy's own: all of them, in rows that do not say otherwise."""
    if mask is not None and not mask.missing.any() and _as_long(mask, response, name, problems):
        return mask.ragged
    flags = np.ones(len(response.ragged.values), np.bool_)
    if mask is not None and _as_long(mask, response, name, problems):
        flags[np.repeat(~mask.missing, response.lengths)] = mask.ragged.values
    return Ragged(flags, response.ragged.offsets)


def checked_numbers(
    lists: ListColumn, response: ListColumn, mask: Ragged, name: str, problems: RolloutProblems, changed: dict[str, int]
) -> Ragged | None:
    """Numbers that are finite where the policy wrote, and 0 where it did not and there was none; None for no column."""
    if lists.missing.all() and not len(lists.odd):
        return None
    lacking = np.flatnonzero(lists.missing & (response.lengths > 0))
    others = int((~lists.missing).sum())
    problems.add(lacking, f"{name} is missing, and {others} other rows have it; give it for all rows, or for none")
    if not _as_long(lists, response, name, problems) or len(lacking):
        return None
    values = lists.ragged.values
    endless = ~np.isfinite(values)
    if not endless.any():
        return lists.ragged
    rows, at = _first_of_each(lists.ragged, endless & mask.values)
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]} at token {shown[row] - lists.ragged.offsets[row]} of the "
            "response, which is to be learned; expected a finite number"
        ),
    )
    changed[f"{name} of masked tokens set to 0"] = int(endless.sum())
    return Ragged(np.where(endless, np.float32(0), values), lists.ragged.offsets)


def check_logprobs(column: Ragged | None, mask: Ragged, name: str, problems: RolloutProblems) -> None:
    """Refuse log-probs of learned tokens that are clearly above 0."""
    if column is None or not (column.values > LOGPROB_ROUNDING).any():
        return
    values, offsets = column.flat, column.offsets - column.offsets[0]
    rows, at = _first_of_each(Ragged(values, offsets), (values > LOGPROB_ROUNDING) & mask.flat.astype(np.bool_))
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]:g} at token {shown[row] - offsets[row]} of the response, expected "
            f"log-probabilities, which are at most 0 (up to {LOGPROB_ROUNDING:g} passes as rounding); if these are "
            "probabilities, give their logarithms"
        ),
    )


def rows_to_keep(
    rules: TokenRules,
    response: ListColumn,
    mask: Ragged,
    rewards: npt.NDArray[np.float64],
    numbers: Mapping[str, Any],
    problems: RolloutProblems,
    changed: dict[str, int],
) -> Flags:
    """Which rows stay; rewards that are missing are set, if that is the rule."""
    keep = np.ones(len(response), np.bool_)
    empty = response.lengths == 0
    masked = np.zeros(len(response), np.bool_)
    if not empty.all():
        masked[~empty] = ~np.logical_or.reduceat(mask.values, mask.offsets[:-1][~empty])
    unscored = np.isnan(rewards) & (numbers.get("token_rewards") is None)
    if rules.missing_rewards == "zero":
        changed["reward missing, set to 0"] = int(unscored.sum())
        rewards[unscored] = 0.0
    for bad, rule, reason, text in (
        (
            empty,
            rules.empty_responses,
            "empty response",
            "the response is empty; pass empty_responses='drop' or 'keep'",
        ),
        (
            masked,
            rules.all_masked,
            "all masked",
            "no token is to be learned, the loss mask is 0 everywhere; pass all_masked='drop' or 'keep'",
        ),
        (
            unscored,
            rules.missing_rewards,
            "missing reward",
            "there is no reward, or it is NaN; pass missing_rewards='zero', 'drop' or 'keep'",
        ),
    ):
        if rule == "error":
            problems.add(np.flatnonzero(bad), text)
        elif rule == "drop":
            changed[reason] = int((bad & keep).sum())
            keep &= ~bad
    return keep


def _as_long(lists: ListColumn, response: ListColumn, name: str, problems: RolloutProblems) -> bool:
    """Whether every row that has a list has as many entries as its response has tokens."""
    wrong = np.flatnonzero(~lists.missing & (lists.lengths != response.lengths))
    problems.add(
        wrong,
        lambda row: f"{name} has {lists.lengths[row]} entries, the response has {response.lengths[row]} tokens",
    )
    return not len(wrong)


def _first_of_each(ragged: Ragged, flags: Flags) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows with a True in them, and where in the values its first one is."""
    where = np.flatnonzero(flags)
    rows, first = np.unique(np.searchsorted(ragged.offsets, where, "right") - 1, return_index=True)
    return rows, where[first]
