"""The other end of `processes.py`: a fresh interpreter that transforms batches until its input closes."""

from __future__ import annotations

import gc
import json
import os
import struct
import sys
import traceback
from typing import Any, BinaryIO

import pyarrow as pa

from penstock.pipeline.chain import BrokenStageError, Chain, StepError, stage_name
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.processes import (
    BATCH,
    ERROR,
    RESULT,
    SETUP,
    SHARED,
    SharedBytes,
    end_with_parent,
    ignore_interrupts,
    read_frame,
    write_frame,
)


class _Recorder(StageMetrics):
    """Keeps the figures of the batch in hand, for the parent."""

    figures: tuple[float, int, int, int, int, float] | None = None

    def add(self, seconds: float, rows_in: int, rows_out: int, bytes_in: int, bytes_out: int, cpu: float = 0.0) -> None:
        self.figures = (seconds, rows_in, rows_out, bytes_in, bytes_out, cpu)


class _WorkerChain(Chain):
    """Takes `sys.exit()` and the panic of a compiled library for errors of the row: a process that ends costs more, and
    the row costs three of them."""

    blames_row_for = BaseException  # type: ignore[assignment]  # it is only reported, never raised again here


def serve(inward: BinaryIO, outward: BinaryIO, here: SharedBytes | None, back: SharedBytes | None) -> None:
    """Answer every batch with its result or its error, until the parent closes the pipe."""
    chain: Chain = _WorkerChain([], [])
    while (frame := read_frame(inward)) is not None:
        kind, payload = frame
        if kind == SETUP:
            # Written by the parent process over a private pipe: its own functions, never data.
            import cloudpickle

            try:
                transforms = cloudpickle.loads(payload)
            except Exception as error:
                write_frame(outward, ERROR, _told(error).encode(errors="replace"))
                raise
            chain = _WorkerChain(transforms, [_Recorder(stage_name(t), "transform") for t in transforms])
            gc.freeze()  # rows make garbage collections frequent: what was imported is not looked through each time
            write_frame(outward, RESULT, b"ready")
        elif kind == SHARED:
            assert here is not None
            write_frame(outward, *_answer(chain, here.content(*struct.unpack("<Q", payload)), back))
        elif kind == BATCH:
            write_frame(outward, *_answer(chain, payload, None))


def _answer(chain: Chain, payload: pa.Buffer | bytes, back: SharedBytes | None) -> tuple[int, pa.Buffer]:
    for stage in chain.metrics:
        stage.figures = None  # type: ignore[attr-defined]
    notes: dict[str, Any] = {}
    result: pa.RecordBatch | None = None
    try:
        batch = pa.ipc.open_stream(payload).read_next_batch()
        ran = chain.run(batch, batch.nbytes)
        result = ran.batch
        notes["figures"] = [stage.figures for stage in chain.metrics if stage.figures]  # type: ignore[attr-defined]
        notes["counts"] = {str(index): counts for index, counts in ran.counts.items()}
    except StepError as step:
        notes |= {
            "index": step.index,
            "kind": type(step.error).__name__,
            "broken": isinstance(step.error, BrokenStageError),
            "message": _told(step.error),
            "traceback": "".join(traceback.format_exception(step.error)),
        }
    if result is not None and back is not None:
        notes["shared"] = back.write_batch(result)
    # A message may hold anything, lone surrogates too: those become question marks.
    head = json.dumps(notes, ensure_ascii=False).encode(errors="replace")
    out = pa.BufferOutputStream()
    out.write(struct.pack("<Q", len(head)))
    out.write(head)
    if result is not None and back is None:
        with pa.ipc.new_stream(out, result.schema) as writer:
            writer.write_batch(result)
    return (RESULT if result is not None else ERROR), out.getvalue()


def _told(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception:  # noqa: BLE001 - an error that cannot be printed is still an error of the row
        return f"{kind} (its message cannot be shown)"


def main() -> None:
    ignore_interrupts()
    pa.set_cpu_count(1)  # one of several processes: more threads of Arrow's would compete with them
    # What the functions print must not end up between the answers: stdout becomes stderr, the pipe a private handle.
    outward = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    here, back = None, None
    if len(sys.argv) > 1:  # not on Windows
        life, there, answers = map(int, sys.argv[1:])
        end_with_parent(life)
        here, back = SharedBytes(there), SharedBytes(answers)
    serve(sys.stdin.buffer, outward, here, back)


if __name__ == "__main__":
    main()
