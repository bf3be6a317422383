"""`python -m penstock.cli.completion` writes the table again."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.completion.light_commands import table_source

if __name__ == "__main__":
    Path(__file__).with_name("table.py").write_text(table_source(), encoding="utf-8")
