"""Delivery of batches on the device of a loader, for every loader."""

from __future__ import annotations

from typing import TypeVar, cast

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import CompactBatch
from penstock.batching.context import ContextSlice, slice_context
from penstock.batching.options import Output

Batch = TypeVar("Batch", bound=TrainingBatch)


class DeviceTransfer:
    """Copy of batches to the device of a loader, ordered with the stream of the thread that receives them.

    Make one in the receiving thread: "cuda" without a number is that thread's current device. Any thread may call
    `send`; the receiving thread calls `receive` while the stream that will use the batch is current.

    torch copies from pinned memory on a stream of its own, so that neither the CPU nor the GPU waits. A batch can be
    used at once on the stream that was current when it was received, and its memory is not reused before that stream
    is done with it. For another stream the rules of torch hold: `other.wait_stream(stream)` first, and
    `record_stream(other)` for every array of `batch.all_arrays()`.
    """

    def __init__(self, output: Output, context: ContextSlice | None = None) -> None:
        self._backend = get_backend(output.backend)
        self._device = self._backend.resolve_device(output.device)
        self._pinned = output.pin_memory and output.device is None
        self._context = context

    @property
    def idle(self) -> bool:
        """True if batches stay as they are."""
        return self._device is None and not self._pinned and self._context is None

    def send(self, batch: Batch) -> Batch:
        """Batch on the device; its copy may still be in progress. Without a device, in pinned memory if asked for.

        Of a batch for a context-parallel rank, only the slice is sent.
        """
        if self._context is not None:
            batch = cast("Batch", slice_context(batch, self._context))
        if self._device is None:
            return batch.pin_memory() if self._pinned else batch
        if batch._defer_to(self._device):
            return batch  # its fields wait for the copy when they are made
        with self._backend.copy_stream(self._device):
            sent = batch.to(self._device, non_blocking=True)
            sent._pending_copy = self._backend.pending_copy(sent.all_arrays())
        return sent

    def send_several(self, batches: list[Batch]) -> list[Batch]:
        """Batches on the device; those of one shape cross as one."""
        if self.idle:
            return batches
        if self._device is not None and self._context is None and len(batches) > 1:
            compact = [batch.compact for batch in batches]
            CompactBatch.join([each for each in compact if each is not None])
        return [self.send(batch) for batch in batches]

    def receive(self, batch: TrainingBatch) -> None:
        """Order the current stream after the copies of a batch that was sent."""
        if batch._deferred is not None:
            batch._deferred.receive()
        pending = batch._pending_copy
        if pending is not None:
            batch._pending_copy = None
            pending.wait()

    def move(self, batch: Batch) -> Batch:
        """Send and receive."""
        sent = self.send(batch)
        self.receive(sent)
        return sent
