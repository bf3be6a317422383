"""Protocol of the feed: a request is a JSON ticket of Arrow Flight, an answer a stream of messages.

A message is one row of binary columns, an array in each, with notes as JSON beside it. Nothing is pickled. A stream
ends with a message that says so: one that ends without it was cut. While an answer takes time, empty messages say that
the server is alive.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import errors
from penstock.errors import PenstockError
from penstock.files.states import parse_json, to_json

PROTOCOL = 1
HEARTBEAT_SECONDS = 2.0
"""Longest silence of a server that is alive."""
BATCH_COLUMNS = ("ids", "supervised", "at", "lengths", "row_of", "source", "row", "sample")
STEP_COLUMNS = ("offsets", "rows", "starts", "lengths", "sources")
PREFERENCE_COLUMNS = (
    *("input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "cu_seqlens", "document_ids"),
    *("completion_mask", "label", "KL_input_ids", "KL_attention_mask", "KL_completion_mask"),
    *("source", "row", "sample"),
)
TOKEN_HEADER = "authorization"
_KINDS = "biuf"
"""Kinds of dtypes that an array may have: never objects."""
_MOST_DIMENSIONS = 4
_BINARY = pa.large_binary()
_ERRORS = (EOFError, IndexError, KeyError, TypeError, ValueError, ConnectionError, FileNotFoundError, OSError)
"""Errors, besides penstock's own, that a client raises as what they are."""

Arrays = Mapping[str, npt.NDArray[Any]]


class Message(NamedTuple):
    """Notes of a message, and its arrays by name."""

    notes: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


class EncodedMessage(NamedTuple):
    """Message as Flight sends it."""

    batch: pa.RecordBatch
    notes: bytes

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes) + len(self.notes)


class MalformedMessageError(ValueError):
    """A message that no server of this protocol sends."""


@lru_cache(maxsize=8)
def schema_of(columns: tuple[str, ...]) -> pa.Schema:
    """Schema of a stream whose messages have these arrays."""
    return pa.schema([(name, _BINARY) for name in columns])


def encode(notes: Mapping[str, Any], arrays: Arrays, columns: tuple[str, ...]) -> EncodedMessage:
    """Message whose arrays share memory with those given."""
    batch = pa.RecordBatch.from_arrays([_column(arrays.get(name)) for name in columns], schema=schema_of(columns))
    return EncodedMessage(batch, to_json({**notes, "arrays": array_table(arrays)}))


def array_table(arrays: Arrays) -> dict[str, list[Any]]:
    """Type and shape of each array, for the notes."""
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}


def heartbeat(columns: tuple[str, ...]) -> EncodedMessage:
    return encode({"type": "heartbeat"}, {}, columns)


def ending(columns: tuple[str, ...]) -> EncodedMessage:
    """Last message of a stream that is complete."""
    return encode({"type": "end"}, {}, columns)


def failure(error: BaseException, columns: tuple[str, ...], **more: Any) -> EncodedMessage:
    """Last message of a stream that failed; `read_failure` makes an error of it."""
    return encode({**failure_notes(error), **more}, {}, columns)


def failure_notes(error: BaseException) -> dict[str, Any]:
    name = type(error).__name__
    return {"type": "error", "error": name, "message": str(error) or name}


def read_failure(notes: Mapping[str, Any], address: str) -> Exception:
    """Error that a server reported: of its own class if it is one of penstock's, or a common one."""
    name, told = str(notes.get("error")), str(notes.get("message"))
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, (PenstockError, *_ERRORS)):
        try:
            return kind(told)
        except TypeError:
            pass  # one that knows a place
    return RuntimeError(f"the feed at {address} failed: {name}: {told}")


def decode(batch: pa.RecordBatch, notes: bytes) -> Message:
    """Message with views of the received memory; MalformedMessageError if sizes do not agree."""
    try:
        read = parse_json(notes)
        return Message(read, {name: _view(batch, name, *facts) for name, facts in read["arrays"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, pa.ArrowException) as error:
        raise MalformedMessageError(f"a message that cannot be read: {error!r:.200}") from error


def _column(array: npt.NDArray[Any] | None) -> pa.Array:
    if array is None:
        return _absent()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    offsets = np.array([0, flat.nbytes], np.int64)
    return pa.Array.from_buffers(_BINARY, 1, [None, pa.py_buffer(offsets), pa.py_buffer(flat)])


@lru_cache(maxsize=1)
def _absent() -> pa.Array:
    return pa.nulls(1, _BINARY)


def _view(batch: pa.RecordBatch, name: str, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    column = batch.column(batch.schema.get_field_index(name))
    _, offsets, data = column.buffers()
    low, high = np.frombuffer(offsets, np.int64, 2, column.offset * 8).tolist()
    if not 0 <= low <= high <= (data.size if data else 0):
        raise ValueError(f"{name} has the bytes {low} to {high}")
    memory = np.frombuffer(data, np.uint8, high - low, low) if data else np.zeros(0, np.uint8)
    view = sized_view(memory, name, dtype, shape)
    if view.nbytes != high - low:
        raise ValueError(f"{name} has {high - low} bytes, and {dtype} of the shape {shape} needs {view.nbytes}")
    return view if view.flags.aligned else view.copy()  # kernels expect aligned memory


def sized_view(memory: npt.NDArray[np.uint8], name: str, dtype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """Array at the beginning of some memory; ValueError if it is no array of numbers, or does not fit."""
    kind, sizes = np.dtype(dtype), tuple(shape)
    whole = all(type(size) is int and size >= 0 for size in sizes)
    if kind.kind not in _KINDS or len(sizes) > _MOST_DIMENSIONS or not whole:
        raise ValueError(f"{name} has the type {dtype!r} and the shape {shape!r}")
    nbytes = prod(sizes) * kind.itemsize
    if nbytes > memory.nbytes:
        raise ValueError(f"{name} has {memory.nbytes} bytes, and {dtype} of the shape {sizes} needs {nbytes}")
    return memory[:nbytes].view(kind).reshape(sizes)
