"""Markdown tables that are aligned as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table with columns as wide as their longest cell; all but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths)))
        return f"| {' | '.join([first, *rest])} |"

    rule = f"|{'|'.join('-' * (w + 1) + ('-' if i == 0 else ':') for i, w in enumerate(widths))}|"
    return "\n".join([line(headers), rule, *map(line, rows)])
