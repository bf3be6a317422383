"""Order between copies to a device and the stream that uses them, for torch's devices that have streams.

A stream of a device runs its work in order; two streams know nothing of each other. A tensor that one thread copies on
its stream may be read on another stream only behind the copy, and its memory may be reused only behind that reading:

    copying thread      copy ... copy, event
    using thread        its current stream waits for the event; every tensor is recorded on that stream
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["StreamCopy", "resolve_device", "stream_module"]

_NO_STREAMS = frozenset({"cpu", "meta"})


class StreamCopy:
    """Copies that the current stream of this thread has been given, and maybe not finished."""

    def __init__(self, module: Any, tensors: Sequence[Any]) -> None:
        self._module, self._tensors = module, tuple(tensors)
        self._device = self._tensors[0].device
        self._stream = module.current_stream(self._device)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        """Let the current stream of the calling thread use the tensors; the thread itself does not wait.

        The stream waits for the copies, and the allocator reuses the memory of the tensors only when the stream is done
        with what it was given until they are freed.
        """
        stream = self._module.current_stream(self._device)
        if stream == self._stream:
            return  # in order already, and the memory belongs to that stream
        stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)


def resolve_device(torch: Any, device: Any) -> Any:
    """The device with its number: "cuda" is the current device of the calling thread; each thread has its own."""
    if device is None:
        return None
    found = torch.device(device)
    module = stream_module(torch, found)
    if module is None or found.index is not None:
        return found
    return torch.device(found.type, module.current_device())


def stream_module(torch: Any, device: Any) -> Any | None:
    """`torch.cuda`, `torch.xpu` ... : what has the streams of a device; None where there are none."""
    module = None if device.type in _NO_STREAMS else getattr(torch, device.type, None)
    return module if hasattr(module, "current_stream") and hasattr(module, "current_device") else None
