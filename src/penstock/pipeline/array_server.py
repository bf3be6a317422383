"""The other end of `array_worker.py`: a fresh interpreter that answers requests until its input closes."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from penstock.pipeline.array_worker import (
    SUPERSEDING,
    Answer,
    ArrayService,
    Preparing,
    describe_error,
    dumped,
    table_of,
    views_of,
)
from penstock.pipeline.processes import (
    ERROR,
    RESULT,
    SETUP,
    SharedBytes,
    end_with_parent,
    ignore_interrupts,
    read_frame,
    write_frame,
)


class Frames:
    """Messages of the parent, read while others are answered."""

    def __init__(self, inward: BinaryIO) -> None:
        self._inward = inward
        self._queue: queue.SimpleQueue[tuple[int, int, bytes]] = queue.SimpleQueue()
        self._superseded = 0

    def fill(self) -> None:
        """Read until the parent closes the pipe or is gone; that ends this process at once, whatever it does."""
        number = 0
        with contextlib.suppress(BaseException):
            while (frame := read_frame(self._inward)) is not None:
                number += 1
                if frame[0] == SUPERSEDING:
                    self._superseded = number
                self._queue.put((number, *frame))
        os._exit(0)

    def take(self) -> tuple[int, bytes, bool]:
        """The next message, and whether a later one makes its answer useless."""
        number, kind, payload = self._queue.get()
        return kind, payload, number < self._superseded


def serve(frames: Frames, outward: BinaryIO, setup: SharedBytes | None, slots: list[SharedBytes]) -> None:
    """Answer every request with arrays or an error. The service lies in `setup`, or comes with its message."""
    service: ArrayService | None = None
    while True:
        kind, payload, useless = frames.take()
        if kind == SETUP:
            # Written by the parent process over a private pipe: its own functions, never data.
            import cloudpickle

            try:
                if setup is not None:
                    payload = setup.content(int.from_bytes(payload, "little"))
                service = cloudpickle.loads(payload)
                del payload
            except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
                write_frame(outward, ERROR, f"{type(error).__name__}: {error}".encode(errors="replace"))
                continue
            if isinstance(service, Preparing):
                with contextlib.suppress(BaseException):  # libraries in Rust raise panics, which are no Exceptions
                    service.prepare()
            write_frame(outward, RESULT, b"ready")
        elif service is not None:
            slot = int.from_bytes(payload[:4], "little")
            try:
                answer = Answer() if useless else service.answer(payload[4:])
            except BaseException as error:  # noqa: BLE001 - it is raised in the parent
                told = dumped(describe_error(error, "".join(traceback.format_exception(error))))
                write_frame(outward, ERROR, len(told).to_bytes(4, "little") + told)
            else:
                _reply(outward, slot, answer, slots)
                del answer


def _reply(outward: BinaryIO, slot: int, answer: Answer, slots: list[SharedBytes]) -> None:
    table, nbytes = table_of(answer.arrays)
    memory = np.empty(0, np.uint8)
    if nbytes:
        memory = np.frombuffer(slots[slot].room(nbytes), np.uint8) if slots else np.empty(nbytes, np.uint8)
    for name, view in views_of(memory, table).items():
        np.copyto(view, answer.arrays[name])
    told = dumped({"slot": slot, "notes": answer.notes, "arrays": table, "nbytes": nbytes})
    head = len(told).to_bytes(4, "little") + told
    write_frame(outward, RESULT, head if slots else head + memory.tobytes())


def main() -> None:
    ignore_interrupts()
    # What the functions print must not end up between the answers: stdout becomes stderr, the pipe a private handle.
    outward = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    pa.set_cpu_count(1)
    frames = Frames(sys.stdin.buffer)
    threading.Thread(target=frames.fill, name="penstock-requests", daemon=True).start()
    life, *shared = map(int, sys.argv[1:]) if len(sys.argv) > 1 else (None,)  # none on Windows
    if life is not None:
        end_with_parent(life)
    setup, *slots = map(SharedBytes, shared) if shared else (None,)
    with contextlib.suppress(BrokenPipeError):
        serve(frames, outward, setup, slots)
    os._exit(0)  # at an orderly end Python would wait for the thread that reads


if __name__ == "__main__":
    main()
