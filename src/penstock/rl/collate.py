"""From rows of a table to the arrays of a batch.

Rows are copied slice by slice, straight from the table into the batch. Nothing is computed of a number on its way, so
padding never changes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged
from penstock.batching.backends.base import ALIGNMENT, exactly
from penstock.batching.collate import FIELDS, IGNORE
from penstock.errors import ConfigError, DataError
from penstock.rl.rollout import RolloutTable

__all__ = [
    "FILLS",
    "RolloutForm",
    "RolloutLayout",
    "TokenLayout",
    "assemble",
    "blank",
    "count_up",
    "truncate",
    "widths",
]


Ints = npt.NDArray[np.int64]
FILLS = {"denominators": 1}
"""What metadata per token has where there is no response, if not 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutForm:
    """What batches of rollouts look like, whatever is in them."""

    padding: Literal["sides", "free"] = "sides"
    """"sides": prompts are padded at the left and responses at the right, so that responses begin in one column.
    "free": all rollouts end to end in one row."""
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    """Of the width of prompts and of responses; of the whole row if there is but one."""
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    prompt_truncation: Literal["error", "left", "right"] = "error"
    """Where a longer prompt loses tokens."""
    response_truncation: Literal["error", "right"] = "error"
    """The same of responses, which can be cut at the end only: what follows a cut would have lost its reasons."""
    fixed: bool = False
    """Whether prompts and responses are as wide as the longest that is allowed, in every batch: one shape for all."""
    integer: npt.DTypeLike = np.int64
    fields: frozenset[str] = frozenset(FIELDS)

    def __post_init__(self) -> None:
        _one_of("padding", self.padding, ("sides", "free"))
        _one_of("prompt_truncation", self.prompt_truncation, ("error", "left", "right"))
        _one_of("response_truncation", self.response_truncation, ("error", "right"))
        if self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be positive, got {self.pad_to_multiple_of}")
        for name in ("max_prompt_length", "max_response_length"):
            length = getattr(self, name)
            if length is not None and length < 1:
                raise ConfigError(f"{name} must be positive, got {length}")
            if self.fixed and length is None:
                raise ConfigError(f"fixed widths need {name}, got None")
        if self.fixed and self.padding == "free":
            raise ConfigError("fixed widths are for padding='sides'; without padding there is nothing to fix")
        if not 0 <= self.pad_id <= np.iinfo(np.dtype(self.integer)).max:
            raise ConfigError(f"pad_id must be a token id that {np.dtype(self.integer)} can hold, got {self.pad_id}")
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(f"a batch has no field {name!r}{did_you_mean(name, FIELDS)}; it has {list(FIELDS)}")


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """What a batch has to know of itself to be looked at in parts, and to be cut into smaller ones."""

    form: RolloutForm
    prompt_width: int
    """Columns of `input_ids` before the responses; 0 without padding."""
    per_token: tuple[str, ...]
    """Names of the metadata with a number for each response token."""
    per_row: tuple[str, ...]
    """Names of the metadata with an entry for each rollout."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the tokens of rollouts go, counted through the rows of an array."""

    rows: int
    tokens: int
    prompt_width: int
    column_shape: tuple[int, int]
    """Of what is known per token."""
    at: Ints
    """Where a rollout begins."""
    responses: Ints
    """Where its response begins."""
    columns: Ints
    """Where that is in an array of what is known per token."""
    lengths: Ints

    @classmethod
    def of(cls, prompts: Ints, responses: Ints, form: RolloutForm) -> TokenLayout:
        """The places of rollouts with prompts and responses of these lengths."""
        lengths = prompts + responses
        if form.padding == "free":
            tokens = _round_up(int(lengths.sum()), form.pad_to_multiple_of)
            at = np.cumsum(lengths) - lengths
            return cls(1, tokens, 0, (1, tokens), at, at + prompts, at + prompts, lengths)
        rows, (left, right) = len(prompts), widths(prompts, responses, form)
        numbers = np.arange(rows, dtype=np.int64)
        begin = numbers * (left + right) + left
        return cls(rows, left + right, left, (rows, right), begin - prompts, begin, numbers * right, lengths)

    def documents(self, integer: npt.DTypeLike) -> dict[str, Any]:
        """Of a single row without padding: where rollouts begin, said in four ways. The rest of the row is one more."""
        positions = blank((1, self.tokens), integer)
        count_up(positions, self.at, self.lengths)
        used = int(self.lengths.sum())
        positions[0, used:] = np.arange(self.tokens - used)
        numbers = blank((1, self.tokens), np.int32)
        numbers[0, :used] = np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)
        ends = np.unique(np.concatenate([self.at, [used, self.tokens]])).astype(np.int32)
        return {
            "position_ids": positions,
            "document_ids": numbers,
            "cu_seqlens": ends,
            "max_seqlen": int(np.diff(ends).max()),
        }


