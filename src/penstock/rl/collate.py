"""Arrays of a batch of rollouts: its layout, and the copy of table rows into it.

sides    [ padding | prompt ][ response | padding ]    a row each; per-token columns are as wide as responses
free     [ prompt | response | prompt | response | ... | padding ]    one row; per-token columns are as wide as it

Rows are copied slice by slice from the table into the batch, so padding changes no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged, offsets_of
from penstock.arrays.truncation import Policy, Truncation
from penstock.batching.backends.base import ALIGNMENT, exactly
from penstock.batching.collate import FIELDS, IGNORE
from penstock.errors import ConfigError, DataError
from penstock.rl.rollout import PER_TOKEN, RolloutTable

Ints = npt.NDArray[np.int64]
IntOrInts = TypeVar("IntOrInts", int, Ints)

LENGTH_FIELDS = ("attention_mask", "position_ids")
"""Fields of padded rows that follow from the lengths alone."""
DEFERRED_FIELDS = (*LENGTH_FIELDS, "labels", "loss_mask")
"""Fields of padded rows that can be made later."""
SUPERVISED = "supervised_tokens"
"""Metadata that `assemble` leaves for `RolloutBatch`: the source of labels and loss mask."""
FILLS = {"denominators": 1}
"""Fill of per-token metadata outside of responses, if not 0."""
_TOKEN_NAMES = {
    "logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_probs",
    "values": "values",
    "token_rewards": "token_scores",  # as given; computed ones are handed in as token_rewards
}
"""Metadata names of the table's per-token columns."""
_ROW_NAMES = {
    "rewards": "rewards",
    "groups": "groups",
    "ids": "ids",
    "versions": "policy_versions",
    "finish_reasons": "finish_reasons",
    "tokenized": "tokenized",
}
"""Metadata names of the table's per-row columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutForm:
    """Form of all batches of a loader."""

    padding: Literal["sides", "free"] = "sides"
    """"sides": prompts padded on the left and responses on the right, so that responses start in one column.
    "free": all rollouts end to end in one row."""
    pad_id: int = 0
    pad_to_multiple_of: int = 1
    """Multiple for the widths of prompts and of responses, or for the single row without padding."""
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    prompt_truncation: Literal["error", "left", "right"] = "error"
    response_truncation: Literal["error", "right"] = "error"
    """Responses can only be cut at the end: tokens after another cut would lack the context they were sampled in."""
    fixed: bool = False
    """Prompts and responses are padded to the longest that is allowed: one shape for all batches."""
    integer: npt.DTypeLike = np.int64
    fields: frozenset[str] = frozenset(FIELDS)

    def __post_init__(self) -> None:
        for name, known in {
            "padding": ("sides", "free"),
            "prompt_truncation": ("error", "left", "right"),
            "response_truncation": ("error", "right"),
        }.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, known))}, got {getattr(self, name)!r}")
        if self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of must be positive, got {self.pad_to_multiple_of}")
        for name in ("max_prompt_length", "max_response_length"):
            length = getattr(self, name)
            if length is not None and length < 1:
                raise ConfigError(f"{name} must be positive, got {length}")
            if self.fixed and length is None:
                raise ConfigError(f"fixed widths need {name}, got None")
        if self.fixed and self.padding == "free":
            raise ConfigError("fixed widths need padding='sides', got 'free'")
        if not 0 <= self.pad_id <= np.iinfo(np.dtype(self.integer)).max:
            raise ConfigError(f"pad_id must be a token id that fits {np.dtype(self.integer)}, got {self.pad_id}")
        for name in self.fields:
            if name not in FIELDS:
                raise ConfigError(f"a batch has no field {name!r}{did_you_mean(name, FIELDS)}; it has {list(FIELDS)}")


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """Layout of one batch, for its parts and its micro-batches."""

    form: RolloutForm
    prompt_width: int
    """Columns of `input_ids` before the responses; 0 without padding."""
    per_token: tuple[str, ...]
    """Metadata with a number for each response token."""
    per_row: tuple[str, ...]
    """Metadata with an entry for each rollout."""


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Flat positions of rollouts in the arrays of a batch."""

    rows: int
    tokens: int
    prompt_width: int
    column_shape: tuple[int, int]
    """Shape of per-token columns."""
    at: Ints
    """Start of each rollout."""
    responses: Ints
    """Start of its response."""
    columns: Ints
    """Start of its response in per-token columns."""
    lengths: Ints

    @classmethod
    def of(cls, prompts: Ints, responses: Ints, form: RolloutForm) -> TokenLayout:
        """Layout of rollouts with prompts and responses of these lengths."""
        lengths = prompts + responses
        if form.padding == "free":
            tokens = round_up(int(lengths.sum()), form.pad_to_multiple_of)
            at = np.cumsum(lengths) - lengths
            return cls(1, tokens, 0, (1, tokens), at, at + prompts, at + prompts, lengths)
        rows, (left, right) = len(prompts), widths(prompts, responses, form)
        numbers = np.arange(rows, dtype=np.int64)
        begin = numbers * (left + right) + left
        return cls(rows, left + right, left, (rows, right), begin - prompts, begin, numbers * right, lengths)

    def fields(self, form: RolloutForm, names: frozenset[str]) -> dict[str, Any]:
        """Positions, and masks or document boundaries, as far as they are among these names."""
        if form.padding == "free":
            return self.documents(form.integer)
        found: dict[str, Any] = {}
        shape = (self.rows, self.tokens)
        if "position_ids" in names:
            found["position_ids"] = _filled(shape, form.integer)
            _count_up(found["position_ids"], self.at, self.lengths)
        if "attention_mask" in names:
            found["attention_mask"] = _filled(shape, form.integer)
            _repeat(found["attention_mask"], self.at, self.lengths, np.ones(self.rows, np.int64))
        return found

    def documents(self, integer: npt.DTypeLike) -> dict[str, Any]:
        """Document boundaries of a single row without padding, in four encodings. Padding is one more document."""
        positions = _filled((1, self.tokens), integer)
        _count_up(positions, self.at, self.lengths)
        used = int(self.lengths.sum())
        positions[0, used:] = np.arange(self.tokens - used)
        numbers = _filled((1, self.tokens), np.int32)
        numbers[0, :used] = np.repeat(np.arange(1, len(self.lengths) + 1, dtype=np.int32), self.lengths)
        ends = np.unique(np.concatenate([self.at, [used, self.tokens]])).astype(np.int32)
        return {
            "position_ids": positions,
            "document_ids": numbers,
            "cu_seqlens": ends,
            "max_seqlen": int(np.diff(ends).max()),
        }


