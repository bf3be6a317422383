"""Displays of progress: live at the bottom of a terminal, or short lines elsewhere.

Where escape codes are not wanted (`NO_COLOR`, `TERM=dumb`, no terminal), progress is lines.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock._amounts import counted, format_seconds
from penstock.memory.budget import format_bytes

_WINDOW_SECONDS, _WINDOW_SHARE = 5.0, 0.2


@dataclass(frozen=True, slots=True)
class Moment:
    """State of work at one time."""

    seconds: float
    """Since its beginning."""
    share: float | None = None
    """Part of it that is done, from 0 to 1; None if its size is not known."""
    seconds_left: float | None = None
    counts: tuple[str, str] | None = None
    """What is counted, and the figures: `("rows", "20 in, 18 out")`."""
    speeds: Sequence[str] = ()
    workers: int | None = None
    memory: tuple[int, int] | None = None
    """Bytes in use, and their limit."""
    bottleneck: str = ""


class RateWindow:
    """Speed of figures over the last few seconds, or the last fifth of longer work."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, seconds: float, *figures: float) -> None:
        """Note the figures at a time."""
        self._marks.append((seconds, figures))
        window = max(_WINDOW_SECONDS, _WINDOW_SHARE * seconds)
        while len(self._marks) > 2 and seconds - self._marks[1][0] >= window:
            self._marks.popleft()

    def clear(self) -> None:
        """Forget everything: what was before is not part of the speed."""
        self._marks.clear()

    def per_second(self, figure: int = 0) -> float:
        """Speed of one of the figures."""
        if not self._marks:
            return 0.0
        (before, first), (now, last) = self._marks[0], self._marks[-1]
        if len(self._marks) == 1:
            return last[figure] / now if now > 0 else 0.0
        return (last[figure] - first[figure]) / max(1e-9, now - before)

    def __len__(self) -> int:
        return len(self._marks)


LIVE_SECONDS = 1.0
"""Time before a live display appears: shorter work shows nothing."""
LINE_SECONDS, _LONGEST_LINE_SECONDS = 5.0, 600.0
_WIDEST_BAR, _NARROWEST_BAR, _LABEL = 30, 6, 6
_MARGIN = 3
"""Columns that stay free: the `^C` of a terminal would begin a new line, and spoil the removal of the display."""
_lock = threading.RLock()
_open: list[_Display] = []
"""Displays that are open, the innermost last: only that one shows anything."""


def is_live(console: Console) -> bool:
    """True if a console can show a live display, and escape codes are welcome."""
    return console.is_terminal and not console.is_dumb_terminal and not console.no_color


def display_on(console: Console, title: str) -> LiveDisplay | LineDisplay:
    """The display that suits a console."""
    if is_live(console):
        return LiveDisplay(console, title)
    write = printer(console)
    return LineDisplay(lambda line: write(f"penstock: {title}: {line}"))


class _Display:
    """Display that shows nothing while another one is open inside it."""

    @property
    def covered(self) -> bool:
        return bool(_open) and _open[-1] is not self

    def clear(self) -> None:
        """Remove what is on the screen until the next moment, so that lines can be printed."""

    def __enter__(self) -> Self:
        with _lock:
            if _open:
                _open[-1].clear()
            _open.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _lock:
            if self in _open:
                _open.remove(self)
            self.clear()


class LiveDisplay(_Display):
    """Live display at the bottom of the terminal, after a second; removed at the end."""

    def __init__(self, console: Console, title: str, *, first_seconds: float = LIVE_SECONDS) -> None:
        self._console, self._title, self._first_seconds = console, title, first_seconds
        self._live: Live | None = None

    def __call__(self, moment: Moment) -> None:
        if moment.seconds < self._first_seconds:
            return
        with _lock:
            if self.covered:
                return
            if self._live is None:
                # Without a refresh thread: only a new moment changes the display.
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(drawn(moment, self._title, self._console.width), refresh=True)

    def clear(self) -> None:
        with _lock:
            live, self._live = self._live, None
            if live is not None:
                live.stop()


class LineDisplay(_Display):
    """Short lines of plain text: after some seconds, then less and less often."""

    def __init__(self, write: Callable[[str], object], *, first_seconds: float = LINE_SECONDS) -> None:
        self._write = write
        self._first_seconds = self._next_at = first_seconds

    def __call__(self, moment: Moment) -> None:
        if moment.seconds < self._next_at or self.covered:
            return
        self._next_at = moment.seconds + min(max(self._first_seconds, moment.seconds / 2), _LONGEST_LINE_SECONDS)
        done = [f"{moment.share:.0%} done"] if moment.share is not None else []
        counts = [" ".join(moment.counts)] if moment.counts is not None else []
        self._write("; ".join([*done, _timing(moment), *counts, *moment.speeds]))


def printer(console: Console) -> Callable[[str], object]:
    """Function that prints a line as it is."""
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def drawn(moment: Moment, title: str, width: int) -> RenderableType:
    """The live display of a moment: a line for each thing, none quite as long as the terminal is wide."""
    width = max(20, width - _MARGIN)
    bars = [("done" if moment.share is not None else "time", moment.share, "cyan", _timing(moment))]
    if moment.memory is not None:
        used, limit = moment.memory
        bars.append(("memory", used / limit, "magenta", f"{format_bytes(used)} of {format_bytes(limit)}"))
    longest = max(cell_len(text) for *_, text in bars)
    bar_width = min(_WIDEST_BAR, width - _LABEL - longest - len("  " * 3) - len("100%"))
    grid = Table.grid(padding=(0, 2))
    with_bars = bar_width >= _NARROWEST_BAR and any(share is not None for _, share, *_ in bars)
    for label, share, colour, text in bars:
        bar: list[RenderableType] = [_bar(share, colour, bar_width)] if with_bars else []
        part = [] if share is None and not with_bars else [Text("" if share is None else f"{share:4.0%}")]
        grid.add_row(Text(f"{label:<{_LABEL}}"), *bar, *part, Text(text, no_wrap=True, overflow="ellipsis"))
    lines: list[RenderableType] = [_line(title, "bold"), grid]
    if moment.counts is not None:
        lines.append(_line(f"{moment.counts[0]:<{_LABEL}}  {moment.counts[1]}"))
    workers = [] if moment.workers is None else [counted(moment.workers, "worker")]
    if moment.speeds or workers:
        lines.append(_line(f"{'speed':<{_LABEL}}  {', '.join([*moment.speeds, *workers])}"))
    if moment.bottleneck:
        lines.append(Text(moment.bottleneck, style="yellow"))
    return Constrain(Group(*lines), width)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _bar(share: float | None, colour: str, width: int) -> RenderableType:
    if share is None:
        return Text("")
    return ProgressBar(1.0, min(1.0, share), width=width, complete_style=colour)


def _timing(moment: Moment) -> str:
    elapsed, left = format_seconds(moment.seconds), moment.seconds_left
    return f"{elapsed}, about {format_seconds(left)} left" if left is not None else elapsed
