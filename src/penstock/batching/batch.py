"""Training batch: the arrays of one step, as fields and as the keywords of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.batching.backends import Backend, backend_of, batch_dtype, block_diagonal_mask, get_backend
from penstock.batching.backends.base import Array, DeferredFields, Device, PendingCopy, exactly
from penstock.batching.collate import CompactBatch, HostFields
from penstock.batching.view import BatchView
from penstock.errors import ConfigError, SchemaError

_TOKENWISE = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "document_ids")
_ARRAYS = (*_TOKENWISE, "cu_seqlens")
_NUMBERS = ("max_seqlen", "num_items_in_batch")
_MASKS = frozenset({"attention_mask", "document_ids"})
"""Fields that distinguish tokens from padding."""
NO_FIELDS: dict[str, Any] = dict.fromkeys((*_ARRAYS, *_NUMBERS))
"""Arrays and numbers of an empty batch."""
_UNCHANGED = frozenset({"input_ids", "labels", "position_ids"})
"""Fields that a model gets unchanged, packed or not."""
# Hugging Face's names for the document boundaries and the longest document, of queries and of keys.
_FLASH = {
    "cu_seq_lens_q": "cu_seqlens",
    "cu_seq_lens_k": "cu_seqlens",
    "max_length_q": "max_seqlen",
    "max_length_k": "max_seqlen",
}


class _BatchFacts(MutableMapping[str, Any]):
    """Facts of a batch that are not fields."""

    _others: dict[str, Any]
    """Keys that are not fields, given to the model too."""
    _hidden: set[str]
    """Deleted keys."""
    _num_tokens: int | None = None
    _packed: bool = False
    """True if the loader packs documents into rows; `cu_seqlens` shows it too, if it is among the fields."""
    _mask_lost: bool = False
    """True if a mask may have been removed, so that its absence does not prove that there is no padding."""
    _pending_copy: PendingCopy | None = None
    """Copies to a device that are not received yet."""
    _deferred: DeferredFields | None = None
    """Fields that are made when they are first read."""


@dataclass(eq=False, repr=False)
class TrainingBatch(BatchView, _BatchFacts):
    """Arrays of one step, of NumPy, torch, MLX or JAX: `model(**batch)`, or field by field.

        input_ids           (rows, tokens)
        attention_mask      1 for tokens, 0 for padding; None without padding
        labels              not shifted; -100 where a token is not supervised
        loss_mask           the same as a mask
        metadata            origin of the rows, never given to a model
        position_ids        from 0 in every document
        cu_seqlens          document boundaries in the rows laid end to end, int32; a run of padding counts as one, so
                            the last is rows x tokens
        max_seqlen          longest document
        document_ids        documents from 1, padding 0, int32
        num_items_in_batch  supervised tokens of the whole global batch, the divisor of a summed loss

    As a mapping it holds the keywords of a model, as `as_dict()` does, and `len` is their number; the number of rows is
    `batch_size`. Every field can be looked up by its name. Other keys can be assigned and are given to the model too.
    `type(batch)(mapping)` makes a batch of such keywords, which is how trainers rebuild one.

    Fields of a loader's batch are made when they are first read: those that nobody reads cost nothing.

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

    def __post_init__(self) -> None:
        self._others, self._hidden = {}, set()
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
        """Batch of a framework's arrays, which share memory with the given ones where the framework can.

        `arrays` has the fields by name; a None is ignored. `num_tokens` saves counting them later. Arrays in the types
        of `batch_dtype` are not converted.
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
        """Batch of arrays that `collate` made for this backend, unchecked, with `tokens` that are not padding.

        `packed`: rows may hold several documents.
        """
        batch = cls.__new__(cls)
        made = vars(batch)
        made.update(NO_FIELDS)
        for key, value in arrays.items():
            made[key] = value if key in _NUMBERS else backend.from_numpy(value)
        made["metadata"], made["_others"], made["_hidden"], made["_num_tokens"] = metadata, {}, set(), tokens
        made["_packed"] = packed
        if packed and "cu_seqlens" in arrays and "max_seqlen" not in arrays:
            made["max_seqlen"] = _longest(arrays["cu_seqlens"])  # now, while no device has to be waited for
        return batch

    @classmethod
    def of_compact(cls, compact: CompactBatch, metadata: dict[str, Any], backend: Backend, tokens: int) -> Self:
        """Batch whose fields are made when they are first read, with `tokens` that are not padding."""
        return cls._of_deferred(HostFields(compact, backend), metadata, tokens, packed=compact.layout.joined)

    @classmethod
    def _of_deferred(cls, made: DeferredFields, metadata: dict[str, Any], tokens: int | None, *, packed: bool) -> Self:
        batch = cls.__new__(cls)
        facts = vars(batch)
        facts.update(metadata=metadata, _others={}, _hidden=set(), _num_tokens=tokens, _packed=packed, _deferred=made)
        return batch

    def __delattr__(self, name: str) -> None:
        if name in NO_FIELDS:
            self.__dict__[name] = None
        else:
            super().__delattr__(name)

    def make_fields(self) -> Self:
        """This batch, with all its fields made."""
        for name in NO_FIELDS:
            getattr(self, name)
        self.__dict__.pop("_deferred", None)
        return self

    def _defer_to(self, device: Device) -> bool:
        """Have the fields made on a device, if none was made yet and the framework can; returns whether it is so."""
        mine = vars(self)
        if self._deferred is None or any(name in mine for name in NO_FIELDS):
            return False
        moved = self._deferred.to(device)
        if moved is not None:
            mine["_deferred"] = moved
        return moved is not None

    def to_numpy(self) -> dict[str, Any]:
        """Fields without metadata, as `from_numpy` takes them; equal for all frameworks."""
        numpy, own = get_backend("numpy"), self.backend
        found: dict[str, Any] = {key: own.to_numpy(value) for key, value in self._arrays().items() if key in _ARRAYS}
        found = {key: exactly(value, batch_dtype(key, value.dtype, numpy), key) for key, value in found.items()}
        return found | {key: value for key in _NUMBERS if (value := getattr(self, key)) is not None}

    @property
    def compact(self) -> CompactBatch | None:
        """Compact form that the fields in main memory are still to be made from; None once one was made or set."""
        deferred = self._deferred
        if not isinstance(deferred, HostFields) or not NO_FIELDS.keys().isdisjoint(vars(self)):
            return None
        return deferred.compact

    @property
    def backend(self) -> Backend:
        """Backend of the arrays."""
        if self._deferred is not None:
            return self._deferred.backend
        first = next(iter(self._arrays().values()), None)
        return get_backend("numpy") if first is None else backend_of(first)

    @property
    def batch_size(self) -> int:
        """Number of rows; 1 for a padding-free batch."""
        return int(self.input_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding.

        Loaders set it. For other batches it is counted from `attention_mask` or `document_ids`, which waits for a GPU.
        An error if both are missing and rows may be padded: packed rows, or a batch rebuilt from a mapping.
        """
        if self._num_tokens is not None:
            return self._num_tokens
        for mask in (self.attention_mask, self.document_ids):
            if mask is not None and len(mask.shape) == 2:
                return int((mask != 0).sum())
        if self._mask_lost or self._packed or self.cu_seqlens is not None:
            raise ConfigError(
                "num_tokens is unknown: this batch has neither attention_mask nor document_ids; read num_tokens before "
                "the batch is rebuilt, or keep one of these fields"
            )
        return math.prod(self.input_ids.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, including those in the metadata. Fields that were never read count by their source."""
        values = [*self._made().values(), *self.metadata.values()]
        waiting = 0 if self._deferred is None else self._deferred.nbytes
        return waiting + sum(int(value.nbytes) for value in values if _is_array(value))

    def all_arrays(self) -> list[Array]:
        """Arrays that `to` moves; for example for `array.record_stream(stream)`."""
        return list(self._arrays().values())

    def to(self, device: Device, non_blocking: bool = False) -> Self:
        """Batch with its arrays on another device; metadata stays where it is.

        torch: any device. JAX: a device, a sharding, or a name such as "gpu:0". MLX arrays are on every device, and
        NumPy's on "cpu" only: another device is an error.

        torch copies to a GPU on the current stream of the calling thread, through pinned memory, and does not wait.
        Fields that were not read yet are made on the GPU. A copy to the CPU always blocks.
        """
        backend, deferred = self.backend, self._deferred
        moved = None if deferred is None else deferred.to(device)
        if moved is None:
            return self._with(lambda array: backend.to(array, device, non_blocking=non_blocking))
        moved.receive()
        made = {key: backend.to(value, device, non_blocking=non_blocking) for key, value in self._made().items()}
        batch = self._of_deferred(moved, dict(self.metadata), self._num_tokens, packed=self._packed)
        # A field that was set to None, or to a number, stays so.
        vars(batch).update({key: vars(self)[key] for key in NO_FIELDS if key in vars(self)})
        return self._copy_facts(batch, made)

    def pin_memory(self) -> Self:
        """Batch in page-locked memory, so that `to(device, non_blocking=True)` overlaps with computation.

        Returns the batch itself without an accelerator, or with a framework other than torch.
        """
        pinned, mine = self._with(self.backend.pin_memory), self._arrays()
        return self if all(array is mine[key] for key, array in pinned._arrays().items()) else pinned

    def block_mask(self, causal: bool = True, *, dtype: str = "bool") -> Array:
        """Mask (rows, 1, tokens, tokens) of attention within documents; see `block_diagonal_mask`."""
        ids = self.document_ids
        if ids is None and self.cu_seqlens is None and not self._packed:
            ids = self.attention_mask  # one document a row
        if ids is None:
            raise ConfigError(
                "block_mask needs document_ids, or the attention_mask of rows that are not packed; add document_ids to "
                "the loader's fields"
            )
        return block_diagonal_mask(ids, causal, dtype=dtype)

    def as_dict(self, *, num_items_in_batch: bool = False, block_mask: str | None = None) -> dict[str, Any]:
        """Keywords of a Hugging Face model: `model(**batch.as_dict())`. Metadata is never among them.

        input_ids, labels, position_ids and attention_mask, if present. Packed rows also have the document boundaries
        for FlashAttention (cu_seq_lens_q and _k, max_length_q and _k) and use_cache=False, and no attention_mask: with
        a cache or a mask, transformers does not look for documents, and they attend to each other. Padding after the
        documents does no harm: causal attention does not look ahead, and it has no labels.

        `block_mask`: "bool" (for SDPA) or the model's float type (for "eager"); a mask of rows x tokens x tokens
        replaces the boundaries, for attention without support for documents.
        `num_items_in_batch`: adds that number, for models that divide their loss by it.
        """
        packed = self.cu_seqlens is not None
        # Without cu_seqlens, transformers finds documents by position_ids, unless there is a mask.
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
        if key in _UNCHANGED and key not in self._hidden:
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

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.make_fields())

    def _arrays(self) -> dict[str, Array]:
        """Fields and other keys with array values; makes those that were not read yet."""
        if self._deferred is not None:
            self.make_fields()
        return self._made()

    def _made(self) -> dict[str, Array]:
        """Fields and other keys with array values, as far as they are made."""
        mine = vars(self)
        own = {key: mine[key] for key in _ARRAYS if mine.get(key) is not None}
        return own | {key: value for key, value in self._others.items() if _is_array(value)}

    def _before_change(self, key: str, value: Any) -> None:
        """Forget facts about padding that another value of a field may make untrue."""
        known, ids = self._num_tokens, self.input_ids
        if key in _MASKS:
            self._mask_lost = self._mask_lost or value is None
            self._num_tokens = known if value is None else None
        elif key == "input_ids" and ids is not None and _shape(value) != _shape(ids):
            self._mask_lost = self._mask_lost or (known is not None and known < math.prod(ids.shape))
            self._num_tokens = None

    def _with(self, change: Any) -> Self:
        """Copy with every array changed by a function."""
        changed = {key: change(value) for key, value in self._arrays().items()}
        batch = type(self)(metadata=dict(self.metadata), max_seqlen=self.max_seqlen)
        batch.num_items_in_batch, batch._num_tokens, batch._packed = (
            self.num_items_in_batch,
            self._num_tokens,
            self._packed,
        )
        return self._copy_facts(batch, changed)

    def _copy_facts(self, batch: Self, arrays: dict[str, Array]) -> Self:
        """Another batch with these arrays and the other facts of this one."""
        batch._mask_lost, batch._hidden = self._mask_lost, set(self._hidden)
        batch._others = self._others | {key: arrays.pop(key) for key in self._others if key in arrays}
        for key, value in arrays.items():
            setattr(batch, key, value)
        return batch


class _LazyField:
    """Field that is made when it is read for the first time; from then on it is an attribute of the batch."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, batch: TrainingBatch | None, kind: type) -> Any:
        if batch is None:
            return self
        name, mine, deferred = self._name, vars(batch), batch._deferred
        if deferred is None:  # made by another thread meanwhile, or deleted
            return mine.get(name)
        return mine.setdefault(name, deferred.make(name) if name in deferred.names else None)


_FIELDS = frozenset(part.name for part in fields(TrainingBatch) if not part.name.startswith("_"))
for _name in NO_FIELDS:
    setattr(TrainingBatch, _name, _LazyField(_name))  # instead of the default of a dataclass


def _check(given: Mapping[str, Any]) -> None:
    """Check that the fields agree: otherwise documents of a packed batch would silently attend to each other."""
    known = (*_ARRAYS, *_NUMBERS)
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(
            f"unknown batch field {unknown[0]!r}{did_you_mean(unknown[0], known)}; fields are {', '.join(known)}; "
            "put other values into metadata"
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
                f"cu_seqlens must be flat and go from 0 to {size}, the size of input_ids with padding; got shape "
                f"{starts.shape}" + (f", {starts[0]} to {starts[-1]}" if starts.ndim == 1 and len(starts) else "")
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