@dataclass(frozen=True, slots=True)
class SupervisedTokens:
    """Source of the labels and the loss mask of padded rows: columns of a table, which nothing writes into."""

    ids: Ragged
    mask: Ragged
    rows: Ints
    """Row of the table for each row of the batch."""
    lengths: Ints
    """Tokens of each response that are in the batch."""

    def make(self, name: str, left: int, width: int, integer: npt.DTypeLike) -> npt.NDArray[Any]:
        """Field with `left` columns before the responses, of `width` columns."""
        shape, at = (len(self.rows), width), np.arange(len(self.rows), dtype=np.int64) * width + left
        starts, lengths = self.mask.offsets[self.rows], np.minimum(self.lengths, width - left)
        if name == "loss_mask":
            found = _between(shape, np.bool_, at, lengths)
            _copy(self.mask.values, starts, lengths, found, at)
            return found
        where = None if bool(self.mask.flat.all()) else (self.mask.values, starts)
        found = _filled(shape, integer, IGNORE) if where else _between(shape, integer, at, lengths, IGNORE)
        _copy(self.ids.values, self.ids.offsets[self.rows], lengths, found, at, where)
        return found

    def take(self, rows: Ints) -> SupervisedTokens:
        return replace(self, rows=self.rows[rows], lengths=self.lengths[rows])


