"""TensorBoard: readings as scalars in event files, without torch."""

from __future__ import annotations

import os
from typing import Any

from penstock._optional import require
from penstock.files.filesystems import require_local
from penstock.metrics.readings import logger_names
from penstock.metrics.watch import Reading, RunEnd, RunFacts


def step_of(reading: Reading) -> int:
    """Step of a reading: that of a loader, else whole seconds since the beginning."""
    return int(reading.metrics.get("penstock_loader_step", reading.seconds))


class TensorBoardLogger:
    """Exporter of event files below a directory, one directory for each run and process."""

    def __init__(self, directory: str) -> None:
        self._directory = require_local(directory, "the directory of tensorboard:")
        self._writer: Any = None
        self._protos: tuple[Any, Any] | None = None

    def begin(self, run: RunFacts) -> None:
        writer = require("tensorboard.summary.writer.event_file_writer", "metrics")
        events = require("tensorboard.compat.proto.event_pb2", "metrics")
        summaries = require("tensorboard.compat.proto.summary_pb2", "metrics")
        name = f"{run.name}-rank{run.labels.get('rank', '0')}-{run.pid}"
        place = self._directory / name.replace(os.sep, "_")
        place.mkdir(parents=True, exist_ok=True)
        self._writer = writer.EventFileWriter(str(place))
        self._protos = events, summaries

    def write(self, reading: Reading) -> None:
        assert self._protos is not None
        events, summaries = self._protos
        values = [
            summaries.Summary.Value(tag=name, simple_value=float(value))
            for name, value in logger_names(reading.metrics).items()
        ]
        summary = summaries.Summary(value=values)
        self._writer.add_event(events.Event(wall_time=reading.time, step=step_of(reading), summary=summary))
        self._writer.flush()

    def end(self, end: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()

    def __str__(self) -> str:
        return f"tensorboard:{self._directory}"
