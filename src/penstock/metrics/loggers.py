"""Exporters to loggers of trainers: TensorBoard (without torch), MLflow, and Weights & Biases."""

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


_MOST_METRICS = 1000
"""Metrics of one call, the limit of MLflow."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflowLogger:
    """Exporter of a run of an experiment, at the server or store that `MLFLOW_TRACKING_URI` names.

    The active run of the trainer is left alone.
    """

    def __init__(self, experiment: str) -> None:
        self._experiment = experiment
        self._client: Any = None
        self._metric: Any = None
        self._run = ""

    def begin(self, run: RunFacts) -> None:
        mlflow: Any = require("mlflow", "metrics")
        self._metric = require("mlflow.entities", "metrics").Metric
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        tags = {"penstock.kind": run.kind, **{f"penstock.{name}": value for name, value in run.labels.items()}}
        name = f"{run.name} rank {run.labels.get('rank', '0')}"
        made = self._client.create_run(number, run_name=name, start_time=int(run.started * 1e3), tags=tags)
        self._run = made.info.run_id

    def write(self, reading: Reading) -> None:
        at, step = int(reading.time * 1e3), step_of(reading)
        metrics = [self._metric(name, float(value), at, step) for name, value in logger_names(reading.metrics).items()]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_METRICS])

    def end(self, end: RunEnd) -> None:
        if self._run:
            self._client.set_terminated(self._run, status=_STATUS[end.end])

    def __str__(self) -> str:
        return f"mlflow:{self._experiment}"


class WandbLogger:
    """Exporter of a run of a project. `WANDB_MODE=offline` writes to disk, as everywhere in wandb.

    It is a run of its own, since steps of a run only grow: readings logged into the trainer's would take steps from it.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None

    def begin(self, run: RunFacts) -> None:
        wandb: Any = require("wandb", "metrics")
        trainer = wandb.run
        self._run = wandb.init(
            project=self._project,
            name=f"{run.name} rank {run.labels.get('rank', '0')}",
            group=None if trainer is None else trainer.group or trainer.name,
            job_type="data",
            config={"kind": run.kind, "description": run.description, **run.labels},
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def write(self, reading: Reading) -> None:
        self._run.log({**logger_names(reading.metrics), "seconds": reading.seconds})

    def end(self, end: RunEnd) -> None:
        if self._run is not None:
            self._run.summary.update({"end": end.end} | ({"error": end.error} if end.error else {}))
            self._run.finish(exit_code=1 if end.end == "failed" else 0)

    def __str__(self) -> str:
        return f"wandb:{self._project}"