def widths(prompts: Ints, responses: Ints, form: RolloutForm) -> tuple[int, int]:
    """Columns for prompts and for responses of these lengths. Responses have at least one."""
    multiple = form.pad_to_multiple_of
    if form.fixed:
        return round_up(form.max_prompt_length or 0, multiple), round_up(form.max_response_length or 0, multiple)
    return round_up(int(prompts.max()), multiple), round_up(max(int(responses.max()), 1), multiple)


def round_up(number: IntOrInts, multiple: int) -> IntOrInts:
    """Smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


def assemble(
    table: RolloutTable,
    form: RolloutForm,
    *,
    rows: npt.ArrayLike | None = None,
    per_token: Mapping[str, Ragged] | None = None,
    per_row: Mapping[str, npt.ArrayLike] | None = None,
    num_items_in_batch: int | None = None,
    deferred: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and metadata of a batch of the rollouts `rows` (None: all) of a table, in their order.

    `per_token` and `per_row` are further columns, of all rollouts of the table. Per-token columns become metadata
    shaped as `response_mask`: (rows, response tokens), or as `input_ids` without padding; 0 outside of responses.
    Per-row columns become (rows, ...). Without padding "denominators" are per token, 1 outside of responses, since the
    loss is. "sequence_advantages" without "advantages" make these: the number of a row, where the response mask is 1.
    Floats have at most 32 bits, names are lists. "layout" lists which is which.

    `deferred` leaves out the fields of padded rows that `RolloutBatch` makes when they are read (`DEFERRED_FIELDS`),
    and adds their source to the metadata.

    `num_items_in_batch` is the number of supervised tokens of the global batch; None: of this one.
    """
    chosen = np.arange(len(table)) if rows is None else np.asarray(rows, np.int64)
    if not len(chosen):
        raise DataError("a batch needs at least one rollout, got none")
    parts = _Parts.of(table, chosen, form)
    token_columns = _token_columns(table, parts, per_token or {}, form)
    row_columns = _row_columns(table, parts, per_row or {})
    layout = TokenLayout.of(parts.prompts, parts.responses, form)
    shape, left = (layout.rows, layout.tokens), layout.prompt_width

    ids = _between(shape, form.integer, layout.at, layout.lengths, form.pad_id)
    _copy(_fitting("prompt_ids", table, parts, form).values, parts.prompt_starts, parts.prompts, ids, layout.at)
    parts.copy_responses(_fitting("response_ids", table, parts, form), ids, layout.responses)
    mask = _between(layout.column_shape, np.bool_, layout.columns, parts.responses)
    parts.copy_responses(table.loss_mask, mask, layout.columns)
    _check_first_tokens(table, parts)

    deferred = deferred and form.padding == "sides"
    made = form.fields.difference(DEFERRED_FIELDS) if deferred else form.fields
    arrays: dict[str, Any] = {"input_ids": ids} | layout.fields(form, made)
    if "labels" in made:
        arrays["labels"] = _filled(shape, form.integer, IGNORE)
        np.copyto(arrays["labels"][:, left:], ids[:, left:], where=mask)
    if "loss_mask" in made:
        arrays["loss_mask"] = _filled(shape, np.bool_)
        arrays["loss_mask"][:, left:] = mask
    arrays["num_items_in_batch"] = int(np.count_nonzero(mask)) if num_items_in_batch is None else num_items_in_batch

    metadata: dict[str, Any] = {"response_mask": mask}
    if deferred:
        own = parts.rows.copy(), parts.responses.copy()  # the lengths are metadata, which may be written into
        metadata[SUPERVISED] = SupervisedTokens(table.response_ids, table.loss_mask, *own)
    for name, column in token_columns.items():
        kind = _narrow(column.values.dtype, form)
        metadata[name] = _between(layout.column_shape, kind, layout.columns, parts.responses)
        parts.copy_responses(column, metadata[name], layout.columns)
    if "sequence_advantages" in row_columns and "advantages" not in token_columns:
        of_rows = row_columns["sequence_advantages"].astype(np.float32)
        metadata["advantages"] = _between(layout.column_shape, np.float32, layout.columns, parts.responses)
        _repeat(metadata["advantages"], layout.columns, parts.responses, of_rows)
        if not table.loss_mask.flat.all():
            np.copyto(metadata["advantages"], 0, where=~mask)
        token_names = (*token_columns, "advantages")
    else:
        token_names = tuple(token_columns)
    repeated = ("denominators",) if form.padding == "free" and "denominators" in row_columns else ()
    for name in repeated:
        of_rows = row_columns.pop(name)
        metadata[name] = _filled(layout.column_shape, _narrow(of_rows.dtype, form), FILLS.get(name, 0))
        _repeat(metadata[name], layout.columns, parts.responses, of_rows)
    metadata |= {name: _row_values(name, column, form) for name, column in row_columns.items()}
    metadata["layout"] = RolloutLayout(form, left, ("response_mask", *token_names, *repeated), tuple(row_columns))
    return {name: value for name, value in arrays.items() if name in form.fields}, metadata