def widths(prompts: Ints, responses: Ints, form: RolloutForm) -> tuple[int, int]:
    """Columns for prompts and for responses of these lengths. Responses have at least one."""
    multiple = form.pad_to_multiple_of
    if form.fixed:
        return _round_up(form.max_prompt_length or 0, multiple), _round_up(form.max_response_length or 0, multiple)
    return _round_up(int(prompts.max()), multiple), _round_up(max(int(responses.max()), 1), multiple)


def count_up(out: npt.NDArray[Any], at: Ints, lengths: Ints) -> None:
    """0, 1, 2 ... from each place on."""
    flat, numbers = out.reshape(-1), np.arange(int(lengths.max(initial=0)), dtype=out.dtype)
    for place, length in zip(at.tolist(), lengths.tolist()):
        flat[place : place + length] = numbers[:length]


def blank(shape: tuple[int, ...], dtype: npt.DTypeLike, fill: int = 0) -> npt.NDArray[Any]:
    """Zeros, or another number, where frameworks can share the memory."""
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    memory = np.zeros(nbytes + ALIGNMENT, np.uint8)  # the system's own zeros: nothing is written twice
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + nbytes].view(kind).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {given!r}")


# What the columns of a table are called in a batch.
_PER_TOKEN = {
    "logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_probs",
    "values": "values",
    "token_rewards": "token_scores",  # as given; what is computed of them is handed in as token_rewards
}
_PER_ROW = {
    "rewards": "rewards",
    "groups": "groups",
    "ids": "ids",
    "versions": "policy_versions",
    "finish_reasons": "finish_reasons",
    "tokenized": "tokenized",
}


