"""Amounts as people read them: counts with their noun, shares, durations. Bytes are in `memory.budget`."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def percent(share: float | None) -> str:
    """`12.3%`, with more digits close to 0 or 1; a dash for None."""
    if share is None:
        return "-"
    return f"{share:.{1 if 0.001 <= share <= 0.999 or share in (0, 1) else 3}%}"


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