def truncate(table: RolloutTable, form: RolloutForm) -> tuple[RolloutTable, Ints]:
    """Table truncated to the limits of the form, and the number of tokens that each rollout lost.

    `assemble` truncates by itself; this is for numbers that depend on lengths, such as denominators. Rewards of removed
    tokens go to the last one that is kept.
    """
    parts = _Parts.of(table, np.arange(len(table)), form)
    if not parts.truncated.any():
        return table, parts.truncated

    def shortened(column: Ragged, starts: Ints, lengths: Ints) -> Ragged:
        offsets = offsets_of(lengths)
        values = np.empty(int(offsets[-1]), column.values.dtype)
        _copy(column.values, starts, lengths, values, offsets[:-1])
        return Ragged(values, offsets)

    names = ("response_ids", "loss_mask", *PER_TOKEN)
    columns: dict[str, Any] = {name: column for name in names if (column := getattr(table, name)) is not None}
    columns = {name: shortened(column, column.offsets[:-1], parts.responses) for name, column in columns.items()}
    if (whole := table.token_rewards) is not None:
        kept = columns["token_rewards"]
        for row in np.flatnonzero(kept.lengths < whole.lengths).tolist():
            kept.values[kept.offsets[row + 1] - 1] += whole[row][int(kept.lengths[row]) :].sum()
    prompts = shortened(table.prompt_ids, parts.prompt_starts, parts.prompts)
    return replace(table, prompt_ids=prompts, **columns), parts.truncated


@dataclass(frozen=True, slots=True)
class _Parts:
    """Parts of rollouts that go into a batch, after truncation."""

    rows: Ints
    prompt_starts: Ints
    """Start of each prompt in the values of the column."""
    prompts: Ints
    responses: Ints
    whole_responses: Ints
    truncated: Ints

    @classmethod
    def of(cls, table: RolloutTable, rows: Ints, form: RolloutForm) -> _Parts:
        prompts, responses = _lengths(table.prompt_ids, rows), _lengths(table.response_ids, rows)
        before, left = _limited(form.max_prompt_length, form.prompt_truncation, prompts, "prompt", table, rows)
        _, right = _limited(form.max_response_length, form.response_truncation, responses, "response", table, rows)
        starts = table.prompt_ids.offsets[rows] + before
        return cls(rows, starts, left, right, responses, prompts - left + responses - right)

    def copy_responses(self, column: Ragged, out: npt.NDArray[Any], at: Ints) -> None:
        """Copy the values of responses to these positions."""
        _copy(column.values, column.offsets[self.rows], self.responses, out, at)


