"""What a trainer is handed: the arrays of one step, as an object and as the keywords of a model's `forward`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.batching.backends import Backend, backend_of, batch_dtype, block_diagonal_mask, get_backend
from penstock.batching.backends.base import Array, Device, PendingCopy, exactly
from penstock.errors import ConfigError, SchemaError

__all__ = ["TrainingBatch"]

_TOKENWISE = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "document_ids")
_ARRAYS = (*_TOKENWISE, "cu_seqlens")
_NUMBERS = ("max_seqlen", "num_items_in_batch")
_MASKS = frozenset({"attention_mask", "document_ids"})
"""Fields that tell tokens from padding."""
NO_FIELDS: dict[str, Any] = dict.fromkeys((*_ARRAYS, *_NUMBERS))
"""Every array and number of a batch, as it is in one that has none."""
_AS_THEY_ARE = frozenset({"input_ids", "labels", "position_ids"})
"""Fields that a model is given as they are, whether rows are packed or not."""
# Hugging Face's names for where documents begin and how long the longest is, of queries and of keys.
_FLASH = {
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}


@dataclass(eq=False, repr=False)
class TrainingBatch(MutableMapping[str, Any]):
    """One step's arrays, of NumPy, torch, MLX or JAX: `model(**batch)`, or field by field.

        input_ids           (rows, tokens)
        attention_mask      1 is a token, 0 padding; None when there is no padding
        labels              unshifted; -100 where nothing is to be learned
        loss_mask           the same as a mask, if asked for
        metadata            where it came from, never given to a model
        position_ids        from 0 in every document
        cu_seqlens          where documents begin in the rows laid end to end, int32; a run of padding counts as one, so
                            the last is rows x tokens
        max_seqlen          the longest of them
        document_ids        documents from 1, padding 0, int32
        num_items_in_batch  tokens to be learned in the whole global batch, the number to divide a summed loss by

    As a mapping it holds what `as_dict()` does, a model's keywords, and `len` is their number; the rows are
    `batch_size`. Every field can also be looked up by its name. Assigned keys that are no fields are kept and given to
    the model too. `type(batch)(mapping)` makes one of such keywords, which is how trainers rebuild a batch.

    Two batches are equal if they are the same object.
    """

    input_ids: Array = None
    attention_mask: Array | None = None
    labels: Array | None = None
    loss_mask: Array | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    position_ids: Array | None = None
    cu_seqlens: Array | None = None
    max_seqlen: int | None = None
    document_ids: Array | None = None
    num_items_in_batch: int | None = None
    _others: dict[str, Any] = field(default_factory=dict, init=False)
    _hidden: set[str] = field(default_factory=set, init=False)
    _num_tokens: int | None = field(default=None, init=False)
    _packed: bool = field(default=False, init=False)
    """Whether its loader packs documents into rows, which `cu_seqlens` tells too, if it is among the fields."""
    _mask_lost: bool = field(default=False, init=False)
    """Whether a mask may have been left out, so that its absence does not say that there is no padding."""
    _pending_copy: PendingCopy | None = field(default=None, init=False)
    """The copies to a device that whoever takes the batch has to be ordered with, until it is taken."""

    def __post_init__(self) -> None:
        if isinstance(self.input_ids, (Mapping, Iterator)):
            given, self.input_ids = self.input_ids, None
            self.update(dict(given))
            self._mask_lost = True
            if isinstance(given, TrainingBatch):
                self._num_tokens, self._packed = given._num_tokens, given._packed

    @classmethod
    def from_numpy(
        cls,
        arrays: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        backend: str | Backend = "torch",
        *,
        device: Device = None,
        num_tokens: int | None = None,
    ) -> Self:
        """A batch of some framework's arrays, sharing memory with those given where it can.

        `arrays` has the fields by name; None is the same as leaving one out. `num_tokens` saves counting them later.
        Arrays made in the types of `batch_dtype` are not converted.
        """
        given = {key: value for key, value in arrays.items() if value is not None}
        _check(given)
        chosen, batch = get_backend(backend), cls(metadata=dict(metadata or {}))
        for key, value in given.items():
            if key in _ARRAYS:
                exact = exactly(value, batch_dtype(key, value.dtype, chosen), key)
                setattr(batch, key, chosen.from_numpy(exact, device=device))
            else:
                setattr(batch, key, int(value))
        if batch.max_seqlen is None and "cu_seqlens" in given:
            batch.max_seqlen = _longest(given["cu_seqlens"])
        batch._num_tokens = num_tokens
        return batch

    @classmethod
    def of_collated(
        cls,
        arrays: Mapping[str, Any],
        metadata: dict[str, Any],
        backend: Backend,
        tokens: int,
        *,
        packed: bool = False,
    ) -> Self:
        """The same of arrays that `collate` made for this backend, which need no checking; with `tokens` that are not
        padding, and maybe several documents to a row."""
        batch = cls.__new__(cls)
        made = vars(batch)
        made.update(NO_FIELDS)
        for key, value in arrays.items():
            made[key] = value if key in _NUMBERS else backend.from_numpy(value)
        made["metadata"], made["_others"], made["_hidden"], made["_num_tokens"] = metadata, {}, set(), tokens
        made["_packed"] = packed
        if packed and "cu_seqlens" in arrays and "max_seqlen" not in arrays:
            made["max_seqlen"] = _longest(arrays["cu_seqlens"])  # while it is known without waiting for a device
        return batch

    def to_numpy(self) -> dict[str, Any]:
        """The fields there are, without metadata, as `from_numpy` takes them: the same whichever framework it was."""
        numpy, own = get_backend("numpy"), self.backend
        found: dict[str, Any] = {key: own.to_numpy(value) for key, value in self._arrays().items() if key in _ARRAYS}
        found = {key: exactly(value, batch_dtype(key, value.dtype, numpy), key) for key, value in found.items()}
        return found | {key: value for key in _NUMBERS if (value := getattr(self, key)) is not None}

    @property
    def backend(self) -> Backend:
        """The backend its arrays are of."""
        first = next(iter(self._arrays().values()), None)
        return get_backend("numpy") if first is None else backend_of(first)

    @property
    def batch_size(self) -> int:
        """Rows. A padding-free batch has one, however many documents are in it."""
        return int(self.input_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding. Every loader says how many; otherwise they are counted from `attention_mask` or
        `document_ids` when asked for, and on a GPU that waits for it. An error where neither is there and rows may be
        padded all the same: packed ones, and those of a batch that was rebuilt from a mapping."""
        if self._num_tokens is not None:
            return self._num_tokens
        for mask in (self.attention_mask, self.document_ids):
            if mask is not None and len(mask.shape) == 2:
                return int((mask != 0).sum())
        if self._mask_lost or self._packed or self.cu_seqlens is not None:
            raise ConfigError(
                "num_tokens is not known: nothing in this batch tells tokens from padding; ask before the batch is "
                "rebuilt or its mask removed, or keep attention_mask or document_ids among its fields"
            )
        return math.prod(self.input_ids.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, those in the metadata included."""
        values = [*self._arrays().values(), *self.metadata.values()]
        return sum(int(value.nbytes) for value in values if _is_array(value))

    def all_arrays(self) -> list[Array]:
        """Every array that `to` moves; for `array.record_stream(stream)`, say."""
        return list(self._arrays().values())

    def to(self, device: Device, non_blocking: bool = False) -> Self:
        """The batch with its arrays on another device; metadata stays where it is.

        torch: any device. JAX: a device, a sharding, or a name such as "gpu:0". MLX arrays are on every device
        already, and NumPy's on "cpu" only: another device is an error there.

        torch copies on the current stream of the calling thread. With `non_blocking` the copy from pinned memory is
        not waited for; the pinned memory is kept until it is done. A copy to the CPU is always waited for.
        """
        backend = self.backend
        return self._with(lambda array: backend.to(array, device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, so that `to(device, non_blocking=True)` overlaps with computation.

        Itself, unchanged, when there is nothing to pin for: no accelerator, or a framework other than torch.
        """
        pinned, mine = self._with(self.backend.pin_memory), self._arrays()
        return self if all(array is mine[key] for key, array in pinned._arrays().items()) else pinned

    def block_mask(self, causal: bool = True, *, dtype: str = "bool") -> Array:
        """(rows, 1, tokens, tokens): attention within documents only, see `block_diagonal_mask`."""
        ids = self.document_ids
        if ids is None and self.cu_seqlens is None and not self._packed:
            ids = self.attention_mask  # one document a row
        if ids is None:
            raise ConfigError(
                "block_mask needs document_ids, or the attention_mask of rows that are not packed; got none: let the "
                "loader's fields name document_ids"
            )
        return block_diagonal_mask(ids, causal, dtype=dtype)

    def as_dict(self, *, num_items_in_batch: bool = False, block_mask: str | None = None) -> dict[str, Any]:
        """The keywords of a Hugging Face model: `model(**batch.as_dict())`. Metadata is never among them.

        input_ids, labels, position_ids, attention_mask as far as there are any. For packed rows also where documents
        begin, as FlashAttention needs it (cu_seq_lens_q and _k, max_length_q and _k), use_cache=False, and no
        attention_mask: with a cache or a mask, transformers does not look for documents, and they see each other. The
        padding behind them is harmless: causal attention does not look ahead, and nothing is learned there.

        `block_mask`: "bool" or a float type, for attention that does not know documents by itself. A mask of
        rows x tokens x tokens then takes the place of all that; "bool" for SDPA, the model's own type for "eager".
        `num_items_in_batch`: adds that, for models that divide their loss by it.
        """
        packed = self.cu_seqlens is not None
        # Without cu_seqlens, transformers finds documents by their positions, as long as there is no mask.
        by_position = not packed and self._packed and self.position_ids is not None
        hidden = (packed or by_position) and self.attention_mask is not None and len(self.attention_mask.shape) == 2
        mask = None if hidden else self.attention_mask
        if block_mask is not None:
            mask, packed, by_position = self.block_mask(dtype=block_mask), False, False
        found = {
            "input_ids": self.input_ids,
            "attention_mask": mask,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "num_items_in_batch": self.num_items_in_batch if num_items_in_batch else None,
        }
        if packed:
            longest = _longest(self.backend.to_numpy(self.cu_seqlens)) if self.max_seqlen is None else self.max_seqlen
            found |= {name: longest if key == "max_seqlen" else self.cu_seqlens for name, key in _FLASH.items()}
        if packed or by_position:
            found["use_cache"] = False
        found |= self._others
        return {key: value for key, value in found.items() if value is not None and key not in self._hidden}

    # As a mapping: the keywords of as_dict(); Accelerate, Lightning and the Hugging Face Trainer treat batches as one.

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __getitem__(self, key: str) -> Any:
        if key in _AS_THEY_ARE and key not in self._hidden:
            value = getattr(self, key)
            if value is not None:
                return value
        keywords = self.as_dict()
        if key in keywords:
            return keywords[key]
        value = getattr(self, key) if key in _FIELDS else None
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._hidden.discard(key)
        key = _FLASH.get(key, key)
        if key in _FIELDS:
            self._before_change(key, value)
            setattr(self, key, value)
        else:
            self._others[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        if key in _FIELDS:
            self._before_change(key, None)
            setattr(self, key, {} if key == "metadata" else None)
        else:
            self._others.pop(key, None)
            self._hidden.add(key)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> Self:
        return self._with(lambda array: array)

    def __repr__(self) -> str:
        parts = [f"{key}={_describe(value)}" for key, value in self._arrays().items()]
        parts += [f"{key}={value}" for key in _NUMBERS if (value := getattr(self, key)) is not None]
        return f"TrainingBatch({', '.join([self.backend.name, *parts])}, metadata={sorted(self.metadata)})"

    def _arrays(self) -> dict[str, Array]:
        """Fields and other keys that are arrays."""
        own = {key: value for key in _ARRAYS if (value := getattr(self, key)) is not None}
        return own | {key: value for key, value in self._others.items() if _is_array(value)}

    def _before_change(self, key: str, value: Any) -> None:
        """Forget what is known of padding, if that may not be true of another value of a field."""
        known, ids = self._num_tokens, self.input_ids
        if key in _MASKS:
            self._mask_lost = self._mask_lost or value is None
            self._num_tokens = known if value is None else None
        elif key == "input_ids" and ids is not None and _shape(value) != _shape(ids):
            self._mask_lost = self._mask_lost or (known is not None and known < math.prod(ids.shape))
            self._num_tokens = None

    def _with(self, change: Any) -> Self:
        """A copy whose arrays went through a function."""
        changed = {key: change(value) for key, value in self._arrays().items()}
        batch = type(self)(metadata=dict(self.metadata), max_seqlen=self.max_seqlen)
        batch.num_items_in_batch, batch._num_tokens = self.num_items_in_batch, self._num_tokens
        batch._packed, batch._mask_lost = self._packed, self._mask_lost
        batch._hidden, batch._others = (
            set(self._hidden),
            self._others | {key: changed.pop(key) for key in self._others if key in changed},
        )
        for key, value in changed.items():
            setattr(batch, key, value)
        return batch


_FIELDS = frozenset(part.name for part in fields(TrainingBatch) if not part.name.startswith("_"))


def _check(given: Mapping[str, Any]) -> None:
    """What a packed batch says in several ways has to agree, or documents would silently see each other."""
    known = (*_ARRAYS, *_NUMBERS)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(
            f"a batch has no field {unknown[0]!r}{did_you_mean(unknown[0], known)}; it has {', '.join(known)}; "
            f"anything else belongs in metadata"
        )
    if "input_ids" not in given:
        raise SchemaError(f"a batch needs input_ids, got {', '.join(given) or 'nothing'}")
    shape = given["input_ids"].shape
    if len(shape) != 2:
        raise SchemaError(f"input_ids must be of shape (rows, tokens), got {shape}")
    for key in _TOKENWISE:
        if key in given and given[key].shape != shape:
            raise SchemaError(f"{key} must have the shape of input_ids, {shape}, got {given[key].shape}")
    if "cu_seqlens" in given:
        starts, size = given["cu_seqlens"], given["input_ids"].size
        if starts.ndim != 1 or not len(starts) or starts[0] != 0 or starts[-1] != size:
            raise SchemaError(
                f"cu_seqlens must go from 0 to {size}, the size of input_ids, padding included as runs of its own; got "
                f"shape {starts.shape}"
                + (f" from {starts[0]} to {starts[-1]}" if starts.ndim == 1 and len(starts) else "")
            )


def _longest(cu_seqlens: npt.NDArray[Any]) -> int:
    return int(np.diff(cu_seqlens).max(initial=0))


def _shape(array: Array) -> tuple[int, ...] | None:
    return tuple(array.shape) if hasattr(array, "shape") else None


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "nbytes")


def _describe(array: Array) -> str:
    """`int64[8, 2048]`"""
    return f"{str(array.dtype).rpartition('.')[2]}{list(array.shape)}"
