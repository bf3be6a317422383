"""Weights & Biases: readings as a run of its own, beside the one of the trainer.

A run of its own, since steps of a run only grow: readings logged into the trainer's would take steps from it.
"""

from __future__ import annotations

from typing import Any

from penstock._optional import require
from penstock.metrics.readings import logger_names
from penstock.metrics.watch import Reading, RunEnd, RunFacts


class WandbLogger:
    """Exporter of a run of a project. `WANDB_MODE=offline` writes to disk, as everywhere in wandb."""

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
