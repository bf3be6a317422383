"""The first pass: scalers and encoders learn from what comes before them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pyarrow as pa
from rich.console import Console

from penstock.errors import ConfigError
from penstock.observe import Extent, progress_on
from penstock.pipeline import Pipeline

__all__ = ["fit_transforms"]

_PROGRESS_SECONDS = 0.25


def fit_transforms(pipeline: Pipeline, positions: tuple[int, ...], console: Console | None) -> None:
    """Fit the transforms at these positions, each in a pass of its own over the source and the transforms before it.

    Afterwards source and transforms are at their beginning again. Bad rows that the run leaves out are left out here.
    """
    config = replace(pipeline.config, batch_rows="auto", quarantine=None)
    if config.on_error == "quarantine":
        config = replace(config, on_error="skip")  # the run itself writes them down, once
    for position in positions:
        learner: Any = pipeline.transforms[position]
        before = Pipeline(pipeline.source, pipeline.transforms[:position], None, config, pipeline.budget)
        with contextlib.closing(_watched(before, f"{learner!r} learns from {before}", console)) as batches:
            learner.fit(batches)
        for stage in (pipeline.source, *before.transforms):
            reset = getattr(stage, "reset", None)
            if callable(reset):
                reset()
            elif stage is pipeline.source:
                raise ConfigError(f"{stage!r} can be read only once, so {learner!r} cannot learn from it first")


def _watched(pipeline: Pipeline, title: str, console: Console | None) -> Generator[pa.RecordBatch, None, None]:
    if console is None:
        yield from pipeline
        return
    with progress_on(console, Extent.of(pipeline.source), title) as progress:
        shown_at = time.monotonic()
        for batch in pipeline:
            yield batch
            if time.monotonic() - shown_at >= _PROGRESS_SECONDS:
                shown_at = time.monotonic()
                progress(pipeline.snapshot())
