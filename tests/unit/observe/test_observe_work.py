"""Progress of work that is no pipeline, and what all displays have in common."""

from __future__ import annotations

import io
import re
import threading
import time

import pytest
from rich.console import Console

from penstock.observe import LineDisplay, LiveDisplay, Moment, WorkProgress, display_on, is_live, work_progress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FULL = Moment(
    63.0, 0.42, 124.0, ("rows", "20,883 in, 19,840 out, 1,043 dropped"), ["5,349 rows/s", "9.1 MB/s"], 12,
    (180 << 20, 1 << 30), "GopherQuality() is the bottleneck: 1 worker busy 100% of the time, 95% of it there",
)  # fmt: skip


def terminal(width: int = 80, **environment: str) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"} | environment)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return ESCAPES.sub("", console.file.getvalue())


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_where_escape_codes_are_not_wanted_progress_is_lines(environment: dict[str, str]) -> None:
    console = terminal(**environment)
    assert not is_live(console)
    with display_on(console, "planning a.yaml") as display:
        display(Moment(4.0, 0.1))
        display(Moment(6.0, 0.5, 6.0, ("steps", "20"), ["3 steps/s"]))
    assert isinstance(console.file, io.StringIO)
    line = "penstock: planning a.yaml: 50% done; 6.0 s, about 6.0 s left; steps 20; 3 steps/s\n"
    assert console.file.getvalue() == line
    assert is_live(terminal())


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120, 200])
def test_no_line_is_as_wide_as_the_terminal(width: int) -> None:
    console = terminal(width)
    with LiveDisplay(console, "JsonlSource('a.jsonl') -> Lower('text') -> ParquetSink('b.parquet')" * 2) as display:
        display(FULL)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", shown(console)) if line.strip()]
    assert max(map(len, lines)) <= width - 3
    assert any(line.startswith("done") and "42%" in line for line in lines)
    assert any("━" in line for line in lines) == (width >= 60)


def test_work_that_ends_within_a_second_shows_nothing() -> None:
    console = terminal()
    with work_progress("reading", unit="rows", console=console) as progress:
        progress(10, 20)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_work_is_drawn_while_a_call_counts_nothing() -> None:
    lines: list[str] = []
    drawn = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        drawn.set()

    with WorkProgress(LineDisplay(write, first_seconds=0.5)):
        assert drawn.wait(60)  # as a call that loads a model would
    assert re.fullmatch(r"\d+\.\d s", lines[0])


@pytest.mark.parametrize(
    ("unit", "done", "total", "counts"),
    [
        ("rows", 1500, 2000, ("rows", "1,500 of 2,000")),
        ("bytes", 3 << 20, 4 << 20, ("read", "3.0 MiB of 4.0 MiB")),
        ("entries", 12, None, ("entries", "12")),
        ("seconds", 3, 4, None),
        ("", 0, None, None),
    ],
)
def test_figures_have_their_unit(unit: str, done: float, total: float | None, counts: tuple[str, str] | None) -> None:
    progress = WorkProgress(LineDisplay(lambda line: None), unit=unit)
    progress(done, total)
    moment = progress.moment()
    assert moment.counts == counts
    assert moment.share == (None if total is None else 0.75)


def test_the_time_left_is_that_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = WorkProgress(LineDisplay(lambda line: None), unit="steps")
    now[0] += 30.0  # to open a store: no part of the speed
    progress.moment()
    for second in range(1, 5):
        now[0] += 1.0
        progress(20 * second, 200, note="the disk is slow")
        moment = progress.moment()
    assert moment.speeds == ["20 steps/s"]
    assert moment.seconds_left == pytest.approx(6.0)
    assert moment.bottleneck == "the disk is slow"
    progress(90, share=0.5)
    assert progress.moment().share == 0.5


def test_an_inner_display_hides_the_outer_one() -> None:
    console = terminal()
    lines: list[str] = []
    with LiveDisplay(console, "outer") as outer:
        outer(FULL)
        with LineDisplay(lines.append, first_seconds=0.0) as inner:
            before = shown(console)
            outer(FULL)
            inner(FULL)
            assert shown(console) == before
        assert len(lines) == 1
        outer(FULL)
        assert shown(console) != before


def test_a_cleared_display_leaves_the_screen_and_returns() -> None:
    console = terminal()
    with LiveDisplay(console, "outer") as display:
        display(FULL)
        display.clear()
        assert isinstance(console.file, io.StringIO)
        raw = console.file.getvalue()
        assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor is given back
        display(FULL)
        assert len(console.file.getvalue()) > len(raw)


def test_work_goes_on_when_nobody_reads_its_progress() -> None:
    tried = threading.Event()

    def write(line: str) -> None:
        tried.set()
        raise BrokenPipeError

    with WorkProgress(LineDisplay(write, first_seconds=0.5)) as progress:
        assert tried.wait(60)
        progress(1, 2)
