"""Copies of torch to a GPU: pinned memory, the order of streams, and fields that are made on the GPU.

A stream of a device runs its work in order; two streams know nothing of each other. A tensor that one thread copies on
its stream may be read on another stream only after the copy, and its memory reused only after that read:

    copying thread      copy ... copy, event
    using thread        its current stream waits for the event; every tensor is recorded on that stream
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import ALIGNMENT, Array, Backend, Device
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.batching.collate import CompactBatch

_NO_STREAMS = frozenset({"cpu", "meta"})
_IGNORE = -100
_KINDS = {
    np.dtype(name): name
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")  # .name is slow
}


class StreamCopy:
    """Copies on the current stream of this thread, which may still be in progress."""

    def __init__(self, torch: Any, module: Any, device: Any, tensors: Sequence[Any]) -> None:
        self._module, self._tensors = module, tuple(tensors)
        self._device = device.index  # quicker to look up than a device
        raw = _raw_stream(torch, module, device)
        self._key = partial(module.current_stream if raw is None else raw, self._device)
        """Key of the current stream of the calling thread."""
        self._capturing = getattr(module, "is_current_stream_capturing", None)
        own = module.current_stream(self._device)
        self._event = own.record_event()
        self._ready = {self._key(): own}
        """Streams that may use the tensors, by key: work on them is in order with the copies."""

    def wait(self) -> Any:
        """Let the current stream of the calling thread use the tensors; the thread itself does not wait.

        The stream waits for the copies, and the allocator reuses the tensors' memory only after the stream's work.
        Returns the key of the stream.
        """
        key = self._key()
        if key not in self._ready:
            stream = self._module.current_stream(self._device)
            stream.wait_event(self._event)
            for tensor in self._tensors:
                tensor.record_stream(stream)
            self._ready[key] = stream
        return key

    def stream(self, key: Any) -> Any:
        """Stream that has waited, by its key."""
        return self._ready[key]

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context in which another stream is current."""
        entered: AbstractContextManager[object] = self._module.stream(stream)
        return entered

    def capturing(self) -> bool:
        """True while the current stream records a graph instead of working."""
        return self._capturing is not None and bool(self._capturing())


def _raw_stream(torch: Any, module: Any, device: Any) -> Callable[[int], int] | None:
    """torch's function for the handle of a current stream: it makes no Python object, and is asked for every field."""
    if getattr(module, "__name__", None) != f"torch.{device.type}":
        return None
    found: Callable[[int], int] | None = getattr(torch._C, f"_{device.type}_getCurrentRawStream", None)
    return found


