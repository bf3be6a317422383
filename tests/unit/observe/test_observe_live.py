from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from penstock._amounts import format_seconds
from penstock.observe import Extent, LineProgress, LiveProgress, pipeline_progress, progress_on
from penstock.pipeline import Pipeline
from penstock.sinks import MemorySink
from penstock.sources import MemorySource

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ={"TERM": "xterm"})


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def shown(to: Console) -> str:
    """What was drawn, without colours and cursor movements."""
    return ESCAPES.sub("", written(to))


def snapshot(seconds: float, rows: int, *, dropped: int = 0, unreadable: int = 0, workers: int = 2) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "rows_in": rows,
        "rows_out": rows - dropped - unreadable,
        "bytes_in": rows * 1000,
        "rows_done": rows,
        "file_bytes_done": None,
        "memory": {"used": 32 << 20, "limit": 128 << 20, "peak": 64 << 20, "by_owner": {}},
        "workers": workers,
        "stages": [
            {"kind": "decode", "rows_in": rows, "rows_out": rows - unreadable},
            {"kind": "transform", "rows_in": rows - unreadable, "rows_out": rows - unreadable - dropped},
        ],
        "bottleneck": "Lower('text') is the bottleneck",
    }


def interrupted(display: LiveProgress) -> None:
    with display as progress:
        progress(snapshot(1.0, 10))
        raise KeyboardInterrupt


def test_the_display_suits_the_console() -> None:
    assert isinstance(progress_on(console(terminal=True), Extent(), "t"), LiveProgress)
    assert isinstance(progress_on(console(terminal=False), Extent(), "t"), LineProgress)


def test_the_live_display_shows_speed_memory_and_the_bottleneck() -> None:
    screen = console(terminal=True)
    with LiveProgress(screen, Extent(rows=40_000), "A -> B  [budget 128.0 MiB]") as progress:
        progress(snapshot(1.0, 10_000))
        progress(snapshot(2.0, 20_000, dropped=5_000, unreadable=3))
    text = shown(screen)
    assert "A -> B  [budget 128.0 MiB]" in text
    assert "50%  2.0 s, about 2.0 s left" in text
    assert "25%  32.0 MiB of 128.0 MiB" in text
    assert re.search(r"20,000 in.*14,997 out", text)
    assert re.search(r"10,000 rows.*10\.0", text)
    assert "Lower('text')" in text


def test_the_live_display_does_without_a_known_end() -> None:
    screen = console(terminal=True)
    with LiveProgress(screen, Extent(), "A") as progress:
        progress(snapshot(1.0, 10_000, workers=1))
    text = shown(screen)
    assert "left" not in text
    assert "1 worker\n" in re.sub(r" *\r?\n", "\n", text)


def test_the_live_display_gives_the_cursor_back_after_an_error() -> None:
    screen = console(terminal=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(LiveProgress(screen, Extent(), "A"))
    raw = written(screen)
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_a_log_gets_short_lines_less_and_less_often() -> None:
    log = console(terminal=False)
    with LineProgress(log, Extent(rows=100_000)) as progress:
        for quarter in range(1, 100):
            progress(snapshot(quarter / 4, 1_000 * quarter))
    assert written(log).splitlines() == [
        f"{done}% done; {passed} s, about {left} s left; rows {rows},000 in, {rows},000 out; 4,000 rows/s; 4.0 MB/s"
        for done, passed, left, rows in [(20, "5.0", 20, 20), (40, 10, 15, 40), (60, 15, 10, 60), (90, 22, "2.5", 90)]
    ]
    lines: list[str] = []
    with LineProgress(lines.append, Extent()) as progress:
        for minute in range(10 * 60):
            progress(snapshot(60.0 * minute, minute))
    assert 60 < len(lines) < 80  # ten hours
    assert max(map(len, lines)) < 100


def test_what_stands_still_has_no_speed() -> None:
    lines: list[str] = []
    with LineProgress(lines.append, Extent(rows=100), first_seconds=0.0) as progress:
        for second in range(10):
            progress(snapshot(float(second), 60) | {"rows_done": 50})
    assert lines[-1] == "50% done; 8.0 s; rows 60 in, 60 out"


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_program_without_a_terminal_gets_lines_in_its_log_or_on_standard_error(
    level: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(level, "penstock")
    with pipeline_progress(Pipeline(MemorySource([{"a": 1}]), [], MemorySink(), budget="8 MiB")) as progress:
        progress(snapshot(1.0, 1))
        progress(snapshot(6.0, 1))
    lines = caplog.messages if level == "INFO" else capsys.readouterr().err.removeprefix("penstock: ").splitlines()
    assert lines == ["MemorySource(list, 1 rows): 100% done; 6.0 s; rows 1 in, 1 out"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_real_run_can_be_watched(terminal: bool) -> None:
    screen = console(terminal=terminal)
    pipeline = Pipeline(MemorySource([{"a": i} for i in range(1000)]), [], MemorySink(), budget="8 MiB")
    progress = (
        LiveProgress(screen, Extent.of(pipeline.source), str(pipeline), first_seconds=0.0)
        if terminal
        else LineProgress(screen, Extent.of(pipeline.source), first_seconds=0.0)
    )
    with progress:
        pipeline.run(progress=progress)
    assert "1,000 in, 1,000 out" in shown(screen)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (7620, "2 h 07 min")],
)
def test_seconds_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
