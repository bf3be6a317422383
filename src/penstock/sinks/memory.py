"""Batches kept in memory, or handed to a loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import pyarrow as pa

from penstock.errors import StalledError, StoppedError
from penstock.pipeline.stages import Sink


class MemorySink(Sink):
    """Keeps everything: `sink.table()`, `sink.rows()`, `sink.batches`. What it holds is charged to the budget."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._bytes = 0

    def consume(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        self._bytes += batch.nbytes

    def flush(self) -> None:
        return

    def memory_usage(self) -> int:
        return self._bytes

    def reset(self) -> None:
        self.batches, self._bytes = [], 0

    def table(self) -> pa.Table:
        return pa.Table.from_batches(self.batches) if self.batches else pa.table({})

    def rows(self) -> list[dict[str, object]]:
        return [row for batch in self.batches for row in batch.to_pylist()]

    def __repr__(self) -> str:
        return "MemorySink()"


class IteratorSink(Sink):
    """Hands batches to another thread that iterates over the sink; holds at most `max_batches`.

    The pipeline waits while it is full. Iterating ends when the pipeline has ended. `for batch in pipeline` does the
    same with less to set up; this is for a pipeline that was started elsewhere with `start()`.
    """

    def __init__(self, max_batches: int = 4, *, timeout_seconds: float | None = None) -> None:
        if max_batches <= 0:
            raise ValueError(f"max_batches must be positive, got {max_batches}")
        self._max = max_batches
        self._timeout_seconds = timeout_seconds
        self._batches: deque[pa.RecordBatch] = deque()
        self._changed = threading.Condition()
        self._ended = self._broken = False

    def wait_for_room(self, timeout_seconds: float) -> bool:
        """Wait for room, at most `timeout_seconds`; False if there is none."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._batches) < self._max, timeout_seconds)

    def consume(self, batch: pa.RecordBatch) -> None:
        with self._changed:
            self._batches.append(batch)
            self._changed.notify_all()

    def flush(self) -> None:
        self._end()

    def abort(self) -> None:
        """The pipeline failed or was stopped: iterating raises after what is here."""
        self._broken = True
        self._end()

    def memory_usage(self) -> int:
        with self._changed:
            return sum(batch.nbytes for batch in self._batches)

    def reset(self) -> None:
        with self._changed:
            self._batches.clear()
            self._ended = self._broken = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while True:
            with self._changed:
                since = time.monotonic()
                if not self._changed.wait_for(lambda: bool(self._batches) or self._ended, self._timeout_seconds):
                    waited = time.monotonic() - since
                    raise StalledError(f"no batch arrived within {waited:.1f} s; is the pipeline running?")
                if not self._batches:
                    if self._broken:
                        raise StoppedError(
                            "the pipeline that feeds this sink failed or was stopped; its wait() raises the cause"
                        )
                    return
                batch = self._batches.popleft()
                self._changed.notify_all()
            yield batch

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __repr__(self) -> str:
        return "IteratorSink()"
