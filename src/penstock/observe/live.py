"""Progress of a run: a live display on a terminal, a line every few seconds elsewhere.

    with progress_on(Console(stderr=True), Extent.of(pipeline.source), str(pipeline)) as progress:
        report = pipeline.run(progress=progress)

The thread that waits for the run calls them with snapshots; they start no thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.memory.budget import format_bytes
from penstock.observe.figures import Extent, Rates, lost_rows

__all__ = ["LineProgress", "LiveProgress", "format_seconds", "progress_on"]

_LINE_SECONDS = 5.0


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


def format_seconds(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
