"""The way of batches to `device=`: copied by whichever thread makes them, used by the thread that takes them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options

__all__ = ["DeviceTransfer"]

Position = TypeVar("Position")
Batch = TypeVar("Batch", bound=TrainingBatch)


class DeviceTransfer:
    """Copies batches to the device of a loader, in order with the stream of whoever takes them.

    Make one in the thread that takes the batches: "cuda" without a number is that thread's current device. `send` may
    be called by any thread; `receive` by the thread that takes the batch, with the stream current that will use it.

    Promised of a CUDA batch: it can be used at once on the stream that was current when it was taken, whichever that
    is and whether or not it was the same for the batch before, and its memory is not reused before that stream is done
    with it. For a further stream the rules of torch hold: `other.wait_stream(stream)` first, and `record_stream(other)`
    for every array of `batch.all_arrays()`. The CPU is not made to wait.
    """

    def __init__(self, options: Options) -> None:
        self._backend = get_backend(options.backend)
        self._device = self._backend.resolve_device(options.device)
        # Without pinned memory the copy is over when `to` returns, so there is nothing to gain.
        self._non_blocking = options.pin_memory

    def send(self, batch: Batch) -> Batch:
        """The batch on the device, maybe still on its way."""
        if self._device is None:
            return batch
        sent = batch.to(self._device, non_blocking=self._non_blocking)
        sent._pending_copy = self._backend.pending_copy(sent.all_arrays())
        return sent

    def send_all(
        self, made: Generator[tuple[Batch, Position], None, None]
    ) -> Generator[tuple[Batch, Position], None, None]:
        """The same of batches as they are made, by the thread that iterates."""
        return made if self._device is None else self._sent(made)

    def receive(self, batch: TrainingBatch) -> None:
        """Order the current stream behind the copies of a batch that was sent."""
        pending = batch._pending_copy
        if pending is not None:
            batch._pending_copy = None
            pending.wait()

    def move(self, batch: Batch) -> Batch:
        """Send and receive."""
        sent = self.send(batch)
        self.receive(sent)
        return sent

    def _sent(
        self, made: Generator[tuple[Batch, Position], None, None]
    ) -> Generator[tuple[Batch, Position], None, None]:
        try:
            for batch, position in made:
                sent = self.send(batch)
                del batch
                yield sent, position
                del sent
        finally:
            made.close()