def _limited(
    limit: int | None, rule: Policy, lengths: Ints, part: str, table: RolloutTable, rows: Ints
) -> tuple[Ints, Ints]:
    """First token and number of tokens that are kept of each prompt, or of each response."""
    long = np.flatnonzero(lengths > limit) if limit is not None else rows[:0]
    if len(long) and rule == "error":
        row = int(rows[long[0]])
        raise DataError(
            f"the {part} of rollout {table.ids[row]!r} has {lengths[long[0]]} tokens, more than "
            f"max_{part}_length={limit}; {len(long)} of {len(rows)} are longer; raise the limit, leave such rollouts "
            f"out, or pass {part}_truncation='right'{' or left' if part == 'prompt' else ''}",
            row=row,
        )
    _, starts, kept = Truncation(rule, limit).parts(lengths)
    return starts, kept


def _check_first_tokens(table: RolloutTable, parts: _Parts) -> None:
    """Refuse a supervised token without a token before it, and rollouts without tokens."""
    for place in np.flatnonzero(parts.prompts == 0).tolist():
        row, empty = int(parts.rows[place]), parts.responses[place] == 0
        if empty or table.loss_mask[row][0]:
            missing = "and no response" if empty else "to predict the first token of its response from"
            raise DataError(
                f"rollout {table.ids[row]!r} has no prompt {missing}; give the tokens that the policy was given, "
                "at least a BOS token",
                row=row,
            )


def _token_columns(
    table: RolloutTable, parts: _Parts, given: Mapping[str, Ragged], form: RolloutForm
) -> dict[str, Ragged]:
    """Per-token columns by their names in metadata."""
    own = {new: column for old, new in _TOKEN_NAMES.items() if (column := getattr(table, old)) is not None}
    found: dict[str, Ragged] = own | dict(given)
    for name, column in (found | {"loss_mask": table.loss_mask}).items():
        if len(column) != len(table):
            raise DataError(f"{name} has {len(column)} rollouts, the table has {len(table)}")
        lengths = _lengths(column, parts.rows)
        wrong = np.flatnonzero(lengths != parts.whole_responses)
        if len(wrong):
            row = int(parts.rows[wrong[0]])
            raise DataError(
                f"{name} of rollout {table.ids[row]!r} has {lengths[wrong[0]]} numbers, its response "
                f"{parts.whole_responses[wrong[0]]} tokens; give one per token",
                row=row,
            )
    for name, column in found.items():
        if column.values.dtype.kind in "iu":
            values = exactly(column.values, _narrow(column.values.dtype, form), name)
            found[name] = Ragged(values, column.offsets)
    return found