def assemble(
    table: RolloutTable,
    form: RolloutForm,
    *,
    rows: npt.ArrayLike | None = None,
    per_token: Mapping[str, Ragged] | None = None,
    per_row: Mapping[str, npt.ArrayLike] | None = None,
    num_items_in_batch: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a batch, and its metadata, of the rollouts `rows` (None: all) of a table, in their order.

    `per_token` and `per_row` are columns more, of all rollouts of the table. Those per token come to metadata as
    arrays like `response_mask`: (rows, response tokens), or without padding shaped as `input_ids`; 0 where there is no
    response. Those per row come as (rows, ...), but "denominators" without padding, which are to be had where the
    loss is: at each token, 1 where there is no response. Floats are at most 32 bits wide, names are lists. "layout"
    says which is which.

    `num_items_in_batch`: tokens to learn in the whole global batch; None: in this one.
    """
    chosen = np.arange(len(table)) if rows is None else np.asarray(rows, np.int64)
    if not len(chosen):
        raise DataError("a batch needs at least one rollout, got none")
    parts = _Parts.of(table, chosen, form)
    token_columns = _token_columns(table, parts, per_token or {}, form)
    row_columns = _row_columns(table, parts, per_row or {})
    places = TokenLayout.of(parts.prompts, parts.responses, form)
    shape, left = (places.rows, places.tokens), places.prompt_width

    ids = blank(shape, form.integer, form.pad_id)
    _copy(_held("prompt_ids", table, parts, form).values, parts.prompt_starts, parts.prompts, ids, places.at)
    parts.spread(_held("response_ids", table, parts, form), ids, places.responses)
    mask = blank(places.column_shape, np.bool_)
    parts.spread(table.loss_mask, mask, places.columns)
    _check_first_tokens(table, parts)

    arrays: dict[str, Any] = {"input_ids": ids} | _described(places, form)
    if "labels" in form.fields:
        arrays["labels"] = blank(shape, form.integer, IGNORE)
        np.copyto(arrays["labels"][:, left:], ids[:, left:], where=mask)
    if "loss_mask" in form.fields:
        arrays["loss_mask"] = blank(shape, np.bool_)
        arrays["loss_mask"][:, left:] = mask
    arrays["num_items_in_batch"] = int(np.count_nonzero(mask)) if num_items_in_batch is None else num_items_in_batch

    metadata: dict[str, Any] = {"response_mask": mask}
    for name, column in token_columns.items():
        metadata[name] = blank(places.column_shape, _narrow(column.values.dtype, form))
        parts.spread(column, metadata[name], places.columns)
    spread = ("denominators",) if form.padding == "free" and "denominators" in row_columns else ()
    for name in spread:
        of_rows = row_columns.pop(name)
        metadata[name] = blank(places.column_shape, _narrow(of_rows.dtype, form), FILLS.get(name, 0))
        _fill(metadata[name], places.columns, parts.responses, of_rows)
    metadata |= {name: _handed_over(name, column, form) for name, column in row_columns.items()}
    metadata["layout"] = RolloutLayout(form, left, ("response_mask", *token_columns, *spread), tuple(row_columns))
    return {name: value for name, value in arrays.items() if name in form.fields}, metadata


def truncate(table: RolloutTable, form: RolloutForm) -> tuple[RolloutTable, Ints]:
    """The table as batches of that form will have it, and how many tokens each rollout lost.

    `assemble` cuts by itself. Whoever computes something of lengths, as denominators are, cuts before. Rewards of
    tokens that are cut off go to the last that is kept, as the reward of the response does.
    """
    parts = _Parts.of(table, np.arange(len(table)), form)
    if not parts.cut.any():
        return table, parts.cut

    def shortened(column: Ragged, starts: Ints, lengths: Ints) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        values = np.empty(int(offsets[-1]), column.values.dtype)
        _copy(column.values, starts, lengths, values, offsets[:-1])
        return Ragged(values, offsets)

    names = ("response_ids", "loss_mask", "token_rewards", "logprobs", "ref_logprobs", "values")
    columns: dict[str, Any] = {name: column for name in names if (column := getattr(table, name)) is not None}
    columns = {name: shortened(column, column.offsets[:-1], parts.responses) for name, column in columns.items()}
    if table.token_rewards is not None:
        _keep_rewards(table.token_rewards, columns["token_rewards"])
    return replace(
        table, prompt_ids=shortened(table.prompt_ids, parts.prompt_starts, parts.prompts), **columns
    ), parts.cut


def _keep_rewards(whole: Ragged, kept: Ragged) -> None:
    """What whole responses have more of rewards than what is kept of them, to the last token that is."""
    for row in np.flatnonzero(kept.lengths < whole.lengths).tolist():
        kept.values[kept.offsets[row + 1] - 1] += whole[row][int(kept.lengths[row]) :].sum()


@dataclass(frozen=True, slots=True)
class _Parts:
    """The part of each rollout that goes into the batch."""

    rows: Ints
    prompt_starts: Ints
    """Where it begins in the values of the prompts."""
    prompts: Ints
    responses: Ints
    whole_responses: Ints
    cut: Ints
    """Tokens that do not."""

    @classmethod
    def of(cls, table: RolloutTable, rows: Ints, form: RolloutForm) -> _Parts:
        prompts, responses = _lengths(table.prompt_ids, rows), _lengths(table.response_ids, rows)
        kept = _at_most(form.max_prompt_length, form.prompt_truncation, prompts, "prompt", table, rows)
        told = _at_most(form.max_response_length, form.response_truncation, responses, "response", table, rows)
        starts = table.prompt_ids.offsets[rows]
        if form.prompt_truncation == "left":
            starts = starts + (prompts - kept)
        return cls(rows, starts, kept, told, responses, prompts - kept + responses - told)

    def spread(self, column: Ragged, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy what a column has for the responses to these places."""
        _copy(column.values, column.offsets[self.rows], self.responses, out, at)


def _at_most(limit: int | None, rule: str, lengths: Ints, part: str, table: RolloutTable, rows: Ints) -> Ints:
    if limit is None:
        return lengths
    long = np.flatnonzero(lengths > limit)
    if len(long) and rule == "error":
        row = int(rows[long[0]])
        raise DataError(
            f"the {part} of rollout {table.ids[row]!r} has {lengths[long[0]]} tokens, more than "
            f"max_{part}_length={limit}; {len(long)} of {len(rows)} are longer; raise the limit, leave such rollouts "
            f"out, or pass {part}_truncation='right'{' or left' if part == 'prompt' else ''}",
            row=row,
        )
    return np.minimum(lengths, limit)


def _check_first_tokens(table: RolloutTable, parts: _Parts) -> None:
    """Refuses to learn a token that nothing comes before, and rollouts without any."""
    for place in np.flatnonzero(parts.prompts == 0).tolist():
        row, empty = int(parts.rows[place]), parts.responses[place] == 0
        if empty or table.loss_mask[row][0]:
            what = "and no response" if empty else "to predict the first token of its response from"
            raise DataError(
                f"rollout {table.ids[row]!r} has no prompt {what}; give the tokens that the policy was given, "
                f"a BOS token at least",
                row=row,
            )


def _token_columns(
    table: RolloutTable, parts: _Parts, given: Mapping[str, Ragged], form: RolloutForm
) -> dict[str, Ragged]:
    """All there is per response token, by the names it has in metadata."""
    found: dict[str, Ragged] = {}
    for old, new in _PER_TOKEN.items():
        if (column := getattr(table, old)) is not None:
            found[new] = column
    found |= given
    for name, column in (found | {"loss_mask": table.loss_mask}).items():
        if len(column) != len(table):
            raise DataError(f"{name} is of {len(column)} rollouts, the table has {len(table)}")
        lengths = _lengths(column, parts.rows)
        wrong = np.flatnonzero(lengths != parts.whole_responses)
        if len(wrong):
            row = int(parts.rows[wrong[0]])
            raise DataError(
                f"{name} of rollout {table.ids[row]!r} has {lengths[wrong[0]]} numbers, its response "
                f"{parts.whole_responses[wrong[0]]} tokens; one each is needed",
                row=row,
            )
    return {name: _exact(name, column, form) for name, column in found.items()}


def _row_columns(table: RolloutTable, parts: _Parts, given: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
    """All there is per rollout."""
    whole = {new: getattr(table, old) for old, new in _PER_ROW.items()}
    whole |= {name: np.asarray(column) for name, column in given.items()}
    for name, column in whole.items():
        if column.shape[:1] != (len(table),):
            raise DataError(f"{name} has shape {column.shape}; an entry for each of {len(table)} rollouts is needed")
    found = {name: column[parts.rows] for name, column in whole.items()}
    found |= {"prompt_length": parts.prompts, "response_length": parts.responses, "truncated_tokens": parts.cut}
    free = table.metadata[parts.rows]
    return found | {"rollout_metadata": free} if any(len(entry) for entry in free) else found


def _described(places: TokenLayout, form: RolloutForm) -> dict[str, Any]:
    """What is known of all tokens, whatever they are."""
    if form.padding == "free":
        return places.documents(form.integer)
    found: dict[str, Any] = {}
    shape = (places.rows, places.tokens)
    if "position_ids" in form.fields:
        found["position_ids"] = blank(shape, form.integer)
        count_up(found["position_ids"], places.at, places.lengths)
    if "attention_mask" in form.fields:
        found["attention_mask"] = blank(shape, form.integer)
        flat = found["attention_mask"].reshape(-1)
        for at, length in zip(places.at.tolist(), places.lengths.tolist()):
            flat[at : at + length] = 1
    return found


def _copy(values: npt.NDArray[Any], starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
    """Rows, slice by slice: quicker than an index of all their elements from a few dozen elements on."""
    flat = out.reshape(-1)
    for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist()):
        flat[place : place + length] = values[start : start + length]


def _fill(out: npt.NDArray[Any], at: Ints, lengths: Ints, values: npt.NDArray[Any]) -> None:
    """From each place on, so many times the same value."""
    flat = out.reshape(-1)
    for place, length, value in zip(at.tolist(), lengths.tolist(), values.tolist()):
        flat[place : place + length] = value


def _held(name: str, table: RolloutTable, parts: _Parts, form: RolloutForm) -> Ragged:
    """The column, if its ids fit the integers of the form: an assignment would cut them off and say nothing."""
    column: Ragged = getattr(table, name)
    kind, most = column.values.dtype, np.iinfo(np.dtype(form.integer)).max
    if np.iinfo(kind).max > most:
        for row in parts.rows.tolist():
            if (largest := column[row].max(initial=0)) > most:
                raise DataError(
                    f"{name} of rollout {table.ids[row]!r} has the id {largest}, which {np.dtype(form.integer)} "
                    f"cannot hold",
                    row=row,
                )
    return column


def _exact(name: str, column: Ragged, form: RolloutForm) -> Ragged:
    kind = column.values.dtype
    if kind.kind not in "iu":
        return column
    return Ragged(exactly(column.values, _narrow(kind, form), name), column.offsets)


def _handed_over(name: str, column: npt.NDArray[Any], form: RolloutForm) -> Any:
    if column.dtype.kind not in "biuf":
        return column.tolist()
    wanted = _narrow(column.dtype, form)
    return exactly(column, wanted, name) if column.dtype.kind in "iu" else column.astype(wanted, copy=False)


def _narrow(dtype: np.dtype[Any], form: RolloutForm) -> np.dtype[Any]:
    """The type in a batch: what its framework can hold."""
    if dtype.kind == "f" and dtype.itemsize > 4:
        return np.dtype(np.float32)
    return np.dtype(form.integer) if dtype.kind in "iu" and dtype.itemsize > 4 else dtype


def _lengths(column: Ragged, rows: Ints) -> Ints:
    return column.offsets[rows + 1] - column.offsets[rows]
