"""Slices of sequences for the ranks of a context-parallel group.

    contiguous          each sequence in equal parts: rank i has part i
    zigzag              each sequence in 2 x ranks parts: rank i has part i and, counted from the end, part i again, so
                        that causal attention costs every rank the same
    zigzag_documents    the same for each document of packed rows by itself; all rows are laid end to end

Slices are cut from the finished arrays of a batch, so the unsliced batch is the definition of what a slice holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import offsets_of
from penstock.batching.backends.base import Array
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import IGNORE, HostFields, spread
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, SchemaError

Ints = npt.NDArray[np.int64]
Slicing = Literal["contiguous", "zigzag", "zigzag_documents"]
SLICINGS: tuple[str, ...] = get_args(Slicing)
_FILL = {"labels": IGNORE}
"""Values of padding, where they are not 0."""
_EXTRA = ("shift_labels", "global_cu_seqlens", "global_max_seqlen")


@dataclass(frozen=True, slots=True)
class ContextSlice:
    """Slice of every sequence for one rank of a context-parallel group."""

    rank: Rank
    slicing: Slicing = "zigzag"

    def __post_init__(self) -> None:
        if self.slicing not in SLICINGS:
            raise ConfigError(f"a slicing is one of {', '.join(SLICINGS)}, got {self.slicing!r}")

    @property
    def parts(self) -> int:
        """Number of equal parts of a sequence, which is padded to a multiple of it."""
        return self.rank.world_size * (1 if self.slicing == "contiguous" else 2)

    @property
    def own_parts(self) -> tuple[int, ...]:
        """Parts of this rank, in order."""
        rank = self.rank.rank
        return (rank,) if self.slicing == "contiguous" else (rank, self.parts - 1 - rank)


class ContextBatch(TrainingBatch):
    """Slice of a batch for one rank of a context-parallel group; see `TrainingBatch`.

        input_ids, position_ids ...     (rows, tokens of a slice); positions are those in the whole document
        shift_labels                    target of each token: the label of its successor in the whole sequence, which
                                        may be in the slice of another rank; -100 where there is none
        loss_mask                       the same as a mask
        labels                          None: a model or a loss that shifts them would lose the targets at the borders
        cu_seqlens, max_seqlen          boundaries of documents in this slice: the tokens of a document are one run
        global_cu_seqlens, global_max_seqlen
                                        the same of the whole rows, padded as slices need it
        num_items_in_batch              supervised tokens of the whole global batch, the divisor of a summed loss

    As a mapping it has `shift_labels`, and the same array as `labels`: Hugging Face's models compute a loss if there
    are labels, and take `shift_labels` as they are. It has no boundaries for FlashAttention, which would attend within
    the slice alone: attention has to be that of a library for context parallelism, which gets them by name.
    """

    @property
    def shift_labels(self) -> Array | None:
        """Target of each token, -100 where there is none; not to be shifted again."""
        return self._others.get("shift_labels")

    @property
    def global_cu_seqlens(self) -> Array | None:
        """Boundaries of documents in the whole rows laid end to end, with padding; None if rows are not packed."""
        return self._others.get("global_cu_seqlens")

    @property
    def global_max_seqlen(self) -> int | None:
        """Longest document of the whole rows, with padding."""
        return self._others.get("global_max_seqlen")

    def as_dict(self, *, num_items_in_batch: bool = False, block_mask: str | None = None) -> dict[str, Any]:
        """Keywords of a model whose attention spans the slices of all ranks."""
        if block_mask is not None:
            self.block_mask()
        targets, packed = self.shift_labels, self._packed or self.cu_seqlens is not None
        others = {key: value for key, value in self._others.items() if key not in _EXTRA}
        found = {
            "input_ids": self.input_ids,
            "attention_mask": None if packed else self.attention_mask,
            "labels": targets,
            "shift_labels": targets,
            "position_ids": self.position_ids,
            "num_items_in_batch": self.num_items_in_batch if num_items_in_batch else None,
            "use_cache": False if packed else None,
            **others,
        }
        return {key: value for key, value in found.items() if value is not None and key not in self._hidden}

    def block_mask(self, causal: bool = True, *, dtype: str = "bool") -> Array:
        """An error: the tokens of a slice attend to those of other slices."""
        raise ConfigError(
            "a slice of a context-parallel rank has no block mask, since its tokens attend to those of other ranks; "
            "make it of the whole batch (leave out context=), or use an attention for context parallelism"
        )

    def to_numpy(self) -> dict[str, Any]:
        own, found = self.backend, super().to_numpy()
        for key, dtype in (("shift_labels", np.int64), ("global_cu_seqlens", np.int32)):
            if key in self._others:
                found[key] = own.to_numpy(self._others[key]).astype(dtype, copy=False)
        return found if self.global_max_seqlen is None else found | {"global_max_seqlen": self.global_max_seqlen}

    def __getitem__(self, key: str) -> Any:
        return self._others[key] if key in self._others and key not in self._hidden else super().__getitem__(key)

    def __repr__(self) -> str:
        return super().__repr__().replace("TrainingBatch", type(self).__name__, 1)


def slice_context(batch: TrainingBatch, context: ContextSlice, *, pad_id: int = 0) -> ContextBatch:
    """Slice of a batch for a rank. Together, the slices of all ranks have every token and every target exactly once.

    Sequences (for `zigzag_documents`: documents) are padded to a multiple of `context.parts`, with `pad_id` unless the
    loader that made the batch knows another. A contiguous slice of a single row shares its memory. Slices are in main
    memory: slice a batch before it goes to a device, as loaders do with `context=`.
    """
    if type(batch) is not TrainingBatch:
        sliced = isinstance(batch, ContextBatch)
        reason = "it is a slice already; pass the whole batch" if sliced else "only texts and chats have slices"
        raise ConfigError(f"a {type(batch).__name__} cannot be sliced for context parallelism: {reason}")
    deferred, real = batch._deferred, None
    if isinstance(deferred, HostFields):
        real, pad_id = deferred.compact.grid.real(), deferred.compact.layout.pad_id
    backend = batch.backend
    arrays: dict[str, npt.NDArray[Any]] = {key: backend.to_numpy(value) for key, value in batch._arrays().items()}
    _check_columns(arrays, context)
    shape, boundaries = arrays["input_ids"].shape, arrays.pop("cu_seqlens", None)
    by_token = {key: value for key, value in arrays.items() if value.shape == shape}
    kept = {key: batch._others[key] for key in batch._others if key not in by_token}
    if real is None:
        real = next((by_token[key] != 0 for key in ("document_ids", "attention_mask") if key in by_token), None)
    if real is not None:
        by_token["real"] = real
    for key in ("labels", "loss_mask"):
        if key in by_token:
            by_token[key] = _shifted(by_token[key], _FILL.get(key, 0))
    fill = {**_FILL, "input_ids": pad_id}
    if context.slicing == "zigzag_documents":
        assert boundaries is not None
        ends: Ends | None
        slices, ends = _document_slices(by_token, boundaries.astype(np.int64), context, fill)
    else:
        slices, ends = _row_slices(by_token, boundaries, context, fill)
    found = slices.pop("real", None)
    tokens = slices["input_ids"].size if found is None else int(np.count_nonzero(found))
    targets = slices.pop("labels", None)
    others = {key: slices.pop(key) for key in [*slices] if key in batch._others}
    if ends is not None:
        slices["cu_seqlens"], others["global_cu_seqlens"] = ends
    if targets is not None:
        others["shift_labels"] = targets
    place = {"rank": context.rank.rank, "world_size": context.rank.world_size, "slicing": context.slicing}
    made = ContextBatch.of_collated(
        slices, {**batch.metadata, "context": place}, backend, tokens, packed=batch._packed or ends is not None
    )
    made._others = {**kept, **{key: backend.from_numpy(value) for key, value in others.items()}}
    if ends is not None:
        made._others["global_max_seqlen"] = int(np.diff(ends[1]).max(initial=0))
    made.num_items_in_batch, made._hidden = batch.num_items_in_batch, set(batch._hidden)
    if found is None and (batch._mask_lost or batch._packed):
        made._num_tokens, made._mask_lost = None, True
    return made


def _check_columns(arrays: dict[str, npt.NDArray[Any]], context: ContextSlice) -> None:
    needed = {"input_ids": "", "position_ids": "a model would count the tokens of a slice from 0"}
    if context.slicing == "zigzag_documents":
        needed["cu_seqlens"] = "documents are sliced one by one; rows that are not packed are sliced by 'zigzag'"
    for name, reason in needed.items():
        if name not in arrays:
            raise SchemaError(
                f"context={context.slicing!r} needs {name}, and the batch has {', '.join(arrays) or 'nothing'}"
                f"{': ' * bool(reason)}{reason}; add {name} to the fields of the loader"
            )


def _shifted(array: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
    """Value of the next token of a row; the last token has none."""
    found = np.empty_like(array)
    found[:, :-1], found[:, -1] = array[:, 1:], fill
    return found


Ends = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Boundaries of documents in a slice, and in the whole."""