def _row_columns(table: RolloutTable, parts: _Parts, given: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
    """Per-row columns by their names in metadata."""
    whole = {new: getattr(table, old) for old, new in _ROW_NAMES.items()}
    whole |= {name: np.asarray(column) for name, column in given.items()}
    for name, column in whole.items():
        if column.shape[:1] != (len(table),):
            raise DataError(f"{name} has shape {column.shape}; give an entry for each of {len(table)} rollouts")
    found = {name: column[parts.rows] for name, column in whole.items()}
    found |= {"prompt_length": parts.prompts, "response_length": parts.responses, "truncated_tokens": parts.truncated}
    free = table.metadata[parts.rows]
    return found | {"rollout_metadata": free} if any(len(entry) for entry in free) else found


def _fitting(name: str, table: RolloutTable, parts: _Parts, form: RolloutForm) -> Ragged:
    """Column of ids that fit the integers of the form: an assignment would wrap others silently."""
    column: Ragged = getattr(table, name)
    kind, most = column.values.dtype, np.iinfo(np.dtype(form.integer)).max
    if np.iinfo(kind).max > most:
        for row in parts.rows.tolist():
            if (largest := column[row].max(initial=0)) > most:
                raise DataError(
                    f"{name} of rollout {table.ids[row]!r} has the id {largest}, which {np.dtype(form.integer)} "
                    "cannot hold",
                    row=row,
                )
    return column


def _row_values(name: str, column: npt.NDArray[Any], form: RolloutForm) -> Any:
    if column.dtype.kind not in "biuf":
        return column.tolist()
    wanted = _narrow(column.dtype, form)
    return exactly(column, wanted, name) if column.dtype.kind in "iu" else column.astype(wanted, copy=False)


def _narrow(dtype: np.dtype[Any], form: RolloutForm) -> np.dtype[Any]:
    """Type in a batch, which its framework can hold."""
    if dtype.kind == "f" and dtype.itemsize > 4:
        return np.dtype(np.float32)
    return np.dtype(form.integer) if dtype.kind in "iu" and dtype.itemsize > 4 else dtype


def _lengths(column: Ragged, rows: Ints) -> Ints:
    return column.offsets[rows + 1] - column.offsets[rows]


def _filled(shape: tuple[int, ...], dtype: npt.DTypeLike, fill: int = 0) -> npt.NDArray[Any]:
    """Array of one number, aligned so that frameworks can share its memory."""
    if not fill:
        return _aligned(shape, np.dtype(dtype), np.zeros)  # zeros from the system: no page is written twice
    array = _aligned(shape, np.dtype(dtype), np.empty)
    array.fill(fill)
    return array


def _between(shape: tuple[int, ...], dtype: npt.DTypeLike, at: Ints, lengths: Ints, fill: int = 0) -> npt.NDArray[Any]:
    """Array like `_filled` in which only the places before, between and after these pieces are written; pieces are in
    the order of their places."""
    array = _aligned(shape, np.dtype(dtype), np.empty)
    flat, end = array.reshape(-1), 0
    for place, following in zip(at.tolist(), (at + lengths).tolist()):
        flat[end:place] = fill
        end = following
    flat[end:] = fill
    return array


def _aligned(shape: tuple[int, ...], kind: np.dtype[Any], make: Any) -> npt.NDArray[Any]:
    nbytes = int(np.prod(shape)) * kind.itemsize
    memory: npt.NDArray[np.uint8] = make(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(shape)


def _copy(
    values: npt.NDArray[Any],
    starts: Ints,
    lengths: Ints,
    out: npt.NDArray[Any],
    at: Ints,
    where: tuple[npt.NDArray[np.bool_], Ints] | None = None,
) -> None:
    """Copy rows slice by slice: faster than an index of all elements, from a few dozen elements on.

    `where` has flags and the start of each row in them: only values with true flags are copied.
    """
    flat = out.reshape(-1)
    if where is None:
        for start, length, place in zip(starts.tolist(), lengths.tolist(), at.tolist()):
            flat[place : place + length] = values[start : start + length]
        return
    flags, firsts = where
    for start, length, place, first in zip(starts.tolist(), lengths.tolist(), at.tolist(), firsts.tolist()):
        kept = flags[first : first + length]
        np.copyto(flat[place : place + length], values[start : start + length], casting="same_kind", where=kept)


def _repeat(out: npt.NDArray[Any], at: Ints, lengths: Ints, values: npt.NDArray[Any]) -> None:
    """Write each value `lengths[i]` times from `at[i]` on."""
    flat = out.reshape(-1)
    for place, length, value in zip(at.tolist(), lengths.tolist(), values.tolist()):
        flat[place : place + length] = value


def _count_up(out: npt.NDArray[Any], at: Ints, lengths: Ints) -> None:
    """Write 0, 1, 2 ... from each position on."""
    flat, numbers = out.reshape(-1), np.arange(int(lengths.max(initial=0)), dtype=out.dtype)
    for place, length in zip(at.tolist(), lengths.tolist()):
        flat[place : place + length] = numbers[:length]
