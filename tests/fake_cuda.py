"""CUDA without a GPU: tensors in main memory that know their device, and streams that detect unordered use.

Every operation on a tensor of the device happens on the current stream of the calling thread. It is refused if

- the stream did not wait for an event after the memory was last written on another stream;
- the memory belongs to another stream, and was not recorded on this one (`record_stream`): it could be reused;
- it reads a value back (`item`, `nonzero`, `cpu` ...), which would wait for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

_SYNCHRONIZING = {"item", "tolist", "numpy", "nonzero", "cpu", "__bool__", "__int__", "__float__", "__index__"}


class Stream:
    """Queue of a device: its own clock, and how far it has waited for the others."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name, self.clock = cuda, name, 0
        self.seen: dict[Stream, int] = {}

    def record_event(self) -> Event:
        self.clock += 1
        return Event(self)

    def wait_event(self, event: Event) -> None:
        for stream, clock in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), clock)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.seen = {**stream.seen, stream: stream.clock}


class Memory:
    """Block of device memory: the stream that it was allocated on, and its last write."""

    def __init__(self, stream: Stream) -> None:
        self.home, self.recorded = stream, {stream}
        self.write(stream)

    def write(self, stream: Stream) -> None:
        stream.clock += 1
        self.writer, self.written = stream, stream.clock

    def check(self, stream: Stream) -> None:
        waited = stream is self.writer or stream.seen.get(self.writer, 0) >= self.written
        assert waited, f"{stream.name} reads what {self.writer.name} wrote without waiting for it"
        assert stream in self.recorded, f"memory of {self.home.name} is used on {stream.name} without record_stream"


class DeviceTensor(torch.Tensor):
    """Tensor of the fake device, or one in main memory that can be copied there."""

    place = torch.device("cpu")
    memory: Memory | None = None
    cuda: FakeCuda
    pinned = False

    @property
    def device(self) -> Any:  # type: ignore[override]
        return self.place

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.place.type == "cuda"

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def record_stream(self, stream: Any) -> None:
        assert self.memory is not None
        self.memory.recorded.add(stream)

    def to(self, *args: Any, **options: Any) -> Any:
        if not args or not isinstance(args[0], (str, torch.device)):
            return super().to(*args, **options)
        place = torch.device(args[0])
        if place == self.place:
            return self
        if place.type == "cuda":
            assert place.index is not None, "a thread of its own would take this for another device"
        copy = self.as_subclass(torch.Tensor).clone()
        if self.memory is not None:
            self.memory.check(self.cuda.current_stream(self.place))
        self.cuda.copies.append((copy.numel() * copy.element_size(), self.pinned, options.get("non_blocking", False)))
        return self.cuda.wrap(copy, place)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, DeviceTensor)]
        inside = [each for each in given if each.memory is not None]
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if not inside:
                found = func(*args, **(kwargs or {}))
                if not isinstance(found, torch.Tensor) or not given:
                    return found
                here = given[0].cuda.wrap(found, torch.device("cpu"))
                here.pinned = any(each.pinned and _storage(each) == _storage(found) for each in given)
                return here
            cuda, place = inside[0].cuda, inside[0].place
            stream = cuda.current_stream(place)
            if name not in ("__get__", "size", "dim", "numel", "element_size", "stride", "is_contiguous"):
                assert name not in _SYNCHRONIZING, f"{name} waits for the device"
                for each in inside:
                    assert each.memory is not None
                    each.memory.check(stream)
            found = func(*args, **(kwargs or {}))
        if not isinstance(found, torch.Tensor):
            return found
        same = [each for each in inside if _storage(each) == _storage(found)]
        if same:
            assert same[0].memory is not None
            if name.endswith("_") and not name.endswith("__"):
                same[0].memory.write(stream)
            return cuda.wrap(found, place, same[0].memory)
        return cuda.wrap(found, place)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.as_subclass(torch.Tensor).untyped_storage().data_ptr()


class _Module:
    """torch with some of its attributes replaced."""

    def __init__(self, replaced: dict[str, Any]) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class FakeCuda:
    """`torch.cuda` for one test: a current device and a current stream for each thread."""

    def __init__(self, devices: int = 4) -> None:
        self._devices, self._thread = devices, threading.local()
        self._defaults: dict[int, Stream] = {}
        self.copies: list[tuple[int, bool, bool]] = []
        """Copies to the device: bytes, from pinned memory, without waiting."""
        self.pinned_left: int | None = None
        """Bytes of pinned memory that are left; None: no limit."""

    def wrap(self, tensor: torch.Tensor, place: Any, memory: Memory | None = None) -> Any:
        found = tensor.as_subclass(DeviceTensor)
        found.cuda, found.place = self, place
        if place.type == "cuda":
            found.memory = memory or Memory(self.current_stream(place))
        return found

    def set_device(self, index: int) -> None:
        self._thread.device = index

    def current_device(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def device_count(self) -> int:
        return self._devices

    def is_available(self) -> bool:
        return True

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802 - torch's name
        return Stream(self, f"side stream of {device}")

    def current_stream(self, device: Any) -> Stream:
        own: Stream | None = getattr(self._thread, "stream", None)
        index = device if isinstance(device, int) else device.index
        return own or self._defaults.setdefault(index, Stream(self, f"default stream of {index}"))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = getattr(self._thread, "stream", None), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def module(self) -> Any:
        """torch, with this in the place of `torch.cuda`."""
        accelerator = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"))
        kinds = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        made = {name: self._maker(getattr(torch, name)) for name in ("empty", "zeros", "ones", "arange")}
        given = {
            **kinds,
            **made,
            "cuda": self,
            "accelerator": accelerator,
            "from_numpy": lambda array: self.wrap(torch.from_numpy(array), torch.device("cpu")),
        }
        return _Module(given)

    def _maker(self, function: Any) -> Any:
        def make(*args: Any, device: Any = "cpu", pin_memory: bool = False, **options: Any) -> Any:
            found = self.wrap(function(*args, **options), torch.device(device))
            if pin_memory:
                nbytes = found.numel() * found.element_size()
                if self.pinned_left is not None and nbytes > self.pinned_left:
                    raise RuntimeError("CUDA error: out of memory")
                found.pinned = True
            return found

        return make
