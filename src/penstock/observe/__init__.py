"""Progress of a run or a command: a live display on a terminal, a few lines elsewhere; a table at its end.

    with progress_on(Console(stderr=True), Extent.of(pipeline.source), str(pipeline)) as progress:
        report = pipeline.run(progress=progress)

    with work_progress("checking corpus.store", unit="bytes") as progress:
        progress(done, total)

display    what is shown, and how: share, speed, remaining time, memory, bottleneck; live, or as lines
pipelines  progress of a pipeline, from its snapshots, and the table at its end
work       progress of other work that is counted
"""

from penstock.observe.display import LineDisplay, LiveDisplay, Moment, RateWindow, display_on, is_live
from penstock.observe.pipelines import (
    Extent,
    LineProgress,
    LiveProgress,
    Rates,
    closing_table,
    lost_rows,
    pipeline_progress,
    progress_on,
)
from penstock.observe.work import WorkProgress, work_progress

__all__ = [
    "Extent",
    "LineDisplay",
    "LineProgress",
    "LiveDisplay",
    "LiveProgress",
    "Moment",
    "RateWindow",
    "Rates",
    "WorkProgress",
    "closing_table",
    "display_on",
    "is_live",
    "lost_rows",
    "pipeline_progress",
    "progress_on",
    "work_progress",
]
