"""Section of a quarantine file: bad rows by reason, with an example of each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

from penstock.html import Section, note, section, table
from penstock.html.charts import bar_chart
from penstock.report.page_parts import chart_figure
from penstock.report.run_record import parsed_line

_MOST_BYTES = 64 << 20
_MOST_REASONS, _SHOWN_REASONS, _EXAMPLE_CHARACTERS = 1000, 25, 300
_DIGITS = re.compile(r"\d+")


def quarantine_section(path: Path) -> Section:
    """Reasons of the first 64 MiB of a quarantine file; numbers in a reason do not tell reasons apart."""
    counts: dict[str, int] = {}
    examples: dict[str, tuple[str, str, str, str]] = {}
    total = unreadable = others = read = 0
    with path.open("rb") as file:
        for line in file:
            read += len(line)
            if read > _MOST_BYTES:
                break
            facts = parsed_line(line)
            if facts is None:
                unreadable += 1
                continue
            total += 1
            reason = f"{facts.get('stage')}: {_DIGITS.sub('N', str(facts.get('reason')))}"[:200]
            if reason not in counts and len(counts) >= _MOST_REASONS:
                others += 1
                continue
            counts[reason] = counts.get(reason, 0) + 1
            examples.setdefault(reason, _example(facts))
    ranked: list[tuple[str, float]] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ranked[:_SHOWN_REASONS]
    parts: list[object] = [note(f"{total:,} bad rows in {path.name}, by reason.")]
    if read > _MOST_BYTES:
        parts.append(
            note(f"The file is larger than {_MOST_BYTES >> 20} MiB; only its beginning was read.", kind="warning")
        )
    if unreadable:
        parts.append(note(f"{unreadable:,} lines could not be read.", kind="warning"))
    if shown:
        chart = bar_chart(shown, label="Bad rows by reason", unit="rows", most=_SHOWN_REASONS)
        parts.append(chart_figure(chart, "Bad rows by reason"))
        rows = [examples[reason] for reason, _ in shown]
        parts.append(table(rows, ["file", "row", "reason", "content"], caption="First row of each reason"))
    hidden = len(ranked) - len(shown)
    if hidden or others:
        parts.append(
            note(f"{hidden:,} rarer reasons are not shown" + (f", and {others:,} rows of others." if others else "."))
        )
    return section(f"Quarantine: {path.name}", *parts)


def _example(facts: dict[str, Any]) -> tuple[str, str, str, str]:
    content = next((facts[name] for name in ("raw", "data", "raw_base64") if facts.get(name) is not None), "")
    text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
    cut = text[:_EXAMPLE_CHARACTERS] + (f" ... ({len(text):,} characters)" if len(text) > _EXAMPLE_CHARACTERS else "")
    return str(facts.get("file") or ""), str(facts.get("row")), str(facts.get("reason"))[:500], cut