def resolve_device(torch: Any, device: Any) -> Any:
    """Device with its number: "cuda" is the current device of the calling thread; each thread has its own."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is not a device of torch: {_first_line(error)}") from error
    module = stream_module(torch, found)
    if module is None:
        if found.type not in _NO_STREAMS:
            _check_usable(torch, found)
        return found
    try:
        index = module.current_device() if found.index is None else found.index
        count = module.device_count()
    except (AssertionError, RuntimeError) as error:  # torch without CUDA, no driver, a fork of a process that used it
        raise _unusable(device, error) from error
    if index >= count:
        raise ConfigError(
            f"device={str(device)!r} does not exist: this process sees {count} devices, numbered from 0; choose one of "
            "them, or leave out device="
        )
    return torch.device(found.type, index)


def _check_usable(torch: Any, device: Any) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise _unusable(device, error) from error


def _unusable(device: Any, error: BaseException) -> ConfigError:
    return ConfigError(
        f"device={str(device)!r} cannot be used here: {_first_line(error)}; leave out device= to get batches in main "
        "memory"
    )


def stream_module(torch: Any, device: Any) -> Any | None:
    """Module with the streams of a device, such as `torch.cuda` or `torch.xpu`; None if it has none."""
    module = None if device.type in _NO_STREAMS else getattr(torch, device.type, None)
    return module if hasattr(module, "current_stream") and hasattr(module, "current_device") else None


class PinnedMemory:
    """Page-locked copies of host arrays.

    The memory is that of torch's allocator, which keeps a freed block until the copies from it are done, and then
    reuses it. Copies into it are NumPy's: those of torch use every core.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._available: bool | None = None
        self.refused = 0
        """Number of times that the system had no page-locked memory left."""

    @property
    def available(self) -> bool:
        """True if a device reads main memory by itself: torch refuses to pin without one."""
        if self._available is None:
            accelerator = getattr(self._torch, "accelerator", None)  # from torch 2.6
            if accelerator is None:
                self._available = bool(self._torch.cuda.is_available())
            else:  # Apple's GPU reads main memory as it is.
                usable = bool(accelerator.is_available())
                self._available = usable and accelerator.current_accelerator().type != "mps"
        return self._available

    def empty(self, nbytes: int) -> Any | None:
        """Page-locked bytes; None if there are none left, which is warned of once."""
        if not self.available:
            return None
        try:
            return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self.refused += 1
            if self.refused == 1:
                warnings.warn(
                    f"no page-locked memory for {nbytes} bytes ({_first_line(error)}); copies to the device wait for "
                    "its queued work now. Raise the limit of locked memory (ulimit -l), or use smaller batches",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def copy_of(self, tensor: Any) -> Any | None:
        """Page-locked copy of a tensor in main memory, itself if it is page-locked; None if there is no room."""
        if self.available and tensor.is_pinned():
            return tensor
        flat = tensor.detach().contiguous().reshape(-1)
        if flat.numel() == 1:  # of any stride, and bytes are viewed only at a stride of 1
            flat = flat.clone(memory_format=self._torch.contiguous_format)
        nbytes = flat.numel() * flat.element_size()
        memory = self.empty(nbytes)
        if memory is None or not nbytes:
            return None
        as_bytes = flat.view(self._torch.uint8)
        np.copyto(memory.numpy(), as_bytes.numpy())
        return memory.view(tensor.dtype).view(tensor.shape)


class TorchDeviceFields:
    """Fields of a batch on a GPU, made there from one copy of its compact form.

    The copy is on the stream that was current when it was made; a field may be read on any stream. Batches that were
    collated as one cross as one, and their fields are made as one.
    """

    __slots__ = ("_home", "_sent", "backend", "compact", "names")

    def __init__(self, backend: Backend, compact: CompactBatch, sent: DeviceBatchGroup) -> None:
        self.backend, self.names = backend, compact.layout.present
        self.compact, self._sent = compact, sent
        self._home: Any = None
        """Stream that received the batch: fields are made on it, whichever stream reads them first."""

    @property
    def nbytes(self) -> int:
        return self.compact.nbytes

    def make(self, name: str) -> Array | int:
        if name in ("max_seqlen", "num_items_in_batch"):
            return int(self.compact.make(name))
        copy = self._sent.copy
        key = copy.wait()
        if self._home is None or key == self._home:
            return self._made(name, key)
        home, stream = copy.stream(self._home), copy.stream(key)
        with copy.on(home):
            made = self._made(name, self._home)
        stream.wait_event(home.record_event())
        made.record_stream(stream)
        return made

    def receive(self) -> None:
        self._home = self._sent.copy.wait()

    def _made(self, name: str, key: Any) -> Array:
        compact, sent = self.compact, self._sent
        first, grid = compact.first_row, compact.grid
        if name != "cu_seqlens":
            return sent.field(name, key, first, grid.rows)
        if grid.alike:
            size, kind = grid.rows * grid.tokens, sent.torch.int32
            return sent.torch.arange(0, size + 1, grid.tokens, dtype=kind, device=sent.device)
        low, high = compact.whole.grid.runs_between(first, first + grid.rows)
        return sent.arrays["ends"][low : high + 1].sub(first * grid.tokens).to(sent.torch.int32)

    def to(self, device: Device) -> None:
        return None


class DeviceBatchGroup:
    """Batches on a device that were collated as one: the arrays of their compact form, and fields of all of them.

    A field is made for all batches at once, and waits until each of them is asked for its own.
    """

    def __init__(self, torch: Any, module: Any, compact: CompactBatch, device: Any, pinned: PinnedMemory) -> None:
        self.torch, self.device, self._grid = torch, device, compact.grid
        wire, sent = compact.wire(), []
        self.arrays: dict[str, Any] = {}
        if compact.page_locked is not None:
            sent.append(compact.page_locked.to(device, non_blocking=True))  # type: ignore[attr-defined]
            self._add(wire, {"ids": 0}, sent[-1])
        rest = {name: array for name, array in wire.items() if name not in self.arrays}
        if rest:
            places, total = {}, 0
            for name, array in rest.items():
                places[name] = total
                total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            memory = pinned.empty(total)
            host = np.empty(total, np.uint8) if memory is None else memory.numpy()
            for name, array in rest.items():
                host[places[name] : places[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
            if memory is None:
                sent.append(torch.from_numpy(host).to(device))
            else:
                sent.append(memory.to(device, non_blocking=True))
            self._add(rest, places, sent[-1])
        self.copy = StreamCopy(torch, module, device, sent)
        self._fields: dict[tuple[str, Any], dict[int, Any]] = {}
        """Fields that wait for their batches, by the batch's first row, by name and stream: each stream has its own, so
        that none waits for another."""

    def _add(self, wire: dict[str, npt.NDArray[Any]], places: dict[str, int], buffer: Any) -> None:
        """Arrays that lie in a buffer on the device from these places on."""
        for name, place in places.items():
            array = wire[name]
            part = buffer[place : place + array.nbytes] if buffer.numel() > array.nbytes else buffer
            self.arrays[name] = part.view(_torch_kind(self.torch, array)).view(array.shape)

    def field(self, name: str, key: Any, first: int, rows: int) -> Any:
        """A field of the batch that begins at a row, for the current stream: a tensor of its own."""
        if self.copy.capturing():  # memory of the graph
            return self._part(_MAKERS[name](self), first, rows)
        if rows == self._grid.rows:
            return self._part(_MAKERS[name](self), 0, rows)
        waiting = self._fields.get((name, key))
        if waiting is None:
            # Whoever is first may be an evaluation, and the others train: they must be able to save the tensors.
            with self.torch.inference_mode(False):
                waiting = self._fields.setdefault((name, key), self._split(_MAKERS[name](self), rows))
        found = waiting.pop(first, None)
        # It was handed out if the batch was moved here twice.
        return self._part(_MAKERS[name](self), first, rows) if found is None else found

    def _split(self, field: Any, rows: int) -> dict[int, Any]:
        """Fields of batches of so many rows, copied at once; not views, so that none keeps the others."""
        firsts = range(0, self._grid.rows, rows)
        shape, kind = (rows, self._grid.tokens), field.dtype
        parts = [self.torch.empty(shape, dtype=kind, device=self.device) for _ in firsts]
        self.torch.split_with_sizes_copy(field, [rows] * len(parts), 0, out=parts)
        return dict(zip(firsts, parts))

    def _part(self, field: Any, first: int, rows: int) -> Any:
        """Field of one batch; a copy, unless the field is all its own."""
        if rows < self._grid.rows or field is self.arrays.get("supervised"):
            return field[first : first + rows].clone()
        return field

    def input_ids(self) -> Any:
        return self.arrays["ids"].to(self.torch.int64, copy=True)

    def labels(self) -> Any:
        labels = self.input_ids()
        if "supervised" in self.arrays:
            return labels.masked_fill_(self.arrays["supervised"].logical_not(), _IGNORE)
        if not self._grid.full:
            labels.masked_fill_(self._real().logical_not_(), _IGNORE)
        return self._with_first(labels, _IGNORE)

    def loss_mask(self) -> Any:
        if "supervised" in self.arrays:
            return self.arrays["supervised"]
        return self._with_first(self._ones(self.torch.bool) if self._grid.full else self._real(), False)

    def attention_mask(self) -> Any:
        integer = self.torch.int64
        return self._ones(integer) if self._grid.full else self._real(least=1).to(integer)

    def position_ids(self) -> Any:
        torch, grid = self.torch, self._grid
        if grid.alike:
            return torch.arange(grid.tokens, device=self.device).repeat(grid.rows, 1)
        places = torch.arange(grid.rows * grid.tokens, device=self.device)
        return places.sub_(self.arrays["ends"][self._run_of_token()]).view(grid.rows, grid.tokens)

    def document_ids(self) -> Any:
        grid = self._grid
        if grid.alike:
            return self._ones(self.torch.int32)
        return self.arrays["numbers"][self._run_of_token()].view(grid.rows, grid.tokens)

    def _with_first(self, array: Any, value: Any) -> Any:
        """Array with a value in the place of the first token of every document."""
        if self._grid.alike:
            array.select(1, 0).fill_(value)
        else:
            array.view(-1).index_fill_(0, self.arrays["ends"][:-1], value)
        return array

    def _ones(self, dtype: Any) -> Any:
        return self.torch.ones((self._grid.rows, self._grid.tokens), dtype=dtype, device=self.device)

    def _real(self, *, least: int = 0) -> Any:
        """True for tokens, False for padding; see `Grid.real`."""
        grid = self._grid
        sizes = self.arrays["sizes"].clamp(min=least)[:, None]
        places = self.torch.arange(grid.tokens, device=self.device)
        return places >= grid.tokens - sizes if grid.left else places < sizes

    def _run_of_token(self) -> Any:
        """Number of the document or run of padding of every token, in the whole grid."""
        begins = self.torch.zeros(self._grid.rows * self._grid.tokens, dtype=self.torch.int64, device=self.device)
        return begins.index_fill_(0, self.arrays["ends"][:-1], 1).cumsum_(0).sub_(1)


_MAKERS: dict[str, Callable[[DeviceBatchGroup], Any]] = {
    "input_ids": DeviceBatchGroup.input_ids,
    "attention_mask": DeviceBatchGroup.attention_mask,
    "labels": DeviceBatchGroup.labels,
    "loss_mask": DeviceBatchGroup.loss_mask,
    "position_ids": DeviceBatchGroup.position_ids,
    "document_ids": DeviceBatchGroup.document_ids,
}


def _torch_kind(torch: Any, array: npt.NDArray[Any]) -> Any:
    """dtype of torch for that of an array of a compact batch."""
    return getattr(torch, _KINDS[array.dtype])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