def _row_slices(
    arrays: dict[str, npt.NDArray[Any]],
    boundaries: npt.NDArray[Any] | None,
    context: ContextSlice,
    fill: dict[str, int],
) -> tuple[dict[str, npt.NDArray[Any]], Ends | None]:
    rows, tokens = arrays["input_ids"].shape
    each = -(-tokens // context.parts)
    cuts = [(part * each, (part + 1) * each) for part in context.own_parts]
    slices = {key: _columns(array, cuts, fill.get(key, 0)) for key, array in arrays.items()}
    if boundaries is None:
        return slices, None
    count = len(boundaries) - 1
    runs = np.repeat(np.arange(count), np.diff(boundaries)).reshape(rows, tokens)
    if each * context.parts > tokens:  # the padding of each row is a run of its own
        more = np.repeat(np.arange(count, count + rows)[:, None], each * context.parts - tokens, axis=1)
        runs = np.concatenate([runs, more], axis=1)
    return slices, (_boundaries(_columns(runs, cuts, 0)), _boundaries(runs))


def _columns(array: npt.NDArray[Any], cuts: list[tuple[int, int]], fill: int) -> npt.NDArray[Any]:
    """Columns of a grid, in contiguous memory: trainers flatten them. A view, if there is one row and one cut."""
    parts = [array[:, low:high] for low, high in cuts]
    short = sum(high - low for low, high in cuts) - sum(part.shape[1] for part in parts)
    if short:
        parts.append(np.full((len(array), short), fill, array.dtype))
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=1)


def _boundaries(runs: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    flat = runs.reshape(-1)
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    return np.concatenate([[0], changes, [flat.size]]).astype(np.int32)


def _document_slices(
    arrays: dict[str, npt.NDArray[Any]], boundaries: Ints, context: ContextSlice, fill: dict[str, int]
) -> tuple[dict[str, npt.NDArray[Any]], Ends]:
    lengths = np.diff(boundaries)
    each = -(-lengths // context.parts)
    starts = offsets_of(each * context.parts)
    own = np.array(context.own_parts, np.int64)
    at = starts[:-1, None] + own * each[:, None]
    index = spread(at.reshape(-1), np.repeat(each, len(own)))
    document = np.repeat(np.arange(len(lengths)), each * len(own))
    inside = index - starts[document]
    padding = inside >= lengths[document]
    source = np.where(padding, 0, boundaries[document] + inside)
    slices = {}
    for key, array in arrays.items():
        taken = array.reshape(-1)[source]
        taken[padding] = inside[padding] if key == "position_ids" else fill.get(key, 0)
        slices[key] = taken.reshape(1, -1)
    return slices, (offsets_of(each * len(own)).astype(np.int32), starts.astype(np.int32))
