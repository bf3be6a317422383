"""Rollouts as they lie in other people's arrays, as a prompt and a response: padding cut off, one sequence cut in two,
turns put one behind the other.

Whatever is cut is cut by whole arrays. Numbers per token of a response are cut along with it if they are as long as it
was; otherwise they are left as they are, for the check of lengths to find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.rl.column_aliases import PER_TOKEN, Meaning
from penstock.rl.read.columns import EXPECTED, Column, Kind, ListColumn, as_lists, as_numbers
from penstock.rl.read.problems import RolloutProblems

__all__ = ["PromptResponse", "firsts", "lasts", "read_parts", "windows"]

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
