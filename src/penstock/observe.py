"""Progress of a run: a live display on a terminal, a line every few seconds elsewhere; a table at its end.

    with progress_on(Console(stderr=True), Extent.of(pipeline.source), str(pipeline)) as progress:
        report = pipeline.run(progress=progress)

The thread that waits for the run calls them with snapshots; they start no thread.
"""

from __future__ import annotations

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
from penstock.files.listing import split_suffix
from penstock.memory.budget import format_bytes
from penstock.pipeline.report import Report, format_seconds
from penstock.pipeline.stages import BlockSource, Source
from penstock.sources.columnar import ParquetSource

__all__ = ["Extent", "LineProgress", "LiveProgress", "Rates", "closing_table", "lost_rows", "progress_on"]

_LINE_SECONDS = 5.0
_WINDOW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of the input, as far as it is known without reading it."""

    files: int | None = None
    file_bytes: int | None = None
    """Size of the files on disk, compressed or not."""
    rows: int | None = None
    readable_bytes: int | None = None
    """Bytes that the source will have read at its end; known if it reads files that are not compressed."""

    @classmethod
    def of(cls, source: Source) -> Self:
        """The extent of a source, from file sizes and footers. Raises for a missing file."""
        files = getattr(source, "files", None)
        if not isinstance(files, list):
            return cls(rows=_known_rows(source))
        size = sum(file.stat().st_size for file in files)
        uncompressed = (
            isinstance(source, BlockSource)
            and not isinstance(source, ParquetSource)
            and not any(split_suffix(file)[1] for file in files)
        )
        return cls(len(files), size, _known_rows(source), size if uncompressed else None)

    def share(self, snapshot: Mapping[str, Any]) -> float | None:
        """Share of the input that has been read, from 0 to 1; None if the size is not known."""
        for whole, read in ((self.rows, snapshot["rows_in"]), (self.readable_bytes, snapshot["bytes_in"])):
            if whole:
                return min(1.0, float(read) / whole)
        return None


@dataclass(frozen=True, slots=True)
class _Mark:
    seconds: float
    rows: int
    nbytes: int
    share: float | None


class Rates:
    """Speed over the last few seconds, from snapshots."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._marks: deque[_Mark] = deque()

    def add(self, snapshot: Mapping[str, Any]) -> None:
        now = _Mark(snapshot["seconds"], snapshot["rows_in"], snapshot["bytes_in"], self._extent.share(snapshot))
        if not now.nbytes:
            self._marks.clear()  # the time before the first row (a scan for the schema) is not part of the speed
        self._marks.append(now)
        while len(self._marks) > 2 and now.seconds - self._marks[1].seconds >= _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def rows_per_second(self) -> float:
        return self._per_second(lambda mark: mark.rows)

    @property
    def bytes_per_second(self) -> float:
        return self._per_second(lambda mark: mark.nbytes)

    @property
    def share(self) -> float | None:
        """Share of the input that has been read, from 0 to 1."""
        return self._marks[-1].share if self._marks else None

    @property
    def seconds_left(self) -> float | None:
        """Remaining time at the current speed; None while speed or size is not known."""
        share = self.share
        speed = self._per_second(lambda mark: mark.share or 0.0)
        return (1.0 - share) / speed if share is not None and speed > 0 else None

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
        bars.add_row("read  ", *_bar(self._rates.share, "cyan"), Text(_timing(snapshot, self._rates)))
        bars.add_row("memory", *_bar(used / limit, "magenta"), Text(_memory(snapshot)))
        return Group(
            Text(self._title, style="bold", no_wrap=True, overflow="ellipsis"),
            bars,
            Text(f"rows    {_rows(snapshot)}"),
            Text(f"speed   {_speed(self._rates)}, {_workers(snapshot)}"),
            Text(snapshot["bottleneck"], style="yellow"),
        )


class LineProgress:
    """One line of plain text every few seconds."""

    def __init__(self, console: Console, extent: Extent, *, every_seconds: float = _LINE_SECONDS) -> None:
        self._console = console
        self._rates = Rates(extent)
        self._every_seconds = every_seconds
        self._next_at = every_seconds

    def __call__(self, snapshot: Mapping[str, Any]) -> None:
        self._rates.add(snapshot)
        if snapshot["seconds"] < self._next_at:
            return
        self._next_at = snapshot["seconds"] + self._every_seconds
        share = self._rates.share
        parts = [
            *([f"{share:.0%} read"] if share is not None else []),
            _timing(snapshot, self._rates),
            f"rows {_rows(snapshot)}",
            _speed(self._rates),
            f"memory {_memory(snapshot)}",
            _workers(snapshot),
            snapshot["bottleneck"],
        ]
        self._console.print("; ".join(parts), markup=False, highlight=False, soft_wrap=True)

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


def _speed(rates: Rates) -> str:
    return f"{rates.rows_per_second:,.0f} rows/s, {rates.bytes_per_second / 1e6:,.1f} MB/s"


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
