"""Progress of a run: a live display on a terminal, a few lines elsewhere; a table at its end.

    with progress_on(Console(stderr=True), Extent.of(pipeline.source), str(pipeline)) as progress:
        report = pipeline.run(progress=progress)

The thread that waits for the run calls them with snapshots; they start no thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.errors import PenstockError
from penstock.memory.budget import format_bytes
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.report import Report, format_seconds
from penstock.pipeline.stages import Source

__all__ = [
    "Extent",
    "LineProgress",
    "LiveProgress",
    "Rates",
    "closing_table",
    "lost_rows",
    "pipeline_progress",
    "progress_on",
]

_log = logging.getLogger(__name__)
_LINE_SECONDS, _LONGEST_LINE_SECONDS = 5.0, 600.0
_WINDOW_SECONDS, _WINDOW_SHARE = 5.0, 0.2


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


@dataclass(frozen=True, slots=True)
class _Mark:
    seconds: float
    rows: int
    nbytes: int
    share: float | None


class Rates:
    """Speed over the last few seconds, or the last fifth of a longer run, from snapshots."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._marks: deque[_Mark] = deque()

    def add(self, snapshot: Mapping[str, Any]) -> None:
        now = _Mark(snapshot["seconds"], snapshot["rows_done"], snapshot["bytes_in"], self._extent.share(snapshot))
        if not now.nbytes:
            self._marks.clear()  # the time before the first row (a scan for the schema) is not part of the speed
        self._marks.append(now)
        window = max(_WINDOW_SECONDS, _WINDOW_SHARE * now.seconds)
        while len(self._marks) > 2 and now.seconds - self._marks[1].seconds >= window:
            self._marks.popleft()

    @property
    def rows_per_second(self) -> float:
        return self._per_second(lambda mark: mark.rows)

    @property
    def bytes_per_second(self) -> float:
        return self._per_second(lambda mark: mark.nbytes)

    @property
    def share(self) -> float | None:
        """Share of the input that is done, from 0 to 1."""
        return self._marks[-1].share if self._marks else None

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the current speed; None while speed or size is not known."""
        share = self.share
        if share is None or len(self._marks) < 2:
            return None  # one snapshot of a resumed run has a share, and no speed
        speed = self._per_second(lambda mark: mark.share or 0.0)
        return (1.0 - share) / speed if speed > 0 else None

    def _per_second(self, figure: Callable[[_Mark], float]) -> float:
        if not self._marks:
            return 0.0
        first, last = self._marks[0], self._marks[-1]
        if first is last:
            return figure(last) / last.seconds if last.seconds > 0 else 0.0
        return (figure(last) - figure(first)) / max(1e-9, last.seconds - first.seconds)


def progress_on(console: Console, extent: Extent, title: str) -> LiveProgress | LineProgress:
    """A live display if the console is a terminal, else lines for a log file."""
    return LiveProgress(console, extent, title) if console.is_terminal else LineProgress(console, extent)


def pipeline_progress(pipeline: Pipeline) -> LiveProgress | LineProgress:
    """Progress of a pipeline inside a program: live if standard error is a terminal, else lines of its log, or, where
    that takes no lines of level INFO, on standard error."""
    console, extent = Console(stderr=True), Extent.of(pipeline.source)
    if console.is_terminal:
        return LiveProgress(console, extent, str(pipeline))
    if _log.isEnabledFor(logging.INFO):
        return LineProgress(lambda line: _log.info("%r: %s", pipeline.source, line), extent)
    write = _print_on(console)
    return LineProgress(lambda line: write(f"penstock: {pipeline.source!r}: {line}"), extent)


class LiveProgress:
    """Live display at the bottom of the terminal; removed at the end of the run."""

    def __init__(self, console: Console, extent: Extent, title: str) -> None:
        self._rates = Rates(extent)
        self._title = title
        # Without a refresh thread: only a new snapshot changes the display.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __call__(self, snapshot: Mapping[str, Any]) -> None:
        self._rates.add(snapshot)
        self._live.update(self._drawn(snapshot), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def _drawn(self, snapshot: Mapping[str, Any]) -> RenderableType:
        used, limit = snapshot["memory"]["used"], snapshot["memory"]["limit"]
        bars = Table.grid(padding=(0, 2))
        bars.add_row("done  ", *_bar(self._rates.share, "cyan"), Text(_timing(snapshot, self._rates)))
        bars.add_row("memory", *_bar(used / limit, "magenta"), Text(_memory(snapshot)))
        return Group(
            Text(self._title, style="bold", no_wrap=True, overflow="ellipsis"),
            bars,
            Text(f"rows    {_rows(snapshot)}"),
            Text(f"speed   {', '.join([*_speed(self._rates), _workers(snapshot)])}"),
            Text(snapshot["bottleneck"], style="yellow"),
        )


class LineProgress:
    """Short lines of plain text: after some seconds, then less and less often.

    `write` is a console, or a function that takes a line.
    """

    def __init__(
        self, write: Console | Callable[[str], object], extent: Extent, *, first_seconds: float = _LINE_SECONDS
    ) -> None:
        self._write = _print_on(write) if isinstance(write, Console) else write
        self._rates = Rates(extent)
        self._first_seconds = self._next_at = first_seconds

    def __call__(self, snapshot: Mapping[str, Any]) -> None:
        self._rates.add(snapshot)
        if snapshot["seconds"] < self._next_at:
            return
        seconds = snapshot["seconds"]
        self._next_at = seconds + min(max(self._first_seconds, seconds / 2), _LONGEST_LINE_SECONDS)
        share = self._rates.share
        done = [f"{share:.0%} done"] if share is not None else []
        self._write("; ".join([*done, _timing(snapshot, self._rates), f"rows {_rows(snapshot)}", *_speed(self._rates)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return


def closing_table(report: Report, *, budget_bytes: int) -> Table:
    """Rows in and out, dropped and changed rows by reason, time, speed, memory and bottleneck."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    for label, figure, remark in report.lines(budget_bytes=budget_bytes):
        table.add_row(label, figure, Text(remark))
    return table


def _print_on(console: Console) -> Callable[[str], object]:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def _bar(share: float | None, colour: str) -> tuple[RenderableType, RenderableType]:
    if share is None:
        return Text("?", style="dim"), Text("")
    return ProgressBar(1.0, min(1.0, share), width=30, complete_style=colour), Text(f"{share:4.0%}")


def _timing(snapshot: Mapping[str, Any], rates: Rates) -> str:
    left = rates.seconds_left
    elapsed = format_seconds(snapshot["seconds"])
    return f"{elapsed}, about {format_seconds(left)} left" if left is not None else elapsed


def _memory(snapshot: Mapping[str, Any]) -> str:
    return f"{format_bytes(snapshot['memory']['used'])} of {format_bytes(snapshot['memory']['limit'])}"


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


def _workers(snapshot: Mapping[str, Any]) -> str:
    return f"{snapshot['workers']} worker{'s' * (snapshot['workers'] != 1)}"


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
