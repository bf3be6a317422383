"""Table at the end of a run."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from penstock.pipeline.report import Report


def closing_table(report: Report, *, budget_bytes: int) -> Table:
    """Rows in and out, dropped and changed rows by reason, time, speed, memory and bottleneck."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    for label, figure, remark in report.lines(budget_bytes=budget_bytes):
        table.add_row(label, figure, Text(remark))
    return table
