"""Progress of a pipeline, from the snapshots that the thread which waits for the run takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.errors import PenstockError
from penstock.observe.display import (
    LINE_SECONDS,
    LIVE_SECONDS,
    LineDisplay,
    LiveDisplay,
    Moment,
    RateWindow,
    is_live,
    printer,
)
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Source

_log = logging.getLogger("penstock.observe")


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of the input, as far as it is known without reading it."""

    files: int | None = None
    file_bytes: int | None = None
    """Size of the files on disk, compressed or not."""
    rows: int | None = None

    @classmethod
    def of(cls, source: Source) -> Self:
        """The extent of a source, from file sizes and footers. Raises for a missing file."""
        files = getattr(source, "files", None)
        if not isinstance(files, list):
            return cls(rows=_known_rows(source))
        return cls(len(files), sum(file.stat().st_size for file in files), _known_rows(source))

    def share(self, snapshot: Mapping[str, Any]) -> float | None:
        """Share of the input whose rows have come out of the pipeline, from 0 to 1; None if the size is not known."""
        for whole, done in ((self.rows, snapshot["rows_done"]), (self.file_bytes, snapshot["file_bytes_done"])):
            if whole and done is not None:
                return min(1.0, float(done) / whole)
        return None


class Rates:
    """Speed over the last few seconds, or the last fifth of a longer run, from snapshots."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._window = RateWindow()
        self._share: float | None = None

    def add(self, snapshot: Mapping[str, Any]) -> None:
        self._share = self._extent.share(snapshot)
        if not snapshot["bytes_in"]:
            self._window.clear()  # the time before the first row (a scan for the schema) is not part of the speed
        self._window.add(snapshot["seconds"], snapshot["rows_done"], snapshot["bytes_in"], self._share or 0.0)

    @property
    def rows_per_second(self) -> float:
        return self._window.per_second(0)

    @property
    def bytes_per_second(self) -> float:
        return self._window.per_second(1)

    @property
    def share(self) -> float | None:
        """Share of the input that is done, from 0 to 1."""
        return self._share

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the current speed; None while speed or size is not known."""
        if self._share is None or len(self._window) < 2:
            return None  # one snapshot of a resumed run has a share, and no speed
        speed = self._window.per_second(2)
        return (1.0 - self._share) / speed if speed > 0 else None


def progress_on(console: Console, extent: Extent, title: str) -> LiveProgress | LineProgress:
    """A live display if the console is a terminal, else lines for a log file."""
    return LiveProgress(console, extent, title) if is_live(console) else LineProgress(console, extent)


def pipeline_progress(pipeline: Pipeline) -> LiveProgress | LineProgress:
    """Progress of a pipeline inside a program: live if standard error is a terminal, else lines of its log, or, where
    that takes no lines of level INFO, on standard error."""
    console, extent = Console(stderr=True), Extent.of(pipeline.source)
    if is_live(console):
        return LiveProgress(console, extent, str(pipeline))
    if _log.isEnabledFor(logging.INFO):
        return LineProgress(lambda line: _log.info("%r: %s", pipeline.source, line), extent)
    write = printer(console)
    return LineProgress(lambda line: write(f"penstock: {pipeline.source!r}: {line}"), extent)


class _RunProgress:
    """Progress of a run on a display, from its snapshots."""

    def __init__(self, extent: Extent, display: LiveDisplay | LineDisplay) -> None:
        self._rates, self._display = Rates(extent), display

    def __call__(self, snapshot: Mapping[str, Any]) -> None:
        self._rates.add(snapshot)
        self._display(run_moment(snapshot, self._rates))

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._display.__exit__(kind, error, tb)


class LiveProgress(_RunProgress):
    """Live display of a run at the bottom of the terminal, after a second; removed at the end of the run."""

    def __init__(self, console: Console, extent: Extent, title: str, *, first_seconds: float = LIVE_SECONDS) -> None:
        super().__init__(extent, LiveDisplay(console, title, first_seconds=first_seconds))


class LineProgress(_RunProgress):
    """Short lines of plain text about a run: after some seconds, then less and less often.

    `write` is a console, or a function that takes a line.
    """

    def __init__(
        self, write: Console | Callable[[str], object], extent: Extent, *, first_seconds: float = LINE_SECONDS
    ) -> None:
        write = printer(write) if isinstance(write, Console) else write
        super().__init__(extent, LineDisplay(write, first_seconds=first_seconds))


def run_moment(snapshot: Mapping[str, Any], rates: Rates) -> Moment:
    """Moment of a run, from a snapshot."""
    return Moment(
        snapshot["seconds"],
        rates.share,
        rates.seconds_left,
        ("rows", _rows(snapshot)),
        _speed(rates),
        snapshot["workers"],
        (snapshot["memory"]["used"], snapshot["memory"]["limit"]),
        snapshot["bottleneck"],
    )


def _rows(snapshot: Mapping[str, Any]) -> str:
    text = f"{snapshot['rows_in']:,} in, {snapshot['rows_out']:,} out"
    dropped, unreadable = lost_rows(snapshot)
    if dropped:
        text += f", {dropped:,} dropped"
    if unreadable:
        text += f", {unreadable:,} unreadable"
    return text


def _speed(rates: Rates) -> list[str]:
    """Rows and bytes per second; none of what stands still, such as reading after the last byte."""
    rows, megabytes = rates.rows_per_second, rates.bytes_per_second / 1e6
    return [
        *([f"{rows:,.0f} rows/s"] if rows >= 0.5 else []),
        *([f"{megabytes:,.1f} MB/s"] if megabytes >= 0.05 else []),
    ]


def lost_rows(snapshot: Mapping[str, Any]) -> tuple[int, int]:
    """Number of rows that transforms dropped, and of rows that could not be decoded."""
    lost = {"transform": 0, "decode": 0}
    for stage in snapshot["stages"]:
        if stage["kind"] in lost:
            lost[stage["kind"]] += max(0, stage["rows_in"] - stage["rows_out"])
    return lost["transform"], lost["decode"]


def _known_rows(source: Source) -> int | None:
    hint = getattr(source, "size_hint", None)
    if not callable(hint):
        return None
    try:
        rows = hint()
    except (PenstockError, ValueError, OSError):
        return None  # a damaged file: reading it raises with its name and place
    return rows if isinstance(rows, int) else None


def closing_table(report: Report, *, budget_bytes: int) -> Table:
    """Rows in and out, dropped and changed rows by reason, time, speed, memory and bottleneck."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    for label, figure, remark in report.lines(budget_bytes=budget_bytes):
        table.add_row(label, figure, Text(remark))
    return table
