"""Report of a run as a table."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from penstock.memory.budget import format_bytes
from penstock.observe.live import format_seconds
from penstock.pipeline.metrics import TOKENS, Report

__all__ = ["closing_table"]


def closing_table(report: Report, *, budget_bytes: int) -> Table:
    """Rows in and out, dropped and changed rows by reason, time, speed, memory and bottleneck."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("rows in", f"{report.rows_in:,}", _origin(report))
    table.add_row("rows out", f"{report.rows_out:,}", "")
    counted = {
        "dropped": report.dropped,
        "changed": {reason: n for reason, n in report.changed.items() if not reason.startswith(TOKENS)},
        "tokens lost": report.dropped_tokens,
        "quarantined": report.quarantined,
        "skipped": report.skipped,
    }
    for label, reasons in counted.items():
        by_count = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        for number, (reason, rows) in enumerate(by_count):
            table.add_row(label if number == 0 else "", f"{rows:,}", Text(reason))
    table.add_row("time", format_seconds(report.seconds), _speed(report))
    table.add_row("peak memory", format_bytes(report.peak_bytes), f"of a budget of {format_bytes(budget_bytes)}")
    table.add_row("bottleneck", "", Text(report.bottleneck))
    return table


def _origin(report: Report) -> str:
    return "including those before the checkpoint that was resumed" if report.resumed else ""


def _speed(report: Report) -> str:
    """From the figures of the stages: after a resume, the rows of the report are those of several runs."""
    if report.seconds <= 0 or not report.stages:
        return ""
    rows = sum(stage["rows_in"] for stage in report.stages if stage["kind"] in ("source", "decode"))
    megabytes = report.stages[0]["bytes_in"] / 1e6
    return f"{rows / report.seconds:,.0f} rows/s, {megabytes / report.seconds:,.1f} MB/s"
