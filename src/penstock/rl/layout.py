"""What batches of rollouts look like, and where each token goes in them.

sides    [ padding | prompt ][ response | padding ]    a row each; what is known per token is as wide as responses
free     [ prompt | response | prompt | response | ... | padding ]    one row, and what is known per token as wide
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.batching.backends.base import ALIGNMENT
from penstock.batching.collate import FIELDS
from penstock.errors import ConfigError

__all__ = ["FILLS", "RolloutForm", "RolloutLayout", "TokenLayout", "blank", "count_up", "widths"]

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
