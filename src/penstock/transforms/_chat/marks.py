"""The marks that generation blocks leave in a text. No data can contain them: lone surrogates do not exist in UTF-8."""

from __future__ import annotations

__all__ = ["END", "ROW", "START", "unmarked"]

START, END, ROW = "\ud800", "\ud801", "\ud802"
"""Where a span begins and ends, and what stands between rows."""


def unmarked(text: str) -> str:
    """The text without marks."""
    return text.replace(START, "").replace(END, "")
