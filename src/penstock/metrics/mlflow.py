"""MLflow: readings as metrics of a run, at the tracking server or store that `MLFLOW_TRACKING_URI` names."""

from __future__ import annotations

from typing import Any

from penstock._optional import require
from penstock.metrics.readings import logger_names
from penstock.metrics.tensorboard import step_of
from penstock.metrics.watch import Reading, RunEnd, RunFacts

_MOST_METRICS = 1000
"""Metrics of one call, the limit of MLflow."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflowLogger:
    """Exporter of a run of an experiment; the active run of the trainer is left alone."""

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
